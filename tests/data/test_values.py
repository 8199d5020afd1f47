"""The rules by which values become inputs and labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coterie.data.values import are_probabilities, inputs_of, scaling_in_words, standard_scale, targets_of
from coterie.errors import DataError


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("uint8", torch.uint8), ("int32", torch.int64), ("uint16", torch.int64), ("bool", torch.float32)]
    + [(kind, torch.float32) for kind in ("float16", "float64")],
)
def test_integers_stay_integers_and_bytes_are_pixels(kind, expected):
    x, mean, std = inputs_of(np.ones((3, 4), dtype=kind), "here")
    assert x.dtype == expected
    assert (mean, std) == ((127.5, 127.5) if kind == "uint8" else (0.0, 1.0))


@pytest.mark.parametrize("kind", [int, float, bool])
def test_rows_with_a_single_one_are_classes(kind):
    y = targets_of(np.eye(3, dtype=kind)[[2, 0, 1, 1]], "here")
    assert (y.y.tolist(), y.num_classes) == ([2, 0, 1, 1], 3)


def test_soft_labels_are_targets():
    soft = np.array([[0.5, 0.5], [1.0, 0.0]])
    found = targets_of(soft, "here")
    assert found.num_classes == 0
    assert are_probabilities(found.y)
    assert not are_probabilities(torch.tensor([[0.5, 0.6]]))
    assert not are_probabilities(torch.tensor([[1.5, -0.5]]))
    assert not are_probabilities(torch.tensor([0.5, 0.5]))


def test_several_ones_in_a_row_are_refused():
    with pytest.raises(DataError, match="one class per sample. Got shape .2, 2. instead, whose rows do not have"):
        targets_of(np.array([[1, 1], [0, 1]]), "here")


def test_one_column_of_classes():
    assert targets_of(np.array([[1], [0]]), "here").y.tolist() == [1, 0]


def test_pictures_of_floats_have_one_scale():
    x = torch.tensor([0.0, 2.0, 4.0, 6.0]).reshape(2, 1, 1, 2)
    mean, std = standard_scale(x)
    assert (mean, std) == (3.0, pytest.approx(5**0.5))


@pytest.mark.parametrize(
    ("dtype", "mean", "std", "words"),
    [
        (torch.uint8, 0.0, 255.0, "uint8 pixels: x / 255"),
        (torch.float32, 2.0, 4.0, "float32 numbers: (x - 2) / 4"),
        (torch.int64, 0.0, 1.0, "integers, not scaled"),
        (
            torch.float32,
            (1.0, 2.0),
            (1.0, 1.0),
            "float32 numbers: (x - mean) / deviation, by feature over the training",
        ),
    ],
)
def test_scaling_in_words(dtype, mean, std, words):
    assert scaling_in_words(dtype, mean, std).startswith(words)
