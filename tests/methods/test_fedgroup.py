"""FedGroup: the decomposed similarity, the cold start, and how newcomers are placed."""

from __future__ import annotations

import pytest
import torch

from coterie.engines.mock import MockEngine
from coterie.methods.fedgroup import FedGroup, edc
from coterie.randomness import Rng
from coterie.runs.loop import Schedule
from tests.helpers import finished, ragged_federation, setup_of, trainer_of

WAYS = torch.tensor([[1.0, 0.0], [0.0, 1.0]])


def mock(num_clients=8, moves=None):
    """Even clients move along one axis, odd ones along the other; the higher the id, the farther."""

    def respond(step, client, sent):
        way = WAYS[client % 2] if moves is None else moves[client]
        return {"params": sent + way * (1 + client), "samples": client + 1}

    return MockEngine(respond, num_clients=num_clients)


def same(labels):
    return (labels.unsqueeze(0) == labels.unsqueeze(1)).tolist()


def test_features_are_cosines_with_singular_directions():
    rows = Rng.seed(0).normal(7, 20)
    _, _, directions = torch.linalg.svd(rows, full_matrices=False)
    expected = torch.nn.functional.normalize(rows, dim=1) @ directions[:3].T
    found = edc(rows, 3).flip(1)  # eigenvalues ascend
    assert torch.allclose(found.abs(), expected.abs(), atol=1e-9)  # a direction has no sign of its own
    assert torch.allclose(torch.cdist(found, found), torch.cdist(expected, expected), atol=1e-9)


def test_the_length_of_an_update_does_not_matter():
    rows = Rng.seed(1).normal(2, 30)[[0, 1, 0, 1]] * torch.tensor([[1.0], [1.0], [50.0], [0.01]])
    found = edc(rows, 2)
    assert torch.allclose(found[0], found[2], atol=1e-6)
    assert torch.allclose(found[1], found[3], atol=1e-6)
    assert edc(torch.zeros(3, 4), 2).tolist() == [[0.0, 0.0]] * 3


def test_the_cold_start_averages_its_clients_and_the_others_join_by_direction():
    engine = mock(30)
    method = FedGroup(num_clusters=2)
    state = method.start(engine.task, engine, Rng.seed(0))
    cold = (state.labels >= 0).nonzero().flatten()
    assert len(cold) == 10  # five for each cluster; a quarter would be eight
    for cluster in (0, 1):
        mine = [i for i in cold.tolist() if state.labels[i] == cluster]
        assert len({i % 2 for i in mine}) == 1
        length = sum((1 + i) ** 2 for i in mine) / sum(1 + i for i in mine)
        assert torch.allclose(state.centers[cluster], WAYS[mine[0] % 2] * length)
    engine.begin(1, "round")
    after = method.round(state, engine, engine.everyone(), Rng.seed(1))
    assert same(after.labels) == same(torch.arange(30) % 2)
    assert [len(clients) for _, clients in engine.calls] == [10, 20, 30]  # cold start, newcomers, everyone


def test_newcomers_are_compared_by_updates_and_not_by_weights():
    """Whole weights are almost parallel; by them every newcomer would join the same cluster."""
    engine = mock(12)
    engine.task.initial.fill_(3.0)
    method = FedGroup(num_clusters=2)
    state = method.start(engine.task, engine, Rng.seed(0))
    found = method.assign(state, engine, torch.arange(12), Rng.seed(5))
    assert same(found) == same(torch.arange(12) % 2)


def test_newcomers_train_from_the_initial_weights_and_not_from_a_later_model():
    sent = []

    def respond(step, client, given):
        sent.append(given.clone())
        return {"params": given + WAYS[client % 2], "samples": 1}

    engine = MockEngine(respond, num_clients=24)
    method = FedGroup(num_clusters=2, share=0.1)
    state = method.start(engine.task, engine, Rng.seed(0))
    for number in (1, 2):
        engine.begin(number, "round")
        state = method.round(state, engine, (state.labels >= 0).nonzero().flatten(), Rng.seed(number))
    sent.clear()
    new = (state.labels < 0).nonzero().flatten()
    method.assign(state, engine, new, Rng.seed(3))
    assert all(torch.equal(given, engine.initial()) for given in sent)


def test_clients_never_move():
    engine = mock(20)
    method = FedGroup(num_clusters=2)
    state = method.start(engine.task, engine, Rng.seed(0))
    engine.begin(1, "round")
    state = method.round(state, engine, engine.everyone(), Rng.seed(1))
    first = state.labels.clone()
    engine._respond = lambda step, client, sent: {"params": sent - WAYS[client % 2] * 3, "samples": 1}
    state = method.round(state, engine, engine.everyone(), Rng.seed(2))
    assert torch.equal(state.labels, first)


def test_the_cold_start_is_made_up_for_if_nobody_answered():
    engine = mock(20)
    engine.dropout = 1.0
    method = FedGroup(num_clusters=2)
    state = method.start(engine.task, engine, Rng.seed(0))
    assert state.labels.tolist() == [-1] * 20
    engine.dropout = 0.0
    engine.begin(1, "round")
    state = method.round(state, engine, engine.everyone(), Rng.seed(1))
    assert same(state.labels) == same(torch.arange(20) % 2)


def test_no_call_asks_more_than_a_cohort():
    run = trainer_of(setup_of(FedGroup(num_clusters=2), ragged_federation(40), schedule=Schedule(participation=0.1)))
    run._start()
    assert run.engine.ledger.totals()["by_step"]["start/train"]["largest_call"] == 4
    assert int((run.state.labels >= 0).sum()) == 10


def test_after_placing_it_costs_as_much_as_fedavg():
    run = finished(setup_of(FedGroup(num_clusters=1), schedule=Schedule(rounds=3)))
    totals, size = run.engine.ledger.totals(), run.engine.task.layout.size * 8
    cold = 5
    assert totals["start"]["up"] == cold * size
    assert totals["up"] == (3 * 9 + (9 - cold)) * size


@pytest.mark.parametrize("seed", range(2))
def test_finds_the_groups_of_rotated_digits(seed):
    import coterie

    assert coterie.run("fedgroup", "rotated-digits", rounds=2, seed=seed).summary["ari"] > 0.9
