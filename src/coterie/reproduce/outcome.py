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
        difference    {metric: ours - published}; nothing if data or network are a stand-in for the paper's
        bytes         {"mean"}: sent in both directions by a run, or null
        rounds        of a run, or null
        seconds       {"mean"}: of a run, or null
        clusters      {"mean"}: clusters at the end, or null
        runs          ["r-0.5/ifca-s0", ...]: the finished runs that it is made of, inside the folder of the suite, in
                      the order of the values
    means        means over columns: row, column (the name of the mean), published, ours, difference
    missing      [{"row", "column", "seed"}]: runs that are not there; "part" and "problem" where they are known
    figures      ["accuracy-by-round.png"]: files beside this one

With parts, a cell is the mean over its parts, seed by seed, and a seed counts once all its parts are there; bytes and
seconds are sums over the parts.
"""

from __future__ import annotations

import datetime
import json
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from coterie.errors import ConfigError, RunError, UnknownName
from coterie.reproduce.page import Result, page
from coterie.reproduce.suite import Column, Part, Row, Spot, Suite
from coterie.runs.files import Files
from coterie.runs.metrics import METRICS, NUMBER, PERCENT, Format

SCHEMA = 1
RESULT, TABLE = "result.json", "table.md"
Summary = Mapping[str, Any]
Draw = TypeVar("Draw", bound=Callable[..., list[Path]])


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
class Record:
    """What a cell takes from one seed: the runs of all parts."""

    places: tuple[str, ...]
    values: Mapping[str, float]  # by metric; without those that a run does not have
    bytes: float
    seconds: float
    clusters: float
    rounds: int | None


@dataclass(frozen=True)
class Written:
    """What a written result has: its cells and seeds, records of them, where they were made, and its figures."""

    cells: Collection[tuple[str, str]] = ()  # row, column
    seeds: Sequence[int] = ()
    records: Mapping[tuple[str, str, int], Record] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    figures: Sequence[str] = ()

    @property
    def places(self) -> set[str]:
        """The runs that it is made of."""
        return {place for record in self.records.values() for place in record.places}

    def extended(
        self, suite: Suite, cells: Sequence[tuple[Row, Column]], seeds: Sequence[int]
    ) -> tuple[list[tuple[Row, Column]], list[int]]:
        """These cells and seeds with those that were written before, in the order of the suite."""
        every = [one for one in suite.chosen() if one in cells or (one[0].label, one[1].name) in self.cells]
        known = dict.fromkeys([*suite.seeds, *self.seeds, *seeds])
        return every, [seed for seed in known if seed in self.seeds or seed in seeds]


@dataclass(frozen=True)
class Found:
    """What is known about the runs of a suite: summaries and environments, why some failed, and what was written."""

    summaries: Mapping[str, Summary]  # by the place of the run
    environments: Mapping[str, Mapping[str, Any]]
    problems: Mapping[str, str]
    written: Written = Written()  # counts where the run itself is not here


Settings = Callable[[Row, Column], Mapping[str, Any]]


def read_runs(
    root: Path, spots: Iterable[Spot], problems: Mapping[str, str] | None = None, written: Written | None = None
) -> Found:
    """The finished runs among these, from their folders."""
    summaries, environments = {}, {}
    for spot in spots:
        files = Files(root / spot.place)
        summary = files.read_object("summary.json")
        if summary is not None:
            summaries[spot.place] = summary
            environments[spot.place] = files.read_object("environment.json") or {}
    return Found(summaries, environments, problems or {}, written or Written())


def read_written(folder: Path, suite: Suite, settings: Settings) -> Written:
    """What the result in a folder has of this suite; cells with other settings do not count."""
    result = read_result(folder)
    if result is None:
        return Written()
    cells = {(row.label, column.name): (row, column) for row, column in suite.chosen() if row.method is not None}
    records = {}
    try:
        for cell in result["cells"]:
            key = cell["row"], cell["column"]
            if key in cells and cell["settings"] == json.loads(json.dumps(dict(settings(*cells[key])))):
                for record in _records_of(cell, max(1, len(suite.parts))):
                    records[*key, int(record.places[0].rpartition("-s")[2])] = record
        machine = {"date": result["date"], "commit": result["commit"], **result["machine"]}
        there = {(cell["row"], cell["column"]) for cell in result["cells"]}
        seeds = [int(seed) for seed in result["seeds"]]
        return Written(there, seeds, records, machine, result["notes"], result["figures"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise RunError(f"{folder / RESULT} cannot be continued: {error!r}.") from error


def _records_of(cell: Result, parts: int) -> Iterator[Record]:
    """The records of a written cell; bytes, seconds and clusters are known as means only."""
    runs = cell["runs"]
    for number, begin in enumerate(range(0, len(runs), parts)):
        yield Record(
            tuple(runs[begin : begin + parts]),
            {name: float(one["values"][number]) for name, one in cell["ours"].items()},
            cell["bytes"]["mean"],
            cell["seconds"]["mean"],
            cell["clusters"]["mean"],
            cell["rounds"],
        )


def result_of(
    suite: Suite,
    cells: Sequence[tuple[Row, Column]],
    seeds: Sequence[int],
    found: Found,
    *,
    command: str,
    scale: float = 1.0,
    settings: Settings = lambda row, column: {},
) -> Result:
    """The content of result.json: the finished runs of these cells beside the published numbers."""
    spots = suite.spots(cells, seeds)
    records = {(row.label, column.name): list(_records(suite, row, column, seeds, found)) for row, column in cells}
    used = {place for mine in records.values() for record in mine for place in record.places}
    there = list(found.environments.values())
    there += [found.written.machine] if used - found.summaries.keys() else []
    newest = max(there, key=lambda one: str(one.get("date")), default={})
    every = [_cell(suite, row, column, records[row.label, column.name], settings) for row, column in cells]
    return {
        "schema": SCHEMA,
        "suite": suite.name,
        "paper": suite.paper,
        "title": suite.title,
        "command": command,
        "commit": newest.get("commit"),
        "date": newest.get("date") or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {key: newest.get(key) for key in ("platform", "processor", "threads", "gpu", "torch", "python")},
        "seconds": sum(record.seconds for mine in records.values() for record in mine),
        "scale": scale,
        "seeds": list(seeds),
        "notes": [*_notes(suite, cells, seeds, scale), *_machines(there, found.written)],
        "metrics": {
            name: {"label": one.title, "digits": one.format.digits, "better": one.better}
            for name, one in ((name, measure(name)) for name in suite.metrics)
        },
        "cells": every,
        "means": [_mean(suite, name, among, row, every) for name, among in suite.means.items() for row in suite.rows],
        "missing": [_missing(spot, found) for spot in spots if spot.place not in used | found.summaries.keys()],
        "figures": list(found.written.figures),
    }


def _records(suite: Suite, row: Row, column: Column, seeds: Sequence[int], found: Found) -> Iterator[Record]:
    """A record for each seed whose runs are all here, or else in what was written."""
    parts: Sequence[Part | None] = suite.parts or (None,)
    for seed in seeds:
        places = tuple(Spot(row, column, part, seed).place for part in parts)
        if row.method is not None and all(place in found.summaries for place in places):
            yield _record(suite, places, [found.summaries[place] for place in places])
        elif (row.label, column.name, seed) in found.written.records:
            yield found.written.records[row.label, column.name, seed]


def _record(suite: Suite, places: tuple[str, ...], runs: Sequence[Summary]) -> Record:
    values = {}
    for name in suite.metrics:
        read = [value for run in runs if (value := measure(name).read(run)) is not None]
        if len(read) == len(runs):
            values[name] = statistics.fmean(read)
    return Record(
        places,
        values,
        bytes=sum(_bytes(run) for run in runs),
        seconds=sum(_seconds(run) for run in runs),
        clusters=statistics.fmean(run.get("clusters") or 0 for run in runs),
        rounds=runs[0].get("rounds"),
    )


def _cell(suite: Suite, row: Row, column: Column, records: Sequence[Record], settings: Settings) -> Result:
    ours = {
        name: _spread([record.values[name] for record in records])
        for name in suite.metrics
        if records and all(name in record.values for record in records)
    }
    published = dict(row.published[column.name])
    return {
        "row": row.label,
        "column": column.name,
        "method": row.method,
        "mode": row.mode,
        "settings": {} if row.method is None else dict(settings(row, column)),
        "published": published,
        "ours": ours,
        "difference": _difference(suite, ours, published),
        "bytes": _average([record.bytes for record in records]),
        "rounds": records[0].rounds if records else None,
        "seconds": _average([record.seconds for record in records]),
        "clusters": _average([record.clusters for record in records]),
        "runs": [place for record in records for place in record.places],
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "std": std, "n": len(values), "values": list(values)}


def _difference(suite: Suite, ours: Mapping[str, Any], published: Mapping[str, float]) -> dict[str, float]:
    """Nothing for a stand-in: its data is easier or harder than the paper's."""
    return {} if suite.stand_in else {name: ours[name]["mean"] - published[name] for name in published if name in ours}


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
        if all(metric in cell["ours"] for cell in whole):
            by_cell = [dict(zip(_seeds(cell), cell["ours"][metric]["values"], strict=True)) for cell in whole]
            shared = [seed for seed in by_cell[0] if all(seed in values for values in by_cell)]
            if shared:
                ours[metric] = _spread([statistics.fmean(values[seed] for values in by_cell) for seed in shared])
    difference = _difference(suite, ours, published)
    return {"row": row.label, "column": name, "published": published, "ours": ours, "difference": difference}


def _seeds(cell: Result) -> list[int]:
    """The seeds of the values of a cell, in their order."""
    return list(dict.fromkeys(int(place.rpartition("-s")[2]) for place in cell["runs"]))


def _missing(spot: Spot, found: Found) -> Result:
    where = {"row": spot.row.label, "column": spot.column.name, "seed": spot.seed}
    where |= {} if spot.part is None else {"part": spot.part.name}
    return where | ({"problem": found.problems[spot.place]} if spot.place in found.problems else {})


def _notes(suite: Suite, cells: Sequence[tuple[Row, Column]], seeds: Sequence[int], scale: float) -> Iterator[str]:
    if scale != 1:
        yield f"A quick look, not the experiment: {', '.join(suite.scale)} times {scale:g}."
    yield from suite.notes
    for column in dict.fromkeys(column.name for _, column in cells):
        yield from (f"{column}: {note}" for note in suite.column[column].notes)
    for row in dict.fromkeys(row.label for row, _ in cells):
        yield from (f"{row}: {note}" for one in suite.rows if one.label == row for note in one.notes)
    if set(seeds) != set(suite.seeds):
        yield f"Seeds {', '.join(map(str, seeds))}, not {', '.join(map(str, suite.seeds))} as the suite has them."


def _machines(environments: Iterable[Mapping[str, Any]], written: Written) -> Iterator[str]:
    """A note if the runs are from several machines."""
    machines = {(one.get("platform"), one.get("gpu"), one.get("torch")) for one in environments}
    before = [int(found[1]) for note in written.notes if (found := _SEVERAL.match(note))]
    count = max([len(machines), *before])
    if count > 1:
        yield f"The runs were made on {count} machines or versions; the newest one is named."


_SEVERAL = re.compile(r"The runs were made on (\d+) machines")


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


def runs_in(result: Result) -> int:
    """The number of finished runs that a result has."""
    return sum(len(cell["runs"]) for cell in result["cells"])


def of_result(figure: Draw) -> Draw:
    """Mark a figure that reads only the result: it is drawn even where the folders of the runs are gone."""
    figure.__dict__["of_result"] = True
    return figure


def draw(suite: Suite, result: Result, runs: Path | None, folder: Path) -> list[Path]:
    """Draw the figures of a suite into a folder: each function is called with (result, runs, folder).

    `result` is the content of result.json, `runs` the folder with the runs (`Spot.place` says where); without it, only
    the figures marked with `of_result` are drawn. A function returns the files that it wrote.
    """
    found: list[Path] = []
    for name in suite.figures:
        module, _, function = name.partition(":")
        try:
            make = getattr(import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"The figure '{name}' of {suite.name} cannot be loaded: {error}.") from error
        if runs is not None or getattr(make, "of_result", False):
            found += make(result, runs, folder)
    return found
