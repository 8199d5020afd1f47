"""APFL: every client mixes the global model with a local one (Deng, Kamani, Mahdavi 2020, "Adaptive Personalized
Federated Learning").

A client keeps a local model v and a share alpha. In a round it receives w. It first adapts its share by the gradient
over its training samples,

    alpha <- alpha - lr <v - w, grad f(m)>,   clipped to [0, 1],   with m = alpha v + (1 - alpha) w

and then trains both models. Every local step, on one batch and with v and w from before the step, is

    w <- w - lr grad f(w)
    v <- v - lr alpha grad f(m)

It sends w only, and is served with alpha v + (1 - alpha) w for the present w of the server. A step costs two gradients.
A client that was not seen yet has v = w.

Deviations. alpha starts at 0.5 and moves once per round, before the training. The paper moves it in every step; but
within a round w fits the client faster than v does, so alpha would fall to 0 and stay there. The served model has the
float buffers that were collected at m.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Mixture, Models
from coterie.client.serving import Serving, serving
from coterie.client.steps import OWN_MODEL, Answer, client_step
from coterie.client.work import SGD, GradientAt, Stack, register_work, values_with_none
from coterie.engines.base import Engine
from coterie.methods.base import ClusterState, register
from coterie.methods.parts.own_models import OwnModels
from coterie.randomness import Rng
from coterie.settings import setting

_SHARE = "share"  # the name under which a client remembers alpha


@register_work
@dataclass(frozen=True)
class Interpolated(SGD):
    """Trains w, and v along the gradient at alpha v + (1 - alpha) w; `extras["alpha"]` is [c, 1]."""

    key: ClassVar[str] = "apfl"
    gradients: ClassVar[int] = 2
    models: ClassVar[int] = 2

    @classmethod
    def of(cls, work: SGD) -> Self:
        """The same work on two models."""
        return cls(**values_with_none(work))

    def direction(self, gradient: GradientAt, params: Stack, anchor: Stack, extras: Mapping[str, Tensor]) -> Stack:
        """The gradients of w and v."""
        count = len(params) // 2
        shared, own = params[:count], params[count:]
        shares = [extras["alpha"].reshape(-1, *[1] * (tensor.dim() - 1)) for tensor in own]
        mixed = [s * v + (1 - s) * w for s, v, w in zip(shares, own, shared, strict=True)]
        at_shared, at_mixed = gradient(shared, 0), gradient(mixed, 0, 1)
        return [*at_shared, *(s * grad for s, grad in zip(shares, at_mixed, strict=True))]


@client_step("coterie.apfl:train_both", forms.trained)
def train_both(block: Block, models: Models, work: SGD, alpha: Tensor, adaptive: Tensor) -> Answer:
    """Adapt the share, then train the received model and the client's own one; send the received one."""
    sent = models.rows()
    own = block.memory.get(OWN_MODEL, sent)
    share = block.memory.get(_SHARE, alpha.to(sent).expand(len(block), 1))
    if adaptive:
        slope, _ = block.gradient(_mixed(block, own, sent, share))
        along = ((own - sent)[:, : slope.shape[1]] * slope).sum(1, keepdim=True)
        share = (share - work.lr * along).clamp(0, 1)
    shared, trained = block.train(torch.cat([sent, own], dim=1), Interpolated.of(work), alpha=share).chunk(2, dim=1)
    block.memory.put(OWN_MODEL, trained)
    block.memory.put(_SHARE, share)
    return Answer(params=shared, samples=block.samples)


def _mixed(block: Block, own: Tensor, sent: Tensor, share: Tensor) -> Tensor:
    """alpha v + (1 - alpha) w, with the float buffers of v."""
    cut = block.task.layout.num_parameters
    return torch.cat([(share * own + (1 - share) * sent)[:, :cut], own[:, cut:]], dim=1)


@serving("coterie.apfl:mixed")
def mixed(block: Block, models: Models, work: SGD) -> Mixture:
    """alpha v + (1 - alpha) w for the w that was sent."""
    sent = models.rows()
    own = block.memory.get(OWN_MODEL, sent)
    return Mixture.of_one(_mixed(block, own, sent, block.memory.get(_SHARE, sent.new_zeros(len(block), 1))))


@register
@dataclass(frozen=True)
class APFL(OwnModels):
    """A global model and a local one at every client, mixed with a share that the client learns."""

    key: ClassVar[str] = "apfl"
    paper: ClassVar[str] = "Deng et al. 2020"
    serving: ClassVar[Serving] = mixed

    alpha: float = setting(0.5, "initial share of the local model (alpha)", ge=0, le=1)
    adaptive: bool = setting(True, "let clients adapt their shares")

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        """Clients train both models, the server averages the global one."""
        payload = {"alpha": torch.tensor(self.alpha, dtype=torch.float64), "adaptive": torch.tensor(self.adaptive)}
        work = self.work(engine)
        mean, answered = self.mean_answer(train_both, state, engine, cohort, rng, payload=payload, work=work)
        return self.next_state(state, mean, answered)
