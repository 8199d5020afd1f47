"""Choosing K, the number of clusters, before a long run: by held-out accuracy.

The paper (Long et al. 2022, section 5.2) runs FeSEM for a few rounds (3) on some clients (100) for each K, and compares
intra-cluster distance and accuracy by eye. Here each K is tried on samples that were held out, with an error bar.

**Trial.** The samples of each client (train and validation, never test) are divided into three folds. In each fold, the
clients train on the other two thirds: a few rounds of plain averaging, then they train once and sign, and for each K
their signatures are clustered as in the warm start (`methods/parts/start.py`). Each cluster is averaged for a few
rounds, without changing labels. Every client's center is then evaluated on the samples that the client held out. The
randomness of training is the same for every K.

**Rule.** The smallest K such that no larger K' is clearly better. K' is clearly better if its held-out accuracy is at
least half a point higher, and the gain is larger than its error bar: the standard error of the paired differences over
clients, times a quantile of the t distribution, one-sided at 5 % over all larger K' together (Bonferroni). The unit is
the client, because its samples share one center. A client with n held-out samples has the weight n / (n + 20): plain
sample weights would leave the decision to the few largest clients if sizes are skewed. Without classes, the loss takes
the place of accuracy, and half a percent of it that of half a point; R2 is shown beside it.

Loss, silhouette (Rousseeuw 1987), gap statistic (Tibshirani, Walther, Hastie 2001) and intra-cluster distance are
shown, and do not decide. Silhouette and gap are of k-means on the clients' first models. Under label skew they see
labels; distance falls with almost every further cluster. True groups and test data are never used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.client import forms
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
from coterie.runs.experiment import Experiment, resolve
from coterie.runs.newcomers import shuffled, split_unseen
from coterie.runs.settings import AUTO, LARGEST_K, PROBE_CLIENTS, PROBE_ROUNDS, Tables, merge
from coterie.settings import check

FOLDS = 3  # each sample of a client is held out in one of them
LEAST = 0.005  # smallest gain in accuracy (or share of the loss) that is worth further clusters
RISK = 0.05  # probability that some larger K seems better by chance, for each K
_ENOUGH = 20  # held-out samples with which a client has half of the largest weight

_WIDTH = 4096  # of the sketches of first models
_RESTARTS = 20  # of k-means, as in the paper
_REFERENCE_RESTARTS = 5  # fewer on data without clusters, where many clusterings are about equally good
_REFERENCES = 20  # datasets without clusters, for the gap statistic


@dataclass(frozen=True)
class Row:
    """The numbers of one K; None where one is undefined."""

    clusters: int
    accuracy: float | None  # weighted mean over clients, of their centers on their held-out samples
    accuracy_error: float | None  # its standard error over clients
    loss: float | None
    intra_distance: float  # root mean square distance of a model to the mean of its cluster, in the last round
    silhouette: float | None  # mean over clients, -1 ... 1; undefined for one cluster
    gap: float | None  # undefined if every model is its own cluster
    gap_error: float | None  # its standard error s
    gain: float | None = None  # in accuracy over the recommended K; without classes, the loss that is saved
    gain_error: float | None = None  # its standard error
    r2: float | None = None  # of targets that are numbers: 1 exact, 0 as good as a client's mean target


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
    """Scores of the clients' centers on their held-out samples, by client."""

    samples: Tensor  # float64 [N]
    loss: Tensor  # float64 [N]
    accuracy: Tensor | None = None  # float64 [N]; None without classes
    r2: Tensor | None = None  # float64 [N]; None with classes, or with a loss that is not of numbers

    @classmethod
    def summed(cls, folds: Sequence[Scores]) -> Scores:
        """The scores on the held-out samples of all folds; of R2, the mean over the folds."""
        samples = torch.stack([fold.samples for fold in folds])  # [F, N]
        shares = samples / samples.sum(0).clamp_min(1)

        def mean(values: Sequence[Tensor | None]) -> Tensor | None:
            known = [value for value in values if value is not None]
            return (shares * torch.stack(known)).sum(0) if len(known) == len(values) else None

        loss = mean([fold.loss for fold in folds])
        assert loss is not None
        return cls(samples.sum(0), loss, mean([fold.accuracy for fold in folds]), mean([fold.r2 for fold in folds]))

    @property
    def mean_r2(self) -> float | None:
        """Over clients; None where undefined."""
        return None if self.r2 is None else weighted_mean(self.r2, self.weights)[0]

    @property
    def means(self) -> tuple[float | None, float | None, float | None]:
        """Accuracy, its standard error over clients, and loss; None where undefined."""
        loss = weighted_mean(self.loss, self.weights)[0]
        if self.accuracy is None:
            return None, None, loss
        return *weighted_mean(self.accuracy, self.weights), loss

    @property
    def weights(self) -> Tensor:
        """The weight of each client [N]."""
        return self.samples / (self.samples + _ENOUGH)


@dataclass(frozen=True)
class Gain:
    """What K' gains over K, with its error bar."""

    value: float
    error: float  # standard error over clients
    bar: float  # the gain must be larger
    least: float

    @classmethod
    def of(cls, before: Tensor, after: Tensor, weights: Tensor, least: float, comparisons: int = 1) -> Gain:
        """The gain of scores [N] over others; `comparisons`: how many such gains are judged together."""
        from scipy.stats import t

        value, error = weighted_mean(after - before, weights)
        if value is None or error is None:
            return cls(0.0, math.inf, math.inf, least)
        clients = float(weights.sum() ** 2 / weights.square().sum())  # effective number
        quantile = float(t.ppf(1 - RISK / comparisons, max(1.0, clients - 1)))
        return cls(value, error, quantile * error, least)

    @property
    def is_clear(self) -> bool:
        """Whether K' is better."""
        return self.value >= self.least and self.value > self.bar


@dataclass(frozen=True)
class Trial:
    """One K with its scores by client."""

    row: Row
    scores: Scores

    def gain_over(self, other: Trial, comparisons: int = 1) -> Gain:
        """By accuracy; without classes by loss."""
        before, after = other.scores.accuracy, self.scores.accuracy
        if before is None or after is None:
            return self.saved_over(other, comparisons)
        return Gain.of(before, after, self.scores.weights, LEAST, comparisons)

    def saved_over(self, other: Trial, comparisons: int = 1) -> Gain:
        """By loss."""
        before, after, weights = -other.scores.loss, -self.scores.loss, self.scores.weights
        return Gain.of(before, after, weights, LEAST * (other.row.loss or 0.0), comparisons)

    def compared_with(self, chosen: Trial) -> Row:
        """The row with its gain over the chosen K."""
        gain = self.gain_over(chosen)
        if not math.isfinite(gain.error):
            return self.row
        return replace(self.row, gain=gain.value, gain_error=gain.error)


def weighted_mean(values: Tensor, weights: Tensor) -> tuple[float | None, float | None]:
    """The mean of clients' values [N] with weights [N], and its standard error over clients; None where undefined.

    >>> mean, error = weighted_mean(torch.tensor([0.0, 1.0, 7.0]), torch.tensor([1.0, 1.0, 0.0]))
    >>> mean, round(error, 6)
    (0.5, 0.5)
    """
    values, weights = values[weights > 0].double(), weights[weights > 0].double()
    if not len(values):
        return None, None
    mean = (weights * values).sum() / weights.sum()
    if len(values) < 2:
        return float(mean), None
    spread = (weights * (values - mean)).square().sum().sqrt() / weights.sum()
    return float(mean), float(spread * math.sqrt(len(values) / (len(values) - 1)))


@client_step("coterie.choose_k:validate", lambda asked: forms.scored_on("valid", asked))
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
    """Try every K from `first` to `last` on a sample of the clients and recommend one.

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
    folds = []
    for number, fold in enumerate(folds_of(clients, rng.at("folds"))):
        engine = make_engine(experiment.engine, experiment.task(), fold, experiment.device, experiment.engine_settings)
        folds.append(_Fold(engine, rng.at("fold", number)))
        if len(folds[-1].clients) < last:
            failed = (
                f"Only {len(folds[-1].clients)} of {len(clients)} clients could train, too few for {last} clusters."
            )
            raise ConfigError(f"{failed} Likely cause: lr={experiment.work.lr:g} is too large.")
    points, keys = principal_coordinates(folds[0].sketches), clients.keys[folds[0].clients]  # [n, d], [n]
    references = _references(points, rng.at("references"))
    trials = []
    for k in range(first, last + 1):
        found = kmeans(points, k, rng.at("K", k), keys, _RESTARTS)
        gap, error = gap_statistic(found.inertia, references, k, rng.at("K", k, "gap"), keys)
        tried = [fold.tried(k, rounds) for fold in folds]
        scores = Scores.summed([scores for scores, _ in tried])
        row = Row(k, *scores.means, tried[0][1], silhouette(points, found.labels), gap, error, r2=scores.mean_r2)
        trials.append(Trial(row, scores))
        if observer is not None:
            observer(row)
    recommended, reason = recommend(trials)
    rows = tuple(trial.compared_with(trials[recommended - first]) for trial in trials)
    return Choice(recommended, reason, rows, len(clients), rounds, seed)


def folds_of(federation: Federation, rng: Rng) -> list[Federation]:
    """The federation once for each fold: a client's samples outside the fold are for training, the others held out.

    A client's samples are its training and validation samples. Each is held out in one fold; a client with a single
    sample trains on it in every fold.
    """
    shuffled_rows = []
    for client, key in enumerate(rng.keys(federation.keys)):
        rows = torch.cat([federation.train.rows(client), federation.valid.rows(client)])
        shuffled_rows.append(rows[uniform(key, len(rows)).argsort(stable=True)])
    folds = []
    for number in range(FOLDS):
        held = [(torch.arange(len(rows)) % FOLDS == number) & (len(rows) > 1) for rows in shuffled_rows]
        train = Split.of([rows[~mask] for rows, mask in zip(shuffled_rows, held, strict=True)])
        valid = Split.of([rows[mask] for rows, mask in zip(shuffled_rows, held, strict=True)])
        folds.append(replace(federation, train=train, valid=valid))
    return folds


# ---- a few rounds for each K ----


class _Fold:
    """The clients of a fold, each trained once from the common model after the warm-up; the same for every K."""

    def __init__(self, engine: Engine, rng: Rng) -> None:
        self._engine, self._rng = engine, rng
        self._method = method = FeSEM(num_clusters=1, guard=False)
        engine.begin(0, "start")
        self.state = warmed_up(method, method.empty_state(engine), engine, rng.at("warm-up"))
        self.common = self.state.common
        fits = fits_in_memory(FOLDS * engine.num_clients, engine)
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

    def tried(self, k: int, rounds: int) -> tuple[Scores, float]:
        """The scores of K clusters by signatures after some rounds, and their intra-cluster distance."""
        keys = self._engine.keys[self.clients]
        labels = torch.zeros(self._engine.num_clients, dtype=torch.int64)
        clustering = signatures.cluster(self.signatures, k, self._rng.at("clusters", k), keys, _RESTARTS)
        labels[self.clients] = clustering.labels
        centers, intra = self._averaged(k, labels, rounds)
        return self._scores(centers, labels), intra

    def _averaged(self, k: int, labels: Tensor, rounds: int) -> tuple[Tensor, float]:
        """Average for some rounds in clusters [N] that do not change: centers [K, P], last intra-cluster distance.

        The randomness of training is the same for every K, so that the differences between them are due to clusters.
        """
        cut, intra = self._engine.task.layout.num_parameters, 0.0
        centers = self.common.repeat(k, 1)
        for number in range(rounds + 1):
            average, plain, squared = CenterSums(k, like=centers), CenterSums(k, like=centers[:, :cut]), 0.0
            for chunk in self._trained(number, centers, labels):
                mine, params = labels[chunk.clients], chunk.answer.params
                average.add(params, mine, samples_of(chunk))
                plain.add(params[:, :cut], mine)
                squared += float((params - centers[mine.to(centers.device)])[:, :cut].double().square().sum())
            # The distances are to the centers before the round: sum |w - c|^2 = sum |w - mean|^2 + n |c - mean|^2.
            moved = (plain.means(keep=centers[:, :cut]) - centers[:, :cut]).double().square().sum(1)  # [K]
            around = squared - float((plain.weights * moved).sum())
            intra = math.sqrt(max(0.0, around) / max(1.0, float(plain.weights.sum())))
            centers = average.means(keep=centers)
        return centers, intra

    def _trained(self, number: int, centers: Tensor, labels: Tensor) -> Iterator[Chunk]:
        """The models of a round; in round 0 the first models, which are the same for every K."""
        engine, clients = self._engine, self.clients
        if not number:
            return self._first_models()
        engine.begin(number, "round")
        work, rng = engine.task.work.at(number), self._rng.at("round", number)
        return engine.call(train, clients, models=centers, refs=labels[clients], work=work, rng=rng)

    def _first_models(self) -> Iterator[Chunk]:
        """If they do not fit in memory, they are trained again with the same rng."""
        if self._kept is not None:
            return iter(self._kept)
        self._engine.begin(0, "start")
        return self._train(self.clients)

    def _train(self, clients: Tensor) -> Iterator[Chunk]:
        """Train from the common model and sign at it."""
        method, engine, rng = self._method, self._engine, self._rng.at("train")
        if not method.signs_classes(engine):
            return method.train_common(self.state, engine, clients, rng)
        refs = torch.zeros_like(clients)
        models, work = self.common.unsqueeze(0), method.work(engine)
        return engine.call(train_and_sign, clients, models=models, refs=refs, work=work, rng=rng)

    def _scores(self, centers: Tensor, labels: Tensor) -> Scores:
        """The scores of the clients' centers on their held-out samples; none of clients that do not answer."""
        engine = self._engine
        engine.begin(engine.round, "evaluate")
        refs, rng = labels[self.clients], self._rng.at("validate")
        found = {name: torch.zeros(engine.num_clients, dtype=torch.float64) for name in ("samples", "loss")}
        for chunk in engine.call(validate, self.clients, models=centers, refs=refs, rng=rng):
            for name in ("accuracy", "r2"):  # those that there are for these targets
                if name in chunk.answer:
                    found.setdefault(name, torch.zeros_like(found["loss"]))
            for name, values in found.items():
                values[chunk.clients] = chunk.answer[name].double().cpu()
        return Scores(**found)


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


def recommend(trials: Sequence[Trial]) -> tuple[int, str]:
    """The K that the rule of this module recommends, and why."""
    if len(trials) == 1:
        return trials[0].row.clusters, "it is the only K that was tried"
    if trials[0].row.loss is None:
        return trials[0].row.clusters, "no client has samples to hold out, and it is the smallest K that was tried"
    place = _smallest(trials, Trial.gain_over)
    chosen, later = trials[place], trials[place + 1 :]
    reasons = [f"held-out {_score(chosen)}"]
    if place:
        reasons[0] += f", {_gain(chosen, trials[place - 1])} over K = {trials[place - 1].row.clusters}"
    if later:
        best = max(later, key=lambda trial: trial.gain_over(chosen).value)
        reasons.append(f"no larger K is clearly better (best: K = {best.row.clusters}, {_gain(best, chosen)})")
    else:
        reasons.append("it is the largest K that was tried, and a larger one may be better")
    if not place and chosen.row.clusters > 1:
        reasons.append("a smaller K was not tried")
    return chosen.row.clusters, "; ".join([*reasons, *_second_opinions(trials)])


def _smallest(trials: Sequence[Trial], gain: Callable[[Trial, Trial, int], Gain]) -> int:
    """The place of the smallest K such that no larger one is clearly better."""
    for place, trial in enumerate(trials):
        later = trials[place + 1 :]
        if not any(gain(other, trial, len(later)).is_clear for other in later):
            return place
    raise AssertionError  # nothing is larger than the last


def _score(trial: Trial) -> str:
    row = trial.row
    if row.accuracy is not None:
        return f"accuracy is {100 * row.accuracy:.1f} %"
    return f"loss is {row.loss:.4g}" + ("" if row.r2 is None else f" (R2 {row.r2:.4g})")


def _gain(trial: Trial, other: Trial) -> str:
    """The gain over another K with its standard error, in words; of a loss the change, which is below 0 if it falls."""
    gain = trial.gain_over(other)
    if trial.row.accuracy is None:
        return f"{-gain.value:+.2g} ±{gain.error:.1g} of loss"
    return f"{100 * gain.value:+.1f} ±{100 * gain.error:.1f} points"


def _second_opinions(trials: Sequence[Trial]) -> list[str]:
    """What the other numbers would choose."""
    rows = [trial.row for trial in trials]
    found = {"silhouette": max(rows, key=lambda row: -2.0 if row.silhouette is None else row.silhouette).clusters}
    if rows[0].accuracy is not None:
        found = {"loss": rows[_smallest(trials, Trial.saved_over)].clusters, **found}
    by_gap = first_by_gap(rows)
    if by_gap is not None:
        found["the gap statistic"] = by_gap
    return ["second opinions: " + ", ".join(f"K = {k} by {name}" for name, k in found.items())]


def first_by_gap(rows: Sequence[Row]) -> int | None:
    """The first K with gap(K) >= gap(K + 1) - s(K + 1); None if there is none."""
    for row, after in itertools.pairwise(rows):
        if row.gap is None or after.gap is None or after.gap_error is None:
            return None
        if row.gap >= after.gap - after.gap_error:
            return row.clusters
    return None


def with_chosen_k(
    tables: Tables, say: Callable[[str], None] = lambda text: None, make: Callable[[Tables], Experiment] = resolve
) -> tuple[Experiment, Choice | None]:
    """The experiment of settings, with its data; if its number of clusters is 'auto', the number is chosen first.

    `make` makes an experiment of settings.
    """
    if tables["algorithm"].get("num_clusters") != AUTO:
        return make(tables).loaded(), None
    trial = make(merge(tables, {"algorithm": {"num_clusters": 1}})).loaded()
    if not hasattr(trial.algorithm, "num_clusters"):
        return trial, None  # a note says that clusters are not used
    if type(trial.algorithm).num_clusters == AUTO:  # the method finds it in the run
        return make(tables).loaded(), None
    say(f"choosing the number of clusters of {trial.dataset}")
    choice = choose_k(trial, last=None)
    experiment = make(merge(tables, {"algorithm": {"num_clusters": choice.recommended}}))
    say(f"chosen: {choice.recommended} clusters, because {choice.reason}")
    return replace(experiment, data=trial.data), choice
