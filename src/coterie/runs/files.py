"""The files of a run folder, read with care: each is refused by name when it is not what it should be.

Nothing is unpickled, links out of `within` are not followed, pipes are not waited for, and files beyond a sensible
size are not read.
"""

from __future__ import annotations

import io
import json
import os
import stat
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.errors import RunError

SCHEMA = 1
MOST_BYTES = 512 << 20  # of one file, packed or unpacked
T = TypeVar("T")


class Files:
    """The files of one run folder; what is not there is None."""

    def __init__(self, path: Path, within: Path | None = None) -> None:
        self.path = path
        self._within = None if within is None else within.resolve()

    def read_bytes(self, name: str) -> bytes | None:
        """The content of a file."""
        path = self.path / name
        try:
            if self._within is not None and not path.resolve().is_relative_to(self._within):
                raise RunError(f"{path} leads out of {self._within}; it is not followed.")
            # Without waiting, and looked at once it is open: a pipe of that name would be waited for without end.
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        except (FileNotFoundError, NotADirectoryError):
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

    def read_json(self, name: str) -> Any:
        """A JSON file."""
        return self._parsed(name, json.loads)

    def read_object(self, name: str) -> dict[str, Any] | None:
        """A JSON file that holds an object."""
        found = self.read_json(name)
        if found is not None and not isinstance(found, dict):
            raise RunError(f"{self.path / name} is damaged: it is not an object.")
        return found

    def array(self, name: str) -> NDArray[Any] | None:
        """An .npy file."""

        def parse(content: bytes) -> NDArray[Any]:
            found = np.load(io.BytesIO(content), allow_pickle=False)
            if not isinstance(found, np.ndarray):
                raise ValueError("it is not an array")
            return found

        return self._parsed(name, parse)

    def arrays(self, name: str) -> dict[str, NDArray[Any]] | None:
        """An .npz file."""

        def parse(content: bytes) -> dict[str, NDArray[Any]]:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                size = sum(item.file_size for item in archive.infolist())
            if size > MOST_BYTES:
                raise RunError(f"{self.path / name} unpacks to {size >> 20} MB; that much is not read.")
            with np.load(io.BytesIO(content), allow_pickle=False) as found:
                return {key: found[key] for key in found.files}

        return self._parsed(name, parse)

    def config(self) -> dict[str, Any]:
        """The settings of the run; those of a newer version are refused."""
        found = self._parsed("config.toml", lambda content: tomllib.loads(content.decode()))
        if found is None:
            raise RunError(f"{self.path} is not a run folder: it has no config.toml.")
        path, schema = self.path / "config.toml", found.get("schema")
        if not isinstance(schema, int) or isinstance(schema, bool):
            raise RunError(f"{path} is damaged: it does not say its schema.")
        if schema > SCHEMA:
            told = f"{self.path} has schema {schema}, and this version of coterie reads up to {SCHEMA}"
            raise RunError(f"{told}; use a newer coterie.")
        if not isinstance(found.get("run"), dict):
            raise RunError(f"{path} is damaged: it has no table [run].")
        return found

    def rows(self) -> list[dict[str, Any]]:
        """The rounds so far; a last line that is still being written is left out."""
        rows = []
        for number, line in enumerate((self.read_bytes("rounds.jsonl") or b"").rpartition(b"\n")[0].splitlines(), 1):
            rows.append(self._decoded("rounds.jsonl", line, json.loads, f" in line {number}"))
        return rows

    def summary(self) -> dict[str, Any] | None:
        """The result, None while there is none."""
        found = self.read_object("summary.json")
        if found is not None and not isinstance(found.get("rounds"), int):
            raise RunError(f"{self.path / 'summary.json'} is damaged: it does not say how many rounds there were.")
        return found

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
            raise RunError(f"{self.path / name} is damaged{where}: {first_line(error)}.") from error


def first_line(error: BaseException) -> str:
    """What an error says, short enough for one sentence."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip(".")
