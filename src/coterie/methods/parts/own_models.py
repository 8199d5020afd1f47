"""Own models: what is shared by methods whose clients keep a model of their own beside the server's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from coterie.client.serving import Serving, own_or_sent
from coterie.client.task import Task
from coterie.engines.base import Engine
from coterie.methods.base import ClusterState, Personal
from coterie.methods.fedavg import OneModel
from coterie.randomness import Rng


@dataclass(frozen=True)
class OwnModels(OneModel):
    """One model on the server, and one at every client, which is never sent."""

    serving: ClassVar[Serving] = own_or_sent

    def start(self, task: Task, engine: Engine, rng: Rng) -> ClusterState:
        """The common model; ConfigError if the clients' models would not fit into memory."""
        size = engine.num_clients * task.layout.size * engine.dtype.itemsize
        engine.require_memory(size, f"{type(self).__name__} keeps a model for each of {engine.num_clients} clients:")
        return super().start(task, engine, rng)

    def personal(self, state: ClusterState, clients: Tensor) -> Personal:
        """What the client makes of its own model and the center; one that has none uses the center."""
        return replace(super().personal(state, clients), serve=self.serving)
