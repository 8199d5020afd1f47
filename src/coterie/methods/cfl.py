"""CFL: clusters that split in two when their members pull apart (Sattler, Müller, Samek 2020, "Clustered Federated
Learning: Model-Agnostic Distributed Multitask Optimization under Privacy Constraints").

Everyone begins in one cluster. A cluster whose mean update has become small while single updates have not is at a
point where no model fits all of its members: it is split in two by complete linkage on the cosine similarity of the
members' updates. There is no K.

    ||mean update|| < eps1   and   max ||update|| > eps2   (and, with gamma_max, sqrt((1 - a) / 2) > gamma_max, where
                                                            a is the largest similarity across the two halves)

Deviation, with its reason: by default the thresholds are shares of the mean length of the updates in the first round
(`thresholds="relative"`); absolute ones (0.4 and 1.6 in the author's notebook) hang on model and step size. And a new
cluster trains for `rest` rounds before it may split again: right after a split its updates are long, because its model
was everyone's, and it would fall apart for no reason.

Members are client ids throughout, never positions in a part of the similarity matrix. A split is only decided when an
update of every member is known: those who took part in the round show theirs, and absent ones are judged by a sketch
of the last update they sent since their cluster exists. Newcomers walk down the tree of splits: at each, they train
from the model that was split, and go to the half whose mean update points more their way.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from torch import Tensor
from torch.nn.functional import normalize

from coterie.client.steps import train
from coterie.client.task import Task
from coterie.engines.base import Engine
from coterie.methods.base import ClusterState, register
from coterie.methods.parts.averaging import Averaging
from coterie.methods.parts.clustering import sketch_of
from coterie.randomness import Rng
from coterie.settings import setting

_WIDTH = 4096  # of the sketches by which absent members are judged


@dataclass(frozen=True)
class CFLState(ClusterState):
    """Clusters so far, the splits that made them, and what was last seen of each client."""

    of_clients: ClassVar[tuple[str, ...]] = ("updates", "shown")

    scale: float = 0.0  # mean length of the updates of the first round
    updates: Tensor = field(default_factory=lambda: torch.empty(0))  # [N, D] sketch of the last update of a client
    shown: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))  # [N] since its cluster exists
    born: list[int] = field(default_factory=lambda: [0])  # round in which each cluster was made, or last split
    tree: list[dict[str, Any]] = field(default_factory=list)  # round, cluster, into: the other half's number
    split_models: Tensor = field(default_factory=lambda: torch.empty(0))  # [S, P] models that were split
    split_ways: Tensor = field(default_factory=lambda: torch.empty(0))  # [S, 2, D] mean update of those who stay, leave


@register
@dataclass(frozen=True)
class CFL(Averaging[CFLState]):
    """Clusters that split in two while their members disagree; K is found."""

    key: ClassVar[str] = "cfl"
    paper: ClassVar[str] = "Sattler et al. 2020; FedCluster in the FeSEM paper"
    state_type: ClassVar[type[ClusterState]] = CFLState

    weighting: Literal["samples", "equal"] = setting("samples", "weight of a client in its cluster's mean")
    thresholds: Literal["relative", "absolute"] = setting(
        "relative", "eps1 and eps2 as shares of the length of the first updates, or as they are"
    )
    eps1: float = setting(0.2, "split only if the mean update is shorter", gt=0)
    eps2: float = setting(0.35, "split only if the longest update is longer", gt=0)
    gamma_max: float = setting(
        0.0, "split only if the halves are so different (the paper's criterion); 0: any", ge=0, le=1
    )
    rest: int = setting(5, "rounds that a cluster trains before it may split (again)", ge=0)
    least: int = setting(2, "least members of a half", ge=1)
    max_clusters: int = setting(64, "no split beyond so many clusters", ge=1)

    def start(self, task: Task, engine: Engine, rng: Rng) -> CFLState:
        """One cluster, everyone in it once met."""
        width = min(_WIDTH, task.layout.num_parameters)
        count, size = engine.num_clients, task.layout.size
        kind: dict[str, Any] = {"dtype": engine.dtype, "device": engine.device}
        return CFLState.common_start(
            engine,
            num_clusters=1,
            updates=torch.zeros(count, width, **kind),
            shown=torch.zeros(count, dtype=torch.bool),
            split_models=torch.zeros(0, size, **kind),
            split_ways=torch.zeros(0, 2, width, **kind),
        )

    def round(self, state: CFLState, engine: Engine, cohort: Tensor, rng: Rng) -> CFLState:
        """Train from the own cluster's model, split what disagrees, average what is left together."""
        labels = state.labels.clone()
        unknown = cohort[labels[cohort] < 0]
        if len(unknown):
            labels[unknown] = self.assign(state, engine, unknown, rng.at("met")) if state.tree else 0
        asked = cohort[labels[cohort] >= 0]
        cut = engine.task.layout.num_parameters
        sketch = sketch_of(cut, _WIDTH, Rng.seed(0).at("cfl"), engine.device)
        updates, shown = state.updates.clone(), state.shown.clone()
        exact = len(asked) * engine.task.layout.size * engine.dtype.itemsize <= engine.memory_budget()
        kept, clients, lengths, samples, seen = [], [], [], [], []
        work = engine.task.work.at(engine.round)
        sums = self.mean_of(len(state.centers), engine, like=state.centers)

        def ask() -> Any:
            return engine.call(train, asked, models=state.centers, refs=labels[asked], work=work, rng=rng.at("train"))

        for chunk in ask():
            update = chunk.answer.params[:, :cut] - state.centers[labels[chunk.clients]][:, :cut]
            small = sketch(update)
            updates[chunk.clients.to(engine.device)] = small
            shown[chunk.clients] = True
            clients.append(chunk.clients)
            lengths.append(update.norm(dim=1))
            samples.append(chunk.answer.samples)
            seen.append(update if exact else small)
            sums.add(chunk.answer.params, labels[chunk.clients], self._weights(chunk.answer.samples))
            if exact:
                kept.append(chunk.answer.params)
        if not clients:
            return state
        who, length = torch.cat(clients), torch.cat(lengths)
        means = sums.means(keep=state.centers)
        scale = state.scale or float(length.mean())
        after = replace(state, labels=labels, updates=updates, shown=shown, scale=scale)
        mean_lengths = (means - state.centers)[:, :cut].norm(dim=1)
        after = self._split(after, engine, who, length, torch.cat(seen) if exact else None, mean_lengths)
        if len(after.centers) == len(state.centers):
            return replace(after, centers=means)
        # Those who were split from each other are averaged apart, in the same round.
        average = self.mean_of(len(after.centers), engine, like=after.centers)
        if exact:
            average.add(torch.cat(kept), after.labels[who], self._weights(torch.cat(samples)))
        else:
            engine.begin(engine.round, "repair")
            for chunk in ask():  # the same models come back
                average.add(chunk.answer.params, after.labels[chunk.clients], self._weights(chunk.answer.samples))
            engine.begin(engine.round, "round")
        return replace(after, centers=average.means(keep=after.centers))

    def _weights(self, samples: Tensor) -> Tensor | None:
        return samples if self.weighting == "samples" else None

    def _split(
        self, state: CFLState, engine: Engine, who: Tensor, length: Tensor, exact: Tensor | None, mean_lengths: Tensor
    ) -> CFLState:
        """The state after every split that is due; new clusters begin at the model that was split."""
        unit = state.scale if self.thresholds == "relative" else 1.0
        for cluster in range(len(mean_lengths)):
            if len(state.centers) >= self.max_clusters:
                break
            members = (state.labels == cluster).nonzero().flatten()  # client ids
            present = state.labels[who] == cluster
            if engine.round - state.born[cluster] <= self.rest:
                continue
            if len(members) < 2 * self.least or not bool(present.any()) or not bool(state.shown[members].all()):
                continue
            if float(mean_lengths[cluster]) >= self.eps1 * unit or float(length[present].max()) <= self.eps2 * unit:
                continue
            if exact is not None and int(present.sum()) == len(members):
                rows = torch.empty(len(members), exact.shape[1], dtype=exact.dtype, device=exact.device)
                rows[torch.searchsorted(members, who[present])] = exact[present]
            else:
                rows = state.updates[members]
            leaving = self._two_halves(rows, engine.keys[members])
            if leaving is not None:
                state = self._with_split(state, cluster, members, leaving, engine)
        return state

    def _two_halves(self, rows: Tensor, keys: Tensor) -> Tensor | None:
        """Which members [m] leave: the smaller half of a complete linkage; None if they should stay together."""
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
        # Equal halves: the one with the largest key leaves, whatever the order of the clients.
        return first if bool(first[int(keys.argmax())]) else ~first

    def _with_split(self, state: CFLState, cluster: int, members: Tensor, leaving: Tensor, engine: Engine) -> CFLState:
        fresh = len(state.centers)
        labels, shown = state.labels.clone(), state.shown.clone()
        labels[members[leaving]] = fresh
        shown[members] = False
        rows = state.updates[members]
        ways = torch.stack([rows[~leaving].mean(0), rows[leaving].mean(0)])
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
            repairs=[*state.repairs, {"round": engine.round, "cluster": fresh, "reason": reason}],
            split_models=torch.cat([state.split_models, state.centers[cluster].unsqueeze(0)]),
            split_ways=torch.cat([state.split_ways, ways.unsqueeze(0)]),
        )

    def assign(self, state: CFLState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """Down the tree of splits, by the direction in which each newcomer's training goes."""
        labels = torch.zeros(len(newcomers), dtype=torch.int64)
        lost = torch.zeros(len(newcomers), dtype=torch.bool)
        cut = engine.task.layout.num_parameters
        sketch = sketch_of(cut, _WIDTH, Rng.seed(0).at("cfl"), engine.device)
        for number, split in enumerate(state.tree):
            here = ((labels == split["cluster"]) & ~lost).nonzero().flatten()
            if not len(here):
                continue
            model = state.split_models[number]
            refs = torch.zeros(len(here), dtype=torch.int64)
            heard = torch.zeros(len(here), dtype=torch.bool)
            for chunk in engine.call(
                train, newcomers[here], models=model.unsqueeze(0), refs=refs, rng=rng.at("walk", number)
            ):
                update = sketch(chunk.answer.params[:, :cut] - model[:cut])
                alike = normalize(update, dim=1) @ normalize(state.split_ways[number], dim=1).T  # [c, 2]
                leaves = (alike[:, 1] > alike[:, 0]).cpu()
                labels[here[chunk.positions[leaves]]] = split["into"]
                heard[chunk.positions] = True
            lost[here[~heard]] = True
        return torch.where(lost, -1, labels)
