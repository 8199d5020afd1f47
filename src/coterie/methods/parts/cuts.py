"""Cutting clusters: what a round of `coterie` collects, and what it decides from it.

A cut that is sure is made at once. One that may pay is tried: in the next round the members tell how the part's center
would serve them, and the cut is made if it serves them better. Parts that one model would serve as well are merged
again (`parts/mergers.py`); a cluster that was merged is cut only if a trial shows it clearly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from coterie.engines.base import Chunk, Engine
from coterie.methods.base import Decision
from coterie.methods.parts.averaging import Average, fits_in_memory
from coterie.methods.parts.centers import Alarms, has_signature
from coterie.methods.parts.found import FEW, CoterieState, made, with_shares, with_signatures
from coterie.methods.parts.kinds import SURE, Halves, Kinds, Limits, Noise, find_kinds
from coterie.methods.parts.mergers import COMPARED, with_mergers
from coterie.methods.parts.start import by_signature
from coterie.methods.parts.trials import BETTER, FEWEST, Verdicts, of_best_mix, t_value
from coterie.methods.parts.vote import Votes

_MOST_CLUSTERS = 100
_PROOF = 3.0  # of a cluster that was merged, and whose parts one model served as well before
_ENOUGH = 16  # clients that must have signed before kinds are looked for, or all
_RECENT = 0.25  # of the rounds since it was made count for a center of few models: older models are worse
_LARGE = 1e9  # in place of infinity, which JSON does not have
_FADES = 0.5  # how much a cluster's past preference for mixes counts in a round


class Cutter(Protocol):
    """The method, as far as a round needs it."""

    @property
    def clear(self) -> float: ...

    @property
    def worth(self) -> float: ...

    @property
    def serve(self) -> str: ...

    @property
    def bounds(self) -> tuple[int, int | None]: ...

    def mean_of(self, num_clusters: int, engine: Engine, like: Tensor) -> Average: ...

    def weights_of(self, chunk: Chunk) -> Tensor: ...


class Update:
    """Collects one round: averages models, and cuts clusters that hold several kinds."""

    def __init__(self, method: Cutter, state: CoterieState, engine: Engine, keep: bool) -> None:
        self._method, self._state, self._engine = method, state, engine
        self._average = method.mean_of(state.num_clusters, engine, like=state.centers)
        self._pending, self._alarmed = state.pending.clone(), state.alarmed.clone()
        self.alarms = Alarms(engine)
        self.answered = torch.empty(0, dtype=torch.int64)
        self._votes = Votes(state)
        self.keep = keep  # whether clients have signed, so that their models may be needed again
        self._fits = keep and fits_in_memory(engine.num_clients, engine)
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []  # clients, models, weights
        self._fresh: list[Chunk] = []  # signatures at the clients' own centers
        self._verdicts = Verdicts()
        self._models = torch.zeros_like(state.behind)  # [K]
        self._losses = torch.zeros_like(state.curves, dtype=torch.float64)
        self._held = torch.zeros(state.num_clusters, dtype=torch.float64, device=state.curves.device)

    def add(self, chunk: Chunk) -> None:
        """Average the models of a chunk. A client whose loss has risen may be left out (see `Alarms`)."""
        state, clients, answer = self._state, chunk.clients, chunk.answer
        labels = state.labels[clients]
        alarm = answer.get("alarm")
        alarmed = torch.zeros(len(clients), dtype=torch.bool) if alarm is None else alarm.bool().cpu()
        self._pending[clients] |= alarmed
        self._alarmed[clients] |= alarmed
        weights = self._method.weights_of(chunk)
        self.alarms.add(clients, answer.params, labels, weights, alarmed)
        weights = weights * (~alarmed).to(self._engine.device)
        self._average.add(answer.params, labels, weights)
        self._count(labels, weights)
        self.answered = torch.cat([self.answered, clients])
        self._votes.add(chunk, labels)
        if "losses" in answer:
            there, held = labels.to(self._held.device), answer.held.double()
            self._losses.index_add_(0, there, held.unsqueeze(1) * answer.losses.double())
            self._held.index_add_(0, there, held)
        self._verdicts.add_chunk(chunk)
        if self._fits:
            self._kept.append((clients, answer.params, weights))
        if "signature" in answer and state.signed_in == self._engine.round:
            self._state = with_signatures(state, chunk)
        elif "signature" in answer:
            self._fresh.append(chunk)

    def _count(self, labels: Tensor, weights: Tensor) -> None:
        """Count the models in each cluster's mean."""
        self._models.index_add_(0, labels.to(self._models.device), (weights > 0).to(self._models))

    def unaveraged(self) -> CoterieState:
        """The state in which clients whose loss has risen may choose anew; its centers are the old ones."""
        sent = self._state.sent_in_rounds + 2 * len(self.answered)
        return replace(self._state, pending=self._pending, alarmed=self._alarmed, sent_in_rounds=sent)

    def averaged(self, state: CoterieState) -> CoterieState:
        """The state after the round, before kinds are looked for."""
        for clients, models, labels, weights in self.alarms.counted(state, self._engine):
            self._average.add(models, labels, weights)
            self._count(labels, weights)
            if self._fits:
                self._kept.append((clients, models, weights))
        seen = self._held > 0
        mean = (self._losses / self._held.clamp_min(1e-9).unsqueeze(1)).to(state.curves)
        known = (state.curves != 0).any(1, keepdim=True)
        blend = torch.where(known, _FADES * state.curves + (1 - _FADES) * mean, mean)
        found = self._votes.changes(self._average.means(keep=state.centers))
        centers: Tensor = found["centers"]
        behind = (state.behind + _RECENT * self._models).clamp_max(FEW).maximum(self._models)
        rate = (self._models / behind.clamp_min(1)).unsqueeze(1)
        after = replace(
            state,
            **found,
            served=torch.lerp(state.served, centers, rate),
            behind=behind,
            curves=torch.where(seen.unsqueeze(1), blend, state.curves),
        )
        return with_shares(after)

    def with_kinds(self, state: CoterieState) -> CoterieState:
        """Cut each cluster in which there are surely several kinds; propose a cut where there may be."""
        method, before = self._method, state.num_clusters
        low, high = method.bounds
        most = _MOST_CLUSTERS if high is None else high
        doubt = 0.0
        looks = [self._evidence(state, cluster) for cluster in range(before)]
        noise = Noise.of(Halves.joined([found for _, found in looks]))
        for cluster, (members, found) in enumerate(looks):
            if len(members) < (min(_ENOUGH, self._engine.num_clients) if before == 1 else 2):
                continue
            room = most - state.num_clusters + 1
            least = min(low, len(members)) if before == 1 else 1
            sure = torch.inf if bool(state.merged[cluster]) else max(SURE, method.worth)
            limits = Limits(method.clear, sure, least=least, most=max(1, room))
            keys = self._engine.keys[members]
            kinds = find_kinds(found, noise, keys, limits)
            state, proposed = self._cut(state, cluster, members, kinds), len(state.proposals)
            for part in range(kinds.count):
                inside = (kinds.labels == part).nonzero().flatten()
                number = int(state.labels[members[inside[0]]])
                limits = Limits(
                    method.clear, method.worth, most=max(1, most - state.num_clusters - len(state.trials) + 1)
                )
                if self._can_try(inside):
                    finer = find_kinds(found.at(inside), noise, keys[inside], limits)
                    state = self._proposed(state, number, members[inside], finer)
                    doubt = max(doubt, finer.last)
            if kinds.count == 1 and len(state.proposals) == proposed and room > 1 and self._is_look:
                nearly = find_kinds(found, noise, keys, Limits(method.clear, method.worth, least=2, most=2))
                state = self._decided(state, "refused", [cluster], nearly)
        return with_shares(replace(state, doubt=min(doubt, _LARGE)))

    @property
    def _is_look(self) -> bool:
        """Whether all members were to sign in this round, not only those who came later."""
        return bool(self._fresh) or self._state.signed_in == self._engine.round

    def _can_try(self, members: Tensor) -> bool:
        """Whether enough of these members can be expected to try a cut in the next round."""
        is_last = self._engine.round == self._engine.task.work.total_rounds
        return bool(self._kept) and not is_last and len(members) * self._engine.participation >= FEWEST

    def _proposed(self, state: CoterieState, cluster: int, members: Tensor, kinds: Kinds) -> CoterieState:
        """The state in which the members of a cluster try a cut in the next round, if there is one to try."""
        if kinds.count < 2:
            return state
        parts = torch.full_like(state.labels, -1).index_copy(0, members, kinds.labels)
        average = self._method.mean_of(kinds.count, self._engine, like=state.centers)
        for clients, models, weights in self._kept:
            inside = (parts[clients] >= 0).to(weights)
            average.add(models, parts[clients].clamp_min(0), weights * inside)
        centers = average.means(keep=state.centers[cluster].expand(kinds.count, -1))
        tried = state.tried.index_copy(0, members, len(state.trials) + kinds.labels)
        state = self._decided(state, "proposed", [cluster], kinds)
        proposals = [*state.proposals, state.decisions[-1]]
        return replace(state, tried=tried, trials=torch.cat([state.trials, centers]), proposals=proposals)

    def with_verdicts(self, state: CoterieState) -> CoterieState:
        """Cut or merge the clusters whose members do better so, by what they would be served with."""
        proposals, tried = state.proposals, state.tried
        none = torch.full_like(tried, -1)
        state = replace(state, proposals=[], tried=none, trials=state.trials[:0])
        mergers = [proposal for proposal in proposals if proposal["what"] == COMPARED]
        cuts = [proposal for proposal in proposals if proposal["what"] != COMPARED]
        if not self._verdicts:
            for proposal in cuts:
                state = self._decided(state, "refused", proposal["clusters"], _as_kinds(proposal))
            return state
        clients, center, part = self._verdicts.all()
        if self._method.serve == "kind":
            center, part = center[:, :1], part[:, :1]
        for proposal in cuts:
            cluster = proposal["clusters"][0]
            mine = (state.labels[clients] == cluster) & (tried[clients] >= 0)  # some have moved since they tried
            t = t_value(of_best_mix(center[mine]) - of_best_mix(part[mine]))
            members = ((state.labels == cluster) & (tried >= 0)).nonzero().flatten()
            _, parts = tried[members].unique(return_inverse=True)
            kinds = Kinds(parts, proposal["z"], proposal["q"])
            if t >= (_PROOF if bool(state.merged[cluster]) else BETTER):
                state = self._cut(state, cluster, members, kinds)
            else:
                state = self._decided(state, "refused", [cluster], kinds)
            state.decisions[-1]["t"] = round(t, 2)
        stayed = tried[clients] >= 0
        verdicts = clients[stayed], center[stayed], part[stayed]
        return with_shares(with_mergers(state, mergers, self._engine.round, verdicts))

    def _evidence(self, state: CoterieState, cluster: int) -> tuple[Tensor, Halves]:
        """The members of a cluster that have signed [m], and their signatures: fresh ones, if there are any.

        A client whose loss has risen may have changed its kind, which is no reason to cut its cluster.
        """
        if not self._fresh:
            members = ((state.labels == cluster) & has_signature(state) & ~state.alarmed).nonzero().flatten()
            there = members.to(state.signatures.device)
            return members, Halves.of(state.signatures[there], state.contrasts[there], state.counts[members])
        clients = torch.cat([chunk.clients for chunk in self._fresh])
        # A client that has moved in this round has signed at the center that it left.
        stayed = state.labels[clients] == self._state.labels[clients]
        mine = (state.labels[clients] == cluster) & stayed & ~state.alarmed[clients]
        rows, contrasts, counts = (
            torch.cat([chunk.answer[name] for chunk in self._fresh])[mine.to(state.centers.device)]
            for name in ("signature", "contrast", "counts")
        )
        return clients[mine], Halves.of(rows.to(state.signatures), contrasts.to(state.signatures), counts)

    def _cut(self, state: CoterieState, cluster: int, members: Tensor, kinds: Kinds) -> CoterieState:
        """Make a cluster of each kind; the largest keeps the number, and members that gave no evidence."""
        if kinds.count < 2:
            return state
        order = kinds.labels.bincount(minlength=kinds.count).argsort(descending=True, stable=True)
        numbers = torch.cat([torch.tensor([cluster]), state.num_clusters + torch.arange(kinds.count - 1)])
        number_of = torch.empty_like(numbers).index_copy(0, order, numbers)  # of each kind
        labels = state.labels.index_copy(0, members, number_of[kinds.labels])
        parent = state.centers[cluster].unsqueeze(0)
        centers = torch.cat([state.centers, parent.expand(kinds.count - 1, -1)])
        if self._kept:
            average = self._method.mean_of(len(centers), self._engine, like=centers)
            for clients, models, weights in self._kept:
                inside = (state.labels[clients] == cluster).to(weights.device)
                average.add(models, labels[clients], weights * inside)
            centers = torch.cat([centers[: len(state.centers)], average.means(keep=centers)[len(state.centers) :]])
            centers[cluster] = average.means(keep=centers)[cluster]
        more = torch.full((kinds.count - 1,), cluster, device=centers.device)
        state = replace(
            state,
            centers=centers,
            served=torch.cat([state.served, centers[len(state.centers) :]]).index_copy(0, more[:1], centers[more[:1]]),
            behind=torch.cat([state.behind, state.behind.new_zeros(len(more))]).index_fill(0, more[:1], 0),
            labels=labels,
            curves=torch.cat([state.curves, state.curves[more]]),
        )
        state = made(state, numbers, self._engine.round, merged=False)
        doubt = by_signature(state)[1] & (labels >= 0)  # they choose by loss
        inside = torch.zeros_like(doubt).index_fill(0, members, True)
        return self._decided(replace(state, pending=state.pending | (doubt & inside)), "cut", numbers.tolist(), kinds)

    def _decided(self, state: CoterieState, what: str, clusters: list[int], kinds: Kinds) -> CoterieState:
        sizes = sorted(kinds.labels.bincount().tolist(), reverse=True)
        by = "centers" if self._fresh else "common model"
        decision = Decision(
            round=self._engine.round,
            what=what,
            clusters=clusters,
            sizes=sizes,
            z=min(kinds.z, _LARGE),
            q=min(kinds.q, _LARGE),
            signed_at=by,
        )
        return replace(state, decisions=[*state.decisions, decision])


def _as_kinds(proposal: Decision) -> Kinds:
    """The parts of a proposal that nobody tried."""
    sizes = torch.tensor(proposal["sizes"])
    return Kinds(torch.arange(len(sizes)).repeat_interleave(sizes), proposal["z"], proposal["q"])
