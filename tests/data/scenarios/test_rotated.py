"""Groups with rotated images."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coterie.data.dataset import Dataset
from coterie.data.scenario import Scenario
from coterie.data.transforms import Rotate
from coterie.errors import DataError
from coterie.randomness import Rng


def pictures(size=40, height=3, width=3):
    x = torch.from_numpy(np.random.default_rng(0).random((size, 1, height, width), dtype=np.float32))
    return Dataset("pictures", x, torch.arange(size) % 5, num_classes=5, is_train=np.arange(size) < size - 10)


def partitioned(dataset, clients=8, **values):
    return Scenario.named("rotated", {"valid": 0.0, **values}).partition(dataset, clients, Rng.seed(0))


def test_four_groups_by_quarter_turns():
    federation = partitioned(pictures())
    assert federation.views == ((), (Rotate(90.0),), (Rotate(180.0),), (Rotate(270.0),))
    assert federation.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert federation.view.tolist() == federation.groups.tolist()
    assert federation.names[::2] == ("r000-000", "r090-000", "r180-000", "r270-000")


def test_clients_see_their_samples_rotated():
    data = pictures()
    federation = partitioned(data)
    for client in (0, 2, 5, 7):
        for split in ("train", "test"):
            rows = federation.split(split).rows(client)
            expected = np.rot90(data.x[rows].numpy(), int(federation.groups[client]), axes=(2, 3))
            np.testing.assert_array_equal(federation.samples(client, split)[0].numpy(), expected)


def test_every_group_holds_every_training_sample_once():
    federation = partitioned(pictures(), clients=12)
    for group in range(4):
        members = (federation.groups == group).nonzero().flatten().tolist()
        rows = torch.cat([federation.train.rows(i) for i in members]).tolist()
        assert sorted(rows) == list(range(30))


def test_groups_are_partitioned_differently():
    federation = partitioned(pictures())
    assert federation.train.rows(0).tolist() != federation.train.rows(2).tolist()


def test_two_groups_are_upright_and_upside_down():
    assert partitioned(pictures(), groups=2).views == ((), (Rotate(180.0),))


def test_one_group_is_the_data_as_it_is():
    federation = partitioned(pictures(), groups=1)
    assert federation.views == ((),)
    assert federation.groups.tolist() == [0] * 8


def test_uneven_angles_have_distinct_names():
    federation = partitioned(pictures(), clients=7, groups=7)
    assert len(set(federation.names)) == 7
    assert federation.names[1] == "r051-000"


@pytest.mark.parametrize(("height", "width"), [(3, 4), (4, 3)])
def test_only_square_images_can_be_rotated(height, width):
    with pytest.raises(DataError, match="rotated needs square images, but samples of pictures have shape"):
        partitioned(pictures(height=height, width=width))


def test_tables_cannot_be_rotated():
    with pytest.raises(DataError, match=r"samples of table have shape \(4,\), not \(channels, n, n\)\."):
        partitioned(Dataset("table", torch.ones(20, 4), torch.zeros(20, dtype=torch.int64), num_classes=1))
