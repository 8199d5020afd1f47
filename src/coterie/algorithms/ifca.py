"""IFCA: each client chooses the best of K models (Ghosh et al. 2020, "An Efficient Framework for Clustered
Federated Learning", Algorithm 1; called HypoCluster(K) in the FeSEM paper after Mansour et al. 2020).

A client downloads all K models, keeps the one with the lowest loss on its own training data, and trains it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from coterie.algorithm import Algorithm, ClusterState, num_clusters_setting, register
from coterie.block import Answer, Block, Models, Task, client_step, take
from coterie.clustering import CenterSums
from coterie.engine import Engine
from coterie.local import SGD
from coterie.randomness import Rng
from coterie.settings import setting


@client_step
def choose_and_train(block: Block, models: Models, work: SGD) -> Answer:
    """Choose by loss on the training data, train the chosen model."""
    choice = block.losses(models).argmin(1)  # [c]
    return Answer(params=block.train(take(models, choice), work), choice=choice, samples=block.samples)


@client_step
def choose_and_gradient(block: Block, models: Models, work: SGD) -> Answer:
    """Choose by loss on the training data, answer with the gradient at the chosen model."""
    choice = block.losses(models).argmin(1)  # [c]
    gradient, buffers = block.gradient(take(models, choice))
    return Answer(params=torch.cat([gradient, buffers], dim=1), choice=choice)


@client_step
def choose(block: Block, models: Models, work: SGD) -> Answer:
    """Choose by loss on the training data, and do nothing more."""
    return Answer(choice=block.losses(models).argmin(1))


@register
@dataclass(frozen=True)
class IFCA(Algorithm):
    """K models, chosen by loss."""

    key: ClassVar[str] = "ifca"
    paper: ClassVar[str] = "Ghosh et al. 2020; HypoCluster(K) in the FeSEM paper"

    num_clusters: int = num_clusters_setting()
    average: Literal["models", "gradients"] = setting(
        "models", "what clients answer with: a trained model, or one gradient (option I of the paper)"
    )
    weighting: Literal["equal", "samples"] = setting("equal", "weight of a client in its cluster's mean of models")

    def init(self, task: Task, engine: Engine, rng: Rng) -> ClusterState:
        """K independent random models; nobody has chosen yet."""
        state: ClusterState = ClusterState.common_start(engine, self.num_clusters)
        drawn = [task.draw(rng.at("center", k)) for k in range(self.num_clusters)]
        return replace(state, centers=torch.stack(drawn).to(engine.device, engine.dtype))

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        """Everyone chooses and trains; every center becomes the mean of those who chose it."""
        labels = state.labels.clone()
        refs = torch.arange(self.num_clusters).expand(len(cohort), -1)  # all K to everyone
        work = engine.task.work.at(engine.round)
        step = choose_and_train if self.average == "models" else choose_and_gradient
        sums = CenterSums(self.num_clusters, like=state.centers)
        for chunk in engine.call(step, cohort, models=state.centers, refs=refs, work=work, rng=rng):
            choice = chunk.answer.choice
            weighted = self.weighting == "samples" and self.average == "models"
            sums.add(chunk.answer.params, choice, chunk.answer.samples if weighted else None)
            labels[chunk.clients] = choice.cpu()
        means = sums.means(keep=state.centers)
        if self.average == "gradients":
            means = self._descend(state.centers, means, sums.weights, engine.task, work.lr)
        return replace(state, centers=means, labels=labels)

    def _descend(self, centers: Tensor, means: Tensor, members: Tensor, task: Task, lr: float) -> Tensor:
        """Option I: a step along the sum of the members' gradients, divided by all who took part."""
        cut = task.layout.num_parameters
        share = (members / members.sum().clamp_min(1)).to(centers.dtype).unsqueeze(1)  # [K, 1]
        moved = torch.where(share > 0, centers[:, :cut] - lr * share * means[:, :cut], centers[:, :cut])
        return torch.cat([moved, means[:, cut:]], dim=1)

    def assign(self, state: ClusterState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer chooses by loss, as in a round."""
        labels = torch.full((len(newcomers),), -1, dtype=torch.int64)
        refs = torch.arange(self.num_clusters).expand(len(newcomers), -1)
        for chunk in engine.call(choose, newcomers, models=state.centers, refs=refs, rng=rng):
            labels[chunk.positions] = chunk.answer.choice.cpu()
        return labels
