"""What the terminal shows."""

from __future__ import annotations

import io
import re
import signal
import threading
from typing import Any

import pytest
from rich.console import Console

from coterie.cli import output
from coterie.cli.output import (
    RoundProgress,
    short_sizes,
    stop_on_ctrl_c,
    summary_table,
)
from coterie.views.words import size_text

ROW: dict[str, Any] = {
    "round": 1,
    "accuracy": {"macro": 0.9512},
    "loss": {"macro": 0.25},
    "cluster_sizes": [3, 1],
    "failures": 0,
}


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([10, 10], "10 10"),
        ([1] * 8, "1 1 1 1 1 1 1 1"),
        ([1] * 40, "40 of 1"),
        ([2] * 8 + [1], "2 2 2 2 2 2 2 2 ..."),
        ([], ""),
    ],
)
def test_sizes_in_little_room(sizes: list[int], text: str):
    assert short_sizes(sizes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_540_000, "1.5 MB"), (13e9, "13.0 GB"), (5e15, "5000.0 TB")],
)
def test_bytes_in_words(count: int, text: str):
    assert size_text(count) == text


# ---- progress ----


def progress(monkeypatch: pytest.MonkeyPatch, terminal: bool, rounds: int, quiet: bool, rows: list[Any]) -> str:
    seen = io.StringIO()
    console = Console(file=seen, force_terminal=terminal, width=160, highlight=False)
    monkeypatch.setattr(output, "stderr", lambda: console)
    with RoundProgress(rounds, "fesem", quiet) as bar:
        for row in rows:
            bar(row)
    return seen.getvalue()


def test_lines_with_the_numbers_that_matter_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch):
    shown = progress(monkeypatch, False, 2, False, [ROW, ROW | {"round": 2, "failures": 3}])
    assert shown.splitlines() == [
        "fesem: round 1/2  accuracy 95.12  sizes 3 1",
        "fesem: round 2/2  accuracy 95.12  sizes 3 1  failed 3",
    ]


def test_long_runs_print_some_ten_lines_and_the_last_one(monkeypatch: pytest.MonkeyPatch):
    shown = progress(monkeypatch, False, 95, False, [ROW | {"round": r} for r in range(1, 96)]).splitlines()
    assert [line.split()[2] for line in shown] == [f"{r}/95" for r in (*range(9, 95, 9), 95)]


def test_lines_tell_how_long_it_still_takes(monkeypatch: pytest.MonkeyPatch):
    now = iter((100.0, 100.0, 110.0, 110.0, 115.0, 115.0, 120.0))
    monkeypatch.setattr(output.time, "monotonic", lambda: next(now))
    shown = progress(monkeypatch, False, 4, False, [ROW | {"round": r} for r in (1, 2, 4)]).splitlines()
    # One round in ten seconds, so two more take twenty; the first line knows nothing yet, at the end nothing is left.
    assert [line.partition("sizes 3 1")[2] for line in shown] == ["", "  left 0:20", ""]


def test_without_classes_the_loss_is_shown(monkeypatch: pytest.MonkeyPatch):
    assert "loss 0.2500  sizes 3 1" in progress(monkeypatch, False, 1, False, [ROW | {"accuracy": None}])


def test_a_round_that_was_not_evaluated_shows_the_sizes(monkeypatch: pytest.MonkeyPatch):
    row = {"round": 1, "cluster_sizes": [4], "failures": 0}
    assert progress(monkeypatch, False, 1, False, [row]) == "fesem: round 1/1  sizes 4\n"


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    shown = progress(monkeypatch, True, 2, False, [ROW, ROW | {"round": 2}])
    assert "2/2" in shown
    assert "accuracy 95.12  sizes 3 1" in shown
    assert "left" in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_is_quiet(monkeypatch: pytest.MonkeyPatch, terminal: bool):
    assert progress(monkeypatch, terminal, 1, True, [ROW]) == ""


# ---- Ctrl-C ----


def test_the_first_press_asks_and_the_second_stops(capsys: pytest.CaptureFixture[str]):
    before = signal.getsignal(signal.SIGINT)

    def press_twice() -> None:
        with stop_on_ctrl_c(quiet=False) as pressed:
            assert not pressed()
            signal.raise_signal(signal.SIGINT)
            assert pressed()
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert signal.getsignal(signal.SIGINT) is before
    assert "press Ctrl-C again to stop at once" in capsys.readouterr().err


def test_quiet_says_nothing_about_it(capsys: pytest.CaptureFixture[str]):
    with stop_on_ctrl_c(quiet=True) as pressed:
        signal.raise_signal(signal.SIGINT)
        assert pressed()
    assert capsys.readouterr().err == ""


def test_other_threads_leave_signals_alone():
    before, found = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with stop_on_ctrl_c(quiet=True) as pressed:
            found.append((pressed(), signal.getsignal(signal.SIGINT) is before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(False, True)]


# ---- the result ----

SUMMARY: dict[str, Any] = {
    "algorithm": "fesem",
    "dataset": "own.npz",
    "accuracy": {"micro": 0.91, "macro": 0.92, "bottom5": 0.5, "worst_decile": 0.25, "best5": 0.9},
    "f1": {"micro": 0.81, "macro": 0.82},
    "loss": {"micro": 0.31, "macro": 0.32},
    "ari": 0.75,
    "nmi": 0.5,
    "purity": 1.0,
    "clusters": 2,
    "cluster_sizes": [3, 1],
    "clients": 6,
    "clients_met": 4,
    "bytes": {"down": 2000, "up": 1000, "start": {"down": 3000, "up": 4000}},
    "seconds": {"total": 10.0, "start": 1.0, "train": 2.0, "server": 3.0, "evaluate": 4.0},
    "repairs": [{"round": 3, "reason": "cluster 1 was empty"}],
    "decisions": [{"round": 4, "what": "cut", "clusters": [0, 1], "sizes": [3, 1], "z": 236.0, "q": 36.0}],
    "failures": 2,
    "failures_by_reason": {"gone": 2},
    "attack": {"kind": "gaussian", "attackers": ["a", "b"], "corrupt": 0.0},
    "notes": ["something to know"],
    "path": "runs/a",
}


def shown(summary: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(summary_table(summary))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "text",
    [
        *("fesem on own.npz", "macro 92.00  micro 91.00", "5 worst clients 50.00  worst tenth 25.00", "micro 90.00"),
        *("macro 82.00  micro 81.00", "macro 0.3200  micro 0.3100", "ARI 0.75  NMI 0.50  purity 1.00", "2: 3 1"),
        *("4 of 6", "down 2.0 kB  up 1.0 kB  (start: 3.0 kB, 4.0 kB)", "10.0  (start 1.0  train 2.0  server 3.0"),
        *(
            "round 3: cluster 1 was empty",
            "2 kinds found.",
            "Round 4: cluster 0 was cut into 2 (3, 1 clients), z = 236, q = 36.",
            "q: benefit of separate models divided by their cost; 1 means break-even.",
            "failed answers",
            "2: 2 gone",
            "gaussian by 2 clients",
            "something to know",
            "runs/a",
        ),
    ],
)
def test_the_result_shows(text: str):
    assert text in shown(SUMMARY)


def test_changes_of_cluster_with_and_without_a_start():
    with_start = shown(SUMMARY | {"start_ari": 0.5, "moved_since_start": 1, "label_changes": [0, 2, 3]})
    assert re.search(r"after the start +│ ARI 0\.50; 1 client moved since ", with_start)
    assert re.search(r"changes of cluster +│ 5 ", with_start)
    without = shown(SUMMARY | {"start_ari": None, "moved_since_start": None, "label_changes": [0, 2, 3]})
    assert "after the start" not in without
    assert re.search(r"changes of cluster +│ 5 ", without)


def test_one_client_at_a_time():
    plan = {"plan": "loop", "precision": "float32", "device": "cpu", "chunk": 1}
    assert "loop in float32 on cpu, 1 client at a time" in shown(SUMMARY | {"plan": plan})


def test_what_there_is_not_is_not_shown():
    less = SUMMARY | {
        "accuracy": None,
        "f1": None,
        "ari": None,
        "nmi": None,
        "purity": None,
        "failures": 0,
        "notes": [],
        "repairs": [],
        "decisions": [],
    }
    less |= {"clients_met": 6, "bytes": SUMMARY["bytes"] | {"start": {"down": 0, "up": 0}}}
    less.pop("path")
    text = shown(less)
    for word in (
        "accuracy",
        "F1",
        "true groups",
        "clients seen",
        "start:",
        "failed",
        "note",
        "run folder",
        "repair",
        "kind",
    ):
        assert word not in text, word
    assert "macro 0.3200" in text
