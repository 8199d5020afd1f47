"""Clients that a run never trained: assigned by its own rule, adapted where the method adapts, evaluated.

They come from a share of the run's own clients that was held out (`--unseen`), or later from other data
(`coterie onboard`). Their test samples are used for their score and for nothing else.
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
from coterie.randomness import Rng, uniform
from coterie.runs.loop import evaluate_clients
from coterie.runs.metrics import METRICS, of_clusters, of_scores


def split_unseen(federation: Federation, share: float, seed: int) -> tuple[Federation, Federation | None]:
    """The clients that take part, and those that do not; each client's luck depends on seed and key only."""
    if not share:
        return federation, None
    count = max(1, round(share * len(federation)))
    if count >= len(federation):
        raise ConfigError(f"unseen={share:g} of {len(federation)} clients leaves nobody to train; use a smaller share.")
    luck = uniform(Rng.seed(seed).at("unseen").keys(federation.keys), 1)[:, 0]
    order = torch.argsort(luck, stable=True)
    return federation.select(order[count:].sort().values), federation.select(order[:count].sort().values)


def like_the_run(new: Federation, run: Federation) -> Federation:
    """The new clients' data as the run's network takes them; what it cannot take is refused."""
    if new.input_shape != run.input_shape:
        raise DataError(
            f"{new.name} has samples of shape {new.input_shape}, and the run was trained on {run.input_shape}."
        )
    if bool(new.num_classes) != bool(run.num_classes) or new.y.shape[1:] != run.y.shape[1:]:
        kinds = [f"{d.num_classes} classes" if d.num_classes else "numbers to predict" for d in (new, run)]
        raise DataError(f"{new.name} has {kinds[0]}, and the run was trained on {kinds[1]}.")
    if new.num_classes > run.num_classes:
        raise DataError(
            f"{new.name} has {new.num_classes} classes, and the run was trained on {run.num_classes}: "
            f"labels must be less than {run.num_classes}."
        )
    # A few clients need not have every class. Raw values of one type are scaled as those of the run were.
    scaled = run if new.x.dtype == run.x.dtype else new
    return replace(new, num_classes=run.num_classes, mean=scaled.mean, std=scaled.std)


@dataclass(frozen=True)
class Newcomers:
    """What became of clients that the run had not met."""

    federation: Federation
    engine: Engine
    labels: Tensor  # int64 [n]; -1: in no cluster
    personal: Personal  # the model each of them is served with
    scores: dict[str, NDArray[Any]]  # on their own test samples, [n] each
    rng: Rng  # what their adaptation hangs on

    @property
    def ari(self) -> float | None:
        """Agreement of their clusters with their true groups; None where those are not known."""
        groups = self.federation.groups
        return METRICS["ari"].value(of_clusters(self.labels.numpy(), None if groups is None else groups.numpy()))

    def summary(self) -> dict[str, Any]:
        """Their number, accuracy and agreement, as the run's summary has them."""
        known = of_scores(self.scores)
        means = {part: METRICS[key].value(known) for part, key in (("micro", "accuracy_micro"), ("macro", "accuracy"))}
        accuracy = None if known["accuracy"] is None else means
        return {"clients": len(self.federation), "accuracy": accuracy, "ari": self.ari}

    def rows(self) -> list[dict[str, Any]]:
        """Name, cluster, true group and accuracy of each; None where there is none."""
        groups = self.federation.groups
        has_scores = (self.scores["samples"] > 0) & np.array("accuracy" in self.scores)
        return [
            {
                "name": name,
                "cluster": None if int(self.labels[i]) < 0 else int(self.labels[i]),
                "group": None if groups is None else int(groups[i]),
                "accuracy": float(self.scores["accuracy"][i]) if has_scores[i] else None,
            }
            for i, name in enumerate(self.federation.names)
        ]

    def models(self, clients: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
        """Clients (by default all) and their personal models [P], the ones that were evaluated."""
        who = self.engine.everyone() if clients is None else clients
        models, refs = self.personal.models, None if self.personal.refs is None else self.personal.refs[who]
        if self.personal.adapt is None and models is not None and refs is not None:
            yield from ((client, models[row]) for client, row in zip(who.tolist(), refs.tolist(), strict=True))
            return
        step = own_model if self.personal.adapt is None else adapt
        work = None if self.personal.adapt is None else self.personal.adapt(self.engine.task.work)
        for chunk in self.engine.call(step, who, models=models, refs=refs, work=work, rng=self.rng):
            yield from zip(chunk.clients.tolist(), chunk.answer.params, strict=True)


def meet(algorithm: Algorithm[S], state: S, engine: Engine, federation: Federation, round: int, rng: Rng) -> Newcomers:
    """Assign clients that are new to the run of `engine`, whose state after `round` is `state`, and evaluate them."""
    present = replace(federation.at(round), moves=())
    fresh = _engine_like(engine, present)
    # As at the run's own start: the work of the first round, from the common model.
    fresh.begin(0, "start")
    labels = algorithm.assign(state, fresh, fresh.everyone(), rng)
    fresh.begin(0, "evaluate")
    personal = algorithm.personal(replace(state, labels=labels), fresh.everyone())
    point = rng.at("evaluate")
    scores = evaluate_clients(fresh, personal, fresh.everyone(), point)
    return Newcomers(present, fresh, labels, personal, scores, point)


def _engine_like(engine: Engine, federation: Federation) -> Engine:
    """An engine over other clients, with the task and the server's own samples of this one."""
    name = engine.describe()["engine"]
    settings = {"precision": str(engine.dtype).removeprefix("torch.")}
    here = name if name in ("loop", "vectorized") else "vectorized"  # newcomers come with their data
    made = make_engine(here, engine.task, federation, str(engine.device), settings)
    made.reserved = engine.reserved
    return made
