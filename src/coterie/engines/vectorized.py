"""The fast engine: a chunk of clients as one program, with stacked parameters and `torch.func.vmap`.

A network that cannot be stacked (its code depends on values, or its layers mix samples in a way of their
own) is found out at the start by comparing with plain autograd; its clients are then trained one at a time,
and the run says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie.block import Kernel
from coterie.engines.in_process import InProcessEngine
from coterie.engines.loop import PlainKernel
from coterie.local import SGD, Stack
from coterie.network import Loss, Network, Tensors


class StackedKernel:
    """Gradients and outputs of c models at once."""

    def __init__(self, network: Network, loss: Loss) -> None:
        self._network, self._loss = network, loss
        self._layout = network.layout
        self._names = [slot.name for slot in self._layout.parameters]
        self._buffer_names = [slot.name for slot in self._layout.buffers]
        gradient = torch.func.grad(self._mean_loss, has_aux=True)
        self._plain = torch.func.vmap(gradient, in_dims=(0, 0, 0, 0, None, 0))
        self._masked = torch.func.vmap(gradient, in_dims=(0, 0, 0, 0, 0, 0))
        self._forward = torch.func.vmap(self._network, in_dims=(0, 0))
        self._one = PlainKernel(network, loss)

    def _mean_loss(
        self, params: Tensors, buffers: Tensors, x: Tensor, y: Tensor, mask: Tensor | None, key: Tensor
    ) -> tuple[Tensor, Tensors]:
        buffers = {name: buffer.clone() for name, buffer in buffers.items()}  # train mode writes into them
        outputs = self._network(params | buffers, x, train=True, mask=mask, key=key)
        losses = self._loss(outputs, y)
        mean = losses.mean() if mask is None else (losses * mask).sum() / mask.sum()
        return mean, buffers

    def gradients(
        self, params: Stack, buffers: Stack, x: Tensor, y: Tensor, mask: Tensor | None, keys: Tensor
    ) -> Stack:
        """See `Kernel.gradients`."""
        named = dict(zip(self._names, params, strict=True))
        kept = dict(zip(self._buffer_names, buffers, strict=True))
        function = self._plain if mask is None else self._masked
        found, changed = function(named, kept, x, y, mask, keys)
        for name, buffer in kept.items():
            buffer.copy_(changed[name])
        return [found[name] for name in self._names]

    def outputs(self, flat: Tensor, x: Tensor) -> Tensor:
        """See `Kernel.outputs`."""
        if len(flat) == 1:
            return self._one.outputs(flat, x)
        found: Tensor = self._forward(self._layout.unpack(flat), x)
        return found


class VectorizedEngine(InProcessEngine):
    """Blocks of as many clients as fit into memory."""

    name = "vectorized"

    def make_kernel(self) -> Kernel:
        """Stacked if the network allows it, else plain."""
        self.network.find_out_keyed(self.data.federation.samples(0)[0])
        plain = PlainKernel(self.network, self.task.loss)
        stacked = StackedKernel(self.network, self.task.loss)
        reason = self._why_not_stacked(plain, stacked)
        self._stacked = reason is None
        if reason is None:
            return stacked
        self.notes.append(f"the network cannot be stacked ({reason}); clients are trained one at a time")
        return plain

    def chunk_size(self, work: SGD) -> int:
        """As many as the budget holds."""
        if not self._stacked:
            return 1
        if self.settings.chunk is not None:
            return self.settings.chunk
        return max(1, min(self.memory_budget() // self.bytes_per_client(work), self.num_clients))

    def describe(self) -> dict[str, Any]:
        """What was chosen, with the way."""
        return super().describe() | {"way": "stacked" if self._stacked else "one at a time"}

    def _why_not_stacked(self, plain: Kernel, stacked: Kernel) -> str | None:
        """Try one ragged step of two clients both ways; None if they agree."""
        layout = self.task.layout
        if not self.network.keyed:
            return "it draws random numbers of its own"
        x, y = (t.to(self._device) for t in self.federation.samples(0))
        x = x.to(self._dtype)
        take = torch.arange(6, device=self._device) % len(x)
        x, y = x[take].reshape(2, 3, *x.shape[1:]), y[take].reshape(2, 3, *y.shape[1:])
        mask = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=self._dtype, device=self._device)
        keys = torch.tensor([11, 12], device=self._device)
        start = self.initial().expand(2, -1)

        def run(kernel: Kernel) -> list[Tensor]:
            named = {name: t.clone() for name, t in layout.unpack(start).items()}
            params = [named[slot.name] for slot in layout.parameters]
            buffers = [named[slot.name] for slot in layout.buffers]
            with torch.no_grad():
                grads = kernel.gradients(params, buffers, x, y, mask, keys)
                return [*grads, *buffers, kernel.outputs(start.contiguous(), x)]

        # In full precision: tf32 rounds the two ways differently, by more than a fault would show.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            expected = run(plain)
            try:
                found = run(stacked)
            except Exception as error:  # vmap raises many kinds for what it cannot do
                return (str(error).splitlines() or [type(error).__name__])[0][:160]
        tolerance = 1e-3 if self._dtype == torch.float32 else 1e-8
        for one, other in zip(expected, found, strict=True):
            if not torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(one.abs().max() + 1e-6)):
                return "stacked gradients differ from plain ones"
        return None
