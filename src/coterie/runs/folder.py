"""Writing a run folder: settings, rows, arrays, checkpoints.

    runs/<name>/ config.toml · environment.json · rounds.jsonl · clients.npz · labels.npy · summary.json
                 checkpoint/round-000012/ (tensors.safetensors, state.json, digests.json) · artifacts/

Every file is written under a temporary name, synced and renamed. rounds.jsonl is appended to; on resume it is cut back
to the checkpoint. Two checkpoints are kept: if the last one is truncated or altered, the one before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors
import safetensors.torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.errors import CheckpointError, ConfigError, RunError, StorageError
from coterie.runs.files import SCHEMA, Files, birth_of, reason
from coterie.trust import write_whole

_KEPT = 2  # checkpoints
_PARTS = ("tensors.safetensors", "state.json")  # of a checkpoint
_MOST_HEADER = 16 << 20  # bytes of the names and shapes of its tensors


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to resume after a round."""

    round: int
    tensors: dict[str, Tensor]
    plain: dict[str, Any]


class RunFolder(Files):
    """One run on disk. Only one process at a time may write to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_new = False  # made by this process
        self._lock: IO[str] | None = None

    # ---- creating and opening ----

    @classmethod
    def create(cls, root: Path, name: str | None, default_name: str, config: Mapping[str, Any]) -> RunFolder:
        """Create a folder. A name must be free; a default name gets the next free number."""
        check_name(name)
        settings = to_toml({"schema": SCHEMA, **config})
        try:
            settings.encode()
        except UnicodeEncodeError as error:
            odd = settings[max(0, error.start - 20) : error.end]
            raise ConfigError(f"The settings have characters that are no text, in {odd!r}; write them anew.") from error
        for number in itertools.count(1):
            path = root / (name or (default_name if number == 1 else f"{default_name}-{number}"))
            try:
                root.mkdir(parents=True, exist_ok=True)
                path.mkdir()
                break
            except OSError as error:
                if _is_left_over(path):
                    break  # of a process that was killed before it wrote the settings
                if not root.is_dir() or not isinstance(error, FileExistsError):
                    where = path if root.is_dir() else root
                    raise StorageError(f"The folder {where} cannot be created: {reason(error)}.") from error
                if name is not None:
                    is_run = (path / "config.toml").exists()
                    resume = f"Resume it with 'coterie resume {path}', or choose" if is_run else "Choose"
                    kind = "already exists" if is_run else "exists and is not a run folder"
                    raise RunError(f"{path} {kind}. {resume} another --name.") from error
        folder = cls(path)
        folder.is_new = not (path / ".lock").exists()
        try:
            folder.lock()
            folder.is_new = True
            (path / "artifacts").mkdir(exist_ok=True)
            folder.write_text("config.toml", settings)
        except (OSError, RunError) as error:
            if not folder.is_new:  # another process has just begun to create it
                raise
            folder.discard()
            why = reason(error.__cause__ or error)
            raise StorageError(f"{path} cannot be written: {why}. Free some space, or choose another --out.") from error
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run; another folder, or one of a newer version, is an error."""
        folder = cls(path)
        folder.config()
        return folder

    def lock(self) -> None:
        """Reserve the folder for writing by this process."""
        try:
            import fcntl
        except ImportError:
            raise StorageError(f"{self.path} cannot be locked: coterie writes runs on Linux and macOS only.") from None
        handle = self._open_to_write(".lock")  # not truncated before it is locked: it says who holds it
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            handle.close()
            raise RunError(f"{self.path} is in use by another process.") from error
        # Readers see here who holds it. If they tried the lock, a run that is just starting could fail.
        with contextlib.suppress(OSError):
            handle.truncate(0)
            handle.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "born": birth_of(os.getpid())}))
            handle.flush()
        self._lock = handle

    def unlock(self) -> None:
        """Let other processes write."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._lock.truncate(0)
            self._lock.close()
            self._lock = None

    @contextlib.contextmanager
    def held(self) -> Iterator[RunFolder]:
        """Reserve the folder for writing within a `with` block."""
        if self._lock is None:
            self.lock()
        try:
            yield self
        finally:
            self.unlock()

    def discard(self) -> None:
        """Remove the folder if this process created it and no round is complete."""
        if self.is_new and not self.rows_bytes() and not self._saved_rounds():
            self.unlock()
            shutil.rmtree(self.path, ignore_errors=True)

    # ---- writing ----

    def _open_to_write(self, name: str, flags: int = 0) -> IO[str]:
        handle = self.open_regular(name, os.O_WRONLY | os.O_CREAT | flags)
        if handle is None:
            raise StorageError(f"{self.path / name} cannot be written: the folder does not exist.")
        return os.fdopen(handle, "w")

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one round to rounds.jsonl."""
        try:
            with self._open_to_write("rounds.jsonl", os.O_APPEND) as lines:
                lines.write(json.dumps(row) + "\n")
        except OSError as error:
            raise self._refused("rounds.jsonl", error) from error

    def rows_bytes(self) -> int:
        """Length of rounds.jsonl."""
        handle = self.open_regular("rounds.jsonl")
        if handle is None:
            return 0
        with os.fdopen(handle) as lines:
            return os.fstat(lines.fileno()).st_size

    def cut_rows(self, length: int) -> None:
        """Cut rounds.jsonl back to a checkpoint."""
        handle = self.open_regular("rounds.jsonl", os.O_RDWR)
        if self.rows_bytes() < length:
            raise RunError(f"{self.path / 'rounds.jsonl'} is shorter than the checkpoint says: lines were removed.")
        if handle is not None:
            with os.fdopen(handle, "r+b") as lines:
                try:
                    lines.truncate(length)
                except OSError as error:
                    raise self._refused("rounds.jsonl", error) from error

    def write_text(self, name: str, text: str) -> None:
        self._write_bytes(name, text.encode())

    def write_json(self, name: str, value: Any) -> None:
        self.write_text(name, json.dumps(value, indent=2) + "\n")

    def write_array(self, name: str, array: NDArray[Any]) -> None:
        np.save(buffer := io.BytesIO(), array, allow_pickle=False)
        self._write_bytes(name, buffer.getvalue())

    def write_arrays(self, name: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        np.savez_compressed(buffer := io.BytesIO(), **arrays)  # type: ignore[arg-type]
        self._write_bytes(name, buffer.getvalue())

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None = None) -> None:
        self._write_bytes(name, safetensors.torch.save(storable(tensors), dict(facts or {})))

    def tensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """The tensors of a file and its texts; None if it is missing."""
        try:
            if self._digest(name) is None:  # also looks at its header
                return None
            with safetensors.safe_open(self.place(name), framework="pt") as file:
                return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise RunError(f"{self.path / name} is damaged: {reason(error)}.") from error

    def _write_bytes(self, name: str, content: bytes) -> None:
        """Write a whole file, or leave the old one as it was."""
        path = self.place(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
        except OSError as error:
            raise self._refused(path.name, error) from error

    def _refused(self, what: str, error: Exception) -> StorageError:
        saved = self._saved_rounds()
        kept = f"The checkpoint of round {saved[-1]} is kept" if saved else "There is no checkpoint yet"
        return StorageError(
            f"{what} of {self.path} could not be written: {reason(error)}. {kept}. "
            f"Free some space and resume with 'coterie resume {self.path}'."
        )

    # ---- checkpoints ----

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then delete all but the last two."""
        home = self.place("checkpoint")
        final = home / _folder_name(checkpoint.round)
        temporary = home / f".{final.name}.tmp"
        try:
            home.mkdir(exist_ok=True)
            if self.rows_bytes():
                _sync(self.path / "rounds.jsonl")  # a power cut must not lose rows that the checkpoint counts
            _remove(temporary)
            temporary.mkdir()
            safetensors.torch.save_file(storable(checkpoint.tensors), temporary / "tensors.safetensors")
            state = {"schema": SCHEMA, **checkpoint.plain, "round": checkpoint.round}
            (temporary / "state.json").write_text(json.dumps(state))
            digests = {name: self._digest(f"checkpoint/{temporary.name}/{name}") for name in _PARTS}
            (temporary / "digests.json").write_text(json.dumps(digests))
            for name in (*digests, "digests.json"):
                _sync(temporary / name)
            _remove(final)
            os.replace(temporary, final)
            _sync(home)
        except (OSError, safetensors.SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise self._refused(f"The checkpoint of round {checkpoint.round}", error) from error
        # A later one is damaged: the run was resumed from an earlier one.
        saved = self._saved_rounds()
        kept = [round for round in saved if round <= checkpoint.round][-_KEPT:]
        for old in set(saved) - set(kept):
            shutil.rmtree(home / _folder_name(old), ignore_errors=True)

    def drop_checkpoints(self) -> None:
        """Remove the checkpoints of a finished run: its numbers stay, its models do not."""
        if (self.path / "summary.json").exists():
            shutil.rmtree(self.path / "checkpoint", ignore_errors=True)
            (self.path / "artifacts" / "personal.safetensors").unlink(missing_ok=True)

    def load_checkpoint(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest intact checkpoint, and a sentence about each damaged one."""
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
            problems.append("No intact checkpoint is left; the run starts again from the first round.")
        return None, problems

    def _read_checkpoint(self, round: int) -> Checkpoint:
        place = f"checkpoint/{_folder_name(round)}"
        path = self.path / place
        try:
            digests = self.read_object(f"{place}/digests.json") or {}
            for name in _PARTS:
                if self._digest(f"{place}/{name}") != digests.get(name):
                    raise CheckpointError(f"{path / name} is truncated or altered; this checkpoint is not used.")
            plain = self.read_object(f"{place}/state.json") or {}
            tensors = safetensors.torch.load_file(path / "tensors.safetensors")
        except CheckpointError:
            raise
        except (OSError, ValueError, RunError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{path} is damaged ({reason(error)}); this checkpoint is not used.") from error
        schema = plain.get("schema")
        if not isinstance(schema, int) or schema > SCHEMA:
            raise CheckpointError(f"{path} has schema {str(schema)[:20]}; this version reads up to {SCHEMA}.")
        return Checkpoint(round, tensors, plain)

    def _digest(self, name: str) -> str | None:
        """SHA-256 of a file; None if it is missing. The header of tensors is checked first."""
        handle = self.open_regular(name)
        if handle is None:
            return None
        with os.fdopen(handle, "rb") as content:
            if name.endswith(".safetensors"):
                size = int.from_bytes(content.read(8), "little")
                if size > _MOST_HEADER:
                    raise ValueError(f"it has a header of {size >> 20} MB")
                content.seek(0)
            return hashlib.file_digest(content, "sha256").hexdigest()

    def _saved_rounds(self) -> list[int]:
        """The rounds of the checkpoints; folders of other names are ignored."""
        home = self.place("checkpoint")
        found = (re.fullmatch(r"round-([0-9]{6,9})", path.name) for path in home.glob("round-*") if path.is_dir())
        rounds = sorted(int(match[1]) for match in found if match)
        return [round for round in rounds if not (home / _folder_name(round)).is_symlink()]


def check_name(name: str | None) -> None:
    """Raise ConfigError unless the name of a folder is one: no path that leads elsewhere."""
    if name is not None and (name in ("", ".", "..") or any(sign in name for sign in ("/", "\\", "\0"))):
        raise ConfigError(
            f"--name must be the name of a folder, without slashes; --out says where. Got {name!r} instead."
        )


def _is_left_over(path: Path) -> bool:
    """Whether a folder holds no more than `create` makes before the settings."""
    try:
        inside = {entry.name for entry in os.scandir(path)}
        is_started = ".lock" in inside and inside <= {".lock", "artifacts", ".config.toml.tmp"}
        return is_started and not any((path / "artifacts").glob("*"))
    except OSError:
        return False


def _folder_name(round: int) -> str:
    return f"round-{round:06d}"


def _remove(path: Path) -> None:
    """Remove a folder, or a file or link in its place."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, and each in memory of its own, as safetensors requires."""
    stored: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in taken or storage.nbytes() != plain.nbytes:
            plain = plain.clone()
        taken.add(plain.untyped_storage().data_ptr())
        stored[name] = plain
    return stored


def to_toml(values: Mapping[str, Any]) -> str:
    """A TOML document of values and tables.

    >>> print(to_toml({"schema": 1, "run": {"name": "a", "lr": 0.1, "shape": [1, 2]}}))
    schema = 1
    <BLANKLINE>
    [run]
    name = "a"
    lr = 0.1
    shape = [1, 2]
    <BLANKLINE>
    """
    lines = [f"{key} = {_toml_value(value)}" for key, value in values.items() if not isinstance(value, Mapping)]
    for key, table in values.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{key}]", *(f"{name} = {_toml_value(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, (bool, str)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return repr(value)
