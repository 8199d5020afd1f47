"""What a suite shows: finished runs as rows beside published numbers, in result.json and table.md.

result.json, schema 1. Numbers are as the papers print them: accuracies and F1 in percent, ARI as it is.

    schema       1
    suite        "md_icfl/table4"; paper, title: as in the suite
    command      the command that makes it, without --out
    commit       of the source of the newest run, with "-dirty" if files were changed; null outside a git repository
    date         when the newest run began, ISO 8601
    machine      platform, processor, threads, gpu (null: none), torch, python; of the newest run
    seconds      sum over the runs
    scale        1, or the factor of --scale
    seeds        [0, 1, 2]: what the command asked for
    notes        sentences: where data, rounds or settings are not the paper's
    metrics      {"accuracy": {"label": "accuracy, %", "digits": 2, "better": "high"}}, in the order of the paper
    cells        one for each row and column:
        row, column   labels, as in the paper
        method        name of the method here; null: only published
        mode          "paper" or "ours"
        settings      {"algorithm.init": "paper", ...}: all that the suite sets
        published     {metric: number}; {} for rows of our own
        ours          {metric: {"mean", "std", "n", "values"}}; std is that of a sample, 0 for one seed. A metric that
                      a run does not have (ARI without true groups) is left out, so {} before the first run
        difference    {metric: ours - published}
        bytes         {"mean"}: sent in both directions by a run, or null
        rounds        of a run, or null
        seconds       {"mean"}: of a run, or null
        clusters      {"mean"}: clusters at the end, or null
        runs          ["r-0.5/ifca-s0", ...]: the finished runs that it is made of, inside the folder of the suite
    means        means over columns: row, column (the name of the mean), published, ours, difference
    missing      [{"row", "column", "seed"}]: runs that are not there; "part" and "problem" where they are known
    figures      ["accuracy-by-round.png"]: files beside this one

With parts, a cell is the mean over its parts, seed by seed, and a seed counts once all its parts are there; bytes and
seconds are sums over the parts.
"""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError, RunError, UnknownName
from coterie.reproduce.suite import Column, Part, Row, Spot, Suite
from coterie.runs.files import Files
from coterie.runs.metrics import METRICS, NUMBER, PERCENT, Format
from coterie.views.words import markdown_table, size_text

SCHEMA = 1
RESULT, TABLE = "result.json", "table.md"
Result = dict[str, Any]
Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Measure:
    """A number that a paper reports, and where a summary has it."""

    label: str
    place: tuple[str, ...]
    format: Format
    better: str = "high"

    @property
    def title(self) -> str:
        return f"{self.label}, %" if self.format.unit == "%" else self.label

    def read(self, summary: Any) -> float | None:
        """The number as papers print it; None if the run does not have it."""
        for key in self.place:
            summary = summary.get(key) if isinstance(summary, Mapping) else None
        return None if summary is None else self.format.factor * float(summary)


OTHERS = {  # numbers of a summary that are no metrics
    "unseen": Measure("accuracy of unseen clients", ("unseen", "accuracy", "micro"), PERCENT),
    "unseen_macro": Measure("accuracy of unseen clients, mean over clients", ("unseen", "accuracy", "macro"), PERCENT),
    "clusters": Measure("clusters", ("clusters",), NUMBER, "none"),
}


def measure(name: str) -> Measure:
    """The measure of a name: the key of a metric of a run, or one of OTHERS."""
    if name in OTHERS:
        return OTHERS[name]
    if name not in METRICS:
        raise UnknownName("metric", name, (*METRICS, *OTHERS))
    metric = METRICS[name]
    return Measure(metric.label, metric.place, metric.format, metric.better)


@dataclass(frozen=True)
class Found:
    """What is known about the runs of a suite: summaries and environments, and why some failed."""

    summaries: Mapping[str, Summary]  # by the place of the run
    environments: Mapping[str, Mapping[str, Any]]
    problems: Mapping[str, str]


def read_runs(root: Path, spots: Iterable[Spot], problems: Mapping[str, str] | None = None) -> Found:
    """The finished runs among these, from their folders."""
    summaries, environments = {}, {}
    for spot in spots:
        files = Files(root / spot.place)
        summary = files.read_object("summary.json")
        if summary is not None:
            summaries[spot.place] = summary
            environments[spot.place] = files.read_object("environment.json") or {}
    return Found(summaries, environments, problems or {})


def result_of(
    suite: Suite,
    cells: Sequence[tuple[Row, Column]],
    seeds: Sequence[int],
    found: Found,
    *,
    command: str,
    scale: float = 1.0,
    settings: Callable[[Row, Column], Mapping[str, Any]] = lambda row, column: {},
) -> Result:
    """The content of result.json: the finished runs of these cells beside the published numbers."""
    spots = suite.spots(cells, seeds)
    newest = max(found.environments.values(), key=lambda one: str(one.get("date")), default={})
    every = [_cell(suite, row, column, seeds, found, settings) for row, column in cells]
    return {
        "schema": SCHEMA,
        "suite": suite.name,
        "paper": suite.paper,
        "title": suite.title,
        "command": command,
        "commit": newest.get("commit"),
        "date": newest.get("date") or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {key: newest.get(key) for key in ("platform", "processor", "threads", "gpu", "torch", "python")},
        "seconds": sum(_seconds(summary) for summary in found.summaries.values()),
        "scale": scale,
        "seeds": list(seeds),
        "notes": list(_notes(suite, cells, seeds, found, scale)),
        "metrics": {
            name: {"label": one.title, "digits": one.format.digits, "better": one.better}
            for name, one in ((name, measure(name)) for name in suite.metrics)
        },
        "cells": every,
        "means": [_mean(suite, name, among, row, every) for name, among in suite.means.items() for row in suite.rows],
        "missing": [_missing(spot, found) for spot in spots if spot.place not in found.summaries],
        "figures": [],
    }


def _cell(
    suite: Suite,
    row: Row,
    column: Column,
    seeds: Sequence[int],
    found: Found,
    settings: Callable[[Row, Column], Mapping[str, Any]],
) -> Result:
    parts: Sequence[Part | None] = suite.parts or (None,)
    runs: list[list[Summary]] = []  # of a seed, by part
    used: list[str] = []
    for seed in seeds:
        places = [Spot(row, column, part, seed).place for part in parts]
        if row.method is not None and all(place in found.summaries for place in places):
            runs.append([found.summaries[place] for place in places])
            used += places
    ours = {name: _spread(values) for name in suite.metrics if (values := _values(measure(name), runs))}
    published = dict(row.published[column.name])
    return {
        "row": row.label,
        "column": column.name,
        "method": row.method,
        "mode": row.mode,
        "settings": {} if row.method is None else dict(settings(row, column)),
        "published": published,
        "ours": ours,
        "difference": _difference(ours, published),
        "bytes": _average([sum(_bytes(one) for one in mine) for mine in runs]),
        "rounds": runs[0][0].get("rounds") if runs else None,
        "seconds": _average([sum(_seconds(one) for one in mine) for mine in runs]),
        "clusters": _average([statistics.fmean(one.get("clusters") or 0 for one in mine) for mine in runs]),
        "runs": used,
    }


def _values(one: Measure, runs: Sequence[Sequence[Summary]]) -> list[float]:
    """A value for each seed; nothing if a run does not have it."""
    read = [[one.read(summary) for summary in mine] for mine in runs]
    if any(value is None for mine in read for value in mine):
        return []
    return [statistics.fmean(value for value in mine if value is not None) for mine in read]


def _spread(values: Sequence[float]) -> dict[str, Any]:
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "std": std, "n": len(values), "values": list(values)}


def _difference(ours: Mapping[str, Any], published: Mapping[str, float]) -> dict[str, float]:
    return {name: ours[name]["mean"] - published[name] for name in published if name in ours}


def _average(values: Sequence[float]) -> dict[str, float] | None:
    return {"mean": statistics.fmean(values)} if values else None


def _bytes(summary: Summary) -> float:
    sent = summary.get("bytes") or {}
    return float(sent.get("down") or 0) + float(sent.get("up") or 0)


def _seconds(summary: Summary) -> float:
    return float((summary.get("seconds") or {}).get("total") or 0.0)


def _mean(suite: Suite, name: str, among: Sequence[str], row: Row, cells: Sequence[Result]) -> Result:
    """The mean of a row over columns: of what every one of them has, over the seeds that all have."""
    mine = [cell for cell in cells if cell["row"] == row.label and cell["column"] in among]
    whole = mine if len(mine) == len(among) else []
    ours, published = {}, {}
    for metric in suite.metrics if whole else ():
        if all(metric in cell["published"] for cell in whole):
            published[metric] = statistics.fmean(cell["published"][metric] for cell in whole)
        counts = {cell["ours"][metric]["n"] if metric in cell["ours"] else 0 for cell in whole}
        if len(counts) == 1 and 0 not in counts:
            by_seed = zip(*(cell["ours"][metric]["values"] for cell in whole), strict=True)
            ours[metric] = _spread([statistics.fmean(values) for values in by_seed])
    difference = _difference(ours, published)
    return {"row": row.label, "column": name, "published": published, "ours": ours, "difference": difference}


def _missing(spot: Spot, found: Found) -> Result:
    where = {"row": spot.row.label, "column": spot.column.name, "seed": spot.seed}
    where |= {} if spot.part is None else {"part": spot.part.name}
    return where | ({"problem": found.problems[spot.place]} if spot.place in found.problems else {})


def _notes(
    suite: Suite, cells: Sequence[tuple[Row, Column]], seeds: Sequence[int], found: Found, scale: float
) -> Iterator[str]:
    if scale != 1:
        yield f"A quick look, not the experiment: {', '.join(suite.scale)} times {scale:g}."
    yield from suite.notes
    for column in dict.fromkeys(column.name for _, column in cells):
        yield from (f"{column}: {note}" for note in suite.column[column].notes)
    for row in dict.fromkeys(row.label for row, _ in cells):
        yield from (f"{row}: {note}" for one in suite.rows if one.label == row for note in one.notes)
    if set(seeds) != set(suite.seeds):
        yield f"Seeds {', '.join(map(str, seeds))}, not {', '.join(map(str, suite.seeds))} as the suite has them."
    machines = {(one.get("platform"), one.get("gpu"), one.get("torch")) for one in found.environments.values()}
    if len(machines) > 1:
        yield f"The runs were made on {len(machines)} machines or versions; the newest one is named."


# ---- reading and writing ----


def write(folder: Path, result: Result) -> None:
    """Write result.json and table.md."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULT).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (folder / TABLE).write_text(page(result), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The result cannot be written to {folder}: {error.strerror}.") from error


def read_result(folder: Path) -> Result | None:
    """The result in a folder; None if there is none."""
    found = Files(folder).read_object(RESULT)
    if found is not None and found.get("schema") != SCHEMA:
        raise RunError(f"{folder / RESULT} has schema {found.get('schema')}; this version reads {SCHEMA}.")
    return found


def draw(suite: Suite, result: Result, runs: Path, folder: Path) -> list[Path]:
    """Draw the figures of a suite into a folder: each function is called with (result, runs, folder).

    `result` is the content of result.json, `runs` the folder with the runs (`Spot.place` says where). A function
    returns the files that it wrote.
    """
    found: list[Path] = []
    for name in suite.figures:
        module, _, function = name.partition(":")
        try:
            make = getattr(import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"The figure '{name}' of {suite.name} cannot be loaded: {error}.") from error
        found += make(result, runs, folder)
    return found


# ---- Markdown ----


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
        """The columns that have a number."""
        filled = {column for (_, column), text in self.texts.items() if text != "-"}
        return list(dict.fromkeys(column for _, column in self.texts if column in filled))


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
    count = max((one["n"] for cell in result["cells"] for one in cell["ours"].values()), default=0)
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
