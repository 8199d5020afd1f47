"""Any network as a stack of c models, by `torch.func.vmap`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from coterie.client.batches import Batch
from coterie.client.work import Stack
from coterie.engines.kernels.plain import PlainKernel
from coterie.nets.flat import Loss, Network, Tensors
from coterie.nets.sequences import unfused


class StackedKernel:
    """Gradients and outputs of c models at once."""

    def __init__(self, network: Network, loss: Loss, compiled: bool = False) -> None:
        self._network, self._loss, self._layout = network, loss, network.layout
        self._names = [slot.name for slot in self._layout.parameters]
        self._buffer_names = [slot.name for slot in self._layout.buffers]
        self._functions: dict[tuple[bool, bool, bool], Any] = {  # by whether there are a mask and weights, and mode
            (mask, weights, train): torch.func.vmap(
                torch.func.grad(partial(self._mean_loss, train), has_aux=True),
                in_dims=(0, 0, 0, 0, 0 if mask else None, 0, 0 if weights else None),
            )
            for mask in (False, True)
            for weights in (False, True)
            for train in (False, True)
        }
        self._compiled: dict[Any, Any] | None = {} if compiled else None
        self._forward = torch.func.vmap(self._network, in_dims=(0, 0))
        self._one = PlainKernel(network, loss)

    def _mean_loss(
        self,
        train: bool,
        params: Tensors,
        buffers: Tensors,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        key: Tensor,
        weights: Tensor | None,
    ) -> tuple[Tensor, Tensors]:
        buffers = {name: buffer.clone() for name, buffer in buffers.items()}  # train mode writes into them
        outputs = self._network(params | buffers, x, train=train, mask=mask, key=key)
        losses = self._loss(outputs, y) if weights is None else self._loss(outputs, y) * weights
        mean = losses.mean() if mask is None else (losses * mask).sum() / mask.sum()
        return mean, buffers

    def gradients(self, params: Stack, buffers: Stack, batch: Batch, train: bool = True) -> Stack:
        """See `Kernel.gradients`."""
        named = dict(zip(self._names, params, strict=True))
        kept = dict(zip(self._buffer_names, buffers, strict=True))
        function = self._functions[batch.mask is not None, batch.weights is not None, train]
        with unfused():
            found, changed = self._called(function, named, kept, *batch)
        for name, buffer in kept.items():
            buffer.copy_(changed[name])
        return [found[name] for name in self._names]

    compile_error: str | None = None  # why torch.compile was requested but is not used

    def _called(self, function: Any, *arguments: Any) -> Any:
        """Call the compiled function; without the compiler, once it has failed."""
        if self._compiled is None:
            return function(*arguments)
        try:
            if function not in self._compiled:
                self._compiled[function] = torch.compile(function, dynamic=False)
            return self._compiled[function](*arguments)
        except Exception as error:  # the compiler raises many kinds
            self.compile_error = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            self._compiled = None
            return function(*arguments)

    def outputs(self, flat: Tensor, x: Tensor) -> Tensor:
        """See `Kernel.outputs`."""
        if len(flat) == 1:
            return self._one.outputs(flat, x)
        with unfused():
            found: Tensor = self._forward(self._layout.unpack(flat), x)
        return found
