"""Finding the kinds of clients, and how many there are, from signatures that have two halves.

A client's signature is the mean gradient of each class at one common model (`parts/signatures.py`). Here it comes in
two halves, A and B, from different samples. Their noise is independent, so for two groups of clients a and b

    D = <A_a - A_b, B_a - B_b>

is an unbiased estimate of the squared distance of their true gradients, per class: about zero if the groups are of one
kind, whatever their sizes, labels and noise. Two numbers follow, over the classes that both hold:

    z   D in standard deviations of its noise: is there a difference at all?
    q   D times the samples of both, n_a n_b / (n_a + n_b), in units of the noise of one sample. One model for both has
        the bias D, two models have more noise: at q = 1 both cost the same.

Starting from single clients, the pair with the lowest z is merged, until every pair that is left is both clearly
different and worth a model of its own. People differ from each other, so with enough samples any two clients differ
clearly. Kinds are more than that: two groups must be further apart than their members are from the rest of their group.

The variance of D is tr(S^2) (1/nA_a + 1/nA_b) (1/nB_a + 1/nB_b), where S is the covariance of one sample's gradient;
products of half differences of different clients estimate tr(S^2).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CLEAR = 10.0  # z from which two groups differ; by chance, the search for the best pair reaches 5, rarely 9
WORTH = 0.4  # q beyond which two models may be worth it
SURE = 10.0  # q beyond which they are
_NOTHING = 2.0  # z of groups that share no class: nothing speaks against merging them, but better known pairs go first
_MOST = 400  # clients that are merged pair by pair; the others join the group that is nearest
_CHANCE = 4.0  # how much further from a group than its members a single client must be
_ERRORS = 2.0  # standard errors by which clients of a group must differ to count as different
_ROUNDS = 20  # of moving clients and joining groups, at most
_BLOCK = 1024  # clients that are compared with all groups at a time
_TINY = 1e-30


@dataclass(frozen=True)
class Halves:
    """The signatures of n clients, or of n groups of them, as two halves."""

    first: Tensor  # [n, L, D]
    second: Tensor  # [n, L, D]
    counts: Tensor  # [n, L, 2] samples in the halves

    @classmethod
    def of(cls, rows: Tensor, contrasts: Tensor, counts: Tensor) -> Halves:
        """From whole signatures [n, L, D], the differences of their halves, and their sample counts [n, L]."""
        counts = counts.to(rows.device)
        parts = torch.stack([(counts + 1) // 2, counts // 2], dim=2).to(rows)
        share = parts / counts.clamp_min(1).unsqueeze(2)
        return cls(rows + share[..., 1:] * contrasts, rows - share[..., :1] * contrasts, parts)

    @classmethod
    def joined(cls, parts: Sequence[Halves]) -> Halves:
        """Those of several."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("first", "second", "counts")))

    def __len__(self) -> int:
        return len(self.first)

    @functools.cached_property
    def whole(self) -> Tensor:
        """The signatures of both halves, [n, L, D] float64."""
        rows = (half.double() * self.counts[..., part, None] for part, half in enumerate((self.first, self.second)))
        return sum(rows) / self.counts.sum(2).clamp_min(1).unsqueeze(2)

    def at(self, which: Tensor) -> Halves:
        """Some of them (indices or a mask)."""
        there = which.to(self.first.device)
        return Halves(self.first[there], self.second[there], self.counts[there])

    def grouped(self, labels: Tensor, num_groups: int) -> Halves:
        """The mean signatures of groups, by labels [n]."""
        member = torch.nn.functional.one_hot(labels.to(self.first.device), num_groups).to(self.first)
        counts = torch.einsum("nk,nlp->klp", member, self.counts)
        halves = []
        for part, rows in enumerate((self.first, self.second)):
            sums = torch.einsum("nk,nl,nld->kld", member, self.counts[..., part], rows)
            halves.append(sums / counts[..., part, None].clamp_min(1))
        return Halves(halves[0], halves[1], counts)


@dataclass(frozen=True)
class Noise:
    """The noise of one sample's gradient in each class."""

    size: Tensor  # [L] tr(S)
    spread: Tensor  # [L] tr(S^2)

    @classmethod
    def of(cls, found: Halves) -> Noise:
        """Estimated from the differences of the halves of each client, of `_MOST` clients at most."""
        found = found.at(torch.arange(min(len(found), _MOST)))
        both = (found.counts > 0).all(2).to(found.first)  # [n, L]
        scale = (1 / found.counts.clamp_min(1)).sum(2).rsqrt() * both
        apart = (found.first - found.second) * scale.unsqueeze(2)  # covariance S
        holders = both.sum(0)
        size = apart.square().sum(2).sum(0) / holders.clamp_min(1)
        products = torch.einsum("nld,mld->lnm", apart, apart).square()
        others = products.sum((1, 2)) - products.diagonal(dim1=1, dim2=2).sum(1)
        spread = others / (holders * (holders - 1)).clamp_min(1)
        # With one holder, as if the noise had one direction: no difference is clear.
        return cls(size, spread.where(holders > 1, size.square()))


@dataclass(frozen=True)
class Pairs:
    """The products of the halves of n clients, or of n groups of them: all that z and q need."""

    cross: Tensor  # [n, n, L] <A_a, B_b>
    counts: Tensor  # [n, L, 2] samples in the halves

    @classmethod
    def of(cls, found: Halves) -> Pairs:
        """Those of each with each."""
        return cls(
            torch.einsum("ald,bld->abl", found.first.double(), found.second.double()),
            found.counts.to(torch.float64, copy=True),
        )

    def evidence(self, noise: Noise, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """z and q of groups `one` [a] against groups `other` [b]: [a, b] each."""
        own = self.cross.diagonal().T  # [n, L]
        left, right = self.counts[one], self.counts[other]
        cross = self.cross[one.unsqueeze(1), other] + self.cross[other.unsqueeze(1), one].transpose(0, 1)
        apart = own[one].unsqueeze(1) + own[other].unsqueeze(0) - cross  # [a, b, L]
        shared = ((left > 0).all(2).unsqueeze(1) & (right > 0).all(2).unsqueeze(0)).to(apart)
        few = (1 / left.clamp_min(1)).unsqueeze(1) + (1 / right.clamp_min(1)).unsqueeze(0)  # [a, b, L, 2]
        deviation = (noise.spread * few[..., 0] * few[..., 1]).clamp_min(_TINY).sqrt()
        classes = shared.sum(2)
        z = (shared * apart / deviation).sum(2) / classes.clamp_min(1).sqrt()
        both = _both(left.sum(2).unsqueeze(1), right.sum(2).unsqueeze(0))
        q = (shared * apart * both / noise.size.clamp_min(_TINY)).sum(2) / classes.clamp_min(1)
        return z.where(classes > 0, _NOTHING), q.where(classes > 0, 0.0)

    def samples(self) -> Tensor:
        """n_a n_b / (n_a + n_b) of each pair, as a mean over shared classes, [n, n]; q is about a distance times it."""
        counts = self.counts.sum(2)
        both = _both(counts.unsqueeze(1), counts.unsqueeze(0))
        return both.sum(2) / (both > 0).sum(2).clamp_min(1)

    def merge(self, one: int, other: int) -> None:
        """Make group `one` of both, in place; their products are means, weighted by samples."""
        both = torch.tensor([one, other], device=self.cross.device)
        weights = self.counts[both]  # [2, L, 2]
        weights = weights / weights.sum(0).clamp_min(1)
        self.cross[one] = (self.cross[both] * weights[:, None, :, 0]).sum(0)
        self.cross[:, one] = (self.cross[:, both] * weights[..., 1]).sum(1)
        self.counts[one] += self.counts[other]


@dataclass(frozen=True)
class Spread:
    """How much the members of K groups differ from each other, in units of the noise of one sample."""

    members: Tensor  # [K]
    weights: Tensor  # [K] samples of the members
    sums: Tensor  # [K] squared distances of members from the others, times their samples
    errors: Tensor  # [K] variances of the sums

    @classmethod
    def of(cls, found: Halves, labels: Tensor, noise: Noise, num_groups: int) -> Spread:
        """That of groups, by labels [n]."""
        spread = cls(*torch.zeros(4, num_groups, dtype=torch.float64, device=found.first.device))
        for group in range(num_groups):
            spread.renew(group, found.at(labels == group), noise)
        return spread

    def renew(self, group: int, found: Halves, noise: Noise) -> None:
        """Measure a group of these clients anew, in place."""
        totals = found.counts.sum(0)  # [L, 2]
        apart, shared = found.first.new_tensor(1.0), found.counts.new_tensor(True, dtype=torch.bool)
        for part, rows in enumerate((found.first, found.second)):
            counts = found.counts[..., part]
            others = totals[:, part] - counts  # [n, L]
            sums = torch.einsum("nl,nld->ld", counts, rows)
            means = (sums - counts.unsqueeze(2) * rows) / others.clamp_min(1).unsqueeze(2)
            apart, shared = apart * (rows - means), shared & (counts > 0) & (others > 0)
        distances = (apart.sum(2) / noise.size.clamp_min(_TINY)).double()  # [n, L]
        weights = (found.counts.sum(2) * shared).double()
        total = weights.sum()
        mean = (weights * distances).sum() / total.clamp_min(1)
        each = (weights * (distances - mean)).sum(1)
        self.members[group], self.weights[group] = len(found), total
        self.sums[group], self.errors[group] = mean * total, each.square().sum()

    def between(self) -> Tensor:
        """The squared distance that two groups must exceed, [K, K]: how much members of either surely differ.

        A few clients may be far from the others by chance: the fewer they are, the further they have to be. Of two
        single clients nothing is known but how much members of other groups differ.
        """
        known = (self.weights.unsqueeze(1) + self.weights) > 0
        weights, sums, errors = (
            torch.where(known, one.unsqueeze(1) + one, one.sum()) for one in (self.weights, self.sums, self.errors)
        )
        few = 1 / self.members.clamp_min(1)
        surely = ((sums - _ERRORS * errors.sqrt()) / weights.clamp_min(1)).clamp_min(0)
        return surely * (1 + _CHANCE * (few.unsqueeze(1) + few))


def _both(one: Tensor, other: Tensor) -> Tensor:
    return one * other / (one + other).clamp_min(1)


@dataclass(frozen=True)
class Kinds:
    """Groups of clients that are of one kind each."""

    labels: Tensor  # int64 [n] on the CPU
    z: float = torch.inf  # the least clear difference between two of them; inf if there is only one
    q: float = torch.inf
    last: float = 0.0  # z of the last pair that was merged

    @property
    def count(self) -> int:
        """The number of kinds."""
        return int(self.labels.max()) + 1 if len(self.labels) else 0


@dataclass(frozen=True)
class Limits:
    """When two groups are of different kinds, and how many kinds there may be."""

    clear: float = CLEAR
    worth: float = WORTH
    least: int = 1
    most: int | None = None

    def differ(self, z: Tensor, q: Tensor) -> Tensor:
        """Whether groups with this evidence are of different kinds."""
        return (z >= self.clear) & (q >= self.worth)


def find_kinds(found: Halves, noise: Noise, keys: Tensor, limits: Limits) -> Kinds:
    """The kinds of n clients; `keys` [n] identify the clients, so that their order does not matter."""
    order = keys.argsort()
    sorted_found = found.at(order)
    some = torch.arange(min(len(found), _MOST))
    labels = torch.zeros(len(found), dtype=torch.int64)
    labels[: len(some)], last = _merged(sorted_found.at(some), noise, limits)
    if len(some) < len(found):
        known = torch.arange(len(found)) < len(some)
        labels = _nearest(_distances(sorted_found, labels, known, noise), labels)
    labels = _settled(sorted_found, labels, noise, limits)
    labels = torch.zeros_like(labels).index_copy(0, order, labels)
    return _described(found, labels, noise, last)


def _described(found: Halves, labels: Tensor, noise: Noise, last: float) -> Kinds:
    """The kinds with the evidence for the least clear of their differences."""
    count = int(labels.max()) + 1
    if count < 2:
        return Kinds(labels, last=last)
    z, q = _between(found, labels, noise)
    at = int(z.argmin())
    return Kinds(labels, float(z.flatten()[at]), float(q.flatten()[at]), last)


def _between(found: Halves, labels: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """z and q of each pair of groups, [K, K]; inf on the diagonal."""
    count = int(labels.max()) + 1
    every = torch.arange(count, device=found.first.device)
    z, q = Pairs.of(found.grouped(labels, count)).evidence(noise, every, every)
    return z.fill_diagonal_(torch.inf), q.fill_diagonal_(torch.inf)


def _merged(found: Halves, noise: Noise, limits: Limits) -> tuple[Tensor, float]:
    """Merge single clients until all groups that are left differ: labels [n], and z of the last pair."""
    count, device = len(found), found.first.device
    most = count if limits.most is None else limits.most
    every = torch.arange(count, device=device)
    pairs = Pairs.of(found)
    z, q = (matrix.fill_diagonal_(torch.inf) for matrix in pairs.evidence(noise, every, every))
    alive = torch.ones(count, dtype=torch.bool, device=device)
    labels = torch.arange(count)
    left, last = count, 0.0
    while left > limits.least:
        # Pairs that are clear but not worth it come after all that are not clear.
        cost = torch.where(q < limits.worth, z.clamp_max(limits.clear), z)
        a, b = divmod(int(cost.argmin()), count)
        if left <= most and bool(limits.differ(z[a, b], q[a, b])):
            break
        last = float(z[a, b])
        pairs.merge(a, b)
        labels[labels == b] = a
        alive[b] = False
        left -= 1
        here = alive.nonzero().flatten()
        renewed = pairs.evidence(noise, every[a : a + 1], here)
        for matrix, row in zip((z, q), renewed, strict=True):
            matrix[b], matrix[:, b] = torch.inf, torch.inf
            matrix[a, here], matrix[here, a] = row[0], row[0]
            matrix[a, a] = torch.inf
    return _numbered(labels), last


def _settled(found: Halves, labels: Tensor, noise: Noise, limits: Limits) -> Tensor:
    """Move clients to the nearest group, join groups that no longer differ, and dissolve those that are not needed."""
    everyone = torch.ones(len(labels), dtype=torch.bool)
    for _ in range(_ROUNDS):
        before = labels
        for _ in range(_ROUNDS):
            moved = _numbered(_nearest(_distances(found, labels, everyone, noise), labels))
            if torch.equal(moved, labels) or int(moved.max()) + 1 < limits.least:
                break
            labels = moved
        labels = _joined(found, labels, noise, limits)
        labels = _dissolved(found, labels, noise, limits)
        if torch.equal(before, labels):
            break
    return labels


def _joined(found: Halves, labels: Tensor, noise: Noise, limits: Limits) -> Tensor:
    """Join groups that do not differ, or no more than their own members do; the most alike first."""
    left = int(labels.max()) + 1
    pairs = Pairs.of(found.grouped(labels, left))
    every = torch.arange(left, device=found.first.device)
    alive = torch.ones(left, dtype=torch.bool, device=found.first.device)
    spread = Spread.of(found, labels, noise, left)
    while left > limits.least:
        z, q = pairs.evidence(noise, every, every)
        alike = ~limits.differ(z, q) | (q < spread.between() * pairs.samples())
        same = alike if left <= (limits.most or left) else torch.ones_like(alike)
        same &= alive.unsqueeze(1) & alive
        same.fill_diagonal_(False)
        if not bool(same.any()):
            break
        a, b = sorted(divmod(int(z.where(same, torch.inf).argmin()), len(z)))
        pairs.merge(a, b)
        labels = torch.where(labels == b, a, labels)
        spread.renew(a, found.at(labels == a), noise)
        spread.renew(b, found.at(labels == b), noise)  # nobody
        alive[b] = False
        left -= 1
    return _numbered(labels)


def _dissolved(found: Halves, labels: Tensor, noise: Noise, limits: Limits) -> Tensor:
    """Dissolve a group whose members would not differ from the groups that each of them is next nearest to.

    Clients that hold none of the classes in which kinds differ may form such a group.
    """
    sizes = labels.bincount()
    if len(sizes) <= max(2, limits.least):
        return labels
    distances = _distances(found, labels, torch.ones(len(labels), dtype=torch.bool), noise)
    groups = found.grouped(labels, len(sizes))
    for group in sizes.argsort(stable=True).tolist():
        mine = labels == group
        left = distances[mine.to(distances.device)]
        left[:, group] = torch.inf
        goes = _nearest(left, labels[mine])
        if bool((goes == group).any()):
            continue  # a member shares no class with any other group
        places, numbered = goes.unique(return_inverse=True)
        leaving = found.at(mine).grouped(numbered, len(places))
        both = Pairs.of(Halves.joined([leaving, groups.at(places)]))
        every = torch.arange(len(places), device=found.first.device)
        z, _ = both.evidence(noise, every, every + len(places))
        if bool((z.diagonal() < limits.clear / 2).all()):  # a part of a group is less clear than all of it
            return _numbered(labels.masked_scatter(mine, goes))
    return labels


def _distances(found: Halves, labels: Tensor, known: Tensor, noise: Noise) -> Tensor:
    """How far each client is from the OTHER members of each group that are in `known` [n]: [n, K], inf where unknown.

    Distances are corrected for the noise of the group's mean, which is larger in small groups.
    """
    device = found.first.device
    there, inside = labels.to(device), known.to(device)
    num_groups = int(labels.max()) + 1
    counts = found.counts.sum(2).double()  # [n, L]
    sums = counts.new_zeros(num_groups, *found.first.shape[1:])
    for some in inside.nonzero().flatten().split(_BLOCK):
        sums.index_add_(0, there[some], found.whole[some] * counts[some].unsqueeze(2))
    totals = counts.new_zeros(num_groups, counts.shape[1]).index_add_(0, there[inside], counts[inside])
    norms, size = sums.square().sum(2), noise.size.double().clamp_min(_TINY)
    alone = there[inside].bincount(minlength=num_groups) == 1
    tables = []
    for some in torch.arange(len(found), device=device).split(_BLOCK):
        rows, weights = found.whole[some], counts[some]
        own = rows.square().sum(2).unsqueeze(1)
        member = torch.nn.functional.one_hot(there[some], num_groups) * inside[some].unsqueeze(1)  # [b, K]
        weights = weights.unsqueeze(1)  # [b, 1, L]
        mine = member.unsqueeze(2) * weights
        others = totals - mine  # [b, K, L]
        few = others.clamp_min(1)
        products = torch.einsum("nld,kld->nkl", rows, sums)
        means = (norms - 2 * mine * products + mine.square() * own) / few.square()  # squared norms, without the client
        apart = own - 2 * (products - mine * own) / few + means - size / few
        shared = (weights * others / (weights + others).clamp_min(1)).where(others > 0.5, 0) / size
        # A client that is alone in its group is as far from it as from others of its kind: by its own noise.
        single = ((member > 0) & alone).unsqueeze(2)
        apart = torch.where(single, size / weights.clamp_min(1), apart)
        shared = torch.where(single, weights / size, shared)
        total = shared.sum(2)
        tables.append(((shared * apart).sum(2) / total.clamp_min(_TINY)).where(total > 0, torch.inf))
    return torch.cat(tables)


def _nearest(distances: Tensor, labels: Tensor) -> Tensor:
    """The nearest group of each client [n] on the CPU; its own where none can be compared."""
    nearest: Tensor = distances.argmin(1).where(distances.isfinite().any(1), labels.to(distances.device))
    return nearest.cpu()


def _numbered(labels: Tensor) -> Tensor:
    """Labels without gaps, in the order of the clients."""
    found: Tensor = torch.unique(labels, return_inverse=True)[1]
    return found
