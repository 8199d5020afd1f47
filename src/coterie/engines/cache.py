"""The folder for measurements and compiled programs of this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """COTERIE_CACHE, or `coterie` in the user's cache folder."""
    named = os.environ.get("COTERIE_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "coterie"
