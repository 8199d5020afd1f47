"""Choosing a plan by measuring, and remembering the measurements of this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from coterie.client.stack import Plan
from coterie.engines.cache import alone, private_folder, read_own
from coterie.engines.in_process import InProcessEngine
from coterie.trust import write_whole

_MARGIN = 1.05  # a preferred plan may be slower than the fastest by this factor
_STEPS = 3  # per client and measurement
_SECONDS = 0.3  # per plan; a slower one is measured once
_NEAR = 4.0  # plans within this factor of the fastest are measured again
_CLIENTS = {"cuda": 1024, "cpu": 256}  # at most; a GPU must be full

_MOST_BYTES = 16 << 20  # of the stored measurements

_known: dict[str, dict[str, float]] = {}


@dataclass(frozen=True)
class Candidate:
    """A possible plan, and how to make it."""

    name: str
    make: Callable[[], Plan]


def choose(candidates: Sequence[Candidate], measured: dict[str, float]) -> Candidate:
    """The first candidate nearly as fast as the fastest, so that noise does not decide between equals."""
    best = min(measured.values())
    return next(c for c in candidates if measured.get(c.name, float("inf")) <= _MARGIN * best)


def measure(engine: InProcessEngine, candidates: Sequence[Candidate]) -> dict[str, float]:
    """Microseconds per client step under each plan; read from the cache if it was measured before."""
    key = signature(engine, [candidate.name for candidate in candidates])
    if key in _known:
        return _known[key]
    names = {candidate.name for candidate in candidates}
    try:
        path = private_folder() / "plans.json"
    except OSError as error:
        engine.notes.append(f"measurements of plans are not kept: {error.strerror}")
        path = None
    found = None if path is None else _read(path)[0].get(key)
    if not _is_good(found, names):
        with nullcontext() if path is None else alone(path):  # one process measures, and all choose the same plan
            stored, problem = ({}, None) if path is None else _read(path)
            found = stored.get(key)
            if not _is_good(found, names):
                if problem or found is not None:
                    engine.notes.append(
                        f"{path} is ignored: {problem or 'it has other plans'}; plans are measured anew"
                    )
                found = _compare(engine, candidates)
                if path is not None:
                    _write(path, stored | {key: found})
    assert found is not None
    _known[key] = found
    return _known[key]


def _compare(engine: InProcessEngine, candidates: Sequence[Candidate]) -> dict[str, float]:
    """Microseconds per client step under each plan."""
    found = {candidate.name: _time(engine, candidate) for candidate in candidates}
    if engine.device.type == "cpu" and len(candidates) > 1:
        # Other programs may have taken the cores for a moment, and the cache would keep that choice for good.
        near = _NEAR * min(found.values())
        for candidate in candidates:
            if found[candidate.name] <= near:
                found[candidate.name] = min(found[candidate.name], _time(engine, candidate))
    return found


def _time(engine: InProcessEngine, candidate: Candidate) -> float:
    """Microseconds per client step; infinite for a plan that fails."""
    plan = candidate.make()
    count = min(engine.num_clients, _CLIENTS[engine.device.type], max(plan.workers, plan.piece * plan.workers))
    clients = torch.argsort(engine.federation.train.sizes, descending=True, stable=True)[:count].sort().values
    start = engine.initial().repeat(count, 1)
    block = engine.block_of(clients, plan)

    def once() -> float:
        _wait(engine.device)
        began = time.perf_counter()
        with torch.no_grad(), engine.precision():
            block.train(start, replace(engine.task.work, steps=_STEPS))
        _wait(engine.device)
        return (time.perf_counter() - began) / (count * _STEPS) * 1e6

    try:
        once()  # not counted: libraries choose their kernels, memory is allocated, a graph is recorded
        spent = [once()]
        while spent[0] * count * _STEPS < _SECONDS * 1e6 and len(spent) < 4:
            spent.append(once())
    except (RuntimeError, MemoryError) as error:
        engine.notes.append(f"{candidate.name} is not possible here ({str(error).splitlines()[0][:120]})")
        return float("inf")
    return round(min(spent), 3)


def signature(engine: InProcessEngine, names: list[str]) -> str:
    """A digest of what a measurement depends on: machine, network, data, work."""
    work = engine.task.work
    gpu = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else ""
    shapes = [slot.shape for slot in engine.task.layout.parameters]
    size = int(engine.federation.train.sizes.max())
    settings = engine.settings
    machine = [platform.node(), platform.machine(), torch.__version__, torch.get_num_threads(), gpu]
    chosen = [settings.precision, settings.compile, settings.piece, settings.workers, settings.chunk]
    frozen = [tuple(p.shape) for p in engine.task.module.parameters() if not p.requires_grad]
    network = [str(engine.dtype), type(engine.task.module).__name__, shapes, frozen, engine.task.input_shape]
    batch = work.batch_size if work.batch_size != "full" else size
    optimizer = (work.optimizer, work.make_optimizer().keeps, work.clip_norm is not None)
    clients = min(engine.num_clients, _CLIENTS[engine.device.type])
    parts = [*machine, *chosen, *network, batch, optimizer, clients, names]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _read(path: Path) -> tuple[dict[str, Any], str | None]:
    """The stored measurements, and what is wrong with the file."""
    opened = read_own(path, _MOST_BYTES)
    if opened is None:
        return {}, "it is not a small file of this user" if os.path.lexists(path) else None
    os.close(opened[0])
    try:
        found = json.loads(opened[1])
    except (ValueError, RecursionError):
        found = None
    return (found, None) if isinstance(found, dict) else ({}, "it is damaged")


def _is_good(found: Any, names: Collection[str]) -> bool:
    """Whether these are microseconds of some of the plans."""
    return (
        isinstance(found, dict)
        and bool(found)
        and all(name in names and type(us) in (int, float) and 0 <= us < float("inf") for name, us in found.items())
    )


def _write(path: Path, values: dict[str, Any]) -> None:
    """Write the cache; if the folder is not writable, the next run measures again."""
    finite = {
        key: {name: us for name, us in found.items() if us != float("inf")} if isinstance(found, dict) else found
        for key, found in values.items()
    }
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps(finite).encode())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
