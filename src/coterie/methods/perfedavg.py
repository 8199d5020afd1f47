"""Per-FedAvg: one model that is a good starting point for every client (Fallah, Mokhtari, Ozdaglar 2020, "Personalized
Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach").

Clients follow the gradient of f(w - alpha * grad f(w)) without computing second derivatives: `variant="fo"` ignores
them, `"hf"` approximates them by a difference of gradients (Eq. 12, delta = 1e-3). A client is evaluated with the model
after `adapt_steps` steps on its own TRAINING data; test samples are only used for scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from coterie.client.work import SGD, FirstOrderMAML, HessianFreeMAML
from coterie.engines.base import Engine
from coterie.methods.base import ClusterState, Personal, register
from coterie.methods.fedavg import OneModel
from coterie.settings import setting


@register
@dataclass(frozen=True)
class PerFedAvg(OneModel):
    """One model, trained to be good after adaptation to a client."""

    key: ClassVar[str] = "perfedavg"
    paper: ClassVar[str] = "Fallah et al. 2020"

    variant: Literal["fo", "hf"] = setting("fo", "first-order, or Hessian-free second-order")
    inner_lr: float = setting(0.01, "learning rate of the adaptation (alpha)", gt=0)
    adapt_steps: int = setting(1, "adaptation steps on the client's training data", ge=1)

    def work(self, engine: Engine) -> SGD:
        """MAML."""
        maml = FirstOrderMAML if self.variant == "fo" else HessianFreeMAML
        return maml.of(super().work(engine), self.inner_lr)

    def personal(self, state: ClusterState, clients: Tensor) -> Personal:
        """The center after adaptation on the client's training data."""
        return replace(super().personal(state, clients), adapt=self.adaptation)

    def adaptation(self, work: SGD) -> SGD:
        """The work that turns the center into the personal model."""
        return SGD(lr=self.inner_lr, steps=self.adapt_steps, batch_size=work.batch_size)
