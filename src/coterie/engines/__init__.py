"""Engines: `loop` (the reference), `vectorized` (the fast one), `flower` (nodes of Flower), `mock` (for tests)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from coterie.errors import UnknownName

if TYPE_CHECKING:  # the names of the engines are needed where torch is not
    from coterie.client.task import Task
    from coterie.data.federation import Federation
    from coterie.engines.base import Engine


def _loop(task: Task, federation: Federation, device: str, settings: dict[str, Any]) -> Engine:
    from coterie.engines.loop import LoopEngine

    return LoopEngine(task, federation, device=device, settings=settings)


def _vectorized(task: Task, federation: Federation, device: str, settings: dict[str, Any]) -> Engine:
    from coterie.engines.vectorized import VectorizedEngine

    return VectorizedEngine(task, federation, device=device, settings=settings)


def _flower(task: Task, federation: Federation, device: str, settings: dict[str, Any]) -> Engine:
    from coterie.engines.flower import require_flower

    require_flower("engine flower")
    from coterie.engines.flower.simulation import simulated_engine

    return simulated_engine(task, federation, device, settings)


ENGINES: dict[str, Callable[[Task, Federation, str, dict[str, Any]], Engine]] = {
    "loop": _loop,
    "vectorized": _vectorized,
    "flower": _flower,
}


def make_engine(
    name: str, task: Task, federation: Federation, device: str = "auto", settings: dict[str, Any] | None = None
) -> Engine:
    """The engine of that name over a federation; `settings` are its `--set engine.FIELD` values."""
    if name not in ENGINES:
        raise UnknownName("engine", name, ENGINES)
    return ENGINES[name](task, federation, device, settings or {})
