"""Robust TKM: trimmed k-means once, then one model per cluster (Ghosh, Hong, Yin, Ramchandran 2019, "Robust Federated
Learning in a Heterogeneous Environment").

Three stages. Every client trains alone to convergence from one common model (`pretrain` times the work of a round).
The server clusters these models once by trimmed k-means: the `trim` share farthest from the centers does not move
them, and gets the label of the nearest center. Then each cluster trains its own model with a robust mean. Labels
never change again, so a wrong label is never repaired: a known limit of the method.

All clients take part in the start, one cohort after the other. A client that did not answer then chooses its cluster by
loss when it first joins a round. The first center of a cluster is the mean of its members' local models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from coterie.client.steps import train
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.engines.base import Chunk, Engine
from coterie.methods.base import ClusterState, num_clusters_setting, register
from coterie.methods.parts.averaging import Averaging, robust_setting
from coterie.methods.parts.clustering import KMeans, kmeans
from coterie.methods.parts.start import chosen_by_loss, cluster_models, compact
from coterie.randomness import Rng
from coterie.settings import setting


@register
@dataclass(frozen=True)
class RobustTKM(Averaging[ClusterState]):
    """Local models, one trimmed k-means, then a robust mean in each cluster."""

    key: ClassVar[str] = "robust_tkm"
    paper: ClassVar[str] = "Ghosh et al. 2019; Robust in the FeSEM paper"

    num_clusters: int = num_clusters_setting()
    robust: str = robust_setting("trimmed_mean")
    robust_share: float = setting(0.1, "share of bad members that the robust mean tolerates", ge=0, lt=0.5)
    trim: float = setting(0.1, "share of local models that k-means excludes from its centers", ge=0, lt=0.5)
    pretrain: int = setting(5, "local training before the clustering, in rounds of work", ge=1)
    restarts: int = setting(20, "random restarts of k-means", ge=1)

    def start(self, task: Task, engine: Engine, rng: Rng) -> ClusterState:
        """Every client trains alone; one trimmed k-means."""
        state = ClusterState.common_start(engine, self.num_clusters)
        cut = task.layout.num_parameters
        rows: list[Tensor] = []

        def train_alone(clients: Tensor) -> Iterator[Chunk]:
            return self._train_alone(state, engine, clients, rng.at("alone"))

        def collect(chunk: Chunk) -> None:
            rows.append(compact(chunk.answer.params[:, :cut] - state.common[:cut], engine, Rng.seed(0).at("tkm")))

        def cluster(answered: Tensor) -> KMeans:
            trim, count = int(self.trim * len(answered)), min(self.num_clusters, len(answered))
            keys = engine.keys[answered]
            return kmeans(torch.cat(rows), count, rng.at("k-means"), keys, self.restarts, trim=trim)

        average = self.mean_of(self.num_clusters, engine, like=state.centers)
        found = cluster_models(train_alone, collect, cluster, average, engine, engine.everyone(), _equally)
        labels = state.labels.clone()
        if found is not None:
            labels[found[0]] = found[1].labels
        centers = average.means(keep=state.centers)
        return replace(state, centers=centers, labels=labels)

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        """Each cluster trains its own model; labels stay."""
        labels = state.labels.clone()
        new = cohort[labels[cohort] < 0]
        if len(new):
            labels[new] = self.assign(state, engine, new, rng.at("met"))
        known = cohort[labels[cohort] >= 0]
        work = engine.task.work.at(engine.round)
        chunks = engine.call(train, known, models=state.centers, refs=labels[known], work=work, rng=rng.at("train"))
        centers, _ = self.averaged(chunks, labels, state.centers, engine)
        return replace(state, centers=centers, labels=labels)

    def assign(self, state: ClusterState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer gets all centers and chooses by loss: the first models are of the past."""
        return chosen_by_loss(state, engine, newcomers, rng)

    def _train_alone(self, state: ClusterState, engine: Engine, clients: Tensor, rng: Rng) -> Iterator[Chunk]:
        work: SGD = engine.task.work.at(0)
        steps = None if work.steps is None else work.steps * self.pretrain
        longer = replace(work, epochs=work.epochs * self.pretrain, steps=steps)
        refs = torch.zeros(len(clients), dtype=torch.int64)
        return engine.call(train, clients, models=state.common.unsqueeze(0), refs=refs, work=longer, rng=rng)


def _equally(chunk: Chunk) -> Tensor:
    return torch.ones(len(chunk.clients), device=chunk.answer.params.device)
