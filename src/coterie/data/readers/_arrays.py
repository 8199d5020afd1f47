"""Arrays in files of numpy: headers are checked before anything is read, and nothing is unpickled."""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Collection
from typing import IO

# Raised by damaged files, and by numpy and zipfile for files that are something else.
UNREADABLE = (
    *(ValueError, TypeError, OSError, EOFError, LookupError, SyntaxError, RuntimeError, MemoryError, RecursionError),
    *(OverflowError, zipfile.BadZipFile, NotImplementedError, zlib.error, tokenize.TokenError),
)
_MOST_MEMBERS = 1000
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # others may take memory that their size does not tell


def check_header(stream: IO[bytes], size: int) -> None:
    """Raise ValueError unless a stream of `size` bytes is an array of numbers or text, all of it there."""
    from numpy.lib import format as npy

    version = npy.read_magic(stream)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
    shape, _, dtype = read(stream)
    if dtype.kind not in "biufU" or not dtype.itemsize:
        raise ValueError(f"it holds values of type {dtype}")
    announced, there = math.prod(shape) * dtype.itemsize, size - stream.tell()
    if announced != there or min(shape, default=0) < 0:
        raise ValueError(f"its header announces {announced} bytes and has {there}")


def check_archive(file: IO[bytes], most: int | None = None, names: Collection[str] | None = None) -> None:
    """Raise ValueError unless an .npz file holds arrays only, of at most `most` bytes; `names`: check only these."""
    with zipfile.ZipFile(file) as archive:
        members = [m for m in archive.infolist() if names is None or m.filename.removesuffix(".npy") in names]
        if len(members) > _MOST_MEMBERS:
            raise ValueError(f"it has {len(members)} arrays")
        size = sum(member.file_size for member in members)
        if most is not None and size > most:
            raise ValueError(f"it unpacks to {size >> 20} MB; the limit is {most >> 20} MB")
        for member in members:
            if member.compress_type not in _PACKED:
                raise ValueError(f"{member.filename[:40]!r} is packed in another way")
            with archive.open(member) as stream:
                try:
                    check_header(stream, member.file_size)
                except UNREADABLE as error:
                    raise ValueError(f"in {member.filename[:40]!r} {error}") from error
