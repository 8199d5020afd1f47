"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): 60,000 colour pictures of 32x32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from coterie.data.dataset import Dataset, register_source
from coterie.data.readers.cifar import Cifar, read_cifar10, read_cifar100
from coterie.data.sources.stored import StoredSource, present


@dataclass(frozen=True)
class _CifarSource(StoredSource):
    """The unpacked folder, the .tar.gz, or the unpacked files themselves."""

    copies: ClassVar[tuple[str, ...]]
    files: ClassVar[tuple[str, ...]]

    def original_files(self, place: Path) -> tuple[Path, ...]:
        """The first of the known copies, else the files themselves."""
        loose = [name for name in self.files if (place / name).is_file()]  # LEAF has folders called train and test
        return present(place, self.copies)[:1] or present(place, loose)

    def read_original(self, place: Path) -> Dataset:
        """Train, then test."""
        copies = present(place, self.copies)
        found = self.read(copies[0] if copies else place)
        return self.made(found.x, found.y, found.is_train)

    def read(self, path: Path) -> Cifar:
        """The reader of this one of the two."""
        raise NotImplementedError


@register_source
@dataclass(frozen=True)
class Cifar10(_CifarSource):
    """Ten kinds of animals and vehicles."""

    key: ClassVar[str] = "cifar10"
    summary: ClassVar[str] = "60,000 colour pictures of 32x32, 10 classes"
    wanted: ClassVar[str] = "cifar-10-batches-py/ (or cifar-10-python.tar.gz)"
    classes: ClassVar[int] = 10
    copies: ClassVar[tuple[str, ...]] = (
        "cifar-10-batches-py",
        "cifar-10-batches-bin",
        "cifar-10-python.tar.gz",
        "cifar-10-binary.tar.gz",
    )
    files: ClassVar[tuple[str, ...]] = ("data_batch_1", "data_batch_1.bin", "test_batch", "test_batch.bin")

    def read(self, path: Path) -> Cifar:
        """The pickles are read without running pickle code."""
        return read_cifar10(path)


@register_source
@dataclass(frozen=True)
class Cifar100(_CifarSource):
    """A hundred kinds of things."""

    key: ClassVar[str] = "cifar100"
    summary: ClassVar[str] = "60,000 colour pictures of 32x32, 100 classes"
    wanted: ClassVar[str] = "cifar-100-python/ (or cifar-100-python.tar.gz)"
    classes: ClassVar[int] = 100
    copies: ClassVar[tuple[str, ...]] = (
        "cifar-100-python",
        "cifar-100-binary",
        "cifar-100-python.tar.gz",
        "cifar-100-binary.tar.gz",
    )
    files: ClassVar[tuple[str, ...]] = ("train", "train.bin", "test", "test.bin")

    def read(self, path: Path) -> Cifar:
        """The pickles are read without running pickle code."""
        return read_cifar100(path)
