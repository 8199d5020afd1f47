"""A worker: some clients of a federation in one process, and a vectorized engine over them. Imports no Ray.

A call is answered chunk by chunk, each chunk on request. So a worker is never far ahead of the server, and calls can be
made while the chunks of another call arrive.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray

from coterie.client.optimizers import Optimizer, register_optimizer
from coterie.client.steps import ClientStep
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.data.federation import Federation
from coterie.engines.base import Reply, Request
from coterie.engines.ledger import Phase
from coterie.engines.ray.parts import Arrays, arrays_of, tensor_of, tensors_of
from coterie.engines.vectorized import VectorizedEngine
from coterie.randomness import Rng

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setup:
    """What a worker needs, apart from its samples."""

    task: Task
    federation: Federation  # without x and y
    device: str
    settings: dict[str, Any]
    optimizers: dict[str, type[Optimizer]]
    round: int


@dataclass(frozen=True)
class Message:
    """A call to the clients of one worker, apart from models and payload; clients are numbered within the worker."""

    step: ClientStep
    cohort: NDArray[Any]  # int64 [n]
    key: int  # of the call's randomness
    work: SGD
    refs: NDArray[Any] | None  # rows of the models: [n] or [n, m]
    each: Arrays  # one row [n, ...] per client
    round: int
    phase: Phase


@dataclass(frozen=True)
class Part:
    """A chunk of answers; positions are those of the message's cohort."""

    positions: NDArray[Any]
    answer: Arrays
    failed: tuple[tuple[int, str], ...]
    gradients: int
    notes: tuple[str, ...]  # of the worker's engine, all so far


class Worker:
    """The process of one Ray actor."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._calls: dict[int, Iterator[Reply]] = {}

    def load(self, setup: Setup, x: NDArray[Any], y: NDArray[Any], memory: Arrays) -> dict[str, Any]:
        """Take in the clients and what they remember; return where the worker is, and what its engine chose."""
        for name, optimizer in setup.optimizers.items():
            register_optimizer(name)(optimizer)
        federation = replace(setup.federation, x=tensor_of(x, _CPU), y=tensor_of(y, _CPU))
        self._engine = VectorizedEngine(setup.task, federation, device=setup.device, settings=setup.settings)
        self._engine.begin(setup.round, "start")
        self.remember(memory)
        plan = self._engine.describe()
        return {"plan": plan, "notes": tuple(self._engine.notes), "pid": os.getpid(), "host": socket.gethostname()}

    def begin(self, call: int, message: Message, models: NDArray[Any] | None, payload: Arrays) -> Part | None:
        """Begin a call; return its first chunk."""
        engine, device = self._engine, self._engine.device
        if message.round != engine.round:
            engine.begin(message.round, message.phase)
        request = Request(
            message.step,
            torch.tensor(message.cohort),
            Rng(message.key),
            message.work,
            None if models is None else tensor_of(models, device),
            None if message.refs is None else torch.tensor(message.refs),
            {name: tensor_of(array, device if array.ndim else _CPU) for name, array in payload.items()},
            tensors_of(message.each, device),
        )
        self._calls[call] = engine.ask(request, torch.arange(len(message.cohort)))
        return self.next(call)

    def next(self, call: int) -> Part | None:
        """The next chunk of a call; None after the last one."""
        reply = next(self._calls.get(call, iter(())), None)
        if reply is None:
            self.end(call)
            return None
        notes = tuple(self._engine.notes)
        return Part(reply.positions.numpy(), arrays_of(reply.answer), reply.failed, reply.gradients, notes)

    def end(self, call: int) -> None:
        """Forget a call, also one whose chunks were not all asked for."""
        self._calls.pop(call, None)

    def memory(self) -> Arrays:
        """What the clients remember."""
        return arrays_of(self._engine.memory_tensors())

    def remember(self, memory: Mapping[str, NDArray[Any]]) -> None:
        """Restore what `memory` returned."""
        self._engine.load_memory(tensors_of(memory, self._engine.device))
