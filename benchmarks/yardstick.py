"""What `corn.py` and `flux.py` share: many runs, one JSON file each; what is there is not run again."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from pool import Row, run_all

from coterie.data.dataset import Dataset, Source
from coterie.methods.base import find_algorithm
from coterie.randomness import Rng
from coterie.runs.execution import execute
from coterie.runs.experiment import resolve
from coterie.runs.settings import Tables, apply_set, merge, parse_seeds
from coterie.settings import fields_of

PUBLISHED: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text())


@dataclass(frozen=True)
class Cell:
    """One setting of a benchmark."""

    dataset: str
    shift: str
    degree: str | int  # the skew or the level

    @property
    def name(self) -> str:
        return f"{self.dataset}-{self.shift}-{self.degree}"


@dataclass(frozen=True)
class Options:
    """How to run: part of each file, so that runs with other options are not mixed."""

    folder: str
    data_dir: str | None
    device: str
    clusters: str
    sets: tuple[str, ...]
    until: float

    @property
    def lasting(self) -> Row:
        return {"clusters": self.clusters, "set": list(self.sets)}


@functools.lru_cache(1)
def _samples(source: Source, data_dir: str | None) -> Dataset:
    return source.load(None, Rng.seed(0), None if data_dir is None else Path(data_dir))


def path_of(folder: str, method: str, cell: Cell, seed: int) -> Path:
    return Path(folder) / f"{cell.name}-{method}-s{seed}.json"


def one(method: str, cell: Cell, field: str, seed: int, options: Options) -> Row:
    """One run, from its file or anew; nothing if it is too late. `field` is the setting of the degree."""
    path = path_of(options.folder, method, cell, seed)
    if path.exists():
        row: Row = json.loads(path.read_text())
        if row["options"] != options.lasting:
            raise SystemExit(f"{path} was made with other options, {row['options']}; use another --name.")
        return row
    if time.time() > options.until:
        return {}
    tables: Tables = {
        "run": {"algorithm": method, "dataset": cell.dataset, "seed": seed, "device": options.device},
        "scenario": {"shift": cell.shift, field: cell.degree},
    }
    tables["run"] |= {"evaluate_every": 10_000} | ({"data_dir": options.data_dir} if options.data_dir else {})
    tables = apply_set(merge(tables), options.sets)
    began, head = time.time(), {**dataclasses.asdict(cell), "method": method, "seed": seed}
    try:
        setup = resolve(tables)
        federation = setup.federation(_samples(setup.source, options.data_dir))
        assert federation.groups is not None
        groups = len(federation.groups.unique())
        if options.clusters == "true" and needs_clusters(method):
            tables["algorithm"].setdefault("num_clusters", groups)
        summary = execute(dataclasses.replace(resolve(tables), data=federation)).summary
    except Exception as error:  # the others go on, and this one is tried again next time
        return {**head, "problem": f"{type(error).__name__}: {error}"}
    row = {
        **head,
        "accuracy": round(100 * summary["accuracy"]["macro"], 3),
        "ari": round(summary["ari"], 4),
        "found": sum(size > 0 for size in summary["cluster_sizes"]),
        "groups": groups,
        "rounds": summary["rounds"],
        "seconds": round(time.time() - began, 1),
        "options": options.lasting,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".part").write_text(json.dumps(row))
    path.with_suffix(".part").rename(path)
    return row


def needs_clusters(method: str) -> bool:
    """Whether a method is told the number of clusters."""
    field = fields_of(find_algorithm(method)).get("num_clusters")
    return field is not None and isinstance(field.default, int)


def parser_of(doc: str | None, name: str) -> argparse.ArgumentParser:
    """The arguments of both scripts."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="fedavg,fesem,ifca", help="methods, separated by commas")
    parser.add_argument("--seeds", default="42-46", help="a range (42-46) or a list (42,44)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--name", default=name, help="folder of the runs inside --out")
    parser.add_argument("--out", default="runs")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument(
        "--clusters",
        choices=("true", "own"),
        default="true",
        help="number of clusters of methods that must be told: the true one, or the method's default",
    )
    parser.add_argument("--set", action="append", default=[], help="TABLE.FIELD=VALUE, for every run")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="start no run after this time")
    return parser


def numbers(text: str) -> tuple[int, ...]:
    """A range (42-46) or a list (1,4,8) of numbers; unlike for `--seeds` of coterie, one number is itself."""
    return parse_seeds(f"{text},{text}")


def run_cells(cells: Sequence[Cell], field: str, options: argparse.Namespace) -> list[Row]:
    """All runs of the cells that there is time for, and those of earlier calls."""
    made = Options(
        f"{options.out}/{options.name}",
        options.data_dir,
        options.device,
        options.clusters,
        tuple(options.set),
        time.time() + options.limit_seconds,
    )
    methods = options.methods.split(",")
    cases = [(m, cell, field, s, made) for s in numbers(options.seeds) for cell in cells for m in methods]
    rows = run_all(one, cases, options.jobs)
    done = [row for row in rows if "accuracy" in row]
    print(f"\n{len(done)} of {len(cases)} runs, {sum('problem' in row for row in rows)} failed\n")
    return done


def finish(lines: list[Row], columns: Sequence[str], rows: list[Row], options: argparse.Namespace) -> None:
    """Print the table, and write it with its rows as JSON."""
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for line in lines:
        print("| " + " | ".join("" if line[c] is None else str(line[c]) for c in columns) + " |")
    folder = Path(options.out) / options.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.json").write_text(json.dumps({"table": lines, "rows": rows}, indent=1) + "\n")
    print(f"\n{folder / 'table.json'}")


def of(rows: list[Row], key: str) -> float:
    return mean(row[key] for row in rows)


def best(values: dict[str, float]) -> tuple[str, float]:
    """The published method with the highest accuracy."""
    name = max(values, key=lambda method: values[method])
    return name, values[name]


def grouped(rows: list[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found
