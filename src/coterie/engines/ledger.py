"""Who sent how many bytes: every call of every engine writes here, so that methods can be compared.

Models and arrays are counted as they would travel: each distinct model once per client and round (models
are told apart by content). Single numbers per client (a sample count, a chosen label) are counted apart as
`scalars`, so that the cost of models compares exactly between methods. Phases are kept apart:
`start` (before the first round), `round`, `repair` (what the guard asked for on top), and `evaluate`.

Beside bytes, the work of the clients: how many gradients of single samples they have computed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.randomness import mix

Phase = Literal["start", "round", "repair", "evaluate"]


def fingerprints(table: Tensor) -> list[int]:
    """One number per row of [M, P] that tells its content; equal rows have equal numbers."""
    whole = torch.int64 if table.element_size() == 8 else torch.int32
    weights = _weights(table.shape[1], table.device)
    return [int((row.contiguous().view(whole) * weights).sum()) for row in table]


@functools.lru_cache(maxsize=4)
def _weights(size: int, device: torch.device) -> Tensor:
    """Odd random numbers; made once, since that takes longer than using them."""
    return mix(torch.arange(size, device=device)) | 1


@dataclass
class Ledger:
    """Bytes by phase and step, summed over clients and rounds."""

    entries: dict[str, dict[str, int]] = field(default_factory=dict)  # "phase/step" -> down, up, scalars, ...
    _seen: dict[tuple[Phase, int], NDArray[np.bool_]] = field(default_factory=dict, repr=False)

    def begin_round(self) -> None:
        """From here on models count as not yet sent."""
        self._seen.clear()

    def record_down(
        self,
        phase: Phase,
        step: str,
        clients: Tensor,
        population: int,
        models: Tensor | None,
        refs: Tensor | None,
        shared: Mapping[str, Tensor],
        each: Mapping[str, Tensor],
    ) -> None:
        """What goes to the clients [C]: rows of a table of models, and a payload."""
        entry = self._entry(phase, step)
        entry["messages"] += len(clients)
        if models is not None and refs is not None:
            entry["down"] += self._new_models(phase, clients.numpy(), population, models, refs) * (
                models.shape[1] * models.element_size()
            )
        for tensor in shared.values():
            kind = "scalars" if tensor.dim() == 0 else "down"
            entry[kind] += tensor.numel() * tensor.element_size() * len(clients)
        for tensor in each.values():
            entry["scalars" if tensor.dim() == 1 else "down"] += tensor.numel() * tensor.element_size()

    def record_up(self, phase: Phase, step: str, answers: Iterable[Tensor]) -> None:
        """What comes back: the tensors [c, ...] of one chunk of answers."""
        entry = self._entry(phase, step)
        for tensor in answers:
            entry["scalars" if tensor.dim() == 1 else "up"] += tensor.numel() * tensor.element_size()

    def record_work(self, phase: Phase, step: str, gradients: int) -> None:
        """What clients computed: gradients of single samples."""
        self._entry(phase, step)["gradients"] += gradients

    def record_wire(self, phase: Phase, down: int, up: int) -> None:
        """What a transport carried for a call, its own packing included."""
        entry = self._entry(phase, "wire")
        entry["wire_down"] = entry.get("wire_down", 0) + down
        entry["wire_up"] = entry.get("wire_up", 0) + up

    def _entry(self, phase: Phase, step: str) -> dict[str, int]:
        name = f"{phase}/{step.rpartition(':')[2]}"
        return self.entries.setdefault(name, {"down": 0, "up": 0, "scalars": 0, "messages": 0, "gradients": 0})

    def _new_models(
        self, phase: Phase, clients: NDArray[np.int64], population: int, models: Tensor, refs: Tensor
    ) -> int:
        if not len(clients):
            return 0
        prints = fingerprints(models)
        wanted = refs.cpu().numpy().reshape(len(clients), -1)  # [C, m]
        count = 0
        for number in set(prints):
            rows = [row for row, found in enumerate(prints) if found == number]
            asked = clients[np.isin(wanted, rows).any(1)]
            seen = self._seen.setdefault((phase, number), np.zeros(population, dtype=bool))
            if len(seen) < population:  # clients have joined since
                seen = self._seen[phase, number] = np.pad(seen, (0, population - len(seen)))
            count += int((~seen[asked]).sum())
            seen[asked] = True
        return count

    def totals(self) -> dict[str, Any]:
        """The ledger as it stands in a summary."""
        names = get_args(Phase)
        phases: dict[str, dict[str, int]] = {p: {"down": 0, "up": 0, "scalars": 0} for p in names}
        for name, entry in self.entries.items():
            for key in ("down", "up", "scalars"):
                phases[name.partition("/")[0]][key] += entry[key]
        rounds = phases.pop("round")
        work = dict.fromkeys(names, 0)
        for name, entry in self.entries.items():
            work[cast(Phase, name.partition("/")[0])] += entry["gradients"]
        carried = {way: sum(entry.get(f"wire_{way}", 0) for entry in self.entries.values()) for way in ("down", "up")}
        return {
            **rounds,
            **phases,
            **({"wire": carried} if any(carried.values()) else {}),
            "gradients": work,
            "by_step": {name: dict(entry) for name, entry in sorted(self.entries.items())},
        }
