"""FedProx: FedAvg with a proximal term (Li et al. 2020, "Federated Optimization in Heterogeneous Networks").

Clients minimise their loss + mu / 2 * ||w - w_global||^2: the squared norm, whose gradient is mu * (w - w_global).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from coterie.client.work import SGD, Proximal
from coterie.engines.base import Engine
from coterie.methods.base import register
from coterie.methods.fedavg import FedAvg
from coterie.settings import setting


@register
@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg whose clients stay near the global model."""

    key: ClassVar[str] = "fedprox"
    paper: ClassVar[str] = "Li et al. 2020"

    mu: float = setting(0.1, "strength of the proximal term; 0 is FedAvg", ge=0)

    def work(self, engine: Engine) -> SGD:
        """SGD with the proximal term."""
        plain = super().work(engine)
        return Proximal.of(plain, self.mu) if self.mu else plain
