"""What the iterative clustered methods share: settings, state, and the bookkeeping of a round.

A method writes its own `start` and `round`: train, assign, average, as in its paper. `RoundUpdate` collects the chunks
of a round and computes the next state; `parts/start.py` has the starts and places new clients, `parts/guard.py` has
the repairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Models
from coterie.client.steps import Answer, ClientStep, client_step, sign
from coterie.client.work import SGD
from coterie.engines.base import Chunk, Engine
from coterie.methods.base import ClusterState, num_clusters_setting
from coterie.methods.parts.averaging import Average, Averaging, fits_in_memory, samples_of
from coterie.methods.parts.vote import Votes, is_worse
from coterie.nets.sketch import sketch_of
from coterie.randomness import Rng
from coterie.settings import setting

PATIENCE = 5  # rounds after a choice in which the method's rule does not ask for another
REST = 2  # rounds between two repairs of a cluster, so that the first can take effect

_WIDTH = 1024  # of the sketches of updates that the guard compares
_RISE = 1.5  # a loss has risen if it is more than so many times the past one ...
_SLACK = 0.1  # ... plus this share of the client's first loss


# ---- the client's half ----


@client_step("coterie.centers:train_member", lambda asked: forms.trained(asked) | forms.watched(asked))
def train_member(
    block: Block, models: Models, work: SGD, watch: Tensor | None = None, vote: Tensor | None = None
) -> Answer:
    """Train the model of the client's cluster; before, watch its loss and vote on it (see `watched`)."""
    return Answer(**watched(block, models, watch, vote), params=block.train(models, work), samples=block.samples)


def watched(block: Block, models: Models, watch: Tensor | None, vote: Tensor | None = None) -> dict[str, Tensor]:
    """With `watch`: whether the loss of the sent model is far above the losses of its predecessors, `alarm` [c].

    With `vote`: whether it is worse than that of the model before, `worse` [c]. Only these bits leave the client. It
    remembers its past loss and its first one, which gives the scale.
    """
    if watch is None and vote is None:
        return {}
    loss = held_out_loss(block, models)
    found = {} if watch is None else {"alarm": has_risen(block, loss)}
    return found if vote is None else found | {"worse": is_worse(block, loss)}


def held_out_loss(block: Block, models: Models) -> Tensor:
    """The loss [c] of the sent models on held-out samples; on training samples where a client has held none out."""
    held = block.evaluate(models, "valid")
    loss, has = held["loss"], held["samples"] > 0  # [c]
    return loss if bool(has.all()) else torch.where(has, loss, block.losses(models))


def has_risen(block: Block, loss: Tensor) -> Tensor:
    """Whether a loss [c] is far above those that the clients remember, bool [c]; they remember this one too."""
    first = block.memory.get("first loss", loss)
    past = block.memory.get("past loss", torch.full_like(loss, torch.inf))
    risen = loss > _RISE * past + _SLACK * first
    block.memory.put("first loss", first)
    block.memory.put("past loss", torch.where(risen | past.isinf(), loss, (past + loss) / 2))
    return risen


# ---- state and settings ----


@dataclass(frozen=True)
class CenterState(ClusterState):
    """The centers, the clients' signatures at the common model, and what the guard remembers."""

    of_clients: ClassVar[tuple[str, ...]] = (
        "signatures",
        "counts",
        "pending",
        "alarmed",
        "chose_in",
        "outside",
        "judged",
    )
    stored_as: ClassVar[dict[str, str]] = {**ClusterState.stored_as, "repaired_in": "mended_in"}

    signatures: Tensor = field(default_factory=lambda: torch.empty(0))  # [N, L, D]
    counts: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [N, L]; all 0: no signature
    pending: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))  # [N] should choose a center anew
    alarmed: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))  # [N] pending, its loss has risen
    chose_in: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [N] round; 0: never
    outside: Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.bool)
    )  # [N] moves no center; empty: unclear
    judged: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [N] cluster + 1 of the center
    # that the client was last sent and voted on; 0: none. Empty without a vote.
    past_centers: Tensor = field(default_factory=lambda: torch.empty(0))  # [K, P] of the round before, for the vote
    mean_samples: float = 0.0  # mean sample count of the clients
    sent_in_rounds: int = 0  # models sent and received in rounds so far
    sent_to_choose: float = 0  # models sent so far to clients that chose anew
    repaired_in: int = -REST  # round of the last repair of a cluster


C = TypeVar("C", bound=CenterState)


@dataclass(frozen=True)
class SignedMethod(Averaging[C]):
    """Centers, and clients that are placed by their signatures and watch their losses."""

    state_type: ClassVar[type[ClusterState]] = CenterState
    choice_share: ClassVar[float] = 0.08  # of the models sent in rounds: so many may go to clients that choose anew
    sign_cost: ClassVar[float] = 1.0  # of signing, in models

    signal: Literal["classes", "updates"] = setting(
        "classes",
        "what signatures compare: gradients of the classes that two clients share; or updates (in coterie the gradient "
        "of all samples), so that nothing about classes leaves a client",
    )
    guard: bool = setting(
        True, "repair empty and duplicate clusters, and let clients choose anew when their loss has risen"
    )
    weighting: Literal["equal", "samples"] = setting("samples", "weight of a client in its cluster's mean")
    vote: bool = setting(
        False, "members vote on their center by held-out loss; one that most find worse than the last is not taken"
    )
    admission: float = setting(
        1.0,
        "share of a cluster's members that may come from other clusters in a round, at least one; 1: no limit",
        gt=0,
        le=1,
    )

    def first_state(self, engine: Engine, num_clusters: int, **more: Any) -> C:
        """K copies of the common model; no client seen yet."""
        count = engine.num_clients
        more |= {name: torch.zeros(count, dtype=torch.bool) for name in ("pending", "alarmed")}
        more["chose_in"] = torch.zeros(count, dtype=torch.int64)
        state: C = self.state_type.common_start(engine, num_clusters, **more)  # type: ignore[assignment]
        return state

    def work(self, engine: Engine) -> SGD:
        """The local work of this round."""
        return engine.task.work.at(engine.round)

    def member_step(self, state: C, engine: Engine) -> tuple[ClientStep, dict[str, Tensor]]:
        """What a client does with its center, and the payload of the call."""
        return train_member, {}

    def train_from(self, state: C, engine: Engine, cohort: Tensor, rows: Tensor, rng: Rng) -> Iterator[Chunk]:
        """Clients train from the given centers [C]; in a round with the guard, they watch their losses."""
        step, payload = self.member_step(state, engine)
        if self.watches_losses and engine.phase == "round":
            payload = payload | {"watch": torch.ones(())}
        if self.vote and engine.phase == "round":
            payload = payload | {"vote": torch.ones(())}
        return engine.call(
            step, cohort, models=state.centers, refs=rows, payload=payload, work=self.work(engine), rng=rng
        )

    def train_common(self, state: C, engine: Engine, cohort: Tensor, rng: Rng) -> Iterator[Chunk]:
        """The clients of the cohort train from the common model."""
        step, payload = self.member_step(state, engine)
        models, refs = state.common.unsqueeze(0), torch.zeros(len(cohort), dtype=torch.int64)
        return engine.call(step, cohort, models=models, refs=refs, payload=payload, work=self.work(engine), rng=rng)

    def sign(self, state: C, engine: Engine, clients: Tensor, rng: Rng) -> Iterator[Chunk]:
        """Clients sign at the common model; by updates, they train from it."""
        if not self.signs_classes(engine):
            return self.train_common(state, engine, clients, rng)
        refs = torch.zeros(len(clients), dtype=torch.int64)
        return engine.call(sign, clients, models=state.common.unsqueeze(0), refs=refs, rng=rng)

    def signs_classes(self, engine: Engine) -> bool:
        """Whether clients sign by classes; otherwise by updates."""
        return self.signal == "classes" and engine.task.num_classes > 0

    def signature(self, params: Tensor, state: C, engine: Engine) -> Tensor:
        """What is compared of models trained from the common model, [c, P] -> [c, D]: by default the update."""
        return update_of(params, state, engine)

    def weights_of(self, chunk: Chunk) -> Tensor:
        """The weight of each client of a chunk in its cluster's mean, [c]."""
        samples = samples_of(chunk)
        return samples if self.weighting == "samples" else torch.ones_like(samples)

    @property
    def watches_losses(self) -> bool:
        """Whether clients tell when their loss has risen, and then choose anew."""
        return self.guard


@dataclass(frozen=True)
class CenterMethod(SignedMethod[C]):
    """K centers. Each client trains from its center, is assigned to one, and is averaged into it."""

    num_clusters: int = num_clusters_setting()
    init: Literal["warm", "paper"] = setting("warm", "start from a clustering of signatures, or as in the paper")
    restarts: int = setting(20, "random restarts of the first clustering", ge=1)
    warmup: int = setting(3, "rounds of plain averaging before the first clustering, with init=warm", ge=0)

    def empty_state(self, engine: Engine) -> C:
        """K copies of the common model; no client seen yet."""
        return self.first_state(engine, self.num_clusters)

    def train(self, state: C, engine: Engine, cohort: Tensor, rng: Rng) -> Iterator[Chunk]:
        """Each client of the cohort that has a center trains from it."""
        placed = cohort[state.labels[cohort] >= 0]
        return self.train_from(state, engine, placed, state.labels[placed], rng)

    def average(self, state: C, engine: Engine) -> Average:
        """How the members of a cluster become its center."""
        return self.mean_of(self.num_clusters, engine, like=state.centers)

    @property
    def protects_start(self) -> bool:
        """Whether clients confirm what the method's rule proposes. From a random start, the rule must be free."""
        return self.guard and self.init == "warm"


# ---- a round ----


class Watch:
    """What the guard sees of a round: sketches of the updates, and the centers they started from."""

    def __init__(self, engine: Engine, is_on: bool) -> None:
        self._size = engine.task.layout.num_parameters
        self._sketch = sketch_of(self._size, _WIDTH, Rng.seed(0).at("guard"), engine.device) if is_on else None
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, chunk: Chunk, started: Tensor, state: ClusterState) -> None:
        """Add a chunk whose clients trained from the centers `started` [c]."""
        if self._sketch is None:
            return
        # Sketches are linear: the sketch of an update is the difference of two sketches.
        update = self._sketch(chunk.answer.params[:, : self._size])
        update = update - self._sketch(state.centers[:, : self._size])[started.to(update.device)]
        self._parts.append((chunk.clients, started, update))

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Clients [C], the centers they started from [C], sketches of their updates [C, D]."""
        clients, started, updates = zip(*self._parts, strict=True)
        return torch.cat(clients), torch.cat(started), torch.cat(updates)

    def __bool__(self) -> bool:
        return bool(self._parts)


class Alarms:
    """The models of clients whose loss has risen in a round.

    Their data may be of another kind now, so they are asked before the centers move. Those that choose their center
    again have not changed: there the center has become worse, and without them it would become worse still, so they
    count. The others are left out. With one cluster there is no choice, and all count.

    Models that do not fit in memory are not held: their clients are left out, and choose afterwards.
    """

    def __init__(self, engine: Engine) -> None:
        self._fits = fits_in_memory(engine.num_clients, engine)
        self._held: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # clients, models, labels, weights

    @property
    def clients(self) -> Tensor:
        """Those whose models are held."""
        return torch.cat([torch.empty(0, dtype=torch.int64), *(one[0] for one in self._held)])

    def add(self, clients: Tensor, models: Tensor, labels: Tensor, weights: Tensor, alarmed: Tensor) -> None:
        """Models [c, P] of clients [c] in these clusters [c], with the weight that they would have [c]."""
        if self._fits and bool(alarmed.any()):
            there = alarmed.to(models.device)
            self._held.append((clients[alarmed], models[there], labels[alarmed], weights[there]))

    def counted(self, state: CenterState, engine: Engine) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Clients, models, labels and weights of those that count, after they have chosen."""
        for clients, models, labels, weights in self._held:
            stayed = (state.chose_in[clients] == engine.round) & (state.labels[clients] == labels)
            counts = stayed if state.num_clusters > 1 else torch.ones_like(stayed)
            there = counts.to(models.device)
            if bool(counts.any()):
                yield clients[counts], models[there], labels[counts], weights[there]


class RoundUpdate(Generic[C]):
    """Collects one round: new labels, running means, and what the guard needs."""

    def __init__(self, method: CenterMethod[C], state: C, engine: Engine) -> None:
        self._method, self._state, self._engine = method, state, engine
        self._average = method.average(state, engine)
        self._labels, self._pending = state.labels.clone(), state.pending.clone()
        self._alarmed = state.alarmed.clone()
        self.alarms = Alarms(engine)
        self.answered = torch.empty(0, dtype=torch.int64)
        self.watch = Watch(engine, method.guard)
        self._votes = Votes(state)

    def add(self, chunk: Chunk, chosen: Tensor, started: Tensor | None = None) -> None:
        """Assign the clients of a chunk to clusters [c]; -1 keeps the old label.

        `started` [c] are the centers they trained from, if they chose them themselves (IFCA). After a
        warm start and with the guard, another cluster is a proposal: the client keeps its label until it has chosen
        anew. A client whose loss has risen also keeps it, and may be left out of its center (see `Alarms`).
        Where `admission` limits who may move, clients that move count in no center in this round.
        """
        state, clients = self._state, chunk.clients
        before = state.labels[clients]
        alarm = chunk.answer.get("alarm")
        alarmed = torch.zeros(len(clients), dtype=torch.bool) if alarm is None else alarm.bool().cpu()
        chosen = torch.where((chosen < 0) | alarmed, before, chosen)
        if self._method.protects_start and started is None:
            rested = self._engine.round - state.chose_in[clients] >= PATIENCE
            self._pending[clients] |= (chosen != before) & (before >= 0) & (rested | (state.chose_in[clients] == 0))
            chosen = torch.where(before >= 0, before, chosen)
        self._labels[clients] = chosen
        outside = is_outside(state)[clients]
        self._pending[clients] |= alarmed
        self._alarmed[clients] |= alarmed & ~outside  # a new signature would not count
        counts = ~outside
        if self._method.admission < 1:
            counts &= (chosen == before) | (before < 0)
        weights = self._method.weights_of(chunk) * counts.to(self._engine.device)
        self.alarms.add(clients, chunk.answer.params, chosen.clamp_min(0), weights, alarmed)
        weights = weights * (~alarmed).to(self._engine.device)
        self._average.add(chunk.answer.params, chosen.clamp_min(0), weights)
        self.watch.add(chunk, before if started is None else started, state)
        self._votes.add(chunk, before)
        self.answered = torch.cat([self.answered, clients])

    def unaveraged(self) -> C:
        """The state with the new labels, and the old centers."""
        state = self._state
        labels = admitted(state.labels, state.labels, self._labels, self._engine.keys, self._method.admission)
        # A client that has moved may have other data now: its signature is of the past.
        moved = (state.labels >= 0) & (labels != state.labels)
        return replace(
            without_signatures(state, moved),
            labels=labels,
            pending=self._pending,
            alarmed=self._alarmed,
            sent_in_rounds=state.sent_in_rounds + 2 * len(self.answered),
        )

    def averaged(self, state: C) -> C:
        """The state in which every center is the mean of its members."""
        for _, models, labels, weights in self.alarms.counted(state, self._engine):
            self._average.add(models, labels, weights)
        return replace(state, **self._votes.changes(self._average.means(keep=state.centers)))


def admitted(since: Tensor, now: Tensor, wanted: Tensor, keys: Tensor, share: float) -> Tensor:
    """The labels [N] of clients that want to move from `now`, if a cluster takes so many from others in a round.

    A cluster takes at most this share of the members that it had at the beginning, `since`, and at least one. Those who
    have moved since then are counted; of the others the first by their keys are taken. Clients that had no cluster
    are not limited.
    """
    if share >= 1:
        return wanted
    labels, moves = wanted.clone(), (wanted != now) & (now >= 0)
    for k in wanted[moves].unique().tolist():
        room = max(1, int(share * int((since == k).sum()))) - int(((now == k) & (since != k) & (since >= 0)).sum())
        coming = (moves & (wanted == k)).nonzero().flatten()
        late = coming[keys[coming].argsort()][max(0, room) :]
        labels[late] = now[late]
    return labels


def without_signatures(state: C, which: Tensor) -> C:
    """The state without the signatures of these clients, bool [N]."""
    if len(state.counts) != len(which) or not bool((which & has_signature(state)).any()):
        return state
    there = which.to(state.signatures.device)
    return replace(
        state,
        signatures=state.signatures.masked_fill(there.reshape(-1, 1, 1), 0),
        counts=state.counts.masked_fill(which.unsqueeze(1), 0),
    )


def has_signature(state: CenterState) -> Tensor:
    """Which clients have a signature, bool [N]."""
    if len(state.signatures) != len(state.labels):
        return torch.zeros(len(state.labels), dtype=torch.bool)
    return (state.counts > 0).any(1)


def tells_outside(state: CenterState) -> bool:
    """Whether the kinds were so clear at the start that clients of none of them are known."""
    return len(state.outside) == len(state.labels)


def is_outside(state: CenterState) -> Tensor:
    """Which clients move no center, because they were of none of the kinds, bool [N]."""
    return state.outside if tells_outside(state) else torch.zeros(len(state.labels), dtype=torch.bool)


def update_of(params: Tensor, state: ClusterState, engine: Engine) -> Tensor:
    """The update of models trained from the common model: [c, P] -> [c, num_parameters]."""
    cut = engine.task.layout.num_parameters
    update: Tensor = params[:, :cut] - state.common[:cut]
    return update
