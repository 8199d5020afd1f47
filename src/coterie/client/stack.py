"""Training a stack of clients: the kernels' protocol, a job, and the plan that trains jobs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from coterie.client.batches import Batches, StepCounts
from coterie.client.optimizers import Optimizer, State
from coterie.client.work import SGD, Stack
from coterie.nets.flat import Layout
from coterie.randomness import mix


class Kernel(Protocol):
    """How a stack of c models is computed; what tells the engines apart."""

    def gradients(
        self, params: Stack, buffers: Stack, x: Tensor, y: Tensor, mask: Tensor | None, keys: Tensor
    ) -> Stack:
        """Gradients of each model's mean loss over its batch [c, B, ...]; float buffers are updated in place."""
        ...

    def outputs(self, flat: Tensor, x: Tensor) -> Tensor:
        """Outputs [c, n, ...] of models [c, P] for inputs [c, n, ...], in eval mode."""
        ...


@runtime_checkable
class SteppingKernel(Kernel, Protocol):
    """A kernel that makes whole steps of some works: the gradient and the update in one."""

    def can_step(self, work: SGD) -> bool:
        """Whether the steps of this work can be made here."""
        ...

    def step(
        self,
        params: Stack,
        buffers: Stack,
        state: State,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        keys: Tensor,
        optimizer: Optimizer,
        lr: float | Tensor,
        count: float | Tensor,
    ) -> None:
        """One step in place, as `optimizer` makes it with the gradient of this batch."""
        ...


def stepping(kernel: Kernel, work: SGD) -> SteppingKernel | None:
    """The kernel, if it makes whole steps of this work."""
    return kernel if isinstance(kernel, SteppingKernel) and kernel.can_step(work) else None


class Job:
    """A stack of clients to be trained: where they start [c, P], what they do, their batches, where the result goes."""

    def __init__(
        self,
        layout: Layout,
        start: Tensor,
        result: Tensor,
        work: SGD,
        counts: StepCounts,
        batches: list[Batches],
        keys: Tensor,
        extras: Mapping[str, Tensor],
    ) -> None:
        self.layout, self.start, self.result, self.work, self.counts = layout, start, result, work, counts
        self.batches, self.keys, self.extras = batches, keys, extras


class Workspace(threading.local):
    """Tensors that a thread uses again and again: taking fresh memory from the system costs more than filling it."""

    def __init__(self) -> None:
        self._held: dict[Any, Tensor] = {}

    def like(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of that shape; what is in it is of the last use."""
        key = (name, shape, dtype, device)
        if key not in self._held:
            self._held = {k: v for k, v in self._held.items() if k[0] != name}
            self._held[key] = torch.empty(shape, dtype=dtype, device=device)
        return self._held[key]


_workspace = Workspace()


def train_job(job: Job, kernel: Kernel) -> None:
    """Train from `job.start` [c, P]; the trained models are in `job.result` [c, P] after it."""
    layout, work = job.layout, job.work
    named = layout.unpack(job.start)
    count, dtype, device = len(job.start), job.start.dtype, job.start.device

    def taken(kind: str, slots: Any) -> Stack:
        return [_workspace.like(f"{kind} {s.name}", (count, *s.shape), dtype, device) for s in slots]

    params, buffers = taken("w", layout.parameters), taken("b", layout.buffers)
    for slot, tensor in zip((*layout.parameters, *layout.buffers), (*params, *buffers), strict=True):
        tensor.copy_(named[slot.name])
    anchor = [named[slot.name] for slot in layout.parameters] if work.anchored else []
    optimizer = work.make_optimizer()
    state = {name: taken(f"state {name}", layout.parameters) for name in optimizer.keeps}
    for stack in state.values():
        torch._foreach_zero_(stack)
    whole = stepping(kernel, work)

    for step in range(job.counts.num_steps):
        active = job.counts.active(step)  # clients that are still at work: a prefix, by the order
        now = params if active == count else [p[:active] for p in params]
        own = state if active == count else {name: [t[:active] for t in stack] for name, stack in state.items()}
        kept = buffers if active == count else [b[:active] for b in buffers]
        keys = mix(job.keys[:active] + step)
        if whole is not None:
            whole.step(now, kept, own, *job.batches[0].at(step), keys, optimizer, work.lr, step + 1)
            continue

        def gradient(at: Any, stream: int, step: int = step, kept: Stack = kept, keys: Tensor = keys) -> Stack:
            x, y, mask = job.batches[stream].at(step)
            return kernel.gradients(list(at), kept, x, y, mask, keys)

        direction = work.direction(
            gradient, now, [a[:active] for a in anchor], {n: e[:active] for n, e in job.extras.items()}
        )
        optimizer(now, direction, own, work.lr, step + 1)
    for slot, tensor in zip((*layout.parameters, *layout.buffers), (*params, *buffers), strict=True):
        job.result[:, slot.start : slot.stop].copy_(tensor.flatten(1))


class Plan:
    """How an engine trains: the kernel, how many clients make one stack, how many stacks are at work at a time."""

    def __init__(self, name: str, kernel: Kernel, piece: int = 1, workers: int = 1) -> None:
        self.name, self.kernel, self.piece, self.workers = name, kernel, piece, workers
        self._pool: ThreadPoolExecutor | None = None

    def train(self, job: Job) -> None:
        """Train one stack."""
        train_job(job, self.kernel)

    def each(self, function: Callable[[slice], None], counts: StepCounts) -> None:
        """Do every piece of a plan, several at a time where there are workers.

        Workers are threads of one torch thread each: kernels let go of Python's lock, data and results are shared as
        they are, and a piece is computed in the same way whoever computes it.
        """
        rounds = -(-len(counts.sizes) // (self.piece * self.workers))  # so that all workers have as much to do
        pieces = counts.pieces(max(1, min(self.piece, -(-len(counts.sizes) // (rounds * self.workers)))))
        if self.workers < 2 or len(pieces) < 2:
            for which in pieces:
                function(which)
            return

        def one(which: slice) -> None:
            torch.set_num_threads(1)
            with torch.no_grad():  # a thread does not inherit it
                function(which)

        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="coterie")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for done in [self._pool.submit(one, which) for which in pieces]:
                done.result()
        finally:
            torch.set_num_threads(threads)
