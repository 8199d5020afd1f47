"""FedDS and FedDSMIC: clustering by predictions on indicator samples (Li, Chen, Wang, Ding, Li 2023,
"Multi-initial-Center Federated Learning with Data Distribution Similarity-Aware Constraint").

The server holds a few samples of each class that no client has. A client is assigned to the center whose predictions
on them are nearest in Kullback-Leibler divergence (Eq. 6-7); a center is the sample-weighted mean of its members
(Eq. 17). FedDS trains by plain SGD. FedDSMIC trains by first-order MAML on two independent batches (Eq. 15-16), so
that a center is a good starting point; a client's personal model is its center after a few steps on its training data.

Deviations, with reasons. Outputs are compared at temperature 10, as in distillation: at the paper's temperature 1 a
few overconfident predictions on samples of another kind decide. The mean output over the indicator samples, which have
all classes alike, is subtracted (`label_bias`): a client with many samples of one class predicts it for everything, and
under label skew this bias outweighs the kind.

`kl="client"` is the paper's KL(client || center); the authors' code uses the reverse, `kl="center"`. `init="paper"`:
random centers and labels; `"warm"` clusters first models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from coterie.client.task import Task
from coterie.client.work import SGD, FirstOrderMAML
from coterie.engines.base import Engine
from coterie.errors import ConfigError
from coterie.methods.base import Personal, register
from coterie.methods.parts.centers import CenterMethod, CenterState, RoundUpdate
from coterie.methods.parts.guard import guarded
from coterie.methods.parts.start import find_clusters, placed, random_start, warm_start
from coterie.randomness import Rng
from coterie.settings import setting

_AT_ONCE = 4096  # (model, sample) pairs computed together


@register
@dataclass(frozen=True)
class FedDS(CenterMethod[CenterState]):
    """K centers; a client joins the one with the most similar predictions on the server's indicator samples."""

    key: ClassVar[str] = "fedds"
    paper: ClassVar[str] = "Li et al. 2023"
    needs_classes: ClassVar[bool] = True

    weighting: Literal["equal", "samples"] = setting("samples", "weight of a client in its cluster's mean")
    kl: Literal["client", "center"] = setting("client", "KL(client || center) as in the paper, or the reverse")
    temperature: float = setting(
        10.0, "temperature of the compared outputs; 1 as in the paper, which is noisy on small data", gt=0
    )
    label_bias: Literal["removed", "kept"] = setting(
        "removed", "compare outputs less their mean over the indicator samples, or as they are, as in the paper"
    )
    indicators: int = setting(10, "indicator samples per class on the server", ge=1)

    def start(self, task: Task, engine: Engine, rng: Rng) -> CenterState:
        """Cluster first models; in the paper K random centers. Refuses early if the server has no samples."""
        if engine.reserved is None:
            raise ConfigError(
                f"{type(self).__name__} compares models on the server's own samples; "
                f"hold some out with --set scenario.reserve={self.indicators}."
            )
        begin = random_start if self.init == "paper" else warm_start
        return begin(self, self.empty_state(engine), engine, rng)

    def round(self, state: CenterState, engine: Engine, cohort: Tensor, rng: Rng) -> CenterState:
        """Train, assign to the center with the nearest predictions (Eq. 6-7), average by samples (Eq. 17)."""
        state = placed(self, state, engine, cohort, rng)
        update = RoundUpdate(self, state, engine)
        centers = self.log_probabilities(state.centers, engine)  # [K, R, L]
        for chunk in self.train(state, engine, cohort, rng.at("train")):
            update.add(chunk, self.divergences(chunk.answer.params, centers, engine).argmin(1).cpu())
        return guarded(self, state, update, engine, rng)

    def assign(self, state: CenterState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer signs and joins the cluster of the nearest signatures; if they do not tell, it chooses by loss."""
        return find_clusters(self, state, engine, newcomers, rng).labels

    def log_probabilities(self, models: Tensor, engine: Engine) -> Tensor:
        """Predictions of models [c, P] for the indicator samples: [c, R, L]."""
        assert engine.reserved is not None
        x, _ = engine.reserved
        at_once = len(x) if engine.forward.is_light else max(1, _AT_ONCE // max(1, len(models)))
        pieces = x.split(max(1, at_once))
        logits = torch.cat([engine.forward(models, part) for part in pieces], dim=1)
        if self.label_bias == "removed":
            logits = logits - logits.mean(1, keepdim=True)
        return (logits / self.temperature).log_softmax(2)

    def divergences(self, params: Tensor, centers: Tensor, engine: Engine) -> Tensor:
        """Eq. 6: KL divergence of each model [c, P] from each center, summed over the indicator samples: [c, K]."""
        own = self.log_probabilities(params, engine)
        if self.kl == "client":
            shares = own.exp()  # [c, R, L]
            columns = [(shares * (own - center)).sum((1, 2)) for center in centers]
        else:
            columns = [(center.exp() * (center - own)).sum((1, 2)) for center in centers]
        return torch.stack(columns, dim=1)


@register
@dataclass(frozen=True)
class FedDSMIC(FedDS):
    """FedDS whose centers are trained to be good after adaptation to a client."""

    key: ClassVar[str] = "feddsmic"
    paper: ClassVar[str] = "Li et al. 2023"

    inner_lr: float = setting(0.01, "learning rate of the adaptation (eta); large values make all centers alike", gt=0)
    adapt_steps: int = setting(1, "adaptation steps on the client's training data", ge=1)

    def work(self, engine: Engine) -> SGD:
        """First-order MAML."""
        return FirstOrderMAML.of(super().work(engine), self.inner_lr)

    def adaptation(self, work: SGD) -> SGD:
        """The work that turns the center into the personal model."""
        return SGD(lr=self.inner_lr, steps=self.adapt_steps, batch_size=work.batch_size)

    def personal(self, state: CenterState, clients: Tensor) -> Personal:
        """The center after adaptation on the client's training data."""
        return replace(super().personal(state, clients), adapt=self.adaptation)
