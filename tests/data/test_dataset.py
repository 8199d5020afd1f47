"""The contract of a source, and the datasets that can be asked for by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from coterie.data.dataset import Dataset, find_preset, positive_clients, presets, source_class
from coterie.data.scenario import Scenario
from coterie.errors import ConfigError, DataError, UnknownName
from coterie.nets.registry import models
from coterie.settings import build


@pytest.fixture
def data():
    return Dataset("tiny", torch.zeros(4, 1, 2, 3), torch.tensor([0, 1, 2, 1]), num_classes=3)


def test_shape_and_length(data):
    assert len(data) == 4
    assert data.input_shape == (1, 2, 3)


def test_validate_gives_itself(data):
    assert data.validate() is data


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"y": torch.tensor([0, 1])}, "tiny: 4 samples but 2 labels."),
        ({"x": torch.zeros(0, 2), "y": torch.zeros(0).long()}, "tiny has no samples."),
        ({"is_train": np.array([True])}, "tiny: 4 samples but 1 entries in 'is_train'."),
        ({"user": np.zeros(5, dtype=np.int64)}, "tiny: 4 samples but 5 entries in 'user'."),
        ({"group": np.zeros(3, dtype=np.int64)}, "tiny: 4 samples but 3 entries in 'group'."),
        ({"x": torch.tensor([[0.0], [float("nan")], [1.0], [2.0]])}, "tiny: x has NaN or infinite values"),
        ({"x": torch.tensor([[0.0], [float("-inf")], [1.0], [2.0]])}, "tiny: x has NaN or infinite values"),
        ({"y": torch.tensor([0, 1, -1, 2])}, "tiny: labels must be 0 or larger. Got -1 instead."),
        ({"y": torch.tensor([0, 1, 3, 2])}, "tiny: labels must be less than the number of classes, 3. Got 3 instead."),
    ],
)
def test_unusable_samples_are_refused(data, change, sentence):
    with pytest.raises(DataError) as caught:
        replace(data, **change).validate()
    assert str(caught.value).startswith(sentence)


def test_negative_targets_of_a_regression_are_fine(data):
    targets = replace(data, y=torch.tensor([-1.0, 2.0, 0.5, -7.0]), num_classes=0)
    assert targets.validate() is targets


def test_every_preset_names_things_that_exist():
    found = presets()
    assert {"digits", "rotated-digits", "synthetic"} <= set(found)
    for name, preset in found.items():
        assert preset.name == name
        assert preset.summary
        build(source_class(preset.source), preset.source_settings, "source")
        assert Scenario.named(preset.scenario, preset.scenario_settings).name == preset.scenario
        assert preset.model in models()


def test_presets_are_sorted_and_a_copy():
    found = presets()
    assert list(found) == sorted(found)
    found.clear()
    assert presets()


def test_find_preset_by_name():
    assert find_preset("rotated-digits").scenario == "rotated"
    with pytest.raises(UnknownName) as caught:
        find_preset("rotated_digit")
    assert caught.value.nearest == "rotated-digits"


def test_find_preset_of_a_missing_file():
    with pytest.raises(DataError, match=r"There is no file none\.npz; check the path\."):
        find_preset("none.npz")
    with pytest.raises(DataError, match="There is no file folder/none"):
        find_preset("folder/none")


def test_source_by_key():
    assert source_class("digits").key == "digits"
    with pytest.raises(UnknownName, match=r"There is no source 'digit'\. Did you mean 'digits'\?"):
        source_class("digit")


def test_positive_clients():
    assert positive_clients(None, 40) == 40
    assert positive_clients(7, 40) == 7
    with pytest.raises(ConfigError, match=r"clients must be an int >= 1\. Got 0 instead\."):
        positive_clients(0, 40)
