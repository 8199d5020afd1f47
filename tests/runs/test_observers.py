"""Observers follow a run while it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coterie.errors import Interrupted
from coterie.methods.base import find_algorithm
from coterie.runs.execution import execute
from coterie.runs.folder import RunFolder
from coterie.runs.loop import Schedule
from coterie.runs.observers import Observer, RunInfo, Several
from tests.helpers import setup_of


class Diary(Observer):
    def __init__(self) -> None:
        self.pages: list[tuple[str, Any]] = []

    def begin(self, run: RunInfo) -> None:
        self.pages.append(("begin", run))

    def round(self, row: dict[str, Any]) -> None:
        self.pages.append(("round", row["round"]))

    def end(self, summary: dict[str, Any] | None) -> None:
        self.pages.append(("end", None if summary is None else summary["rounds"]))


def test_begin_rounds_end_in_this_order():
    diary = Diary()
    execute(setup_of(find_algorithm("fedavg")(), schedule=Schedule(rounds=2)), None, diary)
    (first, run), *others = diary.pages
    assert first == "begin"
    assert (run.name, run.path, run.done) == ("ragged-fedavg-s0", None, 0)
    assert run.settings["run"]["algorithm"] == "fedavg"
    assert others == [("round", 1), ("round", 2), ("end", 2)]


def test_a_stopped_run_ends_with_none_and_resumes_where_it_was(tmp_path: Path):
    setup = setup_of(find_algorithm("fedavg")(), schedule=Schedule(rounds=3))
    folder = RunFolder.create(tmp_path, "a", "a", setup.tables())
    diary = Diary()
    with pytest.raises(Interrupted):
        execute(setup, folder, diary, lambda: len(folder.rows()) == 2)
    assert diary.pages[-1] == ("end", None)
    again = Diary()
    execute(setup, RunFolder.open(folder.path), again)
    (_, run), *others = again.pages
    assert (run.name, run.path, run.done) == ("a", folder.path, 2)
    assert others == [("round", 3), ("end", 3)]


def test_functions_and_observers_are_called_together():
    diary, rows = Diary(), []
    both = Several([rows.append, None, diary])
    both.begin(RunInfo("x"))
    both.round({"round": 7})
    both.end(None)
    assert rows == [{"round": 7}]
    assert [kind for kind, _ in diary.pages] == ["begin", "round", "end"]


def test_an_observer_may_ignore_everything():
    silent = Observer()
    silent.begin(RunInfo("x"))
    silent.round({})
    silent.end(None)
