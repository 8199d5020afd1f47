"""A run folder as checked arrays: finished, stopped, still growing, or damaged (and then why).

Whatever lies in a folder, reading it either gives a `RunData` whose every field has the type it says, or raises a
RunError of one sentence. Config, rounds and summary must be right; what only pictures need may be missing or
damaged, and then `problems` says so. Nothing is unpickled, links out of `within` are not followed, and files beyond
a sensible size are not read.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from coterie.errors import RunError
from coterie.metrics import QUANTILES, quantiles
from coterie.runs import SCHEMA, RunFolder

if TYPE_CHECKING:
    from coterie.api import Result

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
State = Literal["finished", "running", "stopped"]

MOST_BYTES = 512 << 20  # of one file, packed or unpacked
MARKS = ("config.toml", "rounds.jsonl", "summary.json", "environment.json", "clients.npz")  # of a run folder
_DEPTH = 3  # folders within folders that are looked through: runs/compare-x/fesem-s0
_MOST_RUNS = 5000

# Where the numbers of a round are in its row.
COLUMNS: dict[str, tuple[str, ...]] = {
    "accuracy": ("accuracy", "macro"),
    "accuracy_micro": ("accuracy", "micro"),
    "bottom5": ("accuracy", "bottom5"),
    "worst_decile": ("accuracy", "worst_decile"),
    "f1": ("f1", "macro"),
    "f1_micro": ("f1", "micro"),
    "loss": ("loss", "macro"),
    "loss_micro": ("loss", "micro"),
    "ari": ("ari",),
    "nmi": ("nmi",),
    "purity": ("purity",),
    "churn": ("churn",),
    "cohort": ("cohort",),
    "met": ("clients_met",),
    "failures": ("failures",),
    "down": ("bytes", "down"),
    "up": ("bytes", "up"),
    "start_bytes": ("bytes", "start"),
    "repair_bytes": ("bytes", "repair"),
    "train_seconds": ("seconds", "train"),
    "server_seconds": ("seconds", "server"),
    "evaluate_seconds": ("seconds", "evaluate"),
}


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
    curves: dict[str, Floats] = field(default_factory=dict)  # by the names of COLUMNS: [T], NaN where not told
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
        """The last value of a curve that was told."""
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
        """What to call the true groups 0 ... G-1 (in order of their numbers): a stem their clients share, or a number.

        Clients r000-000, r000-001, r090-000 ... are of the groups r000 and r090.
        """
        if self.groups is None:
            return []
        numbers = np.unique(self.groups).tolist()
        stems = {
            number: {self.names[i].rpartition("-")[0] for i in np.flatnonzero(self.groups == number)}
            for number in numbers
        }
        firsts = [next(iter(found)) for found in stems.values() if len(found) == 1]
        if len(set(firsts)) == len(numbers) and all(firsts):
            return firsts
        return [f"group {number}" for number in numbers]

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
    if hasattr(source, "record"):
        return of_result(source)
    raise RunError(f"A run is a path to its folder or a Result. Got {type(source).__name__} instead.")


def read_run(path: Path, within: Path | None = None, *, whole: bool = True) -> RunData:
    """Read a run folder. `within`: refuse links that lead out of it; not `whole`: leave what is for pictures."""
    files = _Files(path, within)
    config = _read_config(files)
    rows = _read_rows(files)
    summary = _object(files.json("summary.json"), "summary.json", files)
    if summary is not None and not isinstance(summary.get("rounds"), int):
        raise RunError(f"{path / 'summary.json'} is damaged: it does not say how many rounds there were.")
    environment = _object(files.json("environment.json"), "environment.json", files) or {}
    if summary is not None:
        state: State = "finished"
    else:
        state = "running" if RunFolder(path).is_held() else "stopped"
    problems: list[str] = []

    def optional(name: str, read: Any) -> Any:
        """What only pictures need: missing or damaged, the rest is shown."""
        try:
            return read(name) if whole else None
        except RunError as error:
            problems.append(str(error))
            return None

    manifest = optional("artifacts/manifest.json", files.json)
    parts = {
        "clients": optional("clients.npz", files.arrays) or {},
        "labels": optional("labels.npy", files.array),
        "manifest": manifest if isinstance(manifest, dict) else {},
        "sketches": optional("artifacts/sketches.npz", files.arrays) or {},
        "members": optional("artifacts/members.npz", files.arrays) or {},
        "method": optional("artifacts/method.npz", files.arrays) or {},
        "failures": optional("artifacts/failures.json", files.json),
        "unseen": optional("artifacts/unseen.json", files.json),
        "choice": optional("artifacts/choose-k.json", files.json),
    }
    return _assembled(
        path.resolve().name,
        state,
        path,
        config,
        environment,
        summary,
        rows,
        parts,
        problems,
        f"{path / 'rounds.jsonl'}",
    )


def of_result(result: Result) -> RunData:
    """A finished run of Python's, from memory."""
    if result.path is not None and (result.path / "config.toml").is_file():
        return read_run(result.path)
    record = result.record()
    rows = json.loads(json.dumps(record["rows"]))
    parts = {key: record.get(key) for key in ("labels", "manifest", "sketches", "members", "method", "clients")}
    parts = {key: {} if value is None else value for key, value in parts.items()}
    parts |= {"failures": record["failures"], "unseen": record["unseen"], "choice": None}
    name, summary = record["name"], result.summary
    return _assembled(name, "finished", None, record["config"], {}, summary, rows, parts, [], name)


def find_runs(root: Path) -> list[tuple[str, Path]]:
    """The folders under `root` that are runs, or look as if they had been: name relative to `root`, path.

    Run folders are not looked into, links to folders are not followed (those are listed, and refused when they are
    read with `within`), and hidden folders are left alone.
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
            if entry.is_symlink():
                if path.is_dir():
                    found.append((path.relative_to(root).as_posix(), path))
            elif entry.is_dir(follow_symlinks=False):
                if is_run(path):
                    found.append((path.relative_to(root).as_posix(), path))
                elif depth > 1:
                    look(path, depth - 1)

    if is_run(root):
        return [(root.resolve().name, root)]
    look(root, _DEPTH)
    return found


def is_run(path: Path) -> bool:
    """Whether a folder is a run, or has been meant as one."""
    return any((path / mark).exists() for mark in MARKS) or (path / "checkpoint").is_dir()


class _Files:
    """The files of a run folder, each refused by name when it is not what it should be."""

    def __init__(self, path: Path, within: Path | None) -> None:
        self.path = path
        self._within = None if within is None else within.resolve()

    def bytes(self, name: str) -> bytes | None:
        """The content of a file, None if it is not there."""
        path = self.path / name
        try:
            if self._within is not None and not path.resolve().is_relative_to(self._within):
                raise RunError(f"{path} leads out of {self._within}; it is not followed.")
            # Without waiting, and looked at once it is open: a pipe of that name would be waited for without end.
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError, ValueError) as error:
            raise RunError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            os.close(handle)
            raise RunError(f"{path} is not a plain file.")
        with os.fdopen(handle, "rb") as file:
            if found.st_size > MOST_BYTES:
                raise RunError(f"{path} has {found.st_size >> 20} MB; more than {MOST_BYTES >> 20} MB are not read.")
            return file.read(MOST_BYTES)

    def json(self, name: str) -> Any:
        """A JSON file."""
        content = self.bytes(name)
        if content is None:
            return None
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise RunError(f"{self.path / name} is damaged: {_first_line(error)}.") from error

    def array(self, name: str) -> NDArray[Any] | None:
        """An .npy file."""
        content = self.bytes(name)
        if content is None:
            return None
        try:
            found: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
        except (ValueError, EOFError, OSError, MemoryError, SyntaxError) as error:
            raise RunError(f"{self.path / name} is damaged: {_first_line(error)}.") from error
        if not isinstance(found, np.ndarray):
            raise RunError(f"{self.path / name} is damaged: it is not an array.")
        return found

    def arrays(self, name: str) -> dict[str, NDArray[Any]] | None:
        """An .npz file."""
        content = self.bytes(name)
        if content is None:
            return None
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                size = sum(item.file_size for item in archive.infolist())
            if size > MOST_BYTES:
                raise RunError(f"{self.path / name} unpacks to {size >> 20} MB; that much is not read.")
            with np.load(io.BytesIO(content), allow_pickle=False) as found:
                return {key: found[key] for key in found.files}
        except (ValueError, EOFError, OSError, KeyError, MemoryError, zipfile.BadZipFile, NotImplementedError) as error:
            raise RunError(f"{self.path / name} is damaged: {_first_line(error)}.") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip(".")


def _read_config(files: _Files) -> dict[str, dict[str, Any]]:
    path = files.path / "config.toml"
    content = files.bytes("config.toml")
    if content is None:
        raise RunError(f"{files.path} is not a run folder: it has no config.toml.")
    try:
        found = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {_first_line(error)}.") from error
    schema = found.pop("schema", None)
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise RunError(f"{path} is damaged: it does not say its schema.")
    if schema > SCHEMA:
        raise RunError(f"{files.path} has schema {schema}, and this version of coterie reads up to {SCHEMA}.")
    tables = {key: value for key, value in found.items() if isinstance(value, dict)}
    if "run" not in tables:
        raise RunError(f"{path} is damaged: it has no table [run].")
    return tables


def _read_rows(files: _Files) -> list[Any]:
    """The rounds so far; a last line that is still being written is left out."""
    content = files.bytes("rounds.jsonl")
    if content is None:
        return []
    rows = []
    for number, line in enumerate(content.rpartition(b"\n")[0].splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            where = f"{files.path / 'rounds.jsonl'} is damaged in line {number}"
            raise RunError(f"{where}: {_first_line(error)}.") from error
    return rows


def _object(found: Any, name: str, files: _Files) -> dict[str, Any] | None:
    if found is not None and not isinstance(found, dict):
        raise RunError(f"{files.path / name} is damaged: it is not an object.")
    return found


# ---- checking ----


def _assembled(
    name: str,
    state: State,
    path: Path | None,
    config: dict[str, dict[str, Any]],
    environment: dict[str, Any],
    summary: dict[str, Any] | None,
    rows: list[Any],
    parts: Mapping[str, Any],
    problems: list[str],
    where: str,
) -> RunData:
    rounds, curves, spread, sizes, repairs = _columns(rows, where)
    clients, manifest, labels = parts["clients"], parts["manifest"], parts["labels"]
    names = [str(item) for item in clients["name"].tolist()] if _is_flat(clients.get("name")) else _texts(manifest)
    count = len(names)
    scores, evaluated = _scores(clients, count)
    for kind, values in evaluated.items():  # runs of older versions have no spread in their rows
        _fill_spread(spread, kind, values, clients, rounds)
    groups = _ints(clients.get("group"), (count,))
    if not isinstance(labels, np.ndarray) or labels.ndim != 2 or labels.shape[1] != count or not _whole(labels):
        if isinstance(labels, np.ndarray) and count:
            problems.append(f"labels.npy has the shape {labels.shape}, and there are {count} clients.")
        labels = None
    sketch, sketched = parts["sketches"].get("sketch"), parts["sketches"].get("round")
    if not (_is_table(sketch, count) and _is_flat(sketched) and len(sketched) == count):
        sketch = sketched = None
    return RunData(
        name=name,
        state=state,
        path=path,
        config=config,
        environment=environment,
        summary=summary,
        rounds=rounds,
        curves=curves,
        spread=spread,
        sizes=sizes,
        repairs=repairs,
        names=names,
        labels=None if labels is None else labels.astype(np.int64),
        groups=groups,
        samples=_ints(clients.get("train_samples"), (count,)),
        scores=scores,
        counts=_label_counts(manifest, names),
        sketches=None if sketch is None else np.nan_to_num(sketch.astype(np.float64)),
        sketched=None if sketched is None else sketched.astype(np.int64),
        members=_members(parts["members"], count),
        method=_method(parts["method"]),
        failures=_records(parts["failures"]),
        unseen=_records(parts["unseen"]),
        choice=parts["choice"] if isinstance(parts["choice"], dict) else None,
        problems=problems,
    )


def _columns(
    rows: list[Any], where: str
) -> tuple[Ints, dict[str, Floats], dict[str, Floats], list[list[int]], list[dict[str, Any]]]:
    """The rows as columns, every number checked."""
    rounds: list[int] = []
    columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
    spread: dict[str, list[list[float]]] = {name: [] for name in ("accuracy", "f1", "loss")}
    sizes: list[list[int]] = []
    repairs: list[dict[str, Any]] = []
    for number, row in enumerate(rows, 1):
        try:
            if not isinstance(row, dict) or not _is_int(row.get("round")) or row["round"] < 1:
                raise ValueError("it does not say its round")
            if rounds and row["round"] <= rounds[-1]:
                raise ValueError(f"round {row['round']} comes after round {rounds[-1]}")
            rounds.append(row["round"])
            for name, keys in COLUMNS.items():
                columns[name].append(_number(row, keys))
            for name, values in spread.items():
                found = row.get("spread", {}).get(name)
                values.append(_five(found) if found is not None else [math.nan] * len(QUANTILES))
            found = row.get("cluster_sizes") or []
            if not isinstance(found, list) or not all(_is_int(size) and size >= 0 for size in found):
                raise ValueError(f"cluster_sizes is {str(found)[:40]!r}")
            sizes.append(found)
            for repair in _records(row.get("repairs")):
                repairs.append({"round": row["round"], "reason": str(repair.get("reason", ""))})
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise RunError(f"{where} is damaged in line {number}: {_first_line(error)}.") from error
    shape = (len(rows), len(QUANTILES))
    return (
        np.array(rounds, dtype=np.int64),
        {name: np.array(values, dtype=np.float64) for name, values in columns.items()},
        {name: np.array(values, dtype=np.float64).reshape(shape) for name, values in spread.items()},
        sizes,
        repairs,
    )


def _number(row: Mapping[str, Any], keys: tuple[str, ...]) -> float:
    """The number under these keys; NaN where it is not told or not finite."""
    found: Any = row
    for key in keys:
        if found is None:
            return math.nan
        if not isinstance(found, dict):
            raise ValueError(f"{'.'.join(keys)} is {str(found)[:40]!r}")
        found = found.get(key)
    if found is None:
        return math.nan
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise ValueError(f"{'.'.join(keys)} is {str(found)[:40]!r}")
    return float(found) if math.isfinite(found) else math.nan


def _five(found: Any) -> list[float]:
    if not isinstance(found, list) or len(found) != len(QUANTILES):
        raise ValueError(f"spread is {str(found)[:40]!r}")
    return [_number({"spread": value}, ("spread",)) for value in found]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53


def _is_flat(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.ndim == 1


def _is_table(array: Any, count: int) -> bool:
    return (
        isinstance(array, np.ndarray)
        and array.ndim == 2
        and len(array) == count
        and np.issubdtype(array.dtype, np.floating)
    )


def _whole(array: NDArray[Any]) -> bool:
    return bool(np.issubdtype(array.dtype, np.integer))


def _ints(array: Any, shape: tuple[int, ...]) -> Ints | None:
    if isinstance(array, np.ndarray) and array.shape == shape and _whole(array):
        return array.astype(np.int64)
    return None


def _texts(manifest: Mapping[str, Any]) -> list[str]:
    """The names of a run that has not written its clients yet."""
    found, unseen = manifest.get("clients"), manifest.get("unseen")
    held_out = set(map(str, unseen)) if isinstance(unseen, list) else set()
    return [str(name) for name in found if str(name) not in held_out] if isinstance(found, list) else []


def _scores(clients: Mapping[str, NDArray[Any]], count: int) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Scores of the last evaluation [N], and of all [E, N]; NaN for clients that were not scored."""
    samples = clients.get("samples")
    last: dict[str, Floats] = {}
    every: dict[str, Floats] = {}
    for name in ("accuracy", "f1", "loss"):
        values = clients.get(name)
        if not isinstance(values, np.ndarray) or values.ndim != 2 or values.shape[1] != count or not len(values):
            continue
        if not np.issubdtype(values.dtype, np.number):
            continue
        scored = values.astype(np.float64)
        if isinstance(samples, np.ndarray) and samples.shape == values.shape:
            scored = np.where(samples > 0, scored, np.nan)
        every[name] = np.where(np.isfinite(scored), scored, np.nan)
        last[name] = every[name][-1]
    return last, every


def _fill_spread(
    spread: dict[str, Floats], kind: str, values: Floats, clients: Mapping[str, NDArray[Any]], rounds: Ints
) -> None:
    when = clients.get("round")
    if not _is_flat(when) or when is None or len(when) != len(values):
        return
    place = {int(number): i for i, number in enumerate(rounds.tolist())}
    for number, scores in zip(when.tolist(), values, strict=True):
        i = place.get(int(number))
        if i is None or np.isfinite(spread[kind][i]).any() or not np.isfinite(scores).any():
            continue
        spread[kind][i] = quantiles({"samples": np.isfinite(scores), kind: scores})[kind]


def _label_counts(manifest: Mapping[str, Any], names: list[str]) -> Ints | None:
    """Training samples of each class at each client; clients that were held out are left out."""
    counts, everyone = manifest.get("label_counts"), manifest.get("clients")
    if not isinstance(counts, list) or not isinstance(everyone, list) or len(counts) != len(everyone):
        return None
    place = {str(name): i for i, name in enumerate(everyone)}
    try:
        table = np.array(counts, dtype=np.int64)
        rows = [place[name] for name in names]
    except (ValueError, TypeError, KeyError, OverflowError):
        return None
    return table[rows] if table.ndim == 2 and len(rows) else None


def _members(arrays: Mapping[str, NDArray[Any]], count: int) -> dict[str, NDArray[Any]]:
    """Pictures of members, if all of it fits together."""
    pictures = arrays.get("picture")
    rest = {name: arrays.get(name) for name in ("client", "cluster", "label")}
    if not isinstance(pictures, np.ndarray) or pictures.ndim != 4 or pictures.dtype != np.uint8:
        return {}
    if pictures.shape[3] not in (1, 3) or not len(pictures):
        return {}
    found = {name: _ints(values, (len(pictures),)) for name, values in rest.items()}
    client = found["client"]
    if client is None or any(values is None for values in found.values()) or client.min() < 0 or client.max() >= count:
        return {}
    return {"picture": pictures, **{name: values for name, values in found.items() if values is not None}}


def _method(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """What the method shows, if its shapes fit together: MD-ICFL's maps and pseudo samples."""
    told = arrays.get("told")
    if not isinstance(told, np.ndarray) or told.ndim != 4 or told.dtype.kind != "f" or not told.size:
        return {}
    clusters, others, classes, again = told.shape
    if clusters != others or classes != again:
        return {}
    found = {"told": np.nan_to_num(told.astype(np.float64))}
    witness, pseudo = arrays.get("witness"), arrays.get("pseudo")
    if isinstance(witness, np.ndarray) and witness.shape == (clusters, classes, classes) and witness.dtype.kind == "f":
        found["witness"] = np.nan_to_num(witness.astype(np.float64))
    if (
        isinstance(pseudo, np.ndarray)
        and pseudo.dtype == np.uint8
        and pseudo.ndim == 6
        and pseudo.shape[:2] == (clusters, classes)
        and pseudo.shape[5] in (1, 3)
        and pseudo.size
    ):
        found["pseudo"] = pseudo
    return found


def _records(found: Any) -> list[dict[str, Any]]:
    return [item for item in found if isinstance(item, dict)] if isinstance(found, Iterable) else []
