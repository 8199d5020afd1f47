"""Federation: packed shards, selection, renaming, and a digest that notices every change and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data.federation import Federation, Split, cut
from coterie.data.transforms import Rotate, Transform
from coterie.errors import DataError
from coterie.randomness import name_keys


@pytest.fixture
def federation():
    """Three clients of 2, 3 and 1 training samples; the first two share a test shard; two views."""
    return Federation(
        name="tiny",
        x=torch.arange(12 * 4, dtype=torch.uint8).reshape(12, 1, 2, 2),
        y=torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]),
        num_classes=3,
        train=Split.of([torch.tensor([0, 1]), torch.tensor([4, 3, 2]), torch.tensor([5])]),
        valid=Split.of([torch.tensor([6]), torch.tensor([], dtype=torch.int64), torch.tensor([7])]),
        test=Split.of([torch.tensor([8, 9]), torch.tensor([10, 11])], torch.tensor([0, 0, 1])),
        names=("a", "b", "c"),
        keys=name_keys(["a", "b", "c"]),
        views=((), (Rotate(90.0),)),
        view=torch.tensor([0, 1, 1]),
        groups=torch.tensor([0, 1, 1]),
        mean=10.0,
        std=2.0,
    ).validate()


# ---- splits ----


def test_rows_and_sizes(federation):
    assert len(federation) == 3
    assert federation.input_shape == (1, 2, 2)
    assert federation.train.sizes.tolist() == [2, 3, 1]
    assert federation.valid.sizes.tolist() == [1, 0, 1]
    assert federation.test.sizes.tolist() == [2, 2, 2]
    assert federation.train.rows(1).tolist() == [4, 3, 2]
    assert federation.valid.rows(1).tolist() == []
    assert [federation.test.rows(i).tolist() for i in range(3)] == [[8, 9], [8, 9], [10, 11]]
    assert len(federation.test.index) == 4  # the shared shard is stored once


def test_splits_by_name(federation):
    assert federation.split("train") is federation.train
    assert federation.split("valid") is federation.valid
    assert federation.split("test") is federation.test


@given(st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=6), st.data())
@settings(max_examples=30, deadline=None)
def test_select_keeps_each_clients_rows(shards, data):
    shard = data.draw(st.lists(st.integers(0, len(shards) - 1), min_size=1, max_size=8))
    split = Split.of([torch.tensor(rows, dtype=torch.int64) for rows in shards], torch.tensor(shard))
    chosen = data.draw(st.lists(st.integers(0, len(shard) - 1), max_size=8))
    found = split.select(torch.tensor(chosen, dtype=torch.int64))
    assert [found.rows(i).tolist() for i in range(len(chosen))] == [shards[shard[c]] for c in chosen]
    assert found.sizes.tolist() == [len(shards[shard[c]]) for c in chosen]
    assert len(found.offsets) - 1 == len({shard[c] for c in chosen})  # unused shards are dropped


# ---- samples ----


def test_samples_are_scaled_and_seen_through_the_view(federation):
    x, y = federation.samples(0)
    expected = (torch.arange(8.0).reshape(2, 1, 2, 2) - 10) / 2
    assert torch.equal(x, expected)
    assert y.tolist() == [0, 1]
    turned, _ = federation.samples(2, "valid")
    assert turned.tolist() == [[[[(29 - 10) / 2, (31 - 10) / 2], [(28 - 10) / 2, (30 - 10) / 2]]]]


def test_no_view_is_the_first_view(federation):
    plain = replace(federation, view=None)
    assert plain.view_of(torch.tensor([2, 0])).tolist() == [0, 0]
    assert torch.equal(plain.samples(2)[0], (federation.x[[5]].float() - 10) / 2)


# ---- selection and renaming ----


def test_select_gives_the_same_clients_in_the_asked_order(federation):
    some = federation.select([2, 0])
    assert some.names == ("c", "a")
    assert torch.equal(some.keys, federation.keys[[2, 0]])
    assert some.groups.tolist() == [1, 0]
    for position, client in enumerate([2, 0]):
        for split in ("train", "valid", "test"):
            for mine, theirs in zip(some.samples(position, split), federation.samples(client, split), strict=True):
                assert torch.equal(mine, theirs)


def test_select_of_all_is_the_same_data(federation):
    assert federation.select(torch.arange(3)).digest() == federation.digest()


def test_select_without_groups(federation):
    assert replace(federation, groups=None).select([1]).groups is None


def test_rename_changes_names_and_nothing_else(federation):
    renamed = federation.rename({"a": "b", "b": "a"})
    assert renamed.names == ("b", "a", "c")
    assert torch.equal(renamed.keys, federation.keys)  # their randomness stays
    assert replace(renamed, names=federation.names).digest() == federation.digest()


def test_rename_to_a_name_that_is_taken(federation):
    with pytest.raises(DataError, match=r"tiny has two clients named 'c'; names must be unique\."):
        federation.rename({"a": "c"})


# ---- validation ----


def test_no_clients(federation):
    with pytest.raises(DataError, match="tiny has no clients"):
        federation.select([]).validate()


def test_a_client_without_training_samples(federation):
    empty = Split.of([torch.tensor([0]), torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64)])
    with pytest.raises(DataError) as caught:
        replace(federation, train=empty).validate()
    assert str(caught.value) == (
        "Client 'b' of tiny has no training samples (2 such clients); use fewer clients or leave it out."
    )


# ---- digest ----


def _moved(split, index=None, offsets=None, shard=None):
    def changed(tensor, new):
        return tensor if new is None else torch.tensor(new)

    return Split(changed(split.index, index), changed(split.offsets, offsets), changed(split.shard, shard))


@pytest.mark.parametrize(
    "change",
    [
        lambda f: {"x": f.x + 1},
        lambda f: {"x": f.x.float()},
        lambda f: {"x": f.x.reshape(12, 1, 4, 1)},
        lambda f: {"y": torch.cat([f.y[:-1], torch.tensor([0])])},
        lambda f: {"num_classes": 4},
        lambda f: {"train": _moved(f.train, index=[1, 0, 4, 3, 2, 5])},
        lambda f: {"train": _moved(f.train, offsets=[0, 3, 5, 6])},
        lambda f: {"valid": _moved(f.valid, offsets=[0, 0, 1, 2])},
        lambda f: {"test": _moved(f.test, shard=[0, 1, 1])},
        lambda f: {"names": ("a", "b", "d")},
        lambda f: {"keys": f.keys + 1},
        lambda f: {"views": ((), (Rotate(180.0),))},
        lambda f: {"view": torch.tensor([0, 1, 0])},
        lambda f: {"groups": torch.tensor([0, 1, 0])},
        lambda f: {"groups": None},
        lambda f: {"mean": 11.0},
        lambda f: {"std": 3.0},
    ],
)
def test_the_digest_changes_when_the_data_does(federation, change):
    assert replace(federation, **change(federation)).digest() != federation.digest()


def test_the_digest_stays_when_only_the_storage_changes(federation):
    before = federation.digest()
    strided = federation.x.transpose(2, 3).contiguous().transpose(2, 3)
    assert not strided.is_contiguous()
    again = replace(federation, x=strided, y=federation.y.clone(), keys=federation.keys.flip(0).flip(0))
    assert again.digest() == before
    assert federation.digest() == before


def test_no_view_and_the_first_view_for_all_are_the_same_data(federation):
    assert (
        replace(federation, view=None).digest() == replace(federation, view=torch.zeros(3, dtype=torch.int64)).digest()
    )


@given(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.lists(st.integers(0, 2), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_two_digests_are_equal_if_and_only_if_the_data_is(one, other):
    def make(labels):
        y = torch.tensor(labels)
        return Federation.from_clients({"a": (torch.ones(len(y), 2), y)}, num_classes=3, test=0.0, valid=0.0)

    assert (make(one).digest() == make(other).digest()) == (one == other)


# ---- from clients ----


def rows_of(federation, split):
    """The first feature of a client's samples, by which the tests know them."""
    return [federation.samples(i, split)[0].flatten(1)[:, 0].tolist() for i in range(len(federation))]


def test_from_clients_holds_out_shares_with_the_labels_of_the_client():
    y = torch.arange(100) // 50  # sorted, as files often are
    federation = Federation.from_clients({"a": (torch.arange(100.0).unsqueeze(1), y)})
    assert federation.test.sizes.tolist() == [20]
    assert federation.valid.sizes.tolist() == [8]
    for split, each in (("train", 36), ("valid", 4), ("test", 10)):
        assert federation.samples(0, split)[1].bincount().tolist() == [each, each]
    every = sum((rows_of(federation, split)[0] for split in ("train", "valid", "test")), [])
    assert sorted(every) == list(range(100))


def test_from_clients_draws_by_its_seed_and_the_name():
    data = (torch.arange(40.0).unsqueeze(1), torch.zeros(40, dtype=torch.int64))

    def tests_of(seed=0, **clients):
        return rows_of(Federation.from_clients(clients, seed=seed), "test")

    first = tests_of(a=data, b=data)
    assert first == tests_of(a=data, b=data)
    assert first[0] != first[1]
    assert first[0] != list(range(32, 40))  # not simply the last ones
    assert tests_of(seed=1, a=data)[0] != first[0] == tests_of(a=data)[0]


def test_from_clients_without_shares_keeps_all_samples_in_order():
    x = torch.arange(7.0).unsqueeze(1)
    federation = Federation.from_clients({"a": (x, torch.arange(7) % 2)}, test=0.0, valid=0.0)
    assert torch.equal(federation.samples(0)[0], x)


def test_from_clients_sizes_of_small_clients():
    x = {name: torch.randn(size, 3) for name, size in (("a", 20), ("b", 1), ("c", 10))}
    federation = Federation.from_clients({n: (v, torch.arange(len(v)) % 2) for n, v in x.items()})
    assert federation.names == ("a", "b", "c")
    assert federation.train.sizes.tolist() == [15, 1, 8]  # 16 - floor(1.6); 1; 8 - floor(0.8)
    assert federation.valid.sizes.tolist() == [1, 0, 0]
    assert federation.test.sizes.tolist() == [4, 0, 2]
    assert federation.num_classes == 2


def test_from_clients_for_regression_and_images():
    pictures = torch.zeros(4, 1, 2, 2, dtype=torch.uint8)
    federation = Federation.from_clients({"a": (pictures, torch.tensor([0.5, 1.0, -2.0, 3.0], dtype=torch.float64))})
    assert federation.num_classes == 0
    assert federation.x.dtype == torch.uint8
    assert federation.y.dtype == torch.float32
    assert torch.equal(federation.samples(0)[0], torch.full((4, 1, 2, 2), -1.0))  # scaled as in an .npz file
    assert federation.scaling == "uint8 pixels: x / 127.5 - 1"
    doubles = Federation.from_clients(
        {"a": (torch.zeros(4, 2, dtype=torch.float64), torch.zeros(4, dtype=torch.int32))}
    )
    assert doubles.x.dtype == torch.float32
    assert doubles.y.dtype == torch.int64


def test_from_clients_standardizes_by_the_training_samples():
    x = torch.tensor([[1.0, 5.0], [3.0, 5.0], [100.0, 5.0]])
    y = torch.zeros(3, dtype=torch.int64)
    federation = Federation.from_clients({"a": {"train": (x[:2], y[:2]), "test": (x[2:], y[2:])}}, standardize=True)
    assert (federation.mean, federation.std) == ((2.0, 5.0), (1.0, 1.0))  # a feature that does not vary: 1
    assert federation.samples(0)[0].tolist() == [[-1.0, 0.0], [1.0, 0.0]]
    assert federation.samples(0, "test")[0].tolist() == [[98.0, 0.0]]
    assert torch.equal(federation.unscaled(federation.samples(0, "test")[0]), x[2:])
    assert federation.digest() != replace(federation, mean=(2.0, 6.0)).digest()


def test_from_clients_with_true_groups_by_name():
    data = {n: (torch.ones(5, 2), torch.zeros(5, dtype=torch.int64)) for n in "abc"}
    assert Federation.from_clients(data, groups={"c": 1, "a": 0, "b": 1}).groups.tolist() == [0, 1, 1]
    numbers = Federation.from_clients(dict.fromkeys((7, 3), data["a"]), groups={3: 1, 7: 0})
    assert (numbers.names, numbers.groups.tolist()) == (("7", "3"), [0, 1])
    words = Federation.from_clients(data, groups={"c": "south", "a": "north", "b": "south"})
    assert (words.groups.tolist(), words.group_names()) == ([0, 1, 1], {0: "north", 1: "south"})
    with pytest.raises(DataError, match=r"groups must all be whole numbers or all be names\. Got 'south' instead\."):
        Federation.from_clients(data, groups={"c": "south", "a": 0, "b": 1})
    with pytest.raises(DataError, match=r"Got 0\.5 instead\."):
        Federation.from_clients(data, groups={"c": 1, "a": 0.5, "b": 1})


GOOD = (torch.ones(3, 2), torch.zeros(3).long())


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        ({}, "own has no clients."),
        ({"a": (torch.ones(3, 2), torch.zeros(2).long())}, "Client 'a' has 3 samples but 2 labels."),
        ({"a": (torch.ones(0, 2), torch.zeros(0))}, "Client 'a' of own has no training samples (1 such client)"),
        ({"a": GOOD, "b": (torch.ones(3, 4), GOOD[1])}, "Samples of client 'b' are (4,) torch.float32, those of the"),
        ({"a": GOOD, "b": (GOOD[0], torch.zeros(3))}, "Labels of client 'b' are floats, those of the first client int"),
        ({"a": (torch.full((3, 2), torch.nan), GOOD[1])}, "Client 'a': x has NaN or infinite values;"),
        ({"a": (GOOD[0], torch.tensor([0, -1, 1]))}, "own: labels must be 0 ... 1, for 2 classes. Got -1 instead."),
    ],
)
def test_from_clients_refuses(clients, sentence):
    with pytest.raises(DataError) as caught:
        Federation.from_clients(clients)
    assert str(caught.value).startswith(sentence)


# ---- labels ----


class Shifted(Transform):
    def labels(self, y):
        return y + 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_classes": 2}, "tiny: labels must be 0 ... 1, for 2 classes. Got 2 instead."),
        ({"y": torch.zeros(12, dtype=torch.int32)}, "tiny: y must have one class per sample, int64 [S]. Got torch.int"),
        ({"y": torch.zeros(12, 3)}, "tiny: y must have one class per sample, int64 [S]. Got torch.float32 of shape"),
        ({"num_classes": 0}, "tiny: targets without classes must be floats. Got torch.int64 instead."),
        ({"views": ((), (Shifted(),))}, "tiny: labels must be 0 ... 2, for 3 classes. Got 3 instead."),
        ({"x": torch.zeros(12, 4, dtype=torch.int64)}, "tiny has integers as inputs, such as token ids; this scenario"),
    ],
)
def test_labels_that_would_be_read_outside_their_arrays(federation, change, sentence):
    with pytest.raises(DataError) as caught:
        replace(federation, **change).validate()
    assert str(caught.value).startswith(sentence)


# ---- cutting ----


@pytest.mark.parametrize(
    ("size", "share", "held"),
    [
        (10, 0.2, 2),
        (10, 0.0, 0),
        (10, 0.19, 1),
        (1, 0.9, 0),
        (0, 0.5, 0),
        (2, 0.99, 1),
        (100, 0.29, 29),
        (49, 1 / 49, 1),
    ],
)
def test_cut(size, share, held):
    rows = torch.arange(size)
    kept, last = cut(rows, share)
    assert len(last) == held
    assert torch.equal(torch.cat([kept, last]), rows)
