"""Scenarios: names and settings, partitions by several parts, and rules for every partition."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data.dataset import Dataset
from coterie.data.scenario import ClientShare, Partition, Scenario, partition_by_settings, parts
from coterie.data.scenarios.iid import Iid
from coterie.data.scenarios.rotated import Rotated
from coterie.data.transforms import Rotate
from coterie.errors import ConfigError, DataError, UnknownName
from coterie.randomness import Rng, name_keys
from coterie.settings import fields_of


def pictures(size, *, is_train=None, user=None, group=None):
    """Images whose only pixel is their row, so that samples can be identified."""
    return Dataset(
        "pictures",
        torch.arange(size, dtype=torch.float32).reshape(-1, 1, 1, 1),
        torch.arange(size) % 3,
        num_classes=3,
        is_train=is_train,
        user=user,
        user_names=() if user is None else tuple(f"u{i}" for i in range(int(user.max()) + 1)),
        group=group,
    )


def partitioned(name, dataset, clients, seed=0, **values):
    return Scenario.named(name, values).partition(dataset, clients, Rng.seed(seed))


# ---- names and settings ----


def test_the_parts_are_found_and_each_has_help():
    found = parts()
    assert {"iid", "rotated", "by_user"} <= set(found)
    for key, part in found.items():
        assert part.key == key
        assert part.summary
        for field in fields_of(part).values():
            assert field.help


def test_a_scenario_by_name():
    scenario = Scenario.named("rotated+iid", {"groups": 2, "valid": 0.25})
    assert scenario.name == "rotated+iid"
    assert scenario.parts == (Rotated(groups=2), Iid())
    assert scenario.values == {"groups": 2, "valid": 0.25, "sense": "total", "test": 0.2, "reserve": 0}


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(UnknownName, match=r"There is no scenario 'rotate'\. Did you mean 'rotated'\?"):
        Scenario.named("rotate", {})
    with pytest.raises(
        UnknownName, match=r"There is no field of scenario rotated named 'group'\. Did you mean 'groups'"
    ):
        Scenario.named("rotated", {"group": 2})
    with pytest.raises(UnknownName):
        Scenario.named("iid", {"groups": 2})


def test_bad_values_give_one_sentence():
    with pytest.raises(ConfigError, match=r"^groups of Rotated must be an int >= 1 and <= 360\. Got 0 instead\.$"):
        Scenario.named("rotated", {"groups": 0})
    with pytest.raises(ConfigError, match=r"^valid of Common must be a number >= 0 and < 1\. Got 1\.0 instead\.$"):
        Scenario.named("iid", {"valid": 1})
    with pytest.raises(
        ConfigError, match=r"^alpha of Common must be a number >= 1e-06 and <= 1e\+09 or None\. Got 1e-320"
    ):
        Scenario.named("rotated", {"alpha": 1e-320})
    with pytest.raises(ConfigError, match=r"^clients must be an int >= 1\. Got 0 instead\.$"):
        partitioned("iid", pictures(10), 0)


# ---- the partition ----


def make_partition(clients=4, dataset=None):
    return Partition(dataset or pictures(20), clients, Rng.seed(0))


def test_groups_of_two_parts_are_zipped():
    partition = make_partition()
    partition.set_groups(["a", "b"], [(), (Rotate(90),)])
    partition.set_groups(["x", "y"], [(Rotate(10),), (Rotate(20),)])
    assert partition.group_names == ["a-x", "b-y"]
    assert partition.views == [(Rotate(10),), (Rotate(90), Rotate(20))]


def test_parts_must_have_as_many_groups():
    partition = make_partition()
    partition.set_groups(["a", "b"], [(), ()])
    with pytest.raises(ConfigError, match=r"parts with 2 and 3 groups; give them the same number"):
        partition.set_groups(["x", "y", "z"], [(), (), ()])


def test_only_one_part_partitions():
    with pytest.raises(ConfigError, match="two parts that partition the samples"):
        partitioned("shards+shards", pictures(10), 2)


def test_client_groups_are_even():
    for clients, groups in ((7, 3), (4, 4), (10, 1), (40, 4)):
        partition = make_partition(clients)
        partition.set_groups([str(g) for g in range(groups)], [()] * groups)
        sizes = Counter(partition.client_groups())
        assert set(sizes) == set(range(groups))
        assert max(sizes.values()) - min(sizes.values()) <= 1
        assert partition.client_groups() == sorted(partition.client_groups())


def test_groups_have_the_shares_of_clients_that_are_asked_for():
    found = partitioned("rotated", pictures(300), 40, groups=2, kinds=[0.95, 0.05])
    assert found.groups is not None
    assert torch.bincount(found.groups).tolist() == [38, 2]
    assert len(set(found.train.sizes.tolist())) <= 2  # clients of a small group are not larger
    scaled = partitioned("rotated", pictures(300), 10, groups=3, kinds=[3, 1, 1], samples=9, tests="own")
    assert scaled.groups is not None
    assert torch.bincount(scaled.groups).tolist() == [6, 2, 2]
    assert set((scaled.train.sizes + scaled.valid.sizes + scaled.test.sizes).tolist()) == {9}


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("rotated", {"groups": 2, "kinds": [0.5, -0.5]}, "kinds of Common must be .* > 0"),
        ("rotated", {"groups": 3, "kinds": [0.5, 0.5]}, r"a share for each of the 3 groups\. Got 2 instead"),
        ("iid", {"kinds": [0.5, 0.5]}, r"a share for each of the 1 groups\. Got 2 instead"),
        ("rotated", {"groups": 2, "kinds": [0.95, 0.05]}, "8 clients leave a group without any"),
    ],
)
def test_shares_of_clients_that_cannot_be_are_refused(name: str, values: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        partitioned(name, pictures(60), 8, **values)


def test_groups_of_users_keep_their_numbers_of_clients():
    users = np.repeat(np.arange(4), 5)
    data = pictures(20, user=users, group=np.minimum(users, 1))
    assert len(partitioned("by_user", data, None, kinds=[1, 3])) == 4
    with pytest.raises(ConfigError, match="its own numbers of clients in each group"):
        partitioned("by_user", data, None, kinds=[3, 1])


def test_fewer_clients_than_groups_are_refused():
    with pytest.raises(ConfigError, match=r"clients must be at least the number of groups, 4\. Got 3 instead\."):
        partitioned("rotated", pictures(30), 3)


def test_the_official_split_is_kept():
    flags = np.arange(20) % 4 != 0
    train, test = make_partition(dataset=pictures(20, is_train=flags)).pool(0)
    assert train.tolist() == np.flatnonzero(flags).tolist()
    assert test.tolist() == [0, 4, 8, 12, 16]


def test_without_one_a_fifth_is_for_testing():
    train, test = make_partition().pool(0)
    assert (len(train), len(test)) == (16, 4)
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(20))
    other = Partition(pictures(20), 4, Rng.seed(1)).pool(0)[1]
    assert test.tolist() != other.tolist()


def test_a_share_may_have_test_rows_of_its_own_or_share_its_groups():
    partition = make_partition(dataset=pictures(10, is_train=np.arange(10) < 8))
    partition.set_partitioner(
        lambda _: [
            ClientShare("a", 0, torch.tensor([0, 1]), 0),
            ClientShare("b", 0, torch.tensor([2]), torch.tensor([3, 4])),
            ClientShare("c", 0, torch.tensor([5]), 0),
        ]
    )
    partition.common = replace(partition.common, valid=0.5)
    federation = partition.build()
    assert [federation.test.rows(i).tolist() for i in range(3)] == [[8, 9], [3, 4], [8, 9]]
    assert len(federation.test.offsets) == 3  # two shards: the shared one is stored once
    assert [federation.train.rows(i).tolist() for i in range(3)] == [[0], [2], [5]]
    assert federation.valid.sizes.tolist() == [1, 0, 0]
    assert torch.equal(federation.keys, name_keys(["a", "b", "c"]))
    assert federation.groups is None


def test_a_share_without_training_samples_is_refused():
    partition = make_partition()
    partition.set_partitioner(lambda _: [ClientShare("a", 0, torch.tensor([], dtype=torch.int64), 0)])
    with pytest.raises(DataError, match=r"Client 'a' of pictures has no training samples; use fewer clients\."):
        partition.build()


def test_an_even_partition_takes_every_training_sample_once():
    shares = partition_by_settings(make_partition(3))
    assert [share.name for share in shares] == ["all-000", "all-001", "all-002"]
    rows = torch.cat([share.train for share in shares]).tolist()
    assert sorted(rows) == make_partition(3).pool(0)[0].tolist()


def test_more_clients_than_samples_are_refused_with_the_most_that_go():
    with pytest.raises(DataError) as caught:
        partitioned("rotated", pictures(10), 20, groups=2)
    assert str(caught.value) == (
        "10 clients cannot share 8 training samples of pictures, at least 1 each; use at most 16 clients."
    )
    assert len(partitioned("rotated", pictures(10), 16, groups=2)) == 16


# ---- rules for every partition ----


@st.composite
def partitions(draw):
    """A scenario with data that it can partition."""
    name = draw(st.sampled_from(["iid", "rotated", "by_user", "by_user+groups"]))
    seed, valid = draw(st.integers(0, 1000)), draw(st.sampled_from([0.0, 0.1, 0.5, 0.9]))
    values = {"valid": valid}
    if name.startswith("by_user"):
        sizes = draw(st.lists(st.integers(2, 12), min_size=1, max_size=6))
        user = np.repeat(np.arange(len(sizes)), sizes)
        user = user[np.random.default_rng(seed).permutation(len(user))]
        group = user % 2 if name.endswith("groups") else None
        clients = draw(st.sampled_from([None, 1, len(sizes)]))
        values["test"] = draw(st.sampled_from([0.01, 0.2, 0.9]))
        return "by_user", pictures(len(user), user=user, group=group), clients, seed, values
    size = draw(st.integers(20, 60))
    official = draw(st.booleans())
    is_train = np.random.default_rng(seed).permutation(size) < size * 0.7 if official else None
    if name == "rotated":
        values["groups"] = draw(st.integers(1, 4))
    return name, pictures(size, is_train=is_train), draw(st.integers(4, 12)), seed, values


@given(partitions())
@settings(max_examples=60, deadline=None)
def test_every_partition_is_fair(made):
    name, dataset, clients, seed, values = made
    federation = partitioned(name, dataset, clients, seed, **values)
    count = len(federation)
    assert count == (clients or len(dataset.user_names))
    groups = federation.view_of(torch.arange(count)) if federation.groups is None else federation.groups
    tested = set(federation.test.index.tolist())
    held_by_group = {}
    for client in range(count):
        rows = [*federation.train.rows(client).tolist(), *federation.valid.rows(client).tolist()]
        assert len(federation.train.rows(client)) >= 1
        assert len(federation.test.rows(client)) >= 1
        assert not tested & set(rows)  # no test sample is trained on, by anyone
        held_by_group.setdefault(int(groups[client]), []).extend(rows)
        assert len(federation.valid.rows(client)) == min(int(values["valid"] * len(rows) + 1e-9), len(rows) - 1)
    for rows in held_by_group.values():
        assert len(rows) == len(set(rows))  # each sample at most once within a group
    if name != "by_user":
        for rows in held_by_group.values():
            assert set(rows) | tested == set(range(len(dataset)))  # and none is lost


@given(partitions())
@settings(max_examples=25, deadline=None)
def test_a_partition_depends_only_on_the_seed(made):
    name, dataset, clients, seed, values = made
    torch.manual_seed(1)
    one = partitioned(name, dataset, clients, seed, **values)
    torch.manual_seed(2)
    assert partitioned(name, dataset, clients, seed, **values).digest() == one.digest()


def test_another_seed_gives_another_partition():
    assert partitioned("iid", pictures(60), 5, seed=0).digest() != partitioned("iid", pictures(60), 5, seed=1).digest()


def test_the_validation_share_is_taken_from_the_training_samples():
    none, some = (partitioned("iid", pictures(100), 4, valid=v) for v in (0.0, 0.25))
    for client in range(4):
        assert none.train.rows(client).tolist() == [
            *some.train.rows(client).tolist(),
            *some.valid.rows(client).tolist(),
        ]
    assert some.valid.sizes.tolist() == [5] * 4
    assert none.valid.sizes.tolist() == [0] * 4
    assert torch.equal(none.test.index, some.test.index)
