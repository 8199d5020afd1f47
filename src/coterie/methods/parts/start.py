"""The first state of a clustered method, and the place of clients that are seen later.

`warm`: a few rounds of plain averaging give ONE common model. Clients train once from it and sign at it (see
`parts/signatures.py`), and their signatures are clustered. At a model that has learnt something, signatures show what
kind a client is; at random weights they mostly show its labels. Every call asks one cohort. The start calls cohorts
until it has seen enough clients to cluster; all others are placed when they are first seen. `paper`: as in the method's
paper, where all clients take part; the calls are as large as a cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from coterie.client.steps import choose, signature_shape, train_and_sign
from coterie.engines.base import Chunk, Engine
from coterie.methods.base import ClusterState
from coterie.methods.parts import signatures
from coterie.methods.parts.averaging import AUTO, Average, fits_in_memory, samples_of, shortened
from coterie.methods.parts.centers import (
    C,
    CenterMethod,
    CenterState,
    SignedMethod,
    has_signature,
    tells_outside,
    without_signatures,
)
from coterie.methods.parts.clustering import kmeans
from coterie.methods.parts.signatures import Clustering, Signatures
from coterie.nets.sketch import sketch_of
from coterie.randomness import Rng, uniform

_WHOLE = 1 << 23  # up to so many numbers, models are clustered as they are; beyond it, sketches of them
_WIDTH = 4096  # of these sketches
_PER_CLUSTER, _LEAST = 10, 50  # clients to see before clustering: so many per cluster, and so many at least


def enough_clients(num_clusters: int, num_clients: int) -> int:
    """How many clients must have been seen before clusters can be judged."""
    return min(num_clients, max(_PER_CLUSTER * num_clusters, _LEAST))


# ---- starts ----


def random_start(method: CenterMethod[C], state: C, engine: Engine, rng: Rng) -> C:
    """K independent random centers, and a random label for every client."""
    drawn = [engine.task.draw(rng.at("center", k)) for k in range(method.num_clusters)]
    luck = uniform(rng.at("labels").keys(engine.keys), 1)[:, 0]
    labels = (luck * method.num_clusters).long()
    return replace(state, centers=torch.stack(drawn).to(engine.device, engine.dtype), labels=labels)


def warm_start(method: CenterMethod[C], state: C, engine: Engine, rng: Rng) -> C:
    """Average for a few rounds, let cohorts train once and sign, cluster the signatures, average each cluster."""
    state = warmed_up(method, state, engine, rng.at("warm-up"))
    luck = uniform(rng.at("order").keys(engine.keys), 1)[:, 0]
    size = -(-enough_clients(method.num_clusters, engine.num_clients) // engine.cohort_size) * engine.cohort_size
    clients = luck.argsort(stable=True)[:size]
    kept = _Kept(method, state, engine)

    def train(cohort: Tensor) -> Iterator[Chunk]:
        return kept.train(cohort, rng.at("start"))

    def cluster(answered: Tensor) -> Clustering:
        count = min(method.num_clusters, len(answered))
        trim = None if method.robust == AUTO else int(method.trimmed * len(answered))
        found = Signatures.of(kept.rows[answered.to(engine.device)], kept.counts[answered])
        keys = engine.keys[answered]
        return signatures.cluster(found, count, rng.at("clusters"), keys, method.restarts, trim)

    average = method.average(state, engine)
    found = cluster_models(train, kept.add, cluster, average, engine, clients, method.weights_of)
    if found is None:  # nobody answered
        return random_start(method, state, engine, rng)
    answered, clustering = found
    labels, pending = state.labels.clone(), state.pending.clone()
    labels[answered], pending[answered] = clustering.labels, clustering.in_doubt
    state = replace(
        state,
        centers=average.means(keep=state.centers),
        labels=labels,
        pending=pending,
        mean_samples=kept.mean_samples,
        signatures=kept.rows,
        counts=kept.counts,
    )
    if clustering.outside is None:
        return state
    outside = torch.zeros_like(pending).index_copy(0, answered, clustering.outside)
    if bool(outside.any()):
        engine.notes.append(
            f"robust=auto: {int(outside.sum())} of {len(answered)} clients are like none of the {state.num_clusters} "
            "kinds; they are served with the model of the nearest, but move no center"
        )
    return without_signatures(replace(state, outside=outside), outside)  # they are no evidence for a cluster


def first_models_start(method: CenterMethod[C], state: C, engine: Engine, rng: Rng) -> C:
    """Every client trains once from the initial weights; k-means of the models (FeSEM, section 6.1.4)."""
    rows, samples = [], []

    def train(cohort: Tensor) -> Iterator[Chunk]:
        return method.train_common(state, engine, cohort, rng.at("start"))

    def collect(chunk: Chunk) -> None:
        samples.append(samples_of(chunk))
        rows.append(compact(method.signature(chunk.answer.params, state, engine), engine, rng))

    def cluster(answered: Tensor) -> Clusters:
        trim, count = int(method.trimmed * len(answered)), min(method.num_clusters, len(answered))
        # A long update would be a cluster by itself.
        updates = shortened(torch.cat(rows)) if method.robust == AUTO else torch.cat(rows)
        return kmeans(updates, count, rng.at("k-means"), engine.keys[answered], method.restarts, trim=trim)

    average = method.average(state, engine)
    found = cluster_models(train, collect, cluster, average, engine, engine.everyone(), method.weights_of)
    if found is None:
        return random_start(method, state, engine, rng)
    labels = state.labels.clone()
    labels[found[0]] = found[1].labels
    mean_samples = float(torch.cat(samples).double().mean())
    return replace(state, centers=average.means(keep=state.centers), labels=labels, mean_samples=mean_samples)


def warmed_up(method: CenterMethod[C], state: C, engine: Engine, rng: Rng) -> C:
    """The state whose common model is the mean after `warmup` rounds of plain averaging over cohorts."""
    one_cluster = torch.zeros_like(state.labels)
    for number in range(method.warmup):
        cohort = engine.draw(rng.at("cohort", number), engine.cohort_size)
        chunks = method.train_common(state, engine, cohort, rng.at(number))
        means, _ = method.averaged(chunks, one_cluster, state.common.unsqueeze(0), engine, weighting="samples")
        state = replace(state, common=means[0])
    return replace(state, centers=state.common.repeat(method.num_clusters, 1))


class Clusters(Protocol):
    """A clustering of n clients."""

    @property
    def labels(self) -> Tensor:
        """int64 [n]."""

    @property
    def outliers(self) -> Tensor:
        """bool [n]: they get a label but move no center."""


def cluster_models(
    train: Callable[[Tensor], Iterator[Chunk]],
    collect: Callable[[Chunk], None],
    cluster: Callable[[Tensor], Clustering | Clusters],
    average: Average,
    engine: Engine,
    clients: Tensor,
    weights_of: Callable[[Chunk], Tensor],
) -> tuple[Tensor, Clustering] | None:
    """Train clients cohort by cohort, cluster those who answered, and add their models to `average`.

    `collect` gets each chunk; `cluster` the ids of those who answered [n], in the order of the chunks. Returns the ids
    and the clustering; None if nobody answered.
    """
    fits = fits_in_memory(len(clients), engine)
    kept, answered = [], []
    for cohort in engine.cohorts(clients):
        for chunk in train(cohort):
            collect(chunk)
            answered.append(chunk.clients)
            kept += [chunk] if fits else []
    if not answered:
        return None
    who = torch.cat(answered)
    found = cluster(who)
    labels = torch.zeros(engine.num_clients, dtype=torch.int64).index_copy(0, who, found.labels)
    inside = torch.zeros(engine.num_clients, dtype=torch.float64).index_copy(0, who, (~found.outliers).double())
    # Models that do not fit are trained again: randomness is a hash, so the same models come back.
    again = kept if fits else (chunk for cohort in engine.cohorts(who) for chunk in train(cohort))
    for chunk in again:
        weights = weights_of(chunk)
        average.add(chunk.answer.params, labels[chunk.clients], weights * inside[chunk.clients].to(weights.device))
    if isinstance(found, Clustering):
        return who, found
    return who, Clustering(found.labels, found.outliers, torch.zeros_like(found.outliers))


def compact(rows: Tensor, engine: Engine, rng: Rng) -> Tensor:
    """Sketches of models [c, D] if those of all clients are many numbers: they lose little, and k-means is fast."""
    if engine.num_clients * rows.shape[1] <= _WHOLE:
        return rows
    return sketch_of(rows.shape[1], _WIDTH, rng, engine.device)(rows)


# ---- signatures ----


class _Kept:
    """The signatures of the clients that were called, and their mean sample count."""

    def __init__(self, method: CenterMethod[C], state: C, engine: Engine) -> None:
        self._method, self._state, self._engine = method, state, engine
        shape = _shape(method, state, engine)
        self.rows = torch.zeros(engine.num_clients, *shape, dtype=engine.dtype, device=engine.device)
        self.counts = torch.zeros(engine.num_clients, shape[0], dtype=torch.int64)
        self._samples: list[Tensor] = []

    def train(self, cohort: Tensor, rng: Rng) -> Iterator[Chunk]:
        """Train from the common model and sign at it."""
        state, engine = self._state, self._engine
        if not self._method.signs_classes(engine):
            return self._method.train_common(state, engine, cohort, rng)
        work, refs = self._method.work(engine), torch.zeros(len(cohort), dtype=torch.int64)
        return engine.call(train_and_sign, cohort, models=state.common.unsqueeze(0), refs=refs, work=work, rng=rng)

    def add(self, chunk: Chunk) -> None:
        """Keep the signatures of a chunk."""
        self._samples.append(samples_of(chunk))
        rows, counts = signatures_in(chunk, self._method, self._state, self._engine)
        self.rows[chunk.clients.to(self.rows.device)], self.counts[chunk.clients] = rows, counts

    @property
    def mean_samples(self) -> float:
        """Over the clients that answered."""
        return float(torch.cat(self._samples).double().mean())


def _shape(method: CenterMethod[C], state: C, engine: Engine) -> tuple[int, int]:
    """Rows and width of a signature."""
    if method.signs_classes(engine):
        return signature_shape(engine.task)
    size = method.signature(state.common.unsqueeze(0), state, engine).shape[1]
    return 1, min(_WIDTH, size)


def signatures_in(chunk: Chunk, method: SignedMethod[C], state: C, engine: Engine) -> tuple[Tensor, Tensor]:
    """The signatures [c, L, D] and counts [c, L] in the answers of a chunk."""
    if "signature" in chunk.answer:
        return chunk.answer.signature, chunk.answer.counts.cpu()
    update = method.signature(chunk.answer.params, state, engine)
    rows = sketch_of(update.shape[1], _WIDTH, Rng.seed(0).at("first models"), engine.device)(update)
    # Of length one: the length of an update depends on the number of steps.
    return torch.nn.functional.normalize(rows, dim=1).unsqueeze(1), torch.ones(len(rows), 1, dtype=torch.int64)


# ---- clients seen later ----


@dataclass(frozen=True)
class Found:
    """The clusters of clients that were not in the start."""

    labels: Tensor  # int64 [n]; -1: did not answer
    in_doubt: Tensor  # bool [n]
    signatures: Tensor | None = None  # [n, L, D]; None: they chose by loss
    counts: Tensor | None = None  # [n, L]
    outside: Tensor | None = None  # bool [n]: like no cluster; None: nobody is outside


def placed(method: SignedMethod[C], state: C, engine: Engine, cohort: Tensor, rng: Rng) -> C:
    """The state in which the new clients of a cohort have a cluster; one that does not answer has none."""
    new = cohort[state.labels[cohort] < 0]
    if not len(new):
        return state
    found = find_clusters(method, state, engine, new, rng.at("place"))
    labels, pending = state.labels.clone(), state.pending.clone()
    labels[new], pending[new] = found.labels, found.in_doubt
    state = with_signatures(replace(state, labels=labels, pending=pending), new, found)
    if found.outside is None or not bool(found.outside.any()):
        return state
    outside = state.outside.index_copy(0, new, found.outside)
    return without_signatures(replace(state, outside=outside, pending=pending | outside), outside)


def with_signatures(state: C, clients: Tensor, found: Found | Anew) -> C:
    """The state with the signatures that these clients [n] have just sent."""
    if found.signatures is None or found.counts is None or len(state.signatures) != len(state.labels):
        return state
    sent = found.counts.sum(1) > 0
    rows, counts = state.signatures.clone(), state.counts.clone()
    rows[clients[sent].to(rows.device)] = found.signatures[sent.to(rows.device)]
    counts[clients[sent]] = found.counts[sent]
    return replace(state, signatures=rows, counts=counts)


def find_clusters(method: SignedMethod[C], state: C, engine: Engine, clients: Tensor, rng: Rng) -> Found:
    """The clusters of clients that were not in the start: by signature, or by loss where signatures do not tell."""
    known = has_signature(state)
    labels = torch.full((len(clients),), -1, dtype=torch.int64)
    doubt = torch.zeros(len(clients), dtype=torch.bool)
    if not signatures_tell(state):
        return Found(chosen_by_loss(state, engine, clients, rng), doubt)
    members = Signatures.of(state.signatures[known.to(state.signatures.device)], state.counts[known])
    rows = state.signatures.new_zeros(len(clients), *state.signatures.shape[1:])
    counts = torch.zeros(len(clients), state.counts.shape[1], dtype=torch.int64)
    outside = torch.zeros_like(doubt) if tells_outside(state) else None
    for chunk in method.sign(state, engine, clients, rng):
        own, held = signatures_in(chunk, method, state, engine)
        where = chunk.positions
        rows[where.to(rows.device)], counts[where] = own.to(rows), held
        new = Signatures(own, held.to(own))
        if outside is not None:
            outside[where] = signatures.is_far(new, members, state.labels[known])
        labels[where], doubt[where] = signatures.nearest(new, members, state.labels[known], state.num_clusters)
    lost = ((labels < 0) & (counts > 0).any(1)).nonzero().flatten()  # they share no class with any member
    if len(lost):
        labels[lost] = chosen_by_loss(state, engine, clients[lost], rng.at("lost"))
    return Found(labels, doubt, rows, counts, outside)


def chosen_by_loss(state: ClusterState, engine: Engine, clients: Tensor, rng: Rng, own: Tensor | None = None) -> Tensor:
    """Clients get all centers and choose the one with the lowest loss: [n]; -1 where a client did not answer.

    With `own` [n] a client takes another center than this one only if its loss is clearly lower.
    """
    labels = torch.full((len(clients),), -1, dtype=torch.int64)
    refs = torch.arange(state.num_clusters).expand(len(clients), -1)
    each = None if own is None else {"own": own.to(engine.device)}
    for chunk in engine.call(choose, clients, models=state.centers, refs=refs, each=each, rng=rng):
        labels[chunk.positions] = chunk.answer.choice.cpu()
    return labels


def choose_anew(method: SignedMethod[C], state: C, engine: Engine, clients: Tensor, room: float, rng: Rng) -> Anew:
    """Let clients choose anew, those first whose loss has risen, with at most `room` models sent to them.

    A client whose loss has risen signs again. A clear signature settles it: if it is that of its cluster, only the
    center has changed, and it stays; otherwise its data has changed, and it moves. The others get all centers and
    choose by loss, but take another cluster than that of their signature only if the loss there is clearly lower.
    """
    labels, asked = state.labels[clients].clone(), torch.zeros(len(clients), dtype=torch.bool)
    own = by_signature(state)[0][clients]
    rows = state.signatures.new_zeros(len(clients), *state.signatures.shape[1:])
    counts = torch.zeros(len(clients), *state.counts.shape[1:], dtype=torch.int64)
    most = max(0, int(room / method.sign_cost))
    signing = state.alarmed[clients].nonzero().flatten()[:most] if signatures_tell(state) else clients[:0]
    if len(signing):
        found = find_clusters(method, state, engine, clients[signing], rng.at("sign"))
        own[signing] = found.labels
        clear = signing[(found.labels >= 0) & ~found.in_doubt]
        labels[clear], asked[clear] = own[clear], True
        if found.signatures is not None and found.counts is not None:
            rows[signing.to(rows.device)], counts[signing] = found.signatures, found.counts
    spent = method.sign_cost * len(signing)
    left = (~asked).nonzero().flatten()[: max(0, int(room - spent)) // state.num_clusters]
    if len(left):
        chosen = chosen_by_loss(state, engine, clients[left], rng, own[left])
        labels[left], asked[left] = torch.where(chosen < 0, labels[left], chosen), True
    sent = spent + len(left) * state.num_clusters
    return Anew(clients[asked], labels[asked], rows[asked.to(rows.device)], counts[asked], sent)


@dataclass(frozen=True)
class Anew:
    """Clients that chose anew."""

    clients: Tensor  # int64 [n]
    labels: Tensor  # int64 [n]
    signatures: Tensor  # [n, L, D] of those that signed again
    counts: Tensor  # [n, L]; all 0: did not sign again
    sent: float  # models sent to clients

    def only(self, which: Tensor) -> Anew:
        """Some of them, bool [n]; what was sent stays."""
        there = which.to(self.signatures.device)
        parts = self.clients[which], self.labels[which], self.signatures[there], self.counts[which]
        return Anew(*parts, self.sent)


def by_signature(state: CenterState) -> tuple[Tensor, Tensor]:
    """The cluster of each client by its signature [N], and whether it is in doubt; -1 where signatures do not tell."""
    labels, doubt = torch.full_like(state.labels, -1), torch.zeros(len(state.labels), dtype=torch.bool)
    if signatures_tell(state):
        known = has_signature(state) & (state.labels >= 0)
        found = Signatures.of(state.signatures[known.to(state.signatures.device)], state.counts[known])
        labels[known], doubt[known] = signatures.nearest_others(found, state.labels[known], state.num_clusters)
    return labels, doubt


def signatures_tell(state: CenterState) -> bool:
    """Whether every cluster with members has a signature that still holds."""
    with_members = state.labels[state.labels >= 0].unique()
    return len(with_members) > 0 and len(state.labels[has_signature(state)].unique()) == len(with_members)
