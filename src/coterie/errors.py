"""Everything that can go wrong, as one tree.

    CoterieError                 the command line prints its sentence and exits with `exit_code`
    ├── ConfigError              a setting, a flag or a key is wrong
    │   └── UnknownName          no such algorithm, dataset, model, field ... (carries the nearest name)
    ├── DataError                a file or a dataset is missing, damaged or impossible
    ├── ModelError               a network cannot take the data, or cannot be handled
    ├── EngineError              every client of a call failed
    ├── MethodError              a user's method or client step is wrong (says in which file and line)
    ├── MissingExtra             an optional dependency is needed (carries the extra's name)
    ├── RunError                 a run folder exists, is in use, is newer than this version ...
    │   ├── CheckpointError      a checkpoint is cut short or altered
    │   └── RunsFailed           some of many runs failed (carries how many); the others are finished
    ├── StorageError             the disk refused; what was saved before is intact
    ├── Interrupted              Ctrl-C: the last checkpoint is kept
    └── StopRun                  raised by an observer: the run ends here, as if it were its last round

A message says what happened, the value, and the way out.
"""

from __future__ import annotations

import difflib
import os
import sysconfig
import traceback
from collections.abc import Iterable
from typing import Any


class CoterieError(Exception):
    """Base of all errors that are the user's to solve; never shown as a traceback."""

    exit_code = 2


class ConfigError(CoterieError, ValueError):
    """A setting has a value that cannot be used."""


class UnknownName(ConfigError):
    """A name that is not registered, with the nearest one that is."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        self.known = sorted(known)
        self.nearest = nearest_name(name, self.known)
        hint = f" Did you mean '{self.nearest}'?" if self.nearest else ""
        if self.known:
            listing = f" Known: {', '.join(self.known)}."
        else:
            listing = " There are none."
        super().__init__(f"There is no {kind} '{name}'.{hint}{listing}")


class DataError(CoterieError, ValueError):
    """Data that is missing, damaged, or cannot be partitioned as asked."""


class ModelError(CoterieError, ValueError):
    """A network that does not fit the data or the method."""


class EngineError(CoterieError, RuntimeError):
    """No client could do what it was asked."""


class MethodError(CoterieError, RuntimeError):
    """A method or a client step that raised, or gave something that cannot be used."""


class MissingExtra(CoterieError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        self.extra = extra
        super().__init__(f"{what} requires an optional dependency: pip install 'coterie[{extra}]'.")


class RunError(CoterieError):
    """A run folder cannot be used as asked."""


class CheckpointError(RunError):
    """A checkpoint is not what was written."""


class RunsFailed(RunError):
    """Some runs of a comparison failed; the others are finished."""

    exit_code = 1

    def __init__(self, first: str, failed: int, total: int) -> None:
        self.failed, self.total = failed, total
        super().__init__(f"{failed} of {total} runs failed. {first}")


class StorageError(CoterieError, OSError):
    """The disk refused to take what was to be written."""


class Interrupted(CoterieError):
    """The user stopped the run; it can be resumed."""

    exit_code = 130


class StopRun(CoterieError):
    """Raised by an observer to end a run after this round; its text is the reason."""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, if any is alike at all.

    >>> nearest_name("fesm", ["fedavg", "fesem", "ifca"])
    'fesem'
    """
    by_folded = {candidate.lower().replace("_", "-"): candidate for candidate in known}
    found = difflib.get_close_matches(name.lower().replace("_", "-"), by_folded, n=1, cutoff=0.5)
    return by_folded[found[0]] if found else None


# ---- whose code it was ----

_HERE = os.path.dirname(os.path.abspath(__file__))
_LIBRARIES = ("torch", "numpy", "scipy", "sklearn")


def raised_at(error: BaseException) -> str | None:
    """The innermost line of the user's code on the way to an error: "own.py, line 12". None: there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_of_user(frame.filename):
            return _place(frame.filename, frame.lineno or 0)
    return None


def described(error: BaseException) -> str:
    """An error in one line, with the line of the user's code: "TypeError: not a number (own.py, line 12)"."""
    place, first = raised_at(error), str(error).strip().partition("\n")[0].rstrip(".")
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return said if place is None else f"{said} ({place})"


def defined_at(thing: Any) -> str:
    """Where a function is defined: "own.py, line 12"."""
    code = getattr(getattr(thing, "__wrapped__", thing), "__code__", None)
    return "defined elsewhere" if code is None else _place(code.co_filename, code.co_firstlineno)


def _is_of_user(file: str) -> bool:
    """Whether a file is neither ours, nor Python's, nor of the libraries that we call."""
    paths = sysconfig.get_paths()
    packages = [paths["purelib"], paths["platlib"]]
    inside = [os.path.join(folder, name) for folder in packages for name in _LIBRARIES]
    if not os.path.isabs(file) or any(file.startswith(folder + os.sep) for folder in (_HERE, *inside)):
        return False  # "<frozen importlib>", or code that was compiled
    is_pythons = file.startswith((paths["stdlib"] + os.sep, paths["platstdlib"] + os.sep))
    return not is_pythons or any(file.startswith(folder + os.sep) for folder in packages)


def _place(file: str, line: int) -> str:
    try:
        near = os.path.relpath(file)
    except (ValueError, OSError):  # another drive; the current folder is gone
        near = file
    return f"{file if near.startswith(os.pardir) else near}, line {line}"
