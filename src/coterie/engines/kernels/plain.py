"""Autograd on one model at a time: the reference that every other kernel must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.client.work import Stack
from coterie.nets.flat import Layout, Loss, Network


class PlainKernel:
    """Autograd on one model; a stack of several is done one after the other."""

    def __init__(self, network: Network, loss: Loss) -> None:
        self._network, self._loss = network, loss
        self._layout: Layout = network.layout

    def gradients(
        self, params: Stack, buffers: Stack, x: Tensor, y: Tensor, mask: Tensor | None, keys: Tensor
    ) -> Stack:
        """See `Kernel.gradients`."""
        found = []
        for i in range(len(x)):
            rows = slice(None) if mask is None else mask[i].bool()
            found.append(
                self._gradient([p[i] for p in params], [b[i] for b in buffers], x[i][rows], y[i][rows], keys[i])
            )
        return [torch.stack(parts) for parts in zip(*found, strict=True)]

    def _gradient(self, params: Stack, buffers: Stack, x: Tensor, y: Tensor, key: Tensor) -> Stack:
        leaves = [p.detach().requires_grad_() for p in params]
        named = {slot.name: leaf for slot, leaf in zip(self._layout.parameters, leaves, strict=True)}
        named |= {slot.name: buffer for slot, buffer in zip(self._layout.buffers, buffers, strict=True)}
        devices = [x.device] if x.is_cuda else []
        with torch.enable_grad(), torch.random.fork_rng(devices=devices, enabled=not self._network.keyed):
            if not self._network.keyed:
                torch.manual_seed(int(key) & ((1 << 63) - 1))
            outputs = self._network(named, x, train=True, key=key, alone=True)
            loss = self._loss(outputs, y).mean()
        return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))

    def outputs(self, flat: Tensor, x: Tensor) -> Tensor:
        """See `Kernel.outputs`."""
        return torch.stack(
            [self._network(self._layout.unpack(row), rows, alone=True) for row, rows in zip(flat, x, strict=True)]
        )
