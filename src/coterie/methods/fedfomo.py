"""FedFomo: every client mixes its own model from those of others (Zhang, Sapra, Fidler, Yeung, Alvarez 2021,
"Personalized Federated Learning with First Order Model Optimization").

The server keeps the last model of every client, and sends `others` of them to each client of a round. The client
weights them on its VALIDATION samples by their gain over its own model per distance (Eq. 4),

    w_n = max(0, (L(own) - L(n)) / ||W_n - W_own||),   normalised to sum 1,   W_own += sum of w_n (W_n - W_own)

then it trains on its training samples, and sends its model and the weights. In later rounds it receives the models it
gave the largest weights so far, except for a share epsilon drawn uniformly; epsilon falls by `epsilon_decay` per round.
In the first round there are no models yet, and clients only train.

The server holds N models, and each client downloads up to `others` models per round, as the ledger shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Models
from coterie.client.forms import Asked, Forms
from coterie.client.steps import OWN_MODEL, Answer, client_step
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.engines.base import Engine
from coterie.methods.base import Algorithm, ClusterState, Personal, register
from coterie.methods.local import train_own
from coterie.randomness import Rng, uniform
from coterie.settings import setting


def mixed(asked: Asked) -> Forms:
    """A model, and the weights of the received ones in it."""
    return forms.model(asked) | {"weights": asked.numbers(asked.count, low=0, high=1)}


@client_step("coterie.algorithms.fedfomo:mix_and_train", mixed)
def mix_and_train(block: Block, models: Models, work: SGD) -> Answer:
    """Mix the client's model with the received ones by their losses on the validation samples, then train."""
    own = block.memory.get(OWN_MODEL, block.initial)
    weights = mixing_weights(
        block.losses(own, split="valid"), block.losses(models, split="valid"), own, models.table, models.refs
    )
    mixed = own.clone()
    for place in range(weights.shape[1]):  # one at a time: all together would need m times the memory
        mixed += weights[:, place : place + 1] * (models.table[models.refs[:, place]] - own)
    trained = block.train(mixed, work)
    block.memory.put(OWN_MODEL, trained)
    return Answer(params=trained, weights=weights)


@client_step("coterie.algorithms.fedfomo:train_and_send", forms.model)
def train_and_send(block: Block, models: Models | None, work: SGD) -> Answer:
    """Continue to train the client's model, and send it."""
    train_own(block, models, work)
    return Answer(params=block.memory.get(OWN_MODEL, block.initial))


@client_step("coterie.algorithms.fedfomo:best_of", forms.chosen)
def best_of(block: Block, models: Models, work: SGD) -> Answer:
    """Which of the received models is best on the validation samples."""
    return Answer(choice=block.losses(models, split="valid").argmin(1))


def mixing_weights(own_loss: Tensor, losses: Tensor, own: Tensor, table: Tensor, refs: Tensor) -> Tensor:
    """Eq. 4: weights [c, m] of models refs [c, m], from losses [c] and [c, m]; rows sum to 1, or to 0 if none helps."""
    apart = torch.stack([(table[refs[:, m]] - own).norm(dim=1) for m in range(refs.shape[1])], dim=1)  # [c, m]
    gain = (own_loss.unsqueeze(1) - losses).to(own.dtype)
    weights = torch.where(apart > 0, gain / apart.clamp_min(1e-12), 0.0).clamp_min(0)
    total = weights.sum(1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp_min(1e-30), 0.0)


@dataclass(frozen=True)
class FomoState(ClusterState):
    """The last model of every client, and the weights that clients gave each other."""

    models: Tensor = field(default_factory=lambda: torch.empty(0))  # [N, P]
    affinity: Tensor = field(
        default_factory=lambda: torch.empty(0)
    )  # [N, N] sums of weights; a row is the client that gave them
    turn: int = 0  # rounds so far

    def with_more_clients(self, count: int) -> Self:
        """New clients have the common model and no weights."""
        grown = super().with_more_clients(count)
        models = torch.cat([self.models, self.common.repeat(count, 1).to(self.models)])
        return replace(grown, models=models, affinity=torch.nn.functional.pad(self.affinity, (0, count, 0, count)))


@register
@dataclass(frozen=True)
class FedFomo(Algorithm[FomoState]):
    """One model per client, mixed from the models of others that help it."""

    key: ClassVar[str] = "fedfomo"
    paper: ClassVar[str] = "Zhang et al. 2021"
    state_type: ClassVar[type[ClusterState]] = FomoState
    needs_validation: ClassVar[bool] = True

    others: int = setting(5, "models of other clients that a client downloads per round (M)", ge=1)
    epsilon: float = setting(0.3, "share of them that is drawn uniformly, in the first round", ge=0, le=1)
    epsilon_decay: float = setting(0.05, "decrease of epsilon per round", ge=0, le=1)

    def start(self, task: Task, engine: Engine, rng: Rng) -> FomoState:
        """All clients have the common model."""
        count, size = engine.num_clients, task.layout.size
        engine.require_memory(2 * count * size * engine.dtype.itemsize, f"FedFomo keeps the models of {count} clients:")
        models = engine.initial().repeat(count, 1)
        affinity = torch.zeros(count, count, dtype=torch.float32)
        return FomoState.common_start(engine, num_clusters=0, models=models, affinity=affinity)

    def round(self, state: FomoState, engine: Engine, cohort: Tensor, rng: Rng) -> FomoState:
        """Clients mix their models from those of the last round, train and send them."""
        refs = self.chosen(state, engine.keys, cohort, rng.at("choice"))
        work = engine.task.work.at(engine.round)
        models, affinity, labels = state.models.clone(), state.affinity.clone(), state.labels.clone()
        if refs is None:
            call = engine.call(train_and_send, cohort, work=work, rng=rng.at("train"))
        else:
            call = engine.call(mix_and_train, cohort, models=state.models, refs=refs, work=work, rng=rng.at("train"))
        for chunk in call:
            models[chunk.clients.to(engine.device)] = chunk.answer.params
            labels[chunk.clients] = chunk.clients  # every client is its own cluster
            if refs is not None:
                given = chunk.answer.weights.float().cpu()
                rows = chunk.clients.unsqueeze(1).expand_as(given)
                affinity.index_put_((rows, refs[chunk.positions]), given, accumulate=True)
        return replace(state, models=models, affinity=affinity, labels=labels, turn=state.turn + 1)

    def chosen(self, state: FomoState, keys: Tensor, cohort: Tensor, rng: Rng) -> Tensor | None:
        """The clients whose models each client of the cohort receives, [C, m]; None if there are none.

        By the sum of weights it gave them, largest first; in a share epsilon of the places at random.
        """
        seen = (state.labels >= 0).nonzero().flatten()  # [T]
        count = min(self.others, len(seen) - 1)
        if count < 1:
            return None
        epsilon = max(0.0, self.epsilon - self.epsilon_decay * max(0, state.turn - 1))
        points = rng.keys(keys[cohort])
        by_chance = uniform(points, count) < epsilon  # [C, m]
        pairs = points.unsqueeze(1) ^ keys[seen].unsqueeze(0)
        luck = uniform(pairs.flatten(), 1).reshape(pairs.shape)  # [C, T]
        mine = seen.unsqueeze(0) == cohort.unsqueeze(1)  # never its own model
        preferred = state.affinity[cohort][:, seen] + 1e-6 * luck  # ties are broken at random
        preferred, luck = preferred.masked_fill(mine, -1.0), luck.masked_fill(mine, -1.0)
        chosen = torch.empty(len(cohort), count, dtype=torch.int64)
        row = torch.arange(len(cohort))
        for place in range(count):
            pick = torch.where(by_chance[:, place], luck.argmax(1), preferred.argmax(1))
            chosen[:, place] = seen[pick]
            preferred[row, pick], luck[row, pick] = -2.0, -2.0
        return chosen

    def personal(self, state: FomoState, clients: Tensor) -> Personal:
        """The client's own model; for a newcomer, the best of those it received."""
        labels = state.labels[clients]
        table = torch.cat([state.models, state.common.unsqueeze(0)])
        return Personal(table, torch.where(labels < 0, len(state.models), labels))

    def assign(self, state: FomoState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer receives some clients' models and takes the one with the lowest loss on its validation samples."""
        seen = (state.labels >= 0).nonzero().flatten()
        labels = torch.full((len(newcomers),), -1, dtype=torch.int64)
        if not len(seen):
            return labels
        points = rng.at("shown").keys(engine.keys[newcomers])
        order = uniform(points, len(seen)).argsort(1)[:, : 4 * self.others]
        refs = seen[order]  # [n, m]
        for chunk in engine.call(best_of, newcomers, models=state.models, refs=refs, rng=rng.at("best")):
            picked = chunk.answer.choice.cpu().unsqueeze(1)
            labels[chunk.positions] = refs[chunk.positions].gather(1, picked)[:, 0]
        return labels
