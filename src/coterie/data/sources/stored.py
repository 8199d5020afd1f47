"""Base of the sources that are read from the data folder.

A source is read from `NAME.npz` (checked against `NAME.npz.sha256`, if present), else from a copy in its
published format; both give the same samples. Only `coterie data fetch NAME`, which writes `NAME.npz`, uses
the network.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.dataset import Dataset, Source
from coterie.data.home import data_folder
from coterie.data.readers._files import indexed, join
from coterie.data.sources.npz import read_npz
from coterie.data.values import GREY
from coterie.errors import DataError
from coterie.randomness import Rng

_LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601, as used by Pillow
_SLAB = 1 << 24  # pixels resized at a time, to avoid a float copy of everything


Pair = tuple[NDArray[np.uint8], NDArray[np.int64]]  # images and labels


class Found(NamedTuple):
    """The files of a source."""

    form: Literal["npz", "original"]
    path: Path  # the .npz, or the folder of the original files
    files: tuple[Path, ...]  # files or folders

    @property
    def size(self) -> int:
        """Bytes on disk."""
        inside = (file for path in self.files for file in (path.rglob("*") if path.is_dir() else [path]))
        return sum(file.stat().st_size for file in inside if file.is_file())


@dataclass(frozen=True)
class StoredSource(Source):
    """A source in the data folder; subclasses find and read its original format."""

    is_fixed: ClassVar[bool] = True
    is_public: ClassVar[bool] = True
    classes: ClassVar[int]
    original: ClassVar[str]  # describes the original files, for errors
    folders: ClassVar[tuple[str, ...]] = ()  # folders used by other tools, besides `key`
    groups: ClassVar[tuple[str, ...]] = ("group",)  # columns of the .npz that may contain the true groups

    @property
    def stem(self) -> str:
        """The NAME of NAME.npz."""
        return self.key

    @property
    def num_classes(self) -> int:
        """Classes of the whole dataset, even if a copy lacks some."""
        return self.classes

    @property
    def download_hint(self) -> str:
        """How to get the dataset, for errors."""
        return f"get it with 'coterie data fetch {self.stem}'"

    def load(self, clients: int | None, rng: Rng, data_dir: Path | None) -> Dataset:
        folder = data_folder(data_dir)
        found = self.find(folder)
        if found is None:
            raise DataError(self.absence(folder))
        if found.form == "npz":
            verify(found.path, self.stem)
            data = read_npz(found.path, groups=self.groups)
        else:
            data = self.read_original(found.path)
        return self._checked(self.complete(data, folder), found.path)

    def find(self, folder: Path) -> Found | None:
        """Find the data without reading it; None if it is not there."""
        packed = folder / f"{self.stem}.npz"
        if packed.is_file():
            return Found("npz", packed, (packed,))
        for name in (self.key, *self.folders, "."):
            files = self.original_files(folder / name)
            if files:
                return Found("original", folder / name, files)
        return None

    def absence(self, folder: Path) -> str:
        """The sentence about a folder that does not have the data."""
        return (
            f"There is no {self.stem} in {folder} (expected {self.stem}.npz or {self.original}); "
            f"{self.download_hint}, or choose another folder with --data-dir or COTERIE_DATA."
        )

    def original_files(self, folder: Path) -> tuple[Path, ...]:
        """The original files that exist in a folder. Any one is enough: `read_original` reports the missing ones."""
        raise NotImplementedError

    def read_original(self, folder: Path) -> Dataset:
        """Read the original files; raises DataError if one is missing or damaged."""
        raise NotImplementedError

    def complete(self, data: Dataset, folder: Path) -> Dataset:
        """Add what is stored beside the samples; applies to both formats."""
        return data

    def from_pairs(self, pairs: list[Pair]) -> Dataset:
        """The dataset of [(train images, labels), (test images, labels)]; empties the list to free memory."""
        images, labels = [x for x, _ in pairs], [y for _, y in pairs]
        pairs.clear()
        shape = images[0].shape[1:]
        if shape != images[1].shape[1:]:
            raise DataError(f"{self.stem} has train and test images of different sizes; download it again.")
        is_train = np.repeat([True, False], [len(y) for y in labels])
        return self.dataset(join(images, shape, np.uint8), np.concatenate(labels), is_train)

    def dataset(
        self,
        x: NDArray[np.uint8],
        y: NDArray[np.int64],
        is_train: NDArray[np.bool_] | None,
        users: NDArray[Any] | None = None,
    ) -> Dataset:
        """The dataset of arrays: x is [S, H, W] or [S, C, H, W], users [S] are names or numbers."""
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
            mean=GREY,
            std=GREY,
        )

    def _checked(self, data: Dataset, path: Path) -> Dataset:
        if data.x.dtype != torch.uint8 or data.x.ndim != 4:
            raise DataError(
                f"{path}: x must be uint8 images [S, H, W] or [S, H, W, 3]. "
                f"Got {str(data.x.dtype).removeprefix('torch.')} of shape {list(data.x.shape)} instead."
            )
        if not data.num_classes:
            raise DataError(f"{path}: y must contain integer classes. Got floats instead.")
        return dataclasses.replace(data, name=self.stem, num_classes=self.num_classes).validate()


def verify(path: Path, name: str) -> str | None:
    """Check a file against the checksum stored beside it; return the checksum, or None if there is none."""
    sidecar = checksum_path(path)
    if not sidecar.is_file():
        return None
    words = sidecar.read_text(encoding="utf-8", errors="replace").split()
    expected = words[0].lower() if words else ""
    if expected != checksum(path):
        raise DataError(
            f"{path} does not match the checksum in {sidecar.name}, so it is damaged or was changed; "
            f"run 'coterie data fetch {name} --force', or delete {sidecar.name} if you changed the file."
        )
    return expected


def checksum_path(path: Path) -> Path:
    """The file that stores the checksum of `path`."""
    return path.with_name(path.name + ".sha256")


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def existing(folder: Path, names: Sequence[str]) -> tuple[Path, ...]:
    """The named files and folders that exist in a folder."""
    return tuple(folder / name for name in names if (folder / name).exists())


def numbered(values: NDArray[Any]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Users as indices into their sorted names; numbers stored as text are sorted as numbers.

    >>> numbered(np.array(["10", "9", "10"]))
    (array([1, 0, 1]), ('9', '10'))
    """
    if values.dtype.kind == "U" and all(name.isascii() and name.isdigit() for name in np.unique(values)):
        values = values.astype(np.int64)
    return indexed(values)


def fixed_split(name: str, y: Tensor, share: float = 0.8) -> NDArray[np.bool_]:
    """Train flags [S] for a dataset without an official split: `share` of each class, for any seed."""
    is_train = np.zeros(len(y), dtype=bool)
    for label in y.unique().tolist():
        rows = np.flatnonzero(y.numpy() == label)
        order = Rng.seed(0).at(name, "split", label).permutation(len(rows)).numpy()
        is_train[rows[order[: math.ceil(share * len(rows))]]] = True
    return is_train


def resize(x: Tensor, size: int, *, grey: bool = False) -> Tensor:
    """Images uint8 [S, C, H, W] -> uint8 [S, C, size, size]; `grey` converts colours to luminance."""
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
