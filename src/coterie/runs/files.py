"""Safe reading of the files of a run folder: a file that is not what it should be is an error that names it.

The folder may come from somebody else. Nothing is unpickled. Links below the folder are refused, pipes and devices are
not opened, and the size and the headers of a file are checked before it is read.
"""

from __future__ import annotations

import functools
import io
import json
import operator
import os
import socket
import stat
import time
import tomllib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from coterie.data.readers._arrays import UNREADABLE, check_archive, check_header
from coterie.errors import RunError

if TYPE_CHECKING:  # numpy is imported when an array is read
    from numpy.typing import NDArray

SCHEMA = 1
MOST_BYTES = 512 << 20  # of one file, packed or unpacked
_MOST = {".toml": 1 << 20, ".json": 128 << 20, "summary.json": 16 << 20, "environment.json": 16 << 20}
_MOST_MEMORY = 512 << 20  # of parsed JSON
_MOST_LINE = 16 << 20  # bytes of a line of rounds.jsonl
_WEIGHTS = {b"[": 64, b"{": 232, b'"': 30, b",": 40}  # bytes of memory that Python takes for what begins or ends there
_SILENT = 600.0  # seconds without a write after which a run on another machine counts as stopped
T = TypeVar("T")


class Files:
    """The files of one run folder; a missing file reads as None."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def place(self, name: str) -> Path:
        """The path of a file or folder of the run. A link there, or on the way below the run folder, is refused."""
        path = self.path
        for part in PurePosixPath(name).parts:
            path = path / part
            try:
                if stat.S_ISLNK(path.lstat().st_mode):
                    raise RunError(f"{path} is a link; in a run folder links are not followed. Remove it.")
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, ValueError) as error:
                raise RunError(f"{path} cannot be read: {reason(error)}.") from error
        return path

    def open_regular(self, name: str, flags: int = os.O_RDONLY) -> int | None:
        """A descriptor of a regular file of the run; None if it does not exist."""
        path = self.place(name)
        try:
            if path.exists() and not path.is_file():  # opening a device may do something
                raise RunError(f"{path} is not a regular file.")
            # Without blocking, and checked once open: reading a pipe of that name would never end.
            more = (getattr(os, flag, 0) for flag in ("O_NONBLOCK", "O_NOFOLLOW", "O_BINARY", "O_CLOEXEC"))
            handle = os.open(path, functools.reduce(operator.or_, more, flags), 0o666)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be opened: {reason(error)}.") from error
        found = os.fstat(handle)
        if stat.S_ISREG(found.st_mode) and (found.st_nlink == 1 or not flags & (os.O_WRONLY | os.O_RDWR)):
            return handle
        os.close(handle)
        if not stat.S_ISREG(found.st_mode):
            raise RunError(f"{path} is not a regular file.")
        # Writing to it would also change a file elsewhere.
        raise RunError(f"{path} has another name (a hard link); copy the run folder and use the copy.")

    def read_bytes(self, name: str) -> bytes | None:
        handle = self.open_regular(name)
        if handle is None:
            return None
        path = PurePosixPath(name)
        most = min(MOST_BYTES, _MOST.get(path.name, _MOST.get(path.suffix, MOST_BYTES)))
        with os.fdopen(handle, "rb") as file:
            size = os.fstat(handle).st_size
            if size > most:
                raise RunError(f"{self.path / name} has {size >> 20} MB; the limit is {most >> 20} MB.")
            return file.read(size)

    def read_json(self, name: str) -> Any:
        return self._parsed(name, _json)

    def read_object(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file."""
        found = self.read_json(name)
        if found is not None and not isinstance(found, dict):
            raise RunError(f"{self.path / name} is damaged: it is not an object.")
        return found

    def array(self, name: str) -> NDArray[Any] | None:
        import numpy as np

        def parse(content: bytes) -> NDArray[Any]:
            check_header(io.BytesIO(content), len(content))
            found: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
            return found

        return self._parsed(name, parse)

    def arrays(self, name: str) -> dict[str, NDArray[Any]] | None:
        import numpy as np

        def parse(content: bytes) -> dict[str, NDArray[Any]]:
            check_archive(io.BytesIO(content), MOST_BYTES)
            with np.load(io.BytesIO(content), allow_pickle=False) as found:
                return {key: found[key] for key in found.files}

        return self._parsed(name, parse)

    def config(self) -> dict[str, Any]:
        """The settings of the run; a newer schema is an error."""
        found = self._parsed("config.toml", lambda content: tomllib.loads(content.decode()))
        if found is None:
            raise RunError(f"{self.path} is not a run folder: it has no config.toml.")
        path, schema = self.path / "config.toml", found.get("schema")
        if not isinstance(schema, int) or isinstance(schema, bool):
            raise RunError(f"{path} is damaged: it has no schema number.")
        if schema > SCHEMA:
            raise RunError(f"{self.path} has schema {schema}; this coterie reads up to {SCHEMA}. Use a newer coterie.")
        if not isinstance(found.get("run"), dict):
            raise RunError(f"{path} is damaged: it has no table [run].")
        for name, table in found.items():
            if name != "schema" and not isinstance(table, dict):
                raise RunError(f"{path} is damaged: {reason(ValueError(name))} is not a table.")
        return found

    def rows(self) -> list[dict[str, Any]]:
        """The rows of rounds.jsonl, without a last line that is still being written."""
        content = (self.read_bytes("rounds.jsonl") or b"").rpartition(b"\n")[0]
        self._decoded("rounds.jsonl", content, _check_weight)
        lines = content.splitlines()
        return [self._decoded("rounds.jsonl", line, _row, f" in line {i}") for i, line in enumerate(lines, 1)]

    def summary(self) -> dict[str, Any] | None:
        """The result; None while the run is not finished."""
        found = self.read_object("summary.json")
        if found is not None and not isinstance(found.get("rounds"), int):
            raise RunError(f"{self.path / 'summary.json'} is damaged: it has no number of rounds.")
        return found

    def is_held(self) -> bool:
        """Whether a process is writing to the folder; for one on another machine, whether files changed recently."""
        try:
            holder = self.read_json(".lock")
            host, pid, born = str(holder["host"]), int(holder["pid"]), holder["born"]
            if host == socket.gethostname():
                return bool(born is not None and born == birth_of(pid))
            return time.time() - max(p.stat().st_mtime for p in self.path.iterdir()) < _SILENT
        except (OSError, ValueError, KeyError, TypeError, RunError):
            return False

    def _parsed(self, name: str, parse: Callable[[bytes], T]) -> T | None:
        content = self.read_bytes(name)
        return None if content is None else self._decoded(name, content, parse)

    def _decoded(self, name: str, content: bytes, parse: Callable[[bytes], T], where: str = "") -> T:
        try:
            return parse(content)
        except UNREADABLE as error:
            raise RunError(f"{self.path / name} is damaged{where}: {reason(error)}.") from error


def _json(content: bytes) -> Any:
    _check_weight(content)
    return json.loads(content)


def _row(line: bytes) -> Any:
    if len(line) > _MOST_LINE:
        raise ValueError(f"it has {len(line) >> 20} MB; the limit is {_MOST_LINE >> 20} MB")
    return json.loads(line)


def _check_weight(content: bytes) -> None:
    """Raise ValueError if JSON would take too much memory: thirty times its size, if it is all brackets."""
    memory = len(content) + sum(weight * content.count(mark) for mark, weight in _WEIGHTS.items())
    if memory > _MOST_MEMORY:
        raise ValueError(f"it would take {memory >> 20} MB of memory; the limit is {_MOST_MEMORY >> 20} MB")


def reason(error: BaseException) -> str:
    """The first line of an error message, without number and path, short enough for a sentence."""
    text = str(getattr(error, "strerror", None) or error)
    return (text.splitlines() or [type(error).__name__])[0][:200].rstrip(".")


def birth_of(pid: int) -> str | None:
    """When a process started, which tells it from a later one with the same number; None: it is gone."""
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
