"""Test samples that look like a client's training samples."""

from __future__ import annotations

import pytest
import torch

from coterie.data.dataset import Dataset
from coterie.data.held_out import Pool, draw_like, fill_empty, label_counts, like_size, own_size
from coterie.errors import DataError
from coterie.randomness import Rng

RNG = Rng.seed(0)


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.fixture
def data():
    """100 samples; row r is of class r % 4, and nothing is of class 4."""
    return Dataset("small", torch.zeros(100, 1), torch.arange(100) % 4, 5)


@pytest.fixture
def numbers():
    return Dataset("numbers", torch.zeros(100, 1), torch.zeros(100), 0)


def test_labels_are_counted(data, numbers):
    assert label_counts(data, rows(0, 4, 5, 7)).tolist() == [2, 1, 0, 1, 0]
    assert label_counts(numbers, rows(0, 4, 5)).tolist() == [3]


def test_a_share_of_samples_leaves_one_for_each_side():
    assert [own_size(size, 0.2) for size in (2, 9, 10, 100)] == [1, 1, 2, 20]
    assert own_size(100, 0.29) == 29  # 28.999... in floating point
    assert own_size(3, 0.99) == 2


def test_the_size_follows_the_clients_own():
    # 0.2 of 100 is 20, beside 80 training samples.
    assert like_size(80, 0.2, 1000) == 20
    assert like_size(100, 0.5, 1000) == 100
    assert like_size(718, 0.2, 1000) == 180  # 179.4999... in floating point
    assert like_size(1, 0.2, 1000) == 10
    assert like_size(1, 0.2, 7) == 7
    assert like_size(10_000, 0.2, 1000) == 1000


def test_a_pool_is_drawn_by_class_without_repeats_while_there_are_enough(data):
    pool = Pool.of(data, torch.arange(40), RNG)
    assert pool.sizes.tolist() == [10, 10, 10, 10, 0]
    drawn = pool.draw(torch.tensor([10, 3, 0, 12, 0]), RNG)
    assert sorted(drawn[:10].tolist()) == list(range(0, 40, 4))
    assert label_counts(data, drawn).tolist() == [10, 3, 0, 12, 0]
    assert len(set(drawn.tolist())) == 10 + 3 + 10
    assert pool.draw(torch.zeros(5, dtype=torch.int64), RNG).tolist() == []


def test_draws_differ_between_clients_and_use_the_whole_pool(data):
    pool = Pool.of(data, torch.arange(40), RNG)
    drawn = torch.cat([pool.draw(torch.tensor([2, 0, 0, 0, 0]), RNG.at("client", i)) for i in range(500)])
    times = torch.bincount(drawn, minlength=40)[::4]
    assert times.sum() == 1000
    assert times.min() > 60  # 100 expected, standard deviation below 15
    assert times.max() < 140


def test_a_draw_has_the_clients_proportions(data):
    pool = Pool.of(data, torch.arange(40, 100), RNG)
    held = rows(*range(0, 24, 4), *range(1, 9, 4))  # six of class 0, two of class 1
    drawn = draw_like(data, "a", held, pool, 0.6, RNG)
    assert label_counts(data, drawn).tolist() == [9, 3, 0, 0, 0]  # 12 of 20
    assert int(drawn.min()) >= 40


def test_numbers_are_drawn_uniformly(numbers):
    pool = Pool.of(numbers, torch.arange(40, 100), RNG)
    drawn = draw_like(numbers, "a", torch.arange(40), pool, 0.5, RNG)
    assert len(set(drawn.tolist())) == 40
    assert int(drawn.min()) >= 40
    with pytest.raises(DataError, match="Client 'a' holds samples, but the test samples of its group have none"):
        draw_like(numbers, "a", torch.arange(40), Pool.of(numbers, rows(), RNG), 0.5, RNG)


def test_a_class_that_the_pool_lacks_is_refused_with_the_way_out(data):
    with pytest.raises(DataError) as caught:
        draw_like(data, "a", rows(0, 1, 2), Pool.of(data, rows(4, 5), RNG), 0.2, RNG)
    assert str(caught.value) == (
        "Client 'a' holds samples of class 2, but the test samples of its group have none; "
        "use --set scenario.tests=own or scenario.tests=kind."
    )


def test_empty_tests_are_filled_with_the_most_frequent_class_of_the_pool(data):
    train, test = [rows(0, 4, 1), rows(2, 6, 3), rows(0)], [rows(), rows(), rows(40)]
    found = fill_empty(data, train, test, rows(40, 43, 47), RNG)
    assert found[0].tolist() == [40]
    assert found[1].tolist() in ([43], [47])  # no row of class 2, of which it has most
    assert found[2].tolist() == [40]
    with pytest.raises(DataError, match="none of the 1 samples held out for testing is of their classes"):
        fill_empty(data, train, test, rows(41), RNG)
    assert fill_empty(data, [rows(2)], [rows(40)], rows(40), RNG)[0].tolist() == [40]
