"""The user's own files: which source reads a path, and what all of them have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.data.columns import as_splits
from coterie.data.dataset import Dataset, Preset, Source
from coterie.data.groups import words_of_groups
from coterie.data.readers._files import indexed
from coterie.data.values import inputs_of, targets_of
from coterie.errors import DataError
from coterie.randomness import Rng
from coterie.settings import build, setting

Flags = NDArray[np.bool_]  # [S]

_KINDS: list[type[FileSource]] = []


@dataclass(frozen=True)
class FileSource(Source):
    """Contract of a source that reads a file or a folder of the user. Nothing in it is unpickled."""

    is_fixed: ClassVar[bool] = True
    form: ClassVar[str]  # what it reads, in words

    path: str = setting("", "path of the file or folder")
    standardize: bool = setting(False, "scale features by mean and deviation of the training samples")

    @classmethod
    def takes(cls, path: Path) -> bool:
        """Whether this source reads the path; the path exists."""
        raise NotImplementedError

    def has_users(self) -> bool:
        """Whether the samples have users, each of which is a client."""
        raise NotImplementedError

    def read(self) -> Dataset:
        """The samples."""
        raise NotImplementedError

    def load(self, clients: int | None, rng: Rng, data_dir: Path | None) -> Dataset:
        return replace(self.read(), standardize=self.standardize).validate()


F = TypeVar("F", bound=FileSource)


def register_file(cls: type[F]) -> type[F]:
    """Class decorator: a source that reads paths of users."""
    _KINDS.append(cls)
    return cls


def is_path(name: str) -> bool:
    """Whether the name of a dataset is meant as a path."""
    return os.sep in name or "/" in name or Path(name).suffix != "" or Path(name).exists()


def preset_of_file(path: Path, settings: Mapping[str, Any] | None = None) -> Preset:
    """The preset of a file: by user if it has users, else evenly distributed. `settings` are those of the source.

    Their `path` says where the file is now; the preset has the name that the user gave it.
    """
    name, path = str(path), Path(str((settings or {}).get("path") or path))
    if not path.exists():
        raise DataError(f"There is no file {path}; check the path.")
    kind = next((kind for kind in _KINDS if kind.takes(path)), None)
    if kind is None:
        forms = ", ".join(kind.form for kind in sorted(_KINDS, key=lambda kind: kind.key))
        raise DataError(f"{path} is no data that coterie reads; it reads {forms}.")
    has_users = build(kind, {"path": str(path), **(settings or {})}, "dataset").has_users()
    return Preset(
        name=name,
        summary=kind.summary,
        source=kind.key,
        scenario="by_user" if has_users else "iid",
        clients=None if has_users else 10,
        source_settings={"path": str(path)},
        model="mlp",
        work={"lr": 0.1, "epochs": 1, "batch_size": 20},
    )


def dataset_of(arrays: Mapping[str, NDArray[Any]], path: Path, group: NDArray[Any] | None = None) -> Dataset:
    """The dataset of the arrays x and y, and maybe user and is_train or split."""
    x, mean, std = inputs_of(arrays["x"], str(path))
    y, num_classes, class_names = targets_of(arrays["y"], str(path))
    user, names = _names(arrays.get("user"), path)
    number, groups = _names(group, path)
    is_train, is_valid = _splits(arrays, len(y), path)
    return Dataset(
        path.stem,
        x,
        y,
        num_classes,
        is_train=is_train,
        is_valid=is_valid,
        user=user,
        user_names=names,
        group=number,
        group_names=words_of_groups(groups),
        mean=mean,
        std=std,
        class_names=class_names,
    )


def _names(column: NDArray[Any] | None, path: Path) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """Each sample's user or group as a number, and the names by number."""
    if column is None:
        return None, ()
    if column.ndim != 1:
        raise DataError(f"{path}: user and group must have one entry per sample. Got shape {column.shape} instead.")
    index, names = indexed(column)
    for name in names:
        if any("\ud800" <= sign <= "\udfff" for sign in name):
            raise DataError(f"{path}: the name {name!r} has characters that are no text; save it in Unicode.")
    return index, names


def _splits(arrays: Mapping[str, NDArray[Any]], count: int, path: Path) -> tuple[Flags | None, Flags | None]:
    """Which samples are not for testing, and which of those are for validation: by the array split or is_train."""
    column = arrays.get("split")
    if column is None:
        return _flags(arrays.get("is_train"), path), None
    if "is_train" in arrays:
        raise DataError(f"{path} has both is_train and split; keep one of them.")
    if column.shape != (count,) or column.dtype.kind != "U":
        raise DataError(
            f"{path}: split must be one word per sample: train, valid or test. "
            f"Got {column.dtype} of shape {column.shape} for {count} samples instead."
        )
    return as_splits(column, str(path))


def _flags(column: NDArray[Any] | None, path: Path) -> Flags | None:
    if column is None:
        return None
    if column.ndim != 1:
        raise DataError(f"{path}: is_train must have one entry per sample. Got shape {column.shape} instead.")
    if column.dtype.kind not in "biu":
        raise DataError(f"{path}: is_train must contain booleans. Got {column.dtype} instead.")
    return column.astype(bool)
