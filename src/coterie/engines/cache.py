"""The folder for measurements and compiled programs of this machine, and files that several processes make once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def cache_folder() -> Path:
    """COTERIE_CACHE, or `coterie` in the user's cache folder."""
    named = os.environ.get("COTERIE_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "coterie"


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process makes this file, where files can be locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, ImportError):
            import fcntl

            path.parent.mkdir(parents=True, exist_ok=True)
            handle = stack.enter_context(path.with_suffix(".lock").open("w"))
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
