"""FedSGD: one gradient per client and round (McMahan et al. 2017, FederatedSGD).

Every client answers with the gradient of its mean loss over all its training samples. The server takes one step along
the weighted mean. With full participation this is gradient descent on the union of the clients' data. Of the local
work only the learning rate counts: epochs, batch size and momentum have no effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie.client.block import Block, Models
from coterie.client.forms import Asked, Forms
from coterie.client.steps import Answer, client_step
from coterie.client.work import SGD
from coterie.engines.base import Engine
from coterie.methods.base import ClusterState, register
from coterie.methods.fedavg import FedAvg
from coterie.randomness import Rng


def summed(asked: Asked) -> Forms:
    """A gradient, and the number of samples it is of."""
    return {"gradient": asked.model(), "samples": asked.samples("train")}


@client_step("coterie.algorithms.fedsgd:full_gradient", summed)
def full_gradient(block: Block, models: Models, work: SGD) -> Answer:
    """The gradient over all training samples at the received model, followed by the float buffers."""
    gradient, buffers = block.gradient(models.rows())
    return Answer(gradient=torch.cat([gradient, buffers], dim=1), samples=block.samples)


@register
@dataclass(frozen=True)
class FedSGD(FedAvg):
    """Gradient descent on one model, one step per round."""

    key: ClassVar[str] = "fedsgd"
    paper: ClassVar[str] = "McMahan et al. 2017"

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        """One step along the mean gradient."""
        gradient, answered = self.mean_answer(full_gradient, state, engine, cohort, rng, "gradient")
        if not len(answered):
            return state
        cut = engine.task.layout.num_parameters
        step = self.work(engine).lr * gradient[:cut]
        # Buffers are averaged: they have no gradient.
        return self.next_state(state, torch.cat([state.centers[0, :cut] - step, gradient[cut:]]), answered)
