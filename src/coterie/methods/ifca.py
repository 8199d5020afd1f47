"""IFCA: each client chooses the best of K models (Ghosh et al. 2020, "An Efficient Framework for Clustered
Federated Learning", Algorithm 1; called HypoCluster(K) in the FeSEM paper after Mansour et al. 2020).

A client downloads all K models, keeps the one with the lowest loss on its own training data, and trains it.

The paper starts from K independent random models, which may merge and lose clusters. `init="warm"` starts from a
clustering of first models, as the other methods do (see `centers.py`): the server has seen those models anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from coterie.client.block import Answer, Block, Models, Task, client_step, take
from coterie.client.work import SGD
from coterie.engines.base import Chunk, Engine
from coterie.methods.base import register
from coterie.methods.parts.centers import CenterMethod
from coterie.randomness import Rng
from coterie.settings import setting


@client_step("coterie.algorithms.ifca:choose_and_train")
def choose_and_train(block: Block, models: Models, work: SGD) -> Answer:
    """Choose by loss on the training data, train the chosen model."""
    choice = block.losses(models).argmin(1)  # [c]
    return Answer(params=block.train(take(models, choice), work), choice=choice, samples=block.samples)


@client_step("coterie.algorithms.ifca:choose_and_gradient")
def choose_and_gradient(block: Block, models: Models, work: SGD) -> Answer:
    """Choose by loss on the training data, answer with the gradient at the chosen model."""
    choice = block.losses(models).argmin(1)  # [c]
    gradient, buffers = block.gradient(take(models, choice))
    return Answer(gradient=torch.cat([gradient, buffers], dim=1), choice=choice)


@client_step("coterie.algorithms.ifca:choose")
def choose(block: Block, models: Models, work: SGD) -> Answer:
    """Choose by loss on the training data, and do nothing more."""
    return Answer(choice=block.losses(models).argmin(1))


@register
@dataclass(frozen=True)
class IFCA(CenterMethod):
    """K models, chosen by loss."""

    key: ClassVar[str] = "ifca"
    paper: ClassVar[str] = "Ghosh et al. 2020; HypoCluster(K) in the FeSEM paper"
    starts_from_common: ClassVar[bool] = False

    average_of: Literal["models", "gradients"] = setting(
        "models", "what clients answer with: a trained model, or one gradient (option I of the paper; no guard)"
    )

    def first_state(self, state: Any, engine: Engine, rng: Rng) -> Any:
        """K independent random models, and nobody has chosen yet; or the means of clustered first models."""
        nobody = state.labels
        started = super().first_state(state, engine, rng)
        return started if self.init == "warm" else replace(started, labels=nobody)

    def ask(self, state: Any, engine: Engine, cohort: Tensor, rng: Rng) -> Iterator[Chunk]:
        """All K models to everyone."""
        refs = torch.arange(self.num_clusters).expand(len(cohort), -1)
        step = choose_and_train if self.average_of == "models" else choose_and_gradient
        return engine.call(step, cohort, models=state.centers, refs=refs, work=self.work(engine), rng=rng)

    def choose(self, context: Any, chunk: Chunk, state: Any, engine: Engine, rng: Rng) -> Tensor:
        """The client has chosen."""
        return chunk.answer.choice.cpu()

    def started_from(self, chunk: Chunk, state: Any) -> Tensor:
        """From the model it chose."""
        return chunk.answer.choice.cpu()

    def round(self, state: Any, engine: Engine, cohort: Tensor, rng: Rng) -> Any:
        """Everyone chooses and trains; every center becomes the mean of those who chose it."""
        if self.average_of == "models":
            return super().round(state, engine, cohort, rng)
        labels = state.labels.clone()
        average = self.average(state, engine)
        sizes = torch.zeros(self.num_clusters, dtype=torch.int64, device=engine.device)
        for chunk in self.ask(state, engine, cohort, rng.at("train")):
            labels[chunk.clients] = chunk.answer.choice.cpu()
            average.add(chunk.answer.gradient, chunk.answer.choice)
            sizes += torch.bincount(chunk.answer.choice, minlength=self.num_clusters)
        means = average.means(keep=state.centers)
        centers = self._descend(state.centers, means, sizes, engine.task, self.work(engine).lr)
        return replace(state, centers=centers, labels=labels)

    def _descend(self, centers: Tensor, means: Tensor, members: Tensor, task: Task, lr: float) -> Tensor:
        """Option I: a step along the sum of the members' gradients, divided by all who took part."""
        cut = task.layout.num_parameters
        share = (members / members.sum().clamp_min(1)).to(centers.dtype).unsqueeze(1)  # [K, 1]
        moved = torch.where(share > 0, centers[:, :cut] - lr * share * means[:, :cut], centers[:, :cut])
        return torch.cat([moved, means[:, cut:]], dim=1)

    def assign(self, state: Any, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer chooses by loss, as in a round."""
        labels = torch.full((len(newcomers),), -1, dtype=torch.int64)
        refs = torch.arange(self.num_clusters).expand(len(newcomers), -1)
        for chunk in engine.call(choose, newcomers, models=state.centers, refs=refs, rng=rng):
            labels[chunk.positions] = chunk.answer.choice.cpu()
        return labels
