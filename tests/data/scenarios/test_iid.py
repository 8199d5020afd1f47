"""All clients of one kind."""

from __future__ import annotations

import numpy as np
import torch

from coterie.data.dataset import Dataset
from coterie.data.scenario import Scenario
from coterie.randomness import Rng

DATA = Dataset("d", torch.randn(103, 2), torch.arange(103) % 4, num_classes=4, is_train=np.arange(103) < 90)


def partitioned(clients, seed=0):
    return Scenario.named("iid", {"valid": 0.0}).partition(DATA, clients, Rng.seed(seed))


def test_shares_are_even_and_complete():
    federation = partitioned(7)
    assert sorted(federation.train.sizes.tolist()) == [12, 13, 13, 13, 13, 13, 13]
    assert sorted(federation.train.index.tolist()) == list(range(90))


def test_all_clients_share_one_test_shard():
    federation = partitioned(7)
    assert federation.test.shard.tolist() == [0] * 7
    assert federation.test.index.tolist() == list(range(90, 103))


def test_there_are_no_true_groups():
    assert partitioned(3).groups is None


def test_samples_are_distributed_at_random():
    federation = partitioned(3)
    assert federation.train.rows(0).tolist() != sorted(federation.train.rows(0).tolist())
    # A share of 30 out of 90 rows in order would have a mean row of 14.5.
    assert all(30 < float(federation.train.rows(i).double().mean()) < 60 for i in range(3))


def test_names():
    assert partitioned(2).names == ("all-000", "all-001")


def test_one_client_gets_everything():
    assert partitioned(1).train.sizes.tolist() == [90]
