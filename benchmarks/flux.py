"""The benchmark of FLUX (MNIST or CIFAR-10, 10 clients, 4 shifts, 8 levels) beside its published numbers.

    python benchmarks/flux.py --methods fesem,ifca [--data mnist,cifar10] [--levels 1-8] [--seeds 42-46]
        [--device cuda] [--jobs 4] [--name flux]

Accuracy is the mean over the 10 clients of the last model on their own test samples, in percent; the published numbers
are means over the four shifts, so a level without all of them is not compared. The standard deviation is over seeds
(of the population, as published), then the mean over shifts. Each run is a JSON file in OUT/NAME: the same call
continues what was stopped.
"""

from __future__ import annotations

from statistics import mean, pstdev
from typing import Any

from pool import Row
from yardstick import PUBLISHED, Cell, best, finish, grouped, numbers, of, parser_of, run_cells

SHIFTS, LEVELS = ("px", "py", "pyx", "pxy"), tuple(range(1, 9))
COLUMNS = ("data", "level", "method", "runs", "accuracy", "sd", *SHIFTS, "best published", "of", "difference")
COLUMNS += ("same method published", "ari", "clusters found", "clusters true")


def table(rows: list[Row], published: dict[str, Any] = PUBLISHED["flux"]) -> list[Row]:
    """A line for each level and method, and the mean over the levels if a method has all of them."""
    lines = []
    for (dataset, method), mine in sorted(grouped(rows, lambda row: (row["dataset"], row["method"])).items()):
        data = dataset.removeprefix("flux-")
        theirs = {name: [level[0] for level in values] for name, values in published[data].items()}
        levels = grouped(mine, lambda row: row["degree"])
        lines += [_line(data, level, method, levels[level], theirs, [level]) for level in sorted(levels)]
        if set(levels) == set(LEVELS):
            lines.append(_line(data, "mean", method, mine, theirs, LEVELS))
    return lines


def _line(data: str, level: Any, method: str, rows: list[Row], theirs: dict[str, Any], levels: Any) -> Row:
    cells = grouped(rows, lambda row: (row["shift"], row["degree"]))
    shifts = grouped(rows, lambda row: row["shift"])
    is_whole = len(cells) == len(SHIFTS) * len(levels)
    accuracy = mean(of(mine, "accuracy") for mine in cells.values())
    means = {name: mean(values[one - 1] for one in levels) for name, values in theirs.items()}
    champion, top = best(means)
    return {
        "data": data,
        "level": level,
        "method": method,
        "runs": len(rows),
        "accuracy": round(accuracy, 2) if is_whole else None,
        "sd": round(mean(pstdev(row["accuracy"] for row in mine) for mine in cells.values()), 2),
        **{shift: round(of(shifts[shift], "accuracy"), 2) if shift in shifts else None for shift in SHIFTS},
        "best published": round(top, 2),
        "of": champion,
        "difference": round(accuracy - top, 2) if is_whole else None,
        "same method published": round(means[method], 2) if method in means else None,
        "ari": round(of(rows, "ari"), 2),
        "clusters found": round(of(rows, "found"), 1),
        "clusters true": round(of(rows, "groups"), 1),
    }


def main() -> None:
    parser = parser_of(__doc__, "flux")
    parser.add_argument("--data", default="mnist,cifar10")
    parser.add_argument("--shifts", default=",".join(SHIFTS))
    parser.add_argument("--levels", default="1-8", help="a range (1-8) or a list (1,4,8)")
    options = parser.parse_args()
    levels, shifts = numbers(options.levels), options.shifts.split(",")
    cells = [Cell(f"flux-{d}", shift, n) for d in options.data.split(",") for n in levels for shift in shifts]
    rows = run_cells(cells, "level", options)
    finish(table(rows), COLUMNS, rows, options)


if __name__ == "__main__":
    main()
