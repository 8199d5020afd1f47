"""Choice of K, the number of clusters, before a long run (Long et al. 2022, section 5.2).

As in the paper, some clients (100) and a few rounds (3) of FeSEM for each K, to compare intra-cluster distance
and accuracy. Beyond the paper, silhouette (Rousseeuw 1987) and gap statistic (Tibshirani, Walther, Hastie 2001)
of the clients' first models, all trained once from one common start; and a rule that recommends a K.

**Rule.** Intra-cluster distance falls with nearly every further cluster, and the accuracy of three rounds is
noisy: they are shown, not decisive. The silhouette is largest at the K whose clusters are best separated; that K
is taken if clusters are there at all: its silhouette is at least 0.2, and its gap is above that of K = 1 by more
than its standard error. If not, K = 1. The gap's own rule, the first K with gap(K) >= gap(K + 1) - s(K + 1), is a
second opinion in the reason; alone it takes the largest clients for a cluster where sizes are skewed, and stops at
K = 1 where two clusters are no better than one but four are.

Nothing here sees true groups or test data. Under strong label skew the clusters found are of labels: see FeSEM.
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
from coterie.data.federation import Federation
from coterie.engines import make_engine
from coterie.engines.base import Chunk, Engine
from coterie.errors import ConfigError
from coterie.methods.fesem import FeSEM
from coterie.methods.parts.centers import CenterState
from coterie.methods.parts.clustering import CenterSums, Sketch, kmeans
from coterie.randomness import Rng, uniform
from coterie.runs.experiment import Experiment
from coterie.runs.metrics import METRICS, of_scores
from coterie.runs.newcomers import split_unseen
from coterie.runs.settings import LARGEST_K, PROBE_CLIENTS, PROBE_ROUNDS
from coterie.settings import check

CLEAR = 0.2  # least mean silhouette of clusters that are worth having

_WIDTH = 4096  # of the sketches of first models
_RESTARTS = 20  # of k-means, as in the paper
_REFERENCE_RESTARTS = 5  # on data without clusters, whose many clusterings are about equally good
_REFERENCES = 20  # data sets without clusters that the gap statistic compares with


@dataclass(frozen=True)
class Row:
    """What one K gave; None where a number is not defined."""

    clusters: int
    intra_distance: float  # root mean square distance of a model to its center, in the last round
    silhouette: float | None  # mean over clients, -1 ... 1; not defined for one cluster
    gap: float | None  # not defined for as many clusters as different models
    gap_error: float | None  # its standard error s
    valid_accuracy: float | None  # of the clients' centers on their validation samples, all samples together
    valid_loss: float | None


@dataclass(frozen=True)
class Choice:
    """A recommended K, the reason, and the numbers of every K that was tried."""

    recommended: int
    reason: str
    rows: tuple[Row, ...]
    clients: int  # that took part
    rounds: int
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `coterie choose-k --json` prints them."""
        return {
            "recommended": self.recommended,
            "reason": self.reason,
            "clients": self.clients,
            "rounds": self.rounds,
            "seed": self.seed,
            "table": [asdict(row) for row in self.rows],
        }


@client_step("coterie.choose_k:validate")
def validate(block: Block, models: Models, work: SGD) -> Answer:
    """Scores of the model that was sent on the client's validation samples; never its test samples."""
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

    The method of `what` plays no part: K is a property of the clients. `last=None` is 8, or the number of clients
    if they are fewer. `seed` is by default that of `what`; `observer` is shown the row of each K when it is done.
    """
    experiment = experiment.loaded()
    check(experiment.schedule)
    check(experiment.work)
    known, _ = split_unseen(experiment.federation(), experiment.schedule.unseen, experiment.schedule.seed)
    if seed is not None:
        experiment = replace(experiment, schedule=replace(experiment.schedule, seed=seed))
        check(experiment.schedule)
    clients = _sampled(known, sample, experiment.schedule.seed)
    last = min(LARGEST_K, len(clients)) if last is None else last
    _check_range(first, last, rounds, len(clients))
    engine = make_engine(experiment.engine, experiment.task(), clients, experiment.device, experiment.engine_settings)
    rng = Rng.seed(experiment.schedule.seed).at("choose-k")

    start = _Start(engine, rng.at("start"))
    if len(start.clients) < last:
        raise ConfigError(
            f"Only {len(start.clients)} of {len(clients)} clients could train, too few for {last} clusters; "
            "is lr too large?"
        )
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
    return Choice(recommended, reason, tuple(rows), len(start.clients), rounds, experiment.schedule.seed)


def _sampled(federation: Federation, size: int, seed: int) -> Federation:
    """Some of the clients; each one's luck depends on its own key only."""
    _check_int("sample", size, 1)
    if size >= len(federation):
        return federation
    rng = Rng.seed(seed).at("choose-k", "sample")
    luck = uniform(rng.keys(federation.keys), 1)[:, 0]
    return federation.select(torch.argsort(luck, stable=True)[:size].sort().values)


def _check_range(first: int, last: int, rounds: int, num_clients: int) -> None:
    _check_int("The smallest K", first, 1)
    _check_int("The largest K", last, 1)
    _check_int("rounds", rounds, 1)
    if first > last:
        raise ConfigError(f"The smallest K must be at most the largest, {last}. Got {first} instead.")
    if last > num_clients:
        raise ConfigError(
            f"The largest K must be at most the number of clients looked at, {num_clients}. Got {last} instead."
        )


def _check_int(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an int >= {least}. Got {value!r} instead.")


# ---- FeSEM, a few rounds for each K ----


class _Start:
    """Every client trained once from the common start: done once, the same for every K."""

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
        """The first models; where they do not all fit, trained again: randomness is a hash, so they come back."""
        if self._kept is not None:
            return iter(self._kept)
        self._engine.begin(0, "start")
        return self._train(self.clients)

    def _train(self, clients: Tensor) -> Iterator[Chunk]:
        one = FeSEM(num_clusters=1)
        state = CenterState.common_start(self._engine, 1)
        return one.train_from(state, self._engine, clients, torch.zeros_like(clients), self._rng)


@dataclass(frozen=True)
class _Watched(FeSEM):
    """FeSEM that notes how far each model is from the center it is assigned to."""

    seen: list[tuple[float, int]] = field(default_factory=list)  # squared distance and cluster of each model

    def distances(self, params: Tensor, state: CenterState, engine: Engine) -> Tensor:
        """As FeSEM."""
        found = super().distances(params, state, engine)
        least = found.min(1)
        self.seen.extend(zip(least.values.tolist(), least.indices.tolist(), strict=True))
        return found


def _few_rounds(
    k: int, start: _Start, found: Tensor, engine: Engine, rounds: int, rng: Rng
) -> tuple[CenterState, float]:
    """FeSEM with K centers from a clustering [n] of the first models; its state and intra-cluster distance."""
    # Repairs would move centers after the distances are measured, and K is too large on purpose here.
    method = _Watched(num_clusters=k, guard=False)
    labels = torch.full((engine.num_clients,), -1, dtype=torch.int64)
    labels[start.clients] = found
    state = CenterState.common_start(engine, k, mean_samples=start.mean_samples)
    sums = CenterSums(k, like=state.centers)
    for chunk in start.models():
        sums.add(chunk.answer.params, labels[chunk.clients])
    state = replace(state, centers=sums.means(keep=state.centers), labels=labels)
    before = state
    for number in range(1, rounds + 1):
        engine.begin(number, "round")
        method.seen.clear()
        before, state = state, method.round(state, engine, start.clients, rng.at(number))
    return state, _intra_distance(method.seen, before, state, engine.task.layout.num_parameters)


def _intra_distance(seen: list[tuple[float, int]], before: CenterState, after: CenterState, cut: int) -> float:
    """Root mean square distance of the last round's models to the means that they became.

    Known are their distances to the centers before: sum |w - c|^2 = sum |w - c'|^2 + n |c - c'|^2.
    """
    labels = torch.tensor([cluster for _, cluster in seen], dtype=torch.int64)
    sizes = torch.bincount(labels, minlength=after.num_clusters).double()  # [K]
    moved = (after.centers[:, :cut] - before.centers[:, :cut]).double().square().sum(1).cpu()  # [K]
    total = sum(distance for distance, _ in seen) - float(sizes @ moved)
    return math.sqrt(max(0.0, total) / max(1, len(seen)))


def _validation(state: CenterState, clients: Tensor, engine: Engine, rng: Rng) -> tuple[float | None, float | None]:
    """Accuracy and loss of the clients' centers on their validation samples, where there are any."""
    engine.begin(engine.round, "evaluate")
    call = engine.call(validate, clients, models=state.centers, refs=state.labels[clients], rng=rng)
    chunks = [chunk.answer for chunk in call]
    if not chunks:
        return None, None
    known = of_scores({name: torch.cat([answer[name] for answer in chunks]).cpu().numpy() for name in chunks[0]})
    return METRICS["accuracy_micro"].value(known), METRICS["loss_micro"].value(known)


# ---- how good a clustering is ----


def principal_coordinates(rows: Tensor) -> Tensor:
    """The same points [n, D] in as few coordinates as they need, the widest first: float64 [n, d] on the CPU.

    Distances stay as they are.
    """
    x = rows.double().cpu()
    x = x - x.mean(0)
    variance, axes = torch.linalg.eigh(x @ x.T)  # of n points, not of D columns
    keep = variance > 1e-10 * variance.max().clamp_min(1e-300)
    points: Tensor = (axes[:, keep] * variance[keep].sqrt()).flip(1)
    return points


def silhouette(points: Tensor, labels: Tensor) -> float | None:
    """Mean silhouette of points [n, d] in clusters [n]; None for a single cluster.

    For each point (b - a) / max(a, b): a is its mean distance to the others of its cluster, b that to the
    nearest other cluster. A point alone in its cluster counts 0.

    >>> silhouette(torch.tensor([[0.0], [1.0], [10.0], [11.0]]), torch.tensor([0, 0, 1, 1]))  # doctest: +ELLIPSIS
    0.899...
    """
    from sklearn.metrics import silhouette_score

    count = len(labels.unique())
    if count < 2 or count == len(labels):
        return None if count < 2 else 0.0
    # By differences: products lose the distance of points that coincide.
    apart = torch.cdist(points.double(), points.double(), compute_mode="donot_use_mm_for_euclid_dist")
    return float(silhouette_score(apart.numpy(), labels.numpy(), metric="precomputed"))


def _references(points: Tensor, rng: Rng) -> list[Tensor]:
    """Data sets without clusters: uniform in the box around the points, along their principal axes."""
    if not points.shape[1]:
        return []
    low, high = points.min(0).values, points.max(0).values
    return [low + (high - low) * rng.at(b).uniform(*points.shape) for b in range(_REFERENCES)]


def gap_statistic(
    inertia: float, references: Sequence[Tensor], k: int, rng: Rng, keys: Tensor
) -> tuple[float | None, float | None]:
    """How much less the logarithm of the inertia is than without clusters, and the standard error of that."""
    # With a cluster for every point nothing is left to compare.
    if inertia <= 0 or not references or k >= len(keys):
        return None, None
    found = [kmeans(points, k, rng.at(b), keys, _REFERENCE_RESTARTS).inertia for b, points in enumerate(references)]
    logs = torch.tensor(found, dtype=torch.float64).log()
    error = float(logs.std(correction=0)) * math.sqrt(1 + 1 / len(references))
    return float(logs.mean()) - math.log(inertia), error


# ---- the recommendation ----


def recommend(rows: Sequence[Row]) -> tuple[int, str]:
    """The K that the rule (see the module) takes, and why."""
    if len(rows) == 1:
        return rows[0].clusters, f"it is the only K that was tried{_accuracy(rows, rows[0])}"
    several = [row for row in rows if row.silhouette is not None]
    one = next((row for row in rows if row.clusters == 1), None)
    if not several:
        return rows[0].clusters, "the first models of all clients are the same: there is nothing to tell them apart"
    best = max(several, key=lambda row: row.silhouette or 0.0)
    score = f"{best.silhouette or 0.0:.2f}"
    is_clear = (best.silhouette or 0.0) >= CLEAR
    if one is not None and not is_clear:
        return 1, (
            f"no number of clusters tells the clients apart: the best silhouette, {score} at K = {best.clusters}, "
            f"is below {CLEAR:g}{_accuracy(rows, one)}"
        )
    if one is not None and not _is_above(best, one):
        return 1, (
            f"the gap statistic finds no clusters: {_number(best.gap)} at K = {best.clusters}, where the silhouette "
            f"is largest ({score}), is not above {_number(one.gap)} at K = 1{_accuracy(rows, one)}"
        )
    reason = f"its clusters are best separated: silhouette {score}"
    if not is_clear:
        reason += f", which is below {CLEAR:g}: the clusters are weak, and K = 1 was not tried"
    elif one is not None and best.gap is not None:
        reason += f"; its gap statistic is {best.gap:.2f} against {_number(one.gap)} at K = 1"
    said = first_by_gap(rows)
    if said is not None:
        agrees = said == best.clusters
        reason += f"; the gap's own rule says {said} too" if agrees else f"; the gap's own rule would say {said}"
    reason += _accuracy(rows, best)
    if best is rows[-1]:
        reason += "; it is the largest K that was tried: larger ones may be better still"
    return best.clusters, reason


def first_by_gap(rows: Sequence[Row]) -> int | None:
    """The first K with gap(K) >= gap(K + 1) - s(K + 1); None if there is none."""
    for row, after in itertools.pairwise(rows):
        if row.gap is None or after.gap is None or after.gap_error is None:
            return None
        if row.gap >= after.gap - after.gap_error:
            return row.clusters
    return None


def _is_above(best: Row, one: Row) -> bool:
    """Whether clusters are better than none; where a gap is not defined, it has no say."""
    if best.gap is None or best.gap_error is None or one.gap is None:
        return True
    return best.gap - best.gap_error > one.gap


def _accuracy(rows: Sequence[Row], row: Row) -> str:
    """What validation says of a row, in words."""
    scored = [other for other in rows if other.valid_accuracy is not None]
    if row.valid_accuracy is None:
        return ""
    top = max(scored, key=lambda other: other.valid_accuracy or 0.0)
    said = f"; validation accuracy {100 * row.valid_accuracy:.1f} %"
    if (top.valid_accuracy or 0.0) <= row.valid_accuracy:
        return f"{said}, the best" if len(rows) > 1 else said
    return f"{said}, at best {100 * (top.valid_accuracy or 0.0):.1f} % at K = {top.clusters}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
