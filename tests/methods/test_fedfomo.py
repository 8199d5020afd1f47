"""FedFomo: the weights of Eq. 4, whose models are sent, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coterie.data.federation import Split
from coterie.engines.mock import MockEngine
from coterie.errors import ConfigError
from coterie.methods.fedfomo import FedFomo, FomoState, mixing_weights
from coterie.randomness import Rng
from coterie.runs.loop import Schedule
from tests.helpers import finished, ragged_federation, setup_of, trainer_of


def test_weights_against_the_closed_form():
    own = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    table = torch.tensor([[3.0, 4.0], [0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    refs = torch.tensor([[0, 1], [1, 2]])
    losses = torch.tensor([[1.0, 1.5], [9.0, 1.0]], dtype=torch.float64)
    found = mixing_weights(torch.tensor([2.0, 2.0], dtype=torch.float64), losses, own, table, refs)
    raw = [(2.0 - 1.0) / 5.0, (2.0 - 1.5) / 2.0]  # better for the distance counts, not only better
    assert found[0].tolist() == pytest.approx([raw[0] / sum(raw), raw[1] / sum(raw)])
    # The first is worse than the own model, the second is the own model: nothing helps.
    assert found[1].tolist() == [0.0, 0.0]


def toy_state(engine, affinity, turn=9):
    state = FedFomo().start(engine.task, engine, Rng.seed(0))
    return replace(state, labels=torch.arange(engine.num_clients), affinity=affinity, turn=turn)


def test_those_who_helped_most_come_first():
    """Sorting the wrong way is a fault of public code."""
    engine = MockEngine(lambda *a, **k: {}, num_clients=6)
    affinity = torch.zeros(6, 6)
    affinity[0] = torch.tensor([9.0, 0.1, 0.5, 0.0, 0.9, 0.2])  # the own entry must not count
    method = FedFomo(others=2, epsilon=0.3, epsilon_decay=0.05)  # after nine rounds nothing is by chance
    chosen = method.chosen(toy_state(engine, affinity), engine.keys, torch.tensor([0]), Rng.seed(0))
    assert chosen.tolist() == [[4, 2]]


def test_nobody_is_sent_its_own_model_or_one_twice():
    engine = MockEngine(lambda *a, **k: {}, num_clients=7)
    method = FedFomo(others=6, epsilon=0.5, epsilon_decay=0.0)
    chosen = method.chosen(toy_state(engine, torch.rand(7, 7)), engine.keys, engine.everyone(), Rng.seed(1))
    for client, row in enumerate(chosen.tolist()):
        assert sorted(row) == [i for i in range(7) if i != client]


@pytest.mark.parametrize(("turn", "expected"), [(1, 0.3), (4, 0.15), (7, 0.0), (20, 0.0)])
def test_epsilon_falls_to_none(turn, expected):
    engine = MockEngine(lambda *a, **k: {}, num_clients=400)
    affinity = torch.zeros(400, 400)
    affinity[:, :5] = torch.arange(5, 0, -1).float()
    method = FedFomo(others=1)
    cohort = torch.arange(10, 400)
    chosen = method.chosen(toy_state(engine, affinity, turn), engine.keys, cohort, Rng.seed(2))
    by_chance = float((chosen[:, 0] != 0).float().mean())
    assert by_chance == pytest.approx(expected, abs=0.07)


def test_in_the_first_round_everyone_only_trains():
    run = trainer_of(setup_of(FedFomo()))
    run._start()
    run._round(1)
    totals = run.engine.ledger.totals()
    assert totals["down"] == 0
    assert "round/train_and_send" in totals["by_step"]
    run._round(2)
    assert run.engine.ledger.totals()["down"] > 0


def test_downloads_as_many_models_as_it_was_told():
    run = finished(setup_of(FedFomo(others=3), schedule=Schedule(rounds=4)))
    size = run.engine.task.layout.size * 8
    totals = run.engine.ledger.totals()
    assert totals["down"] == 3 * 9 * 3 * size  # rounds after the first, clients, models
    assert totals["up"] == 4 * 9 * size + 3 * 9 * 3 * 8  # and the weights


def test_mixes_and_then_trains():
    """With weights known, the mixed model is what training starts from: with a tiny step it is the answer."""
    work = replace(setup_of(FedFomo()).work, lr=1e-12, momentum=0.0, weight_decay=0.0)
    run = trainer_of(setup_of(FedFomo(others=8, epsilon=0.0), work=work))
    run._start()
    run._round(1)
    models = run.state.models + 0.3 * torch.randn(9, run.state.models.shape[1], dtype=torch.float64)
    run.state = replace(run.state, models=models)
    from coterie.client.steps import OWN_MODEL

    run.engine.load_memory(
        {f"value.{OWN_MODEL}": models.clone(), f"present.{OWN_MODEL}": torch.ones(9, dtype=torch.bool)}
    )
    before = run.state.affinity.clone()
    run._round(2)
    given = (run.state.affinity - before).double()
    expected = models + given @ models - given.sum(1, keepdim=True) * models
    assert torch.allclose(run.state.models, expected, atol=1e-6)
    assert float(given.sum()) > 0


def test_the_validation_samples_decide_not_the_test_samples():
    federation = ragged_federation()

    def with_other(split):
        y = federation.y.clone()
        rows = federation.split(split).index
        y[rows] = (y[rows] + 1) % 3
        return finished(setup_of(FedFomo(), replace(federation, y=y))).state.models

    plain = finished(setup_of(FedFomo(), federation)).state.models
    assert torch.equal(with_other("test"), plain)
    assert not torch.equal(with_other("valid"), plain)


def test_without_validation_samples_it_is_refused():
    federation = ragged_federation()
    nothing = Split.of([torch.empty(0, dtype=torch.int64)] * 9)
    with pytest.raises(ConfigError, match="scenario.valid"):
        trainer_of(setup_of(FedFomo(), replace(federation, valid=nothing)))


def test_newcomers_take_the_best_model_they_are_shown():
    run = finished(setup_of(FedFomo(), schedule=Schedule(rounds=4)))
    method, state = run.algorithm, run.state
    run.engine.begin(0, "start")
    found = method.assign(state, run.engine, torch.arange(9), Rng.seed(1))
    assert ((found >= 0) & (found < 9)).all()
    groups = run.federation.groups
    assert float((groups[found] == groups).float().mean()) > 0.7  # the best model is one of the own kind
    nobody = replace(state, labels=torch.full((9,), -1))
    assert method.assign(nobody, run.engine, torch.arange(2), Rng.seed(1)).tolist() == [-1, -1]
    assert isinstance(state, FomoState)
