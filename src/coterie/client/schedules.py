"""Learning-rate schedules: the factor on the learning rate in a round. One function each, registered by name.

A schedule is a function of the work, the round (from 1, after the warm-up) and the number of rounds (without the
warm-up; None if unknown). `--set work.schedule=NAME` chooses one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from coterie.client.settings import WorkSettings
from coterie.errors import ConfigError, UnknownName

Schedule = Callable[[WorkSettings, int, int | None], float]

_SCHEDULES: dict[str, Schedule] = {}
_OVER_RUN: set[str] = set()


def register_schedule(name: str, *, over_run: bool = False) -> Callable[[Schedule], Schedule]:
    """Decorator: register a schedule under a name; `over_run` if it depends on the number of rounds."""

    def register(schedule: Schedule) -> Schedule:
        _SCHEDULES[name] = schedule
        _OVER_RUN.update({name} if over_run else ())
        return schedule

    return register


def find_schedule(name: str) -> Schedule:
    """The schedule registered under a name."""
    if name not in _SCHEDULES:
        raise UnknownName("schedule", name, _SCHEDULES)
    return _SCHEDULES[name]


def depends_on_rounds(work: WorkSettings) -> bool:
    """Whether the learning rates of a run depend on its number of rounds."""
    return work.schedule in _OVER_RUN


def factor(work: WorkSettings, round: int) -> float:
    """The factor on the learning rate in a round (from 1): the warm-up, then the schedule over the other rounds."""
    warmup = work.warmup_rounds
    if round <= warmup:
        return round / (warmup + 1)
    # lr_decay without a schedule means exponential, as in runs from before schedules existed.
    name = "exponential" if work.schedule == "constant" and work.lr_decay != 1 else work.schedule
    total = work.total_rounds
    return find_schedule(name)(work, round - warmup, None if total is None else total - warmup)


@register_schedule("constant")
def constant(work: WorkSettings, round: int, rounds: int | None) -> float:
    """No change."""
    return 1.0


@register_schedule("exponential")
def exponential(work: WorkSettings, round: int, rounds: int | None) -> float:
    """Multiply by lr_decay after each round."""
    return work.lr_decay ** (round - 1)


@register_schedule("step")
def step(work: WorkSettings, round: int, rounds: int | None) -> float:
    """Multiply by lr_decay every decay_every rounds."""
    return work.lr_decay ** ((round - 1) // work.decay_every)


@register_schedule("cosine", over_run=True)
def cosine(work: WorkSettings, round: int, rounds: int | None) -> float:
    """Half a cosine, from 1 in the first round to lr_floor in the last (Loshchilov and Hutter, 2017)."""
    if rounds is None:
        raise ConfigError("The schedule cosine needs the number of rounds; use work.for_run(rounds).")
    progress, floor = min(1.0, (round - 1) / max(1, rounds - 1)), work.lr_floor
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
