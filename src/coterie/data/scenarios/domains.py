"""Clients whose samples come from different places: `multi_source`, and FedDSMIC's `grouped_labels`."""

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
    """Group g holds the samples of domain g, and is tested on that domain's test samples."""

    key: ClassVar[str] = "multi_source"
    summary: ClassVar[str] = "each group draws from a source of its own"

    def configure(self, partition: Partition) -> None:
        """One group a domain."""
        if partition.dataset.group is None:
            raise DataError(f"{partition.dataset.name} has one source only; multi_source needs data with several.")
        count = int(partition.dataset.group.max()) + 1
        partition.by_domain = True
        partition.set_groups([f"source{g}" for g in range(count)], [() for _ in range(count)])


@register_part
@dataclass(frozen=True)
class GroupedLabels(Part):
    """Classes are divided into groups, and each group's samples are shared among all clients by Dir(alpha).

    Li et al. 2023 (FedDSMIC), section 5. Train and test samples are a client's own (80/20). A client's true
    group is the one it holds most of; with a large alpha that says little.
    """

    key: ClassVar[str] = "grouped_labels"
    summary: ClassVar[str] = "groups of classes shared among clients by Dir(alpha) (FedDSMIC)"

    groups: int = setting(3, "number of groups of classes", ge=1)
    alpha: float = setting(0.5, "Dirichlet parameter over the clients: small is strong", gt=0)
    total: int | None = setting(None, "samples in all; by default all there are", ge=2)

    def configure(self, partition: Partition) -> None:
        """Partition by groups of classes."""
        if partition.has_groups:
            raise ConfigError("grouped_labels makes its own groups; it cannot be joined to another part that does.")
        if partition.dataset.num_classes < self.groups:
            raise ConfigError(
                f"The {partition.dataset.num_classes} classes of {partition.dataset.name} cannot form {self.groups} "
                "groups; use fewer with --set scenario.groups=K."
            )
        partition.set_partitioner(self.shares)

    def shares(self, partition: Partition) -> list[ClientShare]:
        """Each group of classes by its own draw."""
        if partition.clients is None:
            raise ConfigError("Say how many clients there are: --clients N.")
        rows = torch.cat(partition.pool(0))
        rows = shuffled(partition.free(rows), partition.rng.at("total"))
        if self.total is not None:
            if self.total > len(rows):
                raise DataError(
                    f"{partition.dataset.name} has {len(rows)} samples; scenario.total asks for {self.total}."
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
        # The groups are known only now; there is one view for all of them.
        partition.has_groups = True
        found = []
        for number, own in enumerate(shares):
            counts = torch.bincount(group_of_class[partition.dataset.y[own]], minlength=self.groups)
            train, test = cut_own_tests(shuffled(own, point.at("order", number)), partition.common.test)
            found.append(ClientShare(f"client-{number:03d}", int(counts.argmax()), train, test))
        return found
