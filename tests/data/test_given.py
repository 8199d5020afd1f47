"""The forms in which users have the data of a client."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pandas
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from coterie.data.federation import Federation
from coterie.errors import DataError

X = np.arange(20.0).reshape(10, 2).astype(np.float32)
Y = np.arange(10) % 2
FRAME = pandas.DataFrame({"height": X[:, 0], "label": Y, "weight": X[:, 1]})


class Items(Dataset):
    """A map-style dataset of (x, y), or of whatever `item` makes of them."""

    def __init__(self, item=lambda x, y: (x, y)):
        self.item = item

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return self.item(torch.from_numpy(X[i]), int(Y[i]))


class Endless(IterableDataset):
    def __iter__(self):
        return iter([(X[0], 0)])


class Hub:
    """What `datasets.Dataset` offers."""

    def __init__(self, **columns):
        self.columns, self.features = columns, dict.fromkeys(columns)
        self.column_names = list(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name):
        return self.columns[name]


def taken(data, **how):
    """All samples of one client, in order."""
    federation = Federation.from_clients({"a": data}, test=0.0, valid=0.0, **how)
    x, y = federation.samples(0)
    return x.numpy(), y.numpy()


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        [X.tolist(), Y.tolist()],
        (torch.from_numpy(X).double(), torch.from_numpy(Y).int()),
        (torch.from_numpy(X).bfloat16(), Y),
        (X[::-1][::-1], Y),
        (FRAME[["height", "weight"]], FRAME["label"]),
        TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
        DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=3, shuffle=True),
        Items(),
        Subset(Items(), range(10)),
        Items(lambda x, y: {"pixels": x, "label": y}),
        FRAME,
        Hub(features=X.tolist(), label=Y.tolist()),
        Hub(height=X[:, 0].tolist(), weight=X[:, 1].tolist(), label=Y.tolist()),
    ],
    ids=lambda data: type(data).__name__,
)
def test_every_form_gives_the_same_samples(data):
    x, y = taken(data)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)


def test_labels_by_the_name_of_a_column():
    frame = FRAME.rename(columns={"label": "ill"})
    np.testing.assert_array_equal(taken(frame, label="ill")[1], Y)
    with pytest.raises(DataError) as caught:
        taken(frame)
    assert str(caught.value) == (
        "Client 'a' has no column 'label' (it has height, ill, weight); name the labels with label='NAME'."
    )


def test_words_are_classes_that_all_clients_share():
    words = np.array(["no", "yes"])
    federation = Federation.from_clients({"a": (X, words[Y]), "b": FRAME.assign(label="yes")}, test=0.0, valid=0.0)
    assert (federation.num_classes, federation.class_names) == (2, ("no", "yes"))
    assert federation.samples(1)[1].tolist() == [1] * 10


def test_classes_of_a_hub_dataset_have_names():
    hub = Hub(pixels=X.tolist(), label=[0] * 10)
    hub.features["label"] = type("ClassLabel", (), {"names": ["cat", "dog", "owl"]})()
    federation = Federation.from_clients({"a": hub})
    assert (federation.num_classes, federation.class_names) == (3, ("cat", "dog", "owl"))


def test_pictures_of_pillow_become_pixels():
    image = pytest.importorskip("PIL.Image")
    data = Hub(image=[image.fromarray(np.full((4, 5, 3), i, np.uint8)) for i in range(3)], label=[0, 1, 0])
    federation = Federation.from_clients({"a": data}, test=0.0, valid=0.0)
    assert federation.input_shape == (3, 4, 5)
    assert federation.x[:, 0, 0, 0].tolist() == [0, 1, 2]


def test_splits_that_are_given_are_kept():
    parts = {"train": (X[:6], Y[:6]), "test": Items(), "validation": FRAME[:3]}
    federation = Federation.from_clients({"a": parts, "b": {"train": (X, Y)}})
    assert [federation.split(s).sizes.tolist() for s in ("train", "valid", "test")] == [[6, 8], [3, 0], [10, 2]]
    np.testing.assert_array_equal(federation.samples(0)[0], X[:6])
    np.testing.assert_array_equal(federation.samples(0, "valid")[0], X[:3])
    np.testing.assert_array_equal(federation.samples(0, "test")[0], X)


class Partitioner:
    """What Flower's partitioners offer."""

    num_partitions = 3

    def load_partition(self, number):
        return Hub(x=(X + number).tolist(), label=Y.tolist())


class Federated:
    """What Flower's FederatedDataset offers."""

    def __init__(self, **partitioners):
        self.partitioners = partitioners

    def load_partition(self, number, split):
        return self.partitioners[split].load_partition(number)


def test_flower_partitions_are_clients():
    federation = Federation.from_clients(Partitioner(), test=0.0, valid=0.0)
    assert federation.names == ("0", "1", "2")
    np.testing.assert_array_equal(federation.samples(2)[0], X + 2)
    train_only = Federation.from_clients(Federated(train=Partitioner()))
    assert train_only.test.sizes.tolist() == [2, 2, 2]
    both = Federation.from_clients(Federated(train=Partitioner(), test=Partitioner()), valid=0.0)
    assert (both.train.sizes.tolist(), both.test.sizes.tolist()) == ([10, 10, 10], [10, 10, 10])


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("data.csv", "The data of client 'a' must be (x, y) of arrays or tensors, a torch Dataset or DataLoader, a"),
        (X, "Got ndarray instead."),
        (torch.ones(4, 2), "Got Tensor instead."),
        ((X, Y, Y), "Got tuple of 3 instead."),
        (None, "Got NoneType instead."),
        (Endless(), "Got Endless instead."),
        ({"training": (X, Y)}, "Got a dict with the key 'training' instead."),
        ({"test": (X, Y)}, "Got a dict without 'train' instead."),
        (Items(lambda x, y: x), "Client 'a': items of Items must be (x, y). Got Tensor instead."),
        (Items(lambda x, y: (x[: 1 + y], y)), "Client 'a' has samples of different shapes"),
        (FRAME.assign(city="Rome"), "Client 'a': column 'city' holds words ('Rome' ...); write it as numbers, or"),
        (FRAME.assign(age=[1.0] * 9 + [None]), "Client 'a': column 'age' is empty or not finite in sample 10;"),
        (FRAME[["label"]], "Client 'a' has no columns besides the labels;"),
        ((X[:, 0], Y), "Client 'a': x must have shape [samples, ...] with at least two axes. Got (10,) instead."),
    ],
    ids=range(14),
)
def test_what_is_not_understood_gets_one_sentence(data, sentence):
    with pytest.raises(DataError) as caught:
        Federation.from_clients({"a": data})
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_clients_that_are_no_dict():
    with pytest.raises(DataError, match=r"Got list instead; for a list of clients use dict\(enumerate\(clients\)\)"):
        Federation.from_clients([(X, Y)])
    with pytest.raises(DataError, match="has no partitioners"):
        Federation.from_clients(Federated())


def test_nothing_is_imported_that_the_user_did_not_give():
    code = (
        "import sys, numpy, coterie; coterie.Federation.from_clients({0: (numpy.ones((9, 2)), numpy.zeros(9, int))});"
        "print([name for name in ('pandas', 'datasets', 'flwr_datasets', 'PIL') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
