"""Robust clustering, then training (Ghosh, Hong, Yin, Ramchandran 2019, "Robust Federated Learning in a Heterogeneous
Environment").

Three stages. Every client trains alone to convergence, from one common model (`pretrain` rounds' worth of its work).
The server clusters those models once, by trimmed k-means: the `trim` share that is farthest from the centers does not
move them, and gets the nearest center's label. Then each cluster trains a model of its own with a robust mean; labels
do not change any more, and a wrong one is never mended, which is the method's known limit.

All clients are asked at the start, whatever the participation; one that did not answer then is clustered in the same
way when it is first met. Everyone starts its cluster from the mean of the local models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from coterie.client.steps import train
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.engines.base import Chunk, Engine
from coterie.methods.base import ClusterState, num_clusters_setting, register
from coterie.methods.parts.averaging import Averaging
from coterie.methods.parts.clustering import kmeans, sketch_of, squared_distances
from coterie.randomness import Rng
from coterie.settings import setting

_WIDTH = 4096  # of the sketches that are clustered where there are many models
_WHOLE = 1 << 23  # numbers that are clustered as they are


@dataclass(frozen=True)
class TKMState(ClusterState):
    """The centers, and those of the local models, by which newcomers are assigned."""

    local_centers: Tensor = field(default_factory=lambda: torch.empty(0))  # [K, P]


@register
@dataclass(frozen=True)
class RobustTKM(Averaging[TKMState]):
    """Local models, one trimmed k-means, then a robust mean in each cluster."""

    key: ClassVar[str] = "robust_tkm"
    paper: ClassVar[str] = "Ghosh et al. 2019; Robust in the FeSEM paper"
    state_type: ClassVar[type[ClusterState]] = TKMState

    num_clusters: int = num_clusters_setting()
    robust: Literal["none", "trimmed_mean", "median", "krum"] = setting(
        "trimmed_mean", "mean of a cluster's members: plain, or one that withstands bad members"
    )
    robust_share: float = setting(0.1, "share of bad members that the robust mean withstands", ge=0, lt=0.5)
    trim: float = setting(0.1, "share of the local models that moves no center of the clustering", ge=0, lt=0.5)
    pretrain: int = setting(5, "rounds' worth of work that clients do alone before the clustering", ge=1)
    restarts: int = setting(20, "random restarts of the clustering", ge=1)

    def start(self, task: Task, engine: Engine, rng: Rng) -> TKMState:
        """Everyone trains alone; one trimmed k-means."""
        state = TKMState.common_start(engine, self.num_clusters)
        everyone = engine.everyone()
        fits = len(everyone) * task.layout.size * engine.dtype.itemsize <= engine.memory_budget()
        cut = task.layout.num_parameters
        sketch = sketch_of(cut, _WIDTH, Rng.seed(0).at("tkm"), engine.device)
        rows, kept, who = [], [], []
        for chunk in self._alone(state, engine, everyone, rng.at("alone")):
            update = chunk.answer.params[:, :cut] - state.common[:cut]
            rows.append(sketch(update) if len(everyone) * cut > _WHOLE else update)
            who.append(chunk.clients)
            if fits:
                kept.append(chunk.answer.params)
        if not who:
            return replace(state, local_centers=state.centers)
        clients = torch.cat(who)
        found = kmeans(
            torch.cat(rows),
            min(self.num_clusters, len(clients)),
            rng.at("k-means"),
            engine.keys[clients],
            self.restarts,
            trim=int(self.trim * len(clients)),
        )
        labels = state.labels.clone()
        labels[clients] = found.labels
        inside = torch.zeros(engine.num_clients)
        inside[clients] = (~found.outliers).float()
        average = self.mean_of(self.num_clusters, engine, like=state.centers)
        if fits:
            average.add(torch.cat(kept), found.labels, inside[clients])
        else:
            for chunk in self._alone(state, engine, clients, rng.at("alone")):  # the same models come back
                average.add(chunk.answer.params, labels[chunk.clients], inside[chunk.clients])
        centers = average.means(keep=state.centers)
        return replace(state, centers=centers, labels=labels, local_centers=centers.clone())

    def _alone(self, state: TKMState, engine: Engine, clients: Tensor, rng: Rng) -> Iterator[Chunk]:
        work: SGD = engine.task.work.at(0)
        steps = None if work.steps is None else work.steps * self.pretrain
        longer = replace(work, epochs=work.epochs * self.pretrain, steps=steps)
        refs = torch.zeros(len(clients), dtype=torch.int64)
        return engine.call(train, clients, models=state.common.unsqueeze(0), refs=refs, work=longer, rng=rng)

    def round(self, state: TKMState, engine: Engine, cohort: Tensor, rng: Rng) -> TKMState:
        """Each cluster trains its own model; labels stay."""
        labels = state.labels.clone()
        unknown = cohort[labels[cohort] < 0]
        if len(unknown):
            labels[unknown] = self.assign(state, engine, unknown, rng.at("met"))
        known = cohort[labels[cohort] >= 0]
        average = self.mean_of(self.num_clusters, engine, like=state.centers)
        work = engine.task.work.at(engine.round)
        for chunk in engine.call(
            train, known, models=state.centers, refs=labels[known], work=work, rng=rng.at("train")
        ):
            average.add(chunk.answer.params, labels[chunk.clients])
        return replace(state, centers=average.means(keep=state.centers), labels=labels)

    def assign(self, state: TKMState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer trains alone as everyone did at the start, and goes to the nearest of the first centers."""
        labels = torch.full((len(newcomers),), -1, dtype=torch.int64)
        cut = engine.task.layout.num_parameters
        for chunk in self._alone(state, engine, newcomers, rng):
            distances = squared_distances(chunk.answer.params[:, :cut], state.local_centers[:, :cut])
            labels[chunk.positions] = distances.argmin(1).cpu()
        return labels
