"""Who is told of a run while it goes on: the one small interface of progress bars, trackers and one's own code.

class Loud(Observer):
    def round(self, row):
        print(row["round"], row["accuracy"]["macro"])

coterie.run("fesem", "rotated-digits", observer=Loud())       # a plain function of the row does as well
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class RunInfo:
    """What there is to know of a run before its first round."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)  # the tables of config.toml
    path: Path | None = None  # the run folder, if there is one
    done: int = 0  # rounds that were done before: a resumed run goes on after them


class Observer:
    """Is told when a run begins, after every round, and when it ends; what it does not care for it leaves."""

    def begin(self, run: RunInfo) -> None:
        """Before the first round, or before the next one of a resumed run."""

    def round(self, row: Row) -> None:
        """After each round, with its numbers."""

    def end(self, summary: dict[str, Any] | None) -> None:
        """With the result, or with None if the run was stopped or failed."""


Listener = Observer | Callable[[Row], None]


class _Function(Observer):
    """A plain function of the row."""

    def __init__(self, function: Callable[[Row], None]) -> None:
        self._function = function

    def round(self, row: Row) -> None:
        self._function(row)


class Several(Observer):
    """Tells all of them, in order.

    >>> seen = []
    >>> both = Several([seen.append, None, lambda row: seen.append(row["round"])])
    >>> both.round({"round": 1})
    >>> seen
    [{'round': 1}, 1]
    """

    def __init__(self, listeners: Iterable[Listener | None]) -> None:
        found = [item for item in listeners if item is not None]
        self.observers = [item if isinstance(item, Observer) else _Function(item) for item in found]

    def begin(self, run: RunInfo) -> None:
        for observer in self.observers:
            observer.begin(run)

    def round(self, row: Row) -> None:
        for observer in self.observers:
            observer.round(row)

    def end(self, summary: dict[str, Any] | None) -> None:
        for observer in self.observers:
            observer.end(summary)
