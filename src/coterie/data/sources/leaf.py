"""LEAF's federated images (Caldas et al., 2018): FEMNIST by writer, CelebA by person.

LEAF's json files may or may not be split; without a split the scenario splits each user's samples.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from coterie.data.dataset import Dataset, register_source
from coterie.data.readers.leaf import Leaf, read_celeba, read_femnist
from coterie.data.sources.stored import StoredSource, existing, resize
from coterie.errors import DataError
from coterie.settings import setting

_SPLIT_FOLDERS = ("train", "test", "all_data")
_IMAGES = ("img_align_celeba", "raw/img_align_celeba", "data/raw/img_align_celeba")
CELEBA_SIZE = 84  # the size that LEAF's network takes


@dataclass(frozen=True)
class _LeafSource(StoredSource):
    """Json files as written by LEAF's preprocess.sh."""

    def original_files(self, folder: Path) -> tuple[Path, ...]:
        """Folders of json files; loose json files only in a folder named after the source."""
        roots = [root for root in (folder, folder / "data") if root.is_dir()]
        inside = [path for root in roots for path in existing(root, _SPLIT_FOLDERS)]
        own = roots if folder.resolve().name == self.key else []
        return tuple(path for path in (*inside, *own) if any(path.glob("*.json")))[:2]

    def from_leaf(self, found: Leaf) -> Dataset:
        return self.dataset(found.x, found.y, found.is_train, np.array(found.user_names)[found.user])


@register_source
@dataclass(frozen=True)
class Femnist(_LeafSource):
    """Handwritten characters by writer, dark on white as in LEAF's files."""

    key: ClassVar[str] = "femnist"
    summary: ClassVar[str] = "805,263 handwritten characters by 3,550 writers, 28x28, 62 classes"
    original: ClassVar[str] = "LEAF's json files (femnist/data/train/*.json ...)"
    classes: ClassVar[int] = 62

    def original_files(self, folder: Path) -> tuple[Path, ...]:
        """Json files, unless CelebA's images are there."""
        return () if existing(folder, _IMAGES) else super().original_files(folder)

    def read_original(self, folder: Path) -> Dataset:
        return self.from_leaf(read_femnist(folder))


@register_source
@dataclass(frozen=True)
class CelebA(_LeafSource):
    """Faces by person, smiling or not."""

    key: ClassVar[str] = "celeba"
    summary: ClassVar[str] = "200,288 faces of 9,343 people, smiling or not"
    original: ClassVar[str] = "LEAF's json files and images (celeba/data/train/*.json ... and img_align_celeba/)"
    classes: ClassVar[int] = 2

    size: int | None = setting(None, "side of the images; by default as stored, or 84 from the original files", ge=8)

    def original_files(self, folder: Path) -> tuple[Path, ...]:
        files = super().original_files(folder)
        images = existing(folder, _IMAGES)[:1]
        is_own = folder.resolve().name == self.key
        return (*files, *images) if files and (images or is_own) else ()

    def read_original(self, folder: Path) -> Dataset:
        images = existing(folder, _IMAGES)
        if not images:
            raise DataError(
                f"{folder} has LEAF's json files but not the images; put CelebA's folder img_align_celeba there."
            )
        return self.from_leaf(read_celeba(folder, images[0], size=self.size or CELEBA_SIZE))

    def complete(self, data: Dataset, folder: Path) -> Dataset:
        """Resize images that were stored in another size."""
        if self.size is None or data.x.ndim != 4:
            return data
        return dataclasses.replace(data, x=resize(data.x, self.size))
