"""Sign-language digits (Mavi, 2020; github.com/ardamavi/Sign-Language-Digits-Dataset): hands, brought to 28x28 grey.

Given out without a split and without the students' names: four fifths of each class are for training.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from coterie.data.dataset import Dataset, register_source
from coterie.data.readers._pictures import pillow, read_picture
from coterie.data.readers.folder import read_folder
from coterie.data.sources.stored import StoredSource, own_split
from coterie.errors import DataError

_SIDE = 28
_KINDS = (".jpg", ".jpeg", ".png")


@register_source
@dataclass(frozen=True)
class Sign(StoredSource):
    """Hands that show the digits 0 to 9."""

    key: ClassVar[str] = "sign"
    summary: ClassVar[str] = "2,062 hands showing a digit, of 28x28"
    wanted: ClassVar[str] = "its folder Dataset/0 ... Dataset/9 (or sign/*.csv with pictures)"
    places: ClassVar[tuple[str, ...]] = ("Sign-Language-Digits-Dataset", "Sign-Language-Digits-Dataset-master")
    classes: ClassVar[int] = 10

    @property
    def way_out(self) -> str:
        """No hub has it."""
        return "get it with 'git clone https://github.com/ardamavi/Sign-Language-Digits-Dataset' in that folder"

    def original_files(self, place: Path) -> tuple[Path, ...]:
        """The folder of ten folders; else, in a folder of its name, pictures with a csv."""
        if _digits(place / "Dataset"):
            return (place / "Dataset",)
        if place.resolve().name != self.key:
            return ()
        return (place,) if _digits(place) or any(place.glob("*.csv")) else ()

    def read_original(self, place: Path) -> Dataset:
        """Pictures by class and name, so that their order does not hang on the disk's."""
        root = place / "Dataset" if _digits(place / "Dataset") else place
        if not _digits(root):
            found = read_folder(root, size=(_SIDE, _SIDE), channels=1)
            return self.made(found.x, found.y, found.is_train)
        pillow()
        lost = [str(digit) for digit in range(self.classes) if not (root / str(digit)).is_dir()]
        if lost:
            raise DataError(f"{root} has no folder '{lost[0]}'; it needs 0 ... 9, so copy the dataset again.")
        files = [(path, digit) for digit in range(self.classes) for path in _pictures(root / str(digit))]
        x = np.empty((len(files), 1, _SIDE, _SIDE), np.uint8)
        for row, (path, _) in enumerate(files):
            x[row] = read_picture(path, size=(_SIDE, _SIDE), channels=1)
        return self.made(x, np.array([digit for _, digit in files], np.int64), None)

    def completed(self, data: Dataset, folder: Path) -> Dataset:
        """A split of our own where there is none."""
        if data.is_train is not None:
            return data
        return dataclasses.replace(data, is_train=own_split(self.key, data.y))


def _digits(root: Path) -> list[Path]:
    return [root / str(digit) for digit in range(10) if (root / str(digit)).is_dir()]


def _pictures(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in _KINDS)
