"""USPS (Hull, 1994): digits from envelopes, grey pictures of 16x16, in the libsvm text form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from coterie.data.dataset import Dataset, register_source
from coterie.data.readers.mat import read_usps
from coterie.data.sources.stored import StoredSource, present

_TRAIN, _TEST = ("usps.bz2", "usps"), ("usps.t.bz2", "usps.t")


@register_source
@dataclass(frozen=True)
class Usps(StoredSource):
    """7,291 digits for training and 2,007 for testing; ink is light, as in MNIST."""

    key: ClassVar[str] = "usps"
    summary: ClassVar[str] = "9,298 digits from envelopes of 16x16"
    wanted: ClassVar[str] = "its files usps.bz2 and usps.t.bz2"
    places: ClassVar[tuple[str, ...]] = ("USPS",)
    classes: ClassVar[int] = 10

    def original_files(self, place: Path) -> tuple[Path, ...]:
        """Either file, packed or not: a missing one is then named."""
        return tuple(path for path in present(place, (*_TRAIN, *_TEST)) if path.is_file())

    def read_original(self, place: Path) -> Dataset:
        """Train, then test."""
        parts = []
        for names in (_TRAIN, _TEST):
            there = [path for path in present(place, names) if path.is_file()]
            parts.append(read_usps(there[0] if there else place / names[0]))
        is_train = np.repeat([True, False], [len(y) for _, y in parts])
        return self.made(np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]), is_train)
