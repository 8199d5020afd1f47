"""IFCA: each client chooses the best of K models (Ghosh et al. 2020, "An Efficient Framework for Clustered
Federated Learning", Algorithm 1; called HypoCluster(K) in the FeSEM paper after Mansour et al. 2020).

A client downloads all K models and trains the one with the lowest loss on its own training data.

The paper starts from K independent random models, and clusters may then collapse. `init="warm"` starts from a
clustering of signatures, as in the other methods (see `parts/start.py`). With it and the guard, a client changes its
model only if another loss is clearly lower. A center is the sample-weighted mean; the paper's is plain
(`weighting="equal"`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Models, take
from coterie.client.steps import Answer, ClientStep, clearly_lowest, client_step
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.engines.base import Chunk, Engine
from coterie.errors import ConfigError
from coterie.methods.base import register
from coterie.methods.parts.centers import CenterMethod, CenterState, RoundUpdate
from coterie.methods.parts.guard import guarded
from coterie.methods.parts.start import chosen_by_loss, random_start, warm_start
from coterie.randomness import Rng
from coterie.settings import setting


@client_step("coterie.algorithms.ifca:choose_and_train", lambda asked: forms.trained(asked) | forms.chosen(asked))
def choose_and_train(block: Block, models: Models, work: SGD, own: Tensor | None = None) -> Answer:
    """Choose the model with the lowest training loss, and train it; with `own` [c], keep that one if it is close."""
    choice = clearly_lowest(block.losses(models), own)  # [c]
    return Answer(params=block.train(take(models, choice), work), choice=choice, samples=block.samples)


@client_step(
    "coterie.algorithms.ifca:choose_and_gradient", lambda asked: {"gradient": asked.model(), "choice": asked.choice()}
)
def choose_and_gradient(block: Block, models: Models, work: SGD) -> Answer:
    """Choose the model with the lowest training loss, and send the gradient at it."""
    choice = block.losses(models).argmin(1)  # [c]
    gradient, buffers = block.gradient(take(models, choice))
    return Answer(gradient=torch.cat([gradient, buffers], dim=1), choice=choice)


@register
@dataclass(frozen=True)
class IFCA(CenterMethod[CenterState]):
    """K models; each client chooses by loss."""

    key: ClassVar[str] = "ifca"
    paper: ClassVar[str] = "Ghosh et al. 2020; HypoCluster(K) in the FeSEM paper"

    average_of: Literal["models", "gradients"] = setting(
        "models", "what clients send: a trained model, or one gradient (option I of the paper; no guard)"
    )

    def start(self, task: Task, engine: Engine, rng: Rng) -> CenterState:
        """The means of clustered first models; in the paper K random models without members."""
        state = self.empty_state(engine)
        if self.init == "warm":
            return warm_start(self, state, engine, rng)
        return replace(random_start(self, state, engine, rng), labels=state.labels)

    def round(self, state: CenterState, engine: Engine, cohort: Tensor, rng: Rng) -> CenterState:
        """Each client trains the best of K models; a center is the mean over the clients that chose it."""
        if self.average_of == "gradients":
            return self._gradient_round(state, engine, cohort, rng)
        update = RoundUpdate(self, state, engine)
        # After a good start, losses that hardly differ must not decide: the centers are alike at first.
        own = {"own": state.labels[cohort].to(engine.device)} if self.protects_start else None
        for chunk in self._call_with_all(choose_and_train, state, engine, cohort, rng.at("train"), own):
            choice = chunk.answer.choice.cpu()  # [c]
            update.add(chunk, choice, started=choice)
        return guarded(self, state, update, engine, rng)

    def _gradient_round(self, state: CenterState, engine: Engine, cohort: Tensor, rng: Rng) -> CenterState:
        """Option I of the paper: one step per center along the gradients of the clients that chose it."""
        labels = state.labels.clone()
        average = self.average(state, engine)
        sizes = torch.zeros(self.num_clusters, dtype=torch.int64, device=engine.device)
        for chunk in self._call_with_all(choose_and_gradient, state, engine, cohort, rng.at("train")):
            labels[chunk.clients] = chunk.answer.choice.cpu()
            average.add(chunk.answer.gradient, chunk.answer.choice)
            sizes += torch.bincount(chunk.answer.choice, minlength=self.num_clusters)
        means, cut = average.means(keep=state.centers), engine.task.layout.num_parameters
        share = (sizes / sizes.sum().clamp_min(1)).to(means.dtype).unsqueeze(1)  # [K, 1] of all who took part
        old = state.centers[:, :cut]
        moved = torch.where(share > 0, old - self.work(engine).lr * share * means[:, :cut], old)
        return replace(state, centers=torch.cat([moved, means[:, cut:]], dim=1), labels=labels)

    def _call_with_all(
        self,
        step: ClientStep,
        state: CenterState,
        engine: Engine,
        clients: Tensor,
        rng: Rng,
        each: dict[str, Tensor] | None = None,
    ) -> Iterator[Chunk]:
        """Send all K models to every client."""
        refs = torch.arange(self.num_clusters).expand(len(clients), -1)
        work = self.work(engine)
        return engine.call(step, clients, models=state.centers, refs=refs, each=each, work=work, rng=rng)

    def check(self, num_clients: int) -> None:
        """See `Algorithm.check`."""
        super().check(num_clients)
        if self.vote:
            raise ConfigError(
                "vote of IFCA must be false: its clients compare all centers in every round, and choose. "
                "Got True instead."
            )
        if self.admission < 1 and self.average_of == "gradients":
            raise ConfigError(
                "admission of IFCA must be 1 with average_of=gradients, where clients move freely. "
                f"Got {self.admission:g} instead."
            )

    @property
    def watches_losses(self) -> bool:
        """Clients choose anew in every round anyway."""
        return False

    def assign(self, state: CenterState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer chooses by loss, as in a round."""
        return chosen_by_loss(state, engine, newcomers, rng)
