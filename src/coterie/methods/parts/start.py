"""The first state of a clustered method.

`warm`: a few rounds of plain averaging give ONE common model. Every client trains once from it, and k-means with
restarts clusters the results. From a model that has learnt something, updates show what kind of client they come
from. From random weights they mostly show which labels a client has (rotated MNIST, alpha = 3: ARI of the first
clustering 0.0 without warm-up, 1.0 after three rounds). `paper`: as in the method's paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from coterie.engines.base import Chunk, Engine
from coterie.methods.parts.averaging import Average, fits_in_memory, samples_of
from coterie.methods.parts.centers import C, CenterMethod, first_sketch, update_of
from coterie.methods.parts.clustering import KMeans, kmeans, sketch_of, squared_distances
from coterie.randomness import Rng, uniform

_WHOLE = 1 << 23  # up to so many numbers, models are clustered as they are; beyond it, sketches of them
_WIDTH = 4096  # of these sketches
_CLEARLY = 0.7  # an outlier belongs to its nearest cluster only if the next is farther by this factor


def random_start(method: CenterMethod[C], state: C, engine: Engine, rng: Rng) -> C:
    """K independent random centers, and a random label for every client."""
    drawn = [engine.task.draw(rng.at("center", k)) for k in range(method.num_clusters)]
    luck = uniform(rng.at("labels").keys(engine.keys), 1)[:, 0]
    labels = (luck * method.num_clusters).long()
    centers = torch.stack(drawn).to(engine.device, engine.dtype)
    state = replace(state, centers=centers, labels=labels)
    return method.joined(state, engine, engine.everyone(), rng.at("met"))


def clustered_start(method: CenterMethod[C], state: C, engine: Engine, rng: Rng, warm_up: bool = True) -> C:
    """Train every client once from the common model, cluster the signatures, and average each cluster."""
    if warm_up:
        state = warmed_up(method, state, engine, rng.at("warm-up"))
    sketch, sketches, samples = first_sketch(engine), state.sketches.clone(), []

    def train(clients: Tensor) -> Iterator[Chunk]:
        return method.train_from_common(state, engine, clients, rng.at("start"))

    def signature(chunk: Chunk) -> Tensor:
        samples.append(samples_of(chunk))
        sketches[chunk.clients.to(engine.device)] = sketch(update_of(chunk.answer.params, state, engine))
        return compact(method.signature(chunk.answer.params, state, engine), engine, rng)

    def cluster(rows: Tensor, keys: Tensor) -> KMeans:
        trim, count = int(method.trimmed * len(rows)), min(method.num_clusters, len(rows))
        found = kmeans(rows, count, rng.at("k-means"), keys, method.restarts, trim=trim)
        return with_outliers_spread(found, rows, keys) if trim else found

    average = method.average(state, engine)
    labels = cluster_models(train, signature, cluster, average, engine, method.weighting)
    if not samples:  # nobody answered
        return random_start(method, state, engine, rng)
    mean_samples = float(torch.cat(samples).double().mean())
    centers = average.means(keep=state.centers)
    state = replace(state, centers=centers, labels=labels, mean_samples=mean_samples, sketches=sketches)
    return method.joined(state, engine, (labels >= 0).nonzero().flatten(), rng.at("met"))


def warmed_up(method: CenterMethod[C], state: C, engine: Engine, rng: Rng) -> C:
    """The state whose common model is the mean after `warmup` rounds of plain averaging."""
    one_cluster = torch.zeros_like(state.labels)
    for number in range(method.warmup if method.init == "warm" else 0):
        chunks = method.train_from_common(state, engine, engine.everyone(), rng.at(number))
        means, _ = method.averaged(chunks, one_cluster, state.common.unsqueeze(0), engine, weighting="samples")
        state = replace(state, common=means[0])
    return replace(state, centers=state.common.repeat(method.num_clusters, 1))


def cluster_models(
    train: Callable[[Tensor], Iterator[Chunk]],
    signature: Callable[[Chunk], Tensor],
    cluster: Callable[[Tensor, Tensor], KMeans],
    average: Average,
    engine: Engine,
    weighting: str = "equal",
) -> Tensor:
    """Train all clients, cluster their signatures (rows [n, D] with keys [n]), and add the models to `average`.

    Returns labels [N]; -1 where a client did not answer. Outliers get a label but move no center.
    """
    fits = fits_in_memory(engine.num_clients, engine)
    rows, kept, answered = [], [], []
    for chunk in train(engine.everyone()):
        rows.append(signature(chunk))
        answered.append(chunk.clients)
        kept += [chunk] if fits else []
    labels = torch.full((engine.num_clients,), -1, dtype=torch.int64)
    if not answered:
        return labels
    clients = torch.cat(answered)
    found = cluster(torch.cat(rows), engine.keys[clients])
    labels[clients] = found.labels
    inside = torch.zeros(engine.num_clients, dtype=torch.float64).index_copy(0, clients, (~found.outliers).double())
    # Models that do not fit are trained again: randomness is a hash, so the same models come back.
    for chunk in kept if fits else train(clients):
        weights = samples_of(chunk).cpu() if weighting == "samples" else 1
        average.add(chunk.answer.params, labels[chunk.clients], inside[chunk.clients] * weights)
    return labels


def compact(rows: Tensor, engine: Engine, rng: Rng) -> Tensor:
    """Sketches of signatures [c, D] if those of all clients are many numbers: they lose little, and k-means is fast."""
    if engine.num_clients * rows.shape[1] <= _WHOLE:
        return rows
    return sketch_of(rows.shape[1], _WIDTH, rng, engine.device)(rows)


def with_outliers_spread(found: KMeans, rows: Tensor, keys: Tensor) -> KMeans:
    """Spread outliers that are near no cluster evenly over all clusters.

    They may be attackers. All are about equally far from every center, so one center is the nearest to most of them
    by a little, and there they would be too many for a robust mean.
    """
    outliers = found.outliers.nonzero().flatten()
    if len(found.centers) < 2:
        return found
    least = squared_distances(rows[outliers.to(rows.device)], found.centers).topk(2, dim=1, largest=False).values
    lost = outliers[(least[:, 0] > _CLEARLY * least[:, 1]).cpu()]
    labels = found.labels.clone()
    labels[lost[keys[lost].argsort()]] = torch.arange(len(lost)) % len(found.centers)
    return replace(found, labels=labels)
