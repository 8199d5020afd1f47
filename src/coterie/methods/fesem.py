"""FeSEM: multi-center federated learning by stochastic expectation maximisation (Long, Xie, Shen, Zhou, Wang,
Jiang 2022, "Multi-center federated learning: clients clustering for better personalization", World Wide Web).

A round: each client trains from its center (Eq. 7), is assigned to the center nearest to its model (Eq. 8), and every
center becomes the mean of its members (Eq. 9). The paper's first clustering is k-means with 20 restarts on models
trained once from the initial weights (section 6.1.4): `init="paper"`. `"warm"` clusters signatures at a common model
(see `parts/start.py`). `"random"` starts from random centers, as in the FedSEM baseline of the FedDSMIC paper.

Deviations, with reasons:
- `prox` is 0 by default, which switches off the distance term of Eq. 5 and 7: clients then train as in FedAvg. Set it
  to 2 lambda to train as in the paper.
- A center is the sample-weighted mean (`weighting="equal"` is Eq. 9): with equal weights, clients with few samples,
  whose models hardly move, hold their center back. With partial participation it is the mean over the cohort's members;
  the paper has full participation.
- After a warm start and with the guard, a client moves only to a clearly nearer center, and if its loss agrees: where
  centers are closer together than updates are long, the nearest one is a matter of chance.
- Cosine distance is between updates from the common model, since all models of a run point in nearly the same
  direction.

A client starts from its own center, so L2 tends to confirm its label: after a good start, hardly any client moves by
this rule. The start and the guard find the kinds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Models
from coterie.client.steps import Answer, ClientStep, clearly_lowest, client_step
from coterie.client.task import Task
from coterie.client.work import SGD, Proximal
from coterie.engines.base import Engine
from coterie.methods.base import register
from coterie.methods.parts.centers import CenterMethod, CenterState, RoundUpdate, watched
from coterie.methods.parts.clustering import cosine_distances, squared_distances
from coterie.methods.parts.guard import guarded
from coterie.methods.parts.start import find_clusters, first_models_start, placed, random_start, warm_start
from coterie.randomness import Rng
from coterie.settings import setting


@client_step("coterie.algorithms.fesem:train_near_center", lambda asked: forms.trained(asked) | forms.watched(asked))
def train_near_center(
    block: Block,
    models: Models,
    work: SGD,
    mean_samples: Tensor,
    watch: Tensor | None = None,
    vote: Tensor | None = None,
) -> Answer:
    """Train with the proximal weight prox / (m alpha_i), where m alpha_i = samples / mean samples."""
    assert isinstance(work, Proximal)
    prox = (work.prox * mean_samples / block.samples).to(models.table.dtype)  # [c]
    found = watched(block, models, watch, vote)
    return Answer(**found, params=block.train(models, work, prox=prox), samples=block.samples)


@client_step("coterie.algorithms.fesem:count", lambda asked: {"samples": asked.samples("train")})
def count(block: Block, models: Models | None, work: SGD) -> Answer:
    """The number of training samples."""
    return Answer(samples=block.samples)


@register
@dataclass(frozen=True)
class FeSEM(CenterMethod[CenterState]):
    """K centers, each the mean of the models nearest to it."""

    key: ClassVar[str] = "fesem"
    paper: ClassVar[str] = "Long et al. 2022"

    init: Literal["warm", "paper", "random"] = setting(  # type: ignore[assignment]
        "warm",
        "start from k-means of models trained from a warmed-up model or the initial weights, or from random centers",
    )
    distance: Literal["l2", "cosine"] = setting("l2", "distance of a model to a center")
    layers: Literal["all", "head"] = setting("all", "parameters that the distance compares")
    prox: float = setting(
        0.0, "weight of the distance term of Eq. 5 and 7, 2 lambda in the paper; 0 switches it off", ge=0
    )
    prox_scale: Literal["equal", "paper"] = setting(
        "equal", "the same weight for all clients, or divided by the share of samples as in Eq. 7"
    )
    tolerance: float = setting(0.0, "stop when no label changes and no center moves further than this; 0: never", ge=0)
    patience: int = setting(3, "consecutive stable rounds before stopping", ge=1)

    def start(self, task: Task, engine: Engine, rng: Rng) -> CenterState:
        """Train every client once from one common model and cluster the results; or random centers."""
        begin = {"warm": warm_start, "paper": first_models_start, "random": random_start}[self.init]
        return begin(self, self.empty_state(engine), engine, rng)

    def round(self, state: CenterState, engine: Engine, cohort: Tensor, rng: Rng) -> CenterState:
        """Train from the client's center (Eq. 7), assign to the nearest center (Eq. 8), average (Eq. 9)."""
        state = self._with_mean_samples(placed(self, state, engine, cohort, rng), engine, cohort, rng)
        update = RoundUpdate(self, state, engine)
        for chunk in self.train(state, engine, cohort, rng.at("train")):
            distances = self.distances(chunk.answer.params, state, engine)  # [c, K]
            own = state.labels[chunk.clients] if self.protects_start else None
            update.add(chunk, clearly_lowest(distances, own).cpu())
        return self._with_stable_rounds(state, guarded(self, state, update, engine, rng))

    def distances(self, params: Tensor, state: CenterState, engine: Engine) -> Tensor:
        """Distance of each model [c, P] to each center, [c, K]: L2 (squared), or cosine between updates."""
        columns = self._columns(engine.task)
        if self.distance == "l2":
            return squared_distances(params[:, columns], state.centers[:, columns])
        common = state.common[columns]
        return cosine_distances(params[:, columns] - common, state.centers[:, columns] - common)

    def assign(self, state: CenterState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer signs and joins the cluster of the nearest signatures; if they do not tell, it chooses by loss."""
        return find_clusters(self, state, engine, newcomers, rng).labels

    def signature(self, params: Tensor, state: CenterState, engine: Engine) -> Tensor:
        """The update of the layers that the distance compares; for cosine, of norm one."""
        columns = self._columns(engine.task)
        update = params[:, columns] - state.common[columns]
        return torch.nn.functional.normalize(update, dim=1) if self.distance == "cosine" else update

    def member_step(self, state: CenterState, engine: Engine) -> tuple[ClientStep, dict[str, Tensor]]:
        """As plain training; with the paper's scale, the proximal weight depends on the client's samples."""
        if not (self.prox and self.prox_scale == "paper" and state.mean_samples):
            return super().member_step(state, engine)
        mean = torch.tensor(state.mean_samples, dtype=torch.float64, device=engine.device)
        return train_near_center, {"mean_samples": mean}

    def _with_mean_samples(self, state: CenterState, engine: Engine, cohort: Tensor, rng: Rng) -> CenterState:
        """For the paper's proximal weight after a start without training: the mean sample count of a cohort."""
        if not (self.prox and self.prox_scale == "paper") or state.mean_samples:
            return state
        found = [chunk.answer.samples for chunk in engine.call(count, cohort, rng=rng.at("count"))]
        return replace(state, mean_samples=float(torch.cat(found).double().mean())) if found else state

    def work(self, engine: Engine) -> SGD:
        """Local work with the proximal term."""
        work = super().work(engine)
        return Proximal.of(work, self.prox) if self.prox else work

    def should_stop(self, state: CenterState) -> bool:
        """Whether the last `patience` rounds were stable."""
        return self.tolerance > 0 and state.stable_rounds >= self.patience

    def _with_stable_rounds(self, before: CenterState, after: CenterState) -> CenterState:
        """The state with the number of consecutive stable rounds."""
        if not self.tolerance or len(after.repairs) > len(before.repairs):
            return after
        moved = float((after.centers - before.centers).norm(dim=1).max())
        is_stable = bool((after.labels == before.labels).all()) and moved < self.tolerance
        return replace(after, stable_rounds=before.stable_rounds + 1 if is_stable else 0)

    def _columns(self, task: Task) -> slice:
        return task.layout.head if self.layers == "head" else slice(0, task.layout.num_parameters)
