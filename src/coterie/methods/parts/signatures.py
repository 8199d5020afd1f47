"""Signatures: what tells the kind of a client, and not its size or its labels.

All clients sign at the same model, the common one. A signature has a row for each class the client holds: a sketch of
the mean gradient of that class (`client.steps.sign`). Two clients are compared on the classes that both hold, so label
skew does not separate them. A gradient at one point does not depend on the number of steps, so neither does size.
Clients that may not send anything about classes are compared by the direction of their updates: one row each.

Clustering has two stages. The first compares pairs: per class the mean over all clients is subtracted, since most of a
gradient is common to all; a pair's distance is 1 - cosine, averaged over the classes that both hold; then k-means on
the mean distance to the OTHER members of a cluster. In the second, a cluster is the mean signature of its members, and
each client moves to the nearest one, again without counting itself. A client that counted itself would stay wherever
it is: with label skew, it may be the only one in its cluster with some class. A client that is alone in its
cluster keeps it unless another one is about as near as clients are to their clusters: there may be as many kinds as
clients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from coterie.methods.parts.clustering import merged_within
from coterie.randomness import Rng, race

_MOST = 2000  # clients whose pairs are compared; others join the cluster they are nearest to
_AT_ONCE = 1 << 24  # numbers processed at a time
_ITERATIONS = 50
_LONG = 10.0  # times the median length: longer rows are shortened, so that no client decides alone
_ALIKE = 0.8  # a client is in doubt if its distance to the nearest cluster is more than this share of the next
_LONELY, _COPIED = 4.0, 0.05  # times the usual distance to the second nearest other: beyond it, a signature is odd
_APART = 2.5  # times the usual distance: groups whose members are further apart on average are different kinds
_MOST_OF_ALL = 0.5  # groups that are taken for the kinds of honest clients have more than this share of the clients
_FEW = 5  # samples; a client with fewer is in doubt too


@dataclass(frozen=True)
class Signatures:
    """The signatures of n clients."""

    rows: Tensor  # [n, L, D]; zero where the client does not hold the class
    counts: Tensor  # [n, L] samples behind each row; 0: does not hold the class

    @classmethod
    def of(cls, rows: Tensor, counts: Tensor) -> Signatures:
        """Signatures of rows [n, L, D] with their sample counts [n, L]; very long rows are shortened."""
        counts = counts.to(rows)
        lengths = rows.norm(dim=2)  # [n, L]
        typical = lengths.where(counts > 0, lengths.new_tensor(torch.nan)).nanmedian(0).values.nan_to_num()
        limit = _LONG * typical
        return cls(rows * (limit / lengths.clamp_min(1e-30)).clamp_max(1).unsqueeze(2), counts)

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, which: Tensor) -> Signatures:
        """The signatures of some of the clients (indices or a mask)."""
        there = which.to(self.rows.device)
        return Signatures(self.rows[there], self.counts[there])


@dataclass(frozen=True)
class Clustering:
    """Clusters of n signatures."""

    labels: Tensor  # int64 [n], on the CPU
    outliers: Tensor  # bool [n]: like no cluster; they have a label but should move no center
    in_doubt: Tensor  # bool [n]: about as near to a second cluster
    outside: Tensor | None = None  # bool [n]: of no kind; they should never move a center. None: kinds are not clear


def cluster(
    found: Signatures, num_clusters: int, rng: Rng, keys: Tensor, restarts: int = 20, trim: int | None = 0
) -> Clustering:
    """Cluster signatures; `keys` [n] identify the clients, so that their order does not matter.

    With `trim`, the `trim` signatures that are farthest from their clusters are outliers: they are left out of the
    means, and those near no cluster are spread over all clusters. They may be attackers, and one cluster would be the
    nearest to most of them by a little. With `trim=None` the clusters are the kinds that `kinds_in` finds, and all
    others are outside; if it finds none, outliers are those that are alone or copies (`is_odd`).
    """
    some = torch.arange(len(found))
    if len(found) > _MOST:
        some = keys.argsort()[:_MOST]
    some = some[found.counts[some.to(found.counts.device)].sum(1).cpu() > 0]
    odd = torch.zeros(len(found), dtype=torch.bool, device=found.rows.device)
    if trim is None and len(some) > 2:
        kinds = kinds_in(found.at(some), num_clusters, keys[some])
        if bool((kinds >= 0).any()):
            return _by_kind(found, some, kinds, num_clusters)
        odd[some] = is_odd(found.at(some))
        some = some[~odd[some].cpu()]
    trim = max(0, min(trim or 0, len(some) - num_clusters))
    if trim:  # attackers may agree with each other: those far from the middle of all take no part in the first stage
        some = some[_without_farthest(_from_median(found.at(some)), trim).cpu()]
    labels = torch.zeros(len(found), dtype=torch.int64, device=found.rows.device)
    kept = torch.zeros_like(labels, dtype=torch.bool)
    if not len(some):
        return Clustering(labels.cpu(), kept.cpu(), kept.cpu())
    labels[some], kept[some] = _by_pairs(found.at(some), num_clusters, rng, keys[some], restarts), True
    for _ in range(_ITERATIONS):
        means = Means.of(found, labels, kept, num_clusters)
        distances, _ = means.distances(found, labels, kept)
        nearest = distances.argmin(1)
        inside = _without_farthest(distances.min(1).values, trim) & ~odd
        if bool((nearest == labels).all()) and bool((inside == kept).all()):
            break
        labels, kept = nearest, inside
    _, angles = Means.of(found, labels, kept, num_clusters).distances(found, labels, kept)
    if bool((~kept).any()):
        labels = _spread(labels, ~kept, distances, keys.to(labels.device))
    return Clustering(labels.cpu(), (~kept).cpu(), _in_doubt(angles, found.counts).cpu())


def kinds_in(found: Signatures, num_clusters: int, keys: Tensor) -> Tensor:
    """The K kinds of clients that are probably honest, [n]; -1: of none of them. All -1 if kinds are not clear.

    Clients fall into groups by average linkage of their pair distances. Attackers that lie by a rule of their own are
    groups of their own, and noise is alone. Attackers may be as many as a kind, but not most of all clients: so the
    kinds are the K largest groups that point in the direction of the median over all clients, and if they do not have
    most clients together, the groups tell nothing. Copies are in no group.
    """
    kinds = torch.full((len(found),), -1)
    rest = (~is_copy(found)).nonzero().flatten().cpu()
    if len(rest) < 3:
        return kinds
    some = found.at(rest)
    distances = _others(some)
    usual = distances.sort(1).values[:, 1].median()
    groups = merged_within(distances.cpu().double().fill_diagonal_(0), float(_APART * usual), "average")
    agrees = _with_median(some).cpu()
    sizes = torch.bincount(groups)
    order = sorted(range(len(sizes)), key=lambda g: (-int(sizes[g]), int(keys[rest][groups == g].min())))
    chosen = [g for g in order if int(sizes[g]) > 1 and float(agrees[groups == g].mean()) > 0][:num_clusters]
    if len(chosen) < num_clusters or int(sizes[chosen].sum()) <= _MOST_OF_ALL * len(found):
        return kinds
    for kind, group in enumerate(chosen):
        kinds[rest[groups == group]] = kind
    return kinds


def _by_kind(found: Signatures, some: Tensor, kinds: Tensor, num_clusters: int) -> Clustering:
    """A clustering by the kinds [m] of some clients [m]; those with -1 are outside.

    Other clients have the label of the nearest kind, and are outside if they are far from all.
    """
    inside = kinds >= 0
    members = found.at(some[inside])
    labels, in_doubt = nearest(found, members, kinds[inside], num_clusters)
    outside = is_far(found, members, kinds[inside]).index_copy(0, some, ~inside)
    labels = labels.clamp_min(0).index_copy(0, some[inside], kinds[inside])
    return Clustering(labels, outside, in_doubt | outside, outside)


def nearest(new: Signatures, members: Signatures, labels: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """The clusters nearest to new signatures [n], and whether each is in doubt; -1 where none can be compared."""
    there = labels.to(members.rows.device)
    means = Means.of(members, there.clamp_min(0), there >= 0, num_clusters)
    distances, angles = means.distances(new)
    chosen = distances.argmin(1).where(distances.isfinite().any(1), -1)
    return chosen.cpu(), _in_doubt(angles, new.counts).cpu()


def is_far(new: Signatures, members: Signatures, labels: Tensor) -> Tensor:
    """Which new signatures are further from every cluster than members of one kind are from theirs, bool [n]."""
    there, kept = labels.to(members.rows.device), torch.ones(len(labels), dtype=torch.bool, device=members.rows.device)
    means = Means.of(members, there, kept, int(labels.max()) + 1)
    own = means.distances(members, there, kept)[1].gather(1, there.unsqueeze(1))[:, 0]
    least = means.distances(new)[1].amin(1)
    with_others = own.isfinite() & ~means.alone(members, there, kept)
    far: Tensor = least.isfinite() & (least > _APART * own[with_others].median())
    return far.cpu()


def nearest_others(found: Signatures, labels: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """The cluster whose OTHER members are nearest to each member [n], and whether it is in doubt; -1: none."""
    there = labels.to(found.rows.device)
    kept = torch.ones_like(there, dtype=torch.bool)
    distances, angles = Means.of(found, there, kept, num_clusters).distances(found, there, kept)
    chosen = distances.argmin(1).where(distances.isfinite().any(1), -1)
    return chosen.cpu(), _in_doubt(angles, found.counts).cpu()


@dataclass(frozen=True)
class Means:
    """The mean signature of each of K clusters, and of all clients."""

    sums: Tensor  # [K, L, D] weighted by samples
    weights: Tensor  # [K, L]
    middle: Tensor  # [L, D] the plain mean over clients

    @classmethod
    def of(cls, found: Signatures, labels: Tensor, kept: Tensor, num_clusters: int) -> Means:
        """The means of signatures with labels [n]; only those in `kept` [n] count."""
        member = (one_hot(labels, num_clusters) * kept.unsqueeze(1)).to(found.rows)  # [n, K]
        weights = member.T @ found.counts
        sums = torch.einsum("nk,nl,nld->kld", member, found.counts, found.rows)
        holds = ((found.counts > 0) & kept.unsqueeze(1)).to(found.rows)  # [n, L]
        middle = torch.einsum("nl,nld->ld", holds, found.rows) / holds.sum(0).clamp_min(1).unsqueeze(1)
        return cls(sums, weights, middle)

    def distances(
        self, found: Signatures, labels: Tensor | None = None, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Distances of signatures to the clusters on shared classes, [n, K]: squared L2, and 1 - cosine.

        With the labels and `kept` of the means, no client is compared with itself; one that is alone in its cluster
        is at 0 if it should keep it (see `_if_alone`), otherwise at infinity. inf: no shared class.
        """
        step = max(1, _AT_ONCE // max(1, self.sums[0].numel()))
        parts = []
        for begin in range(0, len(found), step):
            which = slice(begin, begin + step)
            own = None if labels is None or kept is None else one_hot(labels[which], len(self.sums)) * kept[which, None]
            parts.append(self._distances(found.rows[which], found.counts[which], own))
        squared, angles = (torch.cat(some) for some in zip(*parts, strict=True))
        if labels is not None and kept is not None:
            alone = self.alone(found, labels, kept)
            own = angles.gather(1, labels.unsqueeze(1))[:, 0]
            far = angles.amin(1) > _if_alone(own[kept & ~alone])  # one's own cluster is infinitely far if one is alone
            at = (alone & far).nonzero().flatten()
            squared[at, labels[at]], angles[at, labels[at]] = 0.0, 0.0
        return squared, angles

    def alone(self, found: Signatures, labels: Tensor, kept: Tensor) -> Tensor:
        """Which signatures are the only ones in the means of their clusters, bool [n]."""
        others = self.weights[labels] - found.counts * kept.unsqueeze(1)  # [n, L]
        only: Tensor = kept & (found.counts > 0).any(1) & (others < 0.5).all(1)  # counts are whole numbers
        return only

    def _distances(self, rows: Tensor, counts: Tensor, own: Tensor | None) -> tuple[Tensor, Tensor]:
        squared: list[Tensor] = []
        angles: list[Tensor] = []
        for k in range(len(self.sums)):
            sums, weights = self.sums[k], self.weights[k].expand_as(counts)
            if own is not None:
                mine = counts * own[:, k, None].to(counts)
                sums, weights = sums - mine.unsqueeze(2) * rows, weights - mine
            weights = weights.where(weights > 0.5, 0)  # counts are whole numbers; the rest is rounding
            means = sums / weights.clamp_min(1).unsqueeze(2)  # [c, L, D]
            shared = counts * weights / (counts + weights).clamp_min(1)  # [c, L] evidence in a class
            total = shared.sum(1)
            apart = (rows - means).square().sum(2)
            turned = 1 - (normalize(rows - self.middle, dim=2) * normalize(means - self.middle, dim=2)).sum(2)
            for values, kind in ((apart, squared), (turned, angles)):
                mean = (shared * values).sum(1) / total.clamp_min(1e-30)
                kind.append(mean.where(total > 0, torch.inf))
        return torch.stack(squared, dim=1), torch.stack(angles, dim=1)


def _by_pairs(found: Signatures, num_clusters: int, rng: Rng, keys: Tensor, restarts: int) -> Tensor:
    """k-means on mean distances to the other members, the best of several starts: labels [n]."""
    distances, comparable = pair_distances(found)
    comparable = comparable.fill_diagonal_(0)
    best: tuple[float, Tensor] | None = None
    for number in range(restarts):
        seeds = _seeds(distances, num_clusters, rng.at("restart", number), keys.to(distances.device))
        labels = distances[:, seeds].argmin(1)
        for _ in range(_ITERATIONS):
            nearest = _mean_distances(distances, comparable, labels, num_clusters).argmin(1)
            if bool((nearest == labels).all()):
                break
            labels = nearest
        own = _mean_distances(distances, comparable, labels, num_clusters).gather(1, labels.unsqueeze(1))[:, 0]
        cost = float(own.clamp_max(2).mean()) + num_clusters - len(labels.unique())
        # Of starts that differ by rounding only the first.
        if best is None or cost < best[0] - 1e-6:
            best = (cost, labels)
    assert best is not None
    return best[1]


def pair_distances(found: Signatures) -> tuple[Tensor, Tensor]:
    """1 - cosine of each pair of clients on the classes both hold, and whether there is one: [n, n] each."""
    count = len(found)
    total = found.rows.new_zeros(count, count)
    evidence = torch.zeros_like(total)
    for label in range(found.rows.shape[1]):
        counts, rows = found.counts[:, label], found.rows[:, label]
        holds = (counts > 0).to(rows)
        middle = (holds @ rows) / holds.sum().clamp_min(1)
        rows = normalize(rows - middle, dim=1)
        pairs = counts.unsqueeze(1) * counts / (counts.unsqueeze(1) + counts).clamp_min(1)
        total += pairs * (1 - rows @ rows.T)
        evidence += pairs
    return (total / evidence.clamp_min(1e-30)).where(evidence > 0, 1.0), (evidence > 0).to(total)


def _mean_distances(distances: Tensor, comparable: Tensor, labels: Tensor, num_clusters: int) -> Tensor:
    """The mean distance of each client to the other members of each cluster, [n, K]; inf if there are none.

    To the cluster in which it is alone, a client has the distance `_if_alone`.
    """
    member = one_hot(labels, num_clusters).to(distances)
    others = comparable @ member
    found = ((comparable * distances) @ member / others.clamp_min(1)).where(others > 0, torch.inf)
    alone = member.bool() & (member.sum(0) < 2)
    usual = _if_alone(found.gather(1, labels.unsqueeze(1))[~alone.any(1), 0])
    return found.where(~alone, usual)


def _if_alone(own: Tensor) -> float:
    """The distance to a cluster that has no other member: halfway between the median of the distances that others have
    to their own clusters, and 1, that of clients that have nothing in common."""
    known = own[own.isfinite()]
    return (1 + (float(known.median().clamp_max(1)) if len(known) else 0.0)) / 2


def _seeds(distances: Tensor, num_clusters: int, rng: Rng, keys: Tensor) -> list[int]:
    """k-means++ on distances: far clients are more likely to be the next seed."""
    chosen = [int(race(rng.at(0), keys, torch.ones(len(keys), device=keys.device)))]
    for k in range(1, num_clusters):
        away = distances[:, chosen].amin(1).clamp_min(0)
        away[chosen] = 0
        weights = away.square()
        weights = weights if float(weights.sum()) > 0 else torch.ones_like(weights)
        chosen.append(int(race(rng.at(k), keys, weights)))
    return chosen


def _without_farthest(distances: Tensor, count: int) -> Tensor:
    """All [n] but the `count` with the largest distances."""
    kept = torch.ones_like(distances, dtype=torch.bool)
    kept[distances.topk(count).indices] = False
    return kept


def is_odd(found: Signatures) -> Tensor:
    """Which signatures are like no other, or the same as others, bool [n]: by their second nearest neighbours.

    Clients of one kind resemble each other up to the noise of their samples. Noise in place of a signature resembles
    nothing; attackers that agree on a signature resemble each other without noise.
    """
    second = _others(found).sort(1).values[:, 1]
    odd: Tensor = (second > _LONELY * second.median()) | is_copy(found)
    return odd


def is_copy(found: Signatures) -> Tensor:
    """Which signatures at least two others have sent too, bool [n]."""
    second = _others(found).sort(1).values[:, 1]
    same: Tensor = second < _COPIED * second.median()
    return same


def _others(found: Signatures) -> Tensor:
    """Distances to the other clients, [n, n]; 1 where no class is shared, infinite to oneself."""
    distances, comparable = pair_distances(found)
    return distances.where(comparable > 0, 1.0).fill_diagonal_(torch.inf)


def _median(found: Signatures) -> Tensor:
    """The median signature over the clients that hold a class, [L, D]."""
    missing = found.rows.new_tensor(torch.nan)
    middle: Tensor = found.rows.where((found.counts > 0).unsqueeze(2), missing).nanmedian(0).values.nan_to_num()
    return middle


def _with_median(found: Signatures) -> Tensor:
    """The cosine of each signature with the median, on the classes it holds: [n]."""
    middle = _median(found) * (found.counts > 0).unsqueeze(2)
    cosines: Tensor = (normalize(found.rows.flatten(1), dim=1) * normalize(middle.flatten(1), dim=1)).sum(1)
    return cosines


def _from_median(found: Signatures) -> Tensor:
    """The mean squared distance of each signature to the median over clients, on the classes it holds: [n]."""
    holds = (found.counts > 0).to(found.rows)  # [n, L]
    away = (found.rows - _median(found)).square().sum(2)
    return (away * holds).sum(1) / holds.sum(1).clamp_min(1)


def _spread(labels: Tensor, outliers: Tensor, distances: Tensor, keys: Tensor) -> Tensor:
    """Outliers that are near no cluster go to all clusters in turn."""
    if distances.shape[1] < 2:
        return labels
    least = distances.topk(2, dim=1, largest=False).values
    lost = (outliers & (least[:, 0] > _ALIKE * least[:, 1])).nonzero().flatten()
    labels = labels.clone()
    labels[lost[keys[lost].argsort()]] = torch.arange(len(lost), device=labels.device) % distances.shape[1]
    return labels


def _in_doubt(angles: Tensor, counts: Tensor) -> Tensor:
    """Whether a client is about as near to a second cluster [n, K], or has very few samples [n, L]: bool [n]."""
    if angles.shape[1] < 2:
        return torch.zeros(len(angles), dtype=torch.bool, device=angles.device)
    least = angles.topk(2, dim=1, largest=False).values
    alike = least[:, 0] > _ALIKE * least[:, 1]
    # Signatures by update have one row, whose count tells nothing about samples.
    return alike if counts.shape[1] < 2 else alike | (counts.sum(1) < _FEW)
