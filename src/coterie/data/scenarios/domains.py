"""Groups with different samples: `multi_source`, and FedDSMIC's `grouped_labels`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from coterie.data.scenario import (
    ClientShare,
    Part,
    Partition,
    cut_own_tests,
    register_part,
    share_by_dirichlet,
    shuffled,
    top_up,
)
from coterie.errors import ConfigError, DataError
from coterie.settings import setting


@register_part
@dataclass(frozen=True)
class MultiSource(Part):
    """Group g trains and is tested on the samples of domain g."""

    key: ClassVar[str] = "multi_source"
    summary: ClassVar[str] = "each group has a source of its own"

    def configure(self, partition: Partition) -> None:
        if partition.dataset.group is None:
            raise DataError(f"{partition.dataset.name} has a single source; multi_source needs a dataset with several.")
        count = int(partition.dataset.group.max()) + 1
        partition.by_domain = True
        partition.set_groups([f"source{g}" for g in range(count)], [() for _ in range(count)])
        partition.named_groups = partition.dataset.group_names


@register_part
@dataclass(frozen=True)
class GroupedLabels(Part):
    """Classes form groups, and the samples of each group are divided among all clients by Dir(alpha).

    Li et al. 2023 (FedDSMIC), section 5. Each client splits its samples 80/20. A client's true group is the
    one it has most samples of; with a large alpha that means little.
    """

    key: ClassVar[str] = "grouped_labels"
    summary: ClassVar[str] = "groups of classes divided among clients by Dir(alpha) (FedDSMIC)"

    groups: int = setting(3, "number of groups of classes", ge=1)
    alpha: float = setting(0.5, "Dirichlet parameter over the clients: smaller is stronger", ge=1e-6, le=1e9)
    total: int | None = setting(None, "total number of samples; by default all", ge=2)

    def configure(self, partition: Partition) -> None:
        if partition.has_groups:
            raise ConfigError("grouped_labels defines its own groups; do not join it to another part that does.")
        if partition.dataset.num_classes < self.groups:
            raise ConfigError(
                f"The {partition.dataset.num_classes} classes of {partition.dataset.name} cannot form {self.groups} "
                "groups; use fewer with --set scenario.groups=K."
            )
        partition.set_partitioner(self.shares)

    def shares(self, partition: Partition) -> list[ClientShare]:
        if partition.clients is None:
            raise ConfigError("grouped_labels needs a number of clients; set it with --clients N.")
        rows = torch.cat(partition.pool(0))
        rows = shuffled(partition.free(rows), partition.rng.at("total"))
        if self.total is not None:
            if self.total > len(rows):
                raise DataError(
                    f"{partition.dataset.name} has {len(rows)} samples, fewer than "
                    f"scenario.total={self.total}; reduce it."
                )
            rows = rows[: self.total]
        classes = partition.rng.at("classes").permutation(partition.dataset.num_classes)
        group_of_class = torch.empty_like(classes)
        for group, members in enumerate(torch.tensor_split(classes, self.groups)):
            group_of_class[members] = group
        group_of_row = group_of_class[partition.dataset.y[rows]]
        kinds = [rows[group_of_row == group] for group in range(self.groups)]
        point = partition.rng.at("deal")
        shares = share_by_dirichlet(kinds, partition.clients, self.alpha, point)
        shares = top_up(shares, partition.common.min_samples or 10, point)
        # The groups are known only now; all of them share one view.
        partition.has_groups = True
        found = []
        for number, own in enumerate(shares):
            counts = torch.bincount(group_of_class[partition.dataset.y[own]], minlength=self.groups)
            train, test = cut_own_tests(shuffled(own, point.at("order", number)), partition.common.test)
            # All clients see the same samples alike: they are of one kind.
            found.append(ClientShare(f"client-{number:03d}", int(counts.argmax()), train, test, kind=0))
        return found
