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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import RunError
from coterie.runs.folder import SCHEMA

MOST_BYTES = 512 << 20  # of one file, packed or unpacked


class Files:
    """The files of one run folder."""

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
            raise RunError(f"{self.path / name} is damaged: {first_line(error)}.") from error

    def array(self, name: str) -> NDArray[Any] | None:
        """An .npy file."""
        content = self.bytes(name)
        if content is None:
            return None
        try:
            found: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
        except (ValueError, EOFError, OSError, MemoryError, SyntaxError) as error:
            raise RunError(f"{self.path / name} is damaged: {first_line(error)}.") from error
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
            raise RunError(f"{self.path / name} is damaged: {first_line(error)}.") from error


def first_line(error: BaseException) -> str:
    """What an error says, short enough for one sentence."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip(".")


def read_config(files: Files) -> dict[str, dict[str, Any]]:
    """The tables of config.toml; one of a newer version is refused."""
    path = files.path / "config.toml"
    content = files.bytes("config.toml")
    if content is None:
        raise RunError(f"{files.path} is not a run folder: it has no config.toml.")
    try:
        found = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {first_line(error)}.") from error
    schema = found.pop("schema", None)
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise RunError(f"{path} is damaged: it does not say its schema.")
    if schema > SCHEMA:
        raise RunError(f"{files.path} has schema {schema}, and this version of coterie reads up to {SCHEMA}.")
    tables = {key: value for key, value in found.items() if isinstance(value, dict)}
    if "run" not in tables:
        raise RunError(f"{path} is damaged: it has no table [run].")
    return tables


def read_rows(files: Files) -> list[Any]:
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
            raise RunError(f"{where}: {first_line(error)}.") from error
    return rows


def checked_object(found: Any, name: str, files: Files) -> dict[str, Any] | None:
    """What a JSON file holds, if that is an object."""
    if found is not None and not isinstance(found, dict):
        raise RunError(f"{files.path / name} is damaged: it is not an object.")
    return found
