"""The folder where this machine's measurements and compiled programs are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where measurements are remembered: COTERIE_CACHE, or the user's cache folder."""
    named = os.environ.get("COTERIE_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "coterie"
