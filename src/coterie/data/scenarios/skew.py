"""One group whose clients have different classes or sizes: `dirichlet`, `quantity_skew`, `shards`."""

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
    """Label skew; `sense` defines what alpha means."""

    key: ClassVar[str] = "dirichlet"
    summary: ClassVar[str] = "label skew: clients have different class proportions"

    alpha: float = setting(3.0, "Dirichlet parameter: smaller is stronger", gt=0)
    sense: Literal["total", "per_class", "shares"] = setting("total", "what alpha means; see the common settings")

    def configure(self, partition: Partition) -> None:
        partition.common = replace(partition.common, alpha=self.alpha, sense=self.sense)


@register_part
@dataclass(frozen=True)
class QuantitySkew(Part):
    """Clients of different sizes."""

    key: ClassVar[str] = "quantity_skew"
    summary: ClassVar[str] = "size skew: clients have different numbers of samples"

    quantity: float = setting(0.5, "Dirichlet parameter of the clients' shares: smaller is stronger", gt=0)

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
            rows, _ = partition.pool(group)
            members = groups.count(group)
            pieces = members * self.per_client
            if pieces > len(rows):
                raise DataError(
                    f"{len(rows)} samples of {partition.dataset.name} cannot be cut into {pieces} pieces; "
                    "use fewer clients or reduce scenario.per_client."
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
