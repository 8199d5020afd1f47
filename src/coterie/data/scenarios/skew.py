"""Clients of one kind that hold different amounts of different classes: `dirichlet`, `quantity_skew`, `shards`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from coterie.data.scenario import ClientShare, Part, Partition, register_part, shuffled
from coterie.errors import ConfigError, DataError
from coterie.settings import setting


@register_part
@dataclass(frozen=True)
class Dirichlet(Part):
    """Label skew; what alpha means is said by `sense`."""

    key: ClassVar[str] = "dirichlet"
    summary: ClassVar[str] = "label skew: clients hold some classes more than others"

    alpha: float = setting(3.0, "Dirichlet parameter: small is strong", gt=0)
    sense: Literal["total", "per_class", "shares"] = setting("total", "what alpha means; see the common settings")

    def configure(self, partition: Partition) -> None:
        """Set the skew."""
        partition.common = replace(partition.common, alpha=self.alpha, sense=self.sense)


@register_part
@dataclass(frozen=True)
class QuantitySkew(Part):
    """Clients of very different sizes."""

    key: ClassVar[str] = "quantity_skew"
    summary: ClassVar[str] = "some clients hold many samples, some few"

    quantity: float = setting(0.5, "Dirichlet parameter of the clients' shares: small is strong", gt=0)

    def configure(self, partition: Partition) -> None:
        """Set the skew."""
        if partition.common.samples is not None:
            raise ConfigError("quantity_skew and scenario.samples contradict each other; keep one of them.")
        partition.common = replace(partition.common, quantity=self.quantity)


@register_part
@dataclass(frozen=True)
class Shards(Part):
    """The pathological split of the FedAvg paper: samples sorted by class, cut, and a few pieces to each client."""

    key: ClassVar[str] = "shards"
    summary: ClassVar[str] = "each client holds only a few classes (the pathological split)"

    per_client: int = setting(2, "pieces that each client gets", ge=1)

    def configure(self, partition: Partition) -> None:
        """Partition pieces."""
        partition.set_partitioner(self.shares)

    def shares(self, partition: Partition) -> list[ClientShare]:
        """Pieces within each group."""
        if not partition.dataset.num_classes:
            raise ConfigError(f"shards sorts by class; {partition.dataset.name} has none.")
        groups = partition.client_groups()
        found = []
        for group, name in enumerate(partition.group_names):
            rows, _ = partition.pool(group)
            members = groups.count(group)
            pieces = members * self.per_client
            if pieces > len(rows):
                raise DataError(
                    f"{len(rows)} samples of {partition.dataset.name} cannot be cut into {pieces} pieces; "
                    "use fewer clients or a smaller scenario.per_client."
                )
            point = partition.rng.at("shards", group)
            mixed = shuffled(rows, point.at("rows"))
            ordered = mixed[torch.argsort(partition.dataset.y[mixed], stable=True)]
            cut = torch.tensor_split(ordered, pieces)
            luck = point.at("pieces").permutation(pieces).reshape(members, self.per_client)
            for number, mine in enumerate(luck.tolist()):
                own = torch.cat([cut[piece] for piece in mine])
                found.append(
                    ClientShare(f"{name}-{number:03d}", group, shuffled(own, point.at("order", number)), group)
                )
        return found
