"""Merging clusters that one model would serve as well.

Kinds are looked for early, when models have learnt little. Gradients of people whose samples look different are then
different, although one model would come to serve them all; and a trial of one round shows little. Some rounds later it
shows: where clients are of different kinds, the mean of the two centers serves either of them clearly worse than their
own. Where they are not, it serves them as well or better, since it has learnt from more samples.

So the parts of a cut are compared with the nearest cluster each. The members get the mean of the two centers for a
round and tell its loss on held-out samples, as with a cut that is tried. The clusters stay apart if the members of both
together, or those of one of them, do clearly better with their own centers. They are merged if their members do not
gain what a cut that is tried must gain. In between they are compared again when they are twice as old.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from coterie.methods.base import Decision
from coterie.methods.parts.found import CoterieState, share_of, united, without
from coterie.methods.parts.personal import SHIFTS
from coterie.methods.parts.trials import BETTER, FEWEST, of_best_mix, t_value

COMPARED = "compared"  # what a proposal to merge is called until it is decided
_CLEARLY = 2.0  # standard errors by which members must do better with their own center
_WORSE = 0.05  # share by which the loss of fewer members than `FEWEST` must be lower with their own center


def with_comparisons(state: CoterieState, number: int, participation: float, least_k: int) -> CoterieState:
    """The state after round `number` in which members try mergers in the next round, down to `least_k` clusters."""
    pairs = [
        pair
        for pair in _pairs(state, number)
        if sum(int((state.labels == cluster).sum()) for cluster in pair) * participation >= FEWEST
    ][: max(0, state.num_clusters - least_k)]
    if not pairs:
        return state
    tried, trials, proposals = state.tried.clone(), [state.trials], list(state.proposals)
    for one, other in pairs:
        mine = [state.labels == cluster for cluster in (one, other)]
        tried[mine[0] | mine[1]] = len(state.trials) + len(trials) - 1
        share = share_of(state, one, other)
        trials.append(torch.lerp(state.centers[other], state.centers[one], share).unsqueeze(0))
        sizes = [int(members.sum()) for members in mine]
        proposals.append(Decision(round=number, what=COMPARED, clusters=[one, other], sizes=sizes))
    return replace(state, tried=tried, trials=torch.cat(trials), proposals=proposals)


def _pairs(state: CoterieState, number: int) -> list[tuple[int, int]]:
    """Each cluster that is to be compared, with the one whose center is nearest; no cluster twice, near ones first."""
    sizes = state.labels[state.labels >= 0].bincount(minlength=state.num_clusters)
    due = (state.due_in > 0) & (state.due_in <= number) & (sizes > 0)
    if not bool(due.any()):
        return []
    apart = torch.cdist(state.centers, state.centers).cpu().nan_to_num(nan=torch.inf)
    apart.fill_diagonal_(torch.inf)
    apart[:, sizes == 0] = torch.inf
    near, nearest = apart.min(1)
    found: list[tuple[int, int]] = []
    for one in near.where(due, torch.inf).argsort(stable=True).tolist():
        other = int(nearest[one])
        taken = {cluster for pair in found for cluster in pair}
        if due[one] and bool(near[one].isfinite()) and not {one, other} & taken:
            found.append((min(one, other), max(one, other)))
    return found


def with_mergers(
    state: CoterieState, proposals: list[Decision], number: int, verdicts: tuple[Tensor, Tensor, Tensor]
) -> CoterieState:
    """The state in round `number` in which clusters are merged unless their members (`verdicts`) prefer their own."""
    clients, own, tried = verdicts
    plain = len(SHIFTS)  # mixes without a client's own model, which would hide the center
    gone = torch.zeros(state.num_clusters, dtype=torch.bool)
    for proposal in sorted(proposals, key=lambda proposal: -proposal["clusters"][1]):  # the order of the new numbers
        one, other = proposal["clusters"]
        labels = state.labels[clients]
        both = (labels == one) | (labels == other)
        groups = [
            (of_best_mix(own[some][:, :plain]), of_best_mix(tried[some][:, :plain]))
            for some in (both, labels == one, labels == other)
        ]
        t = max(_preference(*losses) for losses in groups)
        pays = t_value(groups[0][1] - groups[0][0]) >= BETTER
        merges = t < _CLEARLY and not pays and int(both.sum()) >= FEWEST
        if merges:
            state = united(state, one, other, number)
            gone[other] = True
        else:
            state = _after_comparison(state, [one, other], number, again=t < _CLEARLY)
        decision = Decision(round=number, what="merged" if merges else "apart", clusters=[one, other])
        decision |= {"sizes": proposal["sizes"], "t": round(t, 2)}
        state = replace(state, decisions=[*state.decisions, decision])
    return without(state, gone) if bool(gone.any()) else state


def _after_comparison(state: CoterieState, pair: list[int], number: int, again: bool) -> CoterieState:
    """The state in which clusters are not compared again, or when they are twice as old."""
    due_in = state.due_in.clone()
    for cluster in pair:
        if due_in[cluster]:
            due_in[cluster] = 2 * number - int(state.made_in[cluster]) if again else 0
    return replace(state, due_in=due_in)


def _preference(own: Tensor, tried: Tensor) -> float:
    """How clearly members do better with their own center, by their losses [n]: in standard errors.

    One client with an enormous loss must not decide: how many do better counts as well as by how much.
    """
    gains = tried - own
    if len(gains) < FEWEST:
        return _CLEARLY if float(gains.sum()) > _WORSE * float(own.sum()) else 0.0
    more = float(gains.sign().sum()) / math.sqrt(len(gains))
    return max(t_value(gains), more)
