"""Kinds that see the same samples differently, and clients that change their kind."""

from __future__ import annotations

import pytest
import torch

from coterie.data.dataset import Dataset
from coterie.data.scenario import Scenario
from coterie.errors import ConfigError, DataError
from coterie.methods.fedavg import FedAvg
from coterie.randomness import Rng
from coterie.runs.loop import Schedule
from tests.helpers import finished, setup_of


def pictures(channels: int = 1, size: int = 400) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (size, channels, 4, 4), dtype=torch.uint8, generator=generator)
    return Dataset("pictures", x, torch.arange(size) % 10, 10, mean=127.5, std=127.5)


def partitioned(name, clients=8, seed=0, dataset=None, **values):
    return Scenario.named(name, values).partition(dataset or pictures(), clients, Rng.seed(seed))


def test_swapped_pairs_are_disjoint():
    federation = partitioned("label_swapped", groups=4)
    for client, group in enumerate(federation.groups.tolist()):
        _, seen = federation.samples(client)
        plain = federation.y[federation.train.rows(client)]
        changed = (seen != plain).nonzero().flatten()
        assert set(plain[changed].tolist()) == {2 * group, 2 * group + 1}
        assert (seen[changed] + plain[changed] == 4 * group + 1).all()
    counts = federation.label_counts()
    for client in range(8):
        assert counts[client].tolist() == torch.bincount(federation.samples(client)[1], minlength=10).tolist()


def test_rotated_and_swapped_are_zipped():
    federation = partitioned("rotated+label_swapped", 12, groups=4, samples=60, alpha=3.0)
    assert len(federation.views) == 4
    assert [len(view) for view in federation.views] == [1, 2, 2, 2]
    assert federation.groups.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert federation.names[3].startswith("r090-s23-")
    assert federation.train.sizes.tolist() == [54] * 12
    x, _ = federation.samples(3)
    plain = (federation.x[federation.train.rows(3)].float() - 127.5) / 127.5
    assert torch.equal(x, torch.rot90(plain, 1, (-2, -1)))


@pytest.mark.parametrize("name", ["noisy", "blurred", "contrast", "colour"])
def test_shifts_leave_the_first_group_as_it_is(name):
    federation = partitioned(name, 6, dataset=pictures(3), groups=3, strength=1.0)
    change = []
    for client in (0, 2, 4):
        x, y = federation.samples(client)
        plain = (federation.x[federation.train.rows(client)].float() - 127.5) / 127.5
        assert torch.equal(y, federation.y[federation.train.rows(client)])
        change.append((x - plain).abs().mean().item())
    assert change[0] == 0.0
    assert change[1] > 0
    if name != "colour":  # its groups differ in colour, not in strength alone
        assert change[1] < change[2]


def test_drift_moves_clients_to_the_next_kind():
    federation = partitioned("rotated+drift", 40, groups=4, at=[3, 5], share=0.5)
    first, second, third = (federation.at(r) for r in (2, 3, 7))
    assert first is federation
    moved = (second.groups - first.groups) % 4
    assert set(moved.tolist()) == {0, 1}
    assert 8 <= moved.sum() <= 32
    assert set(((third.groups - second.groups) % 4).tolist()) == {0, 1}
    assert torch.equal(second.view, second.groups)
    client = int(moved.nonzero()[0])
    assert not torch.equal(first.samples(client)[0], second.samples(client)[0])
    assert torch.equal(first.train.rows(client), second.train.rows(client))
    assert federation.select([client]).at(3).groups.tolist() == [second.groups[client].item()]


def test_a_run_sees_the_drift():
    federation = partitioned("rotated+drift", 8, groups=2, at=[2], share=0.99)
    setup = setup_of(FedAvg(), federation, model_settings={"hidden": 4}, schedule=Schedule(rounds=2))
    still = setup_of(
        FedAvg(), partitioned("rotated", 8, groups=2), model_settings={"hidden": 4}, schedule=Schedule(rounds=2)
    )
    one, other = finished(setup), finished(still)
    assert one.progress.rows[0]["loss"] == other.progress.rows[0]["loss"]
    assert one.progress.rows[1]["loss"] != other.progress.rows[1]["loss"]
    assert one.groups().tolist() == federation.moves[0].groups.tolist()


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match="6 groups need 12 classes to swap, but pictures has 10"):
        partitioned("label_swapped", groups=6)
    with pytest.raises(ConfigError, match="parts with 4 and 2 groups"):
        partitioned("rotated+noisy")
    with pytest.raises(DataError, match="colour needs colour images"):
        partitioned("colour")
    with pytest.raises(ConfigError, match="drift needs groups that see the same samples"):
        partitioned("drift")
    with pytest.raises(DataError, match="blurred needs images"):
        partitioned("blurred", dataset=Dataset("flat", torch.zeros(50, 3), torch.arange(50) % 2, 2))
