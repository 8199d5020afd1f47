"""A suite: one table of a paper, as settings and published numbers in a TOML file.

    paper = "MD-ICFL (Zhang et al. 2024)"
    title = "Table 4: Rotated MNIST"
    priority = 10                            # 'reproduce all' starts with the smallest
    data = ["mnist"]                         # datasets that must be in the data folder
    seeds = [0, 1, 2]
    metrics = ["accuracy", "ari"]            # what the paper reports; see `outcome.measure`
    notes = ["..."]                          # where data, rounds or settings are not the paper's

    [base]                                   # tables as in --config; fields of [algorithm] for the methods that have
    run.dataset = "rotated-mnist"            # them (a method that finds K is not told num_clusters)

    [[columns]]                              # what differs between the columns of the table
    name = "R = 0.5"
    run.participation = 0.5

    [[rows]]
    label = "IFCA"                           # as in the paper; `key` (of folders and --rows) follows from it
    method = "ifca"                          # without it: a published number that nothing here can repeat
    mode = "paper"                           # "paper": start and rules as published; "ours": the method's defaults
    columns = ["R = 0.5"]                    # only these; by default all
    published.accuracy = [97.47]             # a number for each of its columns; nan: none
    algorithm.weighting = "equal"            # settings of this row; they win over base and column

More fields, all optional:

- `scale`: integer settings that `--scale` multiplies; by default run.rounds.
- `[[parts]]`: a cell is the mean over these runs, each a `name` and settings (FLUX publishes means over four shifts).
- `means`: named means over columns, {"all" = ["R = 0.5", "R = 1"]}.
- `groups` of a column: the number of true groups for each of `seeds`, or a table of such lists by part, with "count"
  in place of a list to count them in the data; `told` of a row: the field of its method that gets this number.
- `notes` of a column or row.
- `users`: how many users the first of `data` must have, so that a part of it is not taken for the whole.
- `stand_in`: true if the data or the network is not the paper's: published numbers are shown, but no differences.
- `figures`: functions "module:name" that draw from the finished runs (see `outcome.draw`); `keep_models`: keep the
  checkpoints of finished runs, for figures that need models.
- `gpu`: true if one run takes a processor a day or more. Without a GPU such a suite is run only if it is named itself.

Reading a suite imports no torch; `cases_of`, which resolves the settings, does.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from coterie.errors import ConfigError, UnknownName
from coterie.runs.settings import TABLES, Tables, merge

if TYPE_CHECKING:  # they import torch
    from coterie.runs.batch import Case
    from coterie.runs.experiment import Experiment

FOLDER = Path(__file__).with_name("suites")
ALL, COUNT = "all", "count"
AS_PUBLISHED: dict[str, Any] = {  # mode "paper": the fields with which a method does what its paper says
    "init": "paper",
    "guard": False,
    "rule": "plain",  # MD-ICFL
    "temperature": 1.0,  # FedDS
    "label_bias": "kept",
    "thresholds": "relative",  # CFL
}
_LEAST = {"run.clients": 8, "scenario.samples": 20, "scenario.total": 500}  # `--scale` goes no lower; others: 1
_NAME = re.compile(r"[A-Za-z0-9][\w .,=+()/-]*")


@dataclass(frozen=True)
class Column:
    """A column of the table: the settings that differ."""

    name: str
    tables: Tables = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    groups: Mapping[str, Sequence[int] | str] = field(default_factory=dict)  # part -> true groups by seed; "": no parts

    @property
    def key(self) -> str:
        """The name of its folder."""
        return key_of(self.name)


@dataclass(frozen=True)
class Part:
    """One of several runs whose mean is a cell."""

    name: str
    tables: Tables = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A row of the table: a method with its settings, and its published numbers."""

    label: str
    key: str
    method: str | None
    mode: Literal["paper", "ours"]
    columns: tuple[str, ...]
    published: Mapping[str, Mapping[str, float]]  # column -> metric -> number
    tables: Tables
    told: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spot:
    """One run of a suite."""

    row: Row
    column: Column
    part: Part | None
    seed: int

    @property
    def name(self) -> str:
        """Row and part, as the folder and the progress name them."""
        return self.row.key if self.part is None else f"{self.row.key}-{self.part.name}"

    @property
    def place(self) -> str:
        """The run folder inside the folder of the suite."""
        return f"{self.column.key}/{self.name}-s{self.seed}"


@dataclass(frozen=True)
class Suite:
    """A table to reproduce."""

    name: str
    paper: str
    title: str
    priority: int
    seeds: tuple[int, ...]
    metrics: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    base: Tables = field(default_factory=dict)
    data: tuple[str, ...] = ()
    users: int = 0
    parts: tuple[Part, ...] = ()
    means: Mapping[str, Sequence[str]] = field(default_factory=dict)
    scale: tuple[str, ...] = ("run.rounds",)
    notes: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    keep_models: bool = False
    stand_in: bool = False
    gpu: bool = False

    @cached_property
    def column(self) -> dict[str, Column]:
        """The columns by name."""
        return {column.name: column for column in self.columns}

    def chosen(self, rows: Sequence[str] = (), columns: Sequence[str] = ()) -> list[tuple[Row, Column]]:
        """The cells of these rows and columns, by label or key; by default all."""
        mine = _pick("row", self.name, {row.key: row.label for row in self.rows}, rows)
        there = _pick("column", self.name, {column.key: column.name for column in self.columns}, columns)
        return [
            (row, self.column[name])
            for row in self.rows
            if row.key in mine
            for name in row.columns
            if self.column[name].key in there
        ]

    def spots(self, cells: Iterable[tuple[Row, Column]], seeds: Sequence[int]) -> list[Spot]:
        """The runs of these cells: seed by seed, then by column and part, so that neighbours share their data."""
        order = {column.name: place for place, column in enumerate(self.columns)}
        by_column = sorted(((row, column) for row, column in cells if row.method), key=lambda cell: order[cell[1].name])
        parts: Sequence[Part | None] = self.parts or (None,)
        found = []
        for seed in seeds:
            for name in dict.fromkeys(column.name for _, column in by_column):
                for part in parts:
                    found += [Spot(row, column, part, seed) for row, column in by_column if column.name == name]
        return found


def _pick(kind: str, suite: str, known: Mapping[str, str], wanted: Sequence[str]) -> set[str]:
    """The keys of what is wanted by key or label; nothing wanted is everything."""
    keys = {label: key for key, label in known.items()} | {key: key for key in known}
    for name in wanted:
        if name not in keys:
            raise UnknownName(f"{kind} of {suite} named", name, known)
    return {keys[name] for name in wanted} if wanted else set(known)


def key_of(label: str) -> str:
    """A label as part of a file name.

    >>> key_of("MD-ICFL-1, our start"), key_of("R = 0.5")
    ('md-icfl-1-our-start', 'r-0.5')
    """
    return re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.")


# ---- finding and reading ----


def suite_names() -> list[str]:
    """The names of the shipped suites, `paper/table`."""
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.glob("*/*.toml"))


def find_suites(names: Sequence[str]) -> list[Suite]:
    """The suites of these names, by priority: `md_icfl/table4`, `feddsmic/table2` or `fesem` for all of its parts,
    `fesem/figures` for those that draw a figure, `all`, or the path of a TOML file."""
    known = suite_names()
    paths: dict[str, Path] = {}
    for name in names:
        if name.endswith(".toml"):
            paths[Path(name).stem] = Path(name)
            continue
        parts = [one for one in known if name == ALL or one.startswith((f"{name}/", f"{name}-"))]
        found = [name] if name in known else parts
        if not found and name.endswith("/figures"):  # a paper whose figures show the runs of its tables
            tables = [one for one in known if one.startswith(name.removesuffix("figures"))]
            found = [one for one in tables if read_suite(FOLDER / f"{one}.toml", one).figures]
        if not found:
            raise UnknownName("suite", name, [*known, ALL])
        paths |= {one: FOLDER / f"{one}.toml" for one in found}
    suites = [read_suite(path, name) for name, path in paths.items()]
    return sorted(suites, key=lambda suite: (suite.priority, suite.name))


def read_suite(path: Path, name: str) -> Suite:
    """The suite of a TOML file; a wrong field is an error that names it."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The suite {path} cannot be read: {error}.") from error
    try:
        return _suite(name, content)
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
        said = f"it has no {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise ConfigError(f"The suite {path} cannot be used: {said}.") from error


_FIELDS = {"paper", "title", "priority", "data", "seeds", "metrics", "base", "columns", "rows", "parts", "means"}
_FIELDS |= {"users", "scale", "notes", "figures", "keep_models", "stand_in", "gpu"}


def _suite(name: str, content: Mapping[str, Any]) -> Suite:
    _known("field", content, _FIELDS)
    parts = tuple(Part(one["name"], _tables(one, {"name"})) for one in content.get("parts", []))
    seeds = tuple(int(seed) for seed in content["seeds"])
    columns = tuple(_column(one, parts, seeds) for one in content["columns"])
    metrics = tuple(content["metrics"])
    rows = tuple(_row(one, [column.name for column in columns], metrics) for one in content["rows"])
    for kind, keys in (("rows", [row.key for row in rows]), ("columns", [column.key for column in columns])):
        if len(set(keys)) < len(keys) or not all(keys):
            raise ConfigError(f"its {kind} need names that differ; got {', '.join(keys)}")
    means = content.get("means", {})
    for among in means.values():
        for column in among:
            if column not in [one.name for one in columns]:
                raise UnknownName("column", column, [one.name for one in columns])
    return Suite(
        name=name,
        paper=content["paper"],
        title=content["title"],
        priority=int(content.get("priority", 1000)),
        seeds=seeds,
        metrics=metrics,
        columns=columns,
        rows=rows,
        base=_tables(content.get("base", {})),
        data=tuple(content.get("data", ())),
        users=int(content.get("users", 0)),
        parts=parts,
        means=means,
        scale=tuple(content.get("scale", ("run.rounds",))),
        notes=tuple(content.get("notes", ())),
        figures=tuple(content.get("figures", ())),
        keep_models=bool(content.get("keep_models", False)),
        stand_in=bool(content.get("stand_in", False)),
        gpu=bool(content.get("gpu", False)),
    )


def _column(content: Mapping[str, Any], parts: Sequence[Part], seeds: Sequence[int]) -> Column:
    groups = content.get("groups", {})
    groups = groups if isinstance(groups, Mapping) else {"": groups}
    for part, counts in groups.items():
        if part not in ([one.name for one in parts] or [""]) or (counts != COUNT and len(counts) != len(seeds)):
            raise ConfigError(f"groups of column {content['name']} must have a number for each seed and part")
    tables = _tables(content, {"name", "notes", "groups"})
    return Column(_name(content["name"]), tables, tuple(content.get("notes", ())), groups)


_OF_ROW = {"label", "key", "method", "mode", "columns", "published", "told", "notes"}


def _row(content: Mapping[str, Any], columns: Sequence[str], metrics: Sequence[str]) -> Row:
    label, mode = _name(content["label"]), content.get("mode", "paper")
    if mode not in ("paper", "ours"):
        raise UnknownName("mode", mode, ("paper", "ours"))
    own = tuple(content.get("columns", columns))
    for column in own:
        if column not in columns:
            raise UnknownName(f"column of row {label} named", column, columns)
    published: dict[str, dict[str, float]] = {column: {} for column in own}
    for metric, numbers in content.get("published", {}).items():
        if metric not in metrics:
            raise UnknownName(f"metric of row {label} named", metric, metrics)
        if len(numbers) != len(own):
            raise ConfigError(f"row {label} has {len(own)} columns, but {len(numbers)} published numbers of {metric}")
        for column, number in zip(own, numbers, strict=True):
            if not math.isnan(number):
                published[column][metric] = float(number)
    return Row(
        label=label,
        key=content.get("key", key_of(label)),
        method=content.get("method"),
        mode=mode,
        columns=own,
        published=published,
        tables=_tables(content, _OF_ROW),
        told=content.get("told"),
        notes=tuple(content.get("notes", ())),
    )


def _name(text: Any) -> str:
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        raise ConfigError(f"a name of letters, digits and ' .,=+()/-' is needed; got {text!r}")
    return text


def _tables(content: Mapping[str, Any], others: Iterable[str] = ()) -> Tables:
    """The tables of settings in a table of the file, which may have other fields too."""
    _known("table or field", content, {*TABLES, *others})
    found = {name: dict(content[name]) for name in TABLES if name in content}
    return found


def _known(kind: str, content: Mapping[str, Any], known: Iterable[str]) -> None:
    for key in content:
        if key not in set(known):
            raise UnknownName(kind, key, known)


# ---- from a suite to runs ----


def settings_of(suite: Suite, row: Row, column: Column, part: Part | None = None) -> Tables:
    """The settings of a cell, without its seed."""
    from coterie.methods.base import find_algorithm
    from coterie.runs.situations import Situation
    from coterie.settings import fields_of

    assert row.method is not None
    layers = merge(suite.base, {} if part is None else part.tables, column.tables)
    known = fields_of(find_algorithm(row.method))
    published = AS_PUBLISHED if row.mode == "paper" else {}
    algorithm = {key: value for key, value in published.items() if key in known}
    algorithm |= Situation("", tables=layers).algorithm_fields(row.method) | row.tables.get("algorithm", {})
    tables = merge(layers, row.tables) | {"algorithm": algorithm}
    tables["run"]["algorithm"] = row.method
    if reserve := _reserve(suite):
        tables["scenario"].setdefault("reserve", reserve)
    return tables


def _reserve(suite: Suite) -> int:
    """Samples per class that the server holds: what one method needs is held out for all."""
    from coterie.methods.base import find_algorithm
    from coterie.settings import fields_of

    found = [0]
    for row in suite.rows:
        field = None if row.method is None else fields_of(find_algorithm(row.method)).get("indicators")
        if field is not None:
            layers = merge(suite.base, row.tables)["algorithm"]
            found.append(layers.get("indicators", field.default))
    return max(found)


def cases_of(
    suite: Suite,
    spots: Sequence[Spot],
    count: Callable[[Case], int],
    *,
    scale: float = 1.0,
    device: str | None = None,
    data_dir: str | None = None,
) -> list[Case]:
    """The runs with all settings resolved and checked, in this order; `count` counts the true groups of a run."""
    from coterie.runs.batch import SITUATION, Case
    from coterie.runs.experiment import resolve

    where = {name: value for name, value in (("device", device), ("data_dir", data_dir)) if value}
    found = []
    for spot in spots:
        tables = merge(settings_of(suite, spot.row, spot.column, spot.part), {"run": {"seed": spot.seed, **where}})
        labels = (SITUATION, spot.column.key), ("method", spot.name)
        try:
            if spot.row.told:
                known = _groups(suite, spot)
                tables["algorithm"][spot.row.told] = count(Case(labels, resolve(tables))) if known is None else known
            found.append(Case(labels, scaled(resolve(tables), suite.scale, scale)))
        except ConfigError as error:
            raise ConfigError(f"{suite.name}, {spot.row.label}: {error}") from error
    return found


def _groups(suite: Suite, spot: Spot) -> int | None:
    """The number of true groups of a run; None: to be counted."""
    counts = spot.column.groups.get("" if spot.part is None else spot.part.name)
    if counts == COUNT:
        return None
    if counts is None or isinstance(counts, str) or spot.seed not in suite.seeds:
        raise ConfigError(
            f"{suite.name} knows the number of true groups of seeds {', '.join(map(str, suite.seeds))} only, and row "
            f"{spot.row.label} needs it. Choose seeds among them, or other rows with --rows."
        )
    return counts[suite.seeds.index(spot.seed)]


def scaled(experiment: Experiment, fields: Sequence[str], factor: float) -> Experiment:
    """The experiment with these integer settings multiplied."""
    from coterie.runs.experiment import resolve

    if factor == 1:
        return experiment
    tables = experiment.tables()
    for name in fields:
        table, _, key = name.partition(".")
        value = tables[table].get(key)
        if isinstance(value, int):
            tables[table][key] = min(value, max(_LEAST.get(name, 1), round(factor * value)))
    return resolve(tables)
