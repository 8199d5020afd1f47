"""Rules for every registered part of a scenario, alone and joined to others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data.dataset import Dataset
from coterie.data.scenario import Scenario, parts
from coterie.randomness import Rng

JOINED = ["rotated+label_swapped", "rotated+dirichlet", "noisy+quantity_skew", "rotated+shards", "blurred+drift"]
NAMES = sorted(parts()) + JOINED
NEEDS_KINDS = {"drift": "rotated+drift"}


def pictures(size: int, seed: int) -> Dataset:
    """Colour images with classes, users, two sources and an official split."""
    rng = np.random.default_rng(seed)
    return Dataset(
        "pictures",
        torch.from_numpy(rng.integers(0, 256, (size, 3, 4, 4), dtype=np.uint8)),
        torch.from_numpy(rng.permutation(np.arange(size) % 10)),
        10,
        is_train=np.arange(size) % 5 != 0,
        user=np.arange(size) // 5 % 12,
        user_names=tuple(f"user-{i}" for i in range(12)),
        group=np.arange(size) // 5 % 12 % 2,
        mean=127.5,
        std=127.5,
    ).validate()


@st.composite
def settings_of(draw):
    """Common settings that any part can have."""
    values = {"valid": draw(st.sampled_from([0.0, 0.1, 0.5]))}
    values |= draw(st.sampled_from([{}, {"reserve": 2}, {"alpha": 0.5, "sense": "shares"}, {"alpha": 2.0}]))
    values |= draw(st.sampled_from([{}, {"min_samples": 4}]))
    return values


@pytest.mark.parametrize("name", NAMES)
@given(values=settings_of(), seed=st.integers(0, 10**6))
@settings(max_examples=12, deadline=None)
def test_every_partition_follows_the_rules(name, values, seed):
    data = pictures(600, seed)
    federation = Scenario.named(NEEDS_KINDS.get(name, name), values).partition(data, 12, Rng.seed(seed))
    count = len(federation)
    assert count == 12
    tested = set(federation.test.index.tolist())
    reserved = set() if federation.reserved is None else set(federation.reserved.tolist())
    by_kind: dict[int, list[int]] = {}
    view = federation.view_of(torch.arange(count))
    for client in range(count):
        held = [*federation.train.rows(client).tolist(), *federation.valid.rows(client).tolist()]
        tests = federation.test.rows(client).tolist()
        assert len(federation.train.rows(client)) >= 1
        assert len(tests) >= 1
        assert len(held) + len(tests) >= values.get("min_samples", 2)
        assert not tested & set(held)  # no client trains on a test sample
        assert not reserved & {*held, *tests}
        by_kind.setdefault(int(view[client]), []).extend(held)
    if not federation.repeats:
        for held in by_kind.values():
            assert len(held) == len(set(held))  # each sample at most once per view
    assert federation.label_counts().sum(1).tolist() == federation.train.sizes.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_the_digest_changes_when_and_only_when_the_data_does(name):
    scenario = Scenario.named(NEEDS_KINDS.get(name, name), {"reserve": 1})
    data = pictures(600, 0)
    one = scenario.partition(data, 12, Rng.seed(0)).digest()
    assert scenario.partition(pictures(600, 0), 12, Rng.seed(0)).digest() == one
    assert scenario.partition(data, 12, Rng.seed(1)).digest() != one
    x = data.x.clone()
    x[17, 0, 0, 0] += 1
    assert scenario.partition(replace(data, x=x), 12, Rng.seed(0)).digest() != one
    y = data.y.clone()
    y[17] = (y[17] + 1) % 10
    assert scenario.partition(replace(data, y=y), 12, Rng.seed(0)).digest() != one


@pytest.mark.parametrize("name", NAMES)
def test_what_says_that_samples_repeat_is_the_exception(name):
    """Only independent draws may repeat samples; by default that is `dirichlet` in the paper's sense."""
    federation = Scenario.named(NEEDS_KINDS.get(name, name), {}).partition(pictures(600, 0), 12, Rng.seed(0))
    assert federation.repeats == ("dirichlet" in name)
