"""The fast engine: clients in stacks, by the plan that is fastest for this network on this machine.

Plans, in order of preference: `native` (a compiled program, on a CPU), `layers` (hand-written stacked layers fused
with the update), `folded` (image networks on a GPU, all clients as one batch), `stacked` (any network, by
`torch.func.vmap`), `loop` (one client at a time). On a CPU several threads may each train a stack of layers
(`layers+workers`). On a GPU steps may be recorded as a CUDA graph (`layers+graph`, `folded+graph`, `stacked+graph`,
`loop+graph`), also with the convolutions of several clients in parallel (`streams+graph`). At the start the engine
measures the possible plans on some of the run's clients and remembers the result for this machine;
`--set engine.plan=NAME` chooses instead.

The plans `native` and `layers` make whole steps of SGD with momentum. For another optimizer, or with clipped gradients,
they compute the gradients, and the step is made apart.

A network that cannot be stacked (its code depends on values, or its layers mix samples) is detected at the start by
comparing it with plain autograd; its clients are then trained one at a time, and the run says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.client.batches import Batch
from coterie.client.stack import Kernel, Plan
from coterie.client.work import SGD
from coterie.engines.in_process import InProcessEngine, arithmetic
from coterie.engines.kernels.folded import FoldedKernel
from coterie.engines.kernels.graphs import BesideKernel, GraphPlan
from coterie.engines.kernels.layers import Convolutions, LayerKernel, plain_network
from coterie.engines.kernels.native import NativeKernel, NativePlan, NotNative
from coterie.engines.kernels.plain import PlainKernel
from coterie.engines.kernels.stacked import StackedKernel
from coterie.engines.plans import Candidate, choose, measure
from coterie.errors import ConfigError
from coterie.nets.flat import Network

_CACHE_BYTES = 4 << 20  # of a stack on a CPU, so that it stays in the cache
_HEAP_BYTES = 24 << 20  # models of a chunk on a CPU: beyond 32 MB the C library takes fresh pages for each tensor
_LARGEST_PIECE = 32
_STREAMS = 16  # for the convolutions of different clients on a GPU
_LOOPS = 8  # clients of `loop+graph`, each on its own stream
_FOLDED = 48  # clients of `folded+graph`: enough to fill a GPU, also in small layers
_HEAVY = 1_000_000_000  # multiplications of a batch in the forward pass
_BESIDE = 64  # clients of `streams+graph`: each has its own launches


class VectorizedEngine(InProcessEngine):
    """Trains as many clients together as fit into memory."""

    name = "vectorized"
    measured: dict[str, float] | None = None  # microseconds per client step, by plan
    not_native: str | None = None  # why the compiled program is not used

    def make_plan(self) -> Plan:
        """The plan of the settings, or the fastest of the possible plans."""
        self.network.detect_keyed(self.data.federation.samples(0)[0])
        candidates = self._candidates()
        wanted = self.settings.plan
        if wanted != "auto":
            possible = [candidate for candidate in candidates if candidate.name == wanted]
            if not possible:
                names = ", ".join(candidate.name for candidate in candidates)
                raise ConfigError(
                    f"engine.plan={wanted} is not possible for this network and work here; possible: {names}."
                )
            candidates = possible
        if len(candidates) > 1:
            self.measured = measure(self, candidates)
        chosen = choose(candidates, self.measured) if self.measured else candidates[0]
        return chosen.make()

    def _candidates(self) -> list[Candidate]:
        """The possible plans, in order of preference."""
        network, loss = self.network, self.task.loss
        cuda = self.device.type == "cuda"
        can_record = cuda and network.keyed and self.data.rendered() is not None
        found: list[Candidate] = []

        def add(name: str, kernel: Kernel, piece: int, workers: int = 1, threads: int | None = None) -> None:
            found.append(Candidate(name, lambda: Plan(name, kernel, piece, workers, threads)))

        def add_recorded(name: str, kernel: Kernel, piece: int) -> None:
            if can_record:
                found.append(Candidate(name, lambda: GraphPlan(name, kernel, piece)))

        folded = self._folded() if cuda else None
        if folded is not None:
            piece = self._evened(min(self._chunk(), _FOLDED))
            add_recorded("folded+graph", folded, piece)
            add("folded", folded, piece)
        is_left_out = folded is not None and self._is_heavy()
        reason = None if is_left_out else self._why_not_stacked()
        if reason is None and not is_left_out:
            how = Convolutions(grouped=cuda, low=cuda and self.low_precision, patches=cuda)
            # The hand-written plans read classes; soft labels are rows of numbers.
            layers = LayerKernel.of(network, loss, how) if self.task.num_classes else None
            native = self._native() if layers is not None and not cuda else None
            if native is not None:
                made, scattered = native, self.data.rendered() is None
                found.append(Candidate("native", lambda: NativePlan(made, self._piece(), self._workers(), scattered)))
            if layers is not None:
                add_recorded("layers+graph", layers, self._chunk())
                if can_record and layers.has_images:
                    beside = LayerKernel.of(network, loss, replace(how, grouped=False, streams=_STREAMS))
                    assert beside is not None
                    add_recorded("streams+graph", beside, min(self._chunk(), _BESIDE))
                add("layers", layers, self._chunk() if cuda else self._piece())
                if not cuda and self._workers() > 1:
                    add("layers+workers", layers, self._piece(), self._workers())
            stacked = StackedKernel(network, loss, self.settings.compile)
            add_recorded("stacked+graph", stacked, self._chunk())
            add("stacked", stacked, self._chunk())
        elif reason is not None and folded is None:
            self.notes.append(f"the network cannot be stacked ({reason}); clients are trained one at a time")
        plain = PlainKernel(network, loss)
        add_recorded("loop+graph", plain, min(self._chunk(), _LOOPS))
        add("loop", BesideKernel(network, loss) if network.keyed else plain, 1, threads=self.threads_of_one())
        return found

    def _native(self) -> NativeKernel | None:
        """The compiled program, if it supports this network and computes what plain autograd does."""
        if self.low_precision:
            return None
        try:
            made = NativeKernel.of(self.network, self.task.loss, self.task.input_shape, self._workers())
        except NotNative as error:
            self.not_native = str(error)
            return None
        reason = None if made is None else self._differs(self.network, made, 1e-9 if self._itemsize == 8 else 1e-3)
        if reason is not None:
            self.not_native = reason
            self.notes.append(f"the compiled program is not used: {reason}")
            return None
        return made

    def _folded(self) -> FoldedKernel | None:
        """The kernel of an image network whose clients are one batch, if it computes what plain autograd does."""
        if plain_network(self.network, self.task.loss) is not None:
            return None  # it has a faster kernel
        alike = Network(self.task.module, torch.float64, torch.device("cpu"))
        tried = FoldedKernel.of(alike, self.task.loss)
        if tried is None or self._differs(alike, tried, 1e-6) is not None:
            return None
        here = FoldedKernel.of(self.network, self.task.loss, streams=_STREAMS)
        with arithmetic("float32", self.device, tuned=False):
            # Its kernels for this GPU. Gradients of MobileNetV2 in float32 are 1 % off in plain autograd too.
            reason = None if here is None else self._differs(self.network, here, 0.1)
        if reason is not None:
            self.notes.append(f"clients are not trained as one batch: {reason}")
            return None
        return FoldedKernel.of(self.network, self.task.loss, self.low_precision, _STREAMS)

    def _is_heavy(self) -> bool:
        """Whether stacked convolutions are so slow that even measuring them takes too long: large or grouped ones."""
        return not self._tuned or (self._multiplications or 0) * self._batch(self.task.work) > _HEAVY

    def _piece(self) -> int:
        """Clients per stack, so that it stays in the cache of a CPU."""
        if self.settings.piece is not None:
            return self.settings.piece
        work = self.task.work
        copies = 1 + len(work.make_optimizer().keeps)
        size = self._itemsize * (copies * self.task.layout.size + 2 * self._batch(work) * self._activations)
        return max(4, min(_CACHE_BYTES // size, _LARGEST_PIECE))

    def _workers(self) -> int:
        return torch.get_num_threads() if self.settings.workers is None else self.settings.workers

    def _chunk(self, work: SGD | None = None) -> int:
        """As many clients as fit into the budget."""
        if self.settings.chunk is not None:
            return self.settings.chunk
        most = self.memory_budget() // self.bytes_per_client(self.task.work if work is None else work)
        if self.device.type == "cpu":
            most = min(most, max(self._workers(), _HEAP_BYTES // (self.task.layout.size * self._itemsize)))
            return max(1, min(most, self.num_clients))
        return self._evened(max(1, min(most, self.num_clients)))

    def _evened(self, most: int) -> int:
        """As many clients, at most `most`, as give parts of one size: one recording on a GPU then serves them all."""
        return math.ceil(self.num_clients / math.ceil(self.num_clients / most))

    def chunk_size(self, work: SGD) -> int:
        """See `InProcessEngine.chunk_size`."""
        alone = self.plan.piece == 1 and self.plan.workers == 1 and self.settings.chunk is None
        return 1 if alone and self.device.type == "cpu" else self._chunk(work)

    def describe(self) -> dict[str, Any]:
        """See `Engine.describe`: with the plan and what was measured."""
        more = {"plan": self.plan.name, "piece": self.plan.piece, "workers": self.plan.workers}
        refused = getattr(self.plan.kernel, "compile_error", None)
        known = {"measured": self.measured, "not_compiled": refused, "not_native": self.not_native}
        return super().describe() | more | {name: value for name, value in known.items() if value}

    def remember(self, plan: Mapping[str, Any]) -> None:
        """Restore the measurements by which the plan was chosen."""
        self.measured = plan.get("measured")

    def _why_not_stacked(self) -> str | None:
        """Why vmap cannot be used; tested in float64 on the CPU, where only an error makes a difference."""
        if not self.network.keyed:
            return "it draws its own random numbers"
        if plain_network(self.network, self.task.loss) is not None:
            return None  # layers that vmap is known to support; trying it imports torch's compiler, a second or more
        network = Network(self.task.module, torch.float64, torch.device("cpu"))
        return self._differs(network, StackedKernel(network, self.task.loss), 1e-6)

    def _differs(self, network: Network, kernel: Kernel, tolerance: float) -> str | None:
        """Compare one ragged step of two clients with plain autograd; None if they agree."""
        layout, dtype, device = self.task.layout, network.dtype, network.device
        x, y = self.federation.samples(0)
        take = torch.arange(6) % len(x)
        x, y = network.inputs(x[take]).reshape(2, 3, *x.shape[1:]), y[take].reshape(2, 3, *y.shape[1:]).to(device)
        y = y.to(dtype) if y.is_floating_point() else y
        mask = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=dtype, device=device)
        keys = torch.tensor([11, 12], device=device)
        start = self.task.initial.to(device, dtype).expand(2, -1)

        def run(kernel: Kernel) -> list[list[Tensor]]:
            named = {name: t.clone() for name, t in layout.unpack(start).items()}
            params = [named[slot.name] for slot in layout.parameters]
            buffers = [named[slot.name] for slot in layout.buffers]
            with torch.no_grad():
                grads = kernel.gradients(params, buffers, Batch(x, y, mask, keys))
                return [grads, buffers, [kernel.outputs(start.contiguous(), x)]]

        expected = run(PlainKernel(network, self.task.loss))
        try:
            found = run(kernel)
        except Exception as error:  # vmap raises many kinds
            return (str(error).splitlines() or [type(error).__name__])[0][:160]
        for kind, wanted, got in zip(("gradients", "statistics", "outputs"), expected, found, strict=True):
            largest = max((float(tensor.norm()) for tensor in wanted), default=0.0)
            for one, other in zip(wanted, got, strict=True):
                # A gradient that is 0 but for rounding (a bias before a norm) is compared with the largest.
                if not float((one - other).norm()) <= tolerance * (float(one.norm()) + 0.01 * largest + 1e-6):
                    return f"its {kind} differ from plain ones"
        return None
