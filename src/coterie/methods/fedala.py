"""FedALA: every client learns, entry by entry, how much of the global model it takes over (Zhang, Hua, Wang, Song, Xue,
Ma, Guan 2023, "FedALA: Adaptive Local Aggregation for Personalized Federated Learning").

A client keeps its model v of its last round, and weights W in [0, 1] for the entries of the last `layers` layers, which
start at 1. It receives w. All other layers are taken from w. For the last ones it learns W on its training samples,
with v and w fixed,

    m = v + W (w - v)
    W <- W - eta grad f(m) (w - v),   entry by entry, clipped to [0, 1]

and then it trains from m by the local work. It sends the result, which the server averages, and is served with it. In a
client's first round v = w, so that it takes over all of w.

Deviations. The paper learns W on a share of the samples: in a client's second round until the loss settles, later for
one pass. Here it is `weight_epochs` passes over all samples in every round, so that all rounds cost the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Models
from coterie.client.steps import OWN_MODEL, Answer, client_step
from coterie.client.work import SGD, GradientAt, Stack, register_work
from coterie.engines.base import Engine
from coterie.methods.base import ClusterState, register
from coterie.methods.parts.own_models import OwnModels
from coterie.randomness import Rng
from coterie.settings import setting

_WEIGHTS = "weights"  # the name under which a client remembers W


@register_work
@dataclass(frozen=True)
class Aggregation(SGD):
    """Trains weights W in [0, 1] of v + W (w - v); `extras` are v ("own") and w - v ("gap"), [c, parameters] each."""

    key: ClassVar[str] = "ala"

    def direction(self, gradient: GradientAt, params: Stack, anchor: Stack, extras: Mapping[str, Tensor]) -> Stack:
        """The gradient of W."""
        sizes = [weight[0].numel() for weight in params]
        own, gap = (
            [part.reshape(weight.shape) for part, weight in zip(extras[name].split(sizes, 1), params, strict=True)]
            for name in ("own", "gap")
        )
        found = gradient([v + weight * d for v, weight, d in zip(own, params, gap, strict=True)], 0)
        return [grad * d for grad, d in zip(found, gap, strict=True)]

    def settle(self, params: Stack, anchor: Stack) -> None:
        """Clip W to [0, 1]."""
        for weight in params:
            weight.clamp_(0, 1)


@client_step("coterie.fedala:aggregate_and_train", forms.trained)
def aggregate_and_train(
    block: Block, models: Models, work: SGD, layers: Tensor, eta: Tensor, weight_epochs: Tensor
) -> Answer:
    """Learn the weights, mix the received model with the client's own, and train the result."""
    sent, cut, top = models.rows(), block.task.layout.num_parameters, block.task.layout.top(int(layers))
    own = sent.clone()
    own[:, top] = block.memory.get(OWN_MODEL, sent)[:, top]
    gap = (sent - own)[:, :cut]
    weights = torch.ones_like(sent)
    weights[:, top] = block.memory.get(_WEIGHTS, weights[:, top])
    weights[:, cut:] = sent[:, cut:]  # the places of the float buffers
    learning = Aggregation(lr=float(eta), epochs=int(weight_epochs), batch_size=work.batch_size)
    weights = block.train(weights, learning, purpose="weights ", own=own[:, :cut], gap=gap)
    block.memory.put(_WEIGHTS, weights[:, top])
    mixed = torch.cat([own[:, :cut] + weights[:, :cut] * gap, sent[:, cut:]], dim=1)
    trained = block.train(mixed, work)
    block.memory.put(OWN_MODEL, trained)
    return Answer(params=trained, samples=block.samples)


@register
@dataclass(frozen=True)
class FedALA(OwnModels):
    """Own models, each of which takes over as much of the global one as helps it."""

    key: ClassVar[str] = "fedala"
    paper: ClassVar[str] = "Zhang et al. 2023"

    layers: int = setting(1, "number of last layers whose entries have weights (p)", ge=1)
    eta: float = setting(1.0, "learning rate of the weights", gt=0)
    weight_epochs: int = setting(5, "epochs in each round in which the weights are learnt", ge=1)

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        """Clients mix and train, the server averages."""
        payload = {
            "layers": torch.tensor(self.layers),
            "eta": torch.tensor(self.eta, dtype=torch.float64),
            "weight_epochs": torch.tensor(self.weight_epochs),
        }
        work = self.work(engine)
        mean, answered = self.mean_answer(aggregate_and_train, state, engine, cohort, rng, payload=payload, work=work)
        return self.next_state(state, mean, answered)
