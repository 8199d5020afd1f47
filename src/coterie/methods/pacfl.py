"""PACFL: clusters by principal angles between the subspaces of clients' data (Vahidian et al. 2023, "Efficient
Distribution Similarity Identification in Clustered Federated Learning via Principal Angles Between Client Data
Subspaces").

Once, before any training, each client sends p left singular vectors U_l of its data matrix (features times samples) of
each class l. For two clients and a class that both hold, let s_1 >= s_2 >= ... be the singular values of U_l^T V_l. The
principal angles are arccos(s_k); they depend on the two subspaces and not on the vectors that span them. The distance
of two clients is, in degrees, the mean over the classes that both hold of

    arccos(s_1)                       angle="smallest"
    mean over k of arccos(s_k)        angle="mean"

Clients are clustered by average linkage, cut at `beta` degrees, and each cluster is averaged alone. There is no K.

Bytes: as FedAvg, and once p vectors of each class.

Deviations. Public code takes the arccos of the diagonal of U_l^T V_l, which changes if the vectors are rotated within
their subspace. Subspaces are compared per class: otherwise clients of one kind that hold different classes would be far
apart. Clients that share no class are 90 degrees apart. In the start at most about 50 clients are clustered; all others
join the cluster with the smallest mean distance when they first take part. Angles are larger if clients have few
samples: `beta` must be chosen for the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from torch import Tensor

from coterie.client.block import Block, Models
from coterie.client.forms import Asked, Forms
from coterie.client.steps import Answer, client_step
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.engines.base import Engine
from coterie.methods.base import ClusterState, register
from coterie.methods.parts.once import ClusterOnce, by_id, first_clients
from coterie.randomness import Rng
from coterie.settings import setting

_RANK = 1e-5  # singular values below this share of the largest are zero


def found_subspaces(asked: Asked) -> Forms:
    """Directions of length 1, up to rounding, for each class."""
    task, count = asked.task, int(asked.given["vectors"])
    return {"bases": asked.numbers(max(1, task.num_classes), math.prod(task.input_shape), count, low=-2, high=2)}


@client_step("coterie.pacfl:subspaces", found_subspaces)
def subspaces(block: Block, models: Models | None, work: SGD, vectors: Tensor) -> Answer:
    """The leading left singular vectors of the samples of each class: [c, L, D, p], zero where there are none."""
    classes, count = block.task.num_classes, int(vectors)
    found = []
    for x, y in block.shards():
        samples = x.flatten(1).double()
        parts = [samples[y == label] for label in range(classes)] if classes else [samples]
        found.append(torch.stack([basis(part, count) for part in parts]))
    return Answer(bases=torch.stack(found).to(block.initial.dtype))


def basis(samples: Tensor, count: int) -> Tensor:
    """The `count` leading singular directions [D, count] of samples [n, D]; zeros beyond their rank."""
    wide = len(samples) <= samples.shape[1]
    values, vectors = torch.linalg.eigh(samples @ samples.T if wide else samples.T @ samples)
    lengths = values.clamp_min(0).sqrt().flip(0)[:count]
    kept = int((lengths > _RANK * lengths[:1]).sum())
    lengths, vectors = lengths[:kept], vectors.flip(1)[:, :kept]
    directions = samples.T @ vectors / lengths if wide else vectors
    return torch.nn.functional.pad(directions, (0, count - kept))


@dataclass(frozen=True)
class PacflState(ClusterState):
    """The subspaces of the clients that were clustered at the start."""

    clustered: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [m] client ids
    bases: Tensor = field(default_factory=lambda: torch.empty(0))  # [m, L, D, p]


@register
@dataclass(frozen=True)
class PACFL(ClusterOnce[PacflState]):
    """Clusters of similar data subspaces, found before training; K is found by a threshold."""

    key: ClassVar[str] = "pacfl"
    paper: ClassVar[str] = "Vahidian et al. 2023"
    state_type: ClassVar[type[ClusterState]] = PacflState
    finds_clusters: ClassVar[bool] = True

    beta: float = setting(12.0, "angle at which the dendrogram is cut, in degrees", gt=0, le=90)
    vectors: int = setting(3, "number of singular vectors for each class (p)", ge=1)
    angle: Literal["smallest", "mean"] = setting(
        "smallest", "distance of two subspaces: the smallest of their principal angles, or the mean"
    )

    def start(self, task: Task, engine: Engine, rng: Rng) -> PacflState:
        """Cluster some clients by their data."""
        state = PacflState.common_start(engine, num_clusters=1)
        return self._clustered(state, engine, first_clients(engine, 1, rng.at("clients")), rng)

    def round(self, state: PacflState, engine: Engine, cohort: Tensor, rng: Rng) -> PacflState:
        """See `ClusterOnce.round`; if nobody answered at the start, the clustering comes first."""
        if not len(state.clustered):
            state = self._clustered(state, engine, cohort, rng.at("start"))
        return super().round(state, engine, cohort, rng) if len(state.clustered) else state

    def _clustered(self, state: PacflState, engine: Engine, clients: Tensor, rng: Rng) -> PacflState:
        """The clusters of these clients; the state as it was if none of them answers."""
        found = list(self._sent(engine, clients, rng))
        if not found:
            return state
        who, bases = by_id(*(torch.cat(parts) for parts in zip(*found, strict=True)))
        labels = state.labels.clone()
        labels[who] = self._clusters(self._distances(bases, bases))
        centers = state.common.repeat(int(labels.max()) + 1, 1)
        return replace(state, centers=centers, labels=labels, clustered=who, bases=bases)

    def _clusters(self, distances: Tensor) -> Tensor:
        """Clusters [n] by average linkage of distances [n, n]."""
        if len(distances) == 1:
            return torch.zeros(1, dtype=torch.int64)
        apart = ((distances + distances.T) / 2).fill_diagonal_(0).numpy()
        tree = linkage(squareform(apart, checks=False), method="average")
        return torch.from_numpy(fcluster(tree, self.beta, criterion="distance")).long() - 1

    def _distances(self, some: Tensor, others: Tensor) -> Tensor:
        """The distances [n, m] of clients with subspaces [n, L, D, p] and [m, L, D, p], in degrees."""
        total = torch.zeros(len(some), len(others), dtype=torch.float64)
        shared = torch.zeros_like(total)
        for label in range(some.shape[1]):
            angles, count = principal_angles(some[:, label], others[:, label])
            angles = angles[..., 0] if self.angle == "smallest" else angles.sum(2) / count.clamp_min(1)
            total += torch.where(count > 0, angles, 0.0).cpu()
            shared += (count > 0).cpu()
        return torch.where(shared > 0, total / shared.clamp_min(1), 90.0)

    def _sent(self, engine: Engine, clients: Tensor, rng: Rng) -> Iterator[tuple[Tensor, Tensor]]:
        """Clients send their subspaces: ids [c], bases [c, L, D, p]."""
        payload = {"vectors": torch.tensor(self.vectors)}
        for cohort in engine.cohorts(clients):
            for chunk in engine.call(subspaces, cohort, payload=payload, rng=rng):
                yield chunk.clients, chunk.answer.bases

    def assign(self, state: PacflState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer sends its subspaces and joins the cluster with the smallest mean distance."""
        labels = torch.full((engine.num_clients,), -1, dtype=torch.int64)
        if len(state.clustered):
            own = torch.nn.functional.one_hot(state.labels[state.clustered]).double()  # [m, K]
            for clients, bases in self._sent(engine, newcomers, rng):
                labels[clients] = (self._distances(bases, state.bases) @ (own / own.sum(0))).argmin(1)
        return labels[newcomers]


def principal_angles(some: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """The principal angles between subspaces [n, D, p] and [m, D, p] in degrees, ascending: [n, m, p].

    And their number [n, m], the smaller of the two ranks; angles beyond it are 0.
    """
    products = torch.einsum("ndp,mdq->nmpq", some.double(), others.double())
    values = torch.linalg.svdvals(products).clamp(0, 1)
    ranks = [(bases.square().sum(1) > 0.5).sum(1) for bases in (some, others)]  # columns are of length 1 or 0
    count = torch.minimum(ranks[0].unsqueeze(1), ranks[1].unsqueeze(0))
    inside = torch.arange(values.shape[2], device=values.device) < count.unsqueeze(2)
    return torch.where(inside, torch.rad2deg(torch.arccos(values)), 0.0), count
