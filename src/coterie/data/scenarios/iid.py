"""All clients of one kind: samples dealt out evenly at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from coterie.data.scenario import Part, Partition, register_part


@register_part
@dataclass(frozen=True)
class Iid(Part):
    """Every training sample to exactly one client."""

    key: ClassVar[str] = "iid"
    summary: ClassVar[str] = "samples dealt out evenly at random"

    def configure(self, partition: Partition) -> None:
        """Nothing to add: this is how samples are dealt by default."""
