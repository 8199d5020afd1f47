"""Autograd on one model at a time: the reference that every other kernel must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.client.batches import Batch
from coterie.client.work import Stack
from coterie.nets.flat import Loss, Network


def as_fast_images(x: Tensor) -> Tensor:
    """The inputs of one model, [n, ...]; images with their channels last, which convolutions and their norms prefer."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


class PlainKernel:
    """Autograd on one model after the other."""

    def __init__(self, network: Network, loss: Loss) -> None:
        self._network, self._loss, self._layout = network, loss, network.layout

    def gradients(self, params: Stack, buffers: Stack, batch: Batch, train: bool = True) -> Stack:
        """See `Kernel.gradients`."""
        found = []
        gradient = self._gradient if self._network.keyed else self._seeded_gradient
        for i, (x, y) in enumerate(zip(batch.x, batch.y, strict=True)):
            rows = slice(None) if batch.mask is None else batch.mask[i].bool()
            weights = None if batch.weights is None else batch.weights[i][rows]
            own = [p[i] for p in params], [b[i] for b in buffers]
            found.append(gradient(*own, as_fast_images(x[rows]), y[rows], batch.keys[i], weights=weights, train=train))
        return [torch.stack(parts) for parts in zip(*found, strict=True)]

    def _gradient(
        self,
        params: Stack,
        buffers: Stack,
        x: Tensor,
        y: Tensor,
        key: Tensor,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
        train: bool = True,
    ) -> Stack:
        leaves = [p.detach().requires_grad_() for p in params]
        named = {slot.name: leaf for slot, leaf in zip(self._layout.slots, (*leaves, *buffers), strict=True)}
        with torch.enable_grad():
            losses = self._loss(self._network(named, x, train=train, mask=mask, key=key, alone=True), y)
            losses = losses if weights is None else losses * weights
            loss = losses.mean() if mask is None else (losses * mask).sum() / mask.sum()
        return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))

    def _seeded_gradient(
        self,
        params: Stack,
        buffers: Stack,
        x: Tensor,
        y: Tensor,
        key: Tensor,
        weights: Tensor | None = None,
        train: bool = True,
    ) -> Stack:
        """For a network that draws from torch's generator."""
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            torch.manual_seed(int(key) & ((1 << 63) - 1))
            return self._gradient(params, buffers, x, y, key, weights=weights, train=train)

    def outputs(self, flat: Tensor, x: Tensor) -> Tensor:
        """See `Kernel.outputs`."""
        rows = (as_fast_images(one) for one in x)
        return torch.stack(
            [self._network(self._layout.unpack(row), own, alone=True) for row, own in zip(flat, rows, strict=True)]
        )
