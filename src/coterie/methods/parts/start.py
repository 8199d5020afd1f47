"""The first state of a clustered method.

`warm`: a few rounds of plain federated averaging make ONE common model; every client trains once from it, and what
comes back is clustered by k-means with restarts. From a model that knows its task already, updates tell the kinds of
client apart. From random weights they tell first of all who holds which labels (rotated MNIST, alpha = 3: ARI of the
first clustering 0.0 without warm-up, 1.0 after three rounds). `paper`: as the method's paper has it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from coterie.engines.base import Engine
from coterie.methods.parts.centers import C, CenterMethod, first_sketch, samples_of, update_of
from coterie.methods.parts.clustering import KMeans, kmeans, sketch_of, squared_distances
from coterie.randomness import Rng, uniform

_WHOLE = 1 << 23  # numbers that are clustered as they are; beyond it, sketches of them
_CLEARLY = 0.7  # an outlier belongs to its nearest cluster only if the next is farther by this factor


def random_start(method: CenterMethod[C], state: C, engine: Engine, rng: Rng) -> C:
    """K independent random centers, and a random label for every client."""
    drawn = [engine.task.draw(rng.at("center", k)) for k in range(method.num_clusters)]
    luck = uniform(rng.at("labels").keys(engine.keys), 1)[:, 0]
    labels = (luck * method.num_clusters).long()
    centers = torch.stack(drawn).to(engine.device, engine.dtype)
    state = replace(state, centers=centers, labels=labels)
    return method.joined(state, engine, engine.everyone(), rng.at("met"))


def warmed_up(method: CenterMethod[C], state: C, engine: Engine, rng: Rng) -> C:
    """The state whose common model is the mean after `warmup` rounds of plain averaging."""
    for lap in range(method.warmup if method.init == "warm" else 0):
        mean = method.mean_of(1, engine, like=state.centers)
        for chunk in method.train_from_common(state, engine, engine.everyone(), rng.at(lap)):
            mean.add(chunk.answer.params, torch.zeros(len(chunk.clients), dtype=torch.int64), samples_of(chunk))
        state = replace(state, common=mean.means(keep=state.common.unsqueeze(0))[0])
    return replace(state, centers=state.common.repeat(method.num_clusters, 1))


def clustered_start(method: CenterMethod[C], state: C, engine: Engine, rng: Rng, warm_up: bool = True) -> C:
    """Every client trains once from the common model; k-means on the signatures; centers are the means."""
    if warm_up:
        state = warmed_up(method, state, engine, rng.at("warm-up"))
    fits = engine.num_clients * engine.task.layout.size * engine.dtype.itemsize <= engine.memory_budget()
    sketch, sketches = first_sketch(engine), state.sketches.clone()
    rows, kept, samples, who = [], [], [], []
    for chunk in method.train_from_common(state, engine, engine.everyone(), rng.at("start")):
        signature = method.signature(chunk.answer.params, state, engine)
        # Of many models sketches are clustered: they tell nearly as much, and twenty restarts read them often.
        many = engine.num_clients * signature.shape[1] > _WHOLE
        rows.append(sketch_of(signature.shape[1], 4096, rng, engine.device)(signature) if many else signature)
        sketches[chunk.clients.to(engine.device)] = sketch(update_of(chunk.answer.params, state, engine))
        if fits:
            kept.append(chunk.answer.params)
        samples.append(samples_of(chunk))
        who.append(chunk.clients)
    if not who:
        return random_start(method, state, engine, rng)
    clients, weights = torch.cat(who), torch.cat(samples)
    found = _clustered(method, torch.cat(rows), engine.keys[clients], rng.at("k-means"))
    labels = state.labels.clone()
    labels[clients] = found.labels
    counts = torch.zeros(engine.num_clients, dtype=torch.float64)  # outliers move no center
    counts[clients] = (~found.outliers).double() * (weights.cpu() if method.weighting == "samples" else 1)
    average = method.average(state, engine)
    if fits:
        average.add(torch.cat(kept), found.labels, counts[clients])
    else:
        # A second, identical pass: randomness is a hash, so the same models come back.
        for chunk in method.train_from_common(state, engine, clients, rng.at("start")):
            average.add(chunk.answer.params, labels[chunk.clients], counts[chunk.clients])
    centers, mean = average.means(keep=state.centers), float(weights.double().mean())
    state = replace(state, centers=centers, labels=labels, mean_samples=mean, sketches=sketches)
    return method.joined(state, engine, clients, rng.at("met"))


def _clustered(method: CenterMethod[C], rows: Tensor, keys: Tensor, rng: Rng) -> KMeans:
    trim = int(method.trimmed * len(rows))
    found = kmeans(rows, min(method.num_clusters, len(rows)), rng, keys, method.restarts, trim=trim)
    return with_outliers_spread(found, rows, keys) if trim else found


def with_outliers_spread(found: KMeans, rows: Tensor, keys: Tensor) -> KMeans:
    """The clustering with those outliers that are near to no cluster spread evenly over all.

    What is near to no cluster may be an attacker. All of them are about as far from every center, and one center is
    always the nearest by a little: there they would be too many for a robust mean.
    """
    outliers = found.outliers.nonzero().flatten()
    if len(found.centers) < 2:
        return found
    least = squared_distances(rows[outliers.to(rows.device)], found.centers).topk(2, dim=1, largest=False).values
    lost = outliers[(least[:, 0] > _CLEARLY * least[:, 1]).cpu()]
    labels = found.labels.clone()
    labels[lost[keys[lost].argsort()]] = torch.arange(len(lost)) % len(found.centers)
    return replace(found, labels=labels)
