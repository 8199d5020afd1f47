"""Own parts: shared by methods whose clients send one part of the model and keep the other (a head, norm layers).

A method declares what stays with the clients (`keeps`). Only the shared part is sent, averaged, evaluated and saved;
the center has no other entries. A client that has no part of its own yet, such as a newcomer, trains one on its
training samples, with the shared part frozen, whenever it is evaluated.

    @register
    @dataclass(frozen=True)
    class OwnEmbeddings(OwnParts):
        key: ClassVar[str] = "own-embeddings"
        keeps: ClassVar[PartOf] = named("embedding.*")
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Mixture, Models
from coterie.client.serving import Serving, serving
from coterie.client.steps import Answer, ClientStep, client_step
from coterie.client.task import Task
from coterie.client.work import SGD, Partial
from coterie.engines.base import Engine
from coterie.errors import ConfigError
from coterie.methods.base import ClusterState, PartOf, Personal
from coterie.methods.fedavg import OneModel
from coterie.randomness import Rng

OWN_PART = "part"
"""The name under which a client remembers its part of the model."""


# ---- at the client ----


def head_of(task: Task) -> Tensor:
    """The entries of the last layer, bool [P]."""
    mine = torch.zeros(task.layout.size, dtype=torch.bool)
    mine[task.layout.head] = True
    return mine


def named(*patterns: str) -> PartOf:
    """The entries of the parameters and float buffers whose names match one of these patterns: "head.*", "*norm*"."""

    def part(task: Task) -> Tensor:
        mine = torch.zeros(task.layout.size, dtype=torch.bool)
        for slot in task.layout.slots:
            if any(fnmatchcase(slot.name, pattern) for pattern in patterns):
                mine[slot.start : slot.stop] = True
        if not bool(mine.any()):
            names = ", ".join(slot.name for slot in task.layout.slots)
            raise ConfigError(f"No parameter is named {' or '.join(patterns)}. The network has {names}.")
        return mine

    return part


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


def training_with(name: str, keeps: PartOf, module: str) -> ClientStep:
    """The step of clients that train the whole model, keep this part, and send the rest."""

    def train_whole(block: Block, models: Models, work: SGD) -> Answer:
        mine = keeps(block.task)
        return keep_and_send(block, block.train(assembled(block, models.rows(), mine), work), mine)

    train_whole.__module__ = module  # other processes import it from there
    return client_step(name, forms.trained)(train_whole)


def serving_with(name: str, keeps: PartOf, module: str) -> Serving:
    """How clients are served that keep this part: with the shared part that was sent, and their own one."""

    def served(block: Block, models: Models, work: SGD) -> Mixture:
        mine = keeps(block.task)
        whole = assembled(block, models.rows(), mine)
        count = int(mine.sum())
        known = block.memory.get(OWN_PART, whole.new_full((len(block), count), torch.nan))
        missing = known.isnan().any(1, keepdim=True)  # [c, 1]
        if bool(missing.any()):
            whole = torch.where(missing, train_part(block, whole, work, mine), whole)
        return Mixture.of_one(whole)

    served.__module__ = module
    return serving(name)(served)


# ---- at the server ----


@dataclass(frozen=True)
class OwnParts(OneModel):
    """One model on the server; each client keeps a part of it for itself."""

    keeps: ClassVar[PartOf]
    training: ClassVar[ClientStep]  # gets the shared part, and answers with `keep_and_send`; by default trains all
    serving: ClassVar[Serving]

    def __init_subclass__(cls, **more: Any) -> None:
        """A class that declares `keeps` has a client step and a way of serving, unless it has its own."""
        super().__init_subclass__(**more)
        if "keeps" in cls.__dict__:
            home = cls.__module__
            name = f"coterie.{cls.key}" if home.startswith("coterie.") else f"{home}.{cls.key}"
            if "training" not in cls.__dict__:
                cls.training = training_with(f"{name}:train", cls.keeps, home)
            if "serving" not in cls.__dict__:
                cls.serving = serving_with(f"{name}:served", cls.keeps, home)

    def payload(self) -> dict[str, Tensor]:
        """What is sent to all clients besides the shared part."""
        return {}

    def start(self, task: Task, engine: Engine, rng: Rng) -> ClusterState:
        """The shared part; ConfigError if nothing is left to share, or if the parts do not fit into memory."""
        shared = self.travels(task).to(engine.device)
        count = int((~shared).sum())
        if count == task.layout.size:
            raise ConfigError(f"{type(self).__name__} leaves nothing to share in a network of one layer.")
        size = engine.num_clients * count * engine.dtype.itemsize
        engine.require_memory(
            size, f"{type(self).__name__} keeps a part of the model for each of {engine.num_clients} clients:"
        )
        state = super().start(task, engine, rng)
        return replace(state, common=state.common[shared], centers=state.centers[:, shared])

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        """Clients train, the server averages the shared part."""
        refs = torch.zeros(len(cohort), dtype=torch.int64)
        work = self.work(engine)
        step = type(self).training
        chunks = engine.call(step, cohort, models=state.centers, refs=refs, payload=self.payload(), work=work, rng=rng)
        one_cluster = torch.zeros_like(state.labels)
        means, answered = self.averaged(chunks, one_cluster, state.centers, engine, weighting=self.weighting)
        return self.next_state(state, means[0], answered)

    def personal(self, state: ClusterState, clients: Tensor) -> Personal:
        """The shared part of the center with the client's own part."""
        return replace(super().personal(state, clients), serve=self.serving)
