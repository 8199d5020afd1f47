"""The benchmark of CORNFLQS on made images: who holds what, sizes, and the pooled tests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coterie.data.dataset import Dataset
from coterie.data.scenario import Scenario
from coterie.data.transforms import Dilate, Erode
from coterie.errors import ConfigError, DataError
from coterie.randomness import Rng

CLIENTS, TRAIN, TEST = 8, 85, 40  # samples of each class


def digits(train: int = TRAIN, test: int = TEST) -> Dataset:
    """Classes take turns; x tells the class and the number of the sample in it."""
    count = torch.cat([torch.arange(train), torch.arange(test)]).repeat_interleave(10)
    y = torch.arange(10).repeat(train + test)
    x = torch.stack([y, count], 1).to(torch.uint8).reshape(-1, 1, 1, 2).repeat(1, 1, 2, 1)
    return Dataset("digits", x, y, 10, is_train=np.arange(len(y)) < 10 * train, mean=127.5, std=127.5)


def partitioned(data=None, clients=CLIENTS, seed=42, **values):
    scenario = Scenario.named("corn", {"per_class": 10, **values})
    return scenario.partition(data or digits(), clients, Rng.seed(seed), seed)


def held(federation, client, split="train"):
    """Numbers of the samples that a client holds, by class."""
    rows = federation.split(split).rows(client)
    y, count = federation.y[rows], federation.x[rows, 0, 0, 1]
    return [count[y == label].tolist() for label in range(10)]


def test_clients_hold_stretches_of_the_files_whatever_the_seed():
    federation = partitioned()
    for client in range(CLIENTS):
        assert held(federation, client) == [list(range(10 * client, 10 * client + 10))] * 10
    assert federation.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert not federation.repeats
    other = partitioned(seed=43)
    assert torch.equal(federation.train.index, other.train.index)
    assert federation.test.rows(0).tolist() != other.test.rows(0).tolist()


@pytest.mark.parametrize(
    ("skew", "sizes", "places"),
    [
        ("within", [1, 4, 20, 40, 1, 4, 20, 40], [0, 0, 0, 0, 1, 1, 1, 1]),
        ("between", [1, 1, 4, 4, 20, 20, 40, 40], [0, 1, 0, 1, 0, 1, 0, 1]),
    ],
)
def test_each_size_begins_again_at_the_first_sample(skew, sizes, places):
    federation = partitioned(skew=skew)
    assert federation.train.sizes.tolist() == [10 * size for size in sizes]
    for client, (size, place) in enumerate(zip(sizes, places, strict=True)):
        assert held(federation, client)[3] == list(range(size * place, size * place + size))
    assert federation.repeats == (skew == "within")
    assert torch.equal(federation.test.index, partitioned().test.index)  # tests are not skewed


def test_validation_and_test_samples_are_pooled_over_the_group():
    federation = partitioned()
    assert federation.valid.sizes.tolist() == [30] * CLIENTS  # 15 of 50, of two clients
    assert federation.test.sizes.tolist() == [70] * CLIENTS
    assert len(federation.test.offsets) == 1 + 4
    for group in range(4):
        first, second = 2 * group, 2 * group + 1
        assert torch.equal(federation.test.rows(first), federation.test.rows(second))
        assert torch.equal(federation.valid.rows(first), federation.valid.rows(second))
        both = [a + b for a, b in zip(held(federation, first, "test"), held(federation, first, "valid"), strict=True)]
        assert [sorted(rows) for rows in both] == [list(range(10 * group, 10 * group + 10))] * 10


def test_own_tests_and_own_validation_are_those_of_the_client():
    federation = partitioned(tests="own", pooled=False)
    assert federation.test.sizes.tolist() == [35] * CLIENTS
    assert federation.valid.sizes.tolist() == [15] * CLIENTS
    for client in range(CLIENTS):
        both = zip(held(federation, client, "test"), held(federation, client, "valid"), strict=True)
        assert [sorted(a + b) for a, b in both] == [list(range(5 * client, 5 * client + 5))] * 10


def test_pixels_are_between_0_and_1_and_rotated_by_quarters():
    federation = partitioned()
    for client, turns in ((0, 0), (2, 1), (4, 2), (6, 3)):
        plain = federation.x[federation.train.rows(client)].float() / 255
        assert torch.equal(federation.samples(client)[0], torch.rot90(plain, turns, (-2, -1)))


@pytest.mark.parametrize(("client", "pair"), [(0, (1, 7)), (2, (2, 7)), (4, (4, 7)), (6, (3, 8))])
def test_each_group_swaps_its_pair(client, pair):
    federation = partitioned(shift="swap")
    plain, seen = federation.y[federation.train.rows(client)], federation.samples(client)[1]
    assert set(plain[seen != plain].tolist()) == set(pair)


def test_erosion_and_dilation_by_group():
    views = partitioned(shift="erosion").views
    assert views == ((Erode(3),), (Dilate(3),), (), (Dilate(8),))


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match="multiple of 4 clients. Got 10"):
        partitioned(clients=10)
    with pytest.raises(DataError, match="too few samples of a class for 8 clients with 11 each"):
        partitioned(per_class=11)
    with pytest.raises(DataError, match="too few samples of a class for 8 clients with 0 each"):
        partitioned(per_class=5, skew="within")
    with pytest.raises(DataError, match="too few test samples"):
        partitioned(digits(test=8))
    with pytest.raises(DataError, match="corn needs square images of ten classes"):
        partitioned(Dataset("flat", torch.zeros(50, 3), torch.arange(50) % 10, 10))
