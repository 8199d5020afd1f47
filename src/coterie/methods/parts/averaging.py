"""Averaging: how the members of a cluster become its center, by a plain mean or by a robust one.

The plain mean streams. A robust mean holds all members' models at once and weighs them equally, because a weight is
only what a client claims. It does not know who is malicious; `robust_share` is the share of bad members it tolerates.
`auto` needs no share. It leaves out updates that are far longer than those of most clients, whatever their cluster: bad
clients may be the majority of one cluster, but not of all clients. It shortens the others to the median length of their
cluster, and averages those that agree. `fltrust` compares updates with one that the server has trained on its samples.

To add a robust mean, write one function here and decorate it with `@robust_mean_named`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from coterie.engines.base import Chunk, Engine
from coterie.engines.server import trained_on_reserved
from coterie.errors import ConfigError
from coterie.methods.base import Algorithm, S
from coterie.methods.parts.clustering import CenterSums
from coterie.randomness import Rng
from coterie.settings import setting

AUTO = "auto"
TRUST = "fltrust"
_COLUMNS = 1 << 22  # numbers sorted at a time
_STEPS = 50  # of Weiszfeld's algorithm and of centered clipping, at most
_NEAR = 1e-6  # a step shorter than this share of the median distance is the last
_FAR = 1.1  # times the median distance from the middle: members further away do not agree
_TINY = 1e-30
_TOO_LONG = 2.0  # times the median length of all updates: longer ones are left out

RobustMean = Callable[[Tensor, float], Tensor]  # models [m, P] with m >= 3, share of bad ones -> [P]
_ROBUST_MEANS: dict[str, RobustMean] = {}


# ---- robust means ----


def robust_mean_named(name: str) -> Callable[[RobustMean], RobustMean]:
    """Decorator: register a robust mean as a choice of the setting `robust`."""

    def registered(function: RobustMean) -> RobustMean:
        _ROBUST_MEANS[name] = function
        return function

    return registered


def robust_mean(rows: Tensor, kind: str, share: float) -> Tensor:
    """Average models [m, P] into one [P], of which about `share` may be bad; fewer than three get a plain mean.

    >>> robust_mean(torch.tensor([[0.0], [1.0], [2.0], [99.0]]), "trimmed_mean", 0.25)
    tensor([1.5000])
    """
    return _ROBUST_MEANS[kind](rows, share) if len(rows) > 2 else rows.mean(0)


@robust_mean_named("none")
def plain_mean(rows: Tensor, share: float) -> Tensor:
    """The mean of all models."""
    return rows.mean(0)


@robust_mean_named("trimmed_mean")
def trimmed_mean(rows: Tensor, share: float) -> Tensor:
    """Per parameter, the mean without the `share` lowest and the `share` highest values (Yin et al. 2018)."""
    return _mean_between(rows, _num_bad(len(rows), share))


@robust_mean_named("median")
def median(rows: Tensor, share: float) -> Tensor:
    """The median of each parameter."""
    return _mean_between(rows, (len(rows) - 1) // 2)


@robust_mean_named("krum")
def krum(rows: Tensor, share: float) -> Tensor:
    """Multi-Krum (Blanchard et al. 2017): the mean of the 1 - `share` models closest to their nearest neighbours."""
    num_good = len(rows) - _num_bad(len(rows), share)
    return rows[_krum_scores(_squared(rows), num_good - 2).argsort(stable=True)[:num_good]].mean(0)


@robust_mean_named("bulyan")
def bulyan(rows: Tensor, share: float) -> Tensor:
    """Bulyan (El Mhamdi et al. 2018): Krum chooses models one by one, then values near the median are averaged.

    It needs 4 f + 3 models, where f is the number of bad ones; with fewer it is the median of each parameter.
    """
    bad = _num_bad(len(rows), share)
    if len(rows) < 4 * bad + 3:
        return median(rows, share)
    distances, left = _squared(rows), torch.arange(len(rows), device=rows.device)
    chosen = []
    for _ in range(len(rows) - 2 * bad):
        best = int(_krum_scores(distances[left][:, left], len(left) - bad - 2).argmin())
        chosen.append(int(left[best]))
        left = left[torch.arange(len(left), device=left.device) != best]
    return _mean_near_median(rows[chosen], len(chosen) - 2 * bad)


@robust_mean_named("geometric_median")
def geometric_median(rows: Tensor, share: float) -> Tensor:
    """The point with the least sum of distances to all models, by Weiszfeld's algorithm from the mean."""
    return _iterated(rows, rows.mean(0), lambda apart, usual: 1 / apart.clamp_min(_NEAR * usual))


@robust_mean_named("centered_clipping")
def centered_clipping(rows: Tensor, share: float) -> Tensor:
    """The point around which the models, cut off at the median distance, have their mean (Karimireddy et al. 2021).

    It is found from the median, since a start that is far off would need many steps.
    """
    return _iterated(
        rows, median(rows, share), lambda apart, usual: (usual / apart.clamp_min(_TINY)).clamp_max(1), True
    )


@robust_mean_named(AUTO)
def agreed_mean(rows: Tensor, share: float) -> Tensor:
    """The mean of the models that are not further from the median of each parameter than half of them are, by much.

    The geometric median is no such middle: attackers that all send the same would draw it to themselves.
    """
    apart = (rows - median(rows, share)).norm(dim=1)
    return rows[apart <= _FAR * _middle(apart)].mean(0)


@robust_mean_named(TRUST)
def fltrust(rows: Tensor, share: float) -> Tensor:
    """Only for models that clients trained from a center: see `TrustedModels`."""
    raise ConfigError(
        "robust=fltrust compares models with what the server has trained from the same center, and here there is none; "
        "use another robust mean."
    )


def _iterated(rows: Tensor, middle: Tensor, weigh: Callable[[Tensor, Tensor], Tensor], is_step: bool = False) -> Tensor:
    """Move a middle [P] by weights of the models' distances [m] until it rests.

    It becomes the weighted mean; with `is_step`, it moves by the mean of the weighted differences.
    """
    for _ in range(_STEPS):
        differences = rows - middle
        apart = differences.norm(dim=1)  # [m]
        usual = _middle(apart)
        weights = weigh(apart, usual)
        step = weights @ differences / (len(rows) if is_step else weights.sum())
        if not bool(usual > 0) or bool(step.norm() <= _NEAR * usual):
            break
        middle = middle + step
    return middle


def _middle(values: Tensor) -> Tensor:
    """The median of [m]; of two the mean."""
    found: Tensor = values.quantile(0.5)
    return found


def shortened(updates: Tensor) -> Tensor:
    """Updates [m, P], those longer than the median length cut to it."""
    lengths = updates.norm(dim=1)
    factors: Tensor = (_middle(lengths) / lengths.clamp_min(_TINY)).clamp_max(1)  # [m]
    return updates * factors.unsqueeze(1)


def is_usual(updates: Tensor) -> Tensor:
    """Which updates [n, P] are not far longer than the median one, bool [n]."""
    lengths = updates.norm(dim=1)
    usual: Tensor = lengths <= _TOO_LONG * _middle(lengths)
    return usual


def _num_bad(count: int, share: float) -> int:
    """The number of bad models, rounded up; less than half of all."""
    return min(-int(-share * count // 1), (count - 1) // 2)


def _mean_between(rows: Tensor, drop: int) -> Tensor:
    """Per column of [m, P], the mean without the `drop` lowest and the `drop` highest values."""
    pieces = rows.split(max(1, _COLUMNS // len(rows)), dim=1)
    return torch.cat([_sorted(piece)[drop : len(rows) - drop].mean(0) for piece in pieces])


def _mean_near_median(rows: Tensor, count: int) -> Tensor:
    """Per column of [m, P], the mean of the `count` values that are closest to the median."""
    found = []
    for piece in rows.split(max(1, _COLUMNS // len(rows)), dim=1):
        away = (piece - _mean_between(piece, (len(piece) - 1) // 2)).abs()
        found.append(piece.gather(0, away.argsort(dim=0, stable=True)[:count]).mean(0))
    return torch.cat(found)


def _squared(rows: Tensor) -> Tensor:
    """Squared distances of models [m, P]: [m, m]."""
    centered = (rows - rows.mean(0)).double() if rows.numel() <= _COLUMNS else rows - rows.mean(0)
    return torch.cdist(centered, centered).square()


def _krum_scores(distances: Tensor, neighbours: int) -> Tensor:
    """The sum of squared distances [m, m] of each model to its nearest others, at least one: [m]."""
    return distances.sort(1).values[:, 1 : 1 + max(1, neighbours)].sum(1)


def _sorted(rows: Tensor) -> Tensor:
    """Sort each column; on a CPU, numpy is about nine times faster than torch."""
    return rows.sort(0).values if rows.is_cuda else torch.from_numpy(np.sort(rows.numpy(), axis=0))


# ---- averages that methods fill chunk by chunk ----


class Average(Protocol):
    """Turns the members of K clusters into centers."""

    def add(self, rows: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Add models [c, P] to clusters [c]; weight 0 excludes a model."""
        ...

    def means(self, keep: Tensor) -> Tensor:
        """The centers [K, P]; a cluster without members keeps its row of `keep`."""
        ...


class HeldModels:
    """Holds all members until the end, then computes the center of each cluster by `center(cluster, rows, weights)`."""

    def __init__(self, num_clusters: int, center: Callable[[int, Tensor, Tensor], Tensor]) -> None:
        self._num_clusters, self._center = num_clusters, center
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, rows: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Hold models [c, P] of clusters [c]."""
        weights = torch.ones(len(rows)) if weights is None else weights
        self._parts.append((rows, labels.to(rows.device), weights.to(rows.device, rows.dtype)))

    def means(self, keep: Tensor) -> Tensor:
        """The centers [K, P]; a cluster without members keeps its row of `keep`."""
        if not self._parts:
            return keep
        rows, labels, weights = (torch.cat(parts) for parts in zip(*self._parts, strict=True))
        return self._centers(rows, labels, weights, keep)

    def _centers(self, rows: Tensor, labels: Tensor, weights: Tensor, keep: Tensor) -> Tensor:
        centers = keep.clone()
        for k in range(self._num_clusters):
            mine = (labels == k) & (weights > 0)
            if bool(mine.any()):
                centers[k] = self._center(k, rows[mine], weights[mine])
        return centers


class UsualModels(HeldModels):
    """As `HeldModels`, for models that clients trained from the centers that `means` is to keep: `auto`."""

    def _centers(self, rows: Tensor, labels: Tensor, weights: Tensor, keep: Tensor) -> Tensor:
        there = weights > 0
        rows, labels = rows[there], labels[there]
        updates = rows - keep[labels]
        usual = is_usual(updates) if len(updates) > 2 else torch.ones_like(labels, dtype=torch.bool)
        centers = keep.clone()
        for k in range(self._num_clusters):
            mine = (labels == k) & usual
            if bool(mine.any()):
                centers[k] += self._center(k, shortened(updates[mine]), weights[there][mine])
        return centers


class TrustedModels(HeldModels):
    """Weighs updates by their agreement with the server's own: FLTrust (Cao et al. 2021).

    The server trains each center on those of its samples that fit it best. An update counts by its cosine with the
    server's, not at all if that is negative, and is brought to the server's length. A cluster in which nobody agrees
    keeps its center.
    """

    def __init__(self, num_clusters: int, engine: Engine) -> None:
        super().__init__(num_clusters, lambda cluster, rows, weights: rows.mean(0))
        self._engine = engine

    def _centers(self, rows: Tensor, labels: Tensor, weights: Tensor, keep: Tensor) -> Tensor:
        engine = self._engine
        rng = Rng.seed(0).at("server", engine.round)
        own = trained_on_reserved(engine, keep, engine.task.work.at(engine.round), rng) - keep  # [K, P]
        centers, cut = keep.clone(), engine.task.layout.num_parameters
        for k in range(self._num_clusters):
            updates = rows[(labels == k) & (weights > 0)] - keep[k]
            lengths = updates[:, :cut].norm(dim=1).clamp_min(_TINY)
            length = own[k, :cut].norm()
            trust = (updates[:, :cut] @ own[k, :cut] / (lengths * length.clamp_min(_TINY))).clamp_min(0)  # [m]
            if bool(trust.sum() > 0):
                centers[k] += (trust * length / lengths) @ updates / trust.sum()
        return centers


def add_answers(
    average: Average,
    chunks: Iterable[Chunk],
    labels: Tensor,
    weights_of: Callable[[Chunk], Tensor] | None = None,
    field: str = "params",
) -> Tensor:
    """Add the answers of clients to the clusters of their labels [N]; returns the ids of those who answered [n]."""
    answered = [labels.new_empty(0)]
    for chunk in chunks:
        weights = None if weights_of is None else weights_of(chunk)
        average.add(chunk.answer[field], labels[chunk.clients], weights)
        answered.append(chunk.clients)
    return torch.cat(answered)


# ---- methods that average ----


def robust_setting(default: str = "none") -> Any:
    """The field `robust`, whose choices are the registered robust means."""
    return setting(default, "how a cluster's members are averaged: plain or robust mean", choices=_ROBUST_MEANS)


@dataclass(frozen=True)
class Averaging(Algorithm[S]):
    """A method that averages models."""

    sends_models: ClassVar[bool] = True  # whether all that is averaged is models

    robust: str = robust_setting()
    robust_share: float = setting(
        0.2, "share of bad members that a robust mean and the first clustering tolerate", ge=0, lt=0.5
    )

    def mean_of(self, num_clusters: int, engine: Engine, like: Tensor, *, of_models: bool = True) -> Average:
        """An empty average of K clusters; `like` [..., P] gives size and type. Gradients are no models."""
        if self.robust == "none":
            return CenterSums(num_clusters, like=like)
        if self.robust == TRUST:
            self._require_trust(engine, like, of_models)
        size = engine.num_clients * like.shape[-1] * like.element_size()
        engine.require_memory(size, f"A robust mean holds the models of {engine.num_clients} clients at once:")
        if self.robust == TRUST:
            return TrustedModels(num_clusters, engine)
        held = UsualModels if self.robust == AUTO and of_models else HeldModels
        return held(num_clusters, lambda cluster, rows, weights: self.robust_mean(rows))

    def _require_trust(self, engine: Engine, like: Tensor, of_models: bool) -> None:
        """Raise ConfigError if the server cannot vouch for what clients send."""
        name = type(self).__name__
        if engine.reserved is None:
            raise ConfigError(
                f"robust=fltrust of {name} needs samples on the server; hold some out with --set scenario.reserve=10."
            )
        if not (of_models and self.sends_models) or like.shape[-1] != engine.task.layout.size:
            raise ConfigError(
                f"robust=fltrust compares whole models with one that the server has trained, and clients of {name} "
                "send other things, too; use another robust mean."
            )

    def robust_mean(self, rows: Tensor) -> Tensor:
        """The mean [P] of a cluster's members [m, P] by the settings."""
        return robust_mean(rows, self.robust, self.robust_share)

    def averaged(
        self,
        chunks: Iterable[Chunk],
        labels: Tensor,
        keep: Tensor,
        engine: Engine,
        *,
        weighting: str = "equal",
        field: str = "params",
    ) -> tuple[Tensor, Tensor]:
        """Average the answers of each cluster, by labels [N]: the means [K, P] and the ids of those who answered [n].

        A cluster without an answer keeps its row of `keep` [K, P].
        """
        average = self.mean_of(len(keep), engine, like=keep, of_models=field == "params")
        weights_of = samples_of if weighting == "samples" else None
        answered = add_answers(average, chunks, labels, weights_of, field)
        return average.means(keep=keep), answered

    @property
    def trimmed(self) -> float:
        """The share of clients that the first clustering excludes as outliers."""
        return 0.0 if self.robust == "none" else self.robust_share


def samples_of(chunk: Chunk) -> Tensor:
    """Sample counts [c] where the answer has them; otherwise ones."""
    samples = chunk.answer.get("samples")
    return torch.ones(len(chunk.clients), device=chunk.answer.params.device) if samples is None else samples


def fits_in_memory(num_models: int, engine: Engine) -> bool:
    """Whether the server may hold so many models at once."""
    return num_models * engine.task.layout.size * engine.dtype.itemsize <= engine.memory_budget()
