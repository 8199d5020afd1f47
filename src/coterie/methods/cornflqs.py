"""CORNFLQS: the server clusters models and the clients choose by loss, until both agree (CIKM 2025).

The start: `warmup` rounds of FedAvg with equal weights. In the last of them clients train twice and are not averaged in
between. Then, and in the first rounds:

    train      each client trains from the model it chose
    cluster    Ward's linkage of the models, K clusters; a center is the mean of its cluster, weighted by samples
    choose     each client gets the K centers and takes the one with the lowest loss on its training samples

If all choices equal the clusters of the server, or after `clusterings` times, the server clusters no more. Then a round
is a choice among all centers, training, and the mean over those who chose a center. Once a round has moved nobody, the
clusters are frozen, and from then on each of them is averaged alone.

With `self_stopping=false` this is the earlier version n-m-k of the authors' code: `warmup` = n, `clusterings` = m
whatever the clients choose, then rounds with choices to the end, with `prox` = 0.1; clusters are never frozen.

Bytes: (2 + K) / 2 times FedAvg while the server clusters, (1 + K) / 2 until frozen, then 1.

Deviations. The clusters of the server are named by the nearest centers of the round before (Hungarian method), so that
the labels of clients outside the cohort keep their meaning. With few clients per round, only those of a round are
clustered; clusters are frozen once every client that was seen has chosen again without moving. A client that was not
there before chooses by loss first. Large models are clustered by sketches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Models
from coterie.client.steps import Answer, ClientStep, client_step, train
from coterie.client.task import Task
from coterie.client.work import SGD, Proximal
from coterie.engines.base import Chunk, Engine
from coterie.methods.base import ClusterState, num_clusters_setting, register
from coterie.methods.ifca import choose_and_train
from coterie.methods.parts.clustering import squared_distances
from coterie.methods.parts.once import ClusterOnce, by_id, first_clients
from coterie.methods.parts.signatures import Clustering
from coterie.methods.parts.start import chosen_by_loss, cluster_models, compact
from coterie.randomness import Rng
from coterie.settings import setting


@client_step("coterie.cornflqs:train_twice", forms.trained)
def train_twice(block: Block, models: Models, work: SGD) -> Answer:
    """Train the model that was sent, then train the result again."""
    return Answer(params=block.train(block.train(models, work), work), samples=block.samples)


@dataclass(frozen=True)
class CornState(ClusterState):
    """How far the clusters have settled."""

    of_clients: ClassVar[tuple[str, ...]] = ("steady",)

    clusterings: int = 0  # by the server, so far
    agreed: bool = False  # the clients' choices equal the server's clusters
    choices: int = 0  # rounds of choices since
    frozen: bool = False
    steady: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))  # [N] stayed since the last move


@register
@dataclass(frozen=True)
class Cornflqs(ClusterOnce[CornState]):
    """Clusters of models that the clients confirm by loss, then frozen."""

    key: ClassVar[str] = "cornflqs"
    paper: ClassVar[str] = "CORNFLQS, CIKM 2025"
    state_type: ClassVar[type[ClusterState]] = CornState

    num_clusters: int = num_clusters_setting()
    warmup: int = setting(1, "rounds of plain averaging at the start (n)", ge=1)
    clusterings: int = setting(10, "maximum number of clusterings by the server, including the first (m)", ge=1)
    self_stopping: bool = setting(
        True, "stop clustering when clients and server agree, and freeze the clusters when nobody moves"
    )
    prox: float = setting(
        0.0, "strength of the proximal term after the last clustering, until clusters are frozen", ge=0
    )

    def start(self, task: Task, engine: Engine, rng: Rng) -> CornState:
        """Average for some rounds, then cluster the clients' models."""
        steady = torch.zeros(engine.num_clients, dtype=torch.bool)
        state = CornState.common_start(engine, self.num_clusters, steady=steady)
        for number in range(self.warmup - 1):
            cohort = engine.draw(rng.at("cohort", number), engine.cohort_size)
            chunks = self._call(train, state, engine, cohort, rng.at("warm-up", number))
            means, _ = self.averaged(chunks, torch.zeros_like(state.labels), state.common.unsqueeze(0), engine)
            state = replace(state, common=means[0])
        state = replace(state, centers=state.common.repeat(self.num_clusters, 1))
        clients = first_clients(engine, self.num_clusters, rng.at("clients"))
        state = self._clustered(state, engine, clients, train_twice, rng)
        members = torch.bincount(state.labels[state.labels >= 0], minlength=self.num_clusters).to(state.centers)
        return replace(state, common=members @ state.centers / members.sum()) if bool(members.any()) else state

    def round(self, state: CornState, engine: Engine, cohort: Tensor, rng: Rng) -> CornState:
        """Train and cluster, or choose and train, or only train."""
        if state.frozen:
            return super().round(state, engine, cohort, rng)
        if state.agreed or state.clusterings >= self.clusterings:
            return self._chosen(state, engine, cohort, rng)
        state = replace(state, labels=self.labels_of(state, engine, cohort, rng.at("place")))
        return self._clustered(state, engine, cohort[state.labels[cohort] >= 0], train, rng)

    def _clustered(self, state: CornState, engine: Engine, clients: Tensor, step: ClientStep, rng: Rng) -> CornState:
        """Train from the chosen models, cluster the results, and let clients choose among the means."""
        rows: list[Tensor] = []
        cut = engine.task.layout.num_parameters

        def collect(chunk: Chunk) -> None:
            rows.append(self._compact(chunk.answer.params[:, :cut], engine))

        def cluster(who: Tensor) -> Clustering:
            ids, models = by_id(who, torch.cat(rows))
            found = self._ward(models, self._compact(state.centers[:, :cut], engine))
            none = torch.zeros(len(who), dtype=torch.bool)
            return Clustering(found[torch.searchsorted(ids, who)], none, none)

        def trained(cohort: Tensor) -> Iterator[Chunk]:
            return self._call(step, state, engine, cohort, rng.at("train"))

        average = self.mean_of(self.num_clusters, engine, like=state.centers)
        found = cluster_models(trained, collect, cluster, average, engine, clients, self.weights_of)
        if found is None:
            return state
        who, clustering = found
        centers = average.means(keep=state.centers)
        shown = replace(state, centers=centers)
        choices = [chosen_by_loss(shown, engine, c, rng.at("choose")) for c in engine.cohorts(who)]
        choice = torch.cat(choices)
        answered = choice >= 0
        labels = state.labels.clone()
        labels[who] = torch.where(answered, choice, clustering.labels)
        agreed = self.self_stopping and bool((choice == clustering.labels)[answered].all()) and bool(answered.any())
        return replace(shown, labels=labels, clusterings=state.clusterings + 1, agreed=agreed)

    def _ward(self, rows: Tensor, centers: Tensor) -> Tensor:
        """Ward's clusters [n] of models [n, D], each with the label of the center [K, D] that it is matched to."""
        if len(rows) == 1:
            return torch.zeros(1, dtype=torch.int64)
        tree = linkage(rows.double().cpu().numpy(), method="ward")
        found = torch.from_numpy(fcluster(tree, self.num_clusters, criterion="maxclust")).long() - 1
        means = torch.stack([rows[(found == k).to(rows.device)].mean(0) for k in range(int(found.max()) + 1)])
        _, names = linear_sum_assignment(squared_distances(means, centers).cpu().numpy())
        return torch.from_numpy(names)[found]

    def _chosen(self, state: CornState, engine: Engine, cohort: Tensor, rng: Rng) -> CornState:
        """Each client trains the best of K models; freeze the clusters if nobody moves any more."""
        work = engine.task.work.at(engine.round)
        work = Proximal.of(work, self.prox) if self.prox else work
        refs = torch.arange(self.num_clusters).expand(len(cohort), -1)
        average = self.mean_of(self.num_clusters, engine, like=state.centers)
        labels, steady = state.labels.clone(), state.steady.clone()
        for chunk in engine.call(
            choose_and_train, cohort, models=state.centers, refs=refs, work=work, rng=rng.at("train")
        ):
            labels[chunk.clients] = chunk.answer.choice.cpu()
            steady[chunk.clients] = True
            average.add(chunk.answer.params, chunk.answer.choice, self.weights_of(chunk))
        if not state.choices or bool((labels != state.labels).any()):
            steady = torch.zeros_like(steady)  # the first choice is among the centers of the last one
        met = labels >= 0
        return replace(
            state,
            centers=average.means(keep=state.centers),
            labels=labels,
            choices=state.choices + 1,
            steady=steady,
            frozen=self.self_stopping and bool(met.any()) and bool(steady[met].all()),
        )

    def _call(self, step: ClientStep, state: CornState, engine: Engine, clients: Tensor, rng: Rng) -> Iterator[Chunk]:
        """Clients train from their centers, or from the common model if they have none."""
        personal = self.personal(state, clients)
        work = engine.task.work.at(engine.round)
        return engine.call(step, clients, models=personal.models, refs=personal.refs, work=work, rng=rng)

    def _compact(self, rows: Tensor, engine: Engine) -> Tensor:
        return compact(rows, engine, Rng.seed(0).at("cornflqs"))

    def assign(self, state: CornState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer gets all centers and chooses by loss."""
        return chosen_by_loss(state, engine, newcomers, rng)
