"""The hash that all randomness hangs on: the published splitmix64, and draws that have the right odds."""

from __future__ import annotations

import math
from hashlib import blake2b

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from coterie.randomness import Rng, bits, mix, name_key, name_keys, normal, permutations, race, uniform

# The first outputs of splitmix64 for two seeds, as published with its reference code.
PUBLISHED = {
    0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B],
    1234567: [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ],
}


def as_unsigned(values):
    return [int(v) % (1 << 64) for v in values]


@pytest.mark.parametrize("seed", PUBLISHED)
def test_bits_are_splitmix64(seed):
    assert as_unsigned(bits(torch.tensor(seed), 5)) == PUBLISHED[seed]


@given(st.integers(-(2**63), 2**63 - 1))
@settings(max_examples=50, deadline=None)
def test_mix_of_a_tensor_is_the_arithmetic_of_unsigned_integers(value):
    z = value % (1 << 64)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % (1 << 64)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % (1 << 64)
    assert as_unsigned([mix(torch.tensor(value))]) == [z ^ (z >> 31)]


def test_bits_of_many_keys_are_those_of_each():
    keys = torch.tensor([[3, -5], [0, 2**62]])
    found = bits(keys, 4)
    assert found.shape == (2, 2, 4)
    for i in range(2):
        for j in range(2):
            assert torch.equal(found[i, j], bits(keys[i, j], 4))


def test_more_bits_begin_with_the_fewer():
    assert torch.equal(bits(torch.tensor(9), 100)[:7], bits(torch.tensor(9), 7))


def test_name_keys_do_not_change_between_versions():
    # Written down once: runs of an older version must be resumable.
    assert name_key("client-0") == -7512662960991081707
    expected = [int.from_bytes(blake2b(n.encode(), digest_size=8).digest(), "little", signed=True) for n in ("a", "ä")]
    assert name_keys(["a", "ä"]).tolist() == expected


def test_name_keys_are_distinct():
    keys = name_keys([f"client-{i}" for i in range(5000)])
    assert len(keys.unique()) == 5000
    assert bool((keys < 0).any())
    assert bool((keys > 0).any())


def test_a_path_is_its_steps_one_after_the_other():
    assert Rng.seed(3).at("round", 2, "cohort") == Rng.seed(3).at("round").at(2).at("cohort")


def test_points_of_the_tree_are_distinct():
    root = Rng.seed(0)
    paths = [(), ("a",), ("b",), ("a", "b"), ("b", "a"), (0,), (1,), (-1,), (0, 0), ("0",), ("a", 0), (0, "a")]
    keys = {root.at(*path).key for path in paths}
    assert len(keys) == len(paths)
    assert len({Rng.seed(s).key for s in range(1000)}) == 1000


def test_client_keys_at_a_point_hang_on_the_client_and_the_point_only():
    clients = name_keys(["a", "b", "c"])
    here, there = Rng.seed(0).at(1), Rng.seed(0).at(2)
    assert torch.equal(here.keys(clients)[[2, 0]], here.keys(clients[[2, 0]]))
    assert not bool((here.keys(clients) == there.keys(clients)).any())


def test_uniform_numbers_pass_a_kolmogorov_smirnov_test():
    numbers = Rng.seed(0).uniform(100, 200)
    assert numbers.shape == (100, 200)
    assert numbers.dtype == torch.float64
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    assert stats.kstest(numbers.flatten().numpy(), "uniform").pvalue > 0.01


def test_uniform_is_the_upper_53_bits():
    expected = [(v >> 11) / 2**53 for v in PUBLISHED[0]]
    assert uniform(torch.tensor(0), 5).tolist() == expected


def test_normal_numbers_pass_a_kolmogorov_smirnov_test():
    numbers = Rng.seed(1).normal(20_001)  # odd: the pairs of Box-Muller do not come out even
    assert numbers.shape == (20_001,)
    assert stats.kstest(numbers.numpy(), "norm").pvalue > 0.01
    half = 10_000
    assert abs(np.corrcoef(numbers[:half], numbers[half + 1 :])[0, 1]) < 0.05


def test_normal_of_many_keys_are_those_of_each():
    keys = torch.tensor([4, 5])
    assert torch.equal(normal(keys, 3)[1], normal(keys[1], 3))


@given(st.integers(0, 60), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_a_permutation_holds_each_number_once(size, seed):
    found = Rng.seed(seed).permutation(size)
    assert found.dtype == torch.int64
    assert sorted(found.tolist()) == list(range(size))


@pytest.mark.parametrize(
    ("size", "count"), [(1000, 0), (1000, 7), (1000, 250), (1000, 251), (1000, 1000), (3, 1), (0, 0)]
)
def test_the_first_entries_of_a_permutation(size, count):
    rng = Rng.seed(5)
    found = rng.permutation(size, count)
    assert torch.equal(found, rng.permutation(size)[:count])
    assert found.untyped_storage().nbytes() == 8 * count  # nothing of the rest is held


def test_permutations_of_three_are_all_equally_likely():
    keys = mix(torch.arange(6000))
    found = permutations(keys, torch.full((6000,), 3))
    _, counts = found.unique(dim=0, return_counts=True)
    assert len(counts) == 6
    assert stats.chisquare(counts.numpy()).pvalue > 0.01


def test_a_permutation_does_not_depend_on_its_neighbours():
    keys, sizes = torch.tensor([7, 8, 9]), torch.tensor([5, 2, 11])
    together = permutations(keys, sizes)
    assert together.shape == (3, 11)
    for i, size in enumerate(sizes.tolist()):
        alone = permutations(keys[i : i + 1], sizes[i : i + 1])[0]
        assert together[i, :size].tolist() == alone.tolist()
        assert together[i, size:].tolist() == list(range(size, 11))  # padding, in order


def test_permutations_of_nobody():
    empty = torch.empty(0, dtype=torch.int64)
    assert permutations(empty, empty).shape == (0, 0)


def test_a_race_is_won_in_proportion_to_the_weights():
    keys = name_keys(["a", "b", "c", "d"])
    weights = torch.tensor([1.0, 0.0, 3.0, 6.0])
    wins = torch.zeros(4)
    for draw in range(2000):
        wins[race(Rng.seed(0).at(draw), keys, weights)] += 1
    assert wins[1] == 0
    expected = 2000 * np.array([0.1, 0.3, 0.6])
    assert stats.chisquare(wins[[0, 2, 3]].numpy(), expected).pvalue > 0.01


@given(st.permutations(range(6)), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_the_winner_of_a_race_does_not_depend_on_the_order(order, seed):
    keys = name_keys([f"c{i}" for i in range(6)])
    weights = torch.tensor([1.0, 2.0, 0.5, 4.0, 0.1, 3.0])
    rng = Rng.seed(seed)
    assert order[int(race(rng, keys[list(order)], weights[list(order)]))] == int(race(rng, keys, weights))


def test_a_race_with_several_rows_of_weights():
    keys = name_keys(["a", "b", "c"])
    weights = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 0.0]])
    assert race(Rng.seed(0), keys, weights).tolist() == [1, 0]


def test_torch_seed_seeds_inside_and_gives_back_outside():
    torch.manual_seed(5)
    expected_after = torch.rand(3)
    torch.manual_seed(5)
    with Rng.seed(1).torch_seed():
        one = torch.rand(3)
    assert torch.equal(torch.rand(3), expected_after)
    with Rng.seed(1).torch_seed():
        again = torch.rand(3)
    with Rng.seed(2).torch_seed():
        other = torch.rand(3)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_torch_seed_is_given_back_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), Rng.seed(1).torch_seed():
        torch.rand(1).reshape(2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_scalar_draw():
    assert Rng.seed(0).uniform().shape == ()
    assert math.isfinite(float(Rng.seed(0).normal()))
