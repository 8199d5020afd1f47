"""FedDist: one model that moves towards the clients' models (Reptile: Nichol et al. 2018; FedDist in the FeSEM paper).

w <- w + step * mean(W_i - w) with equal weights; `weighting="samples"` is FedDist+WS (FedDWS). Step 1 is FedAvg with
the same weights. BatchNorm statistics are averaged, since they are not weights to step along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from coterie.engines.base import Engine
from coterie.methods.base import register
from coterie.methods.fedavg import FedAvg
from coterie.settings import setting


@register
@dataclass(frozen=True)
class FedDist(FedAvg):
    """The center takes a step towards the clients' mean."""

    key: ClassVar[str] = "feddist"
    paper: ClassVar[str] = "Nichol et al. 2018 (Reptile); FedDist in the FeSEM paper"

    weighting: Literal["samples", "equal"] = setting("equal", "weight of a client in the mean; samples is FedDist+WS")
    step: float = setting(0.6, "step size towards the mean; 1 is FedAvg", gt=0, le=2)

    def moved(self, center: Tensor, mean: Tensor, engine: Engine) -> Tensor:
        """Part of the way to the mean."""
        cut = engine.task.layout.num_parameters
        return torch.cat([center[:cut] + self.step * (mean[:cut] - center[:cut]), mean[cut:]])
