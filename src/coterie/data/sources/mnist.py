"""MNIST (LeCun et al., 1998) and Fashion-MNIST (Xiao et al., 2017): 70,000 grey images, 28x28, in idx files.

MNIST's writers and their NIST series come from QMNIST's label files (Yadav and Bottou, 2019), whose rows are in
MNIST's order. The two series are two true groups of people: Census employees and high-school students.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from coterie.data.dataset import Dataset, register_source
from coterie.data.groups import words_of_groups
from coterie.data.readers.idx import read_pair, read_qmnist_labels
from coterie.data.sources.stored import StoredSource, existing, numbered
from coterie.errors import DataError

_IMAGES = {"train": "train-images-idx3-ubyte", "test": "t10k-images-idx3-ubyte"}
_LABELS = {"train": "train-labels-idx1-ubyte", "test": "t10k-labels-idx1-ubyte"}
_WRITERS = {"train": "qmnist-train-labels-idx2-int", "test": "qmnist-test-labels-idx2-int"}
_WRITER_FOLDERS = ("mnist", "MNIST/raw", "qmnist", "QMNIST/raw", ".")
_SERIES, _WRITER = 1, 2  # columns of QMNIST's labels


@dataclass(frozen=True)
class IdxSource(StoredSource):
    """Images and labels in four idx files."""

    classes: ClassVar[int] = 10
    transposed: ClassVar[bool] = False

    def idx_names(self, part: str) -> tuple[str, str]:
        """Names of the image and label files of 'train' or 'test'."""
        return _IMAGES[part], _LABELS[part]

    def original_files(self, folder: Path) -> tuple[Path, ...]:
        names = (name for part in ("train", "test") for name in self.idx_names(part))
        return existing(folder, [spelling for name in names for spelling in spellings(name)])

    def read_original(self, folder: Path) -> Dataset:
        pairs = []
        for part in ("train", "test"):
            images, labels = (_find_file(folder, name) for name in self.idx_names(part))
            pairs.append(read_pair(images, labels, transposed=self.transposed))
        return self.from_pairs(pairs)


def spellings(name: str) -> tuple[str, ...]:
    """The names under which one idx file is distributed.

    >>> spellings("t10k-labels-idx1-ubyte")[:3]
    ('t10k-labels-idx1-ubyte', 't10k-labels-idx1-ubyte.gz', 't10k-labels.idx1-ubyte')
    """
    dotted = ".idx".join(name.rsplit("-idx", 1))
    return name, f"{name}.gz", dotted, f"{dotted}.gz"


def _find_file(folder: Path, name: str) -> Path:
    """The file under any of its spellings; if there is none, its plain name, which the reader reports as missing."""
    return next(iter(existing(folder, spellings(name))), folder / name)


def _is_fashion(folder: Path) -> bool:
    """Whether a folder is named after Fashion-MNIST, whose files have the same names as MNIST's."""
    names = (name.lower().replace("-", "").replace("_", "") for name in folder.resolve().parts[-2:])
    return any(name in ("fashionmnist", "fashion") for name in names)


@register_source
@dataclass(frozen=True)
class Mnist(IdxSource):
    """Handwritten digits, with writers if QMNIST's labels are available."""

    key: ClassVar[str] = "mnist"
    summary: ClassVar[str] = "70,000 handwritten digits, 28x28; with writers if QMNIST's labels are available"
    original: ClassVar[str] = "its idx files (train-images-idx3-ubyte.gz ...)"
    folders: ClassVar[tuple[str, ...]] = ("MNIST/raw",)
    groups: ClassVar[tuple[str, ...]] = ("group", "population")

    def original_files(self, folder: Path) -> tuple[Path, ...]:
        return () if _is_fashion(folder) else super().original_files(folder)

    def complete(self, data: Dataset, folder: Path) -> Dataset:
        """Add the writers from QMNIST's label files, if available."""
        if data.user is not None or data.is_train is None:
            return data
        found = {part: _writer_file(folder, name) for part, name in _WRITERS.items()}
        if not all(found.values()):
            return data
        columns = np.zeros((len(data), 2), np.int64)  # series and writer
        for part, rows in (("train", data.is_train), ("test", ~data.is_train)):
            path, count = found[part], int(rows.sum())
            assert path is not None
            table = read_qmnist_labels(path)[:count]  # the first of QMNIST's 60,000 test digits are MNIST's
            if not np.array_equal(table[:, 0], data.y.numpy()[rows]):
                raise DataError(f"The labels in {path} are not those of MNIST; remove or replace it.")
            columns[rows] = table[:, [_SERIES, _WRITER]]
        (group, groups), (user, names) = (numbered(columns[:, place]) for place in (0, 1))
        return dataclasses.replace(data, user=user, user_names=names, group=group, group_names=words_of_groups(groups))


def _writer_file(folder: Path, name: str) -> Path | None:
    places = (folder / place for place in _WRITER_FOLDERS)
    return next((file for place in places for file in existing(place, spellings(name))), None)


@register_source
@dataclass(frozen=True)
class FashionMnist(IdxSource):
    """Images of clothes, in MNIST's format."""

    key: ClassVar[str] = "fashion-mnist"
    summary: ClassVar[str] = "70,000 images of clothes, 28x28, ten classes"
    original: ClassVar[str] = "its idx files in a folder 'fashion-mnist'"
    folders: ClassVar[tuple[str, ...]] = ("FashionMNIST/raw",)

    def original_files(self, folder: Path) -> tuple[Path, ...]:
        """The idx files, in a folder named after Fashion-MNIST."""
        return super().original_files(folder) if _is_fashion(folder) else ()
