"""Per-FedAvg: one model that is a good start for everyone (Fallah, Mokhtari, Ozdaglar 2020, "Personalized Federated
Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach").

Clients descend along the gradient of f(w - alpha * grad f(w)), without second derivatives: `variant="fo"` leaves them
out, `"hf"` takes them as a difference of gradients (Eq. 12, delta = 1e-3). A client is evaluated with the model after
`adapt_steps` steps on its own TRAINING data; test samples only score.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from coterie.client.work import SGD, FirstOrderMAML, HessianFreeMAML
from coterie.engines.base import Engine
from coterie.methods.base import ClusterState, Personal, register
from coterie.methods.fedavg import FedAvg
from coterie.settings import setting


@register
@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    """One model, trained to be good after adapting to the client."""

    key: ClassVar[str] = "perfedavg"
    paper: ClassVar[str] = "Fallah et al. 2020"

    variant: Literal["fo", "hf"] = setting("fo", "first-order, or Hessian-free second-order")
    inner_lr: float = setting(0.01, "step size of the adaptation (alpha)", gt=0)
    adapt_steps: int = setting(1, "steps on the client's training data that make its personal model", ge=1)

    def work(self, engine: Engine) -> SGD:
        """MAML."""
        plain = super().work(engine)
        if self.variant == "fo":
            return FirstOrderMAML.of(plain, self.inner_lr)
        return HessianFreeMAML.of(plain, self.inner_lr)

    def adaptation(self, work: SGD) -> SGD:
        """What a client does with the center before it uses it."""
        return SGD(lr=self.inner_lr, steps=self.adapt_steps, batch_size=work.batch_size)

    def personal(self, state: ClusterState, clients: Tensor) -> Personal:
        """The center after adapting on the client's training data."""
        return replace(super().personal(state, clients), adapt=self.adaptation)
