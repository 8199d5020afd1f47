"""IFCA: each client chooses the best of K models (Ghosh et al. 2020, "An Efficient Framework for Clustered
Federated Learning", Algorithm 1; called HypoCluster(K) in the FeSEM paper after Mansour et al. 2020).

A client downloads all K models, keeps the one with the lowest loss on its own training data, and trains it.

The paper starts from K independent random models, which may merge and lose clusters. `init="warm"` seeds the
models as k-means++ seeds centers, with losses for distances: every client trains once from one common model;
the first model is a random client's, each further one that of a client whose loss is far above its own
model's under those chosen so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from coterie.algorithm import register
from coterie.block import Answer, Block, Models, Task, client_step, take
from coterie.centers import CenterMethod, random_start
from coterie.engine import Chunk, Engine
from coterie.local import SGD
from coterie.randomness import Rng, race
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


@client_step
def losses(block: Block, models: Models, work: SGD) -> Answer:
    """Losses of several models on the training data."""
    return Answer(losses=block.losses(models))


@client_step
def train_and_loss(block: Block, models: Models, work: SGD) -> Answer:
    """Train the model that was sent, and say its loss on the training data."""
    params = block.train(models.rows(), work)
    return Answer(params=params, loss=block.losses(params), samples=block.samples)


@register
@dataclass(frozen=True)
class IFCA(CenterMethod):
    """K models, chosen by loss."""

    key: ClassVar[str] = "ifca"
    paper: ClassVar[str] = "Ghosh et al. 2020; HypoCluster(K) in the FeSEM paper"
    starts_from_common: ClassVar[bool] = False

    average_of: Literal["models", "gradients"] = setting(
        "models", "what clients answer with: a trained model, or one gradient (option I of the paper)"
    )

    def first_state(self, state: Any, engine: Engine, rng: Rng) -> Any:
        """K independent random models, nobody has chosen yet; or models seeded by losses."""
        if self.init == "paper":
            nobody = state.labels
            return replace(random_start(self, state, engine, rng), labels=nobody)
        return self._seeded_by_losses(state, engine, rng)

    def _seeded_by_losses(self, state: Any, engine: Engine, rng: Rng) -> Any:
        everyone = engine.everyone()
        common = state.common.unsqueeze(0)
        own = torch.full((engine.num_clients,), torch.inf, dtype=torch.float64)
        nobody_yet = torch.zeros(engine.num_clients, dtype=torch.int64)
        work = self.work(engine)
        for chunk in engine.call(
            train_and_loss, everyone, models=common, refs=nobody_yet, work=work, rng=rng.at("start")
        ):
            own[chunk.clients] = chunk.answer.loss.double().cpu()
        there = torch.isfinite(own).nonzero().flatten()
        if not len(there):
            return random_start(self, state, engine, rng)
        keys = engine.keys[there]
        chosen: list[Tensor] = []
        best = torch.full((engine.num_clients,), torch.inf, dtype=torch.float64)
        for k in range(self.num_clusters):
            gap = (best - own)[there].clamp_min(0).square()
            weights = torch.ones(len(there), dtype=torch.float64) if k == 0 or float(gap.sum()) == 0 else gap
            seed = there[int(race(rng.at("seed", k), keys, weights))]
            chosen.append(self._model_of(seed, state, engine, rng))
            zeros = torch.zeros(len(there), 1, dtype=torch.int64)
            for chunk in engine.call(losses, there, models=chosen[-1].unsqueeze(0), refs=zeros, rng=rng.at("look", k)):
                found = chunk.answer.losses[:, 0].double().cpu()
                best[chunk.clients] = torch.minimum(best[chunk.clients], found)
        # Nobody has a label yet: everyone chooses in the first round.
        return replace(state, centers=torch.stack(chosen))

    def _model_of(self, client: Tensor, state: Any, engine: Engine, rng: Rng) -> Tensor:
        """The model that a client trained at the start: the same call again gives the same model."""
        zero = torch.zeros(1, dtype=torch.int64)
        common = state.common.unsqueeze(0)
        call = engine.call(
            train_and_loss, client.reshape(1), models=common, refs=zero, work=self.work(engine), rng=rng.at("start")
        )
        for chunk in call:
            return chunk.answer.params[0]
        return engine.task.draw(rng.at("lost", int(client))).to(engine.device, engine.dtype)

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
            average.add(chunk.answer.params, chunk.answer.choice)
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
