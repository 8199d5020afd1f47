"""The run folder: create, append, checkpoint, resume, load.

    runs/<name>/ config.toml · environment.json · rounds.jsonl · clients.npz · labels.npy · summary.json
                 checkpoint/round-000012/ (tensors.safetensors, state.json, digests.json) · artifacts/

Every file is written to a temporary name, synced and renamed; rounds.jsonl is appended to and cut back to
the checkpoint on resume. Two checkpoints are kept; one that is cut short or altered is refused by name and
the one before it is used. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors
import safetensors.torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.errors import CheckpointError, RunError, StorageError
from coterie.runs.files import SCHEMA, Files

_KEPT = 2
_SILENT = 600.0  # seconds without a word after which a run on another machine counts as stopped


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on after a round."""

    round: int
    tensors: dict[str, Tensor]
    plain: dict[str, Any]


class RunFolder(Files):
    """One run on disk. Only one process at a time may write into it."""

    def __init__(self, path: Path, within: Path | None = None) -> None:
        super().__init__(path, within)
        self.is_new = False  # made by this process
        self._lock: IO[str] | None = None

    # ---- making and opening ----

    @classmethod
    def create(cls, root: Path, name: str | None, default_name: str, config: Mapping[str, Any]) -> RunFolder:
        """Make a new folder; a name that is taken is refused, a default name gets the next free number."""
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"The folder {root} cannot be made: {error.strerror}.") from error
        for number in range(1, 1_000_000):
            path = root / (name or (default_name if number == 1 else f"{default_name}-{number}"))
            try:
                path.mkdir()
                break
            except FileExistsError as error:
                if name is not None and not (path / "config.toml").exists():
                    raise RunError(f"{path} exists and is not a run folder; choose another --name.") from error
                if name is not None:
                    raise RunError(
                        f"The run folder {path} exists; go on with 'coterie resume {path}', or choose another --name."
                    ) from error
            except OSError as error:
                raise StorageError(f"The folder {path} cannot be made: {error.strerror}.") from error
        folder = cls(path)
        folder.is_new = True
        try:
            folder.lock()
            (path / "artifacts").mkdir()
            folder.write_text("config.toml", to_toml({"schema": SCHEMA, **config}))
        except OSError as error:
            folder.discard()
            reason = error.__cause__ if isinstance(error, StorageError) else error
            raise StorageError(f"The run folder {path} cannot be written: {_reason(reason)}.") from error
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run; a folder that is none, or from a newer version, is refused."""
        folder = cls(path)
        folder.config()
        return folder

    def lock(self) -> None:
        """Hold the folder for writing until this process ends."""
        try:
            import fcntl
        except ImportError:
            raise StorageError(
                f"{self.path} cannot be locked: run folders are written on Linux and macOS only."
            ) from None
        try:  # not cut short before it is locked: it says who holds it
            handle = os.fdopen(os.open(self.path / ".lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666), "w")
        except OSError as error:
            raise StorageError(f"{self.path} cannot be written: {_reason(error)}.") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            handle.close()
            raise RunError(f"{self.path} is in use by another process.") from error
        # Who holds it, for those who only look: trying the lock could make a run fail that is just starting.
        with contextlib.suppress(OSError):
            handle.truncate(0)
            handle.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "born": _born(os.getpid())}))
            handle.flush()
        self._lock = handle

    def is_held(self) -> bool:
        """Whether some process is at work in the folder; of one on another machine it is what its files suggest."""
        try:
            holder = self.read_json(".lock")
            host, pid, born = str(holder["host"]), int(holder["pid"]), holder["born"]
            if host == socket.gethostname():
                return bool(born is not None and born == _born(pid))
            return time.time() - max(p.stat().st_mtime for p in self.path.iterdir()) < _SILENT
        except (OSError, ValueError, KeyError, TypeError, RunError):
            return False

    def unlock(self) -> None:
        """Let others write."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._lock.truncate(0)
            self._lock.close()
            self._lock = None

    def discard(self) -> None:
        """Take a folder away that this process made and in which no round was done."""
        if self.is_new and not self.rows_bytes() and not self._saved_rounds():
            self.unlock()
            shutil.rmtree(self.path, ignore_errors=True)

    def read_arrays(self, name: str) -> dict[str, NDArray[Any]]:
        """The arrays of an .npz file; none if it is not there or damaged."""
        try:
            return self.arrays(name) or {}
        except RunError:
            return {}

    # ---- writing ----

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one round to rounds.jsonl."""
        try:
            with (self.path / "rounds.jsonl").open("a") as lines:
                lines.write(json.dumps(row) + "\n")
        except OSError as error:
            raise self._refused("rounds.jsonl", error) from error

    def rows_bytes(self) -> int:
        """Length of rounds.jsonl."""
        path = self.path / "rounds.jsonl"
        return path.stat().st_size if path.exists() else 0

    def cut_rows(self, length: int) -> None:
        """Cut rounds.jsonl back to a checkpoint."""
        path = self.path / "rounds.jsonl"
        if path.exists() or length:
            if self.rows_bytes() < length:
                raise RunError(f"{path} is shorter than the checkpoint says: lines were removed from it.")
            with path.open("r+b") as lines:
                lines.truncate(length)

    def write_text(self, name: str, text: str) -> None:
        """Write a whole file, or leave the old one as it was."""
        self._write_bytes(self.path / name, text.encode())

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file."""
        self.write_text(name, json.dumps(value, indent=2) + "\n")

    def write_array(self, name: str, array: NDArray[Any]) -> None:
        """Write an .npy file."""
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        self._write_bytes(self.path / name, buffer.getvalue())

    def write_arrays(self, name: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write an .npz file."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        self._write_bytes(self.path / name, buffer.getvalue())

    def _write_bytes(self, path: Path, content: bytes) -> None:
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise self._refused(path.name, error) from error

    def _refused(self, what: str, error: OSError) -> StorageError:
        last = self._saved_rounds()
        kept = f"the checkpoint of round {last[-1]} is kept" if last else "there is no checkpoint yet"
        return StorageError(
            f"{what} of {self.path} could not be written: {_reason(error)}; {kept}. "
            f"Make room and go on with 'coterie resume {self.path}'."
        )

    # ---- checkpoints ----

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint whole, then forget all but the last two."""
        home = self.path / "checkpoint"
        final = home / _folder_name(checkpoint.round)
        temporary = home / f".{final.name}.tmp"
        try:
            home.mkdir(exist_ok=True)
            if self.rows_bytes():
                _sync(self.path / "rounds.jsonl")  # a checkpoint must not know of rows that a power cut could take
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            safetensors.torch.save_file(_storable(checkpoint.tensors), temporary / "tensors.safetensors")
            state = {"schema": SCHEMA, "round": checkpoint.round, **checkpoint.plain}
            (temporary / "state.json").write_text(json.dumps(state))
            digests = {name: _digest(temporary / name) for name in ("tensors.safetensors", "state.json")}
            (temporary / "digests.json").write_text(json.dumps(digests))
            for name in (*digests, "digests.json"):
                _sync(temporary / name)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
            _sync(home)
        except (OSError, safetensors.SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            problem = error if isinstance(error, OSError) else OSError(str(error))
            raise self._refused(f"The checkpoint of round {checkpoint.round}", problem) from error
        # Later ones can only be damaged ones that this run has gone back behind.
        saved = self._saved_rounds()
        kept = [round for round in saved if round <= checkpoint.round][-_KEPT:]
        for old in set(saved) - set(kept):
            shutil.rmtree(home / _folder_name(old), ignore_errors=True)

    def load_checkpoint(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole, and a sentence about each one that is not."""
        problems: list[str] = []
        for round in reversed(self._saved_rounds()):
            try:
                found = self._read_checkpoint(round)
                if problems:
                    problems.append(f"The checkpoint of round {round} is used.")
                return found, problems
            except CheckpointError as error:
                problems.append(str(error))
        if problems:
            problems.append("No whole checkpoint is left; the run begins again with the first round.")
        return None, problems

    def _read_checkpoint(self, round: int) -> Checkpoint:
        path = self.path / "checkpoint" / _folder_name(round)
        try:
            digests = json.loads((path / "digests.json").read_text())
            for name in ("tensors.safetensors", "state.json"):
                if _digest(path / name) != digests[name]:
                    raise CheckpointError(f"{path / name} was cut short or altered; this checkpoint is not used.")
            plain = json.loads((path / "state.json").read_text())
            tensors = safetensors.torch.load_file(path / "tensors.safetensors")
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); this checkpoint is not used.") from error
        if plain["schema"] > SCHEMA:
            raise CheckpointError(f"{path} has schema {plain['schema']}; this version reads up to {SCHEMA}.")
        return Checkpoint(round, tensors, plain)

    def _saved_rounds(self) -> list[int]:
        home = self.path / "checkpoint"
        if not home.is_dir():
            return []
        return sorted(int(p.name.removeprefix("round-")) for p in home.glob("round-*") if p.is_dir())

    @contextlib.contextmanager
    def held(self) -> Iterator[RunFolder]:
        """Hold the folder for writing within a block."""
        if self._lock is None:
            self.lock()
        try:
            yield self
        finally:
            self.unlock()


def _folder_name(round: int) -> str:
    return f"round-{round:06d}"


def _born(pid: int) -> str | None:
    """When a process was started, so that a number that was given away again is not taken for it; None: it is gone."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        if stat.parent.parent.joinpath("self").exists():
            return stat.read_text().rpartition(")")[2].split()[19]
        os.kill(pid, 0)
    except PermissionError:
        return "alive"
    except (OSError, IndexError):
        return None
    return "alive"


def _reason(error: object) -> str:
    """What the system said, without number and path."""
    return str(getattr(error, "strerror", None) or error)


def _digest(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous, and no two of them in the same memory, as safetensors wants them."""
    made: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        place = plain.untyped_storage().data_ptr()
        if place in places or plain.untyped_storage().nbytes() != plain.numel() * plain.element_size():
            plain = plain.clone()
        places.add(plain.untyped_storage().data_ptr())
        made[name] = plain
    return made


def to_toml(values: Mapping[str, Any]) -> str:
    """A TOML document of plain values and tables of them.

    >>> print(to_toml({"schema": 1, "run": {"name": "a", "lr": 0.1, "shape": [1, 2]}}))
    schema = 1
    <BLANKLINE>
    [run]
    name = "a"
    lr = 0.1
    shape = [1, 2]
    <BLANKLINE>
    """
    plain = {k: v for k, v in values.items() if not isinstance(v, Mapping)}
    tables = {k: v for k, v in values.items() if isinstance(v, Mapping)}
    lines = [f"{key} = {_toml_value(value)}" for key, value in plain.items()]
    for key, table in tables.items():
        lines += ["", f"[{key}]"]
        lines += [f"{name} = {_toml_value(value)}" for name, value in table.items()]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return repr(value)
