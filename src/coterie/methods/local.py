"""Local (NoFed): every client trains alone; nothing is ever sent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Models
from coterie.client.steps import OWN_MODEL, Answer, client_step
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.engines.base import Engine
from coterie.methods.base import Algorithm, ClusterState, Personal, register
from coterie.randomness import Rng


@client_step("coterie.algorithms.local:train_own", forms.nothing)
def train_own(block: Block, models: Models | None, work: SGD) -> Answer:
    """Continue to train the model that the client remembers."""
    block.memory.put(OWN_MODEL, block.train(block.memory.get(OWN_MODEL, block.initial), work))
    return Answer()


@register
@dataclass(frozen=True)
class Local(Algorithm[ClusterState]):
    """One model per client, all from the common start."""

    key: ClassVar[str] = "local"
    paper: ClassVar[str] = "the lower bound of every paper's comparison (NoFed, Local)"

    def start(self, task: Task, engine: Engine, rng: Rng) -> ClusterState:
        """No centers; every client is its own cluster once it has trained."""
        size = engine.num_clients * task.layout.size * engine.dtype.itemsize
        engine.require_memory(size, f"Local keeps a model for each of {engine.num_clients} clients:")
        return ClusterState.common_start(engine, num_clusters=0)

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        """Each client of the cohort trains alone."""
        labels = state.labels.clone()
        for chunk in engine.call(train_own, cohort, rng=rng, work=engine.task.work.at(engine.round)):
            labels[chunk.clients] = chunk.clients
        return replace(state, labels=labels)

    def personal(self, state: ClusterState, clients: Tensor) -> Personal:
        """The model that the client remembers."""
        return Personal()

    def assign(self, state: ClusterState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer belongs to no cluster: it does not use the model of another client."""
        return torch.full((len(newcomers),), -1, dtype=torch.int64)
