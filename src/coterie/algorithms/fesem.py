"""FeSEM: multi-center federated learning by stochastic expectation maximisation (Long, Xie, Shen, Zhou, Wang,
Jiang 2022, "Multi-center federated learning: clients clustering for better personalization", World Wide Web).

A round: each client trains from its center (Eq. 7), is assigned to the center nearest to its model (Eq. 8),
and every center becomes the mean of its members (Eq. 9). The first clustering is k-means with 20 restarts on
models trained once from one common start (section 6.1.4).

Deviations, with reasons: with a cohort of some clients, the mean is over the cohort's members (the paper has
full participation). Cosine distance is taken between updates from the common start, since all models of a run
point nearly the same way. Known limits: a client starts at its own center, so L2 tends to confirm the old
label; and under label skew L2 sees the labels rather than the kind of client.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, ClusterState, num_clusters_setting, register
from coterie.block import Answer, Block, Models, Task, client_step, train
from coterie.clustering import CenterSums, Sketch, cosine_distances, kmeans, squared_distances
from coterie.engine import Chunk, Engine
from coterie.local import SGD, Proximal
from coterie.randomness import Rng
from coterie.settings import setting


@client_step
def train_near_center(block: Block, models: Models, work: SGD, mean_samples: Tensor) -> Answer:
    """Train with a pull of prox / (m alpha_i) towards the center; m alpha_i is samples / mean samples."""
    assert isinstance(work, Proximal)
    pull = (work.prox * mean_samples / block.samples).to(models.table.dtype)  # [c]
    return Answer(params=block.train(models.rows(), work, prox=pull), samples=block.samples)


@dataclass(frozen=True)
class FeSEMState(ClusterState):
    """The centers, and what newcomers are compared to."""

    start_centers: Tensor = field(
        default_factory=lambda: torch.empty(0)
    )  # [K, P] the centers of the first clustering, near the common start
    mean_samples: float = 0.0  # mean number of samples of the clients met at the start


@register
@dataclass(frozen=True)
class FeSEM(Algorithm):
    """K centers, each the mean of the models nearest to it."""

    key: ClassVar[str] = "fesem"
    paper: ClassVar[str] = "Long et al. 2022"
    state_type: ClassVar[type[ClusterState]] = FeSEMState

    num_clusters: int = num_clusters_setting()
    distance: Literal["l2", "cosine"] = setting("l2", "distance of a model to a center")
    layers: Literal["all", "head"] = setting("all", "which parameters the distance looks at")
    weighting: Literal["equal", "samples"] = setting("equal", "weight of a client in its cluster's mean")
    prox: float = setting(0.0, "pull of a client's model to its center: 2 lambda in the paper; 0 is none", ge=0)
    prox_scale: Literal["equal", "paper"] = setting(
        "equal", "the same pull for all, or by 1 / share of samples as Eq. 7 has it"
    )
    restarts: int = setting(20, "random restarts of the first clustering", ge=1)
    sketch: int = setting(4096, "width of the sketches, where all local models do not fit into memory", ge=16)
    tolerance: float = setting(0.0, "stop when no label changes and centers move less than this; 0: never", ge=0)
    patience: int = setting(3, "rounds in a row that must be so calm before stopping", ge=1)

    def init(self, task: Task, engine: Engine, rng: Rng) -> FeSEMState:
        """Train every client once from one common model, and cluster what comes back."""
        state: FeSEMState = FeSEMState.common_start(engine, self.num_clusters)
        everyone = engine.everyone()
        size = engine.num_clients * task.layout.size * engine.dtype.itemsize
        if size <= engine.memory_budget():
            return self._start_in_memory(state, engine, everyone, rng)
        return self._start_from_sketches(state, engine, everyone, rng)

    def _start_in_memory(self, state: FeSEMState, engine: Engine, everyone: Tensor, rng: Rng) -> FeSEMState:
        params, samples, clients = [], [], []
        for chunk in self._train(state, engine, everyone, state.labels, rng.at("start")):
            params.append(chunk.answer.params)
            samples.append(chunk.answer.samples)
            clients.append(chunk.clients)
        if not clients:
            return state
        models, who, weights = torch.cat(params), torch.cat(clients), torch.cat(samples)
        labels = self._first_labels(self._seen(models, state, engine), engine.keys[who], rng)
        sums = CenterSums(self.num_clusters, like=models)
        sums.add(models, labels, weights if self.weighting == "samples" else None)
        return self._started(state, who, labels, sums, weights)

    def _start_from_sketches(self, state: FeSEMState, engine: Engine, everyone: Tensor, rng: Rng) -> FeSEMState:
        """Two identical passes: one sketches the models for clustering, one adds them into the centers."""
        columns = self._columns(engine.task)
        sketch = Sketch(columns.stop - columns.start, self.sketch, rng, engine.device)
        rows, samples, clients = [], [], []
        for chunk in self._train(state, engine, everyone, state.labels, rng.at("start")):
            # The update, not the model: what is small is sketched with a small error.
            rows.append(sketch(chunk.answer.params[:, columns] - state.common[columns]))
            samples.append(chunk.answer.samples)
            clients.append(chunk.clients)
        if not clients:
            return state
        who, weights = torch.cat(clients), torch.cat(samples)
        labels = self._first_labels(torch.cat(rows), engine.keys[who], rng)
        by_client = torch.full((engine.num_clients,), -1, dtype=torch.int64)
        by_client[who] = labels
        sums = CenterSums(self.num_clusters, like=state.centers)
        for chunk in self._train(state, engine, who, state.labels, rng.at("start")):
            own = chunk.answer.samples if self.weighting == "samples" else None
            sums.add(chunk.answer.params, by_client[chunk.clients], own)
        return self._started(state, who, labels, sums, weights)

    def _first_labels(self, rows: Tensor, keys: Tensor, rng: Rng) -> Tensor:
        if self.distance == "cosine":
            rows = torch.nn.functional.normalize(rows, dim=1)
        clusters = min(self.num_clusters, len(rows))
        return kmeans(rows, clusters, rng.at("k-means"), keys, restarts=self.restarts).labels

    def _started(self, state: FeSEMState, who: Tensor, labels: Tensor, sums: CenterSums, samples: Tensor) -> FeSEMState:
        centers = sums.means(keep=state.centers)
        by_client = state.labels.clone()
        by_client[who] = labels
        mean = float(samples.double().mean())
        return replace(state, centers=centers, start_centers=centers, labels=by_client, mean_samples=mean)

    def round(self, state: FeSEMState, engine: Engine, cohort: Tensor, rng: Rng) -> FeSEMState:
        """Train from the own center, assign to the nearest, average."""
        sums = CenterSums(self.num_clusters, like=state.centers)
        labels = state.labels.clone()
        for chunk in self._train(state, engine, cohort, state.labels, rng):
            known = (state.labels[chunk.clients] >= 0).to(engine.device)
            seen = self._seen(chunk.answer.params, state, engine)
            chosen = self._distances(seen, state.centers, state, engine).argmin(1)  # [c]
            weights = torch.ones(len(chosen), device=engine.device)
            if self.weighting == "samples":
                weights = chunk.answer.samples
            if not bool(known.all()):
                # A client met for the first time trained from the common start, as the start centers did;
                # its model is rounds behind, so it does not move a center yet.
                first = self._distances(seen, state.start_centers, state, engine).argmin(1)
                chosen, weights = torch.where(known, chosen, first), weights * known
            labels[chunk.clients] = chosen.cpu()
            sums.add(chunk.answer.params, chosen, weights)
        centers = sums.means(keep=state.centers)
        moved = float((centers - state.centers).norm(dim=1).max())
        is_calm = bool((labels == state.labels).all()) and moved < self.tolerance
        return replace(state, centers=centers, labels=labels, calm_rounds=state.calm_rounds + 1 if is_calm else 0)

    def should_stop(self, state: FeSEMState) -> bool:
        """No label changed and centers hardly moved, several rounds in a row."""
        return self.tolerance > 0 and state.calm_rounds >= self.patience

    def assign(self, state: FeSEMState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer trains once from the common start; its model is compared to the first centers."""
        labels = torch.full((len(newcomers),), -1, dtype=torch.int64)
        unknown = torch.full((engine.num_clients,), -1, dtype=torch.int64)
        for chunk in self._train(state, engine, newcomers, unknown, rng):
            seen = self._seen(chunk.answer.params, state, engine)
            distances = self._distances(seen, state.start_centers, state, engine)
            labels[chunk.positions] = distances.argmin(1).cpu()
        return labels

    # ---- helpers ----

    def _train(self, state: FeSEMState, engine: Engine, cohort: Tensor, labels: Tensor, rng: Rng) -> Iterator[Chunk]:
        """Ask clients to train: each from its center, or from the common start if it was not met yet."""
        table = torch.cat([state.centers, state.common.unsqueeze(0)])
        refs = torch.where(labels[cohort] < 0, self.num_clusters, labels[cohort])
        work, step, payload = engine.task.work.at(engine.round), train, {}
        if self.prox:
            work = Proximal.of(work, self.prox)
            if self.prox_scale == "paper" and state.mean_samples:
                step = train_near_center
                payload["mean_samples"] = torch.tensor(state.mean_samples, dtype=torch.float64, device=engine.device)
        return engine.call(step, cohort, models=table, refs=refs, work=work, payload=payload, rng=rng)

    def _columns(self, task: Task) -> slice:
        return task.layout.head if self.layers == "head" else slice(0, task.layout.num_parameters)

    def _seen(self, models: Tensor, state: FeSEMState, engine: Engine) -> Tensor:
        """What the distance looks at: the chosen layers; for cosine, their update from the common start."""
        columns = self._columns(engine.task)
        return models[:, columns] if self.distance == "l2" else models[:, columns] - state.common[columns]

    def _distances(self, seen: Tensor, centers: Tensor, state: FeSEMState, engine: Engine) -> Tensor:
        measure = squared_distances if self.distance == "l2" else cosine_distances
        return measure(seen, self._seen(centers, state, engine))
