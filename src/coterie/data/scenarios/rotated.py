"""Kinds of client that hold their pictures differently: group g sees them turned by g / groups of a circle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from coterie.data.scenario import Part, Partition, register_part
from coterie.data.transforms import Rotate, View
from coterie.errors import DataError
from coterie.settings import setting


@register_part
@dataclass(frozen=True)
class Rotated(Part):
    """Groups by rotation: 0, 90, 180, 270 degrees for four, 0 and 180 for two."""

    key: ClassVar[str] = "rotated"
    summary: ClassVar[str] = "groups see the pictures turned by equal steps of a circle"

    groups: int = setting(4, "number of rotations", ge=1, le=360)

    def configure(self, partition: Partition) -> None:
        """One view a group."""
        shape = partition.dataset.input_shape
        if len(shape) != 3 or shape[-1] != shape[-2]:
            raise DataError(f"Only square pictures can be turned; samples of {partition.dataset.name} are {shape}.")
        angles = [360.0 * g / self.groups for g in range(self.groups)]
        views: list[View] = [() if angle == 0 else (Rotate(angle),) for angle in angles]
        partition.set_groups([f"r{angle:03.0f}" for angle in angles], views)
