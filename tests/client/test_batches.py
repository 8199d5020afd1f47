"""Samples as clients see them: rendered once or gathered each time, they are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coterie.client.batches import DeviceData, runs
from coterie.data.federation import Federation, Split
from coterie.data.transforms import Rotate, SwapLabels
from tests.helpers import ragged_federation


def shared() -> Federation:
    """Four clients with three views; clients 0 and 2 share a test shard with different views, 1 and 3 with the same."""
    federation = ragged_federation(4)
    test = Split.of([federation.test.rows(0), federation.test.rows(1)], torch.tensor([0, 1, 0, 1]))
    views = ((), (Rotate(90),), (SwapLabels(0, 2),))
    return replace(federation, test=test, views=views, view=torch.tensor([0, 1, 2, 1]))


def seen_by(data: DeviceData, split: str, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    held = data.federation.split(split)
    shard, view = held.shard[client : client + 1], data.federation.view_of(torch.tensor([client]))
    length = held.sizes[client : client + 1]
    where = runs(data.starts(split, shard, view), length)
    return data.at(split, where, view.expand(int(length)))


def data_of(federation: Federation, memory: int) -> DeviceData:
    return DeviceData(federation, torch.device("cpu"), torch.float64, memory)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("memory", [0, 1 << 20], ids=["gathered", "rendered"])
def test_samples_are_what_the_client_sees(split, memory):
    federation = shared()
    data = data_of(federation, memory)
    for client in range(4):
        x, y = seen_by(data, split, client)
        own_x, own_y = federation.samples(client, split)
        torch.testing.assert_close(x, own_x.double())
        assert torch.equal(y, own_y)


def test_they_are_rendered_again_when_clients_change_their_kind():
    federation = shared()
    data = data_of(federation, 1 << 20)
    before = seen_by(data, "train", 0)[0].clone()
    data.federation = replace(federation, view=torch.tensor([1, 1, 2, 0]))
    after = seen_by(data, "train", 0)[0]
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, data.federation.samples(0)[0].double())


def test_training_samples_are_shard_by_shard_or_not_rendered():
    federation = shared()
    ready = data_of(federation, 1 << 20).rendered()
    assert ready is not None
    assert len(ready[0]) == len(federation.train.index)
    assert data_of(federation, 100).rendered() is None
    both = replace(federation, train=federation.test)  # one shard, two views: no single order of shards
    assert data_of(both, 1 << 20).rendered() is None


def test_all_splits_share_the_memory():
    federation = shared()
    needed = len(federation.train.index) * federation.x[0].numel() * 8
    data = data_of(federation, needed)
    assert data.rendered() is not None
    assert data._seen("test") is None
    torch.testing.assert_close(seen_by(data, "test", 0)[0], federation.samples(0, "test")[0].double())
