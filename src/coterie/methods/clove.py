"""CLoVE: clusters of loss vectors (Bhatia, Papadis, Kodialam, Lakshman, Chakrabarty 2026, "CLoVE: Personalized
Federated Learning through Clustering of Loss Vector Embeddings").

Start: the clients are divided at random into K parts, and each part trains one of K models.

A round: every client gets all K models and sends the vector of their losses on its training samples,

    l_i = [loss of model 1, ..., loss of model K]

Clients of one kind have similar vectors, even while no model fits any kind well. k-means of the vectors gives K
clusters, and the Hungarian method gives each of them a model of its own, such that the sum of the losses of all clients
with their models is smallest. Then clients train the model of their cluster, and it becomes the mean of its members.
Unlike in IFCA, a model cannot lose all its clients to another one.

Once no client has moved for `patience` rounds, the clusters are fixed, and a client only gets its own model.

Bytes: (1 + K) / 2 times FedAvg until then, then as FedAvg.

Deviations. The K models start from the same weights. When to fix the clusters is a rule of our own. With few clients
per round, only those of a round are clustered, and clusters are fixed when every client that was seen has judged the
models `patience` times since the last move. Once they are fixed, a new client takes the model with the lowest loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from coterie.client.steps import train
from coterie.client.task import Task
from coterie.engines.base import Engine
from coterie.methods.base import ClusterState, num_clusters_setting, register
from coterie.methods.parts.clustering import kmeans
from coterie.methods.parts.once import ClusterOnce, first_clients, judged
from coterie.methods.parts.start import chosen_by_loss
from coterie.randomness import Rng, uniform
from coterie.settings import setting


@dataclass(frozen=True)
class CloveState(ClusterState):
    """The clusters, and how long they have been the same."""

    of_clients: ClassVar[tuple[str, ...]] = ("stayed",)

    stayed: Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.int64)
    )  # [N] times a client has judged the models since the last move of anybody
    fixed: bool = False


@register
@dataclass(frozen=True)
class CLoVE(ClusterOnce[CloveState]):
    """Clusters of similar loss vectors, until nobody moves."""

    key: ClassVar[str] = "clove"
    paper: ClassVar[str] = "Bhatia et al. 2026"
    state_type: ClassVar[type[ClusterState]] = CloveState

    num_clusters: int = num_clusters_setting()
    restarts: int = setting(20, "random restarts of k-means", ge=1)
    patience: int = setting(
        2, "rounds without a move after which clusters are fixed; 0: clients choose once, by loss", ge=0
    )

    def start(self, task: Task, engine: Engine, rng: Rng) -> CloveState:
        """K models, each trained by a random part of the clients."""
        stayed = torch.zeros(engine.num_clients, dtype=torch.int64)
        state = CloveState.common_start(engine, self.num_clusters, stayed=stayed, fixed=self.patience == 0)
        clients = first_clients(engine, self.num_clusters, rng.at("clients"))
        luck = uniform(rng.at("parts").keys(engine.keys), 1)[:, 0]
        parts = torch.zeros_like(state.labels)
        parts[clients[luck[clients].argsort(stable=True)]] = torch.arange(len(clients)) % self.num_clusters
        average = self.mean_of(self.num_clusters, engine, like=state.centers)
        everyone = self.mean_of(1, engine, like=state.centers)
        for cohort in engine.cohorts(clients):
            work = engine.task.work.at(engine.round)
            for chunk in engine.call(
                train, cohort, models=state.centers, refs=parts[cohort], work=work, rng=rng.at("train")
            ):
                average.add(chunk.answer.params, parts[chunk.clients], self.weights_of(chunk))
                everyone.add(chunk.answer.params, torch.zeros_like(chunk.clients), self.weights_of(chunk))
        return replace(
            state,
            centers=average.means(keep=state.centers),
            common=everyone.means(keep=state.common.unsqueeze(0))[0],
        )

    def round(self, state: CloveState, engine: Engine, cohort: Tensor, rng: Rng) -> CloveState:
        """Cluster the cohort by its losses, then train from the clusters' models and average each cluster."""
        if state.fixed:
            return super().round(state, engine, cohort, rng)
        losses = judged(engine, cohort, state.centers, rng.at("judge"))
        there = ~losses.isnan().any(1)
        clients = cohort[there]
        if not len(clients):
            return state
        labels, stayed = state.labels.clone(), state.stayed.clone()
        labels[clients] = self._clusters(losses[there], engine.keys[clients], rng.at("k-means"))
        stayed[clients] += 1
        if bool((labels != state.labels)[state.labels >= 0].any()):
            stayed = torch.zeros_like(stayed)
        met = labels >= 0
        work = engine.task.work.at(engine.round)
        chunks = engine.call(train, clients, models=state.centers, refs=labels[clients], work=work, rng=rng.at("train"))
        centers, _ = self.averaged(chunks, labels, state.centers, engine, weighting=self.weighting)
        fixed = int(stayed[met].min()) >= self.patience
        return replace(state, centers=centers, labels=labels, stayed=stayed, fixed=fixed)

    def _clusters(self, losses: Tensor, keys: Tensor, rng: Rng) -> Tensor:
        """Clusters [n] of loss vectors [n, K], named by the models they are matched to."""
        count = min(self.num_clusters, len(losses))
        found = kmeans(losses, count, rng, keys, self.restarts, trim=int(self.trimmed * len(losses))).labels
        member = torch.nn.functional.one_hot(found, count).to(losses)
        _, names = linear_sum_assignment((member.T @ losses).numpy())
        return torch.from_numpy(names)[found]

    def assign(self, state: CloveState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer gets all models and chooses the one with the lowest loss."""
        return chosen_by_loss(state, engine, newcomers, rng)
