"""Four kinds of digits together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.data.dataset import source_class
from coterie.errors import DataError
from coterie.randomness import Rng

from .originals import CASES, IS_TRAIN

PARTS = ("mnist", "usps", "svhn", "sign")


def load(folder: Path):
    return source_class("digits-4")().load(None, Rng.seed(0), folder)


def test_the_four_in_order(tmp_path: Path):
    for name in PARTS:
        CASES[name].write_npz(tmp_path)
    data = load(tmp_path)
    assert data.x.shape == (17 * 3 + 30, 1, 28, 28)
    assert data.x.dtype == torch.uint8
    assert data.group.tolist() == [0] * 17 + [1] * 17 + [2] * 17 + [3] * 30
    assert data.y.tolist() == np.concatenate([CASES[name].arrays["y"] for name in PARTS]).tolist()
    assert data.is_train[:51].tolist() == IS_TRAIN.tolist() * 3
    np.testing.assert_array_equal(data.x[:17, 0].numpy(), CASES["mnist"].arrays["x"])
    assert data.num_classes == 10
    assert data.name == "digits-4"


def test_a_part_that_is_missing_is_named(tmp_path: Path):
    for name in PARTS[:3]:
        CASES[name].write_npz(tmp_path)
    with pytest.raises(DataError, match=f"There is no sign in {tmp_path}"):
        load(tmp_path)
