"""Metrics of a run. A metric is one function; rounds, summary, tables and reports list the registered ones.

    @register_metric("below_half", "below 50 %", "share of clients with accuracy below 50 %", format=PERCENT)
    def below_half(accuracy):
        return float((accuracy < 0.5).mean())

The names of its parameters say what it is computed from:

    accuracy, f1, loss, r2, samples   scores and number of test samples of the clients that have test samples [n]
    clusters                          clusters of these clients [n]; -1: not seen
    valid_accuracy, valid_loss, valid_samples   the same of the clients that have validation samples [v]
    labels, groups                    clusters and true groups of the clients seen so far [m]
    before, after                     clusters of all clients before and after the round [N]; -1: not seen
    rows                              rows of all rounds: a metric of the whole run, for the summary

If one of them is unknown (a regression has no accuracy, data may have no true groups), the metric is None.
"micro" weighs clients by their test samples, "macro" is the plain mean over clients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

from coterie.errors import ConfigError, UnknownName

if TYPE_CHECKING:  # the terminal reads this list of metrics; numpy is imported when one is computed
    import numpy as np
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"
Ints: TypeAlias = "NDArray[np.int64]"
Function = TypeVar("Function", bound=Callable[..., float | None])
Where = Literal["summary", "table", "terminal", "wide", "headline", "compare", "curves"]

BEST_ROUNDS = 5
BOTTOM_CLIENTS = 5
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
SCORES = ("accuracy", "f1", "loss", "r2")  # of a client
_OF_SCORES = (*SCORES, "samples", "clusters")
_OF_VALIDATION = ("valid_accuracy", "valid_loss", "valid_samples")
_KNOWN = (*_OF_SCORES, *_OF_VALIDATION, "labels", "groups", "before", "after", "rows")
_FACTS = (
    *("round", "cohort", "spread", "cluster_sizes", "clients_met"),
    *("failures", "repairs", "decisions", "bytes", "seconds"),
)
EVERYWHERE: tuple[Where, ...] = ("summary", "table", "terminal", "headline", "compare", "curves")


class Format(NamedTuple):
    """How a value is formatted."""

    factor: float = 1.0
    digits: int = 2
    unit: str = ""

    def text(self, value: float | None) -> str:
        """The value without its unit.

        >>> PERCENT.text(0.9512), NUMBER.text(0.5), SECONDS.text(None)
        ('95.12', '0.50', '-')
        """
        return "-" if value is None else f"{self.factor * value:.{self.digits}f}"


NUMBER, PERCENT, SECONDS = Format(), Format(100, 2, "%"), Format(1, 1, "s")


# ---- the registry ----


@dataclass
class Metric:
    """One number of a round or of a run. As a decorator it registers the function that computes the number.

    `shown` lists where it appears: "summary" (file and terminal), "table" (the files of `compare` and `sweep`),
    "terminal" (their printed tables and `list runs`), "wide" (the same if there is room), "headline" (the tiles of the
    report, `list runs --json`), "compare" (the report's table of several runs), "curves" (report and plots, by round).
    """

    path: str  # its place in a row or summary: "accuracy.bottom5", "ari"
    label: str  # the name that people read: "5 worst clients"
    about: str  # a short description
    format: Format = NUMBER
    better: Literal["high", "low", "none"] = "high"
    short: str = ""  # column heading in a terminal; by default the label
    line: str = ""  # line of the printed summary; by default the label
    word: str = ""  # printed before the value in that line
    panel: str = ""  # key of the metric whose chart it shares; "": a chart of its own
    shown: tuple[Where, ...] = EVERYWHERE
    needs: tuple[str, ...] = ()  # by default the names of the function's parameters
    function: Callable[..., float | None] = field(init=False)

    @property
    def place(self) -> tuple[str, ...]:
        """Its keys in a row or summary."""
        return tuple(self.path.split("."))

    @property
    def key(self) -> str:
        """Its name as a curve: "bottom5". A macro mean has the name of its score."""
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
                raise ConfigError(f"A row already has '{other}'. Give metric {self.path} another name.")
        if METRICS.get(self.key, self).path != self.path:
            raise ConfigError(f"There is already a metric {self.key}. Give metric {self.path} another name.")
        METRICS[self.key] = self
        return function

    @property
    def of_run(self) -> bool:
        """Whether it is computed once, from all rounds."""
        return "rows" in self.needs

    def value(self, known: Mapping[str, Any]) -> float | None:
        """Its value; None if something it needs is unknown."""
        values = [known.get(name) for name in self.needs]
        found = None if any(value is None for value in values) else self.function(*values)
        return None if found is None else float(found)

    def read(self, record: Any) -> Any:
        """Its value in a row or summary; None if it is missing."""
        for part in self.place:
            record = record.get(part) if isinstance(record, Mapping) else None
        return record


METRICS: dict[str, Metric] = {}
register_metric = Metric


def metrics(*where: Where) -> list[Metric]:
    """The metrics that are shown in any of these places, in order of registration."""
    return [metric for metric in METRICS.values() if set(where) & set(metric.shown)]


def nested(values: Iterable[tuple[Metric, Any]]) -> dict[str, Any]:
    """Values in nested tables, each in the place of its metric."""
    found: dict[str, Any] = {}
    for metric, value in values:
        inner = found
        for part in metric.place[:-1]:
            inner = inner.setdefault(part, {})
        inner[metric.place[-1]] = value
    return found


# ---- rows and summaries ----


def of_scores(scores: Mapping[str, NDArray[Any]], labels: Ints | None = None) -> dict[str, Any]:
    """Inputs of metrics from an evaluation: the clients' scores [N] and labels [N]."""
    known: dict[str, Any] = {**scores, "samples": scores["samples"].astype("int64"), "clusters": labels}

    def of_those(has: NDArray[np.bool_], names: Sequence[str]) -> dict[str, Any]:
        return {name: known[name][has] if has.any() and known.get(name) is not None else None for name in names}

    validated = of_those(known["valid_samples"] > 0, _OF_VALIDATION) if "valid_samples" in known else {}
    return of_those(known["samples"] > 0, _OF_SCORES) | validated


def of_clusters(labels: Ints, groups: Ints | None) -> dict[str, Any]:
    """Inputs of metrics from a clustering: labels [N], -1 for clients not seen yet, and true groups [N]."""
    seen = labels >= 0
    both = {"labels": labels, "groups": groups}
    return {name: values[seen] if values is not None and seen.any() else None for name, values in both.items()}


def measured(known: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a round for its row; scores only if the round was evaluated."""
    return _record((metric, metric.value(known)) for metric in METRICS.values() if known.keys() >= set(metric.needs))


def summarized(rows: Sequence[Mapping[str, Any]], known: Mapping[str, Any], round: int | None = None) -> dict[str, Any]:
    """The metrics of a run: scores of the last evaluation, current clusters, and metrics of all rounds.

    With `round`, the scores are those of that round instead.
    """
    evaluated = (row for row in reversed(rows) if "accuracy" in row and round in (None, row.get("round")))
    last: Mapping[str, Any] = next(evaluated, {})
    known = {**known, "rows": rows}
    return _record(
        (metric, metric.value(known) if known.keys() >= set(metric.needs) else metric.read(last))
        for metric in metrics("summary")
    )


def _record(values: Iterable[tuple[Metric, Any]]) -> dict[str, Any]:
    """Values in nested tables; a table without any value is None."""

    def is_empty(value: Any) -> bool:
        return isinstance(value, dict) and all(part is None for part in value.values())

    return {key: None if is_empty(value) else value for key, value in nested(values).items()}


# ---- scores of clients ----


def macro(values: Floats) -> float:
    """The plain mean over clients."""
    return float(values.mean())


def micro(values: Floats, samples: Ints) -> float:
    """The mean over clients, weighted by test samples."""
    return float((values * samples).sum() / samples.sum())


def _register_means(
    score: str, label: str, about: str, shown: tuple[Where, ...], samples: str = "samples", **options: Any
) -> None:
    """Register the macro mean of a score, shown in these places, and its micro mean."""
    options = {"line": label} | options
    register_metric(f"{score}.macro", label, about, word="macro", shown=shown, needs=(score,), **options)(macro)
    label, about, needs = f"{label}, micro", f"{about}, weighted by samples", (score, samples)
    where: tuple[Where, ...] = ("summary", "table", "compare") if score == "accuracy" else ("summary",)
    options |= {"panel": ""}
    register_metric(f"{score}.micro", label, about, word="micro", shown=where, needs=needs, **options)(micro)


_register_means("accuracy", "accuracy", "mean over clients, own test samples", EVERYWHERE, format=PERCENT)


@register_metric(
    "accuracy.best5", "best 5 rounds", "mean of the five best", PERCENT, word="micro", shown=("summary", "compare")
)
def best_rounds(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean micro accuracy of the five best rounds, as FedDSMIC reports it."""
    import numpy as np

    seen = [row["accuracy"]["micro"] for row in rows if row.get("accuracy")]
    return float(np.sort(seen)[::-1][:BEST_ROUNDS].mean()) if seen else None


_fairness = partial(register_metric, format=PERCENT, line="fairness")


@_fairness(
    "accuracy.bottom5",
    "5 worst clients",
    "mean accuracy of the five worst",
    short="5 worst",
    word="5 worst clients",
    panel="accuracy",
)
def bottom_clients(accuracy: Floats) -> float:
    """Mean accuracy of the five worst clients."""
    return _worst(accuracy, BOTTOM_CLIENTS)


@_fairness(
    "accuracy.worst_decile", "worst tenth", "mean accuracy of the worst tenth", word="worst tenth", shown=("summary",)
)
def worst_tenth(accuracy: Floats) -> float:
    """Mean accuracy of the worst tenth of the clients."""
    return _worst(accuracy, max(1, round(0.1 * len(accuracy))))


def _worst(values: Floats, count: int) -> float:
    """The mean of the smallest values."""
    import numpy as np

    return float(np.sort(values)[:count].mean())


_WIDE: tuple[Where, ...] = ("summary", "table", "wide", "headline", "compare", "curves")
_register_means("f1", "F1", "mean over clients, macro over their classes", _WIDE, format=PERCENT)
_NOT_PRINTED: tuple[Where, ...] = ("summary", "table", "headline", "compare", "curves")
_register_means("loss", "loss", "mean over clients", _NOT_PRINTED, format=Format(1, 4), better="low")
_register_means(
    "r2", "R2", "mean over clients: 1 exact, 0 as good as a client's mean target", _NOT_PRINTED, format=Format(1, 4)
)
_CURVES: tuple[Where, ...] = ("summary", "curves")
_validation = partial(_register_means, shown=_CURVES, samples="valid_samples")
_validation(
    "valid_accuracy",
    "validation accuracy",
    "mean over clients, own validation samples",
    format=PERCENT,
    panel="accuracy",
)
_validation("valid_loss", "validation loss", "mean over clients", format=Format(1, 4), better="low", panel="loss")


# ---- agreement with the true groups, and churn ----

_agreement = partial(register_metric, line="true groups", panel="churn")


@_agreement("ari", "ARI", "agreement with the true groups: 1 exact, 0 chance", word="ARI")
def ari(labels: Ints, groups: Ints) -> float:
    """Adjusted Rand index (Hubert and Arabie 1985).

    >>> import numpy as np
    >>> ari(np.array([0, 0, 1, 1]), np.array([5, 5, 2, 2]))
    1.0
    """
    table = _together(labels, groups)
    pairs, both = len(labels) * (len(labels) - 1), _pairs(table)  # ordered pairs of clients; those together in both
    cluster, group = _pairs(table.sum(0)) - both, _pairs(table.sum(1)) - both  # together in one of them only
    neither = pairs - both - cluster - group
    if not cluster and not group:
        return 1.0
    expected = (both + group) * (group + neither) + (both + cluster) * (cluster + neither)
    return 2 * (both * neither - cluster * group) / expected


@_agreement("nmi", "NMI", "normalized mutual information of clusters and true groups", word="NMI", shown=("summary",))
def nmi(labels: Ints, groups: Ints) -> float:
    """Mutual information over the mean of both entropies."""
    import numpy as np

    shares = _together(labels, groups) / len(labels)
    if shares.size == 1:
        return 1.0
    clusters, kinds = shares.sum(0), shares.sum(1)
    has = shares > 0
    shared = float((shares[has] * np.log(shares[has] / np.outer(kinds, clusters)[has])).sum())
    entropies = [-float((part * np.log(part)).sum()) for part in (clusters, kinds)]
    return 0.0 if shared <= np.finfo(np.float64).eps else min(1.0, 2 * shared / sum(entropies))  # rounding errors


@_agreement(
    "purity", "purity", "share of clients in the largest true group of their cluster", word="purity", shown=("summary",)
)
def purity(labels: Ints, groups: Ints) -> float:
    """Share of clients that are in the largest true group of their cluster."""
    return float(_together(labels, groups).max(0).sum() / len(labels))


def _together(labels: Ints, groups: Ints) -> Ints:
    """Number of clients of each true group in each cluster. Not scikit-learn's: importing it takes half a second."""
    import numpy as np

    _, rows = np.unique(groups, return_inverse=True)
    _, columns = np.unique(labels, return_inverse=True)
    table: Ints = np.zeros((rows.max() + 1, columns.max() + 1), dtype=np.int64)
    np.add.at(table, (rows, columns), 1)
    return table


def _pairs(counts: Ints) -> int:
    """Ordered pairs within parts of these sizes."""
    return int((counts * (counts - 1)).sum())


@register_metric(
    "churn", "churn", "share of clients that changed their cluster in a round", better="low", shown=("curves",)
)
def churn(before: Ints, after: Ints) -> float:
    """Share of the clients seen before whose label has changed."""
    seen = before >= 0
    known = after[: len(before)]  # clients may have joined since
    return float((before[seen] != known[seen]).mean()) if seen.any() else 0.0


# ---- other parts of a row ----


def best_validated(rows: Sequence[Mapping[str, Any]]) -> tuple[int | None, int]:
    """The round with the lowest validation loss over all samples, and how many evaluations there were since.

    Where clients keep their losses private, the one with the highest validation accuracy.

    >>> losses = enumerate([2.0, 1.0, 1.5], 1)
    >>> best_validated([{"round": n, "accuracy": {}, "valid_loss": {"micro": loss}} for n, loss in losses])
    (2, 1)
    """
    best, least, since = None, float("inf"), 0
    for row in rows:
        if "accuracy" not in row:
            continue
        loss, accuracy = (METRICS[name].read(row) for name in ("valid_loss_micro", "valid_accuracy_micro"))
        value = loss if loss is not None else float("inf") if accuracy is None else -accuracy
        since += 1
        if value < least:
            best, least, since = row["round"], value, 0
    return best, since


def quantiles(scores: Mapping[str, NDArray[Any]]) -> dict[str, list[float]]:
    """Quantiles of each score over the clients: 0.1, 0.25, 0.5, 0.75 and 0.9.

    >>> import numpy as np
    >>> quantiles({"samples": np.ones(5), "accuracy": np.array([0.0, 0.25, 0.5, 0.75, 1.0])})
    {'accuracy': [0.1, 0.25, 0.5, 0.75, 0.9]}
    """
    import numpy as np

    has = scores["samples"] > 0
    names = [name for name in SCORES if name in scores and has.any()]
    return {name: np.quantile(scores[name][has], QUANTILES).tolist() for name in names}


def cluster_sizes(labels: Ints, num_clusters: int) -> list[int]:
    """Number of members of each cluster, empty clusters included."""
    import numpy as np

    sizes: list[int] = np.bincount(labels[labels >= 0], minlength=num_clusters).tolist()
    return sizes
