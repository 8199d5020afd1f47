"""Which datasets a suite needs, and which of them are missing in the data folder, or are only a part."""

from __future__ import annotations

import zipfile
from pathlib import Path

from coterie.reproduce.suite import Suite

_PACKED = (".npz", ".sha256")  # what `coterie data fetch` writes


def missing_data(suite: Suite, folder: Path) -> list[str]:
    """The datasets of a suite that are not in the data folder, or have too few users there.

    Imports torch only to look for published forms.
    """
    absent = [name for name in suite.data if not _is_stored(name, folder)]
    return absent or ([f"{suite.data[0]} with {suite.users} users"] if _is_part(suite, folder) else [])


def sentence(suite: Suite, names: list[str], folder: Path) -> str:
    """Which file to bring, and where."""
    from coterie.data.fetch import stored_sources

    absent = [source.absence(folder) for source in stored_sources() if source.stem in names]
    if not absent:
        name = suite.data[0]
        absent = [
            f"{name}.npz in {folder} has {_users(folder / f'{name}.npz')} users, and this table is about "
            f"{suite.users}; bring the whole dataset, or choose another folder with --data-dir."
        ]
    return f"{suite.name}: {' '.join(absent)}"


def _is_part(suite: Suite, folder: Path) -> bool:
    """Whether the first dataset is a file with fewer users than the suite is about."""
    if not suite.users:
        return False
    users = _users(folder / f"{suite.data[0]}.npz")
    return users is not None and users < suite.users


def _users(path: Path) -> int | None:
    """How many users a .npz has; None if it does not say, or cannot be read."""
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as found:
            return len(np.unique(found["user"]))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return None


def _is_stored(name: str, folder: Path) -> bool:
    """Whether a dataset is there, as NAME.npz or in its published form."""
    if (folder / f"{name}.npz").is_file():
        return True
    if not folder.is_dir() or all(path.suffix in _PACKED for path in folder.iterdir()):
        return False
    from coterie.data.fetch import stored_sources

    return any(source.find(folder) is not None for source in stored_sources() if source.stem == name)
