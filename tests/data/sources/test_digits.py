"""The embedded digits: scikit-learn's samples, and a split that no seed changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from coterie.data.dataset import find_preset
from coterie.data.sources.digits import Digits
from coterie.randomness import Rng


@pytest.fixture(scope="module")
def data():
    return Digits().load(None, Rng.seed(0), None)


def test_the_samples_are_scikit_learns(data):
    images, labels = load_digits(return_X_y=True)
    assert data.x.dtype == torch.uint8
    assert data.input_shape == (1, 8, 8)
    np.testing.assert_array_equal(data.x.reshape(-1, 64).numpy(), images)
    np.testing.assert_array_equal(data.y.numpy(), labels)
    assert data.num_classes == 10


def test_four_fifths_are_for_training(data):
    assert data.is_train.sum() == 1437  # floor(0.8 * 1797)
    assert (~data.is_train).sum() == 360
    # No class is missing on either side.
    assert set(data.y[torch.from_numpy(~data.is_train)].tolist()) == set(range(10))


def test_no_seed_and_no_number_of_clients_changes_it(data):
    again = Digits().load(7, Rng.seed(123), None)
    assert torch.equal(again.x, data.x)
    np.testing.assert_array_equal(again.is_train, data.is_train)


def test_scaled_inputs_are_between_minus_one_and_one(data):
    scaled = (data.x.float() - data.mean) / data.std
    assert float(scaled.min()) == -1.0
    assert float(scaled.max()) == 1.0


def test_the_two_presets_differ_in_the_scenario_only():
    rotated, plain = find_preset("rotated-digits"), find_preset("digits")
    assert (rotated.scenario, plain.scenario) == ("rotated", "iid")
    for name in ("source", "clients", "model", "model_settings", "work"):
        assert getattr(rotated, name) == getattr(plain, name)
