"""Sketches: short vectors that keep distances between models or gradients."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from coterie.randomness import Rng, bits

_BLOCK = 2048  # columns that are folded at a time


class Sketch:
    """A count sketch (Charikar et al. 2002): [c, P] -> [c, width], keeping distances in expectation.

    Entry j gets a random sign and is added to bucket j mod width. This needs no matrix, and a GPU adds in a fixed
    order.
    """

    def __init__(self, size: int, width: int, rng: Rng, device: torch.device) -> None:
        self.width = min(width, size)
        hashes = bits(torch.tensor(rng.at("sketch").key, device=device), size)
        self._signs = (1 - 2 * (hashes & 1)).to(torch.int8)

    def __call__(self, rows: Tensor) -> Tensor:
        """Sketch each row."""
        return fold(rows, self._signs.to(rows.dtype), self.width)


def fold(rows: Tensor, signs: Tensor, width: int) -> Tensor:
    """Add entry j, with its sign, to bucket j mod width.

    Block by block into one small sum: copies as large as the models would cost more than the arithmetic.

    >>> fold(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]), torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0]), 2)
    tensor([[3., 6.]])
    """
    size = rows.shape[1]
    if size <= width:
        return rows
    block = width * max(1, min(_BLOCK // width, size // width))
    total = rows[:, :block] * signs[:block]
    for start in range(block, size, block):
        stop = min(start + block, size)
        total[:, : stop - start].addcmul_(rows[:, start:stop], signs[start:stop])
    return total.reshape(len(rows), -1, width).sum(1)


@functools.lru_cache(maxsize=8)
def sketch_of(size: int, width: int, rng: Rng, device: torch.device) -> Sketch:
    """A cached sketch: drawing the signs of a large model takes longer than using them."""
    return Sketch(size, width, rng, device)
