"""Several runs as the table of a paper: mean and standard deviation over seeds, and a paired test.

Runs that differ only in their seed share a row. Within a dataset and situation, each row is tested against the one with
the best mean accuracy, or the lowest loss without classes: a two-sided paired t-test over the seeds that both have,
with Holm's correction for the number of rows.
Wilcoxon's test is no alternative: with n seeds its smallest p is 2 / 2^n, which is 0.25 for three. With few seeds the
t-test, too, detects only large and consistent differences; n is shown beside p.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.runs.checks import finite
from coterie.runs.metrics import SECONDS, Format, metrics
from coterie.runs.reading import RunData


class Column(NamedTuple):
    """A number of a run, and how it is shown."""

    key: str
    title: str
    format: Format
    better: str  # "high", "low" or "none"


def columns() -> list[Column]:
    """The columns of the table: metrics, then costs."""
    return [
        *(Column(metric.key, metric.label, metric.format, metric.better) for metric in metrics("compare")),
        Column("clusters", "K", Format(digits=0), "none"),
        Column("megabytes", "MB sent", Format(1, 1, "MB"), "low"),
        Column("seconds", "seconds", SECONDS, "low"),
    ]


@dataclass(frozen=True)
class Row:
    """Runs that differ only in their seed."""

    label: str
    dataset: str
    runs: list[int]  # positions among the runs
    values: dict[str, list[float | None]]  # column -> a value for each run
    situation: str = ""  # of a comparison over situations

    @property
    def data(self) -> str:
        """Rows with the same data are compared with each other."""
        return f"{self.dataset}, {self.situation}" if self.situation else self.dataset

    def known(self, key: str) -> list[float]:
        """The values of the runs that have one."""
        return [value for value in self.values[key] if value is not None]

    def mean(self, key: str) -> float | None:
        """None if no run has the number."""
        return statistics.fmean(self.known(key)) if self.known(key) else None

    def deviation(self, key: str) -> float | None:
        """The standard deviation (n - 1); None for a single run."""
        return statistics.stdev(self.known(key)) if len(self.known(key)) > 1 else None


class Verdict(NamedTuple):
    """How a row compares to the best one of its dataset."""

    best: bool
    p: float | None  # Holm-corrected; None: the best row, or too few common seeds
    seeds: int


def megabytes_sent(run: RunData) -> NDArray[np.float64]:
    """Sent so far in both directions, including the start and repairs: [T]."""
    parts = [np.nan_to_num(run.curves[name]) for name in ("down", "up", "start_bytes", "repair_bytes")]
    total: NDArray[np.float64] = np.sum(parts, axis=0) / 1e6
    return total


def value_of(run: RunData, key: str) -> float | None:
    """A number of a run: from its summary, or up to its last round."""
    summary = run.summary or {}
    if key == "clusters":
        return finite(summary.get("clusters")) or (float(len(run.sizes[-1])) if run.sizes else None)
    if key == "megabytes":
        return None if run.last("down") is None else float(megabytes_sent(run).max())  # it only grows
    if key == "seconds":
        seconds = summary.get("seconds")
        total = finite(seconds.get("total")) if isinstance(seconds, dict) else None
        spent = [np.nansum(run.curves[f"{part}_seconds"]) for part in ("train", "server", "evaluate") if run.curves]
        return total if total is not None else float(sum(spent)) or None
    return run.last(key)


def rows_of(runs: Sequence[RunData], situations: Sequence[str] = ()) -> list[Row]:
    """The rows of the table, in the order of the situations, then of first appearance.

    A run that stands for several situations has a row in each.
    """
    found: dict[tuple[str, str], list[int]] = {}
    for situation in (*situations, ""):
        for position, run in enumerate(runs):
            if situation in run.situations if situation else not set(run.situations) & set(situations):
                found.setdefault((situation, repr(sorted(_settings(run).items()))), []).append(position)
    labels = _labels([(situation, runs[members[0]]) for (situation, _), members in found.items()])
    return [
        Row(
            label,
            runs[members[0]].dataset,
            members,
            {column.key: [value_of(runs[i], column.key) for i in members] for column in columns()},
            situation,
        )
        for label, ((situation, _), members) in zip(labels, found.items(), strict=True)
    ]


def _by_dataset(rows: Sequence[Row], key: str) -> list[dict[int, float]]:
    """The means of the rows that have one, by position; a dataset with a single row has nothing to compare."""
    found: dict[str, dict[int, float]] = {}
    for i, row in enumerate(rows):
        mean = row.mean(key)
        if mean is not None:
            found.setdefault(row.data, {})[i] = mean
    return [means for means in found.values() if len(means) > 1]


def best_of(rows: Sequence[Row], column: Column) -> set[int]:
    """Positions of the rows with the best mean of their dataset; rows that are shown as equal are best together."""
    if column.better == "none":
        return set()
    found: set[int] = set()
    for means in _by_dataset(rows, column.key):
        best = max(means.values()) if column.better == "high" else min(means.values())
        least = 0.5 * 10 ** -min(3, column.format.digits)
        found |= {i for i, value in means.items() if abs(value - best) * column.format.factor < least}
    return found


def compared_to_best(runs: Sequence[RunData], rows: Sequence[Row]) -> list[Verdict]:
    """Each row against the best one of its dataset: by accuracy, or by loss if no row has an accuracy."""
    key, choose = ("accuracy", max) if any(row.known("accuracy") for row in rows) else ("loss", min)

    def by_seed(row: Row) -> dict[int, float]:
        pairs = zip(row.runs, row.values[key], strict=True)
        return {runs[i].seed: value for i, value in pairs if value is not None}

    results = [Verdict(False, None, len(row.runs)) for row in rows]
    for means in _by_dataset(rows, key):
        best = choose(means, key=means.__getitem__)
        reference = by_seed(rows[best])
        raw: dict[int, float] = {}
        for i in means:
            own = by_seed(rows[i])
            common = sorted(own.keys() & reference.keys())
            results[i] = Verdict(i == best, None, len(common))
            p = paired_t([own[seed] for seed in common], [reference[seed] for seed in common])
            if p is not None and i != best:
                raw[i] = p
        for i, p in holm(raw).items():
            results[i] = results[i]._replace(p=p)
    return results


def paired_t(one: Sequence[float], other: Sequence[float]) -> float | None:
    """The two-sided p of a paired t-test; None for fewer than two pairs.

    >>> round(paired_t([1.0, 2.0, 3.0], [1.1, 2.3, 3.2]) or 0, 4)
    0.0742
    >>> paired_t([1.0, 2.0], [1.0, 2.0]), paired_t([1.0], [2.0])
    (1.0, None)
    """
    differences = [a - b for a, b in zip(one, other, strict=True)]
    if len(differences) < 2:
        return None
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    if deviation <= 1e-12 * max(1.0, abs(mean)):  # the same difference at every seed
        return 1.0 if abs(mean) <= 1e-12 else 0.0
    from scipy.stats import ttest_rel

    return float(ttest_rel(one, other).pvalue)


def holm(raw: dict[int, float]) -> dict[int, float]:
    """Holm's correction (1979) of p values.

    >>> holm({0: 0.01, 1: 0.04, 2: 0.03})
    {0: 0.03, 2: 0.06, 1: 0.06}
    """
    corrected: dict[int, float] = {}
    highest = 0.0
    for rank, (key, p) in enumerate(sorted(raw.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, (len(raw) - rank) * p))
        corrected[key] = highest
    return corrected


# Settings that do not make a run a different experiment.
_NOT_SETTINGS = ("seed", "checkpoint_every", "data_dir", "device", "keep_pictures", "keep_models", "from_python")


def _settings(run: RunData) -> dict[str, str]:
    return {
        f"{table}.{key}": repr(value)
        for table, values in run.config.items()
        for key, value in values.items()
        if not (table == "run" and key in _NOT_SETTINGS)
    }


def _labels(runs: Sequence[tuple[str, RunData]]) -> list[str]:
    """The method of each row; where rows share method, data and situation, also the settings in which they differ."""
    labels = []
    for situation, run in runs:
        own, key = _settings(run), (situation, run.algorithm, run.dataset)
        alike = [_settings(other) for place, other in runs if (place, other.algorithm, other.dataset) == key]
        keys = sorted({key for other in alike for key in own if own[key] != other.get(key)})
        parts = [f"{key.rpartition('.')[2]}={own[key].strip(chr(39))}" for key in keys]
        more = f" ({', '.join(parts[:4])}{', …' if len(parts) > 4 else ''})" if parts else ""
        labels.append(f"{run.algorithm}{more}")
    return labels
