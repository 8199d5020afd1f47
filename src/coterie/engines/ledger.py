"""Bytes sent in both directions: every engine records its calls here, so that methods can be compared.

Models and arrays are counted as they would travel: each distinct model once per client and round, where equal
content is one model. Single numbers per client (a sample count, a chosen label) are counted apart as `scalars`, so
that the cost of models compares exactly between methods. Phases are kept apart: `start` (before the first round),
`round`, `repair` (extra calls of the guard), and `evaluate`.

Scores on validation samples are not counted: they only monitor a run, and no method needs them.

The ledger also counts the clients' work: the number of per-sample gradients they computed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.randomness import mix

Phase = Literal["start", "round", "repair", "evaluate"]


def fingerprints(table: Tensor) -> list[int]:
    """A hash of each row of [M, P]; equal rows have equal hashes."""
    whole = torch.int64 if table.element_size() == 8 else torch.int32
    weights = _weights(table.shape[1], table.device)
    return [int((row.contiguous().view(whole) * weights).sum()) for row in table]


@functools.lru_cache(maxsize=4)
def _weights(size: int, device: torch.device) -> Tensor:
    """Odd random numbers, cached: drawing them takes longer than using them."""
    return mix(torch.arange(size, device=device)) | 1


@dataclass
class Ledger:
    """Bytes by phase and step, summed over clients and rounds."""

    entries: dict[str, dict[str, int]] = field(default_factory=dict)  # "phase/step" -> down, up, scalars, ...
    _seen: dict[tuple[Phase, int], NDArray[np.bool_]] = field(default_factory=dict, repr=False)

    def begin_round(self) -> None:
        """Forget which models were sent."""
        self._seen.clear()

    def record_models(
        self, phase: Phase, step: str, clients: Tensor, population: int, models: Tensor, refs: Tensor
    ) -> None:
        """Rows `refs` of a table of models, sent to clients [C] of a population."""
        if not len(clients):
            return
        entry = self._entry(phase, step)
        entry["largest_call"] = max(entry.get("largest_call", 0), len(clients))  # clients asked at once
        prints = fingerprints(models)
        wanted = refs.cpu().numpy().reshape(len(clients), -1)  # [C, m]
        for number in set(prints):
            rows = [row for row, found in enumerate(prints) if found == number]
            asked = clients.numpy()[np.isin(wanted, rows).any(1)]
            seen = self._seen.setdefault((phase, number), np.zeros(population, dtype=bool))
            if len(seen) < population:  # clients have joined since
                seen = self._seen[phase, number] = np.pad(seen, (0, population - len(seen)))
            entry["down"] += int((~seen[asked]).sum()) * models[0].numel() * models.element_size()
            seen[asked] = True

    def record_payload(
        self, phase: Phase, step: str, clients: int, shared: Mapping[str, Tensor], each: Mapping[str, Tensor]
    ) -> None:
        """One message to each client with its share of the payload."""
        entry = self._entry(phase, step)
        entry["messages"] += clients
        for tensor in shared.values():
            entry["scalars" if tensor.dim() == 0 else "down"] += tensor.numel() * tensor.element_size() * clients
        for tensor in each.values():
            entry["scalars" if tensor.dim() == 1 else "down"] += tensor.numel() * tensor.element_size()

    def record_up(self, phase: Phase, step: str, answers: Iterable[Tensor]) -> None:
        """The tensors [c, ...] of one chunk of answers."""
        entry = self._entry(phase, step)
        for tensor in answers:
            entry["scalars" if tensor.dim() == 1 else "up"] += tensor.numel() * tensor.element_size()

    def record_work(self, phase: Phase, step: str, gradients: int) -> None:
        """Per-sample gradients that clients computed."""
        self._entry(phase, step)["gradients"] += gradients

    def record_wire(self, phase: Phase, messages: int, down: int, up: int) -> None:
        """Messages of a transport, and the bytes that it carried, including its encoding.

        A message that carries two calls is recorded once, in the phase of the call that it was sent for.
        """
        entry = self._entry(phase, "wire")
        for name, count in (("messages", messages), ("down", down), ("up", up)):
            entry[f"wire_{name}"] = entry.get(f"wire_{name}", 0) + count

    def _entry(self, phase: Phase, step: str) -> dict[str, int]:
        name = f"{phase}/{step.rpartition(':')[2]}"
        return self.entries.setdefault(name, {"down": 0, "up": 0, "scalars": 0, "messages": 0, "gradients": 0})

    def totals(self) -> dict[str, Any]:
        """The ledger as it is written to a summary."""
        names = get_args(Phase)
        phases: dict[str, dict[str, int]] = {p: {"down": 0, "up": 0, "scalars": 0} for p in names}
        work = dict.fromkeys(names, 0)
        for name, entry in self.entries.items():
            phase = name.partition("/")[0]
            work[phase] += entry["gradients"]
            for key in ("down", "up", "scalars"):
                phases[phase][key] += entry[key]
        wire = {
            name: sum(entry.get(f"wire_{name}", 0) for entry in self.entries.values())
            for name in ("messages", "down", "up")
        }
        return {
            **phases.pop("round"),
            **phases,
            **({"wire": wire} if any(wire.values()) else {}),
            "gradients": work,
            "by_step": {name: dict(entry) for name, entry in sorted(self.entries.items())},
        }
