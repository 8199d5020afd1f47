"""Differential privacy at the client: clip what is sent, and add Gaussian noise to it, before it leaves.

Vectors that training makes are clipped to a length and blurred. A model is clipped by its difference to the model that
was sent, which the server knows. Everything else in an answer leaves as it is, and `Released` records its names: the
guarantee does not cover it. `docs/privacy.md` states the guarantee.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coterie.client.block import Models, take
from coterie.randomness import normal, normal_of

SCORES = "scores"  # stands for all that evaluation sends
_VECTORS = ("params", "gradient", "change")  # [c, P]; of several models [c, m, P], each on its own
_SKETCHES = ("signature", "contrast")  # [c, L, D], together one vector: methods compare their lengths
NOISED = (*_VECTORS, *_SKETCHES)

Draw = Callable[[str, int, int], Tensor]
"""Standard normal numbers for a tensor's name, a client's position, and how many."""


def seeded(keys: Callable[[str], Tensor]) -> Draw:
    """Noise that follows from keys [c] by purpose, for simulations: the same on every engine, and no secret."""
    return lambda name, client, count: normal(keys(f"private {name}")[client], count)


def fresh(name: str, client: int, count: int) -> Tensor:
    """Noise from the random numbers of the operating system, for sites."""
    raw = bytearray(os.urandom(16 * ((count + 1) // 2)))
    return normal_of(torch.frombuffer(raw, dtype=torch.int64), count)


def protected(
    answer: Mapping[str, Tensor], sent: Models | None, clip: float, noise: float, draw: Draw
) -> dict[str, Tensor]:
    """The tensors of an answer [c, ...], clipped to `clip` and with noise of deviation `noise * clip` per number."""
    found = dict(answer)
    for name in (name for name in _VECTORS if name in found):
        true = found[name]
        start = _start(found, sent) if name == "params" else torch.zeros_like(true)
        rows = (true.double() - start).reshape(len(true), -1, true.shape[-1])
        found[name] = (start + _blurred(rows, clip, noise, draw, name).reshape(true.shape)).to(true.dtype)
    sketches = [name for name in _SKETCHES if name in found]
    if sketches:
        rows = torch.cat([found[name].double().flatten(1) for name in sketches], dim=1).unsqueeze(1)
        parts = _blurred(rows, clip, noise, draw, "sketch").split([found[n][0].numel() for n in sketches], dim=2)
        found |= {
            name: part.reshape(found[name].shape).to(found[name]) for name, part in zip(sketches, parts, strict=True)
        }
    return found


def _blurred(rows: Tensor, clip: float, noise: float, draw: Draw, name: str) -> Tensor:
    """Vectors [c, vectors, n], each clipped, with noise."""
    length = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
    rows = rows * (clip / length.clamp_min(clip))  # what is not finite stays so, and is refused as a failure
    if noise:
        for client in range(len(rows)):
            rows[client] += noise * clip * draw(name, client, rows[client].numel()).to(rows).view_as(rows[client])
    return rows


def _start(answer: Mapping[str, Tensor], sent: Models | None) -> Tensor:
    """What models are compared with: those that were sent; of several the chosen one, else the first."""
    true = answer["params"]
    if sent is None or sent.table.shape[1] != true.shape[-1]:
        return torch.zeros_like(true)
    if sent.refs.dim() == 1:
        return sent.rows().to(true)
    if true.dim() == 3:
        return sent.table[sent.refs].to(true)
    first = torch.zeros(len(true), dtype=torch.int64, device=true.device)
    return take(sent, answer.get("choice", first)).to(true)


@dataclass
class Released:
    """How many noised vectors each client has sent in a run, and what was sent without noise."""

    counts: list[int] = field(default_factory=list)  # [N]
    noised: set[str] = field(default_factory=set)
    exact: set[str] = field(default_factory=set)

    def record(
        self, answer: Mapping[str, Tensor], clients: Iterable[int], failed: Iterable[int], is_scored: bool
    ) -> None:
        """An answer of these clients, used or not. Those that failed may have sent theirs, which counts too."""
        if is_scored:
            self.exact.add(SCORES)
            return
        names = [name for name in answer if name in NOISED]
        self.noised.update(names)
        self.exact.update(set(answer) - set(names))
        vectors = sum(answer[n].shape[1] if answer[n].dim() > 2 else 1 for n in names if n in _VECTORS)
        vectors += any(name in _SKETCHES for name in names)
        for some, count in ((clients, vectors), (failed, max(1, vectors))):
            for client in some:
                self.counts += [0] * (client + 1 - len(self.counts))
                self.counts[client] += count

    def plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"counts": self.counts, "noised": sorted(self.noised), "exact": sorted(self.exact)}

    @classmethod
    def of(cls, plain: Mapping[str, Sequence[Any]]) -> Released:
        """What `plain` returned; nothing if it is empty, as in older checkpoints."""
        return cls(list(plain.get("counts", ())), set(plain.get("noised", ())), set(plain.get("exact", ())))
