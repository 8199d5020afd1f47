"""SVHN (Netzer et al., 2011): house numbers in Google's street pictures, cropped digits of 32x32 in colour."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from coterie.data.dataset import Dataset, register_source
from coterie.data.readers._files import join
from coterie.data.readers.mat import read_svhn
from coterie.data.sources.stored import StoredSource, present

_FILES = ("train_32x32.mat", "test_32x32.mat")


@register_source
@dataclass(frozen=True)
class Svhn(StoredSource):
    """The official train and test digits; the 531,131 'extra' ones are left out."""

    key: ClassVar[str] = "svhn"
    summary: ClassVar[str] = "99,289 digits of house numbers of 32x32 in colour"
    wanted: ClassVar[str] = "its files train_32x32.mat and test_32x32.mat"
    places: ClassVar[tuple[str, ...]] = ("SVHN",)
    classes: ClassVar[int] = 10

    def original_files(self, place: Path) -> tuple[Path, ...]:
        """Either file: a missing one is then named."""
        return present(place, _FILES)

    def read_original(self, place: Path) -> Dataset:
        """Train, then test."""
        parts = [read_svhn(place / name) for name in _FILES]
        labels = [y for _, y in parts]
        is_train = np.repeat([True, False], [len(y) for y in labels])
        images = [x for x, _ in parts]
        del parts
        return self.made(join(images, (3, 32, 32), np.uint8), np.concatenate(labels), is_train)
