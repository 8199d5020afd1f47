"""Small runs on Ray workers, and a way to kill one."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from typing import Any

import pytest

from coterie.engines.base import Engine

MARKS = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs pip install 'coterie[ray]'"),  # imported by the engine
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves files open
]
WORKERS = {"precision": "float64", "workers": 2, "cpus": 1}


def process_of(engine: Any, worker: int) -> int:
    """The process of a worker."""
    return int(engine._seats[worker].process.split()[1])


def clients_of(engine: Any, worker: int) -> list[str]:
    """The names of a worker's clients."""
    return list(engine.names[engine._seats[worker].clients])


def kill_in_round(engine: Engine, worker: int, round: int, replies: int) -> list[int]:
    """Kill a worker with SIGKILL in the first call of that round, after that many replies; returns who was killed."""
    killed: list[int] = []
    ask = engine.ask

    def listening(request, positions):
        def kill_once(seen):
            if engine.round == round and engine.phase == "round" and seen == replies and not killed:
                killed.append(process_of(engine, worker))
                os.kill(killed[0], signal.SIGKILL)

        kill_once(0)
        for seen, reply in enumerate(ask(request, positions), 1):
            kill_once(seen)
            yield reply

    engine.ask = listening  # type: ignore[method-assign]
    return killed
