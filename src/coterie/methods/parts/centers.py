"""What the iterative clustered methods share: settings, state, and the bookkeeping of a round.

A method writes its own `start` and `round`: train, assign, average, as in its paper. `RoundUpdate` collects the chunks
of a round and computes the next state; `parts/start.py` has the starts, `parts/guard.py` the repairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from coterie.client.steps import train
from coterie.client.work import SGD
from coterie.engines.base import Chunk, Engine
from coterie.methods.base import ClusterState, num_clusters_setting
from coterie.methods.parts.averaging import Average, Averaging, samples_of
from coterie.methods.parts.clustering import Sketch, sketch_of, squared_distances
from coterie.randomness import Rng
from coterie.settings import setting

WIDTH = 1024  # of the sketch of a client's first update
REST = 2  # rounds between two repairs, so that the first can take effect


@dataclass(frozen=True)
class CenterState(ClusterState):
    """The centers, and sketches of the clients' first updates."""

    of_clients: ClassVar[tuple[str, ...]] = ("sketches", "moved")
    stored_as: ClassVar[dict[str, str]] = {**ClusterState.stored_as, "repaired_in": "mended_in"}

    sketches: Tensor = field(default_factory=lambda: torch.empty(0))  # [N, D] first update from the common model
    mean_samples: float = 0.0  # mean sample count of the clients in the start
    repaired_in: int = -REST  # round of the last repair
    moved: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))  # [N] changed its label in a round


C = TypeVar("C", bound=CenterState)


@dataclass(frozen=True)
class CenterMethod(Averaging[C]):
    """K centers. Each client trains from its center, is assigned to one, and is averaged into it."""

    state_type: ClassVar[type[ClusterState]] = CenterState

    num_clusters: int = num_clusters_setting()
    init: Literal["warm", "paper"] = setting("warm", "start from a clustering of first updates, or as in the paper")
    guard: bool = setting(True, "repair empty and duplicate clusters during the run")
    weighting: Literal["equal", "samples"] = setting("equal", "weight of a client in its cluster's mean")
    restarts: int = setting(20, "random restarts of the first k-means", ge=1)
    warmup: int = setting(3, "rounds of plain averaging before the first clustering, with init=warm", ge=0)

    def empty_state(self, engine: Engine) -> C:
        """K copies of the common model; no client seen yet."""
        width = min(WIDTH, engine.task.layout.num_parameters)
        sketches = torch.zeros(engine.num_clients, width, dtype=engine.dtype, device=engine.device)
        moved = torch.zeros(engine.num_clients, dtype=torch.bool)
        more = {"sketches": sketches, "moved": moved}
        state: C = self.state_type.common_start(engine, self.num_clusters, **more)  # type: ignore[assignment]
        return state

    def work(self, engine: Engine) -> SGD:
        """The local work of this round."""
        return engine.task.work.at(engine.round)

    def train_from(self, state: C, engine: Engine, cohort: Tensor, rows: Tensor, rng: Rng) -> Iterator[Chunk]:
        """Clients train from the given rows [C]: row k is center k, row K the common model."""
        table = torch.cat([state.centers, state.common.unsqueeze(0)])
        return engine.call(train, cohort, models=table, refs=rows, work=self.work(engine), rng=rng)

    def train(self, state: C, engine: Engine, cohort: Tensor, rng: Rng) -> Iterator[Chunk]:
        """Each client trains from its center, or from the common model if it is new."""
        return self.train_from(state, engine, cohort, rows_of(state.labels[cohort], self.num_clusters), rng)

    def train_from_common(self, state: C, engine: Engine, cohort: Tensor, rng: Rng) -> Iterator[Chunk]:
        """All clients train from the common model."""
        return self.train_from(state, engine, cohort, torch.full((len(cohort),), self.num_clusters), rng)

    def signature(self, params: Tensor, state: C, engine: Engine) -> Tensor:
        """What the first clustering compares, [c, P] -> [c, D]: by default the update from the common model."""
        return update_of(params, state, engine)

    def average(self, state: C, engine: Engine) -> Average:
        """How the members of a cluster become its center."""
        return self.mean_of(self.num_clusters, engine, like=state.centers)

    def joined(self, state: C, engine: Engine, clients: Tensor, rng: Rng) -> C:
        """The state after asking clients that are first seen for what the method needs to know of them."""
        return state

    @property
    def compares_first_models(self) -> bool:
        """Whether all first models started from the same point, so that the guard may compare them."""
        return True


class Watch:
    """What the guard sees of a round: sketches of the updates, and the rows they started from."""

    def __init__(self, engine: Engine, is_on: bool) -> None:
        self._size = engine.task.layout.num_parameters
        self._sketch = sketch_of(self._size, WIDTH, Rng.seed(0).at("guard"), engine.device) if is_on else None
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, chunk: Chunk, started: Tensor, state: ClusterState) -> None:
        """Add a chunk whose clients trained from rows `started` [c] of the table [centers, common model]."""
        if self._sketch is None:
            return
        # New clients trained from the common model: their updates cannot be compared to the others'.
        mine = (started < len(state.centers)).nonzero().flatten()
        if not len(mine):
            return
        here = mine.to(state.centers.device)
        params = chunk.answer.params if len(mine) == len(started) else chunk.answer.params[here]
        # Sketches are linear: the sketch of an update is the difference of two sketches.
        update = self._sketch(params[:, : self._size])
        update = update - self._sketch(state.centers[:, : self._size])[started[mine].to(here.device)]
        self._parts.append((chunk.clients[mine], started[mine], update))

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Clients [C], the rows they started from [C], sketches of their updates [C, D]."""
        clients, started, updates = zip(*self._parts, strict=True)
        return torch.cat(clients), torch.cat(started), torch.cat(updates)

    def __bool__(self) -> bool:
        return bool(self._parts)


class RoundUpdate(Generic[C]):
    """Collects one round: new labels, running means, and what the guard needs."""

    def __init__(self, method: CenterMethod[C], state: C, engine: Engine) -> None:
        self._method, self._state, self._engine = method, state, engine
        self._average = method.average(state, engine)
        self._labels = state.labels.clone()
        self._sketches: Tensor | None = None  # a copy, once a new client is seen
        self.watch = Watch(engine, method.guard)

    def add(self, chunk: Chunk, chosen: Tensor, started: Tensor | None = None) -> None:
        """Assign the clients of a chunk to clusters [c]; -1 keeps the old label.

        `started` [c] are the centers they trained from, if they chose them themselves (IFCA).
        """
        state, engine, clients = self._state, self._engine, chunk.clients
        known = state.labels[clients] >= 0
        if started is not None:
            known = torch.ones_like(known)
        elif not bool(known.all()):
            self._remember(chunk, ~known)
        chosen = torch.where(chosen < 0, state.labels[clients], chosen)
        placed = chosen >= 0
        self._labels[clients[placed]] = chosen[placed]
        # A new client trained from the common model, which is rounds behind: it does not move a center yet.
        moving = (known & placed).to(engine.device)
        weights = samples_of(chunk) if self._method.weighting == "samples" else moving.to(engine.dtype)
        self._average.add(chunk.answer.params, chosen.clamp_min(0), weights * moving)
        rows = rows_of(state.labels[clients], len(state.centers)) if started is None else started
        self.watch.add(chunk, rows, state)

    def _remember(self, chunk: Chunk, which: Tensor) -> None:
        """Keep sketches of the first updates of these clients."""
        if self._sketches is None:
            self._sketches = self._state.sketches.clone()
        where = which.nonzero().flatten()
        update = update_of(chunk.answer.params[where.to(self._engine.device)], self._state, self._engine)
        self._sketches[chunk.clients[where].to(self._engine.device)] = first_sketch(self._engine)(update)

    def averaged(self) -> C:
        """The state after the round: every center is the mean of its members."""
        state = self._state
        moved = (state.labels >= 0) & (self._labels != state.labels)
        if len(state.moved) == len(moved):
            moved |= state.moved
        sketches = state.sketches if self._sketches is None else self._sketches
        centers = self._average.means(keep=state.centers)
        return replace(state, centers=centers, labels=self._labels, moved=moved, sketches=sketches)


def is_new(chunk: Chunk, state: ClusterState) -> Tensor:
    """Which clients of a chunk have no cluster yet, bool [c]."""
    return state.labels[chunk.clients] < 0


def rows_of(labels: Tensor, num_clusters: int) -> Tensor:
    """Labels as rows of the table [centers, common model]; new clients get the last row."""
    return torch.where(labels < 0, num_clusters, labels)


def update_of(params: Tensor, state: ClusterState, engine: Engine) -> Tensor:
    """The update of models trained from the common model: [c, P] -> [c, num_parameters]."""
    cut = engine.task.layout.num_parameters
    update: Tensor = params[:, :cut] - state.common[:cut]
    return update


def first_sketch(engine: Engine) -> Sketch:
    """The sketch of first updates, the same in every run."""
    return sketch_of(engine.task.layout.num_parameters, WIDTH, Rng.seed(0).at("first models"), engine.device)


def first_model_distances(sketches: Tensor, state: CenterState) -> Tensor:
    """Squared distances of sketched first updates [c, D] to the mean first update of each cluster: [c, K].

    New clients train from the common model, as the members did in the start. The centers have moved since.
    """
    labels = state.labels[: len(state.sketches)].to(sketches.device)
    member = torch.nn.functional.one_hot(labels.clamp_min(0), state.num_clusters).to(sketches.dtype)
    member = member * ((labels >= 0) & (state.sketches != 0).any(1)).to(sketches.dtype).unsqueeze(1)
    counts = member.sum(0)
    means = member.T @ state.sketches / counts.clamp_min(1).unsqueeze(1)
    distances = squared_distances(sketches, means)
    return torch.where(counts > 0, distances, torch.inf)


def nearest_by_first_models(chunk: Chunk, state: CenterState, engine: Engine) -> Tensor:
    """The clusters whose members' first updates are nearest to those of a chunk's clients: labels [c]."""
    sketches = first_sketch(engine)(update_of(chunk.answer.params, state, engine))
    return first_model_distances(sketches, state).argmin(1).cpu()
