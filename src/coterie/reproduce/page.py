"""A result as tables of text, and as a page in Markdown; `outcome.py` describes its content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.views.words import markdown_table, size_text

Result = dict[str, Any]


def text_of(cell: Result, metric: str, digits: int) -> str:
    """A cell in words: "97.28 → 97.91 ±0.08 (+0.63)": published, ours, difference.

    >>> text_of({"published": {"ari": 0.9}, "ours": {}, "difference": {}}, "ari", 2)
    '0.90 → -'
    """
    published, ours = cell["published"].get(metric), cell["ours"].get(metric)
    if published is None and ours is None:
        return "-"
    mine = "-" if ours is None else f"{ours['mean']:.{digits}f}" + (f" ±{ours['std']:.{digits}f}" * (ours["n"] > 1))
    if published is None:
        return mine
    more = f" ({cell['difference'][metric]:+.{digits}f})" if metric in cell["difference"] else ""
    return f"{published:.{digits}f} → {mine}{more}"


@dataclass(frozen=True)
class Table:
    """Texts of rows and columns under a title."""

    title: str
    texts: Mapping[tuple[str, str], str]  # row, column

    @property
    def rows(self) -> list[str]:
        """The rows that have a number."""
        return list(dict.fromkeys(row for (row, _), text in self.texts.items() if text != "-"))

    @property
    def columns(self) -> list[str]:
        """The columns that have a number, in the order of the row that has most of them."""
        filled = {column for (_, column), text in self.texts.items() if text != "-"}
        by_row: dict[str, list[str]] = {}
        for row, column in self.texts:
            by_row.setdefault(row, []).append(column)
        longest_first = sorted(by_row.values(), key=len, reverse=True)
        return [one for one in dict.fromkeys(column for row in longest_first for column in row) if one in filled]


def tables_of(result: Result) -> list[Table]:
    """A table for each metric; if the result has a single column, one table with a column for each metric."""
    cells, metrics = result["cells"] + result["means"], result["metrics"]
    found = []
    for name, metric in metrics.items():
        texts = {(cell["row"], cell["column"]): text_of(cell, name, metric["digits"]) for cell in cells}
        found.append(Table(metric["label"], texts))
    columns = list(dict.fromkeys(column for table in found for column in table.columns))
    if len(columns) == 1:
        rows = dict.fromkeys(cell["row"] for cell in cells)
        one = {(row, table.title): table.texts.get((row, columns[0]), "-") for row in rows for table in found}
        found = [Table(columns[0], one)]
    return [table for table in found if table.rows]


def page(result: Result) -> str:
    """The result as a page in Markdown."""
    machine = result["machine"]
    seeds = [{place.rpartition("-s")[2] for place in cell["runs"]} for cell in result["cells"]]
    count = max(map(len, seeds), default=0)
    parts = [
        f"# {result['paper']}. {result['title']}",
        "Published → ours, mean ± standard deviation over the seeds (difference). Rows without an arrow are our own.",
    ]
    if result["notes"]:
        parts.append("\n".join(f"- {note}" for note in result["notes"]))
    for table in tables_of(result):
        lines = [[row, *(table.texts.get((row, column), "-") for column in table.columns)] for row in table.rows]
        parts += [f"## {table.title}", markdown_table([["", *table.columns], *lines])]
    if result["figures"]:
        shown = [f"![{Path(name).stem.replace('-', ' ')}]({name})" for name in result["figures"]]
        parts += ["## Figures", *shown]
    costs = [cell for cell in result["cells"] if cell["bytes"] is not None]
    if costs:
        lines = [
            [
                cell["row"],
                cell["column"],
                f"{cell['method']}, {cell['mode']}",
                str(cell["rounds"]),
                size_text(cell["bytes"]["mean"]),
                f"{cell['seconds']['mean']:.1f}",
            ]
            for cell in costs
        ]
        heads = ["row", "column", "method, mode", "rounds", "sent per run", "seconds per run"]
        parts += ["## Cost", markdown_table([heads, *lines])]
    facts = [
        f"Command: `{result['command']}`",
        f"Seeds: {', '.join(map(str, result['seeds']))}; at most {count} of them finished in a cell",
        f"Missing runs: {len(result['missing'])}",
        f"Machine: {machine['platform']}, {machine['gpu'] or 'no GPU'}, torch {machine['torch']}",
        f"Date: {result['date']}; time of all runs: {result['seconds']:.0f} s; commit: {result['commit']}",
    ]
    parts += ["## Made by", "\n".join(f"- {fact}" for fact in facts)]
    return "\n\n".join(parts) + "\n"
