"""What the terminal shows: the progress of a run, its result, and tables. Rich is imported when it is used."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from coterie.errors import ConfigError, RunError
from coterie.runs.accounting import privacy_lines
from coterie.runs.metrics import METRICS, NUMBER, PERCENT, metrics
from coterie.runs.observers import Row
from coterie.settings import counted
from coterie.views.decisions import kinds_found, legend, sentences
from coterie.views.words import safe_text, size_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

_SHOWN_SIZES = 8
_SHOWN_CLUSTERS = 20
_SHOWN_DECISIONS = 12
_WIDTH = 140  # of tables without a terminal


def stderr() -> Console:
    """The console for progress and notes."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def say(text: str, hidden: bool = False) -> None:
    """Print a line on stderr, unless hidden."""
    if not hidden:
        stderr().print(shown(text), soft_wrap=True)


def shown(text: str, style: str = "") -> Text:
    """A text for a console: no markup, and nothing but its line breaks is obeyed."""
    from rich.text import Text

    return Text("\n".join(map(safe_text, text.split("\n"))), style)


def stdout() -> Console:
    """The console for results; without a terminal it is wide enough for tables."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def file_stem(dataset: str) -> str:
    """The name of a dataset or of a user's .npz file, as part of a file name."""
    stem = Path(dataset).stem if dataset.endswith(".npz") else dataset
    return re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "own"


def new_folder(path: Path) -> Path:
    """A folder to write to, which may exist; a file is refused."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file; name a folder to write to with -o.")
    return path


def table_of(title: str, heads: Sequence[str], rows: Iterable[Sequence[str | Text]], text: Sequence[str] = ()) -> Table:
    """A table; the columns in `text` are on the left, numbers on the right."""
    from rich.table import Table

    table = Table(title=shown(title, "table.title"), title_justify="left")
    for head in heads:
        is_name = head in text and head == heads[0]
        table.add_column(
            shown(head, "table.header"),
            justify="left" if head in text else "right",
            style="bold" if is_name else None,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*[shown(cell) if isinstance(cell, str) else cell for cell in row])
    return table


def facts_of(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and values."""
    from rich.table import Table

    table = Table(title=shown(title, "table.title"), show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(shown(name), shown(value))
    return table


def short_sizes(sizes: Sequence[int]) -> str:
    """Cluster sizes in one line: "10 10 10 10", "40 of 1"."""
    if len(sizes) > _SHOWN_SIZES and len(set(sizes)) == 1:
        return f"{len(sizes)} of {sizes[0]}"
    shown = " ".join(str(size) for size in sizes[:_SHOWN_SIZES])
    return f"{shown} ..." if len(sizes) > _SHOWN_SIZES else shown


def clock(seconds: float) -> str:
    """A duration as on a clock.

    >>> clock(5.2), clock(75), clock(3725)
    ('0:05', '1:15', '1:02:05')
    """
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def score_text(record: Mapping[str, Any]) -> str:
    """The main score of a row or summary: accuracy; without classes loss and R2, which may be missing.

    >>> score_text({"accuracy": {"macro": 0.5}}), score_text({"loss": {"macro": 2.0}, "r2": {"macro": 0.25}})
    ('accuracy 50.00', 'loss 2.0000, R2 0.2500')
    """
    if record.get("accuracy"):
        return f"accuracy {PERCENT.text(record['accuracy']['macro'])}"
    shown = [METRICS[key] for key in ("loss", "r2") if METRICS[key].read(record) is not None]
    return ", ".join(f"{metric.label} {metric.format.text(metric.read(record))}" for metric in shown)


class RoundProgress:
    """Shows the progress of a run: a bar in a terminal, some lines elsewhere, nothing when quiet."""

    def __init__(self, rounds: int, label: str, quiet: bool, lines: int = 10) -> None:
        self._rounds, self._label, self._quiet = rounds, safe_text(label), quiet
        self._every = max(1, rounds // lines) if lines else 0  # without a terminal; 0: no lines
        self._console = stderr()
        self._bar: Progress | None = None
        self._began: tuple[int, float] | None = None  # the first round shown, and when
        self._task: Any = None

    def __enter__(self) -> RoundProgress:
        if not self._quiet and self._console.is_terminal:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
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
        """Show one round."""
        numbers = self.numbers(row)
        self._began = self._began or (row["round"], time.monotonic())
        if self._bar is not None:
            self._bar.update(self._task, completed=row["round"], numbers=numbers)
        elif not self._quiet and self._every and (row["round"] % self._every == 0 or row["round"] == self._rounds):
            line = f"{self._label}: round {row['round']}/{self._rounds}  {numbers}{self._left(row)}"
            self._console.print(shown(line))

    def _left(self, row: Row) -> str:
        """The estimated time left, from the rounds since the first one shown."""
        assert self._began is not None
        done, spent = row["round"] - self._began[0], time.monotonic() - self._began[1]
        left = self._rounds - row["round"]
        return f"  left {clock(spent / done * left)}" if done and left else ""

    @staticmethod
    def numbers(row: Row) -> str:
        """The main numbers of a round."""
        parts = [score_text(row)] if row.get("accuracy") or row.get("loss") else []
        parts.append(f"sizes {short_sizes(row['cluster_sizes'])}")
        if row["failures"]:
            parts.append(f"failed {row['failures']}")
        return "  ".join(parts)


@contextmanager
def stop_on_ctrl_c(quiet: bool) -> Iterator[Any]:
    """Yields a function that returns whether Ctrl-C was pressed; a second press stops at once."""
    pressed = threading.Event()

    def handle(_signal: int, _frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()
        say("\nstopping after this round; press Ctrl-C again to stop at once", quiet)

    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def decision_lines(decisions: Sequence[Mapping[str, Any]], clusters: int) -> list[str]:
    """How many kinds a run found, why, and what the letters mean; nothing if its method records no decisions."""
    if not decisions:
        return []
    return [kinds_found(clusters), *sentences(decisions, _SHOWN_DECISIONS), *legend(decisions)]


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The result of a run; a RunError if it lacks something, because somebody else may have written it."""
    try:
        return facts_of(f"{summary['algorithm']} on {summary['dataset']}", list(_summary_rows(summary)))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise RunError(f"The summary is damaged: {type(error).__name__} {error}.") from error


def _summary_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if summary.get("diverged"):
        yield "diverged", summary["diverged"]
    lines: dict[str, list[str]] = {}
    scores = metrics("summary")
    tables = [metric.place[0] for metric in scores]
    # Within a table, metrics of the last round come before metrics of the whole run.
    for metric in sorted(scores, key=lambda metric: (tables.index(metric.place[0]), metric.of_run)):
        value = metric.read(summary)
        if value is not None:
            lines.setdefault(metric.line, []).append(f"{metric.word} {metric.format.text(value)}".strip())
    for line, parts in lines.items():
        yield line, "  ".join(parts)
    if best := summary.get("best_round"):
        yield "best round", f"{best} of {summary['rounds']}, by validation; the models and scores are of that round"
    yield "clusters", f"{summary['clusters']}: {short_sizes(summary['cluster_sizes'])}"
    if (groups := summary.get("cluster_groups")) and 1 < len(groups) <= _SHOWN_CLUSTERS:
        lines_of = (", ".join(f"{name} {count}" for name, count in found.items()) for found in groups)
        yield "true groups in them", "\n".join(f"{number}: {line}" for number, line in enumerate(lines_of) if line)
    changes, moved = sum(summary.get("label_changes") or ()), summary.get("moved_since_start")
    if changes or summary.get("start_ari") is not None:
        start = f"ARI {NUMBER.text(summary['start_ari'])}; " if summary.get("start_ari") is not None else ""
        if moved is not None:  # else the method had no clusters before the first round
            yield "after the start", f"{start}{counted(moved, 'client')} moved since"
        yield "changes of cluster", f"{changes:,}"
    if unseen := summary.get("unseen"):
        ari = NUMBER.text(unseen["ari"])
        kind = unseen.get("right_kind")
        right = "" if kind is None else f"  in a cluster of their kind {PERCENT.text(kind)} %"
        yield "unseen", f"{unseen['clients']} clients: {score_text(unseen)}  ARI with members {ari}{right}"
    if summary["clients_met"] < summary["clients"]:
        yield "clients seen", f"{summary['clients_met']} of {summary['clients']}"
    traffic, start = summary["bytes"], summary["bytes"]["start"]
    sent = f"down {size_text(traffic['down'])}  up {size_text(traffic['up'])}"
    if start["down"] or start["up"]:
        sent += f"  (start: {size_text(start['down'])}, {size_text(start['up'])})"
    yield "sent", sent
    seconds = summary["seconds"]
    spent = "  ".join(f"{name} {seconds[name]:.1f}" for name in ("start", "train", "server", "evaluate"))
    yield "seconds", f"{seconds['total']:.1f}  ({spent})"
    plan = summary.get("plan") or {}
    if "plan" in plan:
        measured = ", ".join(f"{name} {us:.0f}" for name, us in (plan.get("measured") or {}).items())
        why = f"  (microseconds per client step: {measured})" if measured else ""
        at_once = f"{counted(plan['chunk'], 'client')} at a time"
        yield "engine", f"{plan['plan']} in {plan['precision']} on {plan['device']}, {at_once}{why}"
    if "inputs" in summary:
        yield "inputs", summary["inputs"]
    if decisions := summary.get("decisions"):
        yield "decisions", "\n".join(decision_lines(decisions, summary["clusters"]))
    for repair in summary["repairs"]:
        yield "repair", f"round {repair['round']}: {repair['reason']}"
    if privacy := summary.get("privacy"):
        yield "privacy", "\n".join(privacy_lines(privacy))
    if attack := summary.get("attack"):
        by = f"{attack['kind']} by {len(attack['attackers'])} clients; scores are those of the others"
        if "success" in attack:
            by += f", whose models take {PERCENT.text(attack['success'])} % of the samples with the trigger for class 0"
        yield "attack", by if attack["attackers"] else f"{PERCENT.text(attack['corrupt'])} % of the answers are NaN"
    if summary["failures"]:
        why = ", ".join(f"{count} {reason}" for reason, count in list(summary["failures_by_reason"].items())[:3])
        yield "failed answers", f"{summary['failures']}: {why}"
    for note in summary["notes"]:
        yield "note", note
    if "path" in summary:
        yield "run folder", summary["path"]
