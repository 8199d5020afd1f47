"""Example data for a deployment: the embedded digits, partitioned into sites with rotated images."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def rotated_shares(shares: int, turns: Sequence[int], seed: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    """Equal shares of the digits for `site-0` ...; site i is rotated by turns[i % len(turns)] degrees.

    >>> shares = rotated_shares(4, (0, 180))
    >>> sorted(shares), shares["site-1"][0].shape[1:]
    (['site-0', 'site-1', 'site-2', 'site-3'], torch.Size([1, 8, 8]))
    """
    x, y = _digits()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    each = len(x) // shares
    sites = {}
    for site in range(shares):
        rows = order[site * each : (site + 1) * each]
        turn = turns[site % len(turns)]
        sites[f"site-{site}"] = (torch.rot90(x[rows], turn // 90, (2, 3)).contiguous(), y[rows])
    return sites


def _digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's digits, from its file: importing scikit-learn takes longer than a site's training."""
    found = find_spec("sklearn")
    assert found is not None
    assert found.origin is not None
    table = np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    x = torch.from_numpy(table[:, :-1]).float().reshape(-1, 1, 8, 8) / 16
    return x, torch.from_numpy(table[:, -1]).long()
