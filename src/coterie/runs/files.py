"""Safe reading of the files of a run folder: a file that is not what it should be is an error that names it.

Nothing is unpickled. Links out of `within` are not followed, a pipe does not block, and huge files are not read.
"""

from __future__ import annotations

import io
import json
import os
import socket
import stat
import time
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coterie.errors import RunError

if TYPE_CHECKING:  # numpy is imported when an array is read
    from numpy.typing import NDArray

SCHEMA = 1
MOST_BYTES = 512 << 20  # of one file, packed or unpacked
_SILENT = 600.0  # seconds without a write after which a run on another machine counts as stopped
T = TypeVar("T")


class Files:
    """The files of one run folder; a missing file reads as None."""

    def __init__(self, path: Path, within: Path | None = None) -> None:
        self.path = path
        self._within = None if within is None else within.resolve()

    def read_bytes(self, name: str) -> bytes | None:
        path = self.path / name
        try:
            if self._within is not None and not path.resolve().is_relative_to(self._within):
                raise RunError(f"{path} is a link out of {self._within}; it is not followed.")
            # Opened without blocking, and checked once open: reading a pipe of that name would never end.
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, RuntimeError, ValueError) as error:
            raise RunError(f"{path} cannot be read: {reason(error)}.") from error
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            os.close(handle)
            raise RunError(f"{path} is not a regular file.")
        with os.fdopen(handle, "rb") as file:
            if found.st_size > MOST_BYTES:
                raise RunError(f"{path} has {found.st_size >> 20} MB; the limit is {MOST_BYTES >> 20} MB.")
            return file.read(MOST_BYTES)

    def read_json(self, name: str) -> Any:
        return self._parsed(name, json.loads)

    def read_object(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file."""
        found = self.read_json(name)
        if found is not None and not isinstance(found, dict):
            raise RunError(f"{self.path / name} is damaged: it is not an object.")
        return found

    def array(self, name: str) -> NDArray[Any] | None:
        import numpy as np

        return self._parsed(name, lambda content: np.load(io.BytesIO(content), allow_pickle=False))

    def arrays(self, name: str) -> dict[str, NDArray[Any]] | None:
        import numpy as np

        def parse(content: bytes) -> dict[str, NDArray[Any]]:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                size = sum(item.file_size for item in archive.infolist())
            if size > MOST_BYTES:
                raise RunError(f"{self.path / name} unpacks to {size >> 20} MB; the limit is {MOST_BYTES >> 20} MB.")
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
        return found

    def rows(self) -> list[dict[str, Any]]:
        """The rows of rounds.jsonl, without a last line that is still being written."""
        lines = (self.read_bytes("rounds.jsonl") or b"").rpartition(b"\n")[0].splitlines()
        return [self._decoded("rounds.jsonl", line, json.loads, f" in line {i}") for i, line in enumerate(lines, 1)]

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
        except (
            *(ValueError, EOFError, OSError, KeyError, MemoryError, SyntaxError, RecursionError),
            *(zipfile.BadZipFile, NotImplementedError),
        ) as error:
            raise RunError(f"{self.path / name} is damaged{where}: {reason(error)}.") from error


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
