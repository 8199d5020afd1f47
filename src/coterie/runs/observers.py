"""Observers follow a run while it trains: progress bars, trackers and your own code.

class Loud(Observer):
    def round(self, row):
        print(row["round"], row["accuracy"]["macro"])

coterie.run("fesem", "rotated-digits", observer=Loud())       # or a function of the row, an object with on_round(row),
                                                               # or a list of them

An observer ends a run by raising `coterie.StopRun("the reason")` in `round`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from coterie.errors import ConfigError, StopRun

Row = dict[str, Any]


@dataclass(frozen=True)
class RunInfo:
    """A run before its first round."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)  # the tables of config.toml
    path: Path | None = None  # the run folder, if there is one
    done: int = 0  # completed rounds of a resumed run


class Observer:
    """Called when a run begins, after every round, and when it ends; override what you need."""

    def begin(self, run: RunInfo) -> None:
        """Called before the first round of a new or resumed run."""

    def round(self, row: Row) -> None:
        """Called after each round with its row of numbers; `StopRun` ends the run."""

    def end(self, summary: dict[str, Any] | None) -> None:
        """Called with the result, or with None if the run was stopped or failed."""


class _Named(Observer):
    """Somebody else's object with `on_round(row)`, and maybe `on_begin(run)` and `on_end(summary)`."""

    def __init__(self, watched: Any) -> None:
        self._watched = watched

    def begin(self, run: RunInfo) -> None:
        getattr(self._watched, "on_begin", _nothing)(run)

    def round(self, row: Row) -> None:
        self._watched.on_round(row)

    def end(self, summary: dict[str, Any] | None) -> None:
        getattr(self._watched, "on_end", _nothing)(summary)


def _nothing(_value: Any) -> None:
    return


class HasOnRound(Protocol):
    """Any object that is told of rounds."""

    def on_round(self, row: Row, /) -> Any:
        """Called after each round with its row of numbers."""


Listener = Observer | Callable[[Row], None] | HasOnRound


def _listeners(given: Any) -> Iterator[Observer | Callable[[Row], None]]:
    """Observers and functions, from one of them or any nested list."""
    if given is None:
        return
    if isinstance(given, Observer):
        yield given
    elif hasattr(given, "on_round"):
        yield _Named(given)
    elif isinstance(given, list | tuple):
        for one in given:
            yield from _listeners(one)
    elif callable(given):
        yield given
    else:
        what = type(given).__name__
        raise ConfigError(
            f"An observer is an Observer, an object with on_round(row) or a function. Got {what} instead."
        )


class Several(Observer):
    """Several observers or functions, called in order.

    >>> seen = []
    >>> both = Several([seen.append, None, lambda row: seen.append(row["round"])])
    >>> both.round({"round": 1})
    >>> seen
    [{'round': 1}, 1]
    """

    def __init__(self, listeners: Iterable[Listener | Sequence[Listener] | None]) -> None:
        self._listeners = list(_listeners(list(listeners)))
        self._observers = [listener for listener in self._listeners if isinstance(listener, Observer)]

    def begin(self, run: RunInfo) -> None:
        for observer in self._observers:
            observer.begin(run)

    def round(self, row: Row) -> None:
        stops: StopRun | None = None
        for listener in self._listeners:
            try:
                (listener.round if isinstance(listener, Observer) else listener)(row)
            except StopRun as stop:  # after the others have seen the row
                stops = stop
        if stops is not None:
            raise stops

    def end(self, summary: dict[str, Any] | None) -> None:
        for observer in self._observers:
            observer.end(summary)
