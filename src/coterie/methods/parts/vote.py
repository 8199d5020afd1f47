"""The vote: a center that most members of a cluster find worse than the one before is not taken.

Clients compare the center that they are sent with the one of the round before, on held-out samples, and answer with
one bit beside their model. So the vote needs no message of its own, and comes a round late: if most find the center
worse, the cluster goes back to the old center, and what they have trained from the new one is dropped. Clients that
were not asked in the round before, or were in another cluster, do not count: with partial participation few do.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from coterie.client.block import Block
from coterie.engines.base import Chunk

_WORSE = 1.1  # a loss is worse if it is more than so many times the one before: losses are noisy
_FEWEST = 3  # votes that decide


# ---- the client's half ----


def is_worse(block: Block, loss: Tensor) -> Tensor:
    """Whether a held-out loss [c] is worse than that of the center before, bool [c]; clients remember this one."""
    before = block.memory.get("judged loss", torch.full_like(loss, torch.inf))
    block.memory.put("judged loss", loss)
    return loss > _WORSE * before


# ---- the server's half ----


class Judged(Protocol):
    """What the vote reads of a state; see `CenterState`."""

    @property
    def centers(self) -> Tensor:
        """[K, P]."""

    @property
    def labels(self) -> Tensor:
        """int64 [N]."""

    @property
    def judged(self) -> Tensor:
        """int64 [N] cluster + 1 of the center on which the client voted in the round before; 0: none."""

    @property
    def past_centers(self) -> Tensor:
        """[K, P] of the round before."""


class Votes:
    """The votes of a round."""

    def __init__(self, state: Judged) -> None:
        self._state = state
        known = len(state.judged) == len(state.labels) and state.past_centers.shape == state.centers.shape
        self._before = state.judged if known else torch.zeros_like(state.labels)
        self._now = torch.zeros_like(state.labels)
        self._worse = torch.zeros(len(state.centers), dtype=torch.int64)
        self._all = torch.zeros_like(self._worse)

    def add(self, chunk: Chunk, clusters: Tensor) -> None:
        """Count the votes of a chunk whose clients were sent the centers of these clusters [c]."""
        worse = chunk.answer.get("worse")
        if worse is None:
            return
        counts = self._before[chunk.clients] == clusters + 1
        self._all += torch.bincount(clusters[counts], minlength=len(self._all))
        self._worse += torch.bincount(clusters[counts & worse.cpu()], minlength=len(self._all))
        self._now[chunk.clients] = clusters + 1

    @property
    def refused(self) -> Tensor:
        """The clusters that go back to their old center, bool [K]."""
        return (self._all >= _FEWEST) & (2 * self._worse > self._all)

    def changes(self, centers: Tensor) -> dict[str, Any]:
        """Fields of the state after a round that would have these centers [K, P]."""
        state, refused = self._state, self.refused
        if not bool((self._now > 0).any()):
            return {"centers": centers, "judged": state.judged[:0]}  # nobody can tell in the next round
        there = refused.to(centers.device).unsqueeze(1)
        old = state.past_centers if bool(refused.any()) else centers
        # After a return the next vote would compare with what was refused: it is left out.
        judged = self._now.where(~torch.cat([refused.new_zeros(1), refused])[self._now], 0)
        return {"centers": torch.where(there, old, centers), "judged": judged, "past_centers": state.centers}
