"""The user's own file: `.npz` with `x` and `y`, and optionally `user`, `group`, `is_train`.

`x` is uint8 images [S, H, W], [S, H, W, 3] or [S, C, H, W], or numbers of any shape [S, ...]; `y` is
integer classes or float targets. One client per user; without users the samples are distributed evenly.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.data.dataset import Dataset, Preset, Source, register_source
from coterie.data.readers._arrays import UNREADABLE, check_archive
from coterie.data.readers._files import indexed
from coterie.errors import DataError
from coterie.randomness import Rng
from coterie.settings import setting

_COLUMNS = ("x", "y", "user", "is_train")


@register_source
@dataclass(frozen=True)
class NpzFile(Source):
    """One `.npz` file; nothing in it is unpickled."""

    key: ClassVar[str] = "npz"
    summary: ClassVar[str] = "your own .npz file: arrays x, y and optionally user, group, is_train"
    is_fixed: ClassVar[bool] = True

    path: str = setting("", "path of the .npz file")

    def load(self, clients: int | None, rng: Rng, data_dir: Path | None) -> Dataset:
        return read_npz(Path(self.path)).validate()


def preset_of_file(path: Path) -> Preset:
    """The preset of a file: by user if it has users, else evenly distributed."""
    with _open(path) as arrays:
        has_users = "user" in arrays.files
    return Preset(
        name=str(path),
        summary=NpzFile.summary,
        source="npz",
        scenario="by_user" if has_users else "iid",
        clients=None if has_users else 10,
        source_settings={"path": str(path)},
        model="mlp",
        work={"lr": 0.1, "epochs": 1, "batch_size": 20},
    )


def read_npz(path: Path, *, groups: tuple[str, ...] = ("group",)) -> Dataset:
    """Read a file; the true groups are the first of the columns `groups` that exists."""
    with _open(path) as arrays:
        columns = _read(arrays, _COLUMNS, path)
        group = next(iter(_read(arrays, groups, path).values()), None)
    x, mean, std = _samples(columns.pop("x"), path)
    y, num_classes = _labels(columns["y"], path)
    user, names = _users(columns.get("user"), path)
    return Dataset(
        path.stem,
        x,
        y,
        num_classes,
        is_train=_flags(columns.get("is_train"), path),
        user=user,
        user_names=names,
        group=_users(group, path)[0],
        mean=mean,
        std=std,
    )


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


def _samples(x: NDArray[Any], path: Path) -> tuple[torch.Tensor, float, float]:
    if x.ndim < 2:
        raise DataError(f"{path}: x must have shape [samples, ...] with at least two axes. Got {x.shape} instead.")
    if x.dtype == np.uint8:
        if x.ndim == 3:
            x = x[:, None]
        elif x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
            x = x.transpose(0, 3, 1, 2)
        return torch.from_numpy(np.ascontiguousarray(x)), 127.5, 127.5  # scaled to [-1, 1]
    if x.dtype.kind not in "fiub":
        raise DataError(f"{path}: x must contain numbers. Got {x.dtype} instead.")
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)), 0.0, 1.0


def _labels(y: NDArray[Any], path: Path) -> tuple[torch.Tensor, int]:
    if y.dtype.kind in "iub":
        if y.ndim != 1:
            raise DataError(f"{path}: y must have one class per sample. Got shape {y.shape} instead.")
        return torch.from_numpy(y.astype(np.int64)), int(y.max()) + 1 if len(y) else 1
    if y.dtype.kind == "f":
        if not y.ndim:
            raise DataError(f"{path}: y must have one target per sample. Got shape {y.shape} instead.")
        if not np.isfinite(y).all():
            raise DataError(f"{path}: y has NaN or infinite values; remove them before training.")
        return torch.from_numpy(y.astype(np.float32)), 0
    raise DataError(f"{path}: y must contain integer classes or float targets. Got {y.dtype} instead.")


def _users(column: NDArray[Any] | None, path: Path) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    if column is None:
        return None, ()
    if column.ndim != 1:
        raise DataError(f"{path}: user and group must have one entry per sample. Got shape {column.shape} instead.")
    index, names = indexed(column)
    for name in names:
        if any("\ud800" <= sign <= "\udfff" for sign in name):
            raise DataError(f"{path}: the name {name!r} has characters that are no text; save it in Unicode.")
    return index, names


def _flags(column: NDArray[Any] | None, path: Path) -> NDArray[np.bool_] | None:
    if column is None:
        return None
    if column.ndim != 1:
        raise DataError(f"{path}: is_train must have one entry per sample. Got shape {column.shape} instead.")
    if column.dtype.kind not in "biu":
        raise DataError(f"{path}: is_train must contain booleans. Got {column.dtype} instead.")
    return column.astype(bool)
