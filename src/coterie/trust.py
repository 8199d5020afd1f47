"""What may come from others: code that settings name (`module:callable`, plugins), links in place of files, texts.

A run folder may come from somebody else. What its settings would import, or which machine they would connect to, is
refused until the user says `--trust`, and code that lies inside a run folder is never imported.

A plugin is an entry point of an installed package. Its name is found without running anything; its module is imported
when the user chooses the name.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import os
import re
import stat
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError, RunError, described

# Fields with which settings import code (if they contain a colon) or connect to a machine.
_CODE = (("run", "algorithm"), ("run", "model"), ("run", "loss"), ("work", "optimizer"))
_MACHINES = (("engine", "address"),)
# Groups of entry points, and the fields with which settings name one.
METHODS, DATASETS, MODELS = "coterie.methods", "coterie.datasets", "coterie.models"
OPTIMIZERS, TRACKERS = "coterie.optimizers", "coterie.trackers"
_NAMED = {
    ("run", "algorithm"): METHODS,
    ("run", "dataset"): DATASETS,
    ("run", "model"): MODELS,
    ("work", "optimizer"): OPTIMIZERS,
}
_ONLY_IN_RUNS = ("rounds.jsonl", "clients.npz")
_SCHEMA = re.compile(rb"^\s*schema\s*=", re.MULTILINE)  # of a config.toml that a run wrote


def import_object(spec: str, what: str) -> Any:
    """Import `module:name`; modules in the current folder are found too, modules in a run folder are refused."""
    module_name, _, attribute = spec.partition(":")
    here = os.getcwd()
    if here not in sys.path and run_folder_of(Path(here)) is None:
        sys.path.insert(0, here)
    for place in _places_of(module_name):
        folder = run_folder_of(place)
        if folder is not None:
            raise ConfigError(
                f"{what} {spec} is not imported: {place} is inside the run folder {folder}. Read the code, and move "
                "it elsewhere if you trust it."
            )
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"{what} {spec} cannot be imported: {described(error)}.") from error


def plugins(group: str) -> dict[str, str]:
    """The plugins of a group in installed packages: their names and `module:name`. Nothing is imported."""
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=group)}


def load_plugin(group: str, name: str, what: str) -> Any:
    """Import the plugin of that name; None if no package has one."""
    spec = plugins(group).get(name)
    return None if spec is None else import_object(spec.partition(" ")[0], f"{what} {name}, a plugin:")


def spec_of(thing: Any) -> str | None:
    """The `module:name` by which an object can be imported again; None if it cannot."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    if not isinstance(module, str) or module == "__main__" or not name.isidentifier():
        return None
    return f"{module}:{name}" if getattr(sys.modules.get(module), name, None) is thing else None


def _places_of(module: str) -> Iterator[Path]:
    """The files and folders that importing a module would use, found without running any code."""
    search: list[str] | None = None
    for part in module.split("."):
        try:
            found = importlib.machinery.PathFinder.find_spec(part, search)
        except (ImportError, ValueError):
            return
        if found is None:
            return
        search = list(found.submodule_search_locations or ())
        yield from map(Path, [*search, *([found.origin] if found.has_location and found.origin else [])])
        if not search:
            return


def check_trust(
    tables: Mapping[str, Mapping[str, Any]],
    where: Path,
    trust: bool,
    given: Collection[tuple[str, str]] = (),
    way_out: str = "Say --trust (in Python trust=True) if you know who wrote them",
) -> None:
    """Raise unless the settings of `where` import and connect to nothing, or are trusted.

    `given` are the fields that the user has given again.
    """
    named = [
        f"{table}.{key} = '{value}'"
        for table, key in (*_CODE, *_MACHINES)
        if (table, key) not in given
        and isinstance(value := tables.get(table, {}).get(key), str)
        and (":" in value or (table, key) in _MACHINES)
    ]
    named += [
        f"{table}.{key} = '{value}', a plugin"
        for (table, key), group in _NAMED.items()
        if (table, key) not in given
        and isinstance(value := tables.get(table, {}).get(key), str)
        and value in plugins(group)
    ]
    if named and not trust:
        raise RunError(
            f"The settings of {where} would import code or connect to a machine: {', '.join(named)}. {way_out}."
        )


def run_folder_of(path: Path) -> Path | None:
    """The run folder that a path is in, or leads to by links; None if there is none."""
    for start in dict.fromkeys((Path(os.path.abspath(path)), Path(os.path.realpath(path)))):
        for folder in (start, *start.parents):
            if any((folder / name).exists() for name in _ONLY_IN_RUNS) or _has_schema(folder / "config.toml"):
                return folder
    return None


def _has_schema(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return False
    with os.fdopen(handle, "rb") as file:
        return stat.S_ISREG(os.fstat(handle).st_mode) and _SCHEMA.search(file.read(1 << 16)) is not None


def safe_text(text: object, most: int | None = None) -> str:
    """A text in which control characters and the like are written out, so that a name cannot steer a terminal.

    A text of more than `most` characters is cut.

    >>> print(safe_text("a\\x1b[2J\\u202eb"), safe_text("Zürich 7"), safe_text("abcdef", 3))
    a\\x1b[2J\\u202eb Zürich 7 abc ...
    """
    found = str(text)
    if most is not None and len(found) > most:
        found = found[:most] + " ..."
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in found)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file completely, or leave the old one as it was. Links are replaced, not followed."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with open(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666), "wb"
        ) as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
