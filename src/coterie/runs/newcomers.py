"""Clients that a run never trained: assigned by its method's rule, adapted if the method adapts, and evaluated.

They were held out of the run (`--unseen`), or come later with other data (`coterie onboard`). Their test samples are
used for their scores only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.client.steps import adapt, own_model
from coterie.data.federation import Federation
from coterie.engines import make_engine
from coterie.engines.base import Engine
from coterie.errors import ConfigError, DataError
from coterie.methods.base import Algorithm, Personal, S
from coterie.nets.mixture import Served
from coterie.randomness import Rng, uniform
from coterie.runs.loop import evaluation_of, scores_of
from coterie.runs.metrics import METRICS, of_clusters, of_scores


def split_unseen(federation: Federation, share: float, seed: int) -> tuple[Federation, Federation | None]:
    """The clients that take part, and those held out; each client's draw depends on seed and key only."""
    if not share:
        return federation, None
    count = max(1, round(share * len(federation)))
    if count >= len(federation):
        raise ConfigError(
            f"unseen={share:g} leaves none of {len(federation)} clients to train. Use a smaller fraction."
        )
    order = shuffled(federation, Rng.seed(seed).at("unseen"))
    return federation.select(order[count:].sort().values), federation.select(order[:count].sort().values)


def shuffled(federation: Federation, rng: Rng) -> Tensor:
    """Client ids in random order; each client's draw depends on its own key only."""
    return torch.argsort(uniform(rng.keys(federation.keys), 1)[:, 0], stable=True)


def like_the_run(new: Federation, run: Federation) -> Federation:
    """The new clients' data in the form that the run's network takes; data of another form is an error."""
    shapes = [f"samples of shape {data.input_shape}" for data in (new, run)]
    targets = [f"{data.num_classes} classes" if data.num_classes else "numeric targets" for data in (new, run)]
    if new.input_shape != run.input_shape:
        raise DataError(f"{new.name} has {shapes[0]}, but the run was trained on {shapes[1]}.")
    is_other = bool(new.num_classes) != bool(run.num_classes) or new.y.shape[1:] != run.y.shape[1:]
    if is_other or new.num_classes > run.num_classes:
        way_out = "" if is_other else f" Labels must be less than {run.num_classes}."
        raise DataError(f"{new.name} has {targets[0]}, but the run was trained on {targets[1]}.{way_out}")
    if new.class_names != run.class_names and new.class_names and run.class_names:
        unknown = [name for name in new.class_names if name not in run.class_names]
        if unknown:
            raise DataError(f"{new.name} has the class '{unknown[0]}', which the run was not trained on.")
        numbers = torch.tensor([run.class_names.index(name) for name in new.class_names])
        new = replace(new, y=numbers[new.y], class_names=run.class_names)
    if new.groups is not None and new.named_groups and run.named_groups:
        names = tuple(dict.fromkeys(run.named_groups + new.named_groups))  # new groups come after the run's
        numbers = torch.tensor([names.index(name) for name in new.named_groups])
        new = replace(new, groups=numbers[new.groups], named_groups=names)
    # A few clients need not have every class. Raw values of the same type are scaled as those of the run.
    scaled = run if new.x.dtype == run.x.dtype else new
    return replace(new, num_classes=run.num_classes, mean=scaled.mean, std=scaled.std)


@dataclass(frozen=True)
class Newcomers:
    """Clients that are new to a run, assigned and evaluated."""

    federation: Federation
    engine: Engine
    labels: Tensor  # int64 [n]; -1: in no cluster
    personal: Personal  # the model that each is served with
    scores: dict[str, NDArray[Any]]  # on their own test samples, [n] each
    rng: Rng  # of their adaptation
    members: Tensor  # int64 [N]: the clusters of the run's clients
    member_groups: Tensor | None = None  # int64 [N]: their true groups now

    @property
    def ari(self) -> float | None:
        """Agreement of clusters and true groups over newcomers and members; None if groups are unknown, or no newcomer
        is in a cluster.

        Among newcomers alone it would not notice that all of them are in the clusters of other kinds.
        """
        if self.federation.groups is None or self.member_groups is None or not bool((self.labels >= 0).any()):
            return None
        labels = torch.cat([self.members, self.labels])
        groups = torch.cat([self.member_groups, self.federation.groups])
        return METRICS["ari"].value(of_clusters(labels.numpy(), groups.numpy()))

    @property
    def right_kind(self) -> float | None:
        """The share of newcomers in a cluster whose members are mostly of their kind; None if groups are unknown."""
        if self.federation.groups is None or self.member_groups is None:
            return None
        right = 0
        for label, group in zip(self.labels.tolist(), self.federation.groups.tolist(), strict=True):
            there = self.member_groups[self.members == label]
            right += bool(len(there)) and label >= 0 and int(there.bincount().argmax()) == group
        return right / max(1, len(self.labels))

    def summary(self) -> dict[str, Any]:
        """Their number, scores and agreement, for the summary of the run; loss and R2 where there are no classes."""
        known = of_scores(self.scores)

        def means(score: str) -> dict[str, float | None] | None:
            parts = (("micro", f"{score}_micro"), ("macro", score))
            return None if known[score] is None else {part: METRICS[key].value(known) for part, key in parts}

        accuracy = means("accuracy")
        return {
            "clients": len(self.federation),
            "accuracy": accuracy,
            **({"loss": means("loss"), "r2": means("r2")} if accuracy is None else {}),
            "ari": self.ari,
            "right_kind": self.right_kind,
        }

    def rows(self) -> list[dict[str, Any]]:
        """Name, cluster, true group and its name, accuracy (without classes R2) of each; None if unknown."""
        groups, named = self.federation.groups, self.federation.group_names()
        score = "r2" if "r2" in self.scores else "accuracy"
        has_scores = (self.scores["samples"] > 0) & np.array(score in self.scores)
        return [
            {
                "name": name,
                "cluster": None if int(self.labels[i]) < 0 else int(self.labels[i]),
                "group": None if groups is None else int(groups[i]),
                "group_name": None if groups is None else named[int(groups[i])],
                score: float(self.scores[score][i]) if has_scores[i] else None,
            }
            for i, name in enumerate(self.federation.names)
        ]

    def models(self, clients: Tensor | None = None) -> Iterator[tuple[int, Served]]:
        """Clients (by default all) and what they were evaluated with."""
        who = self.engine.everyone() if clients is None else clients
        refs = None if self.personal.refs is None else self.personal.refs[who]
        each = {name: rows[who.to(rows.device)] for name, rows in self.personal.each.items()}
        return personal_models(self.engine, replace(self.personal, refs=refs, each=each), who, self.rng)


def personal_models(engine: Engine, personal: Personal, clients: Tensor, rng: Rng) -> Iterator[tuple[int, Served]]:
    """Clients and what they are served with, adapted if the method adapts."""
    models, refs = personal.models, personal.refs
    if personal.serve is not None:
        parts = personal.serve.parts
        for chunk in engine.call(parts, clients, models=models, refs=refs, each=personal.each, rng=rng):
            bias = chunk.answer.get("bias")
            for place, client in enumerate(chunk.clients.tolist()):
                own = None if bias is None else bias[place]
                yield client, Served(chunk.answer["models"][place], chunk.answer.weights[place], own)
        return
    if personal.adapt is None and models is not None and refs is not None:
        for client, row in zip(clients.tolist(), refs.tolist(), strict=True):
            yield client, Served.of_one(models[row])
        return
    step = own_model if personal.adapt is None else adapt
    work = None if personal.adapt is None else personal.adapt(engine.task.work)
    for chunk in engine.call(step, clients, models=models, refs=refs, work=work, rng=rng):
        for client, row in zip(chunk.clients.tolist(), chunk.answer.params, strict=True):
            yield client, Served.of_one(row)


def onboard(
    algorithm: Algorithm[S],
    state: S,
    engine: Engine,
    federation: Federation,
    round: int,
    rng: Rng,
    groups: Tensor | None = None,
) -> Newcomers:
    """Assign and evaluate clients that are new to the run of `engine`, whose state after `round` is `state`.

    `groups` [N] are the true groups of the run's clients, if known.
    """
    present = replace(federation.at(round), moves=())
    fresh = _engine_like(engine, present)
    # As at the start of the run: the work of the first round, from the common model.
    fresh.begin(0, "start")
    labels = algorithm.assign(state, fresh, fresh.everyone(), rng)
    fresh.begin(0, "evaluate")
    personal = algorithm.personal(replace(state, labels=labels), fresh.everyone())
    point = rng.at("evaluate")
    scores = scores_of(fresh, evaluation_of(fresh, personal, fresh.everyone(), point))
    return Newcomers(present, fresh, labels, personal, scores, point, state.labels, groups)


def _engine_like(engine: Engine, federation: Federation) -> Engine:
    """An engine over other clients, with the same task and server samples."""
    name = engine.describe()["engine"]
    here = name if name in ("loop", "vectorized") else "vectorized"  # the data of newcomers is on this machine
    settings = {"precision": str(engine.dtype).removeprefix("torch.")}
    made = make_engine(here, engine.task, federation, str(engine.device), settings)
    made.reserved = engine.reserved
    return made
