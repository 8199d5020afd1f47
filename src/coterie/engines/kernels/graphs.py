"""Training steps as CUDA graphs: the launches of a step are recorded once, and replayed for every step of every stack.

A replay does no work on the host, so a step must not either: which samples a batch takes in each step is laid out in
tables before the first one, and the step reads its row by a counter that lies on the device. Clients that have fewer
steps than others of their stack stand still once they are done.

Without a GPU the same steps run one by one, unrecorded: that is how they are tested.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.client.batches import StepCounts
from coterie.client.optimizers import Optimizer, State
from coterie.client.stack import Job, Kernel, Plan, stepping, train_job
from coterie.client.work import SGD, Stack
from coterie.engines.kernels.plain import PlainKernel
from coterie.nets.flat import Loss, Network
from coterie.randomness import mix

_ENTRIES = 1 << 26  # of a table of samples; longer work is done in several tables
_GRAPHS = 6  # that are kept
_WARM_UPS = 2  # steps before recording, in which libraries choose their kernels


class BesideKernel(PlainKernel):
    """Plain autograd of a few clients, with the update: on a GPU each on a stream of its own.

    It does not look at the values of the mask, which a recorded step must not.
    """

    def __init__(self, network: Network, loss: Loss) -> None:
        super().__init__(network, loss)
        self._streams: list[Any] = []

    def gradients(
        self, params: Stack, buffers: Stack, x: Tensor, y: Tensor, mask: Tensor | None, keys: Tensor
    ) -> Stack:
        """See `Kernel.gradients`."""
        found = [self._one(params, buffers, x, y, mask, keys, i) for i in range(len(x))]
        return [torch.stack(parts) for parts in zip(*found, strict=True)]

    def can_step(self, work: SGD) -> bool:
        """See `SteppingKernel.can_step`: any optimizer, along the gradient."""
        return type(work) is SGD

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
        """See `SteppingKernel.step`."""
        lanes = self._lanes(x) if torch.cuda.is_available() and x.is_cuda else []
        for stream in lanes:
            stream.wait_stream(torch.cuda.current_stream())
        held = []  # until the streams have met again
        for i in range(len(x)):
            with torch.cuda.stream(lanes[i]) if lanes else contextlib.nullcontext():
                direction = [grad.unsqueeze(0) for grad in self._one(params, buffers, x, y, mask, keys, i)]
                held.append(direction)
                own = {name: [tensor[i : i + 1] for tensor in stack] for name, stack in state.items()}
                optimizer([p[i : i + 1] for p in params], direction, own, lr, count)
        for stream in lanes:
            torch.cuda.current_stream().wait_stream(stream)

    def _lanes(self, x: Tensor) -> list[Any]:
        while x.is_cuda and len(self._streams) < len(x):
            self._streams.append(torch.cuda.Stream(device=x.device))
        return self._streams[: len(x)]

    def _one(
        self, params: Stack, buffers: Stack, x: Tensor, y: Tensor, mask: Tensor | None, keys: Tensor, i: int
    ) -> Stack:
        inputs = x[i]
        if x.is_cuda and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        leaves = [p[i].detach().requires_grad_() for p in params]
        named = {slot.name: leaf for slot, leaf in zip(self._layout.parameters, leaves, strict=True)}
        named |= {slot.name: b[i] for slot, b in zip(self._layout.buffers, buffers, strict=True)}
        row = None if mask is None else mask[i]
        with torch.enable_grad():
            losses = self._loss(self._network(named, inputs, train=True, mask=row, key=keys[i], alone=True), y[i])
            loss = losses.mean() if row is None else (losses * row).sum() / row.sum()
        return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


class GraphPlan(Plan):
    """Stacks of clients whose steps are replayed."""

    def __init__(self, name: str, kernel: Kernel, piece: int) -> None:
        super().__init__(name, kernel, piece)
        self._stepper = BesideKernel(kernel._network, kernel._loss) if isinstance(kernel, PlainKernel) else kernel
        self._made: OrderedDict[Any, _Static] = OrderedDict()

    def train(self, job: Job) -> None:
        """Train one stack; where samples do not lie ready on the device, step by step."""
        rendered = job.batches[0].rendered()
        if rendered is None:
            train_job(job, self.kernel)
            return
        static = self._static(job, rendered)
        static.begin(job)
        span = static.span
        for first in range(0, job.counts.num_steps, span):
            static.run(job, first, min(span, job.counts.num_steps - first))
        static.finish(job)

    def _static(self, job: Job, rendered: tuple[Tensor, Tensor]) -> _Static:
        key = signature(job, rendered)
        found = self._made.get(key)
        if found is not None and found.can_do(job):
            self._made.move_to_end(key)
            return found
        while len(self._made) >= _GRAPHS:
            self._made.popitem(last=False)
        # A step size that has changed once may change in every round: from then on it lies on the device.
        self._made[key] = _Static(job, rendered, self._stepper, varying=found is not None)
        return self._made[key]


def signature(job: Job, rendered: tuple[Tensor, Tensor]) -> Any:
    """Jobs with the same signature replay the same steps on other data."""
    extras = tuple((name, tuple(value.shape), value.dtype) for name, value in sorted(job.extras.items()))
    plain = replace(job.work, lr=1.0)
    widths = (job.counts.num_steps, width_of(job.counts), is_ragged(job.counts), job.counts.in_step)
    return len(job.start), plain, widths, extras, rendered[0].data_ptr(), rendered[0].shape


def width_of(counts: StepCounts) -> int:
    """Samples of the largest batch."""
    return int(torch.minimum(counts.batch, counts.sizes).max())


def is_ragged(counts: StepCounts) -> bool:
    """Whether some batch is not full."""
    batch = torch.minimum(counts.batch, counts.sizes)
    full = bool((batch == batch[0]).all()) and bool((counts.sizes % batch == 0).all())
    return not (full and counts.in_step)


def _channels_last(stack: Tensor) -> Tensor:
    """A stack [c, O, I, h, w] whose every entry lies with its channels last."""
    return stack.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


class _Static:
    """The tensors a recorded step reads and writes, and the recording."""

    def __init__(self, job: Job, rendered: tuple[Tensor, Tensor], kernel: Kernel, varying: bool) -> None:
        self._kernel, self._layout = kernel, job.layout
        self._x, self._y = rendered
        count, device, dtype = len(job.start), job.start.device, job.start.dtype
        self._work: SGD = job.work
        self._optimizer = job.work.make_optimizer()
        self._lr: float | Tensor = torch.ones((), dtype=dtype, device=device) if varying else job.work.lr

        last = isinstance(kernel, BesideKernel)  # pictures with their channels last, as GPUs like them

        def taken(slots: Any) -> Stack:
            made = [torch.zeros(count, *slot.shape, dtype=dtype, device=device) for slot in slots]
            return [_channels_last(t) if last and t.dim() == 5 else t for t in made]

        self._params, self._buffers = taken(job.layout.parameters), taken(job.layout.buffers)
        self._state = {name: taken(job.layout.parameters) for name in self._optimizer.keeps}
        self._anchor = taken(job.layout.parameters) if job.work.anchored else []
        self._extras = {name: torch.zeros_like(value) for name, value in job.extras.items()}
        self._keys = torch.zeros_like(job.keys)
        width = width_of(job.counts)
        self.span = max(1, min(job.counts.num_steps, _ENTRIES // max(1, count * width)))
        shape = (self.span, count, width)
        self._where = [torch.zeros(shape, dtype=torch.int64, device=device) for _ in job.batches]
        self._is_ragged, self._stops = is_ragged(job.counts), not bool((job.counts.steps == job.counts.num_steps).all())
        self._mask = torch.ones(shape, dtype=dtype, device=device) if self._is_ragged else None
        self._live = torch.ones(self.span, count, dtype=torch.bool, device=device) if self._stops else None
        clock = torch.zeros(2, dtype=torch.int64, device=device)
        self._clock, self._row, self._number = clock, clock[:1], clock[1:]  # of the tables; of the step since the start
        self._count = torch.zeros((), dtype=dtype, device=device)  # of the step, from 1, as a float
        self._graph: Any = None

    # ---- before and after ----

    def can_do(self, job: Job) -> bool:
        """Whether the recorded step has the job's step size."""
        return isinstance(self._lr, Tensor) or job.work.lr == self._lr

    def begin(self, job: Job) -> None:
        """Put the clients' models in."""
        self._load(job)
        if isinstance(self._lr, Tensor):
            self._lr.fill_(job.work.lr)
        for name, tensor in self._extras.items():
            tensor.copy_(job.extras[name])
        self._keys.copy_(job.keys)
        if job.start.is_cuda and self._graph is None:
            self._record(job)

    def _load(self, job: Job) -> None:
        named = self._layout.unpack(job.start)
        slots = (*self._layout.parameters, *self._layout.buffers)
        for slot, tensor in zip(slots, (*self._params, *self._buffers), strict=True):
            tensor.copy_(named[slot.name])
        for slot, tensor in zip(self._layout.parameters, self._anchor, strict=False):
            tensor.copy_(named[slot.name])
        for stack in self._state.values():
            torch._foreach_zero_(stack)

    def run(self, job: Job, first: int, count: int) -> None:
        """Lay out the batches of some steps, and do them."""
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
        step: Callable[[], None] = self._step if self._graph is None else self._graph.replay
        for _ in range(count):
            step()

    def finish(self, job: Job) -> None:
        """Take the trained models out."""
        slots = (*self._layout.parameters, *self._layout.buffers)
        for slot, tensor in zip(slots, (*self._params, *self._buffers), strict=True):
            job.result[:, slot.start : slot.stop].copy_(tensor.flatten(1))

    def _record(self, job: Job) -> None:
        side = torch.cuda.Stream(device=job.start.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._row.zero_()
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self._row.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self._graph = graph
        self._load(job)  # the steps before have moved the models

    # ---- the step ----

    def _step(self) -> None:
        self._count.add_(1)
        moved = [*self._params, *self._buffers, *(tensor for stack in self._state.values() for tensor in stack)]
        before = [] if self._live is None else [tensor.clone() for tensor in moved]
        mask = None if self._mask is None else self._mask.index_select(0, self._row)[0]
        keys = mix(self._keys + self._number)
        drawn: dict[int, tuple[Tensor, Tensor]] = {}

        def batch(stream: int) -> tuple[Tensor, Tensor]:
            if stream not in drawn:
                where = self._where[stream].index_select(0, self._row)[0]
                flat = where.flatten()
                x = self._x.index_select(0, flat).reshape(*where.shape, *self._x.shape[1:])
                drawn[stream] = x, self._y.index_select(0, flat).reshape(*where.shape, *self._y.shape[1:])
            return drawn[stream]

        def gradient(at: Any, stream: int) -> Stack:
            x, y = batch(stream)
            return self._kernel.gradients(list(at), self._buffers, x, y, mask, keys)

        optimizer, lr, count = self._optimizer, self._lr, self._count
        whole = stepping(self._kernel, self._work)
        if whole is not None:
            whole.step(self._params, self._buffers, self._state, *batch(0), mask, keys, optimizer, lr, count)
        else:
            direction = self._work.direction(gradient, self._params, self._anchor, self._extras)
            optimizer(self._params, direction, self._state, lr, count)
        if self._live is not None:
            live = self._live.index_select(0, self._row)[0]
            for old, now in zip(before, moved, strict=True):
                now.copy_(torch.where(live.reshape(-1, *[1] * (now.dim() - 1)), now, old))
        self._clock.add_(1)
