"""One client per user of the data: the natural split, by who made the samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from coterie.data.scenario import ClientShare, Part, Partition, cut_own_tests, register_part, shuffled
from coterie.errors import DataError
from coterie.settings import setting


@register_part
@dataclass(frozen=True)
class ByUser(Part):
    """Each user's samples to one client, the last share of them (or those not `is_train`) for testing."""

    key: ClassVar[str] = "by_user"
    summary: ClassVar[str] = "one client per user of the data"

    split: Literal["official", "own"] = setting(
        "official", "where the data has a split: keep it, or take a share of each user's samples for testing"
    )

    def configure(self, partition: Partition) -> None:
        """Partition by user; the users' own groups, if the data has them, are the true groups."""
        data = partition.dataset
        if data.user is None:
            raise DataError(f"{data.name} does not say who made which sample; use another scenario, such as iid.")
        if data.group is not None:
            count = int(data.group.max()) + 1
            partition.set_groups([f"group-{g}" for g in range(count)], [() for _ in range(count)])
        partition.set_partitioner(self.shares)

    def shares(self, partition: Partition) -> list[ClientShare]:
        """One hand per user; `clients`, if asked for, takes that many users by hash."""
        data = partition.dataset
        assert data.user is not None
        order = np.argsort(data.user, kind="stable")
        starts = np.searchsorted(data.user[order], np.arange(len(data.user_names) + 1))
        least = partition.common.min_samples or 1
        users = [u for u in range(len(data.user_names)) if starts[u + 1] - starts[u] >= least]
        if partition.clients is not None:
            if partition.clients > len(users):
                raise DataError(f"{data.name} has {len(users)} users; {partition.clients} clients were asked for.")
            chosen = partition.rng.at("users").permutation(len(users))[: partition.clients]
            users = [users[i] for i in chosen.sort().values.tolist()]
        # Users without groups of their own are spread over those that another part makes.
        spread = partition.client_groups(len(users)) if users and data.group is None else []
        found = []
        for position, user in enumerate(users):
            name, rows = data.user_names[user], order[starts[user] : starts[user + 1]]
            if len(rows) < 2:
                raise DataError(
                    f"User '{name}' of {data.name} has {len(rows)} sample(s): one to train on and one to test on "
                    "are needed. Leave such users out with --set scenario.min_samples=2."
                )
            group = spread[position] if data.group is None else int(data.group[rows[0]])
            # Shuffled in any case: the last of the training rows are held out for validation.
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
