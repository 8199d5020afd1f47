"""Sign-language digits (Mavi, 2020; github.com/ardamavi/Sign-Language-Digits-Dataset), converted to 28x28 grey.

Published without a split and without users: four fifths of each class are for training.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from coterie.data.dataset import Dataset, register_source
from coterie.data.readers._images import pillow, read_image
from coterie.data.readers.folder import read_folder
from coterie.data.sources.stored import StoredSource, fixed_split
from coterie.errors import DataError

_SIDE = 28
_SUFFIXES = (".jpg", ".jpeg", ".png")


@register_source
@dataclass(frozen=True)
class Sign(StoredSource):
    """Hands showing the digits 0 to 9."""

    key: ClassVar[str] = "sign"
    summary: ClassVar[str] = "2,062 hands showing a digit, 28x28"
    original: ClassVar[str] = "its folder Dataset/0 ... Dataset/9 (or sign/*.csv with images)"
    folders: ClassVar[tuple[str, ...]] = ("Sign-Language-Digits-Dataset", "Sign-Language-Digits-Dataset-master")
    classes: ClassVar[int] = 10

    @property
    def download_hint(self) -> str:
        return "get it with 'git clone https://github.com/ardamavi/Sign-Language-Digits-Dataset' in that folder"

    def original_files(self, folder: Path) -> tuple[Path, ...]:
        """The folder with one folder per digit, or, in a folder named after the source, images with a csv."""
        if _digits(folder / "Dataset"):
            return (folder / "Dataset",)
        if folder.resolve().name != self.key:
            return ()
        return (folder,) if _digits(folder) or any(folder.glob("*.csv")) else ()

    def read_original(self, folder: Path) -> Dataset:
        """Images by class and name, so that their order does not depend on the file system."""
        root = folder / "Dataset" if _digits(folder / "Dataset") else folder
        if not _digits(root):
            found = read_folder(root, size=(_SIDE, _SIDE), channels=1)
            return self.dataset(found.x, found.y, found.is_train)
        pillow()
        lost = [str(digit) for digit in range(self.classes) if not (root / str(digit)).is_dir()]
        if lost:
            raise DataError(f"{root} has no folder '{lost[0]}'; it needs 0 ... 9, so download the dataset again.")
        files = [(path, digit) for digit in range(self.classes) for path in _images(root / str(digit))]
        x = np.empty((len(files), 1, _SIDE, _SIDE), np.uint8)
        for row, (path, _) in enumerate(files):
            x[row] = read_image(path, size=(_SIDE, _SIDE), channels=1)
        return self.dataset(x, np.array([digit for _, digit in files], np.int64), None)

    def complete(self, data: Dataset, folder: Path) -> Dataset:
        if data.is_train is not None:
            return data
        return dataclasses.replace(data, is_train=fixed_split(self.key, data.y))


def _digits(root: Path) -> list[Path]:
    return [root / str(digit) for digit in range(10) if (root / str(digit)).is_dir()]


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)
