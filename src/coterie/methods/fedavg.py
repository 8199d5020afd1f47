"""FedAvg: one model for everyone (McMahan et al. 2017, "Communication-Efficient Learning ...").

Also what the other methods with one center are made of: what a client does (`work`), and what the server does with
the mean (`moved`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from coterie.client.steps import train
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.engines.base import Engine
from coterie.methods.base import ClusterState, register
from coterie.methods.parts.averaging import Averaging
from coterie.randomness import Rng
from coterie.settings import setting


@register
@dataclass(frozen=True)
class FedAvg(Averaging[ClusterState]):
    """The mean of the clients' models, weighted by their samples."""

    key: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al. 2017"

    weighting: Literal["samples", "equal"] = setting("samples", "weight of a client in the mean")

    def start(self, task: Task, engine: Engine, rng: Rng) -> ClusterState:
        """The common start."""
        return ClusterState.common_start(engine, num_clusters=1)

    def work(self, engine: Engine) -> SGD:
        """What clients do in this round."""
        return engine.task.work.at(engine.round)

    def moved(self, center: Tensor, mean: Tensor, engine: Engine) -> Tensor:
        """The center [P] after a round, from the one before and the mean of what clients made of it."""
        return mean

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        """Train everywhere from the one center, then average."""
        average = self.mean_of(1, engine, like=state.centers)
        labels = state.labels.clone()
        refs = torch.zeros(len(cohort), dtype=torch.int64)
        for chunk in engine.call(train, cohort, models=state.centers, refs=refs, work=self.work(engine), rng=rng):
            weights = chunk.answer.samples if self.weighting == "samples" else None
            average.add(chunk.answer.params, torch.zeros_like(chunk.clients), weights)
            labels[chunk.clients] = 0
        mean = average.means(keep=state.centers)[0]
        return replace(state, centers=self.moved(state.centers[0], mean, engine).unsqueeze(0), labels=labels)
