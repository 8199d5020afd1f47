"""EMNIST (Cohen et al., 2017): handwritten letters and digits of 28x28, from NIST's Special Database 19."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from coterie.data.dataset import Dataset, register_source
from coterie.data.sources.mnist import IdxSource
from coterie.errors import DataError
from coterie.settings import setting

_CLASSES = {"byclass": 62, "balanced": 47, "letters": 26, "digits": 10}


@register_source
@dataclass(frozen=True)
class Emnist(IdxSource):
    """One of EMNIST's divisions, upright; classes are digits, then capitals, then small letters."""

    key: ClassVar[str] = "emnist"
    summary: ClassVar[str] = (
        "handwritten letters and digits of 28x28; 814,255 of 62 classes (byclass) or a part of them"
    )
    wanted: ClassVar[str] = "its idx files (emnist-...-train-images-idx3-ubyte.gz ...)"
    places: ClassVar[tuple[str, ...]] = ("emnist/gzip", "EMNIST/raw", "gzip")
    transposed: ClassVar[bool] = True

    split: Literal["byclass", "balanced", "letters", "digits"] = setting(
        "byclass", "which of EMNIST's divisions: 62, 47, 26 or 10 classes"
    )

    @property
    def stem(self) -> str:
        """Each division has a file of its own."""
        return f"emnist-{self.split}"

    @property
    def num_classes(self) -> int:
        """Classes of the division."""
        return _CLASSES[self.split]

    def idx_names(self, part: str) -> tuple[str, str]:
        """Names of the files of pictures and labels of 'train' or 'test'."""
        return f"{self.stem}-{part}-images-idx3-ubyte", f"{self.stem}-{part}-labels-idx1-ubyte"

    def of_pairs(self, train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]) -> Dataset:
        """Letters are 1 ... 26 in the files and 0 ... 25 here."""
        if self.split == "letters":
            for _, y in (train, test):
                if len(y) and int(y.min()) < 1:
                    raise DataError(
                        f"{self.stem} has the label {int(y.min())}, but its letters are 1 ... 26; get it again."
                    )
                y -= 1
        return super().of_pairs(train, test)
