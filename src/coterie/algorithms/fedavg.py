"""FedAvg: one model for everyone (McMahan et al. 2017, "Communication-Efficient Learning ...")."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, ClusterState, register
from coterie.block import Task, train
from coterie.clustering import CenterSums
from coterie.engine import Engine
from coterie.randomness import Rng
from coterie.settings import setting


@register
@dataclass(frozen=True)
class FedAvg(Algorithm):
    """The mean of the clients' models, weighted by their samples."""

    key: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al. 2017"

    weighting: Literal["samples", "equal"] = setting("samples", "weight of a client in the mean")

    def start(self, task: Task, engine: Engine, rng: Rng) -> ClusterState:
        """The common start."""
        state: ClusterState = ClusterState.common_start(engine, num_clusters=1)
        return state

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        """Train everywhere from the one center, then average."""
        sums = CenterSums(1, like=state.centers)
        labels = state.labels.clone()
        refs = torch.zeros(len(cohort), dtype=torch.int64)
        work = engine.task.work.at(engine.round)
        for chunk in engine.call(train, cohort, models=state.centers, refs=refs, work=work, rng=rng):
            weights = chunk.answer.samples if self.weighting == "samples" else None
            sums.add(chunk.answer.params, torch.zeros_like(chunk.clients), weights)
            labels[chunk.clients] = 0
        return replace(state, centers=sums.means(keep=state.centers), labels=labels)
