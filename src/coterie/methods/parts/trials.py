"""Trials: in one round, members of a cluster tell how another model would serve them in place of their center."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.engines.base import Chunk

FEWEST = 4  # members that must have tried a model
BETTER = 1.0  # gain, in standard errors, from which separate models pay


class Verdicts:
    """What the members that tried a model have told: losses on held-out samples, of mixes with each of the models."""

    def __init__(self) -> None:
        self._found: list[tuple[Tensor, Tensor, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, clients: Tensor, center: Tensor, tried: Tensor) -> None:
        """The losses of clients [c] with their center and with what they tried, [c, G] each."""
        self._found.append((clients, center.double().cpu(), tried.double().cpu()))

    def add_chunk(self, chunk: Chunk) -> None:
        """The losses of a chunk, if its clients tried a model."""
        if "tried" in chunk.answer:
            self.add(chunk.clients, chunk.answer.losses, chunk.answer.tried)

    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        """Clients [n], losses of mixes with their center and with what they tried [n, G]."""
        clients, center, tried = (torch.cat(parts) for parts in zip(*self._found, strict=True))
        return clients, center, tried


def of_best_mix(losses: Tensor) -> Tensor:
    """The losses [n] of the mix that is best for all, of [n, G]."""
    return losses[:, losses.mean(0).argmin()]


def t_value(gains: Tensor) -> float:
    """The mean of paired gains [n] in standard errors; 0 if there are too few."""
    if len(gains) < FEWEST or float(gains.std()) <= 0:
        return 0.0
    return float(gains.mean() / gains.std() * len(gains) ** 0.5)
