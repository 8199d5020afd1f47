"""Several sources; groups of classes; the server's own samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coterie.data.dataset import Dataset
from coterie.data.scenario import Scenario
from coterie.errors import ConfigError, DataError
from coterie.randomness import Rng


def data(size: int = 3000, **more) -> Dataset:
    return Dataset("many", torch.arange(size).float().reshape(-1, 1), torch.arange(size) % 10, 10, **more)


def partitioned(name, clients=30, seed=0, dataset=None, **values):
    return Scenario.named(name, {"valid": 0.0, **values}).partition(dataset or data(), clients, Rng.seed(seed))


def test_each_group_has_its_own_source_and_tests():
    domain = np.repeat([0, 1, 2], [2000, 700, 300])
    is_train = np.arange(3000) % 4 != 0
    federation = partitioned("multi_source", 12, dataset=data(group=domain, is_train=is_train))
    assert federation.groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for client, group in enumerate(federation.groups.tolist()):
        assert set(domain[federation.train.rows(client)]) == {group}
        assert federation.test.rows(client).tolist() == np.flatnonzero((domain == group) & ~is_train).tolist()
    small = partitioned("multi_source", 12, dataset=data(group=domain, is_train=is_train), samples=600, alpha=100.0)
    assert small.train.sizes.tolist() == [600] * 12
    with pytest.raises(DataError, match="many has a single source"):
        partitioned("multi_source")


@pytest.mark.parametrize(("alpha", "purity"), [(0.05, 0.85), (10.0, 0.5)])
def test_groups_of_classes_are_shared_by_dirichlet(alpha, purity):
    federation = partitioned("grouped_labels", alpha=alpha)
    assert len(federation) == 30
    rows = federation.train.index.tolist() + federation.test.index.tolist()
    assert sorted(rows) == list(range(3000))
    assert (federation.train.sizes + federation.test.sizes).min() >= 10
    together = (federation.label_counts() > 0).double().T @ (federation.label_counts() > 0).double()
    assert together.shape == (10, 10)
    # The share of a client's samples that are of its largest group of classes.
    counts = (federation.label_counts() + federation.label_counts("test")).double()
    classes = Rng.seed(0).at("scenario", "classes").permutation(10)
    of_group = torch.stack([counts[:, part].sum(1) for part in torch.tensor_split(classes, 3)], dim=1)
    assert torch.equal(of_group.argmax(1), federation.groups)
    share = (of_group.max(1).values / counts.sum(1)).mean()
    assert share > purity if alpha < 1 else share < purity + 0.1


def test_fewer_samples_in_all():
    federation = partitioned("grouped_labels", total=900)
    assert len(federation.train.index) + len(federation.test.index) == 900
    with pytest.raises(DataError, match="has 3000 samples, fewer than scenario.total=9000"):
        partitioned("grouped_labels", total=9000)
    with pytest.raises(ConfigError, match="cannot form 11 groups"):
        partitioned("grouped_labels", groups=11)
    with pytest.raises(ConfigError, match="do not join it"):
        partitioned("multi_source+grouped_labels", dataset=data(group=np.arange(3000) % 3))


@pytest.mark.parametrize("name", ["iid", "grouped_labels", "by_user", "shards"])
def test_the_servers_samples_are_in_no_shard(name):
    users = {"user": np.arange(3000) % 30, "user_names": tuple(f"u{i}" for i in range(30))}
    federation = partitioned(name, dataset=data(**users), reserve=5)
    reserved = federation.reserved.tolist()
    assert torch.bincount(federation.y[reserved], minlength=10).tolist() == [5] * 10
    for split in (federation.train, federation.valid, federation.test):
        assert not set(reserved) & set(split.index.tolist())
    x, y = federation.reserved_samples()
    assert x.shape == (50, 1)
    assert y.tolist() == federation.y[reserved].tolist()
    assert partitioned(name, dataset=data(**users)).reserved is None


def test_too_many_for_the_server():
    with pytest.raises(DataError, match="would be reserved for the server"):
        partitioned("iid", reserve=200)


def test_manifest_counts_what_clients_hold():
    manifest = partitioned("grouped_labels", reserve=2).manifest()
    assert manifest["reserved"] == 20
    assert [sum(row) for row in manifest["label_counts"]] == manifest["train"]
    assert len(manifest["clients"]) == 30
