"""Samples in a file: what comes back, and that a process which writes to them changes nothing for the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.data.dataset import Dataset
from coterie.data.shared import map_samples, save_samples


def dataset(**more):
    x = torch.arange(24, dtype=torch.uint8).reshape(6, 1, 2, 2)
    return Dataset("own", x, torch.tensor([0, 1, 2, 0, 1, 2]), num_classes=3, mean=0.5, std=2.0, **more)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"is_train": np.array([True, False] * 3), "user": np.arange(6) % 2, "user_names": ("a", "b")},
        {"group": np.arange(6) % 2, "group_names": ("north", "south"), "class_names": ("a", "b", "c")},
    ],
)
def test_every_field_comes_back(tmp_path: Path, more):
    before = dataset(**more)
    save_samples(tmp_path / "samples.safetensors", before)
    after = map_samples(tmp_path / "samples.safetensors")
    assert torch.equal(after.x, before.x)
    assert torch.equal(after.y, before.y)
    for name in ("is_train", "user", "group"):
        one, other = getattr(before, name), getattr(after, name)
        assert (one is None and other is None) or (one.dtype == other.dtype and np.array_equal(one, other))
    for name in ("name", "num_classes", "user_names", "group_names", "class_names", "mean", "std"):
        assert getattr(after, name) == getattr(before, name)
    assert [path.name for path in tmp_path.iterdir()] == ["samples.safetensors"]


def test_what_one_writes_no_other_sees(tmp_path: Path):
    path = tmp_path / "samples.safetensors"
    save_samples(path, dataset())
    one, other = map_samples(path), map_samples(path)
    one.x.zero_()
    assert torch.equal(other.x, dataset().x)
    assert torch.equal(map_samples(path).x, dataset().x)
