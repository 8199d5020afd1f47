"""The user's own `.npy` files: x.npy and y.npy, and maybe user, group and is_train or split beside them.

They lie in a folder, or have a common beginning: digits-x.npy, digits-y.npy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from coterie.data.dataset import Dataset, register_source
from coterie.data.sources.files import FileSource, dataset_of, register_file
from coterie.errors import DataError

_NAMES = ("x", "y", "user", "group", "is_train", "split")


@register_file
@register_source
@dataclass(frozen=True)
class NpyFiles(FileSource):
    """Arrays in files of their own."""

    key: ClassVar[str] = "npy"
    summary: ClassVar[str] = (
        "your own .npy files: x.npy, y.npy and optionally user.npy, group.npy, is_train.npy or split.npy"
    )
    form: ClassVar[str] = ".npy files (x.npy and y.npy)"

    @classmethod
    def takes(cls, path: Path) -> bool:
        return path.suffix == ".npy" or (path / "x.npy").is_file()

    def has_users(self) -> bool:
        return "user" in self._files()

    def read(self) -> Dataset:
        arrays = {name: _array(file) for name, file in self._files().items()}
        group = arrays.pop("group", None)
        first = next(iter(self._files().values()))
        named = Path(self.path) if Path(self.path).is_dir() else first.with_name(first.stem[:-1].rstrip("-_.") or "own")
        return dataset_of(arrays, named, group)

    def _files(self) -> dict[str, Path]:
        """The files that exist, by name; x and y must."""
        path = Path(self.path)
        folder, stem = (path, "") if path.is_dir() else (path.parent, path.stem[:-1])
        if path.is_file() and not path.stem.endswith("x"):
            raise DataError(f"{path} is one array; give the one whose name ends in 'x.npy', with 'y.npy' beside it.")
        files = {name: folder / f"{stem}{name}.npy" for name in _NAMES}
        if not files["y"].is_file():
            raise DataError(f"There is no file {files['y']} beside {files['x'].name}; save the labels there.")
        return {name: file for name, file in files.items() if file.is_file()}


def _array(path: Path) -> NDArray[Any]:
    """One array; it is mapped first, so that a header cannot ask for more than the file has."""
    try:
        return np.array(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is not a readable .npy file: {error}.") from error
