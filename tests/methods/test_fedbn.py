"""FedBN: normalisation layers stay with the client, statistics included; without any it is FedAvg."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coterie.methods.fedavg import FedAvg
from coterie.methods.fedbn import FedBN, norms_of
from coterie.runs.loop import Schedule
from coterie.runs.newcomers import onboard
from coterie.runs.result import personal_vector
from tests.helpers import assert_same, finished, outcome, ragged_federation, setup_of, trainer_of


def with_norm(input_shape, outputs, norm=nn.BatchNorm1d):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), norm(6), nn.ReLU(), nn.Linear(6, outputs))


def own(norm=None, **changes):
    made = with_norm if norm is None else lambda shape, outputs: with_norm(shape, outputs, norm)
    return setup_of(FedBN(), model=made, model_settings={}, **changes)


def test_without_normalisation_it_is_fedavg():
    one, other = finished(setup_of(FedAvg())), finished(setup_of(FedBN()))
    assert_same(one.state.tensors(), other.state.tensors())
    assert one.progress.rows[-1]["loss"]["micro"] == pytest.approx(other.progress.rows[-1]["loss"]["micro"], rel=1e-12)
    assert one.engine.ledger.totals()["up"] == other.engine.ledger.totals()["up"]
    assert outcome(other)["memory"] == {}
    assert any("fedbn is the same as fedavg" in note for note in other.engine.notes)


@pytest.mark.parametrize(
    ("norm", "entries"),
    [(None, 24), (nn.LayerNorm, 12), (lambda n: nn.GroupNorm(2, n), 12), (nn.RMSNorm, 6)],
)
def test_layers_are_found_by_their_type(norm, entries):
    task = trainer_of(own(norm)).engine.task
    mine = norms_of(task)
    assert int(mine.sum()) == entries
    named = [slot.name for slot in task.layout.slots if bool(mine[slot.start])]
    assert all(name.startswith("2.") for name in named)
    assert ("2.running_mean" in named) == (norm is None)


def test_norms_stay_and_all_else_is_the_mean():
    """One round by hand: each client trains the common model; the mean is over the other layers only."""
    run = trainer_of(own())
    run._start()
    mine = norms_of(run.engine.task)
    run._round(1)
    engine, size = run.engine, run.federation.train.sizes.double()
    kept = engine.memory_tensors()["value.part"]
    assert run.state.centers.shape == (1, int((~mine).sum()))  # the server never learns them
    assert len(kept.unique(dim=0)) == 9
    for client in (0, 4):
        vector = personal_vector(run, client)
        assert torch.equal(vector[mine], kept[client])
        assert torch.equal(vector[~mine], run.state.centers[0])
    # A client that is alone gets its own training back, so the mean of those is the center.
    alone = []
    for client in range(9):
        again = trainer_of(own())
        again._start()
        again.engine.begin(1, "round")
        rng = again._rng.at("test")
        alone.append(again.algorithm.round(again.state, again.engine, torch.tensor([client]), rng).centers[0])
    everyone = trainer_of(own())
    everyone._start()
    everyone.engine.begin(1, "round")
    found = everyone.algorithm.round(everyone.state, everyone.engine, engine.everyone(), everyone._rng.at("test"))
    expected = (torch.stack(alone) * size.unsqueeze(1)).sum(0) / size.sum()
    assert torch.allclose(found.centers[0], expected, rtol=1e-9, atol=1e-12)


def test_norms_do_not_travel():
    run = finished(own(schedule=Schedule(rounds=2)))
    size = (run.engine.task.layout.size - 24) * 8
    totals = run.engine.ledger.totals()
    assert (totals["down"], totals["up"]) == (2 * 9 * size, 2 * 9 * size)


def test_an_absent_client_keeps_its_norms():
    run = finished(own(schedule=Schedule(rounds=3)))
    before = run.engine.memory_tensors()["value.part"].clone()
    run.engine.begin(4, "round")
    run.algorithm.round(run.state, run.engine, torch.tensor([1, 2]), run._rng.at("test"))
    after = run.engine.memory_tensors()["value.part"]
    changed = (after != before).any(1)
    assert changed.nonzero().flatten().tolist() == [1, 2]


def test_newcomers_have_statistics_of_their_own_data():
    run = finished(own(schedule=Schedule(rounds=15)))
    found = onboard(
        run.algorithm, run.state, run.engine, ragged_federation(15).select(torch.arange(9, 15)), 15, run._rng.at("new")
    )
    mine = norms_of(run.engine.task)
    rows = torch.stack([served.params[0] for _, served in found.models()])
    assert torch.equal(rows[:, ~mine], run.state.centers.expand(6, -1))
    assert len(rows[:, mine].unique(dim=0)) == 6
    assert found.summary()["accuracy"]["macro"] > 0.6


def test_both_engines_agree_on_a_network_with_norms():
    loop, fast = (finished(own(engine=engine, schedule=Schedule(rounds=3))) for engine in ("loop", "vectorized"))
    one, other = outcome(loop), outcome(fast)
    assert one["ledger"] == other["ledger"]
    for key in ("state", "memory"):
        assert_same(one[key], other[key], exact=False, tolerance=1e-9)
