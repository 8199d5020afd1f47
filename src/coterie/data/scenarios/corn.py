"""The benchmark of CORNFLQS (Ben Ali et al. 2025): four groups of clients in the order of the files.

Client p holds stretch p of each class, so the seed does not change who holds what: it only divides the test samples
into validation and test samples. Groups are consecutive quarters of the clients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from coterie.data.scenario import ClientShare, Part, Partition, register_part, unit_pixels
from coterie.data.transforms import Dilate, Erode, Rotate, SwapLabels, View
from coterie.errors import ConfigError, DataError
from coterie.settings import setting

_GROUPS = 4
_TESTS = 0.7  # share of the test samples of a client; the others are for validation
_TENTHS = (1, 4, 20, 40)  # sizes of clients with skew, in tenths of `per_class`
_SHIFTS: dict[str, list[tuple[str, View]]] = {
    "rotation": [("r000", ()), ("r090", (Rotate(90.0),)), ("r180", (Rotate(180.0),)), ("r270", (Rotate(270.0),))],
    "swap": [(f"s{one}{other}", (SwapLabels(one, other),)) for one, other in ((1, 7), (2, 7), (4, 7), (3, 8))],
    "erosion": [("eroded3", (Erode(3),)), ("dilated3", (Dilate(3),)), ("plain", ()), ("dilated8", (Dilate(8),))],
}


@register_part
@dataclass(frozen=True)
class Corn(Part):
    """Four groups with a shift of images or labels; clients of one size or of four."""

    key: ClassVar[str] = "corn"
    summary: ClassVar[str] = "four groups in the order of the files, with a shift and a skew of sizes (CORNFLQS)"

    shift: Literal["rotation", "swap", "erosion"] = setting("rotation", "how the groups differ")
    skew: Literal["none", "within", "between"] = setting(
        "none", "sizes of clients: 'none': equal; 'within': four sizes in each group; 'between': one size per group"
    )
    per_class: int = setting(50, "training samples of each class per client; with skew 0.1, 0.4, 2 or 4 times", ge=1)
    pooled: bool = setting(True, "validate on the samples of the whole group, as published; else on the client's own")

    def configure(self, partition: Partition) -> None:
        partition.dataset = unit_pixels(partition.dataset, self.key)
        names, views = zip(*_SHIFTS[self.shift], strict=True)
        partition.set_groups(list(names), list(views))
        partition.common = replace(partition.common, tests=partition.common.tests or "kind")
        partition.repeats = self.skew == "within"  # each size begins again at the first sample
        partition.set_partitioner(self.shares)

    def shares(self, partition: Partition) -> list[ClientShare]:
        if partition.common.kinds is not None:
            raise ConfigError("corn has as many clients in each group; leave out scenario.kinds.")
        groups = partition.client_groups()
        if len(groups) % _GROUPS:
            raise ConfigError(f"corn needs a multiple of {_GROUPS} clients. Got {len(groups)} instead.")
        members = len(groups) // _GROUPS
        train, test = (by_class(partition, rows) for rows in partition.pool(0))
        found = []
        for client, group in enumerate(groups):
            size, place = self._stretch(client, members)
            mine = [rows[size * place : size * (place + 1)] for rows in train]
            if not size or min(len(rows) for rows in mine) < size:
                raise DataError(
                    f"{partition.dataset.name} has too few samples of a class for {len(groups)} clients with "
                    f"{size} each; use fewer clients or another scenario.per_class."
                )
            pool = [rows[len(rows) // len(groups) * client :][: len(rows) // len(groups)] for rows in test]
            held, kept = _divided(torch.cat(pool), partition, group)
            name = f"{partition.group_names[group]}-{client % members:03d}"
            found.append(ClientShare(name, group, torch.cat(mine), kept, valid=held))
        if not self.pooled:
            return found
        valid = [share.valid for share in found if share.valid is not None]
        whole = [torch.cat(valid[group * members : (group + 1) * members]) for group in range(_GROUPS)]
        return [replace(share, valid=whole[share.group]) for share in found]

    def _stretch(self, client: int, members: int) -> tuple[int, int]:
        """How many samples of each class a client holds, and how many clients of this size come before it."""
        if self.skew == "none":
            return self.per_class, client
        place, size = divmod(client, _GROUPS) if self.skew == "within" else divmod(client, members)[::-1]
        return _TENTHS[size] * self.per_class // 10, place


def by_class(partition: Partition, rows: Tensor) -> list[Tensor]:
    """The rows of each class, in their order."""
    y = partition.dataset.y[rows]
    return [rows[y == label] for label in range(partition.dataset.num_classes)]


def _divided(rows: Tensor, partition: Partition, group: int) -> tuple[Tensor, Tensor]:
    """Validation and test rows of a client, in the proportions of the labels that its group sees."""
    from sklearn.model_selection import train_test_split

    y = partition.dataset.y[rows]
    for transform in partition.views[group]:
        y = transform.labels(y)
    try:
        halves = train_test_split(np.arange(len(rows)), test_size=_TESTS, random_state=partition.seed, stratify=y)
    except ValueError as error:
        raise DataError(f"{partition.dataset.name} has too few test samples for so many clients: {error}") from error
    return rows[torch.from_numpy(halves[0])], rows[torch.from_numpy(halves[1])]
