"""What the terminal shows: progress while a run goes on, and its result."""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from coterie.errors import ConfigError
from coterie.runs.metrics import metrics
from coterie.runs.observers import Row

_SHOWN_SIZES = 8
_WIDTH = 140  # of tables where there is no terminal


def stderr() -> Console:
    """Where progress and notes go; stdout is for results."""
    return Console(stderr=True, highlight=False)


def say(text: str, hidden: bool = False) -> None:
    """Print a line on stderr, unless hidden."""
    if not hidden:
        stderr().print(text, soft_wrap=True, markup=False)


def stdout() -> Console:
    """Where results go; wide enough for a table where there is no terminal to fit."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def file_stem(dataset: str) -> str:
    """The name of a dataset, or of the user's own file, as part of a file name."""
    stem = Path(dataset).stem if dataset.endswith(".npz") else dataset
    return re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "own"


def new_folder(path: Path) -> Path:
    """A folder to write to: one that exists, or none yet."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file; name a folder to write to with -o.")
    return path


def short_sizes(sizes: Sequence[int]) -> str:
    """Cluster sizes in little room: "10 10 10 10", "40 clusters of 1"."""
    if len(sizes) > _SHOWN_SIZES and len(set(sizes)) == 1:
        return f"{len(sizes)} of {sizes[0]}"
    shown = " ".join(str(size) for size in sizes[:_SHOWN_SIZES])
    return f"{shown} ..." if len(sizes) > _SHOWN_SIZES else shown


def percent(value: float | None) -> str:
    """0.9512 -> "95.12"."""
    return "-" if value is None else f"{100 * value:.2f}"


def number(value: float | None) -> str:
    """A score with two digits."""
    return "-" if value is None else f"{value:.2f}"


def megabytes(count: int) -> str:
    """Bytes in words."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def clock(seconds: float) -> str:
    """A duration in words of a clock.

    >>> clock(5.2), clock(75), clock(3725)
    ('0:05', '1:15', '1:02:05')
    """
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class RoundProgress:
    """Shows a row of each round: a bar on a terminal, some lines elsewhere, nothing when quiet."""

    def __init__(self, rounds: int, label: str, quiet: bool, lines: int = 10) -> None:
        self._rounds, self._label, self._quiet = rounds, label, quiet
        self._every = max(1, rounds // lines)  # where there is no terminal
        self._console = stderr()
        self._bar: Progress | None = None
        self._began: tuple[int, float] | None = None  # the first round that was seen, and when
        self._task: Any = None

    def __enter__(self) -> RoundProgress:
        if not self._quiet and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(self._label, total=self._rounds, numbers="starting")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, row: Row) -> None:
        """Take in one round."""
        numbers = self._numbers(row)
        self._began = self._began or (row["round"], time.monotonic())
        if self._bar is not None:
            self._bar.update(self._task, completed=row["round"], numbers=numbers)
        elif not self._quiet and (row["round"] % self._every == 0 or row["round"] == self._rounds):
            self._console.print(f"{self._label}: round {row['round']}/{self._rounds}  {numbers}{self._left(row)}")

    def _left(self, row: Row) -> str:
        """How long it still takes, by the rounds since the first that was seen."""
        assert self._began is not None
        done, spent = row["round"] - self._began[0], time.monotonic() - self._began[1]
        left = self._rounds - row["round"]
        return f"  left {clock(spent / done * left)}" if done and left else ""

    @staticmethod
    def _numbers(row: Row) -> str:
        parts = []
        if row.get("accuracy"):
            parts.append(f"accuracy {percent(row['accuracy']['macro'])}")
        elif row.get("loss"):
            parts.append(f"loss {row['loss']['macro']:.4f}")
        parts.append(f"sizes {short_sizes(row['cluster_sizes'])}")
        if row["failures"]:
            parts.append(f"failed {row['failures']}")
        return "  ".join(parts)


@contextmanager
def stop_on_ctrl_c(quiet: bool) -> Iterator[Any]:
    """Gives a function that tells whether Ctrl-C was pressed; a second press stops at once."""
    pressed = threading.Event()

    def handle(_signal: int, _frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()
        if not quiet:
            print("\nstopping after this round; press Ctrl-C again to stop at once", file=sys.stderr)

    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def summary_table(summary: Mapping[str, Any]) -> Table:
    """One run's result."""
    table = Table(title=f"{summary['algorithm']} on {summary['dataset']}", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column()
    lines: dict[str, list[str]] = {}
    scores = metrics("summary")
    tables = [metric.place[0] for metric in scores]
    # Of each table, what is known of the last round comes before what is known of all rounds.
    for metric in sorted(scores, key=lambda metric: (tables.index(metric.place[0]), metric.of_run)):
        value = metric.read(summary)
        if value is not None:
            shown = f"{metric.word} {metric.format.text(value)}".strip()
            lines.setdefault(metric.line, []).append(shown)
    for line, parts in lines.items():
        table.add_row(line, "  ".join(parts))
    table.add_row("clusters", f"{summary['clusters']}: {short_sizes(summary['cluster_sizes'])}")
    if summary.get("unseen"):
        unseen = summary["unseen"]
        macro = (unseen["accuracy"] or {}).get("macro")
        shown = f"{unseen['clients']} clients: accuracy {percent(macro)}  ARI {number(unseen['ari'])}"
        table.add_row("unseen", shown)
    if summary["clients_met"] < summary["clients"]:
        table.add_row("clients met", f"{summary['clients_met']} of {summary['clients']}")
    traffic = summary["bytes"]
    sent = f"down {megabytes(traffic['down'])}  up {megabytes(traffic['up'])}"
    start = traffic["start"]
    if start["down"] or start["up"]:
        sent += f"  (start: {megabytes(start['down'])}, {megabytes(start['up'])})"
    table.add_row("sent", sent)
    seconds = summary["seconds"]
    spent = "  ".join(f"{name} {seconds[name]:.1f}" for name in ("start", "train", "server", "evaluate"))
    table.add_row("seconds", f"{seconds['total']:.1f}  ({spent})")
    plan = summary.get("plan") or {}
    if "plan" in plan:
        ways = plan.get("measured") or {}
        why = ", ".join(f"{name} {us:.0f}" for name, us in ways.items())
        told = f"{plan['plan']} in {plan['precision']} on {plan['device']}, {plan['chunk']} clients at a time"
        table.add_row("engine", f"{told}  (microseconds per client step: {why})" if why else told)
    for repair in summary["repairs"]:
        table.add_row("repair", f"round {repair['round']}: {repair['reason']}")
    if summary.get("attack"):
        attack = summary["attack"]
        told = f"{attack['kind']} by {len(attack['attackers'])} clients; scores are those of the others"
        table.add_row("attack", told if attack["attackers"] else f"{percent(attack['corrupt'])} of the answers are NaN")
    if summary["failures"]:
        why = ", ".join(f"{count} {reason}" for reason, count in list(summary["failures_by_reason"].items())[:3])
        table.add_row("failed answers", f"{summary['failures']}: {why}")
    for note in summary["notes"]:
        table.add_row("note", note)
    if "path" in summary:
        table.add_row("run folder", summary["path"])
    return table
