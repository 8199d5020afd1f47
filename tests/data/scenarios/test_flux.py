"""The benchmark of FLUX: the draws of its generator, and what clients then see, on made images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.random import RandomState

from coterie.data.dataset import Dataset
from coterie.data.scenario import Scenario
from coterie.data.scenarios.flux import angles, patterns, permutations
from coterie.data.transforms import Turn
from coterie.errors import ConfigError, DataError
from coterie.randomness import Rng

FOLDS = range(42, 47)
CLIENTS = 10

# Published facts: the patterns of fold 0 by level, and the numbers of distinct clients by fold.
PATTERNS = ["0100010001", "2022002122", "2302230021", "3424412224", "3424412224", "6374626743"]
PATTERNS_7_8 = [[6, 3, 10, 7, 4, 6, 9, 2, 6, 10], [6, 3, 12, 14, 10, 7, 12, 4, 6, 9]]
DISTINCT = {
    patterns: ["22222", "33333", "44344", "45544", "46655", "57677", "77788", "87799"],
    permutations: ["11111", "22222", "55465", "89888", "a9aaa", "aaaaa", "aaaaa", "aaaaa"],
    angles: ["34433", "87877", "99aaa", "aaa9a", "aaaaa", "aaaaa", "aaaaa", "aaaaa"],
}
POOLS = ["81507294", "39682517", "27906851", "24189657", "70196324"]  # classes permuted or rotated, by fold


@pytest.mark.parametrize("level", range(1, 9))
def test_the_patterns_of_the_first_fold(level):
    turns, colours = [2, 3, 4, 5][(level - 1) % 4], 3 if level > 4 else 1
    expected = PATTERNS_7_8[level - 7] if level > 6 else [int(digit) for digit in PATTERNS[level - 1]]
    found = patterns(level, CLIENTS, RandomState(42))
    assert [degrees * turns // 360 * colours + max(colour, 0) for degrees, colour in found] == expected
    assert all((colour >= 0) == (level > 4) for _, colour in found)


@pytest.mark.parametrize("level", range(1, 9))
@pytest.mark.parametrize("draws", DISTINCT)
def test_the_numbers_of_distinct_clients(draws, level):
    found = [len(set(draws(level, CLIENTS, RandomState(seed)))) for seed in FOLDS]
    assert found == [int(digit, 16) for digit in DISTINCT[draws][level - 1]]


@pytest.mark.parametrize("level", [1, 4, 8])
def test_only_the_classes_of_the_pool_change(level):
    for seed, pool in zip(FOLDS, POOLS, strict=True):
        some = {int(label) for label in pool[:level]}
        for names in permutations(level, CLIENTS, RandomState(seed)):
            assert sorted(names) == list(range(10))
            assert {label for label in range(10) if names[label] != label} <= some
        for turns in angles(level, CLIENTS, RandomState(seed)):
            assert {label for label in range(10) if turns[label]} <= some


def digits(channels: int = 1, train: int = 400, test: int = 200) -> Dataset:
    """Images that differ, with classes in turn."""
    size = train + test
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 250, (size, channels, 6, 6), dtype=np.uint8))
    return Dataset("digits", x, torch.arange(size) % 10, 10, is_train=np.arange(size) < train, mean=127.5, std=127.5)


def partitioned(shift, level, data=None, seed=42, clients=CLIENTS, **values):
    scenario = Scenario.named("flux", {"shift": shift, "level": level, "valid": 0.2, **values})
    return scenario.partition(data or digits(), clients, Rng.seed(seed), seed)


def test_the_parts_are_those_of_torch_and_scikit_learn():
    """Parts by randperm, train then test; the last fifth by a permutation that is the same in every fold."""
    federation = partitioned("pyx", 1)
    order = torch.Generator().manual_seed(42)
    train, test = torch.randperm(400, generator=order), 400 + torch.randperm(200, generator=order)
    mixed = torch.from_numpy(RandomState(42).permutation(40))
    for client in range(CLIENTS):
        mine = train[40 * client : 40 * client + 40]
        assert torch.equal(federation.valid.rows(client), mine[mixed[:8]])
        assert torch.equal(federation.train.rows(client), mine[mixed[8:]])
        assert torch.equal(federation.test.rows(client), test[20 * client : 20 * client + 20])
    assert federation.groups.tolist() == [0] * CLIENTS  # one class cannot be permuted
    assert torch.equal(federation.y, digits().y)
    assert federation.samples(0)[0].max() <= 1
    assert federation.samples(0)[0].min() == 0


@pytest.mark.parametrize("channels", [1, 3])
def test_px_rotates_and_colours_all_images_of_a_client(channels):
    data = digits(channels)
    before = data.x.clone()
    federation = partitioned("px", 6, data)
    kinds = patterns(6, CLIENTS, RandomState(42))
    for client, (degrees, colour) in enumerate(kinds):
        for split in ("train", "valid", "test"):
            rows = federation.split(split).rows(client)
            expected = Turn(degrees).inputs(data.x[rows].repeat(1, 3 // channels, 1, 1))
            expected[:, {0: 0, 1: 2, 2: 1}[colour]] = 255
            assert torch.equal(federation.x[rows], expected)
    for one in range(CLIENTS):
        for other in range(CLIENTS):
            assert (federation.groups[one] == federation.groups[other]) == (kinds[one] == kinds[other])
    assert torch.equal(data.x, before)


def test_py_keeps_classes_and_repeats_samples_to_the_old_number():
    federation = partitioned("py", 6)
    counts = federation.label_counts("train", "valid")
    tests = federation.label_counts("test")
    assert ((counts > 0).sum(1) <= 5).all()
    assert not ((tests > 0) & (counts == 0)).any()
    for client in range(CLIENTS):
        rows = torch.cat([federation.train.rows(client), federation.valid.rows(client)])
        assert len(rows) == 2 * len(rows.unique())  # all its samples of 5 of 10 classes, and as many repeated
    assert 2 <= len(federation.groups.unique()) <= 5
    plain = partitioned("py", 1)
    assert plain.groups.tolist() == [0] * CLIENTS
    assert (plain.train.sizes + plain.valid.sizes).tolist() == [40] * CLIENTS


def test_pyx_renames_classes_in_all_splits():
    data = digits()
    federation = partitioned("pyx", 4, data)
    names = permutations(4, CLIENTS, RandomState(42))
    for client in range(CLIENTS):
        for split in ("train", "valid", "test"):
            rows = federation.split(split).rows(client)
            assert federation.y[rows].tolist() == [names[client][label] for label in data.y[rows].tolist()]
    assert len(federation.groups.unique()) == 8
    assert torch.equal(data.y, torch.arange(600) % 10)
    assert federation.input_shape == (1, 6, 6)


def test_pxy_rotates_each_class_by_the_clients_own_angle():
    data = digits()
    federation = partitioned("pxy", 5, data)
    turns = angles(5, CLIENTS, RandomState(42))
    assert federation.input_shape == (3, 6, 6)
    for client in range(CLIENTS):
        for row in federation.train.rows(client).tolist():
            quarters = turns[client][int(data.y[row])] // 90
            assert torch.equal(federation.x[row], torch.rot90(data.x[row].repeat(3, 1, 1), quarters, (-2, -1)))


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match="flux needs a number of clients"):
        partitioned("px", 1, clients=None)
    with pytest.raises(ConfigError, match="flux defines its own groups"):
        Scenario.named("rotated+flux", {}).partition(digits(), 10, Rng.seed(0))
    with pytest.raises(DataError, match="flux needs square images of ten classes"):
        partitioned("px", 1, Dataset("flat", torch.zeros(50, 3), torch.arange(50) % 10, 10))
    assert len(partitioned("px", 1, valid=0.0).valid.index) == 0
