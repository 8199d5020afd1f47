"""A comparison over situations as a heat map: rows are situations, columns are methods.

The colour of a score says how far a method is behind the best one in that situation, because situations differ in
difficulty: 85 % may be the best there is. The regret is that distance itself. The agreement with the true groups is
coloured by its value. Without classes, loss and R2 take the place of accuracy, and a lower loss is better.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coterie.runs.metrics import METRICS
from coterie.views.report.compare import Row

BEHIND = 0.15  # a score this far behind the best has no colour; a loss, by this share of the lowest
MAPS = ("accuracy", "bottom5", "loss", "r2", "ari")  # keys of metrics; the first that is known is shown at the start
REGRET = "regret"
_ABSOLUTE = ("ari",)  # coloured by the value itself


def heat_map(rows: Sequence[Row], situations: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The data of the heat map; None if the rows are not of several situations."""
    names = [str(item["name"]) for item in situations if any(row.situation == item["name"] for row in rows)]
    if len(names) < 2:
        return None
    methods = list(dict.fromkeys(row.label for row in rows if row.situation in names))
    at = {(row.situation, row.label): row for row in rows}
    grid = [[at.get((name, method)) for method in methods] for name in names]
    about = {str(item["name"]): str(item.get("about", "")) for item in situations}
    means = {key: [[None if row is None else row.mean(key) for row in line] for line in grid] for key in MAPS}
    has_accuracy = any(value is not None for line in means["accuracy"] for value in line)
    if has_accuracy:
        means = {key: lines for key, lines in means.items() if key not in ("loss", "r2")}
    main = "accuracy" if has_accuracy else "loss"
    behind = [regrets(line, main) for line in means[main]]
    maps = [
        {
            "key": key,
            "title": METRICS[key].label,
            "about": METRICS[key].about,
            "unit": METRICS[key].format.unit,
            "digits": METRICS[key].format.digits,
            "relative": key not in _ABSOLUTE,
            "shades": [shades(line, key) for line in lines],
        }
        for key, lines in means.items()
        if any(value is not None for line in lines for value in line)
    ]
    if any(value is not None for line in behind for value in line):
        about_regret = f"distance to the best {METRICS[main].label} of the situation"
        maps.insert(1, {**maps[0], "key": REGRET, "title": REGRET, "about": about_regret})
    return {
        "names": names,
        "about": [about[name] for name in names],
        "methods": methods,
        "cells": [
            [
                None if row is None else _cell(row, means) | {REGRET: [value, None]}
                for row, value in zip(*pair, strict=True)
            ]
            for pair in zip(grid, behind, strict=True)
        ],
        "worst": [None if None in column else max(column) for column in zip(*behind, strict=True)],
        "maps": maps,
        "behind": BEHIND if has_accuracy else None,  # None: losses of different situations have no common scale
    }


def regrets(values: Sequence[float | None], key: str) -> list[float | None]:
    """How far each method is behind the best one in a situation.

    >>> regrets([0.9, 0.84, None], "accuracy"), regrets([0.5, 0.25], "loss")
    ([0.0, 0.06, None], [0.25, 0.0])
    """
    best = _best([value for value in values if value is not None], key)
    return [None if value is None else round(abs(best - value), 5) for value in values]


def _best(values: Sequence[float], key: str) -> float:
    return (min if METRICS[key].better == "low" else max)(values, default=0.0)


def shades(values: Sequence[float | None], key: str) -> list[float | None]:
    """The colours of the methods in one situation, from 0 (none) to 1 (full).

    >>> shades([0.9, 0.84, 0.5, None], "accuracy")
    [1.0, 0.6, 0.0, None]
    >>> shades([0.3, -0.1], "ari")
    [0.3, 0.0]
    >>> shades([2.0, 2.03, 3.0], "loss")
    [1.0, 0.9, 0.0]
    """
    best = _best([value for value in values if value is not None], key)
    far = BEHIND * best if METRICS[key].better == "low" else BEHIND
    if key in _ABSOLUTE:
        return [None if value is None else round(min(1.0, max(0.0, value)), 4) for value in values]
    apart = [None if value is None else abs(best - value) for value in values]
    return [None if gap is None else round(max(0.0, 1 - gap / far) if far else float(not gap), 4) for gap in apart]


def _cell(row: Row, keys: Iterable[str]) -> dict[str, Any]:
    """Mean and standard deviation of what the map and its notes show."""

    def pair(key: str) -> list[float | None]:
        return [None if value is None else round(value, 5) for value in (row.mean(key), row.deviation(key))]

    return {"seeds": len(row.runs), "megabytes": pair("megabytes")[0], **{key: pair(key) for key in keys}}
