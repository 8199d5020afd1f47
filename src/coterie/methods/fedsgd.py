"""FedSGD: one gradient a client and round (McMahan et al. 2017, FederatedSGD).

Every client answers with the gradient of its mean loss over all of its training samples; the server takes one step
along their sample-weighted mean. With all clients this is gradient descent on the union of their data. Of the local
work only the step size is used: epochs, batches and momentum play no part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from coterie.client.block import Block, Models
from coterie.client.steps import Answer, client_step
from coterie.client.work import SGD
from coterie.engines.base import Engine
from coterie.methods.base import ClusterState, register
from coterie.methods.fedavg import FedAvg
from coterie.randomness import Rng


@client_step("coterie.algorithms.fedsgd:full_gradient")
def full_gradient(block: Block, models: Models, work: SGD) -> Answer:
    """The gradient over all training samples at the model that was sent, with the float buffers after it."""
    gradient, buffers = block.gradient(models.rows())
    return Answer(gradient=torch.cat([gradient, buffers], dim=1), samples=block.samples)


@register
@dataclass(frozen=True)
class FedSGD(FedAvg):
    """Gradient descent of one model, one step a round."""

    key: ClassVar[str] = "fedsgd"
    paper: ClassVar[str] = "McMahan et al. 2017"

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        """The mean gradient, and one step along it."""
        labels = state.labels.clone()
        mean = self.mean_gradient(state, engine, cohort, rng, labels)
        if mean is None:
            return state
        cut = engine.task.layout.num_parameters
        lr = self.work(engine).lr
        center = torch.cat([state.centers[0, :cut] - lr * mean[:cut], mean[cut:]])
        return replace(state, centers=center.unsqueeze(0), labels=labels)

    def mean_gradient(
        self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng, labels: Tensor | None = None
    ) -> Tensor | None:
        """The mean gradient at the center, with mean buffers, [P]; None if nobody answered. Notes who did in labels."""
        average = self.mean_of(1, engine, like=state.centers)
        refs = torch.zeros(len(cohort), dtype=torch.int64)
        answered = False
        for chunk in engine.call(full_gradient, cohort, models=state.centers, refs=refs, rng=rng):
            weights = chunk.answer.samples if self.weighting == "samples" else None
            average.add(chunk.answer.gradient, torch.zeros_like(chunk.clients), weights)
            answered = True
            if labels is not None:
                labels[chunk.clients] = 0
        return average.means(keep=state.centers)[0] if answered else None
