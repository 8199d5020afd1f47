"""Sketches against independent arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coterie.nets.sketch import Sketch, fold, sketch_of
from coterie.randomness import Rng

CPU = torch.device("cpu")


def test_a_sketch_adds_signed_entries_by_their_place_modulo_the_width():
    sketch = Sketch(7, 3, Rng.seed(0), CPU)
    signs = sketch(torch.eye(7)).sum(1)
    assert set(signs.tolist()) == {-1.0, 1.0}
    row = torch.arange(1.0, 8.0)
    expected = torch.zeros(3)
    for place in range(7):
        expected[place % 3] += signs[place] * row[place]
    assert torch.equal(sketch(row.unsqueeze(0))[0], expected)


def test_a_sketch_keeps_distances_in_expectation():
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 500)))
    true = float((rows[0] - rows[1]).square().sum())
    found = []
    for seed in range(200):
        sketched = Sketch(500, 32, Rng.seed(seed), CPU)(rows)
        assert sketched.shape == (2, 32)
        found.append(float((sketched[0] - sketched[1]).square().sum()))
    # One sketch is off by about sqrt(2 / 32) = 25 %; the mean of 200 by about 2 %.
    assert np.mean(found) == pytest.approx(true, rel=0.06)
    assert 0.15 < np.std(found) / true < 0.35


def test_a_wide_sketch_keeps_each_distance():
    rows = torch.from_numpy(np.random.default_rng(1).normal(size=(20, 20_000)))
    sketched = Sketch(20_000, 4096, Rng.seed(0), CPU)(rows)
    ratio = torch.pdist(sketched) / torch.pdist(rows)
    assert float(ratio.min()) > 0.93
    assert float(ratio.max()) < 1.07


def test_a_sketch_is_linear_and_the_same_for_the_same_seed():
    rows = torch.from_numpy(np.random.default_rng(1).normal(size=(2, 50)))
    sketch = Sketch(50, 8, Rng.seed(0), CPU)
    torch.testing.assert_close(sketch(rows[:1] + 2 * rows[1:]), sketch(rows[:1]) + 2 * sketch(rows[1:]))
    assert torch.equal(Sketch(50, 8, Rng.seed(0), CPU)(rows), sketch(rows))
    assert not torch.equal(Sketch(50, 8, Rng.seed(1), CPU)(rows), sketch(rows))


def test_short_rows_are_not_sketched():
    rows = torch.randn(3, 5)
    assert Sketch(5, 8, Rng.seed(0), CPU)(rows) is rows
    assert Sketch(5, 8, Rng.seed(0), CPU).width == 5


@pytest.mark.parametrize(("size", "width"), [(9, 4), (5000, 3), (4097, 2048), (2049, 2048), (6000, 2500), (100, 99)])
def test_folding_block_by_block_is_adding_by_place_modulo_the_width(size, width):
    rows = Rng.seed(0).normal(2, size)
    signs = torch.where(Rng.seed(1).normal(size) > 0, 1.0, -1.0).to(rows)
    expected = torch.zeros(2, width, dtype=rows.dtype).index_add(1, torch.arange(size) % width, rows * signs)
    torch.testing.assert_close(fold(rows, signs, width), expected)


def test_a_cached_sketch_is_a_new_one():
    rows = Rng.seed(3).normal(2, 70)
    one = sketch_of(70, 8, Rng.seed(0), CPU)
    assert sketch_of(70, 8, Rng.seed(0), CPU) is one
    assert torch.equal(one(rows), Sketch(70, 8, Rng.seed(0), CPU)(rows))
