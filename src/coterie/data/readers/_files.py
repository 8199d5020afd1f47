"""Helpers of the readers: compressed files, errors and columns."""

from __future__ import annotations

import bz2
import gzip
import zlib
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from coterie.errors import DataError

_SLAB = 1 << 20
_AGAIN = "download or copy it again"

# Raised by damaged compressed files.
DAMAGED = (OSError, EOFError, zlib.error)


def must_exist(path: Path, what: str) -> Path:
    """Raise DataError unless the path is a file."""
    if not path.exists():
        raise DataError(f"There is no {what} at {path}; put it there or give its path.")
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "no regular file"
        raise DataError(f"{path} is {kind}, not a {what}; give the path of the file in it.")
    return path


def damaged(path: Path | str, why: object) -> DataError:
    """The error of an unreadable file."""
    return DataError(f"{path} is truncated or damaged ({why}); {_AGAIN}.")


def invalid(path: Path | str, why: object, way_out: str = _AGAIN) -> DataError:
    """The error of a file with unexpected content."""
    return DataError(f"{path} {why}; {way_out}.")


def open_compressed(path: Path) -> IO[bytes]:
    """Open a plain, gzip or bzip2 file, recognized by its first bytes because file names are unreliable."""
    with path.open("rb") as stream:
        start = stream.read(3)
    if start[:2] == b"\x1f\x8b":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if start == b"BZh":
        return bz2.open(path, "rb")
    return path.open("rb")


def read_up_to(stream: IO[bytes], size: int) -> bytearray:
    """At most `size` bytes, read in pieces: a damaged header may ask for more than fits in memory."""
    found = bytearray()
    while len(found) < size:
        slab = stream.read(min(_SLAB, size - len(found)))
        if not slab:
            break
        found += slab
    return found


def join(parts: list[NDArray[Any]], shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """Concatenate and empty the list; parts are freed as they are copied, so memory never holds two copies."""
    whole = np.empty((sum(len(part) for part in parts), *shape), dtype)
    stop = len(whole)
    while parts:
        part = parts.pop()
        whole[stop - len(part) : stop] = part
        stop -= len(part)
    return whole


def check_classes(y: NDArray[np.int64], num_classes: int, path: Path | str) -> None:
    """Raise DataError unless all labels are in 0 ... num_classes - 1."""
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
        odd = int(y[(y < 0) | (y >= num_classes)][0])
        raise invalid(path, f"has the label {odd}, which is not one of the {num_classes} classes")


def indexed(values: NDArray[Any]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Each value as an index into the sorted names: [S] -> int64 [S] and the names."""
    names, index = np.unique(values, return_inverse=True)
    return index.reshape(-1).astype(np.int64), tuple(str(name) for name in names)
