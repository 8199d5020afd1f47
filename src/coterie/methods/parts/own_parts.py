"""Own parts: shared by methods whose clients send one part of the model and keep the other (a head, norm layers).

The center is a whole model, but only its shared part is ever sent and averaged; the rest keeps the initial values. A
client that has no part of its own yet, such as a newcomer, trains one on its training samples, with the shared part
frozen, whenever it is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from coterie.client.block import Block, Mixture, Models
from coterie.client.serving import Serving, serving
from coterie.client.steps import Answer, ClientStep
from coterie.client.task import Task
from coterie.client.work import SGD, Partial
from coterie.engines.base import Engine
from coterie.errors import ConfigError
from coterie.methods.base import ClusterState, Personal
from coterie.methods.fedavg import OneModel
from coterie.randomness import Rng

PartOf = Callable[[Task], Tensor]
"""Which entries of a model are the client's own, bool [P]."""

OWN_PART = "part"
"""The name under which a client remembers its part of the model."""


# ---- at the client ----


def head_of(task: Task) -> Tensor:
    """The entries of the last layer, bool [P]."""
    mine = torch.zeros(task.layout.size, dtype=torch.bool)
    mine[task.layout.head] = True
    return mine


def assembled(block: Block, shared: Tensor, mine: Tensor) -> Tensor:
    """The shared part [c, shared entries] and the client's own one as models [c, P]."""
    whole = block.initial.clone()
    mine = mine.to(whole.device)
    whole[:, ~mine] = shared
    whole[:, mine] = block.memory.get(OWN_PART, whole[:, mine])
    return whole


def keep_and_send(block: Block, models: Tensor, mine: Tensor) -> Answer:
    """Remember the client's own part of models [c, P], and send the other."""
    mine = mine.to(models.device)
    if bool(mine.any()):
        block.memory.put(OWN_PART, models[:, mine])
    return Answer(params=models[:, ~mine], samples=block.samples)


def train_part(block: Block, models: Tensor, work: SGD, part: Tensor, purpose: str = "") -> Tensor:
    """Train some entries (bool [P], whole layers) of models [c, P]; the others stay, float buffers included."""
    still = [not bool(part[slot.start]) for slot in block.task.layout.parameters]
    trained = block.train(models, Partial.of(work, still), purpose)
    return torch.where(part.to(models.device), trained, models)


def serving_with(name: str, part_of: PartOf) -> Serving:
    """How clients are served that keep this part: with the shared part that was sent, and their own one."""

    @serving(name)
    def served(block: Block, models: Models, work: SGD) -> Mixture:
        mine = part_of(block.task)
        whole = assembled(block, models.rows()[:, ~mine.to(models.table.device)], mine)
        count = int(mine.sum())
        known = block.memory.get(OWN_PART, whole.new_full((len(block), count), torch.nan))
        missing = known.isnan().any(1, keepdim=True)  # [c, 1]
        if bool(missing.any()):
            whole = torch.where(missing, train_part(block, whole, work, mine), whole)
        return Mixture.of_one(whole)

    return served


# ---- at the server ----


@dataclass(frozen=True)
class OwnParts(OneModel):
    """One model on the server; each client keeps a part of it for itself."""

    part_of: ClassVar[PartOf]
    serving: ClassVar[Serving]
    training: ClassVar[ClientStep]  # gets the shared part, and answers with `keep_and_send`

    def payload(self) -> dict[str, Tensor]:
        """What is sent to all clients besides the shared part."""
        return {}

    def start(self, task: Task, engine: Engine, rng: Rng) -> ClusterState:
        """The common model; ConfigError if nothing is left to share, or if the parts do not fit into memory."""
        count = int(type(self).part_of(task).sum())
        if count == task.layout.size:
            raise ConfigError(f"{type(self).__name__} leaves nothing to share in a network of one layer.")
        size = engine.num_clients * count * engine.dtype.itemsize
        engine.require_memory(
            size, f"{type(self).__name__} keeps a part of the model for each of {engine.num_clients} clients:"
        )
        return super().start(task, engine, rng)

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        """Clients train, the server averages the shared part."""
        shared = ~type(self).part_of(engine.task).to(engine.device)
        sent = state.centers[:, shared]
        refs = torch.zeros(len(cohort), dtype=torch.int64)
        work = self.work(engine)
        step = type(self).training
        chunks = engine.call(step, cohort, models=sent, refs=refs, payload=self.payload(), work=work, rng=rng)
        means, answered = self.averaged(chunks, torch.zeros_like(state.labels), sent, engine, weighting=self.weighting)
        center = state.centers[0].clone()
        center[shared] = means[0]
        return self.next_state(state, center, answered)

    def personal(self, state: ClusterState, clients: Tensor) -> Personal:
        """The shared part of the center with the client's own part."""
        return replace(super().personal(state, clients), serve=self.serving)
