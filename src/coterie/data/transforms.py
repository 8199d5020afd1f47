"""Transforms of samples, applied when a batch is made.

A view is a tuple of transforms. Data is stored once: a rotated client has a rotated view of it, not a copy.
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
    """A change of inputs, labels or both. A frozen dataclass: its repr is part of the federation's digest."""

    def inputs(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Transform scaled inputs [b, ...]; `rows` [b] identifies the samples, for random transforms."""
        return x

    def labels(self, y: Tensor) -> Tensor:
        """Transform labels [b]."""
        return y


View = tuple[Transform, ...]


@dataclass(frozen=True)
class Rotate(Transform):
    """Rotate images [b, C, H, W] counterclockwise. Multiples of 90 degrees are exact, other angles interpolated."""

    degrees: float

    def inputs(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        quarters, rest = divmod(self.degrees % 360, 90)
        if rest == 0:
            return torch.rot90(x, int(quarters), dims=(-2, -1))
        angle = torch.deg2rad(torch.tensor(self.degrees, dtype=x.dtype, device=x.device))
        cos, sin, zero = torch.cos(angle), torch.sin(angle), torch.zeros_like(angle)
        theta = torch.stack([torch.stack([cos, -sin, zero]), torch.stack([sin, cos, zero])])
        grid = functional.affine_grid(theta.expand(len(x), 2, 3), list(x.shape), align_corners=False)
        return functional.grid_sample(x, grid, padding_mode="border", align_corners=False)


@dataclass(frozen=True)
class Turn(Transform):
    """Rotate images [b, C, H, W] counterclockwise to the nearest pixel, as Pillow does; outside is 0."""

    degrees: float

    def inputs(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        quarters, rest = divmod(self.degrees % 360, 90)
        if rest == 0:
            return torch.rot90(x, int(quarters), dims=(-2, -1))
        height, width = x.shape[-2:]
        angle = math.radians(self.degrees % 360)
        cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
        middle_x, middle_y = width / 2, height / 2
        down = torch.arange(height, device=x.device).unsqueeze(1)
        right = torch.arange(width, device=x.device)
        # The pixel that a pixel comes from, from the middle of the pixel and in 16 binary digits.
        from_x = middle_x - cos * middle_x + sin * middle_y + cos / 2 - sin / 2
        from_y = middle_y - sin * middle_x - cos * middle_y + sin / 2 + cos / 2
        column = (_fixed(cos) * right - _fixed(sin) * down + _fixed(from_x)) >> 16  # [H, W]
        row = (_fixed(sin) * right + _fixed(cos) * down + _fixed(from_y)) >> 16
        inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
        source = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
        seen = x.flatten(-2).index_select(-1, source.flatten()).reshape(x.shape)
        return seen.where(inside, torch.zeros((), dtype=x.dtype, device=x.device))


def _fixed(value: float) -> int:
    return math.floor(value * 65536 + 0.5)


@dataclass(frozen=True)
class Dilate(Transform):
    """Each pixel of images [b, C, H, W] is the largest of a square around it; pixels outside do not count.

    Of a square of even size, the larger part is above and to the left.
    """

    size: int

    def inputs(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        before, after = self.size // 2, self.size - 1 - self.size // 2
        padded = functional.pad(x, (before, after, before, after), value=-math.inf)
        return functional.max_pool2d(padded, self.size, stride=1)


@dataclass(frozen=True)
class Erode(Transform):
    """As Dilate, with the smallest pixel."""

    size: int

    def inputs(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        return -Dilate(self.size).inputs(-x)


@dataclass(frozen=True)
class SwapLabels(Transform):
    """Swap two classes."""

    one: int
    other: int

    def labels(self, y: Tensor) -> Tensor:
        return torch.where(y == self.one, self.other, torch.where(y == self.other, self.one, y))


@dataclass(frozen=True)
class Noise(Transform):
    """Add Gaussian noise with standard deviation `strength`; a sample always has the same noise."""

    strength: float

    def inputs(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        if rows is None:
            rows = torch.arange(len(x), device=x.device)
        noise = normal(mix(rows + 1), x[0].numel()).reshape(x.shape)
        return x + self.strength * noise.to(x.dtype)


@dataclass(frozen=True)
class Blur(Transform):
    """Blur images [b, C, H, W] with a Gaussian of `sigma` pixels; borders are replicated."""

    sigma: float

    def inputs(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        reach = max(1, min(math.ceil(3 * self.sigma), min(x.shape[-2:]) - 1))
        place = torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device)
        weights = torch.exp(-0.5 * (place / self.sigma) ** 2)
        weights = weights / weights.sum()
        flat = x.reshape(-1, 1, *x.shape[-2:])
        for padding, shape in (((reach, reach, 0, 0), (1, 1, 1, -1)), ((0, 0, reach, reach), (1, 1, -1, 1))):
            flat = functional.conv2d(functional.pad(flat, padding, mode="replicate"), weights.reshape(shape))
        return flat.reshape(x.shape)


@dataclass(frozen=True)
class Contrast(Transform):
    """Scale each image around its own mean; a factor below 1 lowers the contrast."""

    factor: float

    def inputs(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        mean = x.flatten(1).mean(1).reshape([-1] + [1] * (x.dim() - 1))
        return mean + self.factor * (x - mean)


@dataclass(frozen=True)
class Colour(Transform):
    """Scale the channels of colour images [b, C, H, W], as under a coloured light; black (-1) stays black."""

    weights: tuple[float, ...]

    def inputs(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        weights = torch.tensor(self.weights, dtype=x.dtype, device=x.device).reshape(1, -1, 1, 1)
        return (x + 1) * weights - 1


def apply_view(view: View, x: Tensor, y: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Inputs and labels as seen through a view; `rows` [b] identifies the samples."""
    for transform in view:
        x, y = transform.inputs(x, rows), transform.labels(y)
    return x, y
