"""FedGroup: clusters by the decomposed cosine similarity of first updates (Duan et al. 2021, "FedGroup: Efficient
Federated Learning via Decomposed Similarity-Based Clustering").

Cold start: some clients train from the initial weights. With their updates u_i as the rows of U, let v_1 ... v_K be the
K leading right singular vectors of U. The feature of a client is (EDC)

    e_i = [cos(u_i, v_1), ..., cos(u_i, v_K)]

and k-means of these features gives the clusters. A cluster's model is the mean of its clients' models, and its
direction d_k is that model minus the initial weights.

A client that was not in the cold start trains from the initial weights when it first takes part, and joins the cluster
with the largest cos(u_i, d_k). Then it trains from the cluster's model as the others do. Assignments never change.

Bytes: as FedAvg, plus one model down and up for each client, when it is placed.

Deviations. Updates are compared, never whole weights: those of two clients are almost parallel, because they start at
the same random point. Public code compares weights. `share` of the clients take part in the cold start, and at least
five for each cluster. Directions of large models are compared by sketches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from coterie.client.steps import train
from coterie.client.task import Task
from coterie.engines.base import Chunk, Engine
from coterie.methods.base import ClusterState, num_clusters_setting, register
from coterie.methods.parts.clustering import KMeans, cosine_distances, kmeans
from coterie.methods.parts.once import ClusterOnce
from coterie.methods.parts.start import cluster_models
from coterie.nets.sketch import sketch_of
from coterie.randomness import Rng
from coterie.settings import setting

_PER_CLUSTER = 5  # clients in the cold start at least
_WIDTH = 1 << 15  # of the sketches of updates


@dataclass(frozen=True)
class GroupState(ClusterState):
    """The clusters, and the directions of their first updates."""

    directions: Tensor = field(default_factory=lambda: torch.empty(0))  # [K, D]


@register
@dataclass(frozen=True)
class FedGroup(ClusterOnce[GroupState]):
    """Clusters of similar first updates; newcomers join by cosine similarity."""

    key: ClassVar[str] = "fedgroup"
    paper: ClassVar[str] = "Duan et al. 2021"
    state_type: ClassVar[type[ClusterState]] = GroupState

    num_clusters: int = num_clusters_setting()
    share: float = setting(0.25, "share of the clients in the cold start", gt=0, le=1)
    restarts: int = setting(20, "random restarts of k-means", ge=1)

    def start(self, task: Task, engine: Engine, rng: Rng) -> GroupState:
        """The cold start with some of the clients."""
        count = max(round(self.share * engine.num_clients), _PER_CLUSTER * self.num_clusters)
        state = GroupState.common_start(engine, self.num_clusters)
        return self._cold_start(state, engine, engine.draw(rng.at("clients"), count), rng)

    def round(self, state: GroupState, engine: Engine, cohort: Tensor, rng: Rng) -> GroupState:
        """See `ClusterOnce.round`; if nobody answered at the start, the cold start comes first."""
        if not len(state.directions):
            state = self._cold_start(state, engine, cohort, rng.at("cold start"))
        return super().round(state, engine, cohort, rng) if len(state.directions) else state

    def _cold_start(self, state: GroupState, engine: Engine, clients: Tensor, rng: Rng) -> GroupState:
        """Cluster these clients; the state as it was if none of them answers."""
        updates: list[Tensor] = []
        everyone = self.mean_of(1, engine, like=state.centers)

        def collect(chunk: Chunk) -> None:
            updates.append(self._update(chunk.answer.params, engine))
            everyone.add(chunk.answer.params, torch.zeros_like(chunk.clients), self.weights_of(chunk))

        def cluster(who: Tensor) -> KMeans:
            rows, count = torch.cat(updates), min(self.num_clusters, len(who))
            trim = int(self.trimmed * len(who))
            return kmeans(edc(rows, count), count, rng.at("k-means"), engine.keys[who], self.restarts, trim=trim)

        def pretrained(cohort: Tensor) -> Iterator[Chunk]:
            return self._pretrain(engine, cohort, rng.at("train"))

        average = self.mean_of(self.num_clusters, engine, like=state.centers)
        found = cluster_models(pretrained, collect, cluster, average, engine, clients, self.weights_of)
        if found is None:
            return state
        labels = state.labels.clone()
        labels[found[0]] = found[1].labels
        centers = average.means(keep=state.centers)
        directions = self._update(centers, engine)
        common = everyone.means(keep=state.common.unsqueeze(0))[0]
        return replace(state, centers=centers, labels=labels, directions=directions, common=common)

    def _pretrain(self, engine: Engine, clients: Tensor, rng: Rng) -> Iterator[Chunk]:
        """Clients train from the initial weights."""
        refs, work = torch.zeros(len(clients), dtype=torch.int64), engine.task.work.at(engine.round)
        return engine.call(train, clients, models=engine.initial().unsqueeze(0), refs=refs, work=work, rng=rng)

    def _update(self, models: Tensor, engine: Engine) -> Tensor:
        """Sketches [c, D] of the updates of models [c, P] from the initial weights; exact for small models."""
        cut = engine.task.layout.num_parameters
        sketch = sketch_of(cut, _WIDTH, Rng.seed(0).at("fedgroup"), engine.device)
        return sketch(models[:, :cut] - engine.initial()[:cut])

    def assign(self, state: GroupState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer trains from the initial weights and joins the cluster with the most similar direction."""
        labels = torch.full((len(newcomers),), -1, dtype=torch.int64)
        if not len(state.directions):
            return labels
        for chunk in self._pretrain(engine, newcomers, rng):
            update = self._update(chunk.answer.params, engine)
            labels[chunk.positions] = cosine_distances(update, state.directions).argmin(1).cpu()
        return labels


def edc(updates: Tensor, count: int) -> Tensor:
    """Cosine similarities [n, count] of updates [n, D] with their leading singular directions; an update of 0 has 0.

    With U = A S V^T, the products of the updates with V are A S, and A and S come from the small matrix U U^T.
    """
    rows = updates.double()
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    products = vectors[:, -count:] * values[-count:].clamp_min(0).sqrt()
    cosines: Tensor = products / rows.norm(dim=1, keepdim=True).clamp_min(1e-300)
    return cosines
