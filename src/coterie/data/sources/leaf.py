"""LEAF's federated pictures (Caldas et al., 2018): FEMNIST by writer, CelebA by person.

LEAF's json files have a split only where its preprocessing was asked for one; without it each user's samples are
split when they are dealt out.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from coterie.data.dataset import Dataset, register_source
from coterie.data.readers.leaf import Leaf, read_celeba, read_femnist
from coterie.data.sources.stored import StoredSource, present, resized
from coterie.errors import DataError
from coterie.settings import setting

_SPLIT_FOLDERS = ("train", "test", "all_data")
_PICTURES = ("img_align_celeba", "raw/img_align_celeba", "data/raw/img_align_celeba")
CELEBA_SIZE = 84  # the side that LEAF's own network takes


@dataclass(frozen=True)
class _LeafSource(StoredSource):
    """Json files as LEAF's preprocess.sh leaves them."""

    def original_files(self, place: Path) -> tuple[Path, ...]:
        """Folders of json files; json files of their own only in a folder that has the source's name."""
        roots = [root for root in (place, place / "data") if root.is_dir()]
        inside = [folder for root in roots for folder in present(root, _SPLIT_FOLDERS)]
        own = roots if place.resolve().name == self.key else []
        return tuple(folder for folder in (*inside, *own) if any(folder.glob("*.json")))[:2]

    def of_leaf(self, found: Leaf) -> Dataset:
        """The dataset of what a reader found."""
        return self.made(found.x, found.y, found.is_train, np.array(found.user_names)[found.user])


@register_source
@dataclass(frozen=True)
class Femnist(_LeafSource):
    """Handwritten characters by writer; ink dark on white paper, as in LEAF's files."""

    key: ClassVar[str] = "femnist"
    summary: ClassVar[str] = "805,263 handwritten characters of 28x28 by 3,550 writers, 62 classes"
    wanted: ClassVar[str] = "LEAF's json files (femnist/data/train/*.json ...)"
    classes: ClassVar[int] = 62

    def original_files(self, place: Path) -> tuple[Path, ...]:
        """Json files where there are no pictures of CelebA."""
        return () if present(place, _PICTURES) else super().original_files(place)

    def read_original(self, place: Path) -> Dataset:
        """All files, one at a time."""
        return self.of_leaf(read_femnist(place))


@register_source
@dataclass(frozen=True)
class CelebA(_LeafSource):
    """Faces by person, smiling or not."""

    key: ClassVar[str] = "celeba"
    summary: ClassVar[str] = "200,288 faces of 9,343 people, smiling or not"
    wanted: ClassVar[str] = "LEAF's json files with the pictures (celeba/data/train/*.json ... and img_align_celeba/)"
    classes: ClassVar[int] = 2

    size: int | None = setting(None, "side of the pictures; by default as stored, 84 from CelebA's own files", ge=8)

    def original_files(self, place: Path) -> tuple[Path, ...]:
        """Json files; their pictures too where they are there."""
        files = super().original_files(place)
        pictures = present(place, _PICTURES)[:1]
        is_own = place.resolve().name == self.key
        return (*files, *pictures) if files and (pictures or is_own) else ()

    def read_original(self, place: Path) -> Dataset:
        """Each picture is brought to its size as it is read."""
        pictures = present(place, _PICTURES)
        if not pictures:
            raise DataError(
                f"{place} has LEAF's json files but not the pictures; put CelebA's folder img_align_celeba there."
            )
        return self.of_leaf(read_celeba(place, pictures[0], size=self.size or CELEBA_SIZE))

    def completed(self, data: Dataset, folder: Path) -> Dataset:
        """Pictures that were stored in another size are brought to the one asked for."""
        if self.size is None or data.x.ndim != 4:
            return data
        return dataclasses.replace(data, x=resized(data.x, self.size))
