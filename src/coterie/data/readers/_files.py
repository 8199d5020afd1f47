"""What the readers share: opening files that may be compressed, and saying what is wrong with them."""

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

# What a damaged compressed file raises.
DAMAGED = (OSError, EOFError, zlib.error)


def must_exist(path: Path, what: str) -> Path:
    """Refuse a path where there is no file."""
    if not path.exists():
        raise DataError(f"There is no {what} at {path}; put it there or give the path where it is.")
    if path.is_dir():
        raise DataError(f"{path} is a folder, not {what}; give the path of the file in it.")
    return path


def damaged(path: Path | str, why: object) -> DataError:
    """The error of a file that cannot be read to its end."""
    return DataError(f"{path} is cut short or damaged ({why}); {_AGAIN}.")


def wrong(path: Path | str, why: object, way_out: str = _AGAIN) -> DataError:
    """The error of a file that is not what it should be."""
    return DataError(f"{path} {why}; {way_out}.")


def open_compressed(path: Path) -> IO[bytes]:
    """A plain, gzip or bzip2 file, told apart by its first bytes: names are often changed on the way."""
    with path.open("rb") as stream:
        start = stream.read(3)
    if start[:2] == b"\x1f\x8b":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if start == b"BZh":
        return bz2.open(path, "rb")
    return path.open("rb")


def read_up_to(stream: IO[bytes], size: int) -> bytearray:
    """At most `size` bytes, taken in slabs: a damaged header may ask for more than there is memory."""
    found = bytearray()
    while len(found) < size:
        slab = stream.read(min(_SLAB, size - len(found)))
        if not slab:
            break
        found += slab
    return found


def join(parts: list[NDArray[Any]], shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """Concatenate, letting each part go as it is copied: the peak is one copy, not two."""
    whole = np.empty((sum(len(part) for part in parts), *shape), dtype)
    stop = len(whole)
    while parts:
        part = parts.pop()
        whole[stop - len(part) : stop] = part
        stop -= len(part)
    return whole


def check_classes(y: NDArray[np.int64], num_classes: int, path: Path | str) -> None:
    """Refuse labels that are not classes 0 ... num_classes - 1."""
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
        odd = int(y[(y < 0) | (y >= num_classes)][0])
        raise wrong(path, f"has the label {odd}, which is not one of the {num_classes} classes")
