"""What a kind of client sees differently: transforms of samples, applied when a batch is made.

A view is a tuple of transforms. Data is stored once; a rotated client is a rotated view of it, not a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Transform(Protocol):
    """One change of inputs, of labels, or of both; a frozen dataclass, so that its repr names it."""

    def inputs(self, x: Tensor) -> Tensor:
        """Change inputs [b, ...], already scaled."""
        ...

    def labels(self, y: Tensor) -> Tensor:
        """Change labels [b]."""
        ...


View = tuple[Transform, ...]


@dataclass(frozen=True)
class Rotate:
    """Turn pictures counter-clockwise. Quarter turns are exact; other angles are interpolated."""

    degrees: float

    def inputs(self, x: Tensor) -> Tensor:
        """Turn [b, C, H, W]."""
        quarters, rest = divmod(self.degrees % 360, 90)
        if rest == 0:
            return torch.rot90(x, int(quarters), dims=(-2, -1))
        angle = torch.deg2rad(torch.tensor(self.degrees, dtype=x.dtype, device=x.device))
        cos, sin, zero = torch.cos(angle), torch.sin(angle), torch.zeros_like(angle)
        theta = torch.stack([torch.stack([cos, -sin, zero]), torch.stack([sin, cos, zero])])
        grid = torch.nn.functional.affine_grid(theta.expand(len(x), 2, 3), list(x.shape), align_corners=False)
        return torch.nn.functional.grid_sample(x, grid, padding_mode="border", align_corners=False)

    def labels(self, y: Tensor) -> Tensor:
        """Labels stay."""
        return y


def apply_view(view: View, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and labels as a client of this view sees them."""
    for transform in view:
        x, y = transform.inputs(x), transform.labels(y)
    return x, y
