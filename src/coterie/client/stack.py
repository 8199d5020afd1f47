"""Training a stack of clients: what a kernel computes, the job of one stack, and the plan that trains jobs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from coterie.client.batches import Batch, Batches, StepCounts
from coterie.client.optimizers import Number, Optimizer, State
from coterie.client.work import SGD, Stack
from coterie.nets.flat import Layout, Slot
from coterie.randomness import mix


class Kernel(Protocol):
    """Computes a stack of c models."""

    def gradients(self, params: Stack, buffers: Stack, batch: Batch, train: bool = True) -> Stack:
        """Gradients of each model's mean loss over its batch.

        In train mode float buffers are updated in place. In eval mode norms use their running statistics, nothing is
        dropped, and buffers stay.
        """
        ...

    def outputs(self, flat: Tensor, x: Tensor) -> Tensor:
        """Outputs [c, n, ...] of models [c, P] for inputs [c, n, ...], in eval mode."""
        ...


@runtime_checkable
class SteppingKernel(Kernel, Protocol):
    """A kernel that computes the gradient and the update of some kinds of work in one."""

    def can_step(self, work: SGD) -> bool:
        """Whether `step` supports this work."""
        ...

    def step(
        self, params: Stack, buffers: Stack, batch: Batch, optimizer: Optimizer, state: State, lr: Number, count: Number
    ) -> None:
        """One step in place: what `optimizer` does with the gradient of this batch."""
        ...


def stepping(kernel: Kernel, work: SGD) -> SteppingKernel | None:
    """The kernel, if it makes whole steps of this work."""
    return kernel if isinstance(kernel, SteppingKernel) and kernel.can_step(work) else None


@dataclass(frozen=True)
class Job:
    """The training of one stack of clients."""

    layout: Layout
    start: Tensor  # [c, P]
    result: Tensor  # [c, P], where the trained models are written
    work: SGD
    counts: StepCounts
    batches: list[Batches]  # one per stream
    keys: Tensor  # int64 [c], for dropout
    extras: Mapping[str, Tensor]  # [c, ...] each


class _Workspace(threading.local):
    """Tensors that a thread reuses: fresh memory from the system costs more than filling it."""

    def __init__(self) -> None:
        self._held: dict[Any, Tensor] = {}

    def like(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor of that shape."""
        key = (name, shape, dtype, device)
        if key not in self._held:
            self._held = {k: v for k, v in self._held.items() if k[0] != name}
            self._held[key] = torch.empty(shape, dtype=dtype, device=device)
        return self._held[key]


_workspace = _Workspace()


def train_job(job: Job, kernel: Kernel) -> None:
    """Train from `job.start` and write the models to `job.result`."""
    layout, work = job.layout, job.work
    count, dtype, device = len(job.start), job.start.dtype, job.start.device

    def taken(kind: str, slots: Sequence[Slot]) -> Stack:
        return [_workspace.like(f"{kind} {s.name}", (count, *s.shape), dtype, device) for s in slots]

    params, buffers = taken("w", layout.parameters), taken("b", layout.buffers)
    layout.copy_from(job.start, [*params, *buffers])
    named = layout.unpack(job.start) if work.anchored else {}
    anchor = [named[slot.name] for slot in layout.parameters] if work.anchored else []
    optimizer = work.make_optimizer()
    state = {name: taken(f"state {name}", layout.parameters) for name in optimizer.keeps}
    for stack in state.values():
        torch._foreach_zero_(stack)
    whole = stepping(kernel, work)

    for step in range(job.counts.num_steps):
        active = job.counts.active(step)
        now = params if active == count else [p[:active] for p in params]
        own = state if active == count else {name: [t[:active] for t in stack] for name, stack in state.items()}
        kept = buffers if active == count else [b[:active] for b in buffers]
        keys = mix(job.keys[:active] + step)
        if whole is not None:
            whole.step(now, kept, Batch(*job.batches[0].at(step), keys), optimizer, own, work.lr, step + 1)
            continue

        def gradient(
            at: Any, stream: int, model: int = 0, step: int = step, kept: Stack = kept, keys: Tensor = keys
        ) -> Stack:
            batches = job.batches[stream]
            weights = job.extras.get("weights")
            if weights is not None:
                weights = weights[: len(keys)].gather(1, batches.positions_at(step))
            return kernel.gradients(list(at), work.buffers_of(kept, model), Batch(*batches.at(step), keys, weights))

        extras = {name: extra[:active] for name, extra in job.extras.items()}
        begun = [a[:active] for a in anchor]
        direction = work.direction(gradient, now, begun, extras)
        optimizer(now, direction, own, work.lr, step + 1)
        work.settle(now, begun)
    layout.copy_to(job.result, [*params, *buffers])


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Let torch use this number of threads within a `with` block; None leaves it as it is."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Plan:
    """How an engine trains: the kernel, the clients per stack (`piece`), the stacks trained in parallel (`workers`).

    `threads` is the number of torch's threads while a stack is trained; None leaves it as it is.
    """

    def __init__(self, name: str, kernel: Kernel, piece: int = 1, workers: int = 1, threads: int | None = None) -> None:
        self.name, self.kernel, self.piece, self.workers, self.threads = name, kernel, piece, workers, threads
        self._pool: ThreadPoolExecutor | None = None

    def train(self, job: Job) -> None:
        """Train one stack."""
        train_job(job, self.kernel)

    def each(self, function: Callable[[slice], None], counts: StepCounts) -> None:
        """Call `function` on every piece of the clients, in parallel if there are workers.

        Workers are threads with one torch thread each: kernels release Python's lock, data and results are shared, and
        the result of a piece does not depend on the thread that computes it.
        """
        rounds = -(-len(counts.sizes) // (self.piece * self.workers))  # so that all workers have equal shares
        pieces = counts.pieces(max(1, min(self.piece, -(-len(counts.sizes) // (rounds * self.workers)))))
        if self.workers < 2 or len(pieces) < 2:
            with torch_threads(self.threads):
                for which in pieces:
                    function(which)
            return

        def one(which: slice) -> None:
            torch.set_num_threads(1)
            with torch.no_grad():  # a thread does not inherit it
                function(which)

        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="coterie")
        with torch_threads(1):
            for done in [self._pool.submit(one, which) for which in pieces]:
                done.result()
