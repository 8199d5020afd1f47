"""FedDS and FedDSMIC: clustering by what models say about indicator samples (Li, Chen, Wang, Ding, Li 2023,
"Multi-initial-Center Federated Learning with Data Distribution Similarity-Aware Constraint").

The server holds a few samples of each class that no client has. A client's model goes to the center whose output
distribution on them is nearest in Kullback-Leibler divergence (Eq. 6-7); a center is the sample-weighted mean of its
members (Eq. 17). FedDS trains by plain SGD. FedDSMIC trains by first-order MAML on two independent batches (Eq.
15-16), so that a center is a good start, and a client's personal model is its center after a step or a few on its
own training data.

Deviation, with its reason: outputs are compared at a temperature of 10, as in distillation. At the paper's 1 a few
over-sure answers about samples of another kind decide, and on small data single clients flicker between clusters
(rotated digits: FedDSMIC missed the true groups on 3 of 5 seeds, at 10 on none). `temperature=1` is the paper's.

`kl="client"` is the paper's direction, KL(client || center); the authors' code takes the other one, `kl="center"`.
`init="paper"`: random centers and labels; `"warm"` clusters first models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from coterie.client.block import Task
from coterie.client.work import SGD, FirstOrderMAML
from coterie.engines.base import Engine
from coterie.errors import ConfigError
from coterie.methods.base import Personal, register
from coterie.methods.parts.centers import CenterMethod
from coterie.randomness import Rng
from coterie.settings import setting

_AT_ONCE = 4096  # samples that go through stacked models together


@register
@dataclass(frozen=True)
class FedDS(CenterMethod):
    """K centers; clients go to the one that says the most alike about the server's indicator samples."""

    key: ClassVar[str] = "fedds"
    paper: ClassVar[str] = "Li et al. 2023"

    weighting: Literal["equal", "samples"] = setting("samples", "weight of a client in its cluster's mean")
    kl: Literal["client", "center"] = setting("client", "KL(client || center) as in the paper, or the other way round")
    temperature: float = setting(
        10.0,
        "softens the outputs that are compared; 1 is the paper's, and noisy where models are sure of nothing",
        gt=0,
    )
    indicators: int = setting(10, "indicator samples of each class that the server holds", ge=1)

    def start(self, task: Task, engine: Engine, rng: Rng) -> Any:
        """Refuse early where the server has no samples."""
        if engine.reserved is None:
            raise ConfigError(
                f"{type(self).__name__} compares models on samples of the server's own; "
                f"hold some out with --set scenario.reserve={self.indicators}."
            )
        return super().start(task, engine, rng)

    def prepare(self, state: Any, engine: Engine, rng: Rng) -> Tensor:
        """What the centers say about the indicator samples: log-probabilities [K, R, L]."""
        return self._speak(state.centers, engine)

    def _speak(self, models: Tensor, engine: Engine) -> Tensor:
        """Log-probabilities of models [c, P] for the indicator samples: [c, R, L]."""
        assert engine.reserved is not None
        x, _ = engine.reserved
        at_once = len(x) if engine.forward.is_light else max(1, _AT_ONCE // max(1, len(models)))
        pieces = x.split(max(1, at_once))
        logits = torch.cat([engine.forward(models, part) for part in pieces], dim=1)
        return (logits / self.temperature).log_softmax(2)

    def distances(self, context: Any, params: Tensor, clients: Tensor, state: Any, engine: Engine) -> Tensor:
        """Eq. 6: KL divergence of output distributions, summed over the indicator samples."""
        said, centers = self._speak(params, engine), context
        columns = []
        for center in centers:
            one, other = (said, center) if self.kl == "client" else (center.expand_as(said), said)
            columns.append((one.exp() * (one - other)).sum((1, 2)))
        return torch.stack(columns, dim=1)


@register
@dataclass(frozen=True)
class FedDSMIC(FedDS):
    """FedDS whose centers are trained to be good after adapting to the client."""

    key: ClassVar[str] = "feddsmic"
    paper: ClassVar[str] = "Li et al. 2023"

    inner_lr: float = setting(0.01, "step size of the adaptation (eta); large ones make all centers alike", gt=0)
    adapt_steps: int = setting(1, "steps on the client's training data that make its personal model", ge=1)

    def work(self, engine: Engine) -> SGD:
        """First-order MAML."""
        plain = super().work(engine)
        return FirstOrderMAML.of(plain, self.inner_lr)

    def adaptation(self, work: SGD) -> SGD:
        """What a client does with its center before it uses it."""
        return SGD(lr=self.inner_lr, steps=self.adapt_steps, batch_size=work.batch_size)

    def personal(self, state: Any, clients: Tensor) -> Personal:
        """The center after adapting on the client's training data."""
        return replace(super().personal(state, clients), adapt=self.adaptation)
