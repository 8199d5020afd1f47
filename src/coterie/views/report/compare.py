"""Several runs: the papers' kind of table, with mean and standard deviation over seeds, and a paired test.

Runs that differ in nothing but their seed are one row. Within a dataset, each row is tested against the one with the
best mean accuracy: a two-sided paired t-test over the seeds that both have, with Holm's correction for the number of
rows tested. Wilcoxon's test could not do it: with n seeds its smallest p is 2 / 2^n, with three seeds 0.25. With few
seeds the t-test, too, tells only large and steady differences from chance; n is shown beside p.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coterie.runs.checks import finite
from coterie.runs.metrics import metrics
from coterie.runs.reading import RunData


@dataclass(frozen=True)
class Column:
    """One number of a run, and how it is shown."""

    key: str
    title: str
    factor: float = 1.0
    digits: int = 2
    unit: str = ""
    better: str = "high"  # or "low"; "none": neither is better


def columns() -> list[Column]:
    """The columns of the table: metrics, then costs."""
    scores = [
        (m.key, m.label, m.format.factor, min(3, m.format.digits), m.format.unit, m.better) for m in metrics("compare")
    ]
    return [
        *(Column(*score) for score in scores),
        Column("clusters", "K", 1, 0, "", "none"),
        Column("megabytes", "MB sent", 1, 1, "MB", "low"),
        Column("seconds", "seconds", 1, 1, "s", "low"),
    ]


@dataclass(frozen=True)
class Row:
    """Runs that differ only in their seed."""

    label: str
    dataset: str
    runs: list[int]  # positions among the runs
    values: dict[str, list[float | None]]  # column -> one value for each run

    def mean(self, key: str) -> float | None:
        """Over the runs that have the number; None if none has."""
        told = [value for value in self.values[key] if value is not None]
        return statistics.fmean(told) if told else None

    def deviation(self, key: str) -> float | None:
        """The standard deviation (n - 1); None for a single run."""
        told = [value for value in self.values[key] if value is not None]
        return statistics.stdev(told) if len(told) > 1 else None


@dataclass(frozen=True)
class Verdict:
    """How a row compares to the best one of its dataset."""

    best: bool
    p: float | None  # Holm-corrected; None: the best itself, or too few common seeds
    seeds: int


def value_of(run: RunData, key: str) -> float | None:
    """A number of a run: of its summary, or as far as it is."""
    summary = run.summary or {}

    def told(*keys: str) -> float | None:
        found: Any = summary
        for part in keys:
            found = found.get(part) if isinstance(found, dict) else None
        return finite(found)

    if key == "clusters":
        return told("clusters") or (float(len(run.sizes[-1])) if run.sizes else None)
    if key == "megabytes":
        parts = [run.last(name) for name in ("down", "up", "start_bytes", "repair_bytes")]
        return None if parts[0] is None else sum(part or 0.0 for part in parts) / 1e6
    if key == "seconds":
        total = told("seconds", "total")
        spent = [run.curves[f"{part}_seconds"] for part in ("train", "server", "evaluate") if run.curves]
        return total if total is not None else float(sum(values[values == values].sum() for values in spent)) or None
    return run.last(key)


def rows_of(runs: Sequence[RunData]) -> list[Row]:
    """The rows of the table, in the order in which they first appear."""
    found: dict[str, list[int]] = {}
    for position, run in enumerate(runs):
        found.setdefault(_settings_key(run), []).append(position)
    names = _labels([[runs[i] for i in members] for members in found.values()])
    return [
        Row(
            label=label,
            dataset=runs[members[0]].dataset,
            runs=members,
            values={column.key: [value_of(runs[i], column.key) for i in members] for column in columns()},
        )
        for label, members in zip(names, found.values(), strict=True)
    ]


def best_of(rows: Sequence[Row], column: Column) -> set[int]:
    """Positions of the rows with the best mean of their dataset; none where there is only one to choose from."""
    found: set[int] = set()
    for dataset in dict.fromkeys(row.dataset for row in rows):
        means = {i: row.mean(column.key) for i, row in enumerate(rows) if row.dataset == dataset}
        told = {i: value for i, value in means.items() if value is not None}
        if len(told) < 2 or column.better == "none":
            continue
        best = max(told.values()) if column.better == "high" else min(told.values())
        # What is shown as equal is best together.
        found |= {i for i, value in told.items() if abs(value - best) * column.factor < 0.5 * 10**-column.digits}
    return found


def compared_to_best(runs: Sequence[RunData], rows: Sequence[Row], key: str = "accuracy") -> list[Verdict]:
    """Each row against the best one of its dataset."""
    results: list[Verdict] = [Verdict(False, None, len(row.runs)) for row in rows]
    for dataset in dict.fromkeys(row.dataset for row in rows):
        mine = [i for i, row in enumerate(rows) if row.dataset == dataset and row.mean(key) is not None]
        if len(mine) < 2:
            continue
        best = max(mine, key=lambda i: rows[i].mean(key) or 0.0)
        raw: dict[int, float] = {}
        for i in mine:
            one, other = _paired(runs, rows[i], rows[best], key)
            p = None if i == best else paired_t(one, other)
            results[i] = Verdict(i == best, p, len(one))
            if p is not None:
                raw[i] = p
        for i, p in holm(raw).items():
            results[i] = Verdict(False, p, results[i].seeds)
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
    from scipy.stats import t

    statistic = mean / (deviation / math.sqrt(len(differences)))
    return float(2 * t.sf(abs(statistic), len(differences) - 1))


def holm(raw: dict[int, float]) -> dict[int, float]:
    """Holm's correction (1979) of several p values.

    >>> holm({0: 0.01, 1: 0.04, 2: 0.03})
    {0: 0.03, 2: 0.06, 1: 0.06}
    """
    corrected: dict[int, float] = {}
    highest = 0.0
    for rank, (key, p) in enumerate(sorted(raw.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, (len(raw) - rank) * p))
        corrected[key] = highest
    return corrected


def _paired(runs: Sequence[RunData], one: Row, other: Row, key: str) -> tuple[list[float], list[float]]:
    """Values of both rows at the seeds that both have."""

    def by_seed(row: Row) -> dict[int, float]:
        pairs = zip(row.runs, row.values[key], strict=True)
        return {runs[i].seed: value for i, value in pairs if value is not None}

    first, second = by_seed(one), by_seed(other)
    common = sorted(first.keys() & second.keys())
    return [first[seed] for seed in common], [second[seed] for seed in common]


# What does not make a run another experiment.
_NOT_SETTINGS = ("seed", "checkpoint_every", "data_dir", "device", "keep_pictures", "from_python")


def _flat_settings(run: RunData) -> dict[str, str]:
    return {
        f"{table}.{key}": repr(value)
        for table, values in run.config.items()
        for key, value in values.items()
        if not (table == "run" and key in _NOT_SETTINGS)
    }


def _settings_key(run: RunData) -> str:
    return repr(sorted(_flat_settings(run).items()))


def _labels(groups: Sequence[Sequence[RunData]]) -> list[str]:
    """The method of each row; where several rows have the same method and data, what sets them apart."""
    settings = [_flat_settings(members[0]) for members in groups]
    names = [(members[0].algorithm, members[0].dataset) for members in groups]
    labels = []
    for own, name in zip(settings, names, strict=True):
        alike = [other for other, its in zip(settings, names, strict=True) if its == name]
        keys = sorted({key for other in alike for key in (*own, *other) if own.get(key) != other.get(key)})
        told = [f"{key.rpartition('.')[2]}={own[key].strip(chr(39))}" for key in keys if key in own]
        more = f" ({', '.join(told[:4])}{', …' if len(told) > 4 else ''})" if told else ""
        labels.append(f"{name[0]}{more}")
    return labels
