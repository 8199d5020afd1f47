"""What the stored sources share: the data folder, and the ways in that give the same samples.

A source is read from `NAME.npz` in the data folder (see `npz`; checked against `NAME.npz.sha256` where that
is there), else from a copy in the form its authors gave it out. Nothing here ever touches the network:
`coterie data fetch NAME` does, and leaves a `NAME.npz`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.dataset import Dataset, Source
from coterie.data.sources.npz import read_npz
from coterie.errors import DataError
from coterie.randomness import Rng

_GREY = 127.5  # pixels 0 ... 255 are given to networks as -1 ... 1
_LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow turns colour into grey
_SLAB = 1 << 24  # pixels brought to another size at a time: never a float copy of all


def data_folder(data_dir: Path | None = None) -> Path:
    """Where stored data lies: the folder given, else COTERIE_DATA, else ~/.cache/coterie."""
    named = data_dir or os.environ.get("COTERIE_DATA") or "~/.cache/coterie"
    return Path(named).expanduser()


class Found(NamedTuple):
    """A source's data as it lies on the disk."""

    form: Literal["npz", "original"]
    path: Path  # the .npz, or the folder that the original's files are in
    files: tuple[Path, ...]  # files, or whole folders of them

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        inside = (file for path in self.files for file in (path.rglob("*") if path.is_dir() else [path]))
        return sum(file.stat().st_size for file in inside if file.is_file())


@dataclass(frozen=True)
class StoredSource(Source):
    """Base of the sources that are read from the data folder.

    A source says where its original form may lie (`original_files`) and reads it (`read_original`).
    """

    classes: ClassVar[int]
    wanted: ClassVar[str]  # the original form in words, for the message
    places: ClassVar[tuple[str, ...]] = ()  # folders where other tools leave it, besides the one of its own name
    groups: ClassVar[tuple[str, ...]] = ("group",)  # columns of the .npz that may hold the true groups

    @property
    def stem(self) -> str:
        """The NAME of NAME.npz."""
        return self.key

    @property
    def num_classes(self) -> int:
        """Classes of the whole dataset, also where a copy lacks some."""
        return self.classes

    @property
    def way_out(self) -> str:
        """What to do where nothing was found."""
        return f"get it with 'coterie data fetch {self.stem}'"

    def load(self, clients: int | None, rng: Rng, data_dir: Path | None) -> Dataset:
        """Read the samples from the data folder."""
        folder = data_folder(data_dir)
        found = self.find(folder)
        if found is None:
            raise DataError(
                f"There is no {self.stem} in {folder}, where {self.stem}.npz or {self.wanted} was looked for; "
                f"{self.way_out}, or name another folder with --data-dir or COTERIE_DATA."
            )
        if found.form == "npz":
            verify(found.path, self.stem)
            data = read_npz(found.path, groups=self.groups)
        else:
            data = self.read_original(found.path)
        return self._finished(self.completed(data, folder), found.path)

    def find(self, folder: Path) -> Found | None:
        """Where the data lies and in which form, without reading it."""
        packed = folder / f"{self.stem}.npz"
        if packed.is_file():
            return Found("npz", packed, (packed,))
        for place in (self.key, *self.places, "."):
            files = self.original_files(folder / place)
            if files:
                return Found("original", folder / place, files)
        return None

    def original_files(self, place: Path) -> tuple[Path, ...]:
        """Those of the original's files that are in a folder; none: it is not there."""
        raise NotImplementedError

    def read_original(self, place: Path) -> Dataset:
        """The samples of the original form; a file that is missing or damaged is refused."""
        raise NotImplementedError

    def completed(self, data: Dataset, folder: Path) -> Dataset:
        """Add what lies beside the samples; the same for both forms."""
        return data

    def made(
        self,
        x: NDArray[np.uint8],
        y: NDArray[np.int64],
        is_train: NDArray[np.bool_] | None,
        users: NDArray[Any] | None = None,
    ) -> Dataset:
        """A dataset of arrays: x is [S, H, W] or [S, C, H, W], users one name or number a sample."""
        images = torch.from_numpy(x[:, None] if x.ndim == 3 else x)
        user, names = (None, ()) if users is None else numbered(users)
        return Dataset(
            self.stem,
            images,
            torch.from_numpy(y),
            self.num_classes,
            is_train=is_train,
            user=user,
            user_names=names,
            mean=_GREY,
            std=_GREY,
        )

    def _finished(self, data: Dataset, path: Path) -> Dataset:
        if data.x.dtype != torch.uint8 or data.x.ndim != 4:
            raise DataError(
                f"{path}: x must be uint8 pictures [S, H, W] or [S, H, W, 3]. "
                f"Got {str(data.x.dtype).removeprefix('torch.')} of shape {list(data.x.shape)} instead."
            )
        if not data.num_classes:
            raise DataError(f"{path}: y must hold integer classes. Got numbers with a point instead.")
        return dataclasses.replace(data, name=self.stem, num_classes=self.num_classes).validate()


def verify(path: Path, name: str) -> str | None:
    """Check a file against the checksum beside it; returns the checksum, None where there is none."""
    sidecar = checksum_path(path)
    if not sidecar.is_file():
        return None
    words = sidecar.read_text(encoding="utf-8", errors="replace").split()
    expected = words[0].lower() if words else ""
    if expected != checksum(path):
        raise DataError(
            f"{path} does not have the checksum in {sidecar.name}, so it is damaged or was changed; "
            f"get it again with 'coterie data fetch {name} --force', or delete {sidecar.name} if the change is yours."
        )
    return expected


def checksum_path(path: Path) -> Path:
    """The file that the checksum of `path` is kept in."""
    return path.with_name(path.name + ".sha256")


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def present(place: Path, names: Sequence[str]) -> tuple[Path, ...]:
    """Those of the named files and folders that are in a folder."""
    return tuple(place / name for name in names if (place / name).exists())


def numbered(values: NDArray[Any]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Users as indices into their sorted names; numbers written as text are sorted as numbers.

    >>> numbered(np.array(["10", "9", "10"]))
    (array([1, 0, 1]), ('9', '10'))
    """
    if values.dtype.kind == "U" and all(name.isascii() and name.isdigit() for name in np.unique(values)):
        values = values.astype(np.int64)
    names, index = np.unique(values, return_inverse=True)
    return index.reshape(-1).astype(np.int64), tuple(str(name) for name in names)


def own_split(name: str, y: Tensor, share: float = 0.8) -> NDArray[np.bool_]:
    """Train flags [S] for data that was given out without a split: `share` of each class, whatever the seed."""
    is_train = np.zeros(len(y), dtype=bool)
    for label in y.unique().tolist():
        rows = np.flatnonzero(y.numpy() == label)
        order = Rng.seed(0).at(name, "split", label).permutation(len(rows)).numpy()
        is_train[rows[order[: math.ceil(share * len(rows))]]] = True
    return is_train


def resized(x: Tensor, size: int, *, grey: bool = False) -> Tensor:
    """Pictures uint8 [S, C, H, W] -> uint8 [S, C, size, size], by slabs; `grey` makes C one, by luminance."""
    channels, height, width = x.shape[1:]
    to_grey = grey and channels == 3
    if (height, width) == (size, size) and not to_grey:
        return x
    out = torch.empty(len(x), 1 if to_grey else channels, size, size, dtype=torch.uint8)
    weights = torch.tensor(_LUMINANCE).reshape(1, 3, 1, 1)
    step = max(1, _SLAB // (channels * max(height * width, size * size)))
    for start in range(0, len(x), step):
        slab = x[start : start + step].float()  # [s, C, H, W]
        if to_grey:
            slab = (slab * weights).sum(1, keepdim=True)
        if (height, width) != (size, size):
            slab = torch.nn.functional.interpolate(slab, (size, size), mode="bilinear", antialias=True)
        out[start : start + step] = slab.round_().clamp_(0, 255).to(torch.uint8)
    return out
