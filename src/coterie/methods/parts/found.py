"""The clusters that `coterie` has found, and what happens to them: they are merged, and removed when nobody is left."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from coterie.engines.base import Chunk
from coterie.methods.base import Decision
from coterie.methods.parts.centers import CenterState
from coterie.methods.parts.personal import label_prior

FEW = 10  # models: a center of fewer is served as a mean over rounds
_AFTER = 3  # rounds that clusters train by themselves before they are compared


@dataclass(frozen=True)
class CoterieState(CenterState):
    """The clusters, the evidence for them, and the cuts that are tried."""

    of_clients: ClassVar[tuple[str, ...]] = (*CenterState.of_clients, "contrasts")

    contrasts: Tensor = field(default_factory=lambda: torch.empty(0))  # [N, L, D] differences of the signatures' halves
    shares: Tensor = field(default_factory=lambda: torch.empty(0))  # [K, L] label proportions and weight; 0: unknown
    curves: Tensor = field(default_factory=lambda: torch.empty(0))  # [K, G] mean held-out losses of mixes
    served: Tensor = field(default_factory=lambda: torch.empty(0))  # [K, P] centers, as means over rounds if few answer
    behind: Tensor = field(default_factory=lambda: torch.empty(0))  # [K] models in the mean of a served center
    signed_in: int = 0  # the round at whose center clients sign; 0: not yet
    doubt: float = 0.0  # the largest z of a cut that was not made when clients last signed
    tried: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [N] rows of `trials`; -1: none
    trials: Tensor = field(default_factory=lambda: torch.empty(0))  # [T, P] centers of proposed parts and mergers
    proposals: list[Decision] = field(default_factory=list)  # the cuts and mergers that are tried in this round
    made_in: Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.int64)
    )  # [K] round of the cut or merger that made the cluster; 0: none
    due_in: Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.int64)
    )  # [K] round after which the cluster is to be compared with the nearest one; 0: never
    merged: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))  # [K] made by a merger

    def with_more_clients(self, count: int) -> Self:
        """See `ClusterState`; new clients try no cut."""
        tried = torch.nn.functional.pad(self.tried, (0, count), value=-1)
        return replace(super().with_more_clients(count), tried=tried)


def with_signatures(state: CoterieState, chunk: Chunk) -> CoterieState:
    """The state with the signatures of a chunk."""
    there = chunk.clients.to(state.signatures.device)
    return replace(
        state,
        signatures=state.signatures.index_copy(0, there, chunk.answer.signature.to(state.signatures)),
        contrasts=state.contrasts.index_copy(0, there, chunk.answer.contrast.to(state.contrasts)),
        counts=state.counts.index_copy(0, chunk.clients, chunk.answer.counts.cpu()),
    )


def without(state: CoterieState, gone: Tensor) -> CoterieState:
    """The state without these clusters, bool [K], which have no members; the others are numbered anew."""
    left = ~gone
    numbers = left.long().cumsum(0) - 1
    there = left.to(state.centers.device)
    return replace(
        state,
        centers=state.centers[there],
        served=state.served[there],
        behind=state.behind[there],
        curves=state.curves[there],
        shares=state.shares[there],
        made_in=state.made_in[left],
        due_in=state.due_in[left],
        merged=state.merged[left],
        labels=torch.where(state.labels >= 0, numbers[state.labels.clamp_min(0)], state.labels),
    )


def united(state: CoterieState, one: int, other: int, number: int) -> CoterieState:
    """The state in round `number` in which a cluster has the members of another, too, which is then empty."""
    share = share_of(state, one, other)

    def mean(rows: Tensor) -> Tensor:
        """The rows [K, ...], of which the first is the mean of both."""
        both = torch.lerp(rows[other], rows[one], share)
        return rows.index_copy(0, torch.tensor([one], device=rows.device), both.unsqueeze(0))

    behind = state.behind.clone()
    behind[one] = (behind[one] + behind[other]).clamp_max(FEW)
    state = made(state, torch.tensor([one]), number, merged=True)
    known = bool((state.curves[[one, other]] != 0).any(1).all())  # a curve of zeros is unknown
    return replace(
        state,
        centers=mean(state.centers),
        served=mean(state.served),
        curves=mean(state.curves) if known else state.curves,
        behind=behind,
        labels=torch.where(state.labels == other, one, state.labels),
    )


def made(state: CoterieState, clusters: Tensor, number: int, merged: bool) -> CoterieState:
    """The state in which these clusters [m], of which some may be new, were made in round `number`."""
    more = max(0, int(clusters.max()) + 1 - len(state.made_in))
    made_in, due_in, was_merged = (
        torch.nn.functional.pad(rows, (0, more)).index_fill(0, clusters, value)
        for rows, value in ((state.made_in, number), (state.due_in, number + _AFTER), (state.merged, merged))
    )
    return replace(state, made_in=made_in, due_in=due_in, merged=was_merged)


def share_of(state: CoterieState, one: int, other: int) -> float:
    """The weight of the first of two clusters in the mean of their centers: by members."""
    first, second = (int((state.labels == cluster).sum()) for cluster in (one, other))
    return first / max(1, first + second)


def with_shares(state: CoterieState) -> CoterieState:
    """The state with the label proportions of its clusters, as far as their members have signed."""
    shares = torch.stack([label_prior(state.counts[state.labels == k]) for k in range(state.num_clusters)])
    return replace(state, shares=shares.to(state.shares)[:, : state.shares.shape[1]])
