"""FedDANE: Newton-like steps of one model (Li et al. 2019, "FedDANE: A Federated Newton-Type Method").

A round draws clients twice. The first draw computes the mean gradient g at w_t. The second draw, the round's cohort,
minimises

    F_i(w) + <g - grad F_i(w_t), w> + mu / 2 * ||w - w_t||^2

and the server averages the resulting models. With full participation both draws are all clients. Compared to FedAvg,
clients also download g, the first draw uploads a gradient, and full gradients are computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Models
from coterie.client.steps import Answer, client_step
from coterie.client.work import SGD, Corrected
from coterie.engines.base import Engine
from coterie.methods.base import ClusterState, register
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedsgd import full_gradient
from coterie.randomness import Rng
from coterie.settings import setting


@client_step("coterie.algorithms.feddane:train_corrected", forms.trained)
def train_corrected(block: Block, models: Models, work: SGD, mean_gradient: Tensor) -> Answer:
    """Train with the client's own gradient at w_t replaced by the mean gradient."""
    start = models.rows()
    own, _ = block.gradient(start)
    return Answer(params=block.train(start, work, correction=mean_gradient - own), samples=block.samples)


@register
@dataclass(frozen=True)
class FedDANE(FedAvg):
    """One model; clients follow the mean gradient with their own curvature."""

    key: ClassVar[str] = "feddane"
    paper: ClassVar[str] = "Li et al. 2019"

    weighting: Literal["samples", "equal"] = setting("samples", "weight of a client in both means")
    mu: float = setting(0.1, "strength of the proximal term", ge=0)

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        """Mean gradient of one draw, corrected training by the other, then average."""
        others = engine.draw(rng.at("other draw"), len(cohort))
        gradient, answered = self.mean_answer(full_gradient, state, engine, others, rng.at("gradients"), "gradient")
        if not len(answered):
            return state
        work = Corrected.of(self.work(engine), self.mu)
        payload = {"mean_gradient": gradient[: engine.task.layout.num_parameters]}
        mean, answered = self.mean_answer(
            train_corrected, state, engine, cohort, rng.at("train"), payload=payload, work=work
        )
        return self.next_state(state, mean, answered)
