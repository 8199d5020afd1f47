"""MNIST (LeCun et al., 1998) and Fashion-MNIST (Xiao et al., 2017): 70,000 grey pictures of 28x28, in idx files.

MNIST's writers and their NIST series come from QMNIST's label files (Yadav and Bottou, 2019), whose rows are in
MNIST's own order; the two series are two true groups of people: Census employees and high-school students.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from coterie.data.dataset import Dataset, register_source
from coterie.data.readers._files import join
from coterie.data.readers.idx import read_pair, read_qmnist_labels
from coterie.data.sources.stored import StoredSource, numbered, present
from coterie.errors import DataError

_IMAGES = {"train": "train-images-idx3-ubyte", "test": "t10k-images-idx3-ubyte"}
_LABELS = {"train": "train-labels-idx1-ubyte", "test": "t10k-labels-idx1-ubyte"}
_WRITERS = {"train": "qmnist-train-labels-idx2-int", "test": "qmnist-test-labels-idx2-int"}
_WRITER_PLACES = ("mnist", "MNIST/raw", "qmnist", "QMNIST/raw", ".")
_SERIES, _WRITER = 1, 2  # columns of QMNIST's labels


@dataclass(frozen=True)
class IdxSource(StoredSource):
    """Pictures and labels in four idx files, which tools also write with a point for the last dash."""

    classes: ClassVar[int] = 10
    transposed: ClassVar[bool] = False

    def idx_names(self, part: str) -> tuple[str, str]:
        """Names of the files of pictures and labels of 'train' or 'test'."""
        return _IMAGES[part], _LABELS[part]

    def original_files(self, place: Path) -> tuple[Path, ...]:
        """Any of the four files: a missing one is then named."""
        names = (name for part in ("train", "test") for name in self.idx_names(part))
        return present(place, [spelled for name in names for spelled in spellings(name)])

    def read_original(self, place: Path) -> Dataset:
        """Train, then test."""
        pairs = []
        for part in ("train", "test"):
            images, labels = (spelled_file(place, name) for name in self.idx_names(part))
            pairs.append(read_pair(images, labels, transposed=self.transposed))
        return self.of_pairs(*pairs)

    def of_pairs(self, train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]) -> Dataset:
        """The dataset of (pictures, labels) for training and testing."""
        if train[0].shape[1:] != test[0].shape[1:]:
            raise DataError(f"{self.stem}: the pictures for training and for testing are of two sizes; get it again.")
        is_train = np.repeat([True, False], [len(train[1]), len(test[1])])
        y = np.concatenate([train[1], test[1]])
        x = join([train[0], test[0]], train[0].shape[1:], np.uint8)
        return self.made(x, y, is_train)


def spellings(name: str) -> tuple[str, ...]:
    """The names that one idx file goes by.

    >>> spellings("t10k-labels-idx1-ubyte")[:3]
    ('t10k-labels-idx1-ubyte', 't10k-labels-idx1-ubyte.gz', 't10k-labels.idx1-ubyte')
    """
    dotted = ".idx".join(name.rsplit("-idx", 1))
    return name, f"{name}.gz", dotted, f"{dotted}.gz"


def spelled_file(place: Path, name: str) -> Path:
    """The file as it is spelled in a folder; where it is not there, its plain name, which the reader refuses."""
    return next(iter(present(place, spellings(name))), place / name)


def _is_fashion(place: Path) -> bool:
    """Whether a folder says it holds Fashion-MNIST, whose files have the very names of MNIST's."""
    names = (name.lower().replace("-", "").replace("_", "") for name in place.resolve().parts[-2:])
    return any(name in ("fashionmnist", "fashion") for name in names)


@register_source
@dataclass(frozen=True)
class Mnist(IdxSource):
    """Handwritten digits; by writer where QMNIST's labels are there."""

    key: ClassVar[str] = "mnist"
    summary: ClassVar[str] = "70,000 handwritten digits of 28x28; by writer where they are known"
    wanted: ClassVar[str] = "its idx files (train-images-idx3-ubyte.gz ...)"
    places: ClassVar[tuple[str, ...]] = ("MNIST/raw",)
    groups: ClassVar[tuple[str, ...]] = ("group", "population")

    def original_files(self, place: Path) -> tuple[Path, ...]:
        """The idx files, unless the folder is Fashion-MNIST's."""
        return () if _is_fashion(place) else super().original_files(place)

    def completed(self, data: Dataset, folder: Path) -> Dataset:
        """Join the writers where they are not known yet and QMNIST's label files are there."""
        if data.user is not None or data.is_train is None:
            return data
        found = {part: _writer_file(folder, name) for part, name in _WRITERS.items()}
        if not all(found.values()):
            return data
        columns = np.zeros((len(data), 2), np.int64)  # series and writer
        for part, rows in (("train", data.is_train), ("test", ~data.is_train)):
            path, count = found[part], int(rows.sum())
            assert path is not None
            table = read_qmnist_labels(path)[:count]  # of QMNIST's 60,000 test digits, MNIST's come first
            if not np.array_equal(table[:, 0], data.y.numpy()[rows]):
                raise DataError(f"{path} does not have the labels of this MNIST; take it away or give QMNIST's own.")
            columns[rows] = table[:, [_SERIES, _WRITER]]
        user, names = numbered(columns[:, 1])
        return dataclasses.replace(data, user=user, user_names=names, group=numbered(columns[:, 0])[0])


def _writer_file(folder: Path, name: str) -> Path | None:
    places = (folder / place for place in _WRITER_PLACES)
    return next((file for place in places for file in present(place, spellings(name))), None)


@register_source
@dataclass(frozen=True)
class FashionMnist(IdxSource):
    """Pictures of clothes, in MNIST's form."""

    key: ClassVar[str] = "fashion-mnist"
    summary: ClassVar[str] = "70,000 pictures of clothes of 28x28, ten kinds"
    wanted: ClassVar[str] = "its idx files in a folder 'fashion-mnist'"
    places: ClassVar[tuple[str, ...]] = ("FashionMNIST/raw",)

    def original_files(self, place: Path) -> tuple[Path, ...]:
        """The idx files, in a folder that says it is Fashion-MNIST's: MNIST's have the same names."""
        return super().original_files(place) if _is_fashion(place) else ()
