"""One group whose clients have different classes or sizes: `dirichlet`, `quantity_skew`, `shards`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from coterie.data.held_out import fill_empty, label_counts
from coterie.data.scenario import ClientShare, Part, Partition, register_part, shuffled
from coterie.errors import ConfigError, DataError
from coterie.randomness import Rng
from coterie.settings import setting


@register_part
@dataclass(frozen=True)
class Dirichlet(Part):
    """Label skew; `sense` defines what alpha means."""

    key: ClassVar[str] = "dirichlet"
    summary: ClassVar[str] = "label skew: clients have different class proportions"

    alpha: float = setting(3.0, "Dirichlet parameter: smaller is stronger", ge=1e-6, le=1e9)
    sense: Literal["total", "per_class", "shares"] = setting("total", "what alpha means; see the common settings")

    def configure(self, partition: Partition) -> None:
        partition.common = replace(partition.common, alpha=self.alpha, sense=self.sense)


@register_part
@dataclass(frozen=True)
class QuantitySkew(Part):
    """Clients of different sizes."""

    key: ClassVar[str] = "quantity_skew"
    summary: ClassVar[str] = "size skew: clients have different numbers of samples"

    quantity: float = setting(0.5, "Dirichlet parameter of the clients' shares: smaller is stronger", ge=1e-6, le=1e9)

    def configure(self, partition: Partition) -> None:
        partition.common = replace(partition.common, quantity=self.quantity)


@register_part
@dataclass(frozen=True)
class Shards(Part):
    """The pathological partition of the FedAvg paper: samples sorted by class and cut, a few pieces per client."""

    key: ClassVar[str] = "shards"
    summary: ClassVar[str] = "each client has only a few classes (the pathological partition)"

    per_client: int = setting(2, "pieces per client", ge=1)

    def configure(self, partition: Partition) -> None:
        partition.set_partitioner(self.shares)

    def shares(self, partition: Partition) -> list[ClientShare]:
        if not partition.dataset.num_classes:
            raise ConfigError(
                f"shards sorts samples by class, but {partition.dataset.name} has no classes; use another scenario."
            )
        groups = partition.client_groups()
        found = []
        for group, name in enumerate(partition.group_names):
            own_tests = partition.common.tests == "own"
            rows, tests = partition.own_pool(group) if own_tests else (partition.pool(group)[0], None)
            members = groups.count(group)
            pieces = members * self.per_client
            if pieces > len(rows):
                raise DataError(
                    f"{len(rows)} samples of {partition.dataset.name} cannot be cut into {pieces} pieces; "
                    "use fewer clients or reduce scenario.per_client."
                )
            point = partition.rng.at("shards", group)
            luck = point.at("pieces").permutation(pieces).reshape(members, self.per_client)
            ordered = _by_class(partition, rows, point.at("rows"))
            train = _join_pieces(torch.tensor_split(ordered, pieces), luck, point)
            test: Sequence[Tensor | int] = [group] * members
            if tests is not None:
                cut = _cut_alike(partition, ordered, _by_class(partition, tests, point.at("tests")), pieces)
                test = fill_empty(partition.dataset, train, _join_pieces(cut, luck, point), tests, point.at("fill"))
            for number, (mine, kept) in enumerate(zip(train, test, strict=True)):
                found.append(ClientShare(f"{name}-{number:03d}", group, mine, kept))
        return found


def _join_pieces(cut: Sequence[Tensor], luck: Tensor, rng: Rng) -> list[Tensor]:
    """The rows of each client, which has the pieces of a row of `luck` [members, per_client]."""
    shares = (torch.cat([cut[piece] for piece in own]) for own in luck.tolist())
    return [shuffled(rows, rng.at("order", number)) for number, rows in enumerate(shares)]


def _by_class(partition: Partition, rows: Tensor, rng: Rng) -> Tensor:
    """The rows sorted by class, in random order within a class."""
    mixed = shuffled(rows, rng)
    return mixed[torch.argsort(partition.dataset.y[mixed], stable=True)]


def _cut_alike(partition: Partition, train: Tensor, test: Tensor, pieces: int) -> Sequence[Tensor]:
    """Cut sorted test rows where the training rows are cut: a piece has the same part of each class in both."""
    of_train, of_test = (label_counts(partition.dataset, rows) for rows in (train, test))
    known = of_train > 0  # a class that nobody trains on is not tested
    test = test[known[partition.dataset.y[test]]]
    ends = torch.tensor([len(piece) for piece in torch.tensor_split(train, pieces)]).cumsum(0)
    place = np.interp(ends, [0, *of_train[known].cumsum(0).tolist()], [0, *of_test[known].cumsum(0).tolist()])
    return torch.tensor_split(test, torch.from_numpy(place).round().long()[:-1])
