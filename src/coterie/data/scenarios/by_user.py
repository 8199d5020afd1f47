"""One client per user of the dataset: the natural partition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from coterie.data.scenario import ClientShare, Part, Partition, cut_own_tests, register_part, shuffled
from coterie.errors import DataError
from coterie.settings import counted, setting


@register_part
@dataclass(frozen=True)
class ByUser(Part):
    """Each user's samples go to one client; some of them, or those not `is_train`, are for testing."""

    key: ClassVar[str] = "by_user"
    summary: ClassVar[str] = "one client per user of the dataset"

    split: Literal["official", "own"] = setting(
        "official", "keep the dataset's official split, if any, or hold out a share of each user's samples"
    )

    def configure(self, partition: Partition) -> None:
        """The users' groups, if the dataset has them, are the true groups."""
        data = partition.dataset
        if data.user is None:
            raise DataError(f"{data.name} has no users; use another scenario, such as iid.")
        if data.group is not None:
            count = int(data.group.max()) + 1
            partition.set_groups([f"group-{g}" for g in range(count)], [() for _ in range(count)])
            partition.named_groups = data.group_names
        partition.set_partitioner(self.shares)

    def shares(self, partition: Partition) -> list[ClientShare]:
        """One share per user; with `clients` set, that many users are drawn."""
        data = partition.dataset
        assert data.user is not None
        order = np.argsort(data.user, kind="stable")
        starts = np.searchsorted(data.user[order], np.arange(len(data.user_names) + 1))
        least = partition.common.min_samples or 1
        users = [u for u in range(len(data.user_names)) if starts[u + 1] - starts[u] >= least]
        if partition.clients is not None:
            if partition.clients > len(users):
                raise DataError(
                    f"{data.name} has {len(users)} users, fewer than the {partition.clients} clients; use fewer."
                )
            chosen = partition.rng.at("users").permutation(len(users))[: partition.clients]
            users = [users[i] for i in chosen.sort().values.tolist()]
        # Users without groups of their own are spread over the groups of another part.
        spread = partition.client_groups(len(users)) if users and data.group is None else []
        found = []
        for position, user in enumerate(users):
            name, rows = data.user_names[user], order[starts[user] : starts[user + 1]]
            if len(rows) < 2:
                raise DataError(
                    f"User '{name}' of {data.name} has {counted(len(rows), 'sample')}, but training and testing need "
                    "one each; leave such users out with --set scenario.min_samples=2."
                )
            group = spread[position] if data.group is None else int(data.group[rows[0]])
            # Always shuffled: the last training rows are held out for validation.
            mixed = shuffled(partition.free(torch.from_numpy(rows)), partition.rng.at("split", name))
            if data.is_train is None or self.split == "own":
                train, test = cut_own_tests(mixed, partition.common.test)
            else:
                flags = torch.from_numpy(data.is_train)[mixed]
                train, test = mixed[flags], mixed[~flags]
                if not len(train):
                    raise DataError(
                        f"User '{name}' of {data.name} has no samples in the official training set; "
                        "use --set scenario.split=own."
                    )
            found.append(ClientShare(name, group, train, test))
        return found
