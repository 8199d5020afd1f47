"""Tables share runs: what one suite has finished, another does not run again."""

from __future__ import annotations

import contextlib
import json
import shutil
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import CoterieError

if TYPE_CHECKING:  # it imports torch
    from coterie.runs.batch import Case

PLACE = ("device", "data_dir")  # fields of [run] that do not change what a run is


def borrow(cases: Sequence[Case], home: Path, root: Path) -> Iterator[Case]:
    """Copy finished runs with the settings of these cases from other suites in `root`, and yield the cases that have
    their run now. Checkpoints are not copied."""

    from coterie.runs.folder import RunFolder, to_toml

    there: dict[str, Path] = {}
    for summary in sorted(root.rglob("summary.json")):
        with contextlib.suppress(CoterieError):  # a damaged run is no reason to stop
            there.setdefault(_key(RunFolder(summary.parent).config()), summary.parent)
    for case in cases:
        source, target = there.get(_key(tomllib.loads(to_toml(case.tables)))), home / case.place
        if source is None or target.exists():  # what was begun here is finished here
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(source, part, ignore=shutil.ignore_patterns("checkpoint", ".lock"), symlinks=True)
        part.rename(target)
        yield case


def _key(config: dict[str, Any]) -> str:
    """Settings as text, without those that do not change what a run is."""
    tables = {name: table for name, table in config.items() if isinstance(table, dict)}
    run = {key: value for key, value in tables.get("run", {}).items() if key not in PLACE}
    return json.dumps(tables | {"run": run}, sort_keys=True, default=str)
