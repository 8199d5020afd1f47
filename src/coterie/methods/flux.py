"""FLUX: clients describe the distribution of their data, and are clustered by density (NeurIPS 2025).

Warm-up: FedAvg of one model w. In each round clients report the accuracy of the model on their validation samples, and
the largest entry of its latents. Let A_r be the mean accuracy after round r. From r = 3 on, the clients are clustered
in round r + 1 if A_s - A_(s-1) < `gain` for any s <= r, and in any case once r >= `latest` times the number of rounds.

Descriptor, at the model w of the warm-up and on the training samples: latents z are projected to q numbers by

    u = V (z - 1.02 Z m)

where Z is the largest latent of all clients, m the mean of 200 points of the unit cube, and V their q principal
directions: a fixed random projection, without data in it; q is the number of classes. The descriptor has blocks of q
numbers: mean and standard deviation of u over all samples, then the mean for each class, then the deviation for each
class. A class with fewer than two samples has -1 everywhere. The server scales each block by one minimum and one
maximum over all clients and all entries of the block.

Clusters: the distance of each client to its nearest neighbour, sorted; eps is the distance at the knee of this curve;
clients are in one cluster if steps of at most eps lead from one to the other. That is DBSCAN with two samples, whose
noise points are clusters of their own. `prior` is FLUX-prior: k-means with that many clusters. The models trained in
this round are averaged in the clusters, and from then on each cluster is averaged alone. There is no second clustering.

Bytes: as FedAvg, and one descriptor of each client.

Deviations. A latent is the input of the last dense layer (`latent="last"`), or of the first one, which it is in the
networks of the paper (LeNet, ResNet-9). Clients without validation samples report on their training samples. A client
that was not clustered gets the nearest centroid when it first takes part; it has labels, so its whole descriptor is
compared, and not only the two blocks without labels. Until then it uses the model of the warm-up, which stays as a
cluster that nobody trains (label 0). The points of the projection are drawn by our own generator.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from coterie.client import forms
from coterie.client.block import Block, Models
from coterie.client.forms import Asked, Form, Forms
from coterie.client.steps import Answer, ClientStep, client_step, train
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.engines.base import Engine
from coterie.errors import ConfigError
from coterie.methods.base import ClusterState, register
from coterie.methods.parts.clustering import kmeans, squared_distances
from coterie.methods.parts.once import ClusterOnce, by_id
from coterie.nets.flat import Network
from coterie.randomness import Rng
from coterie.settings import setting

_POINTS = 200  # of the unit cube, whose principal directions are the projection
_MARGIN = 1.02  # on the largest latent
_FIRST = 3  # rounds of warm-up at least
_AT_ONCE = 512  # samples

Latent = Literal["last", "first"]


# ---- the client's half ----


def reported(asked: Asked) -> Forms:
    """Accuracy, the samples it is of, and the largest latent."""
    peak = asked.numbers(low=-forms.LARGE, high=forms.LARGE)
    return {"accuracy": asked.share(), "samples": asked.samples("valid", "train"), "peak": peak}


def described(asked: Asked) -> Forms:
    """A descriptor; its width follows from the network's latents."""
    task = asked.task
    network = Network(task.module, torch.float32, torch.device("cpu"))
    x = torch.zeros(1, *task.input_shape, dtype=torch.int64 if task.integers else torch.float32)
    with torch.no_grad():
        z = latents(network, task.initial.float(), x, bool(asked.given["first"]))
    width = len(projection(z.shape[1], task.num_classes)[1])
    return {"descriptor": Form((2 + 2 * task.num_classes, width), torch.float64, -forms.LARGE, forms.LARGE)}


@client_step("coterie.flux:report", reported)
def report(block: Block, models: Models, work: SGD, first: Tensor) -> Answer:
    """Accuracy and largest latent of the model on the validation samples; on the training samples if there are none."""
    scores = block.evaluate(models, "valid")
    samples = [x for x, _ in block.shards("valid")]
    has = scores["samples"] > 0  # [c]
    if not bool(has.all()):
        trained = block.evaluate(models, "train")
        scores = {name: torch.where(has, scores[name], trained[name]) for name in ("accuracy", "samples")}
        samples = [x if len(x) else other for x, (other, _) in zip(samples, block.shards(), strict=True)]
    network = _network(block, models)
    peaks = [latents(network, row, x, bool(first)).max() for row, x in zip(models.rows(), samples, strict=True)]
    return Answer(accuracy=scores["accuracy"], samples=scores["samples"], peak=torch.stack(peaks))


@client_step("coterie.flux:describe", described)
def describe(block: Block, models: Models, work: SGD, first: Tensor, peak: Tensor) -> Answer:
    """The descriptor of the client's training samples: [c, 2 + 2 L, q]."""
    rows, network = [], _network(block, models)
    for row, (x, y) in zip(models.rows(), block.shards(), strict=True):
        z = latents(network, row, x, bool(first)).double()
        middle, directions = (part.to(z.device) for part in projection(z.shape[1], block.task.num_classes))
        rows.append(descriptor((z - peak.to(z) * middle) @ directions.T, y, block.task.num_classes))
    return Answer(descriptor=torch.stack(rows))


def _network(block: Block, models: Models) -> Network:
    return Network(block.task.module, models.table.dtype, models.table.device)


def descriptor(projected: Tensor, y: Tensor, num_classes: int) -> Tensor:
    """Mean and deviation of rows [n, q], then the means and the deviations of each class: [2 + 2 L, q]."""
    parts = [projected[y == label] for label in range(num_classes)]
    missing = torch.full_like(projected[0], -1.0)
    means = [part.mean(0) if len(part) > 1 else missing for part in parts]
    deviations = [part.std(0, correction=0) if len(part) > 1 else missing for part in parts]
    return torch.stack([projected.mean(0), projected.std(0, correction=0), *means, *deviations])


@functools.lru_cache(maxsize=4)
def projection(size: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """The mean [D] of random points of the unit cube and their principal directions [q, D], the same everywhere."""
    points = Rng.seed(0).at("flux").uniform(_POINTS, size)
    _, _, directions = torch.linalg.svd(points - points.mean(0), full_matrices=False)
    directions = directions[: min(num_classes, len(directions))]
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))  # a direction has no sign of its own
    return points.mean(0), directions * largest.sign()


def latents(network: Network, model: Tensor, x: Tensor, first: bool) -> Tensor:
    """The inputs [n, D] of the last dense layer of a model [P], or of its first one, for samples [n, ...]."""
    seen: list[Tensor] = []

    def keep(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])

    dense = [layer for layer in network.module.modules() if isinstance(layer, nn.Linear)]
    handles = [layer.register_forward_pre_hook(keep) for layer in dense]
    found = []
    try:
        for part in x.split(_AT_ONCE):
            seen.clear()
            network(network.layout.unpack(model), part, alone=True)
            if not seen or seen[-1].shape[0] != len(part):
                raise ConfigError("FLUX describes clients by the input of a dense layer, and the network has none.")
            found.append(seen[0 if first else -1].flatten(1))
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat(found)


# ---- the server's half ----


@dataclass(frozen=True)
class FluxState(ClusterState):
    """The accuracies of the warm-up; then the scale and the centroids of the descriptors. `common` is its model."""

    accuracies: list[float] = field(default_factory=list)  # after each round of the warm-up
    peak: float = 0.0  # of the latents
    first_label: int = -1  # of the clusters that were found; -1: none yet, 1: label 0 is the warm-up
    low: Tensor = field(default_factory=lambda: torch.empty(0))  # [2 + 2 L] of each block
    high: Tensor = field(default_factory=lambda: torch.empty(0))
    centroids: Tensor = field(default_factory=lambda: torch.empty(0))  # [K, (2 + 2 L) q], scaled


@register
@dataclass(frozen=True)
class Flux(ClusterOnce[FluxState]):
    """Clusters of similar descriptors, found once after a warm-up; K is found."""

    key: ClassVar[str] = "flux"
    paper: ClassVar[str] = "FLUX, NeurIPS 2025 (arXiv 2511.22305)"
    needs_classes: ClassVar[bool] = True
    state_type: ClassVar[type[ClusterState]] = FluxState
    finds_clusters: ClassVar[bool] = True

    gain: float = setting(0.06, "the warm-up ends once a round gains less accuracy than this", ge=0, le=1)
    latest: float = setting(0.8, "share of the rounds after which the warm-up ends in any case", gt=0, le=1)
    cluster_in: int | None = setting(None, "round in which clients are clustered, in place of the rule", ge=1)
    prior: int | None = setting(None, "number of clusters, if it is known (FLUX-prior)", ge=1)
    latent: Latent = setting("last", "describe clients by the input of the last or of the first dense layer")

    def start(self, task: Task, engine: Engine, rng: Rng) -> FluxState:
        """One cluster."""
        return FluxState.common_start(engine, num_clusters=1)

    def round(self, state: FluxState, engine: Engine, cohort: Tensor, rng: Rng) -> FluxState:
        """A round of the warm-up, the clustering, or a round of each cluster."""
        if state.first_label >= 0:
            return super().round(state, engine, cohort, rng)
        if engine.round > 1 or self.cluster_in == 1:
            state = self._told(state, engine, cohort, rng.at("report"))
        if self._is_due(state, engine):
            state = self._clustered(state, engine, cohort, rng)
        is_found = state.first_label >= 0
        labels = state.labels if is_found else torch.zeros_like(state.labels)
        asked = cohort[self.is_placed(state, labels[cohort])]
        chunks = self._call(train, state, engine, asked, rng.at("train"), work=engine.task.work.at(engine.round))
        centers, answered = self.averaged(chunks, labels, state.centers, engine, weighting=self.weighting)
        if is_found:
            return replace(state, centers=centers)
        return replace(state, centers=centers, common=centers[0], labels=state.labels.index_fill(0, answered, 0))

    def is_placed(self, state: FluxState, labels: Tensor) -> Tensor:
        """See `ClusterOnce.is_placed`; label 0 may be that of the warm-up."""
        return labels >= state.first_label

    def _told(self, state: FluxState, engine: Engine, cohort: Tensor, rng: Rng) -> FluxState:
        """The state with the mean accuracy of the present model and its largest latent."""
        chunks = list(self._call(report, state, engine, cohort, rng, payload=self._payload()))
        if not chunks:
            return state
        samples = torch.cat([chunk.answer.samples for chunk in chunks]).double()
        accuracy = torch.cat([chunk.answer.accuracy for chunk in chunks]).double()
        mean = float((accuracy * samples).sum() / samples.sum())
        peak = max(float(chunk.answer.peak.max()) for chunk in chunks)
        return replace(state, accuracies=[*state.accuracies, mean], peak=_MARGIN * peak)

    def _is_due(self, state: FluxState, engine: Engine) -> bool:
        """Whether to cluster now."""
        if self.cluster_in is not None:
            return engine.round >= self.cluster_in and bool(state.accuracies)
        done, total = len(state.accuracies), engine.task.work.total_rounds
        if done < _FIRST:
            return False
        return bool((np.diff(state.accuracies) < self.gain).any()) or (
            total is not None and done >= self.latest * total
        )

    def ending(self, rounds: int, participation: float) -> tuple[int, str] | None:
        """The warm-up ends after a share of the rounds."""
        if self.cluster_in is not None:
            return None
        return math.ceil(self.latest * rounds), "flux ends its warm-up after a share of the rounds"

    def _clustered(self, state: FluxState, engine: Engine, cohort: Tensor, rng: Rng) -> FluxState:
        """The state with clusters of those who answered, each with the model of the warm-up."""
        clients, rows = self._descriptors(state, engine, cohort, rng.at("describe"))
        if not len(clients):
            return state
        low, high = rows.amin((0, 2)), rows.amax((0, 2))  # [blocks]
        scaled = _scaled(rows, low, high)
        found = self._found(scaled, engine.keys[clients], rng.at("k-means"))
        held, found = found.unique(return_inverse=True)
        members = [(found == k).to(scaled.device) for k in range(len(held))]
        seen = state.labels >= 0
        seen[clients] = False
        first = int(seen.any())  # somebody still has the cluster of the warm-up
        labels = state.labels.clone()
        labels[clients] = found + first
        centroids = torch.stack([scaled[mine].mean(0) for mine in members])
        return replace(
            state,
            labels=labels,
            centers=state.common.repeat(first + len(members), 1),
            first_label=first,
            low=low,
            high=high,
            centroids=centroids,
        )

    def _found(self, scaled: Tensor, keys: Tensor, rng: Rng) -> Tensor:
        """The clusters [n] of scaled descriptors [n, D]."""
        if self.prior is not None:
            return kmeans(scaled, min(self.prior, len(scaled)), rng, keys).labels
        distances = squared_distances(scaled, scaled).sqrt().cpu().numpy()
        if len(distances) == 1:
            return torch.zeros(1, dtype=torch.int64)
        nearest = np.sort((distances + np.diag(np.full(len(distances), np.inf))).min(1))
        _, labels = connected_components(distances <= nearest[knee(nearest)], directed=False)
        return torch.from_numpy(labels).long()

    def _descriptors(self, state: FluxState, engine: Engine, clients: Tensor, rng: Rng) -> tuple[Tensor, Tensor]:
        """Who answered, ids [n] ascending, and their descriptors [n, 2 + 2 L, q]."""
        payload = self._payload() | {"peak": torch.tensor(state.peak, dtype=torch.float64)}
        chunks = list(self._call(describe, state, engine, clients, rng, payload=payload))
        if not chunks:
            return clients[:0], state.low
        rows = torch.cat([chunk.answer.descriptor for chunk in chunks])
        found, rows = by_id(torch.cat([chunk.clients for chunk in chunks]), rows)
        return found, rows

    def _call(self, step: ClientStep, state: FluxState, engine: Engine, clients: Tensor, rng: Rng, **more: Any) -> Any:
        """Send the model of the warm-up to clients."""
        refs = torch.zeros(len(clients), dtype=torch.int64)
        return engine.call(step, clients, models=state.common.unsqueeze(0), refs=refs, rng=rng, **more)

    def _payload(self) -> dict[str, Tensor]:
        return {"first": torch.tensor(self.latent == "first")}

    def assign(self, state: FluxState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """The cluster whose centroid is nearest to the newcomer's descriptor; in the warm-up the one cluster."""
        if state.first_label < 0:
            return torch.zeros(len(newcomers), dtype=torch.int64)
        labels = torch.full((engine.num_clients,), -1, dtype=torch.int64)
        clients, rows = self._descriptors(state, engine, newcomers, rng)
        if len(clients):
            nearest = squared_distances(_scaled(rows, state.low, state.high), state.centroids).argmin(1).cpu()
            labels[clients] = nearest + state.first_label
        return labels[newcomers]


def _scaled(rows: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Descriptors [n, blocks, q] scaled by the range of each block: [n, blocks q]; a block without range is 0."""
    width = high - low
    shifted = rows - low.unsqueeze(1)
    return torch.where((width > 0).unsqueeze(1), shifted / width.clamp_min(1e-300).unsqueeze(1), 0.0).flatten(1)


def knee(values: NDArray[np.float64]) -> int:
    """The index at which an ascending curve bends upwards (Kneedle, Satopaa et al. 2011, with sensitivity 1).

    The curve is turned by 180 degrees, so that it rises steeply first. Its bend is the first maximum above the diagonal
    after which the height falls by more than one step of the diagonal. Without one, the highest maximum.

    >>> knee(np.array([1.0, 1.1, 1.2, 1.3, 5.0, 9.0]))
    3
    """
    steps = len(values) - 1
    span = float(values[-1] - values[0])
    if span <= 1e-9 * values[-1]:  # equal but for rounding
        return steps
    height = (values[-1] - values[::-1]) / span - np.arange(steps + 1) / steps
    top, least = 0, -np.inf
    for place in range(1, steps):
        if height[place] >= max(height[place - 1], height[place + 1]):
            top, least = place, height[place] - 1 / steps
        elif height[place] <= min(height[place - 1], height[place + 1]):
            least = 0.0
        if height[place + 1] < least:
            return steps - top
    return steps - int(height.argmax())
