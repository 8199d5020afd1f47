"""The fast engine: stacks of clients as one program, in the way that is fastest for this network on this machine.

The ways, best first where they are equal: `layers` (hand-written stacked layers with the update folded in), `stacked`
(any network, by `torch.func.vmap`), `loop` (one client at a time). On a CPU stacks of layers may also be trained by
several threads, a stack each (`layers+workers`). On a GPU each way may be recorded as a CUDA graph (`layers+graph`,
`stacked+graph`, `loop+graph`), layers also with the convolutions of several clients beside each other
(`streams+graph`). The engine measures those that are possible on some of the run's own clients when it starts, and
remembers the result for this machine; `--set engine.plan=NAME` decides instead.

The compiled and the hand-written ways make steps of SGD with momentum. For another optimizer, or with clipped
gradients, the others are used, and the run says so.

A network that cannot be stacked (its code depends on values, or its layers mix samples in a way of their own) is found
out at the start by comparing with plain autograd; its clients are then trained one at a time, and the run says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coterie.client.batches import Batch
from coterie.client.stack import Kernel, Plan
from coterie.client.work import SGD
from coterie.engines.in_process import InProcessEngine
from coterie.engines.kernels.graphs import BesideKernel, GraphPlan
from coterie.engines.kernels.layers import Convolutions, LayerKernel
from coterie.engines.kernels.native import NativeKernel, NativePlan, NotNative
from coterie.engines.kernels.plain import PlainKernel
from coterie.engines.kernels.stacked import StackedKernel
from coterie.engines.plans import Candidate, choose, measure
from coterie.errors import ConfigError
from coterie.nets.flat import Network

_CACHE_BYTES = 4 << 20  # what a stack may take on a CPU, so that it stays in the cache
_HEAP_BYTES = 24 << 20  # models of a chunk on a CPU: beyond 32 MB the C library takes fresh pages for each tensor
_LARGEST_PIECE = 32
_STREAMS = 16  # on which convolutions of several clients run beside each other on a GPU
_LOOPS = 4  # clients of a recorded loop, each on a stream of its own
_BESIDE = 64  # clients that are recorded so: each has launches of its own


class VectorizedEngine(InProcessEngine):
    """Blocks of as many clients as fit into memory."""

    name = "vectorized"

    def make_plan(self) -> Plan:
        """The fastest of the ways that are possible here."""
        self.network.detect_keyed(self.data.federation.samples(0)[0])
        candidates = self._candidates()
        wanted = self.settings.plan
        known = {candidate.name for candidate in candidates}
        if wanted != "auto" and wanted not in known:
            possible = ", ".join(candidate.name for candidate in candidates)
            raise ConfigError(
                f"engine.plan={wanted} is not possible for this network and work here; possible: {possible}."
            )
        if wanted != "auto":
            chosen = next(candidate for candidate in candidates if candidate.name == wanted)
        elif len(candidates) == 1:
            chosen = candidates[0]
        else:
            self.measured = measure(self, candidates)
            chosen = choose(candidates, self.measured)
        if self._skips_layers:
            name = self.task.work.optimizer
            why = "clip_norm: the plans native and layers do not clip"
            why = why if name == "sgd" else f"optimizer {name}: the plans native and layers are for SGD"
            self.notes.append(f"{why}; using {chosen.name}")
        return chosen.make()

    measured: dict[str, float] | None = None  # microseconds of a client's step, by way
    _skips_layers = False  # layers could be used if the work were plain SGD

    def _candidates(self) -> list[Candidate]:
        """The ways that are possible, those to be preferred first."""
        plain = PlainKernel(self.network, self.task.loss)
        stacked = StackedKernel(self.network, self.task.loss, self.settings.compile)
        reason = self._why_not_stacked()
        found: list[Candidate] = []
        cuda = self._device.type == "cuda"
        graph = cuda and self.data.rendered() is not None and self.network.keyed
        low = cuda and self.settings.precision == "bf16"
        layers = (
            LayerKernel.of(self.network, self.task.loss, Convolutions(cuda, low, patches=cuda))
            if reason is None
            else None
        )
        if layers is not None and not self.task.work.is_plain:
            layers, self._skips_layers = None, True
        native = self._native() if layers is not None and not cuda else None
        if native is not None:
            made: NativeKernel = native
            found.append(
                Candidate(
                    "native", lambda: NativePlan(made, self._piece(), self._workers(), self.data.rendered() is None)
                )
            )
        if layers is not None:
            fast: LayerKernel = layers
            if graph:
                found.append(Candidate("layers+graph", lambda: GraphPlan("layers+graph", fast, self._chunk())))
            if graph and fast.has_images:
                beside = LayerKernel.of(self.network, self.task.loss, Convolutions(False, low, _STREAMS, patches=True))
                assert beside is not None
                wide = min(self._chunk(), _BESIDE)
                found.append(Candidate("streams+graph", lambda: GraphPlan("streams+graph", beside, wide)))
            piece, workers = self._chunk() if cuda else self._piece(), self._workers()
            found.append(Candidate("layers", lambda: Plan("layers", fast, piece)))
            if not cuda and workers > 1:
                found.append(Candidate("layers+workers", lambda: Plan("layers+workers", fast, piece, workers)))
        if reason is None:
            if graph:
                found.append(Candidate("stacked+graph", lambda: GraphPlan("stacked+graph", stacked, self._chunk())))
            found.append(Candidate("stacked", lambda: Plan("stacked", stacked, self._chunk())))
        else:
            self.notes.append(f"the network cannot be stacked ({reason}); clients are trained one at a time")
        if cuda and self.data.rendered() is not None and self.network.keyed:
            beside_each_other = min(self._chunk(), _LOOPS)
            found.append(Candidate("loop+graph", lambda: GraphPlan("loop+graph", plain, beside_each_other)))
        alone = BesideKernel(self.network, self.task.loss) if self.network.keyed else plain
        found.append(Candidate("loop", lambda: Plan("loop", alone)))
        return found

    not_native: str | None = None  # why the compiled program is not used

    def _native(self) -> NativeKernel | None:
        """The compiled program, if there is one for this network and it computes what plain autograd does."""
        if self.settings.precision == "bf16":
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

    def _piece(self) -> int:
        """Clients of a stack that stays in the cache of a CPU."""
        if self.settings.piece is not None:
            return self.settings.piece
        work = self.task.work
        batch = int(self.federation.train.sizes.max()) if work.batch_size == "full" else int(work.batch_size)
        copies = 1 + len(work.make_optimizer().keeps)
        size = self._itemsize * (copies * self.task.layout.size + 2 * batch * self._activations)
        return max(4, min(_CACHE_BYTES // size, _LARGEST_PIECE))

    def _workers(self) -> int:
        return torch.get_num_threads() if self.settings.workers is None else self.settings.workers

    def _chunk(self, work: SGD | None = None) -> int:
        """As many as the budget holds."""
        if self.settings.chunk is not None:
            return self.settings.chunk
        most = self.memory_budget() // self.bytes_per_client(self.task.work if work is None else work)
        if self._device.type == "cpu":
            most = min(most, max(self._workers(), _HEAP_BYTES // (self.task.layout.size * self._itemsize)))
        return max(1, min(most, self.num_clients))

    def chunk_size(self, work: SGD) -> int:
        """Clients whose models are in hand at a time."""
        alone = self.plan.piece == 1 and self.plan.workers == 1 and self.settings.chunk is None
        return 1 if alone and self._device.type == "cpu" else self._chunk(work)

    def describe(self) -> dict[str, Any]:
        """What was chosen, with the way and what was measured."""
        more = {"plan": self.plan.name, "piece": self.plan.piece, "workers": self.plan.workers}
        refused = getattr(self.plan.kernel, "compile_error", None)
        told = {"measured": self.measured, "not_compiled": refused, "not_native": self.not_native}
        return super().describe() | more | {name: value for name, value in told.items() if value}

    def remember(self, plan: Mapping[str, Any]) -> None:
        """What was measured then is why the way was chosen."""
        self.measured = plan.get("measured")

    def _why_not_stacked(self) -> str | None:
        """Try one ragged step of two clients both ways; None if they agree.

        In float64 on the CPU, where nothing but a fault makes a difference.
        """
        if not self.network.keyed:
            return "it draws random numbers of its own"
        network = Network(self.task.module, torch.float64, torch.device("cpu"))
        return self._differs(network, StackedKernel(network, self.task.loss), 1e-6)

    def _differs(self, network: Network, kernel: Kernel, tolerance: float) -> str | None:
        """One ragged step of two clients, by this kernel and by plain autograd; None if they agree."""
        layout, dtype = self.task.layout, network.dtype
        x, y = self.federation.samples(0)
        take = torch.arange(6) % len(x)
        x, y = x.to(dtype)[take].reshape(2, 3, *x.shape[1:]), y[take].reshape(2, 3, *y.shape[1:])
        y = y.to(dtype) if y.is_floating_point() else y
        mask = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=dtype)
        keys = torch.tensor([11, 12])
        start = self.task.initial.to(dtype).expand(2, -1)

        def run(kernel: Kernel) -> list[Tensor]:
            named = {name: t.clone() for name, t in layout.unpack(start).items()}
            params = [named[slot.name] for slot in layout.parameters]
            buffers = [named[slot.name] for slot in layout.buffers]
            with torch.no_grad():
                grads = kernel.gradients(params, buffers, Batch(x, y, mask, keys))
                return [*grads, *buffers, kernel.outputs(start.contiguous(), x)]

        expected = run(PlainKernel(network, self.task.loss))
        try:
            found = run(kernel)
        except Exception as error:  # vmap raises many kinds for what it cannot do
            return (str(error).splitlines() or [type(error).__name__])[0][:160]
        for one, other in zip(expected, found, strict=True):
            if not torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(one.abs().max() + 1e-6)):
                return "its gradients differ from plain ones"
        return None
