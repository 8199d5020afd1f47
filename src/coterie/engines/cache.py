"""The folder for measurements and compiled programs of this machine, and files that several processes make once."""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import os
import stat
from collections.abc import Iterator
from pathlib import Path


def cache_folder() -> Path:
    """COTERIE_CACHE, or `coterie` in the user's cache folder."""
    named = os.environ.get("COTERIE_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "coterie"


def private_folder() -> Path:
    """This user's folder in the cache; OSError if it is somebody else's, or others can write to it.

    Programs in it are loaded: whoever writes there decides what this user runs. Several users may share a cache.
    """
    path = cache_folder() / f"user-{_user()}"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or (os.name == "posix" and found.st_uid != _user()):
        raise PermissionError(errno.EACCES, f"{path} is not a folder of this user; remove it or set COTERIE_CACHE")
    if os.name == "posix" and found.st_mode & 0o022:
        raise PermissionError(errno.EACCES, f"others can write to {path}; remove it")
    return path


def read_own(path: Path, most: int) -> tuple[int, bytes] | None:
    """A descriptor and the content of a file in the private folder; None if it is not a regular file of this user."""
    try:
        flags = (getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY", "O_CLOEXEC"))
        handle = os.open(path, functools.reduce(operator.or_, flags, os.O_RDONLY))
    except OSError:
        return None
    found = os.fstat(handle)
    is_own = stat.S_ISREG(found.st_mode) and found.st_size <= most and (os.name != "posix" or found.st_uid == _user())
    with contextlib.suppress(OSError):
        if is_own:
            with os.fdopen(os.dup(handle), "rb") as file:
                return handle, file.read(found.st_size)
    os.close(handle)
    return None


def _user() -> int:
    return os.geteuid() if os.name == "posix" else 0


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process makes this file, where files can be locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, ImportError):
            import fcntl

            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
