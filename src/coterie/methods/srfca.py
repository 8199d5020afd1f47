"""SR-FCA: clusters from the losses of clients' models on each other's data, then refined (Vardhan, Ghosh, Mazumdar
2024, "An Improved Federated Clustering Algorithm with Model-based Clustering").

One shot: clients train alone from the initial weights. The distance of two clients is the cross loss

    d(i, j) = (loss of model i on the data of j + loss of model j on the data of i) / 2

and clients with d <= lambda are connected. Connected components of at least `least` clients are the clusters; there is
no K. The model of a cluster is the trimmed mean of its members' models.

A round: the members of a cluster train from its model, and their trimmed mean is the next one. In the first `refine`
rounds also, with the models that were just trained:

    recluster   each client moves to the cluster k with the smallest
                (mean loss of its model on the data of the members + loss of the model of k on its data) / 2
    merge       clusters with d(k, l) <= lambda, by the same cross loss of cluster models, become one

Without `threshold`, lambda is found by a rule of public code: the 25th percentile of all distances, or the first of the
percentiles 22, 19, 16, 13, 10 (plus 0.0001) at which there are more clusters than at the one before.

Bytes: in the start and while refining, each client downloads the models of all others; then as FedAvg.

Deviations. Faults of public code are avoided: the model of a cluster is what its members train from; merging renames
clusters, never clients; a cluster without members is no candidate; small clusters are averaged too. A client outside
all components joins the cluster with the smallest mean distance at once. A client does not count among the members that
judge its model. Only clients of the cohort judge and are judged; newcomers choose by the loss of the clusters' models.
The row of a cluster that was merged stays as an empty cluster. In the start, at most about 50 clients are clustered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from coterie.client.task import Task
from coterie.engines.base import Engine
from coterie.methods.base import ClusterState, Repair, register
from coterie.methods.parts.averaging import robust_setting
from coterie.methods.parts.once import ClusterOnce, first_clients, judged, trained
from coterie.methods.parts.start import chosen_by_loss
from coterie.randomness import Rng
from coterie.settings import setting

_PERCENTILES = (25, 22, 19, 16, 13, 10)
_SLACK = 1e-4  # on all percentiles but the first


@dataclass(frozen=True)
class SrfcaState(ClusterState):
    """The clusters, and the distance within which they are one."""

    reach: float = -1.0  # lambda; -1: clusters were not sought yet


@register
@dataclass(frozen=True)
class SRFCA(ClusterOnce[SrfcaState]):
    """Clusters of clients whose models fit each other's data; K is found by a threshold."""

    key: ClassVar[str] = "srfca"
    paper: ClassVar[str] = "Vardhan, Ghosh, Mazumdar 2024"
    state_type: ClassVar[type[ClusterState]] = SrfcaState
    finds_clusters: ClassVar[bool] = True

    robust: str = robust_setting("trimmed_mean")
    robust_share: float = setting(0.15, "share that the trimmed mean drops at each end", ge=0, lt=0.5)
    threshold: float | None = setting(
        None, "largest cross loss of two connected clients (lambda)", ge=0, default_is="found by percentiles"
    )
    least: int = setting(2, "minimum size of a cluster that is found at the start", ge=1)
    refine: int = setting(4, "rounds in which clients move and clusters merge", ge=0)

    def start(self, task: Task, engine: Engine, rng: Rng) -> SrfcaState:
        """The clusters of the clients' first models."""
        state = SrfcaState.common_start(engine, num_clusters=1)
        return self._one_shot(state, engine, first_clients(engine, 1, rng.at("clients")), rng)

    def round(self, state: SrfcaState, engine: Engine, cohort: Tensor, rng: Rng) -> SrfcaState:
        """FedAvg in each cluster; in the first rounds clients move and clusters merge."""
        if state.reach < 0:  # nobody answered at the start
            state = self._one_shot(state, engine, cohort, rng.at("start"))
            if state.reach < 0:
                return state
        if engine.round > self.refine:
            return super().round(state, engine, cohort, rng)
        labels = self.labels_of(state, engine, cohort, rng.at("place"))
        known, work = cohort[labels[cohort] >= 0], engine.task.work.at(engine.round)
        clients, models, samples = trained(engine, known, state.centers, labels[known], work, rng.at("train"))
        state = replace(state, labels=labels)
        if not len(clients):
            return state
        centers = self._means(state, clients, models, samples, engine)
        losses = judged(engine, clients, torch.cat([models, centers]), rng.at("judge"))
        moved = self._reclustered(state, clients, losses)
        merged = self._merged(moved, clients, losses[:, len(clients) :], engine)
        return replace(merged, centers=self._means(merged, clients, models, samples, engine))

    def _one_shot(self, state: SrfcaState, engine: Engine, clients: Tensor, rng: Rng) -> SrfcaState:
        """Clusters of clients that train alone; the state as it was if nobody answers."""
        table, refs = engine.initial().unsqueeze(0), torch.zeros_like(clients)
        work = engine.task.work.at(engine.round)
        clients, models, samples = trained(engine, clients, table, refs, work, rng.at("train"))
        if not len(clients):
            return state
        losses = judged(engine, clients, models, rng.at("judge"))
        if bool(losses.isnan().all()):
            return state
        distances = torch.stack([losses, losses.T]).nanmean(0).nan_to_num(torch.inf).fill_diagonal_(0).numpy()
        reach = found_reach(distances, self.least) if self.threshold is None else self.threshold
        found = torch.from_numpy(clusters_within(distances, reach, self.least))
        labels = state.labels.clone()
        labels[clients] = found
        centers = state.common.repeat(int(found.max()) + 1, 1)
        state = replace(state, centers=centers, labels=labels, reach=reach)
        return replace(state, centers=self._means(state, clients, models, samples, engine))

    def _means(self, state: SrfcaState, clients: Tensor, models: Tensor, samples: Tensor, engine: Engine) -> Tensor:
        """The mean of each cluster's members [K, P]; a cluster without members keeps its model."""
        average = self.mean_of(state.num_clusters, engine, like=state.centers)
        average.add(models, state.labels[clients], samples if self.weighting == "samples" else None)
        return average.means(keep=state.centers)

    def _reclustered(self, state: SrfcaState, clients: Tensor, losses: Tensor) -> SrfcaState:
        """Each client moves to the nearest cluster, by losses [n, n + K] of the clients' and the clusters' models."""
        count, own = len(clients), state.labels[clients]
        of_models = losses[:, :count].T.clone().fill_diagonal_(torch.nan)  # [n, n]: model of a client, data of another
        apart = torch.full((count, state.num_clusters), torch.inf, dtype=torch.float64)
        for cluster in own.unique().tolist():
            judged_by = of_models[:, own == cluster].nanmean(1)  # NaN for the only member
            apart[:, cluster] = torch.stack([judged_by, losses[:, count + cluster]]).nanmean(0).nan_to_num(torch.inf)
        is_known = apart.gather(1, own.unsqueeze(1))[:, 0].isfinite()  # else a client would leave what nobody judged
        labels = state.labels.clone()
        labels[clients] = torch.where(is_known, apart.argmin(1), own)
        return replace(state, labels=labels)

    def _merged(self, state: SrfcaState, clients: Tensor, losses: Tensor, engine: Engine) -> SrfcaState:
        """Clusters within reach become one, by losses [n, K] of the clusters' models; the lowest label remains."""
        own = state.labels[clients]
        present = own.unique()
        means = torch.stack([losses[own == k].nanmean(0)[present] for k in present])  # [k, k]: data, model
        apart = ((means + means.T) / 2).nan_to_num(torch.inf).fill_diagonal_(0)
        _, groups = connected_components(apart.numpy() <= state.reach, directed=False)
        names = torch.arange(state.num_clusters)
        repairs = list(state.repairs)
        for place, cluster in enumerate(present.tolist()):
            names[cluster] = present[int((groups == groups[place]).argmax())]
            if names[cluster] != cluster:
                reason = f"cluster {cluster} was merged with {int(names[cluster])}: their models fit each other's data"
                repairs.append(Repair(round=engine.round, cluster=cluster, reason=reason))
        labels = torch.where(state.labels >= 0, names[state.labels.clamp_min(0)], state.labels)
        return replace(state, labels=labels, repairs=repairs)

    def assign(self, state: SrfcaState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer chooses by loss among the models of clusters that have members."""
        living = state.labels[state.labels >= 0].unique()
        if not len(living):
            return torch.full((len(newcomers),), -1, dtype=torch.int64)
        found = chosen_by_loss(replace(state, centers=state.centers[living]), engine, newcomers, rng)
        return torch.where(found >= 0, living[found.clamp_min(0)], found)


def clusters_within(distances: NDArray[np.float64], reach: float, least: int) -> NDArray[np.int64]:
    """Clusters [n] of clients connected by distances [n, n] within reach.

    A component of fewer than `least` clients is divided: each client joins the cluster with the smallest mean distance.
    If no component is large enough, all of them are clusters.
    """
    _, found = connected_components(distances <= reach, directed=False)
    sizes = np.bincount(found)
    large = np.flatnonzero(sizes >= min(least, int(sizes.max())))
    apart = np.stack([distances[:, found == k].mean(1) for k in large], axis=1)  # [n, K]
    inside = found[:, None] == large[None, :]
    labels: NDArray[np.int64] = np.where(inside.any(1), inside.argmax(1), apart.argmin(1))
    return labels


def found_reach(distances: NDArray[np.float64], least: int) -> float:
    """The threshold by percentiles: the first one at which there are more clusters than at the one before."""
    pairs = distances[~np.eye(len(distances), dtype=bool)]
    pairs = pairs[np.isfinite(pairs)]
    if not len(pairs):
        return 0.0

    def count(reach: float) -> int:
        _, found = connected_components(distances <= reach, directed=False)
        return int((np.bincount(found) >= least).sum())

    first = float(np.percentile(pairs, _PERCENTILES[0]))
    known = count(first)
    for share in _PERCENTILES[1:]:
        reach = float(np.percentile(pairs, share)) + _SLACK
        if count(reach) > known:
            return reach
        known = count(reach)
    return first
