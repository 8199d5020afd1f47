"""EMNIST (Cohen et al., 2017): handwritten letters and digits, 28x28, from NIST's Special Database 19."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from coterie.data.dataset import Dataset, register_source
from coterie.data.sources.mnist import IdxSource
from coterie.data.sources.stored import Pair
from coterie.errors import DataError
from coterie.settings import setting

_CLASSES = {"byclass": 62, "balanced": 47, "letters": 26, "digits": 10}


@register_source
@dataclass(frozen=True)
class Emnist(IdxSource):
    """One of EMNIST's splits; classes are digits, then uppercase, then lowercase letters."""

    key: ClassVar[str] = "emnist"
    summary: ClassVar[str] = "handwritten letters and digits, 28x28; 814,255 in 62 classes (byclass) or a subset"
    original: ClassVar[str] = "its idx files (emnist-...-train-images-idx3-ubyte.gz ...)"
    folders: ClassVar[tuple[str, ...]] = ("emnist/gzip", "EMNIST/raw", "gzip")
    transposed: ClassVar[bool] = True

    split: Literal["byclass", "balanced", "letters", "digits"] = setting(
        "byclass", "EMNIST's split, with 62, 47, 26 or 10 classes"
    )

    @property
    def stem(self) -> str:
        return f"emnist-{self.split}"

    @property
    def num_classes(self) -> int:
        return _CLASSES[self.split]

    def idx_names(self, part: str) -> tuple[str, str]:
        return f"{self.stem}-{part}-images-idx3-ubyte", f"{self.stem}-{part}-labels-idx1-ubyte"

    def from_pairs(self, pairs: list[Pair]) -> Dataset:
        """Letters are 1 ... 26 in the files and become 0 ... 25."""
        if self.split == "letters":
            for _, y in pairs:
                if len(y) and int(y.min()) < 1:
                    raise DataError(
                        f"{self.stem} has the label {int(y.min())}, but its letters are 1 ... 26; download it again."
                    )
                y -= 1
        return super().from_pairs(pairs)
