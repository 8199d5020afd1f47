"""How the members of a cluster become its center: the mean, or one that a few bad members cannot move far.

Robust means hold all members' models at once (the plain mean streams), and count every member alike: a weight is
what the member claims. They know nothing of who is honest; `robust_share` is how many bad members they withstand.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from coterie.engines.base import Engine
from coterie.methods.base import Algorithm, S
from coterie.methods.parts.clustering import CenterSums
from coterie.settings import setting

Robust = Literal["none", "trimmed_mean", "median", "krum"]

_COLUMNS = 1 << 22  # numbers that are sorted together


class Average(Protocol):
    """How the members of a cluster become its center."""

    def add(self, rows: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Take in models [c, P] of clusters [c]; weight 0 is left out."""
        ...

    def means(self, keep: Tensor) -> Tensor:
        """The centers [K, P]; a cluster without members keeps its row of `keep`."""
        ...


class HeldModels(abc.ABC):
    """Holds all members until the end, then makes each cluster's center of them."""

    def __init__(self, num_clusters: int) -> None:
        self._num_clusters = num_clusters
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, rows: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Keep models [c, P] of clusters [c]."""
        ones = torch.ones(len(rows), dtype=rows.dtype, device=rows.device)
        weights = ones if weights is None else weights.to(rows.device, rows.dtype)
        self._parts.append((rows, labels.to(rows.device), weights))

    def means(self, keep: Tensor) -> Tensor:
        """The centers [K, P]; a cluster without members keeps its row of `keep`."""
        if not self._parts:
            return keep
        rows, labels, weights = (torch.cat(parts) for parts in zip(*self._parts, strict=True))
        centers = keep.clone()
        for k in range(self._num_clusters):
            mine = (labels == k) & (weights > 0)
            if bool(mine.any()):
                centers[k] = self.center(k, rows[mine], weights[mine])
        return centers

    @abc.abstractmethod
    def center(self, cluster: int, rows: Tensor, weights: Tensor) -> Tensor:
        """The center [P] of a cluster with these members [m, P]."""


class RobustMeans(HeldModels):
    """Each center is a robust mean of its members."""

    def __init__(self, num_clusters: int, kind: Robust, share: float) -> None:
        super().__init__(num_clusters)
        self._kind, self._share = kind, share

    def center(self, cluster: int, rows: Tensor, weights: Tensor) -> Tensor:
        """See `robust_mean`."""
        return robust_mean(rows, self._kind, self._share)


def robust_mean(rows: Tensor, kind: Robust, share: float) -> Tensor:
    """One model [P] of several [m, P], of which about `share` may be bad.

    `trimmed_mean` (Yin et al. 2018): per parameter, without the `share` lowest and the `share` highest values.
    `median`: per parameter. `krum` (Blanchard et al. 2017, multi-Krum): the mean of the 1 - `share` of the models
    that are nearest to their nearest neighbours.

    >>> robust_mean(torch.tensor([[0.0], [1.0], [2.0], [99.0]]), "trimmed_mean", 0.25)
    tensor([1.5000])
    """
    count = len(rows)
    bad = min(-int(-share * count // 1), (count - 1) // 2)  # rounded up, and somebody is left
    if kind == "none" or count < 3:
        return rows.mean(0)
    if kind == "krum":
        return rows[_krum(rows, bad)].mean(0)
    drop = (count - 1) // 2 if kind == "median" else bad
    pieces = rows.split(max(1, _COLUMNS // count), dim=1)
    return torch.cat([_sorted(part)[drop : count - drop].mean(0) for part in pieces])


def _krum(rows: Tensor, bad: int) -> Tensor:
    """Which models [count - bad] are kept."""
    centered = (rows - rows.mean(0)).double() if rows.numel() <= _COLUMNS else rows - rows.mean(0)
    apart = torch.cdist(centered, centered).square()
    near = max(1, len(rows) - bad - 2)
    scores = apart.sort(1).values[:, 1 : 1 + near].sum(1)
    return scores.argsort(stable=True)[: len(rows) - bad]


@dataclass(frozen=True)
class Averaging(Algorithm[S]):
    """A method that averages models."""

    robust: Literal["none", "trimmed_mean", "median", "krum"] = setting(
        "none", "mean of a cluster's members: plain, or one that withstands bad members"
    )
    robust_share: float = setting(
        0.2, "share of bad members that a robust mean, and the first clustering, withstand", ge=0, lt=0.5
    )

    def mean_of(self, num_clusters: int, engine: Engine, like: Tensor) -> Average:
        """Where the members of K clusters are added; `like` [.., P] tells size and type."""
        if self.robust == "none":
            return CenterSums(num_clusters, like=like)
        size = engine.num_clients * like.shape[-1] * like.element_size()
        engine.require_memory(size, f"A robust mean holds the models of {engine.num_clients} clients at once:")
        return RobustMeans(num_clusters, self.robust, self.robust_share)

    @property
    def trimmed(self) -> float:
        """The share of clients that a clustering leaves out as outliers."""
        return 0.0 if self.robust == "none" else self.robust_share


def _sorted(rows: Tensor) -> Tensor:
    """Each column sorted; numpy is about nine times faster at it than torch on a CPU."""
    if rows.is_cuda:
        return rows.sort(0).values
    return torch.from_numpy(np.sort(rows.numpy(), axis=0))
