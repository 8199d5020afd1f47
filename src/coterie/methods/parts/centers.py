"""What the iterative clustered methods share: the start, the round (train, assign, average), and the guard.

A method says how far a client's model is from each center (`distances`); everything else is here.

**Start.** `warm`: a few rounds of plain federated averaging make ONE common model (`warmup`); every client trains
once from it, and what comes back is clustered by k-means with restarts. From a model that knows its task already,
updates tell the kinds of client apart; from random weights they tell first of all who holds which labels (rotated
MNIST, alpha = 3: ARI of the first clustering 0.0 without, 1.0 after three rounds). `paper`: as the method's paper
has it.

**Guard.** After a round, an empty cluster, or two centers that are the same, are noticed and repaired: the
cluster whose members pull apart most is split, by 2-means on sketches of their updates, and the freed center
becomes the mean of one half. And a client whose first model, begun at the same point as everyone's, is nearer by far
to those of another cluster is moved there, once. Every repair is recorded with round and reason. The guard sees what
the server sees anyway (models, labels): neither true groups nor test data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from coterie.client.block import Task, train
from coterie.client.work import SGD
from coterie.engines.base import Chunk, Engine
from coterie.methods.base import ClusterState, num_clusters_setting
from coterie.methods.parts.averaging import Average, Averaging
from coterie.methods.parts.clustering import KMeans, Sketch, kmeans, sketch_of, squared_distances
from coterie.randomness import Rng, uniform
from coterie.settings import setting

_WIDTH = 1024  # of the sketches that are kept of each client
_WHOLE = 1 << 23  # numbers that are clustered as they are
_SAME = 0.05  # centers nearer than this share of a typical update are the same
_SURELY = 0.7  # a client is moved only if another cluster is nearer by this factor (of the squared distance)
_REST = 2  # rounds between two repairs, so that the first can take effect


@dataclass(frozen=True)
class CenterState(ClusterState):
    """The centers, and what is remembered of the clients' first models."""

    of_clients: ClassVar[tuple[str, ...]] = ("sketches", "moved")

    sketches: Tensor = field(default_factory=lambda: torch.empty(0))  # [N, D] first update from the common start
    mean_samples: float = 0.0  # mean number of samples of the clients met at the start
    mended_in: int = -_REST  # round of the last repair
    moved: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))  # [N] changed label in a round
    first_labels: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # see _without_clients


@dataclass(frozen=True)
class CenterMethod(Averaging):
    """K centers; each client trains from its own, is assigned, and is averaged into the one it is assigned to."""

    state_type: ClassVar[type[ClusterState]] = CenterState

    num_clusters: int = num_clusters_setting()
    init: Literal["warm", "paper"] = setting("warm", "start: from a clustering of first models, or as in the paper")
    guard: bool = setting(True, "repair empty and duplicate clusters while the run goes on")
    weighting: Literal["equal", "samples"] = setting("equal", "weight of a client in its cluster's mean")
    restarts: int = setting(20, "random restarts of the first clustering", ge=1)
    warmup: int = setting(3, "with init=warm, rounds of plain averaging by everyone before the first clustering", ge=0)

    # ---- what a method says ----

    def distances(self, context: Any, params: Tensor, clients: Tensor, state: Any, engine: Engine) -> Tensor:
        """Distance of each model [c, P] of these clients to each center: [c, K]."""
        raise NotImplementedError

    def prepare(self, state: Any, engine: Engine, rng: Rng) -> Any:
        """What `distances` needs in this round, made once from the centers."""
        return None

    def signature(self, params: Tensor, state: Any, engine: Engine) -> Tensor:
        """What first models [c, P] are clustered by: [c, D]."""
        return self._update(params, state, engine)

    def work(self, engine: Engine) -> SGD:
        """What clients do in this round."""
        return engine.task.work.at(engine.round)

    def average(self, state: Any, engine: Engine) -> Average:
        """How members become a center."""
        return self.mean_of(self.num_clusters, engine, like=state.centers)

    def ask(self, state: Any, engine: Engine, cohort: Tensor, rng: Rng) -> Iterator[Chunk]:
        """Let clients train: each from its center, or from the common start if it was not met yet."""
        return self.train_from(state, engine, cohort, rows_of(state.labels[cohort], self.num_clusters), rng)

    def train_from(self, state: Any, engine: Engine, cohort: Tensor, rows: Tensor, rng: Rng) -> Iterator[Chunk]:
        """Let clients train from given rows [C]: row k is center k, row K the common start."""
        table = torch.cat([state.centers, state.common.unsqueeze(0)])
        return engine.call(train, cohort, models=table, refs=rows, work=self.work(engine), rng=rng)

    def choose(self, context: Any, chunk: Chunk, state: Any, engine: Engine, rng: Rng) -> Tensor:
        """The cluster of each client of a chunk, [c] on the CPU; -1: leave it where it is."""
        params, clients = chunk.answer.params, chunk.clients
        return self.distances(context, params, clients, state, engine).argmin(1).cpu()

    def first_choice(self, context: Any, chunk: Chunk, state: Any, engine: Engine, rng: Rng) -> Tensor:
        """As `choose`, for clients that are met for the first time and trained from the common start."""
        return self.choose(context, chunk, state, engine, rng)

    def met(self, state: Any, engine: Engine, clients: Tensor, rng: Rng) -> Any:
        """Ask clients, when they are first met, what the method must know of them; the state after it."""
        return state

    # ---- the start ----

    def start(self, task: Task, engine: Engine, rng: Rng) -> Any:
        """The state before the first round."""
        width = min(_WIDTH, task.layout.num_parameters)
        sketches = torch.zeros(engine.num_clients, width, dtype=engine.dtype, device=engine.device)
        moved = torch.zeros(engine.num_clients, dtype=torch.bool)
        state = self.state_type.common_start(engine, self.num_clusters, sketches=sketches, moved=moved)
        return self.first_state(state, engine, rng)

    def first_state(self, state: Any, engine: Engine, rng: Rng) -> Any:
        """The start that `init` names; in most papers K random centers and random labels."""
        way = random_start if self.init == "paper" else type(self).clustered_start
        return way(self, state, engine, rng)

    def clustered_start(self, state: Any, engine: Engine, rng: Rng) -> Any:
        """Everyone trains once from the common start; k-means on the signatures; centers are the means."""
        state = self.warmed_up(state, engine, rng.at("warm-up"))
        size = engine.num_clients * engine.task.layout.size * engine.dtype.itemsize
        fits = size <= engine.memory_budget()
        sketch = self._sketch(engine)
        rows, kept, samples, who = [], [], [], []
        everyone = engine.everyone()
        for chunk in self.train_from(state, engine, everyone, _common(everyone, self), rng.at("start")):
            signature = self.signature(chunk.answer.params, state, engine)
            # Of many models sketches are clustered: they tell nearly as much, and twenty restarts look at them often.
            many = engine.num_clients * signature.shape[1] > _WHOLE
            rows.append(sketch_of(signature.shape[1], 4096, rng, engine.device)(signature) if many else signature)
            state.sketches[chunk.clients.to(engine.device)] = sketch(self._update(chunk.answer.params, state, engine))
            if fits:
                kept.append(chunk.answer.params)
            samples.append(_samples_of(chunk))
            who.append(chunk.clients)
        if not who:
            return random_start(self, state, engine, rng)
        clients, weights = torch.cat(who), torch.cat(samples)
        clusters = min(self.num_clusters, len(clients))
        trim = int(self.trimmed * len(clients))
        keys = engine.keys[clients]
        found = kmeans(torch.cat(rows), clusters, rng.at("k-means"), keys, self.restarts, trim=trim)
        found = with_outliers_dealt(found, torch.cat(rows), keys) if trim else found
        labels = state.labels.clone()
        labels[clients] = found.labels
        counts = torch.zeros(engine.num_clients, dtype=torch.float64)  # outliers move no center
        counts[clients] = (~found.outliers).double() * (weights.cpu() if self.weighting == "samples" else 1)
        average = self.average(state, engine)
        if fits:
            average.add(torch.cat(kept), found.labels, counts[clients])
        else:
            # A second, identical pass: randomness is a hash, so the same models come back.
            for chunk in self.train_from(state, engine, clients, _common(clients, self), rng.at("start")):
                average.add(chunk.answer.params, labels[chunk.clients], counts[chunk.clients])
        centers = average.means(keep=state.centers)
        state = replace(state, centers=centers, labels=labels, mean_samples=float(weights.double().mean()))
        return self.met(state, engine, clients, rng.at("met"))

    def warmed_up(self, state: Any, engine: Engine, rng: Rng) -> Any:
        """The state whose common start is the mean model after `warmup` rounds of plain averaging."""
        everyone = engine.everyone()
        for lap in range(self.warmup if self.init == "warm" else 0):
            mean = self.mean_of(1, engine, like=state.centers)
            for chunk in self.train_from(state, engine, everyone, _common(everyone, self), rng.at(lap)):
                mean.add(chunk.answer.params, torch.zeros(len(chunk.clients), dtype=torch.int64), _samples_of(chunk))
            state = replace(state, common=mean.means(keep=state.common.unsqueeze(0))[0])
        return replace(state, centers=state.common.repeat(self.num_clusters, 1))

    # ---- the round ----

    def round(self, state: Any, engine: Engine, cohort: Tensor, rng: Rng) -> Any:
        """Train from the own center, assign, average, and mend what is broken."""
        unknown = cohort[state.labels[cohort] < 0]
        if len(unknown):
            state = self.met(state, engine, unknown, rng.at("met"))
        context = self.prepare(state, engine, rng.at("prepare"))
        average = self.average(state, engine)
        watch = Watch(engine, self.guard)
        labels = state.labels.clone()
        for chunk in self.ask(state, engine, cohort, rng.at("train")):
            known = state.labels[chunk.clients] >= 0
            chosen = self.choose(context, chunk, state, engine, rng)
            started = self.started_from(chunk, state)
            if not bool(known.all()) and self.starts_from_common:
                # Met for the first time: it trained from the common start, rounds behind, and moves no center yet.
                chosen = torch.where(known, chosen, self.first_choice(context, chunk, state, engine, rng))
                self._remember(chunk, ~known, state, engine)
            else:
                known = torch.ones_like(known)
            chosen = torch.where(chosen < 0, state.labels[chunk.clients], chosen)
            placed = chosen >= 0
            labels[chunk.clients[placed]] = chosen[placed]
            moving = (known & placed).to(engine.device)
            weights = self._weights(_samples_of(chunk))
            weights = torch.ones_like(moving, dtype=engine.dtype) if weights is None else weights
            average.add(chunk.answer.params, chosen.clamp_min(0), weights * moving)
            watch.add(chunk, started, state)
        moved = (state.labels >= 0) & (labels != state.labels)
        if len(state.moved) == len(moved):
            moved |= state.moved
        after = replace(state, centers=average.means(keep=state.centers), labels=labels, moved=moved)
        after = self._calm(state, after)
        return self.second_opinion(mend(self, state, after, engine, watch, rng), engine) if self.guard else after

    def second_opinion(self, state: Any, engine: Engine) -> Any:
        """Move clients that were put wrong at the start, and that stay there because they train from there.

        Judged by their first models, which all began at the same point. A client that has changed its cluster by
        itself is left alone: it may have become another kind since.
        """
        if len(state.sketches) != len(state.labels) or not self.starts_from_common:
            return state
        known = (state.labels >= 0) & ~state.moved & (state.sketches != 0).any(1).cpu()
        distances = first_model_distances(state.sketches, state)  # [N, K]
        own = distances.gather(1, state.labels.clamp_min(0).to(distances.device).unsqueeze(1))[:, 0]
        best = distances.min(1)
        wrong = known & (best.values < _SURELY * own).cpu()
        if engine.round % 2 or not bool(wrong.any()):
            return state
        labels = torch.where(wrong, best.indices.cpu(), state.labels)
        count = int(wrong.sum())
        reason = f"{count} client(s) were nearer to another cluster by their first models, and moved there"
        repair = {"round": engine.round, "cluster": None, "reason": reason}
        return replace(state, labels=labels, repairs=[*state.repairs, repair], calm_rounds=0)

    starts_from_common: ClassVar[bool] = True  # whether a client met for the first time trains from the common start

    def started_from(self, chunk: Chunk, state: Any) -> Tensor:
        """The row each client of a chunk trained from, [c] on the CPU."""
        return rows_of(state.labels[chunk.clients], self.num_clusters)

    def _calm(self, before: Any, after: Any) -> Any:
        return after

    def _weights(self, samples: Tensor) -> Tensor | None:
        return samples if self.weighting == "samples" else None

    def _sketch(self, engine: Engine) -> Sketch:
        return sketch_of(engine.task.layout.num_parameters, _WIDTH, Rng.seed(0).at("first models"), engine.device)

    def _update(self, params: Tensor, state: Any, engine: Engine) -> Tensor:
        cut = engine.task.layout.num_parameters
        update: Tensor = params[:, :cut] - state.common[:cut]
        return update

    def _remember(self, chunk: Chunk, which: Tensor, state: Any, engine: Engine) -> None:
        """Keep a sketch of the first models of these clients of a chunk."""
        where = which.nonzero().flatten()
        update = self._update(chunk.answer.params[where.to(engine.device)], state, engine)
        state.sketches[chunk.clients[where].to(engine.device)] = self._sketch(engine)(update)

    # ---- newcomers ----

    def assign(self, state: Any, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer trains once from the common start, and is assigned by the method's own rule."""
        labels = torch.full((len(newcomers),), -1, dtype=torch.int64)
        fresh = self._without_clients(state, engine)
        fresh = self.met(fresh, engine, newcomers, rng.at("met"))
        context = self.prepare(fresh, engine, rng.at("prepare"))
        for chunk in self.train_from(fresh, engine, newcomers, _common(newcomers, self), rng.at("train")):
            labels[chunk.positions] = self.first_choice(context, chunk, fresh, engine, rng)
        return labels

    def _without_clients(self, state: Any, engine: Engine) -> Any:
        """The state with another engine's clients, all unknown; what is known of the run's own clients stays."""
        unknown = torch.full((engine.num_clients,), -1, dtype=torch.int64)
        return replace(state, labels=unknown, first_labels=state.labels)


def with_outliers_dealt(found: KMeans, rows: Tensor, keys: Tensor) -> KMeans:
    """The clustering with those outliers that are near to no cluster dealt out evenly.

    What is near to no cluster may be an attacker. All of them are about as far from every center, and one center is
    always the nearest by a little: there they would be too many for a robust mean.
    """
    outliers = found.outliers.nonzero().flatten()
    if len(found.centers) < 2:
        return found
    least = squared_distances(rows[outliers.to(rows.device)], found.centers).topk(2, dim=1, largest=False).values
    lost = outliers[(least[:, 0] > _SURELY * least[:, 1]).cpu()]
    labels = found.labels.clone()
    labels[lost[keys[lost].argsort()]] = torch.arange(len(lost)) % len(found.centers)
    return replace(found, labels=labels)


def rows_of(labels: Tensor, num_clusters: int) -> Tensor:
    """Labels as rows of the table [centers, common start]: a client not met yet has the last row."""
    return torch.where(labels < 0, num_clusters, labels)


def _common(clients: Tensor, method: CenterMethod) -> Tensor:
    return torch.full((len(clients),), method.num_clusters)


def _samples_of(chunk: Chunk) -> Tensor:
    """Numbers of samples, where the answer has them; else ones."""
    samples = chunk.answer.get("samples")
    return torch.ones(len(chunk.clients), device=chunk.answer.params.device) if samples is None else samples


def random_start(method: CenterMethod, state: Any, engine: Engine, rng: Rng) -> Any:
    """K independent random centers, and a random label for everyone."""
    drawn = [engine.task.draw(rng.at("center", k)) for k in range(method.num_clusters)]
    luck = uniform(rng.at("labels").keys(engine.keys), 1)[:, 0]
    labels = (luck * method.num_clusters).long()
    centers = torch.stack(drawn).to(engine.device, engine.dtype)
    state = replace(state, centers=centers, labels=labels)
    return method.met(state, engine, engine.everyone(), rng.at("met"))


def nearest_by_first_models(update: Tensor, state: Any) -> Tensor:
    """The cluster whose members' first models are nearest: sketches [c, D] -> labels [c].

    Newcomers trained from the common start, as those did; the centers have moved on since.
    """
    return first_model_distances(update, state).argmin(1)


def first_model_distances(update: Tensor, state: Any) -> Tensor:
    """Squared distances of sketched first models [c, D] to the means of each cluster's: [c, K]."""
    known = state.first_labels if len(state.first_labels) else state.labels
    labels = known[: len(state.sketches)].to(update.device)
    member = torch.nn.functional.one_hot(labels.clamp_min(0), state.num_clusters).to(update.dtype)
    member = member * ((labels >= 0) & (state.sketches != 0).any(1)).to(update.dtype).unsqueeze(1)
    counts = member.sum(0)
    means = member.T @ state.sketches / counts.clamp_min(1).unsqueeze(1)
    distances = squared_distances(update, means)
    return torch.where(counts > 0, distances, torch.inf)


# ---- the guard ----


class Watch:
    """What the guard sees of a round: sketches of the updates, and where they started."""

    def __init__(self, engine: Engine, is_on: bool) -> None:
        self._engine, self._is_on = engine, is_on
        self._size = engine.task.layout.num_parameters
        self._sketch = sketch_of(self._size, _WIDTH, Rng.seed(0).at("guard"), engine.device) if is_on else None
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, chunk: Chunk, started: Tensor, state: Any) -> None:
        """Take in a chunk whose clients trained from rows `started` of the table."""
        if self._sketch is None:
            return
        # Clients met in this round trained from the common start: their updates compare to nobody's.
        mine = (started < len(state.centers)).nonzero().flatten()
        if not len(mine):
            return
        here = mine.to(state.centers.device)
        params = chunk.answer.params if len(mine) == len(started) else chunk.answer.params[here]
        # Sketches are linear: that of the update is that of the model without that of its center.
        update = self._sketch(params[:, : self._size])
        update = update - self._sketch(state.centers[:, : self._size])[started[mine].to(here.device)]
        self._parts.append((chunk.clients[mine], started[mine], update))

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Clients [C], the rows they started from [C], sketches of their updates [C, D]."""
        clients, started, updates = zip(*self._parts, strict=True)
        return torch.cat(clients), torch.cat(started), torch.cat(updates)

    def __bool__(self) -> bool:
        return bool(self._parts)


def mend(method: CenterMethod, before: Any, after: Any, engine: Engine, watch: Watch, rng: Rng) -> Any:
    """Repair one broken cluster, if there is one; the state after it, with the repair recorded."""
    if not watch or method.num_clusters < 2 or engine.round - after.mended_in < _REST:
        return after
    clients, started, updates = watch.result()
    labels = after.labels.clone()
    broken, reason = _find_broken(after, updates, engine)
    if broken is None:
        return after
    labels[labels == broken] = _other_of(after, broken, engine)
    split = split_widest(updates, labels[clients], engine.keys[clients], method.num_clusters, rng.at("split"))
    if split is None:
        return after
    wide, half = split
    members = clients[labels[clients] == wide]
    leaving = members[half]
    labels[leaving] = broken
    # The members train once more, in the same way: their models are needed again, and come back the same.
    average = method.average(before, engine)
    of_member = {int(c): int(r) for c, r in zip(clients, started, strict=True)}
    rows = torch.tensor([of_member[int(c)] for c in members])
    answered = 0
    engine.begin(engine.round, "repair")
    for chunk in method.train_from(before, engine, members, rows, rng.at("train")):
        average.add(chunk.answer.params, labels[chunk.clients], method._weights(_samples_of(chunk)))
        answered += int((labels[chunk.clients] == broken).sum())
    engine.begin(engine.round, "round")
    if not answered:
        return after  # nothing to make the freed center of
    centers = average.means(keep=after.centers)
    kept = len(members) - len(leaving)
    repair = {
        "round": engine.round,
        "cluster": broken,
        "reason": f"{reason}: cluster {wide} was split into {kept} and {len(leaving)} clients",
    }
    mended = {"mended_in": engine.round, "calm_rounds": 0, "repairs": [*after.repairs, repair]}
    return replace(after, centers=centers, labels=labels, **mended)


def _find_broken(state: Any, updates: Tensor, engine: Engine) -> tuple[int | None, str]:
    """The first cluster that is empty or the same as another, and why."""
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


def _other_of(state: Any, broken: int, engine: Engine) -> int:
    """The center nearest to a broken one: where its members, if it has any, go."""
    cut = engine.task.layout.num_parameters
    apart = (state.centers[:, :cut] - state.centers[broken, :cut]).norm(dim=1)
    apart[broken] = torch.inf
    return int(apart.argmin())


def split_widest(
    updates: Tensor, labels: Tensor, keys: Tensor, num_clusters: int, rng: Rng, least: int = 2
) -> tuple[int, Tensor] | None:
    """The cluster whose members pull apart most, and which of its members leave: [members] bool.

    For each cluster 2-means on its members' updates; the gain is what splitting takes off the sum of squares,
    relative to that sum, times the number of members.
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
