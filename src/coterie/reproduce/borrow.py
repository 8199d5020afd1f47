"""Tables share runs: what one suite has finished, another does not run again."""

from __future__ import annotations

import contextlib
import shutil
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import CoterieError, RunError

if TYPE_CHECKING:  # it imports torch
    from coterie.runs.batch import Case

PLACE = ("device", "data_dir")  # fields of [run] that do not change what a run is


def borrow(cases: Sequence[Case], home: Path, root: Path) -> Iterator[Case]:
    """Copy finished runs with the settings of these cases from other suites in `root`, and yield the cases that have
    their run now. Checkpoints are not copied."""
    from coterie.runs.folder import RunFolder, to_toml

    there = defaultdict[str, list[tuple[Path, Mapping[str, Any]]]](list)
    for summary in sorted(root.rglob("summary.json")):
        with contextlib.suppress(CoterieError):  # a damaged run is no reason to stop
            config = RunFolder(summary.parent).config()
            there[_kind(config)].append((summary.parent, config))
    for case in cases:
        here, target = tomllib.loads(to_toml(case.tables)), home / case.place
        source = next((path for path, config in there[_kind(here)] if _is_same(case, here, path, config)), None)
        if source is None or target.exists():  # what was begun here is finished here
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(source, part, ignore=shutil.ignore_patterns("checkpoint", ".lock"), symlinks=True)
        part.rename(target)
        yield case


def _kind(config: Mapping[str, Any]) -> str:
    """Equal for runs that may be the same."""
    run = config.get("run", {})
    return repr([run.get(key) for key in ("algorithm", "dataset", "seed", "rounds")])


def _is_same(case: Case, here: Mapping[str, Any], path: Path, config: Mapping[str, Any]) -> bool:
    from coterie.runs.checks import check_same

    try:
        check_same(path, config, here, case.experiment.defaults(), PLACE, "--out")
    except RunError:
        return False
    return True
