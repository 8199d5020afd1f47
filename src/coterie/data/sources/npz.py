"""A user's own file: `.npz` with `x` and `y`, and optionally `user`, `group`, `is_train`.

`x` is uint8 images [S, H, W], [S, H, W, 3] or [S, C, H, W], or numbers of any shape [S, ...]; `y` is
integer classes or float targets. One client per user; without users the samples are dealt out evenly.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.data.dataset import Dataset, Preset, Source, register_source
from coterie.errors import DataError
from coterie.randomness import Rng
from coterie.settings import setting

_COLUMNS = ("x", "y", "user", "is_train")
_DAMAGED = (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error)


@register_source
@dataclass(frozen=True)
class NpzFile(Source):
    """One file of arrays."""

    key: ClassVar[str] = "npz"
    summary: ClassVar[str] = "a file of your own: arrays x, y and optionally user, group, is_train"

    path: str = setting("", "the file")

    def load(self, clients: int | None, rng: Rng, data_dir: Path | None) -> Dataset:
        """Read the file; nothing in it is unpickled."""
        return read_npz(Path(self.path)).validate()


def preset_of_file(path: Path) -> Preset:
    """The dataset a file makes: by user if it has users, else dealt out evenly."""
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
    """The samples of a file; `groups` names the columns of true groups, the first that is there counts."""
    with _open(path) as arrays:
        columns = _read(arrays, _COLUMNS, path)
        group = next(iter(_read(arrays, groups, path).values()), None)
    x, mean, std = _samples(columns.pop("x"), path)
    y, num_classes = _labels(columns["y"], path)
    user, names = _users(columns.get("user"))
    return Dataset(
        path.stem,
        x,
        y,
        num_classes,
        is_train=_flags(columns.get("is_train"), path),
        user=user,
        user_names=names,
        group=_users(group)[0],
        mean=mean,
        std=std,
    )


def count_samples(path: Path) -> int:
    """The number of samples of a file, without reading them."""
    with _open(path) as arrays:
        return len(_read(arrays, ("y",), path)["y"])


def _read(arrays: Any, names: tuple[str, ...], path: Path) -> dict[str, NDArray[Any]]:
    """Those of the named arrays that are there; a file must have x and y."""
    missing = [name for name in ("x", "y") if name not in arrays.files]
    if missing:
        found = ", ".join(arrays.files) or "nothing"
        raise DataError(f"{path} has no array '{missing[0]}' (found: {found}); it needs x and y.")
    try:
        return {name: arrays[name] for name in names if name in arrays.files}
    except _DAMAGED as error:
        raise DataError(f"{path} is damaged or holds Python objects: {error}.") from error


def _open(path: Path) -> Any:
    if not path.exists():
        raise DataError(f"There is no file {path}.")
    try:
        with path.open("rb") as file:  # numpy would leave a damaged archive open
            start = file.read(6)
            if not start.startswith((b"PK", b"\x93NUMPY")):
                raise zipfile.BadZipFile("it is of another kind")
            if start.startswith(b"PK") and not zipfile.is_zipfile(file):
                raise zipfile.BadZipFile("the archive is cut short")
        arrays = np.load(path, allow_pickle=False)
    except _DAMAGED as error:
        raise DataError(f"{path} is not a readable .npz file: {error}.") from error
    if not hasattr(arrays, "files"):
        raise DataError(f"{path} is a single array; save x and y together with numpy.savez.")
    return arrays


def _samples(x: NDArray[Any], path: Path) -> tuple[torch.Tensor, float, float]:
    if x.ndim < 2:
        raise DataError(f"{path}: x must have an axis of samples and at least one more. Got shape {x.shape}.")
    if x.dtype == np.uint8:
        if x.ndim == 3:
            x = x[:, None]
        elif x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
            x = x.transpose(0, 3, 1, 2)
        # Pixels go to [-1, 1].
        return torch.from_numpy(np.ascontiguousarray(x)), 127.5, 127.5
    if x.dtype.kind not in "fiub":
        raise DataError(f"{path}: x must hold numbers. Got {x.dtype} instead.")
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)), 0.0, 1.0


def _labels(y: NDArray[Any], path: Path) -> tuple[torch.Tensor, int]:
    if y.dtype.kind in "iub":
        if y.ndim != 1:
            raise DataError(f"{path}: classes must be one number a sample. Got shape {y.shape}.")
        return torch.from_numpy(y.astype(np.int64)), int(y.max()) + 1 if len(y) else 1
    if y.dtype.kind == "f":
        if not y.ndim:
            raise DataError(f"{path}: targets must have one entry a sample. Got shape {y.shape}.")
        if not np.isfinite(y).all():
            raise DataError(f"{path}: y has NaN or infinite values.")
        return torch.from_numpy(y.astype(np.float32)), 0
    raise DataError(f"{path}: y must hold integer classes or float targets. Got {y.dtype} instead.")


def _users(column: NDArray[Any] | None) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    if column is None:
        return None, ()
    names, index = np.unique(column, return_inverse=True)
    return index.reshape(-1).astype(np.int64), tuple(str(name) for name in names)


def _flags(column: NDArray[Any] | None, path: Path) -> NDArray[np.bool_] | None:
    if column is None:
        return None
    if column.dtype.kind not in "biu":
        raise DataError(f"{path}: is_train must hold true or false. Got {column.dtype} instead.")
    return column.astype(bool)
