"""Engines: `loop` (the reference), `vectorized` (the fast one), `ray` (the fast one on several GPUs or machines),
`flower` (Flower nodes), `mock` (for tests).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coterie.errors import UnknownName

if TYPE_CHECKING:  # the engines' names are needed where torch is not
    from coterie.client.task import Task
    from coterie.data.federation import Federation
    from coterie.engines.base import Engine

ENGINES = ("loop", "vectorized", "ray", "flower")


def make_engine(
    name: str, task: Task, federation: Federation, device: str = "auto", settings: dict[str, Any] | None = None
) -> Engine:
    """The engine of that name over a federation; `settings` are its `--set engine.FIELD` values."""
    if name == "loop":
        from coterie.engines.loop import LoopEngine

        return LoopEngine(task, federation, device=device, settings=settings)
    if name == "vectorized":
        from coterie.engines.vectorized import VectorizedEngine

        return VectorizedEngine(task, federation, device=device, settings=settings)
    if name == "ray":
        from coterie.engines.ray import require_ray

        require_ray((settings or {}).get("address"))
        from coterie.engines.ray.engine import RayEngine

        return RayEngine(task, federation, device=device, settings=settings)
    if name == "flower":
        from coterie.engines.flower import require_flower

        require_flower("engine flower")
        from coterie.engines.flower.simulation import simulated_engine

        return simulated_engine(task, federation, device, settings or {})
    raise UnknownName("engine", name, ENGINES)
