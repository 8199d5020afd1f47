"""Label skew, quantity skew, the pathological split."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from coterie.data.dataset import Dataset
from coterie.data.scenario import Scenario, dirichlet, round_shares
from coterie.errors import ConfigError, DataError
from coterie.randomness import Rng


def digits(size: int = 4000, classes: int = 10, **more) -> Dataset:
    y = torch.arange(size) % classes
    return Dataset("digits", torch.arange(size).float().reshape(-1, 1), y, classes, **more)


def partitioned(name, clients=20, seed=0, dataset=None, **values):
    return Scenario.named(name, {"valid": 0.0, **values}).partition(dataset or digits(), clients, Rng.seed(seed))


def classes_that_hold(counts: torch.Tensor, share: float) -> torch.Tensor:
    """How many classes hold that share of each client's samples."""
    ordered = counts.double().sort(1, descending=True).values
    ordered = ordered.cumsum(1) / counts.sum(1, keepdim=True)
    return (ordered < share).sum(1) + 1


@pytest.mark.parametrize("seed", range(3))
def test_alpha_three_is_three_to_five_classes(seed):
    """MD-ICFL, section 4: with alpha = 3, three to five classes hold most of a client's data."""
    counts = partitioned("dirichlet", 48, seed, samples=1000, alpha=3.0).label_counts()
    assert counts.sum(1).tolist() == [1000] * 48
    most = classes_that_hold(counts, 0.9).double()
    assert 3 <= most.mean() <= 5
    nearly_uniform = partitioned("dirichlet", 48, seed, samples=1000, alpha=100.0).label_counts()
    assert classes_that_hold(nearly_uniform, 0.9).min() >= 7


def test_alpha_per_class_is_alpha_times_the_classes_in_total():
    total = partitioned("dirichlet", samples=500, alpha=30.0).label_counts()
    each = partitioned("dirichlet", samples=500, alpha=3.0, sense="per_class").label_counts()
    assert torch.equal(total, each)


def test_shares_hand_out_every_sample_once():
    federation = partitioned("dirichlet", alpha=0.5, sense="shares")
    assert not federation.repeats
    rows = federation.train.index.tolist()
    assert len(rows) == len(set(rows)) == 3200
    counts = federation.label_counts()
    assert classes_that_hold(counts, 0.8).double().mean() < 6


def test_independent_draws_say_that_samples_may_repeat():
    assert partitioned("dirichlet", samples=1000).repeats
    assert partitioned("iid", samples=1000).repeats
    assert not partitioned("iid", samples=100).repeats
    small = partitioned("dirichlet", 4, dataset=digits(50), samples=200, alpha=1.0)
    assert small.train.sizes.tolist() == [200] * 4  # more than there are: some come twice


def test_quantity_skew():
    federation = partitioned("quantity_skew", quantity=0.3, min_samples=7)
    sizes = federation.train.sizes
    assert sizes.sum() == 3200
    assert sizes.min() >= 7
    assert sizes.max() > 4 * sizes.double().mean()
    assert len(set(federation.train.index.tolist())) == 3200


def test_label_vectors_and_sizes_are_skewed_together():
    federation = partitioned("dirichlet", alpha=1.0, quantity=0.3, min_samples=7)
    sizes, counts = federation.train.sizes, federation.label_counts()
    assert sizes.sum() == 20 * (3200 // 20)
    assert sizes.min() >= 7
    assert sizes.max() > 4 * sizes.double().mean()
    largest = counts[sizes.argmax()].double() / sizes.max()
    assert largest.max() > 0.3  # far from a tenth of each class
    alone = partitioned("quantity_skew", quantity=0.3, min_samples=7).train.sizes
    assert torch.equal(sizes.argsort(descending=True)[:3], alone.argsort(descending=True)[:3])  # the same draw


@pytest.mark.parametrize("samples", [50, 500])
def test_with_skewed_sizes_samples_is_their_mean(samples: int):
    federation = partitioned("quantity_skew", samples=samples, quantity=1.0)
    assert federation.train.sizes.sum() == 20 * samples
    assert federation.repeats == (20 * samples > 3200)
    assert federation.train.sizes.max() > 2 * samples


def test_shards_hold_few_classes():
    federation = partitioned("shards", 40, per_client=2)
    assert (federation.label_counts() > 0).sum(1).max() <= 4
    assert (federation.label_counts() > 0).sum(1).double().mean() <= 3
    assert len(set(federation.train.index.tolist())) == len(federation.train.index) == 3200


def test_own_tests_are_the_clients_own():
    federation = partitioned("dirichlet", alpha=0.5, sense="shares", tests="own")
    sizes = federation.test.sizes
    whole = federation.train.sizes + sizes
    assert whole.min() < 50 < 300 < whole.max()
    assert ((sizes - 0.2 * whole).abs() < 10).all()  # every class is rounded by itself
    assert not set(federation.train.index.tolist()) & set(federation.test.index.tolist())
    assert len(federation.train.index) + len(federation.test.index) == 4000


def test_independent_draws_keep_their_label_vector_in_tests_of_their_own():
    federation = partitioned("dirichlet", samples=1000, tests="own")
    train, test = federation.label_counts("train"), federation.label_counts("test")
    assert train.sum(1).tolist() == [800] * 20
    assert test.sum(1).tolist() == [200] * 20
    assert ((train / 4 - test).abs() < 2).all()
    assert federation.repeats
    assert not set(federation.train.index.tolist()) & set(federation.test.index.tolist())


def test_a_client_of_shards_is_tested_on_its_own_classes():
    federation = partitioned("shards", 40, tests="own")
    train, test = federation.label_counts("train"), federation.label_counts("test")
    assert len(set(federation.train.index.tolist() + federation.test.index.tolist())) == 4000
    assert not ((test > 0) & (train == 0)).any()
    assert ((train / 4 - test).abs() < 5).all()  # 20 samples of each, 80 of which are drawn by the seed


def test_clients_too_small_for_test_samples_of_their_own_share_one_of_their_class():
    federation = partitioned("shards", 200, dataset=digits(250), tests="own", per_client=1)
    assert federation.train.sizes.tolist() == [1] * 200
    assert federation.test.sizes.min() == 1
    assert torch.equal(federation.label_counts("test") > 0, federation.label_counts("train") > 0)


def test_impossible_settings_are_refused():
    with pytest.raises(
        ConfigError, match=r"alpha of Dirichlet must be a number >= 1e-06 and <= 1e\+09. Got -1.0 instead"
    ):
        partitioned("dirichlet", alpha=-1.0)
    rare = replace(digits(), y=torch.where(torch.arange(4000) == 7, 10, torch.arange(4000) % 10), num_classes=11)
    with pytest.raises(ConfigError, match=r"class 10 of digits are too few .* use scenario\.tests=kind"):
        partitioned("dirichlet", dataset=rare, tests="own")
    with pytest.raises(DataError, match=r"4 samples of digits leave none for testing; use a larger scenario\.test"):
        partitioned("iid", 2, dataset=digits(4), tests="own")
    with pytest.raises(DataError, match="20 clients cannot have 11 samples each of 200"):
        partitioned("quantity_skew", samples=10, min_samples=11)
    with pytest.raises(DataError, match="cannot be cut into 6000 pieces"):
        partitioned("shards", 3000)
    with pytest.raises(DataError, match="5000 clients cannot share 3200 training samples of digits"):
        partitioned("iid", 5000)
    with pytest.raises(DataError, match=r"20 clients cannot share 3200 training samples of digits, at least 999 each"):
        partitioned("quantity_skew", min_samples=999)
    with pytest.raises(ConfigError, match="needs a number of clients; set it with --clients N"):
        partitioned("iid", None)
    regression = Dataset("r", torch.zeros(50, 1), torch.zeros(50), 0)
    with pytest.raises(ConfigError, match="alpha skews classes, but r has none"):
        partitioned("dirichlet", 3, dataset=regression)
    with pytest.raises(ConfigError, match="shards sorts samples by class"):
        partitioned("shards", 3, dataset=regression)


def test_dirichlet_has_its_moments():
    draws = torch.stack([dirichlet(Rng.seed(i), torch.tensor([1.0, 2.0, 0.0, 1.0])) for i in range(4000)])
    assert torch.allclose(draws.sum(1), torch.ones(4000, dtype=torch.float64))
    np.testing.assert_allclose(draws.mean(0), [0.25, 0.5, 0.0, 0.25], atol=0.01)
    np.testing.assert_allclose(draws.var(0), [0.0375, 0.05, 0.0, 0.0375], atol=0.004)


def test_shares_are_rounded_to_the_whole():
    assert round_shares(torch.tensor([1 / 3, 1 / 3, 1 / 3]), 100).sum() == 100
    assert round_shares(torch.tensor([1.0, 0.0]), 7).tolist() == [7, 0]
