"""An engine whose clients cannot be asked: a run is looked at where the data of its clients is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from coterie.engines.base import Engine, Reply, Request
from coterie.errors import EngineError


class AbsentEngine(Engine):
    """Knows task and clients of a run, but has no data; what clients remember is not loaded."""

    name = "absent"

    def ask(self, request: Request, positions: Tensor) -> Iterator[Reply]:
        """Nobody is there."""
        raise EngineError("The run was opened without the data of its clients; open it with data to ask them.")

    def describe(self) -> dict[str, Any]:
        return {"engine": self.name, "device": str(self.device), "precision": str(self.dtype).removeprefix("torch.")}
