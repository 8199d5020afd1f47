"""USPS (Hull, 1994): digits from envelopes, grey 16x16, in libsvm text format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from coterie.data.dataset import Dataset, register_source
from coterie.data.readers.mat import read_usps
from coterie.data.sources.stored import StoredSource, existing

_TRAIN, _TEST = ("usps.bz2", "usps"), ("usps.t.bz2", "usps.t")


@register_source
@dataclass(frozen=True)
class Usps(StoredSource):
    """7,291 training and 2,007 test digits, light on dark as in MNIST."""

    key: ClassVar[str] = "usps"
    summary: ClassVar[str] = "9,298 digits from envelopes, 16x16"
    original: ClassVar[str] = "its files usps.bz2 and usps.t.bz2"
    folders: ClassVar[tuple[str, ...]] = ("USPS",)
    classes: ClassVar[int] = 10

    def original_files(self, folder: Path) -> tuple[Path, ...]:
        return tuple(path for path in existing(folder, (*_TRAIN, *_TEST)) if path.is_file())

    def read_original(self, folder: Path) -> Dataset:
        files = self.original_files(folder)
        chosen = [next((f for f in files if f.name in names), folder / names[0]) for names in (_TRAIN, _TEST)]
        return self.from_pairs([read_usps(path) for path in chosen])
