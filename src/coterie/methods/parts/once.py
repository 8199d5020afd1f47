"""Clusters that are found once: what is shared by methods that then average inside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from coterie.client.steps import judge, train
from coterie.client.work import SGD
from coterie.engines.base import Chunk, Engine
from coterie.methods.base import S
from coterie.methods.parts.averaging import Averaging, samples_of
from coterie.methods.parts.start import enough_clients
from coterie.randomness import Rng, uniform
from coterie.settings import setting


@dataclass(frozen=True)
class ClusterOnce(Averaging[S]):
    """FedAvg inside each cluster; a client without a cluster gets one by `assign` when it first takes part."""

    weighting: Literal["samples", "equal"] = setting("samples", "weight of a client in its cluster's mean")

    def round(self, state: S, engine: Engine, cohort: Tensor, rng: Rng) -> S:
        """Assign new clients, train from the clusters' models, average each cluster."""
        labels = self.labels_of(state, engine, cohort, rng.at("place"))
        known = cohort[self.is_placed(state, labels[cohort])]
        work = engine.task.work.at(engine.round)
        chunks = engine.call(train, known, models=state.centers, refs=labels[known], work=work, rng=rng.at("train"))
        centers, _ = self.averaged(chunks, labels, state.centers, engine, weighting=self.weighting)
        return replace(state, centers=centers, labels=labels)

    def labels_of(self, state: S, engine: Engine, cohort: Tensor, rng: Rng) -> Tensor:
        """The labels [N], in which new clients of the cohort have a cluster if they answered."""
        labels = state.labels.clone()
        new = cohort[~self.is_placed(state, labels[cohort])]
        if len(new):
            found = self.assign(state, engine, new, rng)
            labels[new] = torch.where(found >= 0, found, labels[new])
        return labels

    def weights_of(self, chunk: Chunk) -> Tensor:
        """The weight of each client of a chunk in its cluster's mean, [c]."""
        samples = samples_of(chunk)
        return samples if self.weighting == "samples" else torch.ones_like(samples)

    def is_placed(self, state: S, labels: Tensor) -> Tensor:
        """Whether clients with these labels [n] have a cluster, bool [n]."""
        return labels >= 0


def first_clients(engine: Engine, num_clusters: int, rng: Rng) -> Tensor:
    """Random clients [n] to be clustered at the start: as many as clusters can be judged by, in whole cohorts."""
    size = -(-enough_clients(num_clusters, engine.num_clients) // engine.cohort_size) * engine.cohort_size
    return uniform(rng.keys(engine.keys), 1)[:, 0].argsort(stable=True)[:size]


def trained(
    engine: Engine, clients: Tensor, table: Tensor, refs: Tensor, work: SGD, rng: Rng
) -> tuple[Tensor, Tensor, Tensor]:
    """Clients train from rows `refs` [n] of a table, and the server holds all their models.

    Who answered, ids [m] ascending, their models [m, P] and sample counts [m]. A call is no larger than a cohort.
    """
    size = len(clients) * table.shape[1] * table.element_size()
    engine.require_memory(size, f"The server holds the models of {len(clients)} clients at once, which")
    places = torch.arange(len(clients)).split(engine.cohort_size)
    calls = [engine.call(train, clients[p], models=table, refs=refs[p], work=work, rng=rng) for p in places]
    chunks = [chunk for call in calls for chunk in call]
    if not chunks:
        return clients[:0], table[:0], clients[:0]
    models, samples = (torch.cat([chunk.answer[name] for chunk in chunks]) for name in ("params", "samples"))
    who, models, samples = by_id(torch.cat([chunk.clients for chunk in chunks]), models, samples)
    return who, models, samples


def by_id(clients: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
    """Clients [n] and rows [n, ...] in the order of ids: clusters must not be named by who answers first."""
    order = clients.argsort()
    return clients[order], *(some[order.to(some.device)] for some in rows)


def judged(engine: Engine, clients: Tensor, table: Tensor, rng: Rng) -> Tensor:
    """The losses of models [M, P] on the training samples of clients [n]: float64 [n, M]; NaN: did not answer."""
    losses = torch.full((len(clients), len(table)), torch.nan, dtype=torch.float64)
    for places in torch.arange(len(clients)).split(engine.cohort_size):
        refs = torch.arange(len(table)).expand(len(places), -1)
        for chunk in engine.call(judge, clients[places], models=table, refs=refs, rng=rng):
            losses[places[chunk.positions]] = chunk.answer.losses.double().cpu()
    return losses
