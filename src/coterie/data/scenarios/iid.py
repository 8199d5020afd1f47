"""IID clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from coterie.data.scenario import Part, Partition, register_part


@register_part
@dataclass(frozen=True)
class Iid(Part):
    """Each training sample goes to exactly one client."""

    key: ClassVar[str] = "iid"
    summary: ClassVar[str] = "samples distributed evenly at random"

    def configure(self, partition: Partition) -> None:
        """Nothing to do: this is the default."""
