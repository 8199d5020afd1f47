"""The guard: finds broken clusters and clients in the wrong cluster after a round, and repairs both.

A client whose loss at its center has risen signs again. A clear signature settles it: as before, only the center has
changed, and it stays; of another cluster, its data has changed, and it moves. If the signature is not clear, it gets
all centers once, and so do clients whose first signature was not clear or tells another cluster, and clients that the
method's own rule would move. They choose the one with the lowest loss, if it is clearly lower than that of their
signature's cluster. So a rule that errs, as rules do while the centers hardly differ, cannot spoil a good start. All
this may cost at most a few percent of the models that the rounds have sent; clients beyond that wait.

If a cluster is empty, or two centers are the same, the cluster whose members disagree most is split by 2-means on
sketches of their updates, and the free center becomes the mean of one half. Every repair is recorded with round and
reason. The guard uses only what the server sees anyway: neither true groups nor test data.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from coterie.engines.base import Engine
from coterie.methods.base import ClusterState, Repair
from coterie.methods.parts.averaging import add_answers
from coterie.methods.parts.centers import (
    PATIENCE,
    REST,
    C,
    CenterMethod,
    RoundUpdate,
    SignedMethod,
    Watch,
    admitted,
    is_outside,
    without_signatures,
)
from coterie.methods.parts.clustering import kmeans
from coterie.methods.parts.start import by_signature, choose_anew, enough_clients, with_signatures
from coterie.randomness import Rng
from coterie.settings import counted

_SAME = 0.05  # centers closer than this share of a typical update are the same
_FIRST = 2  # the first round after which clients choose anew: before it, the centers hardly differ


def guarded(method: CenterMethod[C], before: C, update: RoundUpdate[C], engine: Engine, rng: Rng) -> C:
    """The state after a round; broken clusters are repaired if the guard is on."""
    after = update.unaveraged()
    if method.watches_losses:
        after = rechosen(method, after, engine, update.alarms.clients, rng.at("alarmed"), before.labels)
    after = update.averaged(after)
    if not method.guard:
        return after
    found = repaired(method, before, after, engine, update.watch, rng)
    if found is not after or not method.watches_losses:
        return found  # clients choose when the repair has taken effect
    after = with_misplaced(after, engine)
    return rechosen(method, after, engine, update.answered, rng.at("choose"), before.labels)


def with_misplaced(state: C, engine: Engine) -> C:
    """Mark clients whose signature clearly belongs to another cluster to choose anew; every other round."""
    if engine.round % 2:
        return state
    found, doubt = by_signature(state)
    wrong = (found >= 0) & (found != state.labels) & ~doubt
    wrong &= (state.chose_in == 0) | (engine.round - state.chose_in >= PATIENCE)
    return replace(state, pending=state.pending | wrong) if bool(wrong.any()) else state


def rechosen(
    method: SignedMethod[C], state: C, engine: Engine, answered: Tensor, rng: Rng, since: Tensor | None = None
) -> C:
    """Let pending clients that took part in the round choose their cluster anew.

    A cluster admits as many as the method allows, where `since` are the labels before the round; the others wait.
    """
    waiting = answered[state.pending[answered]]
    waiting = waiting[engine.keys[waiting].argsort()]
    waiting = waiting[(~state.alarmed[waiting]).int().argsort(stable=True)]  # first those whose loss has risen
    room = int(method.choice_share * state.sent_in_rounds) - state.sent_to_choose
    if not len(waiting) or room < 1 or engine.round < _FIRST or state.num_clusters < 2:
        return state
    engine.begin(engine.round, "repair")
    found = choose_anew(method, state, engine, waiting, room, rng)
    engine.begin(engine.round, "round")
    wanted = state.labels.index_copy(0, found.clients, found.labels)
    labels = admitted(state.labels if since is None else since, state.labels, wanted, engine.keys, method.admission)
    found = found.only(labels[found.clients] == found.labels)
    moved = labels != state.labels
    # The signature of a client whose data has changed is of the past, unless it has just been renewed.
    state = with_signatures(without_signatures(state, moved & state.alarmed), found.clients, found)
    state = replace(
        state,
        labels=labels,
        pending=state.pending.index_fill(0, found.clients, False),
        alarmed=state.alarmed.index_fill(0, found.clients, False),
        chose_in=state.chose_in.index_fill(0, found.clients, engine.round),
        sent_to_choose=state.sent_to_choose + found.sent,
    )
    if not bool(moved.any()):
        return state
    reason = f"{int(moved.sum())} of {counted(len(found.clients), 'client')} that chose anew moved to another cluster"
    return recorded(state, None, reason, engine)


def repaired(method: CenterMethod[C], before: C, after: C, engine: Engine, watch: Watch, rng: Rng) -> C:
    """Repair one broken cluster, if there is one, and record the repair."""
    if not watch or method.num_clusters < 2 or engine.round - after.repaired_in < REST:
        return after
    clients, started, updates = watch.result()
    inside = ~is_outside(after)[clients]
    if not bool(inside.any()):
        return after
    clients, started, updates = clients[inside], started[inside], updates[inside.to(updates.device)]
    if int((after.labels >= 0).sum()) < enough_clients(method.num_clusters, engine.num_clients):
        return after  # a cluster without members may have some that were not seen yet
    broken, reason = _find_broken(after, updates, engine)
    if broken is None:
        return after
    labels = after.labels.clone()
    labels[labels == broken] = _nearest_other(after, broken, engine)
    split = split_widest(updates, labels[clients], engine.keys[clients], method.num_clusters, rng.at("split"))
    if split is None:
        return after
    wide, half = split
    inside = labels[clients] == wide
    members, rows = clients[inside], started[inside]
    leaving = members[half]
    labels[leaving] = broken
    # The members train once more from the same rows, because their models were not kept.
    average = method.average(before, engine)
    engine.begin(engine.round, "repair")
    chunks = method.train_from(before, engine, members, rows, rng.at("train"))
    answered = add_answers(average, chunks, labels, method.weights_of)
    engine.begin(engine.round, "round")
    if not bool((labels[answered] == broken).any()):
        return after  # no model for the free center
    reason += f": cluster {wide} was split into {len(members) - len(leaving)} and {len(leaving)} clients"
    # Two centers are others now: there is nothing to vote on in the next round.
    judged = after.judged[:0]
    centers = average.means(keep=after.centers)
    after = replace(after, centers=centers, labels=labels, judged=judged, repaired_in=engine.round)
    return recorded(after, broken, reason, engine)


def recorded(state: C, cluster: int | None, reason: str, engine: Engine) -> C:
    """The state with one more repair."""
    repair = Repair(round=engine.round, cluster=cluster, reason=reason)
    return replace(state, repairs=[*state.repairs, repair], stable_rounds=0)


def _find_broken(state: ClusterState, updates: Tensor, engine: Engine) -> tuple[int | None, str]:
    """The first cluster that is empty or the same as another, and the reason."""
    sizes = torch.bincount(state.labels[state.labels >= 0], minlength=state.num_clusters)
    empty = (sizes == 0).nonzero().flatten().tolist()
    if empty:
        return empty[0], f"cluster {empty[0]} was empty"
    cut = engine.task.layout.num_parameters
    apart = torch.cdist(state.centers[:, :cut], state.centers[:, :cut])
    typical = updates.norm(dim=1).mean()
    same = (torch.triu(apart, 1) + torch.tril(torch.full_like(apart, torch.inf)) < _SAME * typical).nonzero()
    if len(same):
        one, other = same[0].tolist()
        return other, f"clusters {one} and {other} were the same"
    return None, ""


def _nearest_other(state: ClusterState, broken: int, engine: Engine) -> int:
    """The center nearest to a broken one, which takes over its members."""
    cut = engine.task.layout.num_parameters
    apart = (state.centers[:, :cut] - state.centers[broken, :cut]).norm(dim=1)
    apart[broken] = torch.inf
    return int(apart.argmin())


def split_widest(
    updates: Tensor, labels: Tensor, keys: Tensor, num_clusters: int, rng: Rng, least: int = 2
) -> tuple[int, Tensor] | None:
    """The cluster whose members disagree most, and which of its members leave: bool [members].

    2-means on the updates of each cluster; the gain is the relative reduction of the sum of squares by the split,
    times the number of members.
    """
    best: tuple[float, int, Tensor] | None = None
    for k in range(num_clusters):
        mine = (labels == k).nonzero().flatten()
        if len(mine) < 2 * least:
            continue
        rows = updates[mine.to(updates.device)]
        total = float((rows - rows.mean(0)).square().sum())
        if total <= 0:
            continue
        found = kmeans(rows, 2, rng.at(k), keys[mine], restarts=5)
        sizes = torch.bincount(found.labels, minlength=2)
        if int(sizes.min()) < least:
            continue
        gain = (total - found.inertia) / total * len(mine)
        if best is None or gain > best[0]:
            best = (gain, k, found.labels == int(sizes.argmin()))
    return None if best is None else (best[1], best[2])
