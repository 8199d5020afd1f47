"""What a peer is given, and what it must do."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import metadata, util
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.nets.registry import build_model
from coterie.randomness import Rng


@dataclass(frozen=True)
class Round:
    """One round of FedAvg: everyone trains one epoch from the same weights, and the models are averaged."""

    model: str
    settings: dict[str, Any]
    shape: tuple[int, ...]
    num_classes: int
    start: dict[str, Tensor]  # weights and statistics by name
    data: list[tuple[Tensor, Tensor]]  # of each client, in the order in which our batches take its samples
    lr: float
    momentum: float
    batch: int
    device: str

    def module(self) -> nn.Module:
        """The network with the weights that all clients start from."""
        module = build_model(self.model, dict(self.settings), self.shape, self.num_classes, Rng.seed(0))
        module.load_state_dict(self.start, strict=False)  # counters of BatchNorm are no part of a model here
        return module.to(self.device).train()

    def train(self, module: nn.Module, x: Tensor, y: Tensor) -> None:
        """The epoch of one client, for peers that leave it to the user: slices of tensors, as in the plain loop."""
        optimizer = torch.optim.SGD(module.parameters(), lr=self.lr, momentum=self.momentum)
        for first in range(0, len(x), self.batch):
            optimizer.zero_grad(set_to_none=True)
            batch = slice(first, first + self.batch)
            functional.cross_entropy(module(x[batch]), y[batch]).backward()
            optimizer.step()


class Peer(ABC):
    """A simulator: `start` builds its objects, `round` is what is timed, `model` is what came out."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]  # that must be importable
    distribution: ClassVar[str]  # that has the version
    remark: ClassVar[str] = ""  # how it was used, for its row

    @classmethod
    def installed(cls) -> bool:
        """Whether its packages are there; nothing is imported."""
        return all(util.find_spec(package) is not None for package in cls.packages)

    @classmethod
    def version(cls) -> str:
        """Of what is installed; empty if that is not known."""
        try:
            return metadata.version(cls.distribution)
        except metadata.PackageNotFoundError:
            return ""

    @abstractmethod
    def start(self, work: Round) -> None:
        """Build what the rounds need."""

    @abstractmethod
    def round(self) -> None:
        """Train everyone from the start weights, and average."""

    @abstractmethod
    def model(self) -> dict[str, Tensor] | None:
        """Parameters of the mean model of the last round by name; None if the peer does not give them."""

    def cpu(self) -> float | None:
        """Seconds of processors spent so far; None if that cannot be told."""
        return time.process_time()

    @abstractmethod
    def stop(self) -> None:
        """End what `start` began, however far it came."""
