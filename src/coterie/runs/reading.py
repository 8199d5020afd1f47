"""A run folder as checked arrays: finished, stopped, still growing, or damaged (and then why).

Whatever lies in a folder, reading it either gives a `RunData` whose every field has the type it says, or raises a
RunError of one sentence. Config, rounds and summary must be right; what only pictures need may be missing or
damaged, and then `problems` says so. Nothing is unpickled, links out of `within` are not followed, and files beyond
a sensible size are not read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from coterie.data.federation import name_groups
from coterie.errors import RunError
from coterie.runs.checks import (
    client_names,
    columns_of,
    finite,
    held_counts,
    is_flat,
    is_table,
    is_whole,
    member_pictures,
    method_arrays,
    records,
    scores_of,
    whole_numbers,
)
from coterie.runs.folder import RunFolder
from coterie.runs.metrics import METRICS

if TYPE_CHECKING:
    from coterie.runs.result import Result

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
State = Literal["finished", "running", "stopped"]

MARKS = ("config.toml", "rounds.jsonl", "summary.json", "environment.json", "clients.npz")  # of a run folder
_DEPTH = 3  # folders within folders that are looked through: runs/compare-x/fesem-s0
_MOST_RUNS = 5000


@dataclass(frozen=True)
class RunData:
    """All that there is to see of a run."""

    name: str
    state: State
    path: Path | None = None
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] | None = None
    rounds: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [T]
    curves: dict[str, Floats] = field(
        default_factory=dict
    )  # by the keys of metrics and of FACTS: [T], NaN where not told
    spread: dict[str, Floats] = field(default_factory=dict)  # accuracy, f1, loss: [T, 5] over clients
    sizes: list[list[int]] = field(default_factory=list)  # [T][K]
    repairs: list[dict[str, Any]] = field(default_factory=list)  # round, reason
    names: list[str] = field(default_factory=list)  # [N]
    labels: Ints | None = None  # [S, N] after the start and each round so far
    groups: Ints | None = None  # [N] true groups
    samples: Ints | None = None  # [N] training samples
    scores: dict[str, Floats] = field(default_factory=dict)  # of the last evaluation: accuracy, f1, loss [N], NaN: none
    counts: Ints | None = None  # [N, L] training samples of each class
    sketches: Floats | None = None  # [N, D]
    sketched: Ints | None = None  # [N] in which round; 0: no sketch
    members: dict[str, NDArray[Any]] = field(default_factory=dict)  # picture, client, cluster, label
    method: dict[str, NDArray[Any]] = field(default_factory=dict)  # what the method itself shows
    failures: list[dict[str, Any]] = field(default_factory=list)
    unseen: list[dict[str, Any]] = field(default_factory=list)
    choice: dict[str, Any] | None = None  # of the number of clusters
    problems: list[str] = field(default_factory=list)  # what could not be read, and why

    @property
    def settings(self) -> dict[str, Any]:
        """The table [run]."""
        return self.config.get("run", {})

    @property
    def algorithm(self) -> str:
        """The method."""
        return str(self.settings.get("algorithm", "?"))

    @property
    def dataset(self) -> str:
        """The data."""
        return str(self.settings.get("dataset", "?"))

    @property
    def seed(self) -> int:
        """The seed."""
        found = self.settings.get("seed", 0)
        return found if isinstance(found, int) else 0

    @property
    def title(self) -> str:
        """The run in words."""
        return f"{self.algorithm} on {self.dataset}, seed {self.seed}"

    @property
    def planned(self) -> int:
        """Rounds it is to have."""
        found = self.settings.get("rounds", 0)
        return max(found if isinstance(found, int) else 0, self.done)

    @property
    def done(self) -> int:
        """Rounds it has."""
        return int(self.rounds[-1]) if len(self.rounds) else 0

    @property
    def clusters(self) -> Ints | None:
        """The cluster of each client as far as is known, [N]; -1: not met."""
        return None if self.labels is None or not len(self.labels) else self.labels[-1]

    def last(self, name: str) -> float | None:
        """The last value of a curve that was told; of a metric of the whole run, the summary's."""
        if name in METRICS and METRICS[name].of_run:
            return finite(METRICS[name].read(self.summary))
        values = self.curves.get(name)
        if values is None or not np.isfinite(values).any():
            return None
        return float(values[np.isfinite(values)][-1])

    @property
    def seconds_left(self) -> float | None:
        """How long a run that goes on still takes, by its last ten rounds."""
        parts = [self.curves[f"{part}_seconds"][-10:] for part in ("train", "server", "evaluate") if self.curves]
        if self.state != "running" or not parts or not len(parts[0]):
            return None
        each = float(np.nan_to_num(np.sum(parts, axis=0)).mean())
        return each * (self.planned - self.done)

    def group_names(self) -> list[str]:
        """What to call the true groups, in order of their numbers."""
        return [] if self.groups is None else list(name_groups(self.names, self.groups.tolist()).values())

    def group_positions(self) -> Ints | None:
        """The true group of each client as a position in `group_names`, [N]."""
        if self.groups is None:
            return None
        found: Ints = np.unique(self.groups, return_inverse=True)[1].astype(np.int64)
        return found


# ---- reading ----


def as_run(source: Any) -> RunData:
    """A run however it is named: a path, a folder, a result (with or without a folder), or what was read before."""
    if isinstance(source, RunData):
        return source
    if isinstance(source, (str, Path)):
        return read_run(Path(source))
    if isinstance(source, RunFolder):
        return read_run(source.path)
    if hasattr(type(source), "record"):  # a Result; asked of its type, since making the record takes a while
        return of_result(source)
    raise RunError(f"A run is a path to its folder or a Result. Got {type(source).__name__} instead.")


def read_run(path: Path, within: Path | None = None, *, whole: bool = True) -> RunData:
    """Read a run folder. `within`: refuse links that lead out of it; not `whole`: leave what is for pictures."""
    files = RunFolder(path, within)
    config = {key: value for key, value in files.config().items() if isinstance(value, dict)}
    rows, summary = files.rows(), files.summary()
    environment = files.read_object("environment.json") or {}
    state: State = "finished" if summary is not None else "running" if files.is_held() else "stopped"
    problems: list[str] = []

    def optional(name: str, read: Any) -> Any:
        """What only pictures need: missing or damaged, the rest is shown."""
        try:
            return read(name) if whole else None
        except RunError as error:
            problems.append(str(error))
            return None

    manifest = optional("artifacts/manifest.json", files.read_json)
    parts = {
        "clients": optional("clients.npz", files.arrays) or {},
        "labels": optional("labels.npy", files.array),
        "manifest": manifest if isinstance(manifest, dict) else {},
        "sketches": optional("artifacts/sketches.npz", files.arrays) or {},
        "members": optional("artifacts/members.npz", files.arrays) or {},
        "method": optional("artifacts/method.npz", files.arrays) or {},
        "failures": optional("artifacts/failures.json", files.read_json),
        "unseen": optional("artifacts/unseen.json", files.read_json),
        "choice": optional("artifacts/choose-k.json", files.read_json),
    }
    return _assembled(
        RunData(path.resolve().name, state, path, config, environment, summary, problems=problems),
        rows,
        parts,
        f"{path / 'rounds.jsonl'}",
    )


def of_result(result: Result) -> RunData:
    """A finished run of Python's, from memory."""
    if result.path is not None and (result.path / "config.toml").is_file():
        return read_run(result.path)
    record = result.record
    rows = json.loads(json.dumps(record["rows"]))
    parts = {key: record.get(key) for key in ("labels", "manifest", "sketches", "members", "method", "clients")}
    parts = {key: {} if value is None else value for key, value in parts.items()}
    parts |= {"failures": record["failures"], "unseen": record["unseen"], "choice": None}
    name, summary = record["name"], result.summary
    return _assembled(RunData(name, "finished", None, record["config"], {}, summary), rows, parts, name)


def find_runs(root: Path) -> list[tuple[str, Path]]:
    """The folders under `root` that are runs, or look as if they had been: name relative to `root`, path.

    Run folders are not looked into, links to folders of runs are not followed (links to a run are listed, and refused
    when it is read with `within` and lies outside), and hidden folders are left alone.
    """
    found: list[tuple[str, Path]] = []

    def look(folder: Path, depth: int) -> None:
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            return
        for entry in entries:
            if len(found) >= _MOST_RUNS or entry.name.startswith("."):
                continue
            path = Path(entry.path)
            if is_run(path):
                found.append((path.relative_to(root).as_posix(), path))
            elif entry.is_dir(follow_symlinks=False) and depth > 1:
                look(path, depth - 1)

    if is_run(root):
        return [(root.resolve().name, root)]
    look(root, _DEPTH)
    return found


def is_run(path: Path) -> bool:
    """Whether a folder is a run, or has been meant as one."""
    return any((path / mark).exists() for mark in MARKS) or (path / "checkpoint").is_dir()


def _assembled(head: RunData, rows: list[Any], parts: Mapping[str, Any], where: str) -> RunData:
    """The head of a run, with what its rows and arrays say."""
    rounds, curves, spread, sizes, repairs = columns_of(rows, where)
    clients, manifest, labels = parts["clients"], parts["manifest"], parts["labels"]
    names = [str(item) for item in clients["name"].tolist()] if is_flat(clients.get("name")) else client_names(manifest)
    count = len(names)
    groups = whole_numbers(clients.get("group"), (count,))
    if not isinstance(labels, np.ndarray) or labels.ndim != 2 or labels.shape[1] != count or not is_whole(labels):
        if isinstance(labels, np.ndarray) and count:
            head.problems.append(f"labels.npy has the shape {labels.shape}, and there are {count} clients.")
        labels = None
    sketch, sketched = parts["sketches"].get("sketch"), parts["sketches"].get("round")
    if not (is_table(sketch, count) and is_flat(sketched) and len(sketched) == count):
        sketch = sketched = None
    return replace(
        head,
        rounds=rounds,
        curves=curves,
        spread=spread,
        sizes=sizes,
        repairs=repairs,
        names=names,
        labels=None if labels is None else labels.astype(np.int64),
        groups=groups,
        samples=whole_numbers(clients.get("train_samples"), (count,)),
        scores=scores_of(clients, count),
        counts=held_counts(manifest, names),
        sketches=None if sketch is None else np.nan_to_num(sketch.astype(np.float64)),
        sketched=None if sketched is None else sketched.astype(np.int64),
        members=member_pictures(parts["members"], count),
        method=method_arrays(parts["method"]),
        failures=records(parts["failures"]),
        unseen=records(parts["unseen"]),
        choice=parts["choice"] if isinstance(parts["choice"], dict) else None,
    )
