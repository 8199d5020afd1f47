"""SVHN (Netzer et al., 2011): cropped digits of house numbers, 32x32 in colour."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from coterie.data.dataset import Dataset, register_source
from coterie.data.readers.mat import read_svhn
from coterie.data.sources.stored import StoredSource, existing

_FILES = ("train_32x32.mat", "test_32x32.mat")


@register_source
@dataclass(frozen=True)
class Svhn(StoredSource):
    """The official train and test digits, without the 531,131 'extra' ones."""

    key: ClassVar[str] = "svhn"
    summary: ClassVar[str] = "99,289 digits of house numbers, 32x32 in colour"
    original: ClassVar[str] = "its files train_32x32.mat and test_32x32.mat"
    folders: ClassVar[tuple[str, ...]] = ("SVHN",)
    classes: ClassVar[int] = 10

    def original_files(self, folder: Path) -> tuple[Path, ...]:
        return existing(folder, _FILES)

    def read_original(self, folder: Path) -> Dataset:
        return self.from_pairs([read_svhn(folder / name) for name in _FILES])
