"""Clustering of models: distances, running means, k-means with restarts.

Nothing here sees true groups or test data, and no result depends on the order of clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from coterie.randomness import Rng, race

_PIECE = 1 << 20  # numbers processed at a time
_GRAM = 2048  # rows up to which the matrix of their products is used


def squared_distances(rows: Tensor, centers: Tensor) -> Tensor:
    """Squared L2 distance of each row [c, D] to each center [K, D]: [c, K].

    Computed from differences: models of one run are close together and far from zero, where the matrix product
    ||a||^2 - 2ab + ||b||^2 loses all digits.
    """
    found = torch.zeros(len(rows), len(centers), dtype=rows.dtype, device=rows.device)
    # A few columns at a time, so that the differences of large models stay in the cache.
    width = max(1, _PIECE // max(1, len(rows)))
    for part, other in zip(rows.split(width, dim=1), centers.split(width, dim=1), strict=True):
        for k, center in enumerate(other):
            found[:, k] += (part - center).square_().sum(1)
    return found


def cosine_distances(rows: Tensor, centers: Tensor) -> Tensor:
    """1 - cosine of each row [c, D] with each center [K, D]: [c, K]; a zero vector is at distance 1."""
    cosines: Tensor = normalize(rows, dim=1) @ normalize(centers, dim=1).T
    return 1 - cosines


def merged_within(distances: Tensor, limit: float, linkage: Literal["average", "complete"]) -> Tensor:
    """Groups [n] by linkage of distances [n, n], whose diagonal is zero; two merge up to this distance."""
    from scipy.cluster import hierarchy  # slow to import, and few runs need it
    from scipy.spatial.distance import squareform

    if len(distances) == 1:
        return torch.zeros(1, dtype=torch.int64)
    tree = hierarchy.linkage(squareform(distances.numpy(), checks=False), method=linkage)
    return torch.from_numpy(hierarchy.fcluster(tree, limit, criterion="distance")).long() - 1


class CenterSums:
    """Running sums of the members of K clusters: a round never holds more than a chunk of models."""

    def __init__(self, num_clusters: int, like: Tensor) -> None:
        self._sums = torch.zeros(num_clusters, like.shape[-1], dtype=like.dtype, device=like.device)
        self.weights = torch.zeros(num_clusters, dtype=torch.float64, device=like.device)

    def add(self, rows: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Add models [c, P] to the clusters of their labels [c]."""
        labels = labels.to(rows.device)
        share = torch.nn.functional.one_hot(labels, len(self._sums)).to(rows.dtype)  # [c, K]
        if weights is not None:
            share = share * weights.to(rows.device, rows.dtype).unsqueeze(1)
        self._sums.addmm_(share.T, rows)
        self.weights += share.sum(0).double()

    def means(self, keep: Tensor) -> Tensor:
        """The mean of each cluster [K, P]; a cluster without members keeps its row of `keep`."""
        # A mean over no members is NaN.
        empty = (self.weights == 0).unsqueeze(1)
        means = self._sums / self.weights.clamp_min(1e-300).to(self._sums.dtype).unsqueeze(1)
        return torch.where(empty, keep, means)


@dataclass(frozen=True)
class KMeans:
    """A clustering of N rows."""

    labels: Tensor  # int64 [N]
    centers: Tensor  # [K, D]
    inertia: float  # sum of squared distances to the centers, without outliers
    outliers: Tensor  # bool [N]: excluded from the centers; labeled by the nearest one


def kmeans(
    rows: Tensor, num_clusters: int, rng: Rng, keys: Tensor, restarts: int = 20, iterations: int = 100, trim: int = 0
) -> KMeans:
    """Lloyd's k-means from several k-means++ seedings, computed together; the one with the least inertia is kept.

    `keys` [N] identify the rows: seeding is a race between keys, so the order of rows does not matter. With `trim`, the
    `trim` rows farthest from their centers do not move them (trimmed k-means, Cuesta-Albertos et al. 1997), and the
    `trim` rows farthest from the seeds so far cannot become seeds, since k-means++ favors outliers.
    """
    trim = min(trim, len(rows) - num_clusters)
    mean = rows.mean(0)
    x = _reduced(rows, mean)  # distances by matrix products need rows near zero
    keys = keys.to(rows.device)
    starts = [_seeds(x, num_clusters, rng.at("restart", r), keys, trim) for r in range(restarts)]
    centers = torch.stack(starts)  # [R, K, D]
    norms = x.square().sum(1)  # [N]
    labels = torch.full((restarts, len(x)), -1, device=x.device)
    kept = torch.ones(restarts, len(x), dtype=torch.bool, device=x.device)
    for _ in range(iterations):
        distances = norms - 2 * centers @ x.T + centers.square().sum(2, keepdim=True)  # [R, K, N]
        least, nearest = distances.min(1)
        inside = kept if trim <= 0 else _without_farthest(least, trim)
        if bool((nearest == labels).all()) and bool((inside == kept).all()):
            break
        labels, kept = nearest, inside
        members = torch.nn.functional.one_hot(labels, num_clusters).to(x.dtype).transpose(1, 2)  # [R, K, N]
        members = members * kept.unsqueeze(1)
        counts = members.sum(2, keepdim=True)
        centers = torch.where(counts > 0, members @ x / counts.clamp_min(1), centers)
        _revive(centers, counts, x, distances, labels)
    # One restart at a time: all together would need R times the memory of the rows.
    inertia = torch.stack([(x - centers[r][labels[r]])[kept[r]].square().sum() for r in range(restarts)])  # [R]
    # Of restarts that differ by rounding only the first, so that rounding does not decide the labels.
    best = int((inertia <= inertia.min() * (1 + 1e-9) + 1e-300).nonzero()[0])
    found = _centers_of(rows, x, centers[best], labels[best], kept[best])
    return KMeans(labels[best].cpu(), found, float(inertia[best]), ~kept[best].cpu())


def _reduced(rows: Tensor, mean: Tensor) -> Tensor:
    """Centered rows [N, D], or coordinates [N, N] with the same distances if N is smaller.

    k-means uses distances only, and N points span N dimensions: the square root of the matrix of their products gives
    coordinates. There are few clients, and models are large.
    """
    count, size = rows.shape
    if size <= count or count > _GRAM:
        x = rows - mean
        return x.double() if x.numel() <= 1 << 24 else x
    products = torch.zeros(count, count, dtype=torch.float64, device=rows.device)
    for part, middle in zip(rows.split(_PIECE // count, dim=1), mean.split(_PIECE // count), strict=True):
        centered = part.double() - middle.double()
        products += centered @ centered.T
    values, vectors = torch.linalg.eigh(products)
    found: Tensor = vectors * values.clamp_min(0).sqrt()
    return found


def _centers_of(rows: Tensor, x: Tensor, centers: Tensor, labels: Tensor, kept: Tensor) -> Tensor:
    """The centers [K, D] of the rows, given a clustering of the reduced rows `x`."""
    member = torch.nn.functional.one_hot(labels, len(centers)).to(rows.dtype) * kept.to(rows.dtype).unsqueeze(1)
    counts = member.sum(0).unsqueeze(1)  # [K, 1]
    means = (member / counts.T.clamp_min(1)).T @ rows
    alone = squared_distances(centers, x).argmin(1)  # a center without members is one of the rows
    return torch.where(counts > 0, means, rows[alone])


def _without_farthest(distances: Tensor, count: int) -> Tensor:
    """All rows [R, N] but the `count` with the largest distances."""
    kept = torch.ones_like(distances, dtype=torch.bool)
    return kept.scatter_(1, distances.topk(count, dim=1).indices, False)


def _seeds(x: Tensor, num_clusters: int, rng: Rng, keys: Tensor, trim: int = 0) -> Tensor:
    """k-means++ seeds [K, D] (Arthur and Vassilvitskii 2007): far rows are more likely to be the next seed."""
    first = race(rng.at(0), keys, torch.ones(len(x), device=x.device))
    chosen = [int(first)]
    nearest = (x - x[chosen[0]]).square().sum(1)
    for k in range(1, num_clusters):
        weights = nearest if trim <= 0 else nearest * _without_farthest(nearest.unsqueeze(0), trim)[0]
        # If all rows coincide with seeds, any row will do.
        weights = weights if float(weights.sum()) > 0 else torch.ones_like(nearest)
        chosen.append(int(race(rng.at(k), keys, weights)))
        nearest = torch.minimum(nearest, (x - x[chosen[-1]]).square().sum(1))
    return x[chosen]


def _revive(centers: Tensor, counts: Tensor, x: Tensor, distances: Tensor, labels: Tensor) -> None:
    """Move a center without rows to the row that is farthest from its center."""
    for restart, cluster in (counts[..., 0] == 0).nonzero().tolist():
        own = distances[restart].gather(0, labels[restart].unsqueeze(0))[0]
        farthest = int(own.argmax())
        centers[restart, cluster] = x[farthest]
        distances[restart, :, farthest] = 0
