"""A run folder as checked arrays: of a finished, stopped or running run.

Reading gives a `RunData` whose fields have the types they declare, or raises a RunError of one sentence. Config, rounds
and summary must be right. What only pictures need may be missing or damaged; `problems` then says why.
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

from coterie.data.groups import name_groups
from coterie.errors import RunError
from coterie.runs import checks
from coterie.runs.checks import Floats, Ints
from coterie.runs.files import Files
from coterie.runs.metrics import METRICS

if TYPE_CHECKING:
    from coterie.runs.result import Result

State = Literal["finished", "running", "stopped"]

MARKS = ("config.toml", "rounds.jsonl", "summary.json", "environment.json", "clients.npz")  # of a run folder
_FOR_PICTURES = (
    "clients.npz",
    "labels.npy",
    *(f"artifacts/{name}.npz" for name in ("sketches", "members", "method")),
    *(f"artifacts/{name}.json" for name in ("manifest", "failures", "unseen", "choose-k")),
)
_DEPTH = 3  # levels of folders to search: runs/compare-x/fesem-s0
_MOST_RUNS = 5000


@dataclass(frozen=True)
class RunData:
    """Everything that reports show of a run."""

    name: str
    state: State
    path: Path | None = None
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] | None = None
    rounds: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [T]
    curves: dict[str, Floats] = field(default_factory=dict)  # by key of a metric or of FACTS: [T], NaN where missing
    spread: dict[str, Floats] = field(default_factory=dict)  # accuracy, f1, loss: [T, 5] over clients
    sizes: list[list[int]] = field(default_factory=list)  # [T][K]
    repairs: list[dict[str, Any]] = field(default_factory=list)  # round, reason
    decisions: list[dict[str, Any]] = field(default_factory=list)  # as `Decision`
    names: list[str] = field(default_factory=list)  # [N]
    labels: Ints | None = None  # [T + 1, N] after the start and each round
    groups: Ints | None = None  # [N] true groups
    named_groups: list[str] = field(default_factory=list)  # [G] where they have names
    samples: Ints | None = None  # [N] training samples
    scores: dict[str, Floats] = field(default_factory=dict)  # accuracy, f1, loss of the last evaluation [N]
    counts: Ints | None = None  # [N, L] training samples of each class
    class_names: list[str] = field(default_factory=list)  # [L] where they have names
    sketches: Floats | None = None  # [N, D]
    sketched: Ints | None = None  # [N] the round of the sketch; 0: no sketch
    members: dict[str, NDArray[Any]] = field(default_factory=dict)  # picture, client, cluster, label
    method: dict[str, NDArray[Any]] = field(default_factory=dict)  # arrays of the method itself
    failures: list[dict[str, Any]] = field(default_factory=list)
    unseen: list[dict[str, Any]] = field(default_factory=list)
    choice: dict[str, Any] | None = None  # of the number of clusters, by choose-k
    problems: list[str] = field(default_factory=list)  # why something could not be read
    situations: tuple[str, ...] = ()  # of a comparison that the run belongs to

    @property
    def settings(self) -> dict[str, Any]:
        """The table [run]."""
        return self.config.get("run", {})

    @property
    def algorithm(self) -> str:
        return str(self.settings.get("algorithm", "?"))

    @property
    def dataset(self) -> str:
        return str(self.settings.get("dataset", "?"))

    @property
    def seed(self) -> int:
        found = self.settings.get("seed", 0)
        return found if isinstance(found, int) else 0

    @property
    def title(self) -> str:
        return f"{self.algorithm} on {self.dataset}, seed {self.seed}"

    @property
    def planned(self) -> int:
        found = self.settings.get("rounds", 0)
        return max(found if isinstance(found, int) else 0, self.done)

    @property
    def done(self) -> int:
        return int(self.rounds[-1]) if len(self.rounds) else 0

    @property
    def clusters(self) -> Ints | None:
        """The current cluster of each client, [N]; -1: not seen."""
        return None if self.labels is None or not len(self.labels) else self.labels[-1]

    def last(self, name: str) -> float | None:
        """The last known value of a curve; for a metric of the whole run, the value in the summary."""
        if name in METRICS and METRICS[name].of_run:
            return checks.finite(METRICS[name].read(self.summary))
        values = self.curves.get(name, np.zeros(0))
        known = values[np.isfinite(values)]
        return float(known[-1]) if len(known) else None

    @property
    def seconds_left(self) -> float | None:
        """Remaining time of a running run, estimated from its last ten rounds."""
        parts = [self.curves[f"{part}_seconds"][-10:] for part in ("train", "server", "evaluate") if self.curves]
        if self.state != "running" or not parts or not len(parts[0]):
            return None
        each = float(np.nan_to_num(np.sum(parts, axis=0)).mean())
        return each * (self.planned - self.done)

    def group_names(self) -> list[str]:
        """Names of the true groups, in order of their numbers."""
        if self.groups is None:
            return []
        return list(name_groups(self.names, self.groups.tolist(), self.named_groups).values())

    def group_positions(self) -> Ints | None:
        """The true group of each client as a position in `group_names`, [N]."""
        if self.groups is None:
            return None
        found: Ints = np.unique(self.groups, return_inverse=True)[1].astype(np.int64)
        return found


# ---- reading ----


def as_run(source: Any) -> RunData:
    """A run from a path, a run folder or a Result."""
    if isinstance(source, RunData):
        return source
    if isinstance(source, (str, Path)):
        return read_run(Path(source))
    if isinstance(source, Files):
        return read_run(source.path)
    if hasattr(type(source), "record"):  # a Result; checked on its type, because making the record takes a while
        return of_result(source)
    raise RunError(f"A run is a path to its folder or a Result. Got {type(source).__name__} instead.")


def read_run(path: Path, *, whole: bool = True) -> RunData:
    """Read a run folder; `whole=False`: skip what only pictures need."""
    files = Files(path)
    config = {key: value for key, value in files.config().items() if isinstance(value, dict)}
    rows, summary = files.rows(), files.summary()
    environment = files.read_object("environment.json") or {}
    state: State = "finished" if summary is not None else "running" if files.is_held() else "stopped"
    readers = {".npz": files.arrays, ".npy": files.array, ".json": files.read_json}
    parts: dict[str, Any] = {}
    problems: list[str] = []
    for name in _FOR_PICTURES if whole else ():
        try:
            parts[Path(name).stem] = readers[Path(name).suffix](name)
        except RunError as error:
            problems.append(str(error))
    head = RunData(path.resolve().name, state, path, config, environment, summary, problems=problems)
    return _assembled(head, rows, parts, f"{path / 'rounds.jsonl'}")


def of_result(result: Result) -> RunData:
    """A finished run from its folder, or from memory if it has none."""
    if result.path is not None and (result.path / "config.toml").is_file():
        return read_run(result.path)
    record = result.record
    head = RunData(record["name"], "finished", None, record["config"], {}, result.summary)
    return _assembled(head, json.loads(json.dumps(record["rows"])), record, record["name"])


def find_runs(root: Path) -> list[tuple[str, Path]]:
    """The run folders under `root`, damaged ones included: name relative to `root`, path.

    Hidden folders and links to folders of runs are skipped. A link to a run is listed.
    """
    found: list[tuple[str, Path]] = []

    def search(folder: Path, depth: int) -> None:
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
                search(path, depth - 1)

    if is_run(root):
        return [(root.resolve().name, root)]
    search(root, _DEPTH)
    return found


def is_run(path: Path) -> bool:
    """Whether a folder is a run, complete or damaged."""
    return any((path / mark).exists() for mark in MARKS) or (path / "checkpoint").is_dir()


def _assembled(head: RunData, rows: list[Any], parts: Mapping[str, Any], where: str) -> RunData:
    """A run with what its rows and arrays say."""
    clients, sketches = parts.get("clients") or {}, parts.get("sketches") or {}
    manifest, choice = (found if isinstance(found, dict) else {} for found in map(parts.get, ("manifest", "choose-k")))
    names = checks.client_names(clients, manifest)
    count = len(names)
    labels = checks.integers(parts.get("labels"), (None, count))
    if labels is None and count and isinstance(parts.get("labels"), np.ndarray):
        head.problems.append(f"labels.npy has shape {parts['labels'].shape}, but there are {count} clients.")
    columns = checks.columns_of(rows, where)
    most = max([count, *map(len, columns["sizes"])])
    if labels is not None and labels.size and not -1 <= labels.min() <= labels.max() < most:
        head.problems.append(f"labels.npy has a cluster {labels.max()}, but there are at most {most}.")
        labels = None
    sketch, sketched = (
        checks.floats(sketches.get("sketch"), (count, None)),
        checks.integers(sketches.get("round"), (count,)),
    )
    return replace(
        head,
        **columns,
        names=names,
        labels=labels,
        groups=checks.integers(clients.get("group"), (count,)),
        named_groups=checks.texts(manifest.get("group_names")),
        samples=checks.integers(clients.get("train_samples"), (count,)),
        scores=checks.last_scores(clients, count),
        counts=(counts := checks.class_counts(manifest, names)),
        class_names=checks.class_names(manifest, counts),
        sketches=None if sketched is None else sketch,
        sketched=None if sketch is None else sketched,
        members=checks.member_pictures(parts.get("members") or {}, count),
        method=checks.method_arrays(parts.get("method") or {}),
        failures=checks.records(parts.get("failures")),
        unseen=checks.records(parts.get("unseen")),
        choice=choice or None,
    )
