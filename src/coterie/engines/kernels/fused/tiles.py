"""How the work of a kernel is divided into programs."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

# Numbers that are no reason to compile a kernel anew: each variant takes a good part of a second.
SIZES = [
    "rows", "spatial", "per", "parts", "blocks", "places", "images", "groups", "high", "wide", "out_high", "out_wide",
]  # fmt: skip

_PROGRAMS = 4096  # that fill a GPU
_MOST_PARTS = 64  # into which the rows of a client are divided for a sum


def tiles(channels: int, entries: int, widest: int = 64) -> tuple[int, int]:
    """Rows and channels of a tile with this many entries."""
    wide = min(widest, max(32, triton.next_power_of_2(channels)))
    return entries // wide, wide


def fitting(channels: int) -> int:
    """The width of tiles that leaves few columns empty."""
    return 64 if channels % 64 == 0 else 32


def parts_of(rows: int, tile: int, others: int) -> tuple[int, int]:
    """Into how many parts the rows are divided for a sum, and the rows of each; `others` programs run for each part."""
    wanted = min(_MOST_PARTS, triton.cdiv(_PROGRAMS, others), max(1, rows // (2 * tile)))
    per = triton.cdiv(triton.cdiv(rows, wanted), tile) * tile
    return triton.cdiv(rows, per), per


def channels_last(x: Tensor) -> Tensor:
    """Images with the channels last in memory."""
    return x.contiguous(memory_format=torch.channels_last)


def like(dy: Tensor, x: Tensor) -> Tensor:
    """A gradient with the layout of what it belongs to."""
    return dy if dy.stride() == x.stride() else torch.empty_like(x, dtype=dy.dtype).copy_(dy)
