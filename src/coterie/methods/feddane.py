"""FedDANE: Newton-like steps of one model (Li et al. 2019, "FedDANE: A Federated Newton-Type Method").

A round draws clients twice. The mean gradient of one draw at w_t is g. The clients of the other, the round's cohort,
minimise

    F_i(w) + <g - grad F_i(w_t), w> + mu / 2 * ||w - w_t||^2

and their models are averaged. With all clients in a round both draws are everyone. Costs one more full gradient down
(g) and, from the other draw, one up; gradients over all samples are taken twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from coterie.client.block import Block, Models
from coterie.client.steps import Answer, client_step
from coterie.client.work import SGD, Corrected
from coterie.engines.base import Engine
from coterie.methods.base import ClusterState, register
from coterie.methods.fedsgd import FedSGD
from coterie.randomness import Rng
from coterie.settings import setting


@client_step("coterie.algorithms.feddane:train_corrected")
def train_corrected(block: Block, models: Models, work: SGD, mean_gradient: Tensor) -> Answer:
    """Train with the own gradient at the start replaced by everyone's."""
    start = models.rows()
    own, _ = block.gradient(start)
    return Answer(params=block.train(start, work, correction=mean_gradient - own), samples=block.samples)


@register
@dataclass(frozen=True)
class FedDANE(FedSGD):
    """One model; clients descend along everyone's gradient, with their own curvature."""

    key: ClassVar[str] = "feddane"
    paper: ClassVar[str] = "Li et al. 2019"

    weighting: Literal["samples", "equal"] = setting("samples", "weight of a client in both means")
    mu: float = setting(0.1, "pull of a client's model to the one it was sent", ge=0)

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        """Gradients from one draw, corrected training by the other."""
        asked = engine.draw(rng.at("other draw"), len(cohort))
        gradient = self.mean_gradient(state, engine, asked, rng.at("gradients"))
        if gradient is None:
            return state
        average = self.mean_of(1, engine, like=state.centers)
        labels = state.labels.clone()
        work = Corrected.of(self.work(engine), self.mu)
        payload = {"mean_gradient": gradient[: engine.task.layout.num_parameters]}
        refs = torch.zeros(len(cohort), dtype=torch.int64)
        for chunk in engine.call(
            train_corrected, cohort, models=state.centers, refs=refs, payload=payload, work=work, rng=rng.at("train")
        ):
            weights = chunk.answer.samples if self.weighting == "samples" else None
            average.add(chunk.answer.params, torch.zeros_like(chunk.clients), weights)
            labels[chunk.clients] = 0
        return replace(state, centers=average.means(keep=state.centers), labels=labels)
