"""Metrics of a run. A metric is one function; records, tables and pages take their lists from here.

    @register_metric("below_half", "below 50 %", "share of clients with accuracy below 50 %", format=PERCENT)
    def below_half(accuracy):
        return float((accuracy < 0.5).mean())

The names of its parameters say what it is computed from:

    accuracy, f1, loss, samples   scores and number of test samples of the clients that have any [n]
    clusters                      clusters of these clients [n]; -1: none yet
    labels, groups                clusters and true groups of the clients seen so far [m]
    before, after                 clusters of all clients before and after the round [N]; -1: none yet
    rows                          records of all rounds: a metric of the whole run, for the summary

Where one of them is not known (a regression has no accuracy, data may have no true groups), the metric is None.
"micro" weighs a client by its test samples, "macro" is the plain mean over clients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, UnknownName

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., float | None])
Where = Literal["summary", "table", "terminal", "wide", "headline", "compare", "curves"]

BEST_ROUNDS = 5
BOTTOM_CLIENTS = 5
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
SCORES = ("accuracy", "f1", "loss")  # of a client
_OF_SCORES = (*SCORES, "samples", "clusters")
_KNOWN = (*_OF_SCORES, "labels", "groups", "before", "after", "rows")
_FACTS = ("round", "cohort", "spread", "cluster_sizes", "clients_met", "failures", "repairs", "bytes", "seconds")
EVERYWHERE: tuple[Where, ...] = ("summary", "table", "terminal", "headline", "compare", "curves")


class Format(NamedTuple):
    """How a value is shown."""

    factor: float = 1.0
    digits: int = 2
    unit: str = ""

    def text(self, value: float | None) -> str:
        """The value without its unit.

        >>> PERCENT.text(0.9512), NUMBER.text(0.5), SECONDS.text(None)
        ('95.12', '0.50', '-')
        """
        return "-" if value is None else f"{self.factor * value:.{self.digits}f}"


NUMBER, PERCENT, BYTES, SECONDS = Format(), Format(100, 2, "%"), Format(1e-6, 1, "MB"), Format(1, 1, "s")


# ---- the registry ----


@dataclass
class Metric:
    """One number of a round or of a run. As a decorator it registers the function that computes the number.

    It is shown in the summary (file and terminal), in the table of `compare` and `sweep` (file; "terminal": also
    printed, as in `list runs`; "wide": printed where there is room), in the headline (tiles of the report, `list runs
    --json`), and in the report's table of several runs ("compare") and curves by round ("curves", also plots).
    """

    path: str  # its place in a record: "accuracy.bottom5", "ari"
    label: str  # for people: "5 worst clients"
    about: str  # what it is, in a sentence
    format: Format = NUMBER
    better: Literal["high", "low", "none"] = "high"
    short: str = ""  # head of its column in a terminal; by default the label
    line: str = ""  # of the printed summary; by default the label
    word: str = ""  # before the value in that line
    panel: str = ""  # the chart of a run that it is drawn in, by its main metric; "": a chart of its own
    shown: tuple[Where, ...] = EVERYWHERE
    needs: tuple[str, ...] = ()  # by default the names of the function's parameters
    function: Callable[..., float | None] = field(init=False)

    @property
    def place(self) -> tuple[str, ...]:
        """The keys that lead to it in a record."""
        return tuple(self.path.split("."))

    @property
    def key(self) -> str:
        """Its name as a curve: "bottom5"; a macro mean has the name of its score."""
        table, _, part = self.path.rpartition(".")
        return {"macro": table, "micro": f"{table}_micro"}.get(part, part)

    def __post_init__(self) -> None:
        self.short, self.line = self.short or self.label, self.line or self.label

    def __call__(self, function: Function) -> Function:
        self.function, self.needs = function, self.needs or tuple(inspect.signature(function).parameters)
        for name in self.needs:
            if name not in _KNOWN:
                raise UnknownName(f"parameter of metric {self.path} named", name, _KNOWN)
        others = [*_FACTS, *(other.path for other in METRICS.values() if other.path != self.path)]
        for other in others:  # neither may lie inside the other
            if f"{self.path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{self.path}."):
                raise ConfigError(f"A record has '{other}' already; metric {self.path} needs another name.")
        if METRICS.get(self.key, self).path != self.path:
            raise ConfigError(f"There is a metric {self.key} already; metric {self.path} needs another name.")
        METRICS[self.key] = self
        return function

    @property
    def of_run(self) -> bool:
        """Whether it is computed once, of all rounds."""
        return "rows" in self.needs

    def value(self, known: Mapping[str, Any]) -> float | None:
        """Computed from what is known; None where something it needs is not."""
        values = [known.get(name) for name in self.needs]
        found = None if any(value is None for value in values) else self.function(*values)
        return None if found is None else float(found)

    def read(self, record: Any) -> Any:
        """What a record has in its place; None where it has nothing."""
        for part in self.place:
            record = record.get(part) if isinstance(record, Mapping) else None
        return record


METRICS: dict[str, Metric] = {}
register_metric = Metric


def metrics(*where: Where) -> list[Metric]:
    """The metrics that are shown in any of these places, in the order in which they were registered."""
    return [metric for metric in METRICS.values() if set(where) & set(metric.shown)]


def nested(values: Iterable[tuple[Metric, Any]]) -> dict[str, Any]:
    """Values in their places of a record."""
    found: dict[str, Any] = {}
    for metric, value in values:
        inner = found
        for part in metric.place[:-1]:
            inner = inner.setdefault(part, {})
        inner[metric.place[-1]] = value
    return found


# ---- records ----


def of_scores(scores: Mapping[str, NDArray[Any]], labels: Ints | None = None) -> dict[str, Any]:
    """What metrics may know of an evaluation, from the clients' scores [N]."""
    has = scores["samples"] > 0
    known: dict[str, Any] = {**scores, "samples": scores["samples"].astype(np.int64), "clusters": labels}
    return {name: known[name][has] if has.any() and known.get(name) is not None else None for name in _OF_SCORES}


def of_clusters(labels: Ints, groups: Ints | None) -> dict[str, Any]:
    """What metrics may know of a clustering: labels [N], -1 for clients not seen yet, and true groups [N]."""
    seen = labels >= 0
    return {
        "labels": labels[seen] if seen.any() else None,
        "groups": groups[seen] if groups is not None and seen.any() else None,
    }


def measured(known: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a round, as its record has them; those of an evaluation only where there was one."""
    return _record((metric, metric.value(known)) for metric in METRICS.values() if known.keys() >= set(metric.needs))


def summarized(rows: Sequence[Mapping[str, Any]], known: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a run: scores of its last evaluation, clusters as they are now, and those of all rounds."""
    last: Mapping[str, Any] = next((row for row in reversed(rows) if "accuracy" in row), {})
    known = {**known, "rows": rows}
    return _record(
        (metric, metric.value(known) if known.keys() >= set(metric.needs) else metric.read(last))
        for metric in metrics("summary")
    )


def _record(values: Iterable[tuple[Metric, Any]]) -> dict[str, Any]:
    """Nested values; a table in which nothing is known is None."""

    def is_empty(value: Any) -> bool:
        return isinstance(value, dict) and all(part is None for part in value.values())

    return {key: None if is_empty(value) else value for key, value in nested(values).items()}


# ---- scores of clients ----


def macro(values: Floats) -> float:
    """The plain mean over clients."""
    return float(values.mean())


def micro(values: Floats, samples: Ints) -> float:
    """The mean weighted by test samples."""
    return float(np.average(values, weights=samples))


def _register_means(score: str, label: str, about: str, shown: tuple[Where, ...], **options: Any) -> None:
    """The macro mean of a client's score, shown as said, and the micro mean."""
    options |= {"line": label}
    register_metric(f"{score}.macro", label, about, word="macro", shown=shown, needs=(score,), **options)(macro)
    label, about, needs = f"{label}, micro", f"{about}, weighted by samples", (score, "samples")
    where: tuple[Where, ...] = ("summary", "table", "compare") if score == "accuracy" else ("summary",)
    register_metric(f"{score}.micro", label, about, word="micro", shown=where, needs=needs, **options)(micro)


_register_means("accuracy", "accuracy", "mean over clients, own test samples", EVERYWHERE, format=PERCENT)


@register_metric(
    "accuracy.best5", "best 5 rounds", "mean of the five best", PERCENT, word="micro", shown=("summary", "compare")
)
def best_rounds(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean of the five best rounds' micro accuracy (FedDSMIC's way of reporting)."""
    seen = [row["accuracy"]["micro"] for row in rows if row.get("accuracy")]
    return float(np.sort(seen)[::-1][:BEST_ROUNDS].mean()) if seen else None


@register_metric(
    "accuracy.bottom5",
    "5 worst clients",
    "mean accuracy of the five worst",
    PERCENT,
    short="5 worst",
    line="fairness",
    word="5 worst clients",
    panel="accuracy",
)
def bottom_clients(accuracy: Floats) -> float:
    """Mean accuracy of the five worst clients."""
    return float(np.sort(accuracy)[:BOTTOM_CLIENTS].mean())


@register_metric(
    "accuracy.worst_decile",
    "worst tenth",
    "mean accuracy of the worst tenth",
    PERCENT,
    line="fairness",
    word="worst tenth",
    shown=("summary",),
)
def worst_tenth(accuracy: Floats) -> float:
    """Mean accuracy of the worst tenth of the clients."""
    return float(np.sort(accuracy)[: max(1, round(0.1 * len(accuracy)))].mean())


_WIDE: tuple[Where, ...] = ("summary", "table", "wide", "headline", "compare", "curves")
_register_means("f1", "F1", "mean over clients, macro over their classes", _WIDE, format=PERCENT)
_NOT_PRINTED: tuple[Where, ...] = ("summary", "table", "headline", "compare", "curves")
_register_means("loss", "loss", "mean over clients", _NOT_PRINTED, format=Format(1, 4), better="low")


# ---- agreement with the true groups, and churn ----


def contingency(labels: Ints, groups: Ints) -> NDArray[np.float64]:
    """How many clients are in each pair of (cluster, group)."""
    _, rows = np.unique(labels, return_inverse=True)
    _, columns = np.unique(groups, return_inverse=True)
    table = np.zeros((rows.max() + 1, columns.max() + 1))
    np.add.at(table, (rows, columns), 1)
    return table


def adjusted_rand(labels: Ints, groups: Ints) -> float:
    """Adjusted Rand index (Hubert and Arabie 1985): 1 for the same partition, about 0 for chance.

    >>> adjusted_rand(np.array([0, 0, 1, 1]), np.array([5, 5, 2, 2]))
    1.0
    """
    from sklearn.metrics import adjusted_rand_score

    return min(1.0, float(adjusted_rand_score(groups, labels)))  # rounding may go beyond


def normalized_mutual_information(labels: Ints, groups: Ints) -> float:
    """Mutual information over the mean of both entropies."""
    from sklearn.metrics import normalized_mutual_info_score

    return min(1.0, float(normalized_mutual_info_score(groups, labels)))


@register_metric(
    "ari", "ARI", "agreement with the true groups: 1 exact, 0 chance", line="true groups", word="ARI", panel="churn"
)
def ari(labels: Ints, groups: Ints) -> float:
    """Adjusted Rand index."""
    return adjusted_rand(labels, groups)


@register_metric(
    "nmi",
    "NMI",
    "normalized mutual information of clusters and true groups",
    line="true groups",
    word="NMI",
    panel="churn",
    shown=("summary",),
)
def nmi(labels: Ints, groups: Ints) -> float:
    """Normalized mutual information."""
    return normalized_mutual_information(labels, groups)


@register_metric(
    "purity",
    "purity",
    "share of clients in a cluster where their true group is the largest",
    line="true groups",
    word="purity",
    panel="churn",
    shown=("summary",),
)
def purity(labels: Ints, groups: Ints) -> float:
    """Share of clients that are in a cluster where their group is the largest."""
    return float(contingency(labels, groups).max(1).sum() / len(labels))


@register_metric(
    "churn", "churn", "share of clients that changed their cluster in a round", better="low", shown=("curves",)
)
def churn(before: Ints, after: Ints) -> float:
    """Share of the clients seen before whose label has changed."""
    seen = before >= 0
    known = after[: len(before)]  # clients may have joined since
    return float((before[seen] != known[seen]).mean()) if seen.any() else 0.0


# ---- more that a record holds ----


def quantiles(scores: Mapping[str, NDArray[Any]]) -> dict[str, list[float]]:
    """How a score is spread over the clients: the tenth, quarter, half, three quarters and nine tenths.

    >>> quantiles({"samples": np.ones(5), "accuracy": np.array([0.0, 0.25, 0.5, 0.75, 1.0])})
    {'accuracy': [0.1, 0.25, 0.5, 0.75, 0.9]}
    """
    has = scores["samples"] > 0
    names = [name for name in SCORES if name in scores and has.any()]
    return {name: np.quantile(scores[name][has], QUANTILES).tolist() for name in names}


def cluster_sizes(labels: Ints, num_clusters: int) -> list[int]:
    """Members of each cluster, empty ones included."""
    met = labels[labels >= 0]
    return np.bincount(met, minlength=num_clusters).tolist() if len(met) or num_clusters else []
