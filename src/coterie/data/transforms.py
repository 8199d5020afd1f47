"""What a kind of client sees differently: transforms of samples, applied when a batch is made.

A view is a tuple of transforms. Data is stored once; a rotated client is a rotated view of it, not a copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from coterie.randomness import mix, normal


class Transform(Protocol):
    """One change of inputs, of labels, or of both; a frozen dataclass, so that its repr names it."""

    def inputs(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Change inputs [b, ...], already scaled; `rows` [b] name the samples, for what is random in them."""
        ...

    def labels(self, y: Tensor) -> Tensor:
        """Change labels [b]."""
        ...


View = tuple[Transform, ...]


@dataclass(frozen=True)
class Rotate:
    """Turn pictures counter-clockwise. Quarter turns are exact; other angles are interpolated."""

    degrees: float

    def inputs(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Turn [b, C, H, W]."""
        quarters, rest = divmod(self.degrees % 360, 90)
        if rest == 0:
            return torch.rot90(x, int(quarters), dims=(-2, -1))
        angle = torch.deg2rad(torch.tensor(self.degrees, dtype=x.dtype, device=x.device))
        cos, sin, zero = torch.cos(angle), torch.sin(angle), torch.zeros_like(angle)
        theta = torch.stack([torch.stack([cos, -sin, zero]), torch.stack([sin, cos, zero])])
        grid = functional.affine_grid(theta.expand(len(x), 2, 3), list(x.shape), align_corners=False)
        return functional.grid_sample(x, grid, padding_mode="border", align_corners=False)

    def labels(self, y: Tensor) -> Tensor:
        """Labels stay."""
        return y


@dataclass(frozen=True)
class SwapLabels:
    """Call class `one` by the name of class `other`, and the other way round."""

    one: int
    other: int

    def inputs(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Inputs stay."""
        return x

    def labels(self, y: Tensor) -> Tensor:
        """Exchange the two names."""
        return torch.where(y == self.one, self.other, torch.where(y == self.other, self.one, y))


@dataclass(frozen=True)
class Noise:
    """Add Gaussian noise; a sample has the same noise whenever it is seen."""

    strength: float

    def inputs(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Noise of `strength` standard deviations of a pixel range of [-1, 1]."""
        if rows is None:
            rows = torch.arange(len(x), device=x.device)
        noise = normal(mix(rows + 1), x[0].numel()).reshape(x.shape)
        return x + self.strength * noise.to(x.dtype)

    def labels(self, y: Tensor) -> Tensor:
        """Labels stay."""
        return y


@dataclass(frozen=True)
class Blur:
    """Blur pictures by a Gaussian of `sigma` pixels."""

    sigma: float

    def inputs(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Blur [b, C, H, W], rows and columns one after the other; the border is repeated."""
        reach = max(1, min(math.ceil(3 * self.sigma), min(x.shape[-2:]) - 1))
        place = torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device)
        weights = torch.exp(-0.5 * (place / self.sigma) ** 2)
        weights = weights / weights.sum()
        flat = x.reshape(-1, 1, *x.shape[-2:])
        flat = functional.conv2d(
            functional.pad(flat, (reach, reach, 0, 0), mode="replicate"), weights.reshape(1, 1, 1, -1)
        )
        flat = functional.conv2d(
            functional.pad(flat, (0, 0, reach, reach), mode="replicate"), weights.reshape(1, 1, -1, 1)
        )
        return flat.reshape(x.shape)

    def labels(self, y: Tensor) -> Tensor:
        """Labels stay."""
        return y


@dataclass(frozen=True)
class Contrast:
    """Scale each picture around its own mean; below 1 it fades."""

    factor: float

    def inputs(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Scale [b, ...]."""
        mean = x.flatten(1).mean(1).reshape([-1] + [1] * (x.dim() - 1))
        return mean + self.factor * (x - mean)

    def labels(self, y: Tensor) -> Tensor:
        """Labels stay."""
        return y


@dataclass(frozen=True)
class Colour:
    """Weigh the channels of colour pictures, as under a coloured light."""

    weights: tuple[float, ...]

    def inputs(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Weigh the channels of [b, C, H, W], darkness (-1) staying dark."""
        weights = torch.tensor(self.weights, dtype=x.dtype, device=x.device).reshape(1, -1, 1, 1)
        return (x + 1) * weights - 1

    def labels(self, y: Tensor) -> Tensor:
        """Labels stay."""
        return y


def apply_view(view: View, x: Tensor, y: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Inputs and labels as a client of this view sees them; `rows` [b] name the samples."""
    for transform in view:
        x, y = transform.inputs(x, rows), transform.labels(y)
    return x, y
