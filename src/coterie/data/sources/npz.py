"""The user's own file: `.npz` with `x` and `y`, and optionally `user`, `group` and `is_train` or `split`.

`x` is uint8 images [S, H, W], [S, H, W, 3] or [S, C, H, W], or numbers of any shape [S, ...]; `y` is
integer classes or float targets. One client per user; without users the samples are distributed evenly.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from coterie.data.dataset import Dataset, register_source
from coterie.data.readers._arrays import UNREADABLE, check_archive
from coterie.data.sources.files import FileSource, dataset_of, register_file
from coterie.errors import DataError

_COLUMNS = ("x", "y", "user", "is_train", "split")


@register_file
@register_source
@dataclass(frozen=True)
class NpzFile(FileSource):
    """One `.npz` file; nothing in it is unpickled."""

    key: ClassVar[str] = "npz"
    summary: ClassVar[str] = "your own .npz file: arrays x, y and optionally user, group, is_train or split"
    form: ClassVar[str] = ".npz files (arrays x and y)"

    @classmethod
    def takes(cls, path: Path) -> bool:
        return path.suffix == ".npz"

    def has_users(self) -> bool:
        with _open(Path(self.path)) as arrays:
            return "user" in arrays.files

    def read(self) -> Dataset:
        return read_npz(Path(self.path))


def read_npz(path: Path, *, groups: tuple[str, ...] = ("group",)) -> Dataset:
    """Read a file; the true groups are the first of the columns `groups` that exists."""
    with _open(path) as arrays:
        columns = _read(arrays, _COLUMNS, path)
        group = next(iter(_read(arrays, groups, path).values()), None)
    return dataset_of(columns, path, group)


def count_samples(path: Path) -> int:
    """The number of samples of a file, without reading x."""
    with _open(path) as arrays:
        return len(_read(arrays, ("y",), path)["y"])


def _read(arrays: Any, names: tuple[str, ...], path: Path) -> dict[str, NDArray[Any]]:
    """The named arrays that exist; a file must have x and y."""
    missing = [name for name in ("x", "y") if name not in arrays.files]
    if missing:
        found = ", ".join(arrays.files) or "nothing"
        raise DataError(f"{path} has no array '{missing[0]}' (found: {found}); save x and y with numpy.savez.")
    wanted = [name for name in names if name in arrays.files]
    try:
        with path.open("rb") as file:
            check_archive(file, names=wanted)
        return {name: arrays[name] for name in wanted}
    except UNREADABLE as error:
        raise DataError(f"{path} is damaged or contains Python objects: {error}.") from error


def _open(path: Path) -> Any:
    if not path.exists():
        raise DataError(f"There is no file {path}; check the path.")
    if not path.is_file() and not path.is_dir():  # reading a pipe would never end
        raise DataError(f"{path} is not a regular file; check the path.")
    try:
        with path.open("rb") as file:  # checked first: numpy leaves damaged archives open
            start = file.read(6)
            if not start.startswith((b"PK", b"\x93NUMPY")):
                raise zipfile.BadZipFile("it is another type of file")
            if start.startswith(b"PK") and not zipfile.is_zipfile(file):
                raise zipfile.BadZipFile("the archive is truncated")
        arrays = np.load(path, allow_pickle=False)
    except UNREADABLE as error:
        raise DataError(f"{path} is not a readable .npz file: {error}.") from error
    if not hasattr(arrays, "files"):
        raise DataError(f"{path} is a single array; save x and y together with numpy.savez.")
    return arrays
