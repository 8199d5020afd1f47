"""Choosing a way by measuring it, and remembering what was measured on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from coterie.client.stack import Plan
from coterie.engines.cache import cache_folder
from coterie.engines.in_process import InProcessEngine

_MARGIN = 1.05  # a way that is to be preferred may be so much slower than the fastest
_STEPS = 3  # of each client, when measuring
_SECONDS = 0.3  # of each way; one that is slower is measured once
_CLIENTS = {"cuda": 1024, "cpu": 256}  # at most, when measuring: a GPU has to be full

_known: dict[str, dict[str, float]] = {}


@dataclass(frozen=True)
class Candidate:
    """A way that is possible, and how it is made."""

    name: str
    make: Callable[[], Plan]


def choose(candidates: Sequence[Candidate], measured: dict[str, float]) -> Candidate:
    """The first that is nearly as fast as the fastest: noise does not decide between equals."""
    best = min(measured.values())
    return next(c for c in candidates if measured.get(c.name, float("inf")) <= _MARGIN * best)


def measure(engine: InProcessEngine, candidates: Sequence[Candidate]) -> dict[str, float]:
    """Microseconds of a client's step in each way, from this machine's memory if it was measured before."""
    key = signature(engine, [candidate.name for candidate in candidates])
    if key in _known:
        return _known[key]
    path = cache_folder() / "plans.json"
    stored = _read(path)
    if key not in stored:
        stored[key] = {c.name: _time(engine, c) for c in candidates}
        _write(path, stored)
    _known[key] = stored[key]
    return stored[key]


def _time(engine: InProcessEngine, candidate: Candidate) -> float:
    """Microseconds of a client's step; a way that fails here is never chosen."""
    plan = candidate.make()
    count = min(engine.num_clients, _CLIENTS[engine.device.type], max(plan.workers, plan.piece * plan.workers))
    work = engine.task.work
    sizes = engine.federation.train.sizes
    clients = torch.argsort(sizes, descending=True, stable=True)[:count].sort().values
    start = engine.initial().repeat(count, 1)
    few = replace(work, steps=_STEPS)
    block = engine.block_of(clients, plan)

    def once() -> float:
        _wait(engine.device)
        began = time.perf_counter()
        with torch.no_grad(), engine.precision():
            block.train(start, few)
        _wait(engine.device)
        return (time.perf_counter() - began) / (count * _STEPS) * 1e6

    try:
        with torch.no_grad(), engine.precision():
            block.train(start, replace(work, steps=1))  # libraries choose their kernels, memory is taken
        spent = [once()]
        while spent[0] * count * _STEPS < _SECONDS * 1e6 and len(spent) < 4:
            spent.append(once())
    except (RuntimeError, MemoryError) as error:
        engine.notes.append(f"{candidate.name} is not possible here ({str(error).splitlines()[0][:120]})")
        return float("inf")
    return round(min(spent), 3)


def signature(engine: InProcessEngine, names: list[str]) -> str:
    """What a measurement depends on: machine, network, data, work."""
    work = engine.task.work
    gpu = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else ""
    shapes = [slot.shape for slot in engine.task.layout.parameters]
    size = int(engine.federation.train.sizes.max())
    parts = [
        platform.node(),
        platform.machine(),
        torch.__version__,
        torch.get_num_threads(),
        gpu,
        engine.settings.precision,
        engine.settings.compile,
        engine.settings.piece,
        engine.settings.workers,
        engine.settings.chunk,
        str(engine.dtype),
        type(engine.task.module).__name__,
        shapes,
        [tuple(p.shape) for p in engine.task.module.parameters() if not p.requires_grad],
        engine.task.input_shape,
        work.batch_size if work.batch_size != "full" else size,
        (work.optimizer, work.make_optimizer().keeps, work.clip_norm is not None),
        min(engine.num_clients, _CLIENTS[engine.device.type]),
        names,
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _read(path: Path) -> dict[str, dict[str, float]]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    good = isinstance(found, dict) and all(
        isinstance(ways, dict) and ways and all(isinstance(us, int | float) for us in ways.values())
        for ways in found.values()
    )
    return found if good else {}


def _write(path: Path, values: dict[str, dict[str, float]]) -> None:
    """Remember; a folder that cannot be written costs only the next measurement."""
    finite = {key: {n: us for n, us in ways.items() if us != float("inf")} for key, ways in values.items()}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(finite))
        aside.replace(path)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
