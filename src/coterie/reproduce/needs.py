"""Which datasets a suite needs, and which of them are missing in the data folder."""

from __future__ import annotations

from pathlib import Path

from coterie.reproduce.suite import Suite

_PACKED = (".npz", ".sha256")  # what `coterie data fetch` writes


def missing_data(suite: Suite, folder: Path) -> list[str]:
    """The datasets of a suite that are not in the data folder. Imports torch only to look for published forms."""
    return [name for name in suite.data if not _is_stored(name, folder)]


def sentence(suite: Suite, names: list[str], folder: Path) -> str:
    """Which file to bring, and where."""
    from coterie.data.fetch import stored_sources

    absent = [source.absence(folder) for source in stored_sources() if source.stem in names]
    return f"{suite.name}: {' '.join(absent)}"


def _is_stored(name: str, folder: Path) -> bool:
    """Whether a dataset is there, as NAME.npz or in its published form."""
    if (folder / f"{name}.npz").is_file():
        return True
    if not folder.is_dir() or all(path.suffix in _PACKED for path in folder.iterdir()):
        return False
    from coterie.data.fetch import stored_sources

    return any(source.find(folder) is not None for source in stored_sources() if source.stem == name)
