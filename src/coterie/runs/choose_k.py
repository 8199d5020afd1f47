"""Choosing K, the number of clusters, before a long run (Long et al. 2022, section 5.2).

As in the paper, FeSEM runs a few rounds (3) on some clients (100) for each K, to compare intra-cluster distance and
accuracy. Beyond the paper, each K gets the silhouette (Rousseeuw 1987) and the gap statistic (Tibshirani, Walther,
Hastie 2001) of the clients' first models, all trained once from one common start. A rule then recommends a K.

**Rule.** Intra-cluster distance falls with almost every further cluster, and accuracy after three rounds is noisy: both
are shown, neither decides. The K with the largest silhouette is taken if there are clusters at all: its silhouette is
at least 0.2, and its gap exceeds that of K = 1 by more than its standard error. Otherwise K = 1. The gap's own rule,
the first K with gap(K) >= gap(K + 1) - s(K + 1), is a second opinion in the reason. Alone it takes the largest clients
for a cluster if sizes are skewed, and it stops at K = 1 if two clusters are no better than one but four are.

True groups and test data are never used. Under strong label skew, the clusters are of labels: see FeSEM.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from coterie.client.block import Block, Models
from coterie.client.steps import Answer, client_step
from coterie.client.work import SGD
from coterie.engines import make_engine
from coterie.engines.base import Chunk, Engine
from coterie.errors import ConfigError
from coterie.methods.fesem import FeSEM
from coterie.methods.parts.centers import CenterState
from coterie.methods.parts.clustering import CenterSums, kmeans
from coterie.nets.sketch import Sketch
from coterie.randomness import Rng
from coterie.runs.experiment import Experiment
from coterie.runs.metrics import METRICS, of_scores
from coterie.runs.newcomers import shuffled, split_unseen
from coterie.runs.settings import LARGEST_K, PROBE_CLIENTS, PROBE_ROUNDS
from coterie.settings import check

CLEAR = 0.2  # smallest mean silhouette of useful clusters

_WIDTH = 4096  # of the sketches of first models
_RESTARTS = 20  # of k-means, as in the paper
_REFERENCE_RESTARTS = 5  # fewer on data without clusters, where many clusterings are about equally good
_REFERENCES = 20  # datasets without clusters, for the gap statistic


@dataclass(frozen=True)
class Row:
    """The numbers of one K; None where one is undefined."""

    clusters: int
    intra_distance: float  # root mean square distance of a model to its center, in the last round
    silhouette: float | None  # mean over clients, -1 ... 1; undefined for one cluster
    gap: float | None  # undefined if every model is its own cluster
    gap_error: float | None  # its standard error s
    valid_accuracy: float | None  # micro, of the clients' centers on their validation samples
    valid_loss: float | None


@dataclass(frozen=True)
class Choice:
    """The recommended K, the reason, and the numbers of every K."""

    recommended: int
    reason: str
    rows: tuple[Row, ...]
    clients: int  # that took part
    rounds: int
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `coterie choose-k --json` prints them."""
        values = asdict(self)
        table = values.pop("rows")
        return {**values, "table": list(table)}


@client_step("coterie.choose_k:validate")
def validate(block: Block, models: Models, work: SGD) -> Answer:
    """Scores of the sent model on the client's validation samples."""
    return Answer(**block.evaluate(models, split="valid"))


def choose_k(
    experiment: Experiment,
    first: int = 1,
    last: int | None = LARGEST_K,
    sample: int = PROBE_CLIENTS,
    rounds: int = PROBE_ROUNDS,
    seed: int | None = None,
    observer: Callable[[Row], None] | None = None,
) -> Choice:
    """Try K = first ... last on a sample of the clients, and recommend one.

    K is a property of the clients: the experiment's method plays no part. `last=None` is 8, or the number of clients if
    that is smaller. `seed` is by default the experiment's. `observer` gets the row of each K.
    """
    experiment = experiment.loaded()
    check(experiment.schedule)
    check(experiment.work)
    known, _ = split_unseen(experiment.federation(), experiment.schedule.unseen, experiment.schedule.seed)
    if seed is not None:
        experiment = replace(experiment, schedule=replace(experiment.schedule, seed=seed))
        check(experiment.schedule)
    seed = experiment.schedule.seed
    for name, value in {"The smallest K": first, "The largest K": last, "sample": sample, "rounds": rounds}.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{name} must be an int >= 1. Got {value!r} instead.")
    order = shuffled(known, Rng.seed(seed).at("choose-k", "sample"))
    clients = known.select(order[:sample].sort().values) if sample < len(known) else known
    last = min(LARGEST_K, len(clients)) if last is None else last
    if first > last:
        raise ConfigError(f"The smallest K must be at most the largest, {last}. Got {first} instead.")
    if last > len(clients):
        raise ConfigError(f"The largest K must be at most the number of clients, {len(clients)}. Got {last} instead.")
    engine = make_engine(experiment.engine, experiment.task(), clients, experiment.device, experiment.engine_settings)
    rng = Rng.seed(seed).at("choose-k")

    start = _Start(engine, rng.at("start"))
    if len(start.clients) < last:
        failed = f"Only {len(start.clients)} of {len(clients)} clients could train, too few for {last} clusters."
        raise ConfigError(f"{failed} Likely cause: lr={experiment.work.lr:g} is too large.")
    points = principal_coordinates(start.sketches)  # [n, d]
    keys = engine.keys[start.clients]
    references = _references(points, rng.at("references"))
    rows = []
    for k in range(first, last + 1):
        point = rng.at("K", k)
        found = kmeans(points, k, point, keys, _RESTARTS)
        gap, error = gap_statistic(found.inertia, references, k, point.at("gap"), keys)
        state, intra = _few_rounds(k, start, found.labels, engine, rounds, point.at("rounds"))
        accuracy, loss = _validation(state, start.clients, engine, point.at("validate"))
        rows.append(Row(k, intra, silhouette(points, found.labels), gap, error, accuracy, loss))
        if observer is not None:
            observer(rows[-1])
    recommended, reason = recommend(rows)
    return Choice(recommended, reason, tuple(rows), len(start.clients), rounds, seed)


# ---- FeSEM, a few rounds for each K ----


class _Start:
    """Every client, trained once from the common start; the same for every K."""

    def __init__(self, engine: Engine, rng: Rng) -> None:
        self._engine, self._rng = engine, rng
        engine.begin(0, "start")
        size = engine.num_clients * engine.task.layout.size * engine.dtype.itemsize
        fits = size <= engine.memory_budget()
        cut, common = engine.task.layout.num_parameters, engine.initial()
        sketch = Sketch(cut, _WIDTH, rng, engine.device)
        kept, rows, samples = [], [], []
        for chunk in self._train(engine.everyone()):
            rows.append(sketch(chunk.answer.params[:, :cut] - common[:cut]))
            samples.append(chunk.answer.samples)
            kept.append(chunk if fits else replace(chunk, answer=Answer()))
        self._kept = kept if fits else None
        who = torch.cat([chunk.clients for chunk in kept]) if kept else torch.empty(0, dtype=torch.int64)
        self.clients, order = who.sort()  # int64 [n]: those that answered
        self.sketches = torch.cat(rows)[order.to(engine.device)] if rows else common.new_zeros(0, 1)  # [n, D]
        self.mean_samples = float(torch.cat(samples).double().mean()) if samples else 0.0

    def models(self) -> Iterator[Chunk]:
        """The first models. If they do not fit in memory, they are trained again with the same rng."""
        if self._kept is not None:
            return iter(self._kept)
        self._engine.begin(0, "start")
        return self._train(self.clients)

    def _train(self, clients: Tensor) -> Iterator[Chunk]:
        one = FeSEM(num_clusters=1)
        state = CenterState.common_start(self._engine, 1)
        return one.train_from(state, self._engine, clients, torch.zeros_like(clients), self._rng)


@dataclass(frozen=True)
class _Measured(FeSEM):
    """FeSEM that records the squared distance of each model to its nearest center, and the cluster."""

    nearest: list[tuple[float, int]] = field(default_factory=list)

    def distances(self, params: Tensor, state: CenterState, engine: Engine) -> Tensor:
        """As FeSEM."""
        found = super().distances(params, state, engine)
        least = found.min(1)
        self.nearest.extend(zip(least.values.tolist(), least.indices.tolist(), strict=True))
        return found


def _few_rounds(
    k: int, start: _Start, found: Tensor, engine: Engine, rounds: int, rng: Rng
) -> tuple[CenterState, float]:
    """FeSEM with K centers from a clustering [n] of the first models: its state and intra-cluster distance."""
    # Repairs would move centers after the distances are measured, and most K here are wrong on purpose.
    method = _Measured(num_clusters=k, guard=False)
    labels = torch.full((engine.num_clients,), -1, dtype=torch.int64)
    labels[start.clients] = found
    state = CenterState.common_start(engine, k, mean_samples=start.mean_samples)
    sums = CenterSums(k, like=state.centers)
    for chunk in start.models():
        sums.add(chunk.answer.params, labels[chunk.clients])
    before = state = replace(state, centers=sums.means(keep=state.centers), labels=labels)
    for number in range(1, rounds + 1):
        engine.begin(number, "round")
        method.nearest.clear()
        before, state = state, method.round(state, engine, start.clients, rng.at(number))
    # The distances are to the centers before the round: sum |w - c|^2 = sum |w - c'|^2 + n |c - c'|^2.
    cut = engine.task.layout.num_parameters
    moved = (state.centers[:, :cut] - before.centers[:, :cut]).double().square().sum(1).cpu()  # [K]
    total = sum(distance for distance, _ in method.nearest)
    total -= float(moved[[cluster for _, cluster in method.nearest]].sum())
    return state, math.sqrt(max(0.0, total) / max(1, len(method.nearest)))


def _validation(state: CenterState, clients: Tensor, engine: Engine, rng: Rng) -> tuple[float | None, float | None]:
    """Accuracy and loss of the clients' centers on their validation samples; None without such samples."""
    engine.begin(engine.round, "evaluate")
    call = engine.call(validate, clients, models=state.centers, refs=state.labels[clients], rng=rng)
    chunks = [chunk.answer for chunk in call]
    if not chunks:
        return None, None
    known = of_scores({name: torch.cat([answer[name] for answer in chunks]).cpu().numpy() for name in chunks[0]})
    return METRICS["accuracy_micro"].value(known), METRICS["loss_micro"].value(known)


# ---- quality of a clustering ----


def principal_coordinates(rows: Tensor) -> Tensor:
    """The points [n, D] in as few coordinates as keep their distances, widest first: float64 [n, d] on the CPU."""
    x = rows.double().cpu()
    x = x - x.mean(0)
    variance, axes = torch.linalg.eigh(x @ x.T)  # of n points, not of D columns
    keep = variance > 1e-10 * variance.max().clamp_min(1e-300)
    points: Tensor = (axes[:, keep] * variance[keep].sqrt()).flip(1)
    return points


def silhouette(points: Tensor, labels: Tensor) -> float | None:
    """Mean silhouette of points [n, d] in clusters [n]; None for a single cluster.

    For each point (b - a) / max(a, b): a is its mean distance to the other points of its cluster, b that to the
    nearest other cluster. A point alone in its cluster counts 0.

    >>> silhouette(torch.tensor([[0.0], [1.0], [10.0], [11.0]]), torch.tensor([0, 0, 1, 1]))  # doctest: +ELLIPSIS
    0.899...
    """
    from sklearn.metrics import silhouette_score

    count = len(labels.unique())
    if count < 2 or count == len(labels):
        return None if count < 2 else 0.0
    # From differences: matrix products are inexact for points that coincide.
    apart = torch.cdist(points.double(), points.double(), compute_mode="donot_use_mm_for_euclid_dist")
    return float(silhouette_score(apart.numpy(), labels.numpy(), metric="precomputed"))


def _references(points: Tensor, rng: Rng) -> list[Tensor]:
    """Datasets without clusters: uniform in the box around the points, along their principal axes."""
    if not points.shape[1]:
        return []
    low, high = points.min(0).values, points.max(0).values
    return [low + (high - low) * rng.at(b).uniform(*points.shape) for b in range(_REFERENCES)]


def gap_statistic(
    inertia: float, references: Sequence[Tensor], k: int, rng: Rng, keys: Tensor
) -> tuple[float | None, float | None]:
    """How far the log inertia is below that of data without clusters, and the standard error."""
    # With a cluster for every point there is nothing to compare.
    if inertia <= 0 or not references or k >= len(keys):
        return None, None
    found = [kmeans(points, k, rng.at(b), keys, _REFERENCE_RESTARTS).inertia for b, points in enumerate(references)]
    logs = torch.tensor(found, dtype=torch.float64).log()
    error = float(logs.std(correction=0)) * math.sqrt(1 + 1 / len(references))
    return float(logs.mean()) - math.log(inertia), error


# ---- the recommendation ----


def recommend(rows: Sequence[Row]) -> tuple[int, str]:
    """The K that the rule of this module recommends, and why."""
    one = next((row for row in rows if row.clusters == 1), None)
    best = max(rows, key=lambda row: -2.0 if row.silhouette is None else row.silhouette)
    score = best.silhouette
    chosen = best
    if len(rows) == 1:
        reasons = ["it is the only K that was tried"]
    elif score is None:
        chosen, reasons = rows[0], ["the first models of all clients are identical"]
    elif one is not None and score < CLEAR:
        found = f"the best silhouette, {score:.2f} at K = {best.clusters}, is below {CLEAR:g}"
        chosen, reasons = one, [f"no K separates the clients: {found}"]
    elif one is not None and not _gap_is_above(best, one):
        found = f"{best.gap:.2f} at K = {best.clusters}, where the silhouette is largest ({score:.2f})"
        chosen, reasons = one, [f"the gap statistic finds no clusters: {found}, is not above {one.gap:.2f} at K = 1"]
    else:
        reasons = [f"its clusters are best separated: silhouette {score:.2f}"]
        if score < CLEAR:
            reasons.append(f"this is below {CLEAR:g}, so the clusters are weak; K = 1 was not tried")
        elif one is not None and one.gap is not None and best.gap is not None:
            reasons.append(f"its gap statistic is {best.gap:.2f}, against {one.gap:.2f} at K = 1")
        by_gap = first_by_gap(rows)
        if by_gap is not None:
            agrees = by_gap == best.clusters
            reasons.append("the gap rule agrees" if agrees else f"the gap rule alone would choose K = {by_gap}")
        if best is rows[-1]:
            reasons.append("it is the largest K that was tried, and a larger one may be better")
    return chosen.clusters, "; ".join([*reasons, *_accuracy(rows, chosen)])


def first_by_gap(rows: Sequence[Row]) -> int | None:
    """The first K with gap(K) >= gap(K + 1) - s(K + 1); None if there is none."""
    for row, after in itertools.pairwise(rows):
        if row.gap is None or after.gap is None or after.gap_error is None:
            return None
        if row.gap >= after.gap - after.gap_error:
            return row.clusters
    return None


def _gap_is_above(best: Row, one: Row) -> bool:
    """Whether clusters are better than none by the gap statistic; True if it is undefined."""
    if best.gap is None or best.gap_error is None or one.gap is None:
        return True
    return best.gap - best.gap_error > one.gap


def _accuracy(rows: Sequence[Row], chosen: Row) -> list[str]:
    """A sentence about the validation accuracy of a row, if there is one."""
    if chosen.valid_accuracy is None:
        return []
    top = max(rows, key=lambda row: row.valid_accuracy or 0.0)
    text = f"validation accuracy {100 * chosen.valid_accuracy:.1f} %"
    if (top.valid_accuracy or 0.0) > chosen.valid_accuracy:
        text += f" (best: {100 * (top.valid_accuracy or 0.0):.1f} % at K = {top.clusters})"
    return [text]
