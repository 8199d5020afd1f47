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
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.client.block import Block, Models
from coterie.client.steps import Answer, client_step, train, train_and_sign
from coterie.client.work import SGD
from coterie.data.federation import Federation, Split
from coterie.engines import make_engine
from coterie.engines.base import Chunk, Engine
from coterie.errors import ConfigError
from coterie.methods.fesem import FeSEM
from coterie.methods.parts import signatures
from coterie.methods.parts.averaging import fits_in_memory, samples_of
from coterie.methods.parts.clustering import CenterSums, kmeans
from coterie.methods.parts.signatures import Signatures
from coterie.methods.parts.start import signatures_in, warmed_up
from coterie.nets.sketch import Sketch
from coterie.randomness import Rng, uniform
from coterie.runs.experiment import Experiment
from coterie.runs.newcomers import shuffled, split_unseen
from coterie.runs.settings import LARGEST_K, PROBE_CLIENTS, PROBE_ROUNDS
from coterie.settings import check

HELD_OUT = 1 / 3  # share of a client's training samples that are held out
CLEAR = 0.2  # smallest mean silhouette of useful clusters

_WIDTH = 4096  # of the sketches of first models
_RESTARTS = 20  # of k-means, as in the paper
_REFERENCE_RESTARTS = 5  # fewer on data without clusters, where many clusterings are about equally good
_REFERENCES = 20  # datasets without clusters, for the gap statistic


@dataclass(frozen=True)
class Row:
    """The numbers of one K; None where one is undefined."""

    clusters: int
    accuracy: float | None  # micro, of the clients' centers on their held-out samples
    accuracy_error: float | None  # its standard error over clients
    loss: float | None
    intra_distance: float  # root mean square distance of a model to the mean of its cluster, in the last round
    silhouette: float | None  # mean over clients, -1 ... 1; undefined for one cluster
    gap: float | None  # undefined if every model is its own cluster
    gap_error: float | None  # its standard error s


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


@dataclass(frozen=True)
class Scores:
    """Scores of n clients on their held-out samples."""

    samples: Tensor  # float64 [n]
    accuracy: Tensor | None
    loss: Tensor

    @property
    def means(self) -> tuple[float | None, float | None, float | None]:
        w = self.samples / self.samples.sum()
        return float((w * self.accuracy).sum()), 0.0, float((w * self.loss).sum())


@dataclass(frozen=True)
class Trial:
    row: Row
    scores: Scores


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
    that is smaller. `seed` is by default the experiment's. `observer` gets the row of each K, without gains.
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
    rng = Rng.seed(seed).at("choose-k")
    held_out = with_held_out(clients, rng.at("held out"))
    engine = make_engine(experiment.engine, experiment.task(), held_out, experiment.device, experiment.engine_settings)

    start = _Start(engine, rng.at("start"))
    if len(start.clients) < last:
        failed = f"Only {len(start.clients)} of {len(clients)} clients could train, too few for {last} clusters."
        raise ConfigError(f"{failed} Likely cause: lr={experiment.work.lr:g} is too large.")
    points = principal_coordinates(start.sketches)  # [n, d]
    keys = engine.keys[start.clients]
    references = _references(points, rng.at("references"))
    trials = []
    for k in range(first, last + 1):
        point = rng.at("K", k)
        found = kmeans(points, k, point, keys, _RESTARTS)
        gap, error = gap_statistic(found.inertia, references, k, point.at("gap"), keys)
        labels = signatures.cluster(start.signatures, k, point.at("signatures"), keys, _RESTARTS).labels
        centers, intra = _few_rounds(k, start, labels, engine, rounds, rng.at("rounds"))
        scores = _scores(centers, labels, start.clients, engine, point.at("validate"))
        row = Row(k, *scores.means, intra, silhouette(points, found.labels), gap, error)
        trials.append(Trial(row, scores))
        if observer is not None:
            observer(row)
    recommended, reason = recommend(trials)
    rows = tuple(trial.compared_with(trials[recommended - first]) for trial in trials)
    return Choice(recommended, reason, rows, len(start.clients), rounds, seed)


def with_held_out(federation: Federation, rng: Rng) -> Federation:
    """The federation with a third of each client's training samples, at least one, moved to its validation samples.

    A client with a single training sample keeps it. Which samples move depends on the client's key only.
    """
    train, valid = [], []
    for client, key in enumerate(rng.keys(federation.keys)):
        rows = federation.train.rows(client)
        count = min(max(1, round(len(rows) * HELD_OUT)), len(rows) - 1)
        rows = rows[uniform(key, len(rows)).argsort(stable=True)]
        train.append(rows[count:])
        valid.append(torch.cat([federation.valid.rows(client), rows[:count]]))
    return replace(federation, train=Split.of(train), valid=Split.of(valid))


# ---- a few rounds for each K ----


class _Start:
    """Every client, trained once from the common model after the warm-up, with its signature; the same for every K."""

    def __init__(self, engine: Engine, rng: Rng) -> None:
        self._engine, self._rng = engine, rng
        self._method = method = FeSEM(num_clusters=1, guard=False)
        engine.begin(0, "start")
        self.state = warmed_up(method, method.empty_state(engine), engine, rng.at("warm-up"))
        self.common = self.state.common
        fits = fits_in_memory(engine.num_clients, engine)
        cut = engine.task.layout.num_parameters
        sketch = Sketch(cut, _WIDTH, rng, engine.device)
        kept, rows, signed, counts = [], [], [], []
        for chunk in self._train(engine.everyone()):
            rows.append(sketch(chunk.answer.params[:, :cut] - self.common[:cut]))
            signature, held = signatures_in(chunk, method, self.state, engine)
            signed.append(signature)
            counts.append(held)
            kept.append(chunk if fits else replace(chunk, answer=Answer()))
        self._kept = kept if fits else None
        who = torch.cat([chunk.clients for chunk in kept]) if kept else torch.empty(0, dtype=torch.int64)
        self.clients, order = who.sort()  # int64 [n]: those that answered
        if not kept:
            return
        there = order.to(engine.device)
        self.sketches = torch.cat(rows)[there]  # [n, D]
        self.signatures = Signatures.of(torch.cat(signed)[there], torch.cat(counts)[order])

    def models(self) -> Iterator[Chunk]:
        """The first models. If they do not fit in memory, they are trained again with the same rng."""
        if self._kept is not None:
            return iter(self._kept)
        self._engine.begin(0, "start")
        return self._train(self.clients)

    def _train(self, clients: Tensor) -> Iterator[Chunk]:
        method, engine, rng = self._method, self._engine, self._rng.at("train")
        if not method.signs_classes(engine):
            return method.train_common(self.state, engine, clients, rng)
        refs = torch.zeros_like(clients)
        models, work = self.common.unsqueeze(0), method.work(engine)
        return engine.call(train_and_sign, clients, models=models, refs=refs, work=work, rng=rng)


def _few_rounds(
    k: int, start: _Start, found: Tensor, engine: Engine, rounds: int, rng: Rng
) -> tuple[Tensor, float]:
    """Average in K clusters [n] that do not change: the centers [K, P], and the last intra-cluster distance."""
    labels = torch.zeros(engine.num_clients, dtype=torch.int64)
    labels[start.clients] = found
    cut = engine.task.layout.num_parameters
    centers = start.common.repeat(k, 1)
    intra = 0.0
    for number in range(rounds + 1):
        chunks: Iterator[Chunk]
        if number:
            engine.begin(number, "round")
            work, refs = engine.task.work.at(number), labels[start.clients]
            chunks = engine.call(train, start.clients, models=centers, refs=refs, work=work, rng=rng.at(number))
        else:
            chunks = start.models()
        average, plain, squared = CenterSums(k, like=centers), CenterSums(k, like=centers[:, :cut]), 0.0
        for chunk in chunks:
            mine, params = labels[chunk.clients], chunk.answer.params
            average.add(params, mine, samples_of(chunk))
            plain.add(params[:, :cut], mine)
            squared += float((params - centers[mine])[:, :cut].double().square().sum())
        # The distances are to the centers before the round: sum |w - c|^2 = sum |w - mean|^2 + n |c - mean|^2.
        moved = (plain.means(keep=centers[:, :cut]) - centers[:, :cut]).double().square().sum(1)  # [K]
        around = squared - float((plain.weights * moved).sum())
        intra = math.sqrt(max(0.0, around) / max(1.0, float(plain.weights.sum())))
        centers = average.means(keep=centers)
    return centers, intra


def _scores(centers: Tensor, labels: Tensor, clients: Tensor, engine: Engine, rng: Rng) -> Scores:
    """The scores of the clients' centers on their held-out samples."""
    engine.begin(engine.round, "evaluate")
    chunks = list(engine.call(validate, clients, models=centers, refs=labels, rng=rng))
    found: dict[str, Tensor] = {}
    for name in ("samples", "accuracy", "loss"):
        if chunks and name in chunks[0].answer:
            found[name] = torch.zeros(len(clients), dtype=torch.float64)
            for chunk in chunks:
                found[name][chunk.positions] = chunk.answer[name].double().cpu()
    nobody = torch.zeros(len(clients), dtype=torch.float64)
    return Scores(found.get("samples", nobody), found.get("accuracy"), found.get("loss", nobody))


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
