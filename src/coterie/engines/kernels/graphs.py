"""Training steps as CUDA graphs: a step is recorded once, and replayed for every step of every stack.

A replay does no work on the host. The rows of every batch are therefore written to tables before the first step, and
the step reads its row by a counter on the device. Clients with fewer steps than others of their stack stay unchanged
once they are done.

Without a GPU the same steps run unrecorded; the tests use this.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.client.batches import Batch, StepCounts, rows_of
from coterie.client.optimizers import Number, Optimizer, State
from coterie.client.stack import Job, Kernel, Plan, stepping, train_job
from coterie.client.work import SGD, Stack
from coterie.engines.kernels.plain import PlainKernel, as_fast_images
from coterie.engines.kernels.recording import Recording
from coterie.nets.flat import Loss, Network, Slot
from coterie.randomness import mix

_ENTRIES = 1 << 26  # of a table of rows; longer work uses several tables
_GRAPHS = 6  # that are kept
_WARM_UPS = 2  # steps before recording, in which libraries choose their kernels


class BesideKernel(PlainKernel):
    """Plain autograd of a few clients, with the update: on a GPU each client on its own stream.

    It never reads the values of the mask, as a recorded step requires.
    """

    prefers_channels_last = True

    def __init__(self, network: Network, loss: Loss) -> None:
        super().__init__(network, loss)
        self._streams: list[Any] = []

    def gradients(self, params: Stack, buffers: Stack, batch: Batch, train: bool = True) -> Stack:
        """See `Kernel.gradients`."""
        found = [self._one(params, buffers, batch, i, train) for i in range(len(batch.x))]
        return [torch.stack(parts) for parts in zip(*found, strict=True)]

    def can_step(self, work: SGD) -> bool:
        """See `SteppingKernel.can_step`: any optimizer, along the gradient."""
        return type(work) is SGD

    def step(
        self, params: Stack, buffers: Stack, batch: Batch, optimizer: Optimizer, state: State, lr: Number, count: Number
    ) -> None:
        """See `SteppingKernel.step`."""
        lanes = self._lanes(batch.x) if batch.x.is_cuda else []
        for stream in lanes:
            stream.wait_stream(torch.cuda.current_stream())
        held = []  # until the streams are joined
        for i in range(len(batch.x)):
            with torch.cuda.stream(lanes[i]) if lanes else contextlib.nullcontext():
                direction = [grad.unsqueeze(0) for grad in self._one(params, buffers, batch, i)]
                held.append(direction)
                own = {name: [tensor[i : i + 1] for tensor in stack] for name, stack in state.items()}
                optimizer([p[i : i + 1] for p in params], direction, own, lr, count)
        for stream in lanes:
            torch.cuda.current_stream().wait_stream(stream)

    def _lanes(self, x: Tensor) -> list[Any]:
        while len(self._streams) < len(x):
            self._streams.append(torch.cuda.Stream(device=x.device))
        return self._streams[: len(x)]

    def _one(self, params: Stack, buffers: Stack, batch: Batch, i: int, train: bool = True) -> Stack:
        x = as_fast_images(batch.x[i])
        row = None if batch.mask is None else batch.mask[i]
        weights = None if batch.weights is None else batch.weights[i]
        own = [p[i] for p in params], [b[i] for b in buffers]
        return self._gradient(*own, x, batch.y[i], batch.keys[i], row, weights, train)


class GraphPlan(Plan):
    """Trains stacks of clients by replaying recorded steps."""

    def __init__(self, name: str, kernel: Kernel, piece: int) -> None:
        super().__init__(name, kernel, piece)
        self._stepper = BesideKernel(kernel._network, kernel._loss) if isinstance(kernel, PlainKernel) else kernel
        self._made: OrderedDict[Any, _Static] = OrderedDict()

    def train(self, job: Job) -> None:
        """Train one stack; without recording if the samples are not rendered on the device."""
        rendered = job.batches[0].rendered()
        if rendered is None:
            train_job(job, self.kernel)
            return
        static = self._static(job, rendered)
        static.begin(job)
        for first in range(0, job.counts.num_steps, static.span):
            static.run(job, first, min(static.span, job.counts.num_steps - first))
        job.layout.copy_to(job.result, static.models)

    def _static(self, job: Job, rendered: tuple[Tensor, Tensor]) -> _Static:
        key = _signature(job, rendered)
        found = self._made.get(key)
        if found is not None and found.has_rate(job.work.lr):
            self._made.move_to_end(key)
            return found
        while len(self._made) >= _GRAPHS:
            self._made.popitem(last=False)
        # A learning rate that has changed once may change in every round: from then on it is a tensor on the device.
        self._made[key] = _Static(job, rendered, self._stepper, varying=found is not None)
        return self._made[key]


def _signature(job: Job, rendered: tuple[Tensor, Tensor]) -> Any:
    """Jobs with the same signature replay the same recording."""
    extras = tuple((name, tuple(value.shape), value.dtype) for name, value in sorted(job.extras.items()))
    shape = (len(job.start), job.counts.num_steps, *_width(job.counts), job.counts.in_step)
    return shape, replace(job.work, lr=1.0), extras, rendered[0].data_ptr(), rendered[0].shape


def _width(counts: StepCounts) -> tuple[int, bool]:
    """The size of the largest batch, and whether some batch is smaller."""
    batch = torch.minimum(counts.batch, counts.sizes)
    full = bool((batch == batch[0]).all()) and bool((counts.sizes % batch == 0).all())
    return int(batch.max()), not (full and counts.in_step)


def _channels_last(stack: Tensor) -> Tensor:
    """A stack [c, O, I, h, w] with the channels of every entry last."""
    return stack.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


class _Static:
    """The tensors that a recorded step reads and writes, and the recording."""

    def __init__(self, job: Job, rendered: tuple[Tensor, Tensor], kernel: Kernel, varying: bool) -> None:
        self._kernel, self._layout, self._work = kernel, job.layout, job.work
        self._x, self._y = rendered
        count, device, dtype = len(job.start), job.start.device, job.start.dtype
        self._optimizer = job.work.make_optimizer()
        self._lr: Number = torch.ones((), dtype=dtype, device=device) if varying else job.work.lr

        last = getattr(kernel, "prefers_channels_last", False)  # faster convolutions on a GPU

        def taken(slots: Sequence[Slot]) -> Stack:
            made = [torch.zeros(count, *slot.shape, dtype=dtype, device=device) for slot in slots]
            return [_channels_last(t) if last and t.dim() == 5 else t for t in made]

        self._params, self._buffers = taken(job.layout.parameters), taken(job.layout.buffers)
        self.models = [*self._params, *self._buffers]
        self._state = {name: taken(job.layout.parameters) for name in self._optimizer.keeps}
        self._anchor = taken(job.layout.parameters) if job.work.anchored else []
        self._extras = {name: torch.zeros_like(value) for name, value in job.extras.items()}
        self._keys = torch.zeros_like(job.keys)
        self._first = torch.zeros_like(job.batches[0].start)  # the first row of each client
        width, is_ragged = _width(job.counts)
        self.span = max(1, min(job.counts.num_steps, _ENTRIES // max(1, count * width)))  # steps per table
        shape = (self.span, count, width)
        self._where = [torch.zeros(shape, dtype=torch.int64, device=device) for _ in job.batches]
        self._mask = torch.ones(shape, dtype=dtype, device=device) if is_ragged else None
        stops = not bool((job.counts.steps == job.counts.num_steps).all())
        self._live = torch.ones(self.span, count, dtype=torch.bool, device=device) if stops else None
        clock = torch.zeros(2, dtype=torch.int64, device=device)
        self._clock, self._row, self._number = clock, clock[:1], clock[1:]  # row of the tables; step since the start
        self._count = torch.zeros((), dtype=dtype, device=device)  # number of the step, from 1
        self._recording: Recording | None = None
        self._tried = False  # to record the step

    def has_rate(self, lr: float) -> bool:
        """Whether the recorded step can use this learning rate."""
        return isinstance(self._lr, Tensor) or lr == self._lr

    def begin(self, job: Job) -> None:
        """Load the clients' models, and record the step if it is not recorded yet."""
        self._load(job)
        if isinstance(self._lr, Tensor):
            self._lr.fill_(job.work.lr)
        for name, tensor in self._extras.items():
            tensor.copy_(job.extras[name])
        self._keys.copy_(job.keys)
        self._first.copy_(job.batches[0].start)
        if job.start.is_cuda and not self._tried:
            self._record(job)

    def _load(self, job: Job) -> None:
        self._layout.copy_from(job.start, self.models)
        for stack, params in zip(self._anchor, self._params, strict=False):
            stack.copy_(params)
        for state in self._state.values():
            torch._foreach_zero_(state)

    def run(self, job: Job, first: int, count: int) -> None:
        """Fill the tables for some steps, and run them."""
        for batches, where in zip(job.batches, self._where, strict=True):
            rows, mask, live = batches.table(first, count, where.shape[2])
            where[:count].copy_(rows)
        if self._mask is not None:
            self._mask[:count].copy_(mask)
        if self._live is not None:
            self._live[:count].copy_(live)
        self._row.zero_()
        self._number.fill_(first)
        self._count.fill_(first)
        step: Callable[[], None] = self._step if self._recording is None else self._recording.replay
        for _ in range(count):
            step()

    def _record(self, job: Job) -> None:
        side = torch.cuda.Stream(device=job.start.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._row.zero_()
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self._row.zero_()
        self._tried, self._recording = True, Recording.of(self._step, job.start.device)
        self._load(job)  # the warm-up has changed the models

    def _step(self) -> None:
        self._count.add_(1)
        moved = [*self.models, *(tensor for stack in self._state.values() for tensor in stack)]
        before = [] if self._live is None else [tensor.clone() for tensor in moved]
        mask = None if self._mask is None else self._mask.index_select(0, self._row)[0]
        keys = mix(self._keys + self._number)
        drawn: dict[int, Batch] = {}

        def batch(stream: int) -> Batch:
            if stream not in drawn:
                where = self._where[stream].index_select(0, self._row)[0]
                weights = self._extras.get("weights")
                weights = None if weights is None else weights.gather(1, where - self._first.unsqueeze(1))
                drawn[stream] = Batch(rows_of(self._x, where), rows_of(self._y, where), mask, keys, weights)
            return drawn[stream]

        def gradient(at: Any, stream: int, model: int = 0) -> Stack:
            return self._kernel.gradients(list(at), self._work.buffers_of(self._buffers, model), batch(stream))

        optimizer, lr, count = self._optimizer, self._lr, self._count
        whole = stepping(self._kernel, self._work)
        if whole is not None:
            whole.step(self._params, self._buffers, batch(0), optimizer, self._state, lr, count)
        else:
            direction = self._work.direction(gradient, self._params, self._anchor, self._extras)
            optimizer(self._params, direction, self._state, lr, count)
            self._work.settle(self._params, self._anchor)
        if self._live is not None:
            live = self._live.index_select(0, self._row)[0]
            for old, now in zip(before, moved, strict=True):
                now.copy_(torch.where(live.reshape(-1, *[1] * (now.dim() - 1)), now, old))
        self._clock.add_(1)
