"""The data folder. Imports no torch, so that commands can look into it at once."""

from __future__ import annotations

import os
from pathlib import Path


def data_folder(data_dir: Path | None = None) -> Path:
    """The data folder: the given one, else COTERIE_DATA, else ~/.cache/coterie."""
    named = data_dir or os.environ.get("COTERIE_DATA") or "~/.cache/coterie"
    return Path(named).expanduser()
