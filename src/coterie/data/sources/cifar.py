"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): 60,000 colour images, 32x32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from coterie.data.dataset import Dataset, register_source
from coterie.data.readers.cifar import Cifar, read_cifar10, read_cifar100
from coterie.data.sources.stored import StoredSource, existing


@dataclass(frozen=True)
class _CifarSource(StoredSource):
    """The unpacked folder, the .tar.gz, or the unpacked files themselves."""

    copies: ClassVar[tuple[str, ...]]
    files: ClassVar[tuple[str, ...]]
    read: ClassVar[Callable[[Path], Cifar]]

    def original_files(self, folder: Path) -> tuple[Path, ...]:
        loose = [name for name in self.files if (folder / name).is_file()]  # LEAF has folders named train and test
        return existing(folder, self.copies)[:1] or existing(folder, loose)

    def read_original(self, folder: Path) -> Dataset:
        copies = existing(folder, self.copies)
        found = type(self).read(copies[0] if copies else folder)
        return self.dataset(found.x, found.y, found.is_train)


@register_source
@dataclass(frozen=True)
class Cifar10(_CifarSource):
    """Ten classes of animals and vehicles."""

    key: ClassVar[str] = "cifar10"
    summary: ClassVar[str] = "60,000 colour images, 32x32, 10 classes"
    original: ClassVar[str] = "cifar-10-batches-py/ (or cifar-10-python.tar.gz)"
    classes: ClassVar[int] = 10
    copies: ClassVar[tuple[str, ...]] = (
        "cifar-10-batches-py",
        "cifar-10-batches-bin",
        "cifar-10-python.tar.gz",
        "cifar-10-binary.tar.gz",
    )
    files: ClassVar[tuple[str, ...]] = ("data_batch_1", "data_batch_1.bin", "test_batch", "test_batch.bin")
    read: ClassVar[Callable[[Path], Cifar]] = staticmethod(read_cifar10)


@register_source
@dataclass(frozen=True)
class Cifar100(_CifarSource):
    """A hundred classes."""

    key: ClassVar[str] = "cifar100"
    summary: ClassVar[str] = "60,000 colour images, 32x32, 100 classes"
    original: ClassVar[str] = "cifar-100-python/ (or cifar-100-python.tar.gz)"
    classes: ClassVar[int] = 100
    copies: ClassVar[tuple[str, ...]] = (
        "cifar-100-python",
        "cifar-100-binary",
        "cifar-100-python.tar.gz",
        "cifar-100-binary.tar.gz",
    )
    files: ClassVar[tuple[str, ...]] = ("train", "train.bin", "test", "test.bin")
    read: ClassVar[Callable[[Path], Cifar]] = staticmethod(read_cifar100)
