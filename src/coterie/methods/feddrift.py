"""FedDrift: as many models as there are kinds of data at present (Jothimurugesan, Hsieh, Wang, Joshi, Gibbons 2023,
"Federated Learning under Distributed Concept Drift").

A round: every client of the cohort gets all models and judges them by their losses on its training samples. It takes
the best one, m. But if even that loss has risen,

    loss of m > loss of its model when it last judged + delta

its data is of a kind that no model fits: it starts a model of its own. Models that fit each other's data are merged.
With L_ij the mean loss of model i on the data of those who took model j, the distance of two models is

    D(i, j) = max(L_ij - L_ii, L_ji - L_jj, 0)

and models are merged by complete linkage up to `delta`; a merged model is the mean, weighted by clients. Then clients
train their models, and each model is the mean over its clients.

Start: clients train alone for `alone` rounds' worth of work, and the models are merged by the same rule. There is no K.

Bytes: (1 + K) / 2 times FedAvg, with the present K. In the start clients judge the models of all others.

Deviations. A time step of the paper is one round here. A new model starts from the best one, not at random. The
start is ours: with one model for all, kinds that differ from the beginning would never be found, because no loss rises.
At most about 50 clients take part in it, and others take the best model when they are first seen. Members outside the
cohort move with their model when it is merged. The row of a model that was merged is empty until a new one needs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from coterie.client.steps import train
from coterie.client.task import Task
from coterie.engines.base import Engine
from coterie.methods.base import ClusterState, Repair, register
from coterie.methods.parts.averaging import Averaging
from coterie.methods.parts.clustering import merged_within
from coterie.methods.parts.once import first_clients, judged, trained
from coterie.methods.parts.start import chosen_by_loss
from coterie.randomness import Rng
from coterie.settings import setting

_FAR = 1e9  # distance of models that were not compared


@dataclass(frozen=True)
class DriftState(ClusterState):
    """The models, and the last loss of each client."""

    of_clients: ClassVar[tuple[str, ...]] = ("past",)

    past: Tensor = field(default_factory=lambda: torch.empty(0))  # float64 [N] loss of the model a client took
    alive: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))  # [K] rows that are in use


@register
@dataclass(frozen=True)
class FedDrift(Averaging[DriftState]):
    """Models are added for clients that none fits, and merged if they fit each other's data; K is found."""

    key: ClassVar[str] = "feddrift"
    paper: ClassVar[str] = "Jothimurugesan et al. 2023"
    state_type: ClassVar[type[ClusterState]] = DriftState
    finds_clusters: ClassVar[bool] = True

    weighting: Literal["samples", "equal"] = setting("samples", "weight of a client in its cluster's mean")
    delta: float = setting(
        1.0, "rise of the loss that counts as drift, and distance up to which models are merged", gt=0
    )
    alone: int = setting(5, "rounds' worth of work that clients do alone at the start", ge=1)
    max_clusters: int = setting(64, "maximum number of models", ge=1)

    def start(self, task: Task, engine: Engine, rng: Rng) -> DriftState:
        """Clients train alone, and models that fit each other's data are merged."""
        past = torch.zeros(engine.num_clients, dtype=torch.float64, device=engine.device)
        state = DriftState.common_start(engine, 1, past=past, alive=torch.ones(1, dtype=torch.bool))
        return self._begun(state, engine, first_clients(engine, 1, rng.at("clients"))[: self.max_clusters], rng)

    def round(self, state: DriftState, engine: Engine, cohort: Tensor, rng: Rng) -> DriftState:
        """Judge all models, add and merge some, train and average."""
        if not bool((state.labels >= 0).any()):  # nobody answered at the start
            state = self._begun(state, engine, cohort[: self.max_clusters], rng.at("start"))
        rows = state.alive.nonzero().flatten()
        losses = judged(engine, cohort, state.centers[rows.to(engine.device)], rng.at("judge"))
        there = ~losses.isnan().any(1)
        clients, losses = cohort[there], losses[there]
        if not len(clients):
            return state
        least = losses.min(1)
        past = state.past.cpu()
        drifted = (state.labels[clients] >= 0) & (least.values > past[clients] + self.delta)
        past[clients] = least.values
        labels = state.labels.clone()
        labels[clients] = rows[least.indices]
        state = replace(state, labels=labels, past=past.to(engine.device))
        state = self._merged(state, rows, model_distances(losses[~drifted], least.indices[~drifted]), engine)
        state = self._with_new_models(state, clients[drifted], engine)
        refs, work = state.labels[clients], engine.task.work.at(engine.round)
        chunks = engine.call(train, clients, models=state.centers, refs=refs, work=work, rng=rng.at("train"))
        centers, _ = self.averaged(chunks, state.labels, state.centers, engine, weighting=self.weighting)
        return replace(state, centers=centers)

    def _begun(self, state: DriftState, engine: Engine, clients: Tensor, rng: Rng) -> DriftState:
        """Clusters of clients that train alone; the state as it was if nobody answers."""
        work = engine.task.work.at(engine.round)
        steps = None if work.steps is None else work.steps * self.alone
        longer = replace(work, epochs=work.epochs * self.alone, steps=steps)
        table, refs = engine.initial().unsqueeze(0), torch.zeros_like(clients)
        clients, models, samples = trained(engine, clients, table, refs, longer, rng.at("train"))
        losses = judged(engine, clients, models, rng.at("judge"))
        if bool(losses.isnan().all()):
            return state
        found = merged_within(model_distances(losses, torch.arange(len(clients))), self.delta, "complete")
        labels, past = state.labels.clone(), state.past.clone()
        labels[clients] = found
        past[clients.to(engine.device)] = losses.diagonal().nan_to_num(0.0).to(engine.device)
        count = int(found.max()) + 1
        average = self.mean_of(count, engine, like=state.centers)
        average.add(models, found, samples if self.weighting == "samples" else None)
        centers = average.means(keep=state.common.repeat(count, 1))
        alive = torch.ones(count, dtype=torch.bool)
        return replace(state, centers=centers, labels=labels, past=past, alive=alive)

    def _merged(self, state: DriftState, rows: Tensor, distances: Tensor, engine: Engine) -> DriftState:
        """The state in which models with these rows [k] and distances [k, k] are merged; the first row remains."""
        found = merged_within(distances, self.delta, "complete")
        centers, labels, alive = state.centers.clone(), state.labels.clone(), state.alive.clone()
        repairs = list(state.repairs)
        for group in found.unique().tolist():
            first, *others = rows[found == group].tolist()
            if not others:
                continue
            same = torch.tensor([first, *others])
            members = torch.stack([(state.labels == row).sum() for row in same]).to(centers)  # [g]
            centers[first] = members @ state.centers[same.to(centers.device)] / members.sum()
            labels[torch.isin(state.labels, same)] = first
            alive[same[1:]] = False
            for row in others:
                reason = f"cluster {row} was merged with {first}: their models fit each other's data"
                repairs.append(Repair(round=engine.round, cluster=row, reason=reason))
        return replace(state, centers=centers, labels=labels, alive=alive, repairs=repairs)

    def _with_new_models(self, state: DriftState, drifted: Tensor, engine: Engine) -> DriftState:
        """Each of these clients [d] gets a model of its own, which begins with the one that it took."""
        labels, alive, centers = state.labels.clone(), state.alive.clone(), state.centers
        repairs = list(state.repairs)
        for client in drifted.tolist():
            if int(alive.sum()) >= self.max_clusters:
                break
            best = centers[labels[client]].unsqueeze(0)
            free = (~alive).nonzero().flatten()
            row = int(free[0]) if len(free) else len(alive)
            centers = torch.cat([centers[:row], best, centers[row + 1 :]])
            alive = torch.cat([alive[:row], torch.ones(1, dtype=torch.bool), alive[row + 1 :]])
            labels[client] = row
            reason = f"{engine.names[client]} starts a model of its own: its loss has risen with all models"
            repairs.append(Repair(round=engine.round, cluster=row, reason=reason))
        return replace(state, centers=centers, labels=labels, alive=alive, repairs=repairs)

    def assign(self, state: DriftState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer gets all models and takes the one with the lowest loss."""
        rows = state.alive.nonzero().flatten()
        shown = replace(state, centers=state.centers[rows.to(engine.device)])
        found = chosen_by_loss(shown, engine, newcomers, rng)
        return torch.where(found >= 0, rows[found.clamp_min(0)], found)


def model_distances(losses: Tensor, taken: Tensor) -> Tensor:
    """D(i, j) [k, k] of models, from the losses [n, k] of clients that took the models `taken` [n].

    Models that nobody took, or whose clients did not answer, are far from all others.
    """
    none = losses.new_full((losses.shape[1],), torch.nan)
    means = [losses[taken == k].mean(0) if bool((taken == k).any()) else none for k in range(losses.shape[1])]
    of_models = torch.stack(means).T  # [k, k]: model, data
    excess = of_models - of_models.diagonal().unsqueeze(1)
    return torch.maximum(excess, excess.T).clamp_min(0).nan_to_num(_FAR, posinf=_FAR).fill_diagonal_(0)
