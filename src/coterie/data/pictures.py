"""Samples as displayable images.

Uses only numpy and torch: runs store images for their reports, and must not depend on a plotting library.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.federation import Federation, Split

Floats = NDArray[np.float64]


def is_picture(shape: Sequence[int]) -> bool:
    """Whether a sample of this shape is an image: [1 or 3, H, W].

    >>> is_picture((1, 8, 8)), is_picture((3, 32, 32)), is_picture((784,)), is_picture((1, 80, 1))
    (True, True, False, False)
    """
    return len(shape) == 3 and shape[0] in (1, 3) and min(shape[1:]) > 1


def picture(federation: Federation, client: int, row: Tensor) -> Floats:
    """One sample (row [1] of the packed data) as this client sees it, in the units of the data: [H, W, 3]."""
    everyone = torch.zeros(len(federation), dtype=torch.int64)
    alone = replace(federation, train=Split(row, torch.tensor([0, 1]), everyone))
    x = federation.unscaled(alone.samples(client)[0][0])  # [C, H, W]
    return np.moveaxis(x.expand(3, *x.shape[1:]).double().numpy(), 0, -1)


def black_and_white(federation: Federation, images: Iterable[Floats]) -> tuple[float, float]:
    """The values to display as black and as white."""
    if federation.x.dtype == torch.uint8:
        top = float(federation.x.max())
        return 0.0, 255.0 if top > 127 else max(top, 1.0)  # the embedded digits range from 0 to 16
    shown = list(images)
    values = np.stack(shown) if shown else np.zeros(1)
    low, high = float(values.min()), float(values.max())
    return low, high if high > low else low + 1.0


def spread_evenly(total: int, most: int) -> list[int]:
    """Up to `most` evenly spaced indices of range(total).

    >>> spread_evenly(3, 5), spread_evenly(10, 4), spread_evenly(9, 1)
    ([0, 1, 2], [0, 3, 6, 9], [0])
    """
    if total <= most:
        return list(range(total))
    return [0] if most == 1 else [round(i * (total - 1) / (most - 1)) for i in range(most)]


def to_shades(x: Tensor) -> NDArray[np.uint8]:
    """Inputs [..., C, H, W] as images [..., H, W, C], each scaled to its own range."""
    flat = x.flatten(-3)
    low, high = flat.amin(-1), flat.amax(-1)
    scaled = (x - low[..., None, None, None]) / (high - low).clamp_min(1e-12)[..., None, None, None]
    return np.moveaxis((255 * scaled).round().to(torch.uint8).cpu().numpy(), -3, -1)
