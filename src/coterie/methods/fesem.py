"""FeSEM: multi-center federated learning by stochastic expectation maximisation (Long, Xie, Shen, Zhou, Wang,
Jiang 2022, "Multi-center federated learning: clients clustering for better personalization", World Wide Web).

A round: each client trains from its center (Eq. 7), is assigned to the center nearest to its model (Eq. 8),
and every center becomes the mean of its members (Eq. 9). The first clustering is k-means with 20 restarts on
models trained once from one common start (section 6.1.4), which is the network's first weights with
`init="paper"`, and the mean model after a few common rounds with `"warm"`. `"random"` is the start from random
centers that the FedDSMIC paper gives its FedSEM baseline.

Deviations, with reasons: with a cohort of some clients, the mean is over the cohort's members (the paper has
full participation). Cosine distance is taken between updates from the common start, since all models of a run
point nearly the same way. Known limits: a client starts at its own center, so L2 tends to confirm the old
label; and under label skew L2 sees the labels rather than the kind of client.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from coterie.client.block import Answer, Block, Models, Task, client_step
from coterie.client.work import SGD, Proximal
from coterie.engines.base import Chunk, Engine
from coterie.methods.base import register
from coterie.methods.parts.centers import CenterMethod, CenterState, nearest_by_first_models, random_start
from coterie.methods.parts.clustering import cosine_distances, squared_distances
from coterie.randomness import Rng
from coterie.settings import setting


@client_step("coterie.algorithms.fesem:train_near_center")
def train_near_center(block: Block, models: Models, work: SGD, mean_samples: Tensor) -> Answer:
    """Train with a pull of prox / (m alpha_i) towards the center; m alpha_i is samples / mean samples."""
    assert isinstance(work, Proximal)
    pull = (work.prox * mean_samples / block.samples).to(models.table.dtype)  # [c]
    return Answer(params=block.train(models, work, prox=pull), samples=block.samples)


@register
@dataclass(frozen=True)
class FeSEM(CenterMethod):
    """K centers, each the mean of the models nearest to it."""

    key: ClassVar[str] = "fesem"
    paper: ClassVar[str] = "Long et al. 2022"

    init: Literal["warm", "paper", "random"] = setting(  # type: ignore[assignment]
        "warm", "start: k-means of models trained from a warmed-up model or from the first weights; or random centers"
    )
    distance: Literal["l2", "cosine"] = setting("l2", "distance of a model to a center")
    layers: Literal["all", "head"] = setting("all", "which parameters the distance looks at")
    prox: float = setting(0.0, "pull of a client's model to its center: 2 lambda in the paper; 0 is none", ge=0)
    prox_scale: Literal["equal", "paper"] = setting(
        "equal", "the same pull for all, or by 1 / share of samples as Eq. 7 has it"
    )
    tolerance: float = setting(0.0, "stop when no label changes and centers move less than this; 0: never", ge=0)
    patience: int = setting(3, "rounds in a row that must be so calm before stopping", ge=1)

    def first_state(self, state: Any, engine: Engine, rng: Rng) -> Any:
        """Train every client once from one common model, and cluster what comes back."""
        way = random_start if self.init == "random" else FeSEM.clustered_start
        return way(self, state, engine, rng)

    def signature(self, params: Tensor, state: CenterState, engine: Engine) -> Tensor:
        """The update of the layers that the distance looks at; for cosine, of length one."""
        columns = self._columns(engine.task)
        update = params[:, columns] - state.common[columns]
        return torch.nn.functional.normalize(update, dim=1) if self.distance == "cosine" else update

    def distances(self, context: Any, params: Tensor, clients: Tensor, state: Any, engine: Engine) -> Tensor:
        """Eq. 8: L2 (squared), or cosine between updates."""
        columns = self._columns(engine.task)
        if self.distance == "l2":
            return squared_distances(params[:, columns], state.centers[:, columns])
        common = state.common[columns]
        return cosine_distances(params[:, columns] - common, state.centers[:, columns] - common)

    def first_choice(self, context: Any, chunk: Chunk, state: Any, engine: Engine, rng: Rng) -> Tensor:
        """A client that trained from the common start is compared to the members' own first models."""
        update = self._sketch(engine)(self._update(chunk.answer.params, state, engine))
        return nearest_by_first_models(update, state).cpu()

    def train_from(self, state: Any, engine: Engine, cohort: Tensor, rows: Tensor, rng: Rng) -> Iterator[Chunk]:
        """As plain training; with the paper's scale, the pull depends on the client's samples."""
        if not (self.prox and self.prox_scale == "paper" and state.mean_samples):
            return super().train_from(state, engine, cohort, rows, rng)
        table = torch.cat([state.centers, state.common.unsqueeze(0)])
        mean = torch.tensor(state.mean_samples, dtype=torch.float64, device=engine.device)
        return engine.call(
            train_near_center,
            cohort,
            models=table,
            refs=rows,
            payload={"mean_samples": mean},
            work=self.work(engine),
            rng=rng,
        )

    def work(self, engine: Engine) -> SGD:
        """Local work with the proximal term."""
        work = super().work(engine)
        return Proximal.of(work, self.prox) if self.prox else work

    def should_stop(self, state: CenterState) -> bool:
        """No label changed and centers hardly moved, several rounds in a row."""
        return self.tolerance > 0 and state.calm_rounds >= self.patience

    def _calm(self, before: CenterState, after: CenterState) -> CenterState:
        moved = float((after.centers - before.centers).norm(dim=1).max())
        is_calm = bool((after.labels == before.labels).all()) and moved < self.tolerance
        return replace(after, calm_rounds=before.calm_rounds + 1 if is_calm else 0)

    def _columns(self, task: Task) -> slice:
        return task.layout.head if self.layers == "head" else slice(0, task.layout.num_parameters)
