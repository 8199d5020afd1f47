"""Synthetic data: groups label the same images differently."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coterie.data.dataset import find_preset
from coterie.data.sources import synthetic
from coterie.data.sources.synthetic import Synthetic
from coterie.errors import ConfigError
from coterie.randomness import Rng
from coterie.settings import build

SMALL = Synthetic(groups=2, samples=30, shape=(1, 4, 4), classes=3, noise=0.1)


def concepts(data):
    """Which prototype each sample shows, found out by thresholding: rows of bits."""
    return (data.x.flatten(1) > 128).to(torch.uint8)


def test_sizes_and_shapes():
    data = SMALL.load(6, Rng.seed(0), None)
    assert data.x.shape == (180, 1, 4, 4)
    assert data.x.dtype == torch.uint8
    assert data.y.dtype == torch.int64
    assert np.bincount(data.user).tolist() == [30] * 6
    assert data.user_names == tuple(f"client-{i:05d}" for i in range(6))
    assert data.is_train is None


def test_forty_clients_if_nobody_says():
    assert len(SMALL.load(None, Rng.seed(0), None).user_names) == 40


def test_a_group_is_a_property_of_the_client_and_groups_are_even():
    data = SMALL.load(6, Rng.seed(0), None)
    by_user = [set(data.group[data.user == u].tolist()) for u in range(6)]
    assert by_user == [{0}, {0}, {0}, {1}, {1}, {1}]


def test_fewer_clients_than_groups():
    data = Synthetic(groups=4, samples=5, shape=(2,)).load(3, Rng.seed(0), None)
    assert [int(data.group[data.user == u][0]) for u in range(3)] == [0, 1, 2]


def test_groups_label_the_same_images_differently():
    data = SMALL.load(20, Rng.seed(1), None)
    names = []
    for group in range(2):
        rows = torch.from_numpy(data.group == group)
        pairs = {(tuple(c), int(y)) for c, y in zip(concepts(data)[rows].tolist(), data.y[rows].tolist(), strict=True)}
        assert len(pairs) == 3  # one label per image
        names.append(dict(pairs))
    assert set(names[0]) == set(names[1])
    assert names[0] != names[1]
    assert sorted(names[0].values()) == sorted(names[1].values()) == [0, 1, 2]


def test_the_noise_stays_within_its_share_of_the_contrast():
    data = SMALL.load(4, Rng.seed(0), None)
    prototypes = 64 + 128 * concepts(data).int()
    away = (data.x.flatten(1).int() - prototypes).abs()
    assert int(away.max()) == 13  # 0.1 of 128, rounded


def test_no_noise_is_no_noise():
    data = Synthetic(samples=10, shape=(1, 3, 3), noise=0.0).load(3, Rng.seed(0), None)
    assert set(data.x.unique().tolist()) == {64, 192}


def test_the_same_seed_makes_the_same_data_and_another_does_not():
    one, again, other = (SMALL.load(4, Rng.seed(s), None) for s in (5, 5, 6))
    assert torch.equal(one.x, again.x)
    assert torch.equal(one.y, again.y)
    assert not torch.equal(one.x, other.x)


def test_sizes_spread_by_the_asked_share():
    data = Synthetic(samples=100, spread=0.5, shape=(2,)).load(200, Rng.seed(0), None)
    sizes = np.bincount(data.user)
    assert 50 <= sizes.min() < 55
    assert 145 < sizes.max() <= 150
    assert abs(sizes.mean() - 100) < 5


def test_every_client_can_train_and_test():
    data = Synthetic(samples=2, spread=0.9, shape=(2,)).load(50, Rng.seed(0), None)
    assert np.bincount(data.user).min() >= 2


def test_data_made_in_slabs_is_whole(monkeypatch):
    monkeypatch.setattr(synthetic, "_SLAB", 16 * 7)  # seven samples at a time
    data = SMALL.load(4, Rng.seed(0), None)
    assert data.x.shape == (120, 1, 4, 4)
    assert concepts(data).unique(dim=0).shape[0] == 3


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"groups": 0}, "groups of Synthetic must be an int >= 1. Got 0 instead."),
        ({"samples": 1}, "samples of Synthetic must be an int >= 2. Got 1 instead."),
        ({"spread": 1.0}, "spread of Synthetic must be a number >= 0 and < 1. Got 1.0 instead."),
        ({"noise": -0.1}, "noise of Synthetic must be a number >= 0. Got -0.1 instead."),
    ],
)
def test_bad_settings(values, sentence):
    with pytest.raises(ConfigError) as caught:
        build(Synthetic, values, "dataset")
    assert str(caught.value) == sentence


def test_no_clients_is_refused():
    with pytest.raises(ConfigError, match=r"clients must be an int >= 1\. Got 0 instead\."):
        SMALL.load(0, Rng.seed(0), None)


def test_the_preset_goes_by_user():
    assert find_preset("synthetic").scenario == "by_user"
