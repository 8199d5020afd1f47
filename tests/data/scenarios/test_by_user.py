"""One client per user of the data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from coterie.data.dataset import Dataset
from coterie.data.scenario import Scenario
from coterie.errors import ConfigError, DataError
from coterie.randomness import Rng

SIZES = [5, 2, 10, 49]


@pytest.fixture
def data():
    """Users a, b, c, d with 5, 2, 10 and 49 samples, mixed; x tells the row."""
    user = np.repeat(np.arange(4), SIZES)[np.random.default_rng(0).permutation(sum(SIZES))]
    size = len(user)
    x = torch.arange(size, dtype=torch.float32).reshape(-1, 1, 1, 1)
    return Dataset("own", x, torch.zeros(size, dtype=torch.int64), 1, user=user, user_names=("a", "b", "c", "d"))


def partitioned(dataset, clients=None, seed=0, name="by_user", **values):
    return Scenario.named(name, {"valid": 0.0, **values}).partition(dataset, clients, Rng.seed(seed))


def test_each_user_keeps_its_own_samples(data):
    federation = partitioned(data)
    assert federation.names == ("a", "b", "c", "d")
    for client in range(4):
        rows = torch.cat([federation.train.rows(client), federation.test.rows(client)])
        assert sorted(rows.tolist()) == np.flatnonzero(data.user == client).tolist()
    assert federation.groups is None


def test_the_share_for_testing_is_at_least_one_sample(data):
    assert partitioned(data).test.sizes.tolist() == [1, 1, 2, 9]
    # 1 / 49 * 49 is 0.999... in floating point.
    assert partitioned(data, test=0.01).test.sizes.tolist() == [1, 1, 1, 1]
    assert partitioned(data, test=0.5).test.sizes.tolist() == [2, 1, 5, 24]


def test_one_sample_is_left_to_train_on(data):
    assert partitioned(data, test=0.99).train.sizes.tolist() == [1, 1, 1, 1]


def test_test_samples_are_drawn_not_taken_from_the_end(data):
    one, other = partitioned(data, seed=0, test=0.5), partitioned(data, seed=1, test=0.5)
    assert sorted(one.test.rows(3).tolist()) != sorted(other.test.rows(3).tolist())


def test_what_a_user_gets_does_not_depend_on_the_others(data):
    all_users, two = partitioned(data), partitioned(data, min_samples=10)
    assert two.names == ("c", "d")
    assert two.test.rows(0).tolist() == all_users.test.rows(2).tolist()
    assert torch.equal(two.keys, all_users.keys[2:])


def test_the_official_split_is_kept(data):
    is_train = np.zeros(len(data), dtype=bool)
    for user in range(4):
        is_train[np.flatnonzero(data.user == user)[: user + 1]] = True
    federation = partitioned(replace(data, is_train=is_train))
    assert federation.train.sizes.tolist() == [1, 2, 3, 4]
    assert federation.test.sizes.tolist() == [4, 0, 7, 45]
    assert all(is_train[federation.train.index.numpy()])
    assert not any(is_train[federation.test.index.numpy()])


def test_a_user_with_nothing_to_train_on_is_refused(data):
    with pytest.raises(
        DataError, match="User 'b' of own has no samples in the official training set; use --set scenario.split=own"
    ):
        partitioned(replace(data, is_train=data.user != 1))


def test_the_users_groups_are_the_true_groups(data):
    federation = partitioned(replace(data, group=np.array([2, 0, 1, 0])[data.user]))
    assert federation.groups.tolist() == [2, 0, 1, 0]
    assert federation.view_of(torch.arange(4)).tolist() == [2, 0, 1, 0]
    assert federation.views == ((), (), ())


def test_some_of_the_users(data):
    federation = partitioned(data, clients=2)
    assert len(federation) == 2
    assert list(federation.names) == sorted(federation.names)
    chosen = {partitioned(data, clients=2, seed=seed).names for seed in range(20)}
    assert len(chosen) > 2
    assert partitioned(data, clients=4).digest() == partitioned(data).digest()


def test_more_clients_than_users(data):
    with pytest.raises(DataError, match=r"own has 4 users, fewer than the 5 clients"):
        partitioned(data, clients=5)
    with pytest.raises(DataError, match=r"own has 2 users, fewer than the 3 clients"):
        partitioned(data, clients=3, min_samples=10)


def test_users_with_few_samples_are_left_out(data):
    assert partitioned(data, min_samples=6).names == ("c", "d")
    with pytest.raises(DataError, match="own has no clients"):
        partitioned(data, min_samples=100)


def test_a_user_with_one_sample_is_refused_with_the_way_out(data):
    lonely = replace(data, user=np.where(np.arange(len(data)) == 0, 4, data.user), user_names=(*data.user_names, "e"))
    with pytest.raises(DataError) as caught:
        partitioned(lonely)
    assert "User 'e' of own has 1 sample," in str(caught.value)
    assert "--set scenario.min_samples=2" in str(caught.value)
    assert "e" not in partitioned(lonely, min_samples=2).names


def test_data_without_users(data):
    with pytest.raises(DataError, match=r"own has no users; use another scenario, such as iid\."):
        partitioned(replace(data, user=None))


def test_groups_of_another_part_are_spread_over_the_users(data):
    federation = partitioned(data, name="rotated+by_user", groups=2)
    assert federation.groups.tolist() == [0, 0, 1, 1]
    assert federation.view.tolist() == [0, 0, 1, 1]


def test_groups_of_another_part_must_be_as_many_as_the_datas_own(data):
    grouped = replace(data, group=data.user % 2)
    with pytest.raises(ConfigError, match="parts with 4 and 2 groups"):
        partitioned(grouped, name="rotated+by_user", groups=4)
    federation = partitioned(grouped, name="rotated+by_user", groups=2)
    assert federation.groups.tolist() == [0, 1, 0, 1]
    assert len(federation.views[1]) == 1


def test_fewer_users_than_groups_of_another_part(data):
    with pytest.raises(ConfigError, match=r"clients must be at least the number of groups, 5\. Got 4 instead\."):
        partitioned(data, name="rotated+by_user", groups=5)
