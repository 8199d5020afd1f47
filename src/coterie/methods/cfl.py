"""CFL: clusters that split in two when their members pull apart (Sattler, Müller, Samek 2020, "Clustered Federated
Learning: Model-Agnostic Distributed Multitask Optimization under Privacy Constraints").

All clients begin in one cluster. If the mean update of a cluster is small while single updates are not, no model fits
all its members, and the cluster is split in two by complete linkage on the cosine similarity of their updates. There
is no K.

    ||mean update|| < eps1   and   max ||update|| > eps2   (and, with gamma_max, sqrt((1 - a) / 2) > gamma_max, where
                                                            a is the largest similarity across the two halves)

Deviations, with reasons. Absolute thresholds (0.4 and 1.6 in the author's notebook) depend on model and learning rate,
and relative ones (`thresholds="relative"`, to the mean norm of the updates in the first round) on the dataset. By
default (`"confirmed"`) there are none on norms: the two halves are found on one half of the numbers of the sketched
updates, and must be confirmed on the other. There, with the mean of the members subtracted, the cosine similarity
within the halves must exceed that across them by `contrast`, and by more than in 95 % of random halves of the same
sizes. Two kinds differ by 0.4 to 1.0, chance differences of labels by about 0.1. The mean update must be shorter than
`small` times the mean length of the members' updates. All of this is free of scale.

A new cluster trains for `rest` rounds before it may split again: right after a split its updates are long, because it
still has the model of both halves, and it would split for no reason. A client is never reassigned: a wrong split stays.

Members are client ids throughout, never positions in a part of the similarity matrix. Absent members are represented by
a sketch of the last update they sent. By thresholds, a split needs an update of every member since its cluster exists;
a confirmed one needs those of half the members, and the others follow the half that their older update is more similar
to. Updates of different rounds differ by their age too, so with few clients in a round a kind may be split in two.
Newcomers get all centers and choose by loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from torch import Tensor
from torch.nn.functional import normalize

from coterie.client.steps import train
from coterie.client.task import Task
from coterie.engines.base import Chunk, Engine
from coterie.methods.base import ClusterState, Repair, register
from coterie.methods.parts.averaging import Averaging, fits_in_memory
from coterie.methods.parts.start import chosen_by_loss
from coterie.nets.sketch import Sketch, sketch_of
from coterie.randomness import Rng
from coterie.settings import setting

_WIDTH = 4096  # of the sketches that represent absent members
_PERMUTATIONS, _RISK = 999, 0.05  # of the test that confirms a split


@dataclass(frozen=True)
class CFLState(ClusterState):
    """The clusters, the splits that made them, and the last update of each client."""

    of_clients: ClassVar[tuple[str, ...]] = ("updates", "shown")

    scale: float = 0.0  # mean norm of the updates of the first round
    updates: Tensor = field(default_factory=lambda: torch.empty(0))  # [N, D] sketch of a client's last update
    shown: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))  # [N] sent one in this cluster
    born: list[int] = field(default_factory=lambda: [0])  # round in which each cluster was made, or last split
    tree: list[dict[str, int]] = field(default_factory=list)  # round, cluster, into: label of the other half


@register
@dataclass(frozen=True)
class CFL(Averaging[CFLState]):
    """Clusters split in two while their members disagree; K is found."""

    key: ClassVar[str] = "cfl"
    paper: ClassVar[str] = "Sattler et al. 2020; FedCluster in the FeSEM paper"
    state_type: ClassVar[type[ClusterState]] = CFLState
    finds_clusters: ClassVar[bool] = True

    weighting: Literal["samples", "equal"] = setting("samples", "weight of a client in its cluster's mean")
    thresholds: Literal["confirmed", "relative", "absolute"] = setting(
        "confirmed",
        "split if the two halves are confirmed on other numbers of the updates (contrast, small), or by eps1 and eps2: "
        "relative to the norm of the first updates, or absolute",
    )
    contrast: float = setting(
        0.25, "confirmed: split only if updates are more similar within halves than across by this much", ge=0, le=2
    )
    small: float = setting(
        0.7, "confirmed: split only if the mean update is shorter than this share of the members' mean length", gt=0
    )
    eps1: float = setting(0.2, "by thresholds: split only if the norm of the mean update is smaller", gt=0)
    eps2: float = setting(0.35, "by thresholds: split only if the largest norm of an update is larger", gt=0)
    gamma_max: float = setting(
        0.0, "split only if the halves differ by more than this (the paper's criterion); 0: any", ge=0, le=1
    )
    rest: int = setting(5, "rounds that a cluster trains before it may split (again)", ge=0)
    least: int = setting(2, "minimum number of members of a half", ge=1)
    max_clusters: int = setting(64, "maximum number of clusters", ge=1)

    def start(self, task: Task, engine: Engine, rng: Rng) -> CFLState:
        """One cluster, which clients join when they are first seen."""
        width = min(_WIDTH, task.layout.num_parameters)
        common = engine.initial()
        return CFLState.common_start(
            engine,
            num_clusters=1,
            updates=common.new_zeros(engine.num_clients, width),
            shown=torch.zeros(engine.num_clients, dtype=torch.bool),
        )

    def round(self, state: CFLState, engine: Engine, cohort: Tensor, rng: Rng) -> CFLState:
        """Train from the cluster's model, split clusters whose members disagree, average each cluster."""
        labels = self._with_new_clients(state, engine, cohort, rng.at("met"))
        asked = cohort[labels[cohort] >= 0]
        work = engine.task.work.at(engine.round)

        def train_all() -> Iterator[Chunk]:
            return engine.call(train, asked, models=state.centers, refs=labels[asked], work=work, rng=rng.at("train"))

        seen = _Updates(replace(state, labels=labels), engine, is_held=fits_in_memory(len(asked), engine))
        chunks, how = seen.watched(train_all()), {"weighting": self.weighting}
        means, clients = self.averaged(chunks, labels, state.centers, engine, **how)
        if not len(clients):
            return state
        mean_norms = (means - state.centers)[:, : engine.task.layout.num_parameters].norm(dim=1)  # [K]
        after = self._split(seen, mean_norms, engine)
        if len(after.centers) == len(state.centers):
            return replace(after, centers=means)
        # The two halves are averaged apart in the same round. Models that were not held are trained again.
        engine.begin(engine.round, "repair")
        centers, _ = self.averaged(seen.held or train_all(), after.labels, after.centers, engine, **how)
        engine.begin(engine.round, "round")
        return replace(after, centers=centers)

    def _with_new_clients(self, state: CFLState, engine: Engine, cohort: Tensor, rng: Rng) -> Tensor:
        """The labels [N], with new clients of the cohort assigned."""
        labels = state.labels.clone()
        new = cohort[labels[cohort] < 0]
        if len(new):
            labels[new] = self.assign(state, engine, new, rng) if state.tree else 0
        return labels

    def _split(self, seen: _Updates, mean_norms: Tensor, engine: Engine) -> CFLState:
        """The state after all splits that are due; a new cluster starts with the model that was split."""
        state = seen.state()
        for cluster, mean_norm in enumerate(mean_norms.tolist()):
            members = (state.labels == cluster).nonzero().flatten()  # client ids
            if len(state.centers) >= self.max_clusters or engine.round - state.born[cluster] <= self.rest:
                continue
            if len(members) < 2 * self.least or not len(seen.norms(members)):
                continue
            if self.thresholds == "confirmed":
                leaving = self._confirmed_halves(state.updates[members], state.shown[members], engine.keys[members])
            else:
                leaving = self._halves_by_thresholds(seen, state, cluster, members, mean_norm, engine)
            if leaving is not None:
                state = self._with_split(state, cluster, members, leaving, engine)
        return state

    def _halves_by_thresholds(
        self, seen: _Updates, state: CFLState, cluster: int, members: Tensor, mean_norm: float, engine: Engine
    ) -> Tensor | None:
        """Which members [m] leave by eps1 and eps2; None if they should stay together."""
        unit = state.scale if self.thresholds == "relative" else 1.0
        if not bool(state.shown[members].all()):
            return None
        if mean_norm >= self.eps1 * unit or float(seen.norms(members).max()) <= self.eps2 * unit:
            return None
        return self._two_halves(seen.rows(members, cluster), engine.keys[members])

    def _confirmed_halves(self, rows: Tensor, shown: Tensor, keys: Tensor) -> Tensor | None:
        """Which members [m] leave, if halves on the even numbers of their sketches [m, D] hold on the odd ones."""
        recent = rows[shown.to(rows.device)].double().cpu()
        if 2 * len(recent) < len(rows) or len(recent) < 2 * self.least:
            return None
        if float(recent.mean(0).norm()) >= self.small * float(recent.norm(dim=1).mean()):
            return None
        leaving = self._two_halves(recent[:, ::2], keys[shown])
        if leaving is None or not is_confirmed(recent[:, 1::2], leaving, self.contrast):
            return None
        everyone = torch.zeros_like(shown)
        everyone[shown] = leaving
        # Those who sent nothing yet in this cluster: by their update from the model before.
        ways = torch.stack([recent[~leaving].mean(0), recent[leaving].mean(0)]) - recent.mean(0)
        old = rows[(~shown).to(rows.device)].double().cpu()
        similarity = (old - old.mean(0)) @ normalize(ways, dim=1).T if len(old) else old.new_zeros(0, 2)
        everyone[~shown] = similarity[:, 1] > similarity[:, 0]
        return everyone

    def _two_halves(self, rows: Tensor, keys: Tensor) -> Tensor | None:
        """Which members [m] leave: the smaller half by complete linkage; None if they should stay together."""
        similar = normalize(rows.double(), dim=1) @ normalize(rows.double(), dim=1).T
        apart = (1 - similar).clamp_min(0).cpu().numpy()
        np.fill_diagonal(apart, 0.0)
        found = fcluster(linkage(squareform(apart, checks=False), method="complete"), 2, criterion="maxclust")
        first = torch.from_numpy(found == found[0])
        if int(first.sum()) == len(first):
            return None
        across = float(similar.cpu()[first][:, ~first].max())
        if self.gamma_max and np.sqrt(max(0.0, 1 - across) / 2) <= self.gamma_max:
            return None
        sizes = int(first.sum()), int((~first).sum())
        if min(sizes) < self.least:
            return None
        if sizes[0] != sizes[1]:
            return first if sizes[0] < sizes[1] else ~first
        # Equal halves: the one with the largest key leaves, whatever the order of clients.
        return first if bool(first[int(keys.argmax())]) else ~first

    def _with_split(self, state: CFLState, cluster: int, members: Tensor, leaving: Tensor, engine: Engine) -> CFLState:
        fresh = len(state.centers)
        labels, shown = state.labels.clone(), state.shown.clone()
        labels[members[leaving]] = fresh
        shown[members] = False
        born = [engine.round if k == cluster else then for k, then in enumerate(state.born)]
        split = {"round": engine.round, "cluster": cluster, "into": fresh}
        counts = [int((~leaving).sum()), int(leaving.sum())]
        reason = f"cluster {cluster} was split into {counts[0]} and {counts[1]} clients: their updates pull apart"
        return replace(
            state,
            centers=torch.cat([state.centers, state.centers[cluster].unsqueeze(0)]),
            labels=labels,
            shown=shown,
            born=[*born, engine.round],
            tree=[*state.tree, split],
            repairs=[*state.repairs, Repair(round=engine.round, cluster=fresh, reason=reason)],
        )

    def assign(self, state: CFLState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer gets all centers and chooses by loss: the models that were split are of the past."""
        return chosen_by_loss(state, engine, newcomers, rng)


def contrast_of(rows: Tensor, leaving: Tensor) -> Tensor:
    """How much more similar updates [m, D] are within halves than across, for each row of halves [h, m]: [h]."""
    around = normalize(rows - rows.mean(0), dim=1)
    similar = (around @ around.T).fill_diagonal_(0)  # [m, m]
    side = leaving.to(rows)
    counts = torch.stack([side.sum(1), (1 - side).sum(1)])  # [2, h]
    across = torch.einsum("hi,ij,hj->h", side, similar, 1 - side)
    within = similar.sum() / 2 - across
    pairs = (counts * (counts - 1) / 2).sum(0)
    return within / pairs.clamp_min(1) - across / counts.prod(0).clamp_min(1)


def is_confirmed(rows: Tensor, leaving: Tensor, contrast: float) -> bool:
    """Whether halves [m] that were found elsewhere hold on updates [m, D]: by contrast, and by a permutation test."""
    luck = Rng.seed(0).at("cfl", "permutations").uniform(_PERMUTATIONS, len(rows)).argsort(dim=1)
    random = leaving[luck]  # [h, m] halves of the same sizes
    found = float(contrast_of(rows, leaving.unsqueeze(0))[0])
    as_good = int((contrast_of(rows, random) >= found - 1e-12).sum())
    return found >= contrast and (1 + as_good) / (1 + _PERMUTATIONS) <= _RISK


class _Updates:
    """The updates of a round: sketches of all of them, and the models themselves where they fit in memory."""

    def __init__(self, state: CFLState, engine: Engine, is_held: bool) -> None:
        self._state, self._engine, self._is_held = state, engine, is_held
        self._sketches, self._norms = state.updates.clone(), state.updates.new_full((len(state.labels),), -1.0)
        self.held: list[Chunk] = []

    def watched(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """The same chunks, each recorded on its way."""
        cut, sketch = self._engine.task.layout.num_parameters, _sketch(self._engine)
        for chunk in chunks:
            clients = chunk.clients.to(self._engine.device)
            update = chunk.answer.params[:, :cut] - self._state.centers[self._state.labels[chunk.clients]][:, :cut]
            self._sketches[clients], self._norms[clients] = sketch(update), update.norm(dim=1)
            self.held += [chunk] if self._is_held else []
            yield chunk

    def state(self) -> CFLState:
        """The state with the updates of this round."""
        present = self._norms >= 0
        scale = self._state.scale or float(self._norms[present].mean())
        return replace(self._state, updates=self._sketches, shown=self._state.shown | present.cpu(), scale=scale)

    def norms(self, members: Tensor) -> Tensor:
        """The norms of the updates of those members that are present [p]."""
        norms = self._norms[members.to(self._norms.device)]
        return norms[norms >= 0]

    def rows(self, members: Tensor, cluster: int) -> Tensor:
        """The updates of a cluster's members [m, D]: as they are if all are held, otherwise sketches."""
        if not self.held or len(self.norms(members)) < len(members):
            return self._sketches[members.to(self._sketches.device)]
        clients, models = torch.cat([c.clients for c in self.held]), torch.cat([c.answer.params for c in self.held])
        order = clients.argsort()
        rows = models[order[torch.searchsorted(clients[order], members)].to(models.device)]
        cut = self._engine.task.layout.num_parameters
        return rows[:, :cut] - self._state.centers[cluster, :cut]


def _sketch(engine: Engine) -> Sketch:
    return sketch_of(engine.task.layout.num_parameters, _WIDTH, Rng.seed(0).at("cfl"), engine.device)
