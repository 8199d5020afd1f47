"""Local (NoFed): every client trains alone; nothing is ever sent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from coterie.client.block import Block, Models
from coterie.client.steps import OWN_MODEL, Answer, client_step
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.engines.base import Engine
from coterie.methods.base import Algorithm, ClusterState, Personal, register
from coterie.randomness import Rng


@client_step("coterie.algorithms.local:train_own")
def train_own(block: Block, models: Models | None, work: SGD) -> Answer:
    """Go on training the model that the client remembers."""
    block.memory.put(OWN_MODEL, block.train(block.memory.get(OWN_MODEL, block.initial), work))
    return Answer()


@register
@dataclass(frozen=True)
class Local(Algorithm[ClusterState]):
    """A model of its own for every client, from the common start."""

    key: ClassVar[str] = "local"
    paper: ClassVar[str] = "the lower bound that every paper compares to (NoFed, Local)"

    def start(self, task: Task, engine: Engine, rng: Rng) -> ClusterState:
        """Nothing on the server; every client is its own cluster once it has trained."""
        size = task.layout.size * engine.dtype.itemsize
        engine.require_memory(
            engine.num_clients * size, f"Local keeps a model for each of {engine.num_clients} clients:"
        )
        return ClusterState.common_start(engine, num_clusters=0)

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        """Each client of the cohort trains by itself."""
        labels = state.labels.clone()
        for chunk in engine.call(train_own, cohort, rng=rng, work=engine.task.work.at(engine.round)):
            labels[chunk.clients] = chunk.clients
        return replace(state, labels=labels)

    def personal(self, state: ClusterState, clients: Tensor) -> Personal:
        """What the client remembers."""
        return Personal()

    def assign(self, state: ClusterState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """Nobody else's model is of use to a newcomer."""
        return torch.full((len(newcomers),), -1, dtype=torch.int64)
