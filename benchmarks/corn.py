"""The benchmark of CORNFLQS (MNIST, 100 clients, 3 shifts, 3 skews of sizes) beside its published numbers.

    python benchmarks/corn.py --methods fesem,ifca [--seeds 42-46] [--device cuda] [--jobs 4] [--name corn]

Accuracy is the mean over clients of the last model on the test samples of the group, in percent; mean and standard
deviation over seeds. Each run is a JSON file in OUT/NAME: the same call continues what was stopped.
"""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

from pool import Row
from yardstick import PUBLISHED, Cell, best, finish, grouped, of, parser_of, run_cells

SHIFTS, SKEWS = ("rotation", "swap", "erosion"), ("none", "within", "between")
COLUMNS = ("cell", "method", "seeds", "accuracy", "sd", "best published", "of", "difference", "same method published")
COLUMNS += ("ari", "ari of best", "clusters found")


def table(rows: list[Row], published: dict[str, Any] = PUBLISHED["corn"]) -> list[Row]:
    """A line for each cell and method, and the mean over each skew and over all if a method has all its cells."""
    by_cell = grouped(rows, lambda row: (f"{row['shift']}-{row['degree']}", row["method"]))
    lines = [_line(cell, method, mine, {cell: mine}, published) for (cell, method), mine in sorted(by_cell.items())]
    for name, skews in [(f"mean, {skew}", [skew]) for skew in SKEWS] + [("mean, all", list(SKEWS))]:
        cells = [f"{shift}-{skew}" for skew in skews for shift in SHIFTS]
        for method in sorted({row["method"] for row in rows}):
            parts = {cell: by_cell[cell, method] for cell in cells if (cell, method) in by_cell}
            if len(parts) == len(cells):
                lines.append(_line(name, method, [row for mine in parts.values() for row in mine], parts, published))
    return lines


def _line(name: str, method: str, rows: list[Row], parts: dict[str, list[Row]], published: dict[str, Any]) -> Row:
    accuracy = mean(of(mine, "accuracy") for mine in parts.values())
    by_seed = [mean(row["accuracy"] for row in mine) for mine in grouped(rows, lambda row: row["seed"]).values()]
    theirs = {m: mean(published[cell][m][0] for cell in parts) for m in published[next(iter(parts))]}
    champion, top = best(theirs)
    return {
        "cell": name,
        "method": method,
        "seeds": len(by_seed),
        "accuracy": round(accuracy, 2),
        "sd": round(stdev(by_seed), 2) if len(by_seed) > 1 else None,
        "best published": round(top, 2),
        "of": champion,
        "difference": round(accuracy - top, 2),
        "same method published": round(theirs[method], 2) if method in theirs else None,
        "ari": round(of(rows, "ari"), 2),
        "ari of best": round(mean(published[cell][champion][2] for cell in parts), 2),
        "clusters found": round(of(rows, "found"), 1),
    }


def main() -> None:
    parser = parser_of(__doc__, "corn")
    parser.add_argument("--shifts", default=",".join(SHIFTS))
    parser.add_argument("--skews", default=",".join(SKEWS))
    options = parser.parse_args()
    skews, shifts = options.skews.split(","), options.shifts.split(",")
    rows = run_cells([Cell("corn-mnist", shift, skew) for skew in skews for shift in shifts], "skew", options)
    finish(table(rows), COLUMNS, rows, options)


if __name__ == "__main__":
    main()
