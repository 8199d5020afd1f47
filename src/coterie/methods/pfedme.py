"""pFedMe: personal models that are bound to the global one by a Moreau envelope (Dinh, Tran, Nguyen 2020, "Personalized
Federated Learning with Moreau Envelopes").

The server's model w minimises the mean of the clients' envelopes F_i(w) = min over theta of
f_i(theta) + lam / 2 * ||theta - w||^2, whose gradient is lam (w - theta). In every local step a client solves the inner
problem on one batch by `inner_steps` steps, and moves its copy of w:

    theta <- (theta - lr grad f(theta) + lr lam w) / (1 + lr lam),   from theta = w
    w     <- w - eta lam (w - theta)

It sends w and is served with its last theta. The server mixes: w <- (1 - beta) w + beta mean(w_i).

The paper leaves the inner solver open. Our steps are explicit in the loss and implicit in the distance, so that a
large lr lam cannot diverge. The paper's experiments use lam = 15 and eta lam = 0.075 over hundreds of rounds; the
defaults here, lam = 1 and eta = 1 / lam, are for tens. `lr` is that of the local work, whose schedule applies; its
optimizer, momentum, weight decay and clipping are not used. A step costs `inner_steps` gradients. Float buffers are
those collected at theta.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Models
from coterie.client.steps import OWN_MODEL, Answer, client_step
from coterie.client.work import SGD, GradientAt, Stack, register_work
from coterie.engines.base import Engine
from coterie.errors import ConfigError
from coterie.methods.base import ClusterState, register
from coterie.methods.parts.own_models import OwnModels
from coterie.randomness import Rng
from coterie.settings import setting


@register_work
@dataclass(frozen=True)
class Envelope(SGD):
    """Steps of w along the gradient of its Moreau envelope; theta is the second model. `lr` is eta."""

    key: ClassVar[str] = "envelope"
    models: ClassVar[int] = 2

    lam: float = setting(1.0, "strength of the pull towards w", gt=0)
    inner_lr: float = setting(0.1, "learning rate of theta", gt=0)
    inner_steps: int = setting(5, "steps of theta per step of w", ge=1)

    @property
    def gradients(self) -> int:  # type: ignore[override]
        """Gradients per step."""
        return self.inner_steps

    def direction(self, gradient: GradientAt, params: Stack, anchor: Stack, extras: Mapping[str, Tensor]) -> Stack:
        """The gradient of the envelope; and for the second model, what takes a plain step to theta."""
        count = len(params) // 2
        center, old = params[:count], params[count:]
        theta, pull = center, self.inner_lr * self.lam
        for _ in range(self.inner_steps):
            found = gradient(theta, 0, 1)
            theta = [
                (t - self.inner_lr * grad + pull * w) / (1 + pull)
                for t, grad, w in zip(theta, found, center, strict=True)
            ]
        of_center = [self.lam * (w - t) for w, t in zip(center, theta, strict=True)]
        return [*of_center, *((o - t) / self.lr for o, t in zip(old, theta, strict=True))]


@client_step("coterie.pfedme:train_envelope", forms.trained)
def train_envelope(block: Block, models: Models, work: SGD) -> Answer:
    """Move the received model by its envelope, and keep theta."""
    sent, cut = models.rows(), block.task.layout.num_parameters
    moved, theta = block.train(torch.cat([sent, sent], dim=1), work).chunk(2, dim=1)
    block.memory.put(OWN_MODEL, theta)
    return Answer(params=torch.cat([moved[:, :cut], theta[:, cut:]], dim=1), samples=block.samples)


@register
@dataclass(frozen=True)
class PFedMe(OwnModels):
    """One global model, near which every client finds a good personal one."""

    key: ClassVar[str] = "pfedme"
    paper: ClassVar[str] = "Dinh et al. 2020"

    weighting: Literal["samples", "equal"] = setting("equal", "weight of a client in the mean")
    lam: float = setting(1.0, "strength of the pull of personal models towards the global one (lambda)", gt=0)
    eta: float | None = setting(None, "learning rate of the global model; at most 1 / lam", gt=0, default_is="1 / lam")
    inner_steps: int = setting(5, "steps of the personal model per step of the global one (K)", ge=1)
    beta: float = setting(1.0, "step size of the server towards the mean", gt=0)

    def check(self, num_clients: int) -> None:
        """Refuse steps beyond theta."""
        super().check(num_clients)
        if self.eta is not None and self.eta * self.lam > 1:
            raise ConfigError(f"eta of PFedMe must be at most 1 / lam, {1 / self.lam:g}. Got {self.eta:g} instead.")

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        """Clients solve their inner problems, the server mixes."""
        plain = self.work(engine)
        work = Envelope(
            lr=self.eta or 1 / self.lam,
            epochs=plain.epochs,
            steps=plain.steps,
            batch_size=plain.batch_size,
            lam=self.lam,
            inner_lr=plain.lr,
            inner_steps=self.inner_steps,
        )
        mean, answered = self.mean_answer(train_envelope, state, engine, cohort, rng, work=work)
        cut, center = engine.task.layout.num_parameters, state.centers[0]
        moved = torch.cat([center[:cut] + self.beta * (mean[:cut] - center[:cut]), mean[cut:]])
        return self.next_state(state, moved, answered)
