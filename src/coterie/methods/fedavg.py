"""FedAvg: one model for all clients (McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from
Decentralized Data").

A round: every client of the cohort trains the model on its own data; the server averages the results, weighted by
sample counts. With `adapt_steps` every client fine-tunes the model on its own TRAINING samples before it uses it. This
does not change the server's model.

The other methods with one center subclass `OneModel` (or `FedAvg`, where fine-tuning makes sense) and change the local
work (`work`), the server's step (`moved`) or the round itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from coterie.client.steps import ClientStep, train
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.engines.base import Engine
from coterie.methods.base import ClusterState, Personal, register
from coterie.methods.parts.averaging import Averaging
from coterie.randomness import Rng
from coterie.settings import setting


@dataclass(frozen=True)
class OneModel(Averaging[ClusterState]):
    """A method whose server keeps one model, the mean of what clients send."""

    weighting: Literal["samples", "equal"] = setting("samples", "weight of a client in the mean")

    def start(self, task: Task, engine: Engine, rng: Rng) -> ClusterState:
        """The common model."""
        return ClusterState.common_start(engine, num_clusters=1)

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        """Train from the one center, then average."""
        mean, answered = self.mean_answer(train, state, engine, cohort, rng, work=self.work(engine))
        return self.next_state(state, self.moved(state.centers[0], mean, engine), answered)

    def work(self, engine: Engine) -> SGD:
        """The local work of this round."""
        return engine.task.work.at(engine.round)

    def moved(self, center: Tensor, mean: Tensor, engine: Engine) -> Tensor:
        """The center [P] after a round, from the center before it and the mean of the clients' models."""
        return mean

    def mean_answer(
        self,
        step: ClientStep,
        state: ClusterState,
        engine: Engine,
        cohort: Tensor,
        rng: Rng,
        field: str = "params",
        **more: Any,
    ) -> tuple[Tensor, Tensor]:
        """Send the center to the cohort: the mean answer [P], or the center if there is none, and who answered [n]."""
        refs = torch.zeros(len(cohort), dtype=torch.int64)
        chunks = engine.call(step, cohort, models=state.centers, refs=refs, rng=rng, **more)
        one_cluster = torch.zeros_like(state.labels)
        means, answered = self.averaged(
            chunks, one_cluster, state.centers, engine, weighting=self.weighting, field=field
        )
        return means[0], answered

    def next_state(self, state: ClusterState, center: Tensor, answered: Tensor) -> ClusterState:
        """The state with a new center; clients that answered belong to it."""
        return replace(state, centers=center.unsqueeze(0), labels=state.labels.index_fill(0, answered, 0))


@register
@dataclass(frozen=True)
class FedAvg(OneModel):
    """The mean of the clients' models, weighted by sample counts; clients may fine-tune it."""

    key: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al. 2017"

    adapt_steps: int = setting(0, "steps of fine-tuning on the client's training samples before use", ge=0)
    adapt_lr: float | None = setting(
        None, "learning rate of the fine-tuning", gt=0, default_is="that of the local work"
    )

    def personal(self, state: ClusterState, clients: Tensor) -> Personal:
        """The center, fine-tuned on the client's training samples if `adapt_steps` is set."""
        found = super().personal(state, clients)
        return replace(found, adapt=self.adaptation) if self.adapt_steps else found

    def adaptation(self, work: SGD) -> SGD:
        """The client's own work for a few steps."""
        return replace(work, lr=self.adapt_lr or work.lr, steps=self.adapt_steps)
