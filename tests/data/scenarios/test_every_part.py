"""Rules for every registered part of a scenario, alone and joined to others.

Except the parts that repeat a published benchmark, whose samples and sizes are fixed.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.data.dataset import Dataset
from coterie.data.federation import Federation
from coterie.data.scenario import ClientShare, Common, Partition, Scenario, parts
from coterie.errors import ConfigError, DataError
from coterie.randomness import Rng

JOINED = ["rotated+label_swapped", "rotated+dirichlet", "noisy+quantity_skew", "rotated+shards", "blurred+drift"]
BENCHMARKS = {"corn", "flux"}
NAMES = sorted(set(parts()) - BENCHMARKS) + JOINED
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


# ---- test samples: every part with every value of `tests` ----

MORE = [
    "rotated+quantity_skew",
    "rotated+drift",
    "label_swapped+dirichlet",
    "label_swapped+drift",
    "label_swapped+shards",
    "multi_source+quantity_skew",
    "multi_source+shards",
    "rotated+by_user",
]
COMMON = {
    "plain": {},
    "alpha": {"alpha": 3.0},
    "per class": {"alpha": 0.5, "sense": "per_class"},
    "shares": {"alpha": 0.5, "sense": "shares"},
    "quantity": {"quantity": 0.7},
    "samples": {"samples": 40},
    "many samples": {"samples": 1500},
    "reserve": {"reserve": 4, "valid": 0.3},
    "small clients": {"quantity": 0.2, "test": 0.1},
}
CLASSES, CLIENTS, SIZE = 10, 12, 2400
RULES = ("kind", "own", "like")
HOLD_OUT = {"by_user", "rotated+by_user", "grouped_labels"}  # tested on their own samples by default

photos = functools.cache(pictures)


def build(name: str, common: str, tests: str | None, seed: int) -> Federation:
    """The federation of a scenario with one value of `tests`; None is the default."""
    values = dict(COMMON[common]) | ({} if tests is None else {"tests": tests})
    if name == "rotated+by_user":
        values["groups"] = 2  # as many as the users have
    if "quantity_skew" in name:
        values.pop("samples", None)
    scenario = Scenario.named(NEEDS_KINDS.get(name, name), values)
    return scenario.partition(photos(SIZE, seed), CLIENTS, Rng.seed(seed))


@functools.cache
def with_tests(name: str, common: str, tests: str | None) -> Federation:
    return build(name, common, tests, seed=0)


def rows_of(federation: Federation, client: int) -> tuple[Tensor, Tensor]:
    """Rows that a client trains or validates on, and those it is tested on."""
    held = torch.cat([federation.train.rows(client), federation.valid.rows(client)])
    return held, federation.test.rows(client)


def share_of(name: str, common: str) -> float:
    """The share for testing; users have an official split, a fifth of the samples."""
    return 0.2 if "by_user" in name else COMMON[common].get("test", 0.2)


every_scenario = pytest.mark.parametrize("name", [*NAMES, *MORE])
every_common = pytest.mark.parametrize("common", COMMON)


@every_scenario
@every_common
def test_nobody_holds_a_test_sample(name, common):
    for tests in (*RULES, None):
        federation = with_tests(name, common, tests)
        tested = set(federation.test.index.tolist())
        assert not tested & set(federation.train.index.tolist()), tests
        assert not tested & set(federation.valid.index.tolist()), tests
        if "reserve" in COMMON[common]:
            assert not tested & set(federation.reserved.tolist()), tests
            assert len(federation.reserved) == 4 * CLASSES
        assert federation.test.sizes.min() >= (10 if tests == "like" else 1), tests


@every_scenario
@every_common
def test_own_tests_have_the_labels_of_the_training_samples(name, common):
    """Chi-squared of homogeneity, train against test, summed over the clients."""
    federation = with_tests(name, common, "own")
    share, statistic, freedom = share_of(name, common), 0.0, 0
    for client in range(CLIENTS):
        held, tests = rows_of(federation, client)
        whole = len(held) + len(tests)
        # Each class is rounded by itself. Pieces of shards have the test samples that their classes happen to have.
        slack = 4 * (share * (1 - share) * whole) ** 0.5 if "shards" in name else CLASSES / 2 + 1
        assert abs(len(tests) - share * whole) <= slack
        table = torch.stack([torch.bincount(federation.y[rows], minlength=CLASSES) for rows in (held, tests)]).double()
        table = table[:, table.sum(0) > 0]
        expected = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
        statistic += float(((table - expected) ** 2 / expected).sum())
        freedom += table.shape[1] - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


@every_scenario
@every_common
def test_like_tests_follow_the_labels_that_the_client_sees_in_every_round(name, common):
    federation, kind = with_tests(name, common, "like"), with_tests(name, common, "kind")
    share = COMMON[common].get("test", 0.2)
    for client in range(CLIENTS):
        held, tests = rows_of(federation, client)
        whole = kind.test.rows(client)
        assert abs(len(tests) - min(max(len(held) * share / (1 - share), 10), len(whole))) < 0.51
        assert set(tests.tolist()) <= set(whole.tolist())
    for now in (federation, federation.at(1000)):
        held, tests = now.label_counts("train", "valid").double(), now.label_counts("test").double()
        expected = held / held.sum(1, keepdim=True) * tests.sum(1, keepdim=True)
        assert (tests - expected).abs().max() < 1


@every_scenario
@every_common
def test_kind_tests_are_shared_by_the_group(name, common):
    federation = with_tests(name, common, "kind")
    groups = torch.zeros(CLIENTS) if federation.groups is None else federation.groups
    pairs = set(zip(groups.tolist(), federation.test.shard.tolist(), strict=True))
    assert len(pairs) == len(groups.unique())


@every_scenario
def test_tests_of_the_dataset_change_no_training_sample(name):
    """`kind` and `like` differ in test samples only; so does `own` where it is the default."""
    kind, own, like = (with_tests(name, "plain", rule) for rule in RULES)
    for other in (like, own) if name in HOLD_OUT else (like,):
        assert torch.equal(kind.train.index, other.train.index)
        assert torch.equal(kind.valid.index, other.valid.index)


@every_scenario
def test_the_digest_changes_with_the_test_samples(name):
    digests = {rule: with_tests(name, "plain", rule).digest() for rule in RULES}
    assert len(set(digests.values())) == 3
    assert with_tests(name, "plain", None).digest() == digests["own" if name in HOLD_OUT else "kind"]


@every_scenario
@pytest.mark.parametrize("tests", RULES)
def test_test_samples_depend_only_on_the_seed(name, tests):
    one, again, other = (build(name, "plain", tests, seed) for seed in (0, 0, 1))
    assert again.digest() == one.digest()
    assert other.digest() != one.digest()
    if tests != "kind" and "by_user" not in name:  # the dataset's own test set is always the same
        assert not torch.equal(other.test.index, one.test.index)


def test_like_looks_at_labels_before_the_view():
    """A client of class 0 that calls it 1 is tested on class 0, which it calls 1."""
    data = pictures(600, 0)
    scenario = Scenario.named("label_swapped+shards", {"groups": 2, "per_client": 1, "tests": "like"})
    federation = scenario.partition(data, 20, Rng.seed(0))  # group 0 swaps classes 0 and 1
    (client,) = [i for i in range(10) if set(data.y[rows_of(federation, i)[0]].tolist()) == {0}][:1]
    assert set(data.y[federation.test.rows(client)].tolist()) == {0}
    assert set(federation.samples(client, "train")[1].tolist()) == {1}
    assert set(federation.samples(client, "test")[1].tolist()) == {1}


@pytest.mark.parametrize("tests", RULES)
@pytest.mark.parametrize("name", ["iid", "rotated", "by_user", "quantity_skew", "rotated+drift"])
def test_numbers_have_tests_of_every_sort(name, tests):
    data = replace(pictures(SIZE, 0), y=torch.rand(SIZE), num_classes=0, group=None)
    federation = Scenario.named(name, {"tests": tests}).partition(data, CLIENTS, Rng.seed(0))
    assert not set(federation.test.index.tolist()) & {
        *federation.train.index.tolist(),
        *federation.valid.index.tolist(),
    }
    assert federation.test.sizes.min() >= (10 if tests == "like" else 1)


def test_a_part_that_holds_nothing_out_cannot_have_own_tests():
    partition = Partition(pictures(600, 0), 1, Rng.seed(0), Common(tests="own"))
    partition.set_partitioner(lambda _: [ClientShare("a", 0, torch.arange(1, 5), 0)])
    with pytest.raises(ConfigError, match=r"holds out no samples of clients; use scenario\.tests=kind or like"):
        partition.build()


def test_a_user_without_official_tests_has_none_of_its_own():
    data = pictures(600, 0)
    data = replace(data, is_train=data.is_train | (data.user == 3))
    with pytest.raises(DataError, match=r"Client 'user-3' of pictures has no test samples of its own"):
        Scenario.named("by_user", {"tests": "own"}).partition(data, None, Rng.seed(0))
    assert Scenario.named("by_user", {}).partition(data, None, Rng.seed(0)).test.sizes[3] == 0
    assert Scenario.named("by_user", {"tests": "like"}).partition(data, None, Rng.seed(0)).test.sizes[3] > 0
