"""Groups that see their images rotated: group g by g / groups of a full turn."""

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
    summary: ClassVar[str] = "each group sees its images rotated by another angle"

    groups: int = setting(4, "number of rotations", ge=1, le=360)

    def configure(self, partition: Partition) -> None:
        shape = partition.dataset.input_shape
        if len(shape) != 3 or shape[-1] != shape[-2]:
            raise DataError(
                f"rotated needs square images, but samples of {partition.dataset.name} have shape {shape}, not "
                "(channels, n, n)."
            )
        angles = [360.0 * g / self.groups for g in range(self.groups)]
        views: list[View] = [() if angle == 0 else (Rotate(angle),) for angle in angles]
        partition.set_groups([f"r{angle:03.0f}" for angle in angles], views)
