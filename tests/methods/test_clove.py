"""CLoVE: loss vectors, their matching to models, and when clusters are fixed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coterie.engines.mock import MockEngine
from coterie.methods.clove import CLoVE
from coterie.methods.fedavg import FedAvg
from coterie.randomness import Rng
from coterie.runs.loop import Schedule
from tests.helpers import finished, setup_of

KINDS = [0, 0, 0, 1, 1, 1]


def mock(losses=None):
    """Client i of kind k has the loss losses[k], and its model moves by i + 1."""
    table = torch.tensor([[1.0, 5.0], [2.0, 9.0]]) if losses is None else losses

    def respond(step, client, sent):
        if step == "judge":
            return {"losses": table[KINDS[client]]}
        if step == "choose":
            return {"choice": table[KINDS[client]].argmin()}
        return {"params": sent + client + 1, "samples": client + 1}

    return MockEngine(respond, num_clients=6)


def begun(method, engine):
    state = method.start(engine.task, engine, Rng.seed(0))
    return replace(state, centers=torch.tensor([[0.0, 0.0], [10.0, 10.0]]))


def played(method, engine, state, rounds, first=1):
    for number in range(first, first + rounds):
        engine.begin(number, "round")
        state = method.round(state, engine, engine.everyone(), Rng.seed(number))
    return state


def test_clusters_are_those_of_the_vectors_and_not_of_the_best_model():
    """Both kinds have the lowest loss with model 0: by that rule (IFCA) model 1 would have no client."""
    engine, method = mock(), CLoVE(num_clusters=2)
    after = played(method, engine, begun(method, engine), 1)
    # 3 * 1 + 3 * 9 = 30 is more than 3 * 5 + 3 * 2 = 21: kind 1 gets model 0.
    assert after.labels.tolist() == [1, 1, 1, 0, 0, 0]
    assert torch.allclose(after.centers[1], torch.tensor(10 + (1 + 4 + 9) / 6))
    assert torch.allclose(after.centers[0], torch.tensor((16 + 25 + 36) / 15))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 0, 2]])
def test_names_follow_the_models(order):
    losses = torch.tensor([[0.1, 9.0, 9.0], [9.0, 0.1, 9.0], [9.0, 9.0, 0.1]], dtype=torch.float64)[order]
    rows = losses.repeat_interleave(3, dim=0) + 0.01 * Rng.seed(0).normal(9, 3)
    found = CLoVE(num_clusters=3)._clusters(rows, torch.arange(9), Rng.seed(0))
    assert found.tolist() == torch.tensor(order).repeat_interleave(3).tolist()


def test_fewer_clients_than_models():
    losses = torch.tensor([[9.0, 9.0, 1.0], [1.0, 9.0, 9.0]], dtype=torch.float64)
    assert CLoVE(num_clusters=3)._clusters(losses, torch.arange(2), Rng.seed(0)).tolist() == [2, 0]


def test_each_model_starts_from_a_part_of_the_clients():
    engine = MockEngine(lambda step, client, sent: {"params": sent + 2.0**client, "samples": 1}, num_clients=6)
    state = CLoVE(num_clusters=3, weighting="equal").start(engine.task, engine, Rng.seed(0))
    sums = (2 * state.centers[:, 0]).round().long().tolist()  # two clients each: the bits say which
    assert sum(sums) == 63
    assert all(bin(number).count("1") == 2 for number in sums)
    assert state.labels.tolist() == [-1] * 6
    assert float(state.common[0]) == pytest.approx(63 / 6)


@pytest.mark.parametrize("patience", [1, 3])
def test_clusters_are_fixed_after_rounds_without_a_move(patience):
    engine, method = mock(), CLoVE(num_clusters=2, patience=patience)
    state = begun(method, engine)
    engine.calls.clear()
    played(method, engine, state, 6)
    assert [name for name, _ in engine.calls] == ["judge", "train"] * patience + ["train"] * (6 - patience)


def test_a_move_starts_the_count_again():
    table = torch.tensor([[1.0, 5.0], [5.0, 1.0]])
    engine, method = mock(table), CLoVE(num_clusters=2, patience=3)
    state = played(method, engine, begun(method, engine), 2)
    assert state.stayed.tolist() == [2] * 6
    KINDS[0] = 1
    try:
        moved = played(method, engine, state, 1, first=3)
    finally:
        KINDS[0] = 0
    assert moved.labels.tolist() == [1, 0, 0, 1, 1, 1]
    assert moved.stayed.tolist() == [0] * 6
    assert not moved.fixed


def test_everyone_must_have_judged_before_clusters_are_fixed():
    engine, method = mock(torch.tensor([[1.0, 5.0], [5.0, 1.0]])), CLoVE(num_clusters=2, patience=1)
    state, fixed = begun(method, engine), []
    state = replace(state, labels=torch.tensor([0, 0, 0, 1, 1, -1]))
    for number, cohort in enumerate([[0, 3], [1, 4], [2, 3]], start=1):
        engine.begin(number, "round")
        state = method.round(state, engine, torch.tensor(cohort), Rng.seed(number))
        fixed.append(state.fixed)
    assert fixed == [False, False, True]
    engine.begin(4, "round")
    after = method.round(state, engine, torch.tensor([5, 0]), Rng.seed(4))  # a newcomer, by its lowest loss
    assert after.labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_client_whose_losses_are_missing_does_not_train():
    engine, method = mock(), CLoVE(num_clusters=2)
    state = begun(method, engine)
    respond = engine._respond

    def failing(step, client, sent):
        if step == "judge" and client == 5:
            raise RuntimeError("no")
        return respond(step, client, sent)

    engine._respond = failing
    after = played(method, engine, state, 1)
    assert after.labels.tolist() == [1, 1, 1, 0, 0, -1]
    assert engine.calls[-1] == ("train", [0, 1, 2, 3, 4])


def test_traffic():
    schedule = Schedule(rounds=2)
    one = finished(setup_of(FedAvg(), schedule=schedule)).engine.ledger.totals()
    many = finished(setup_of(CLoVE(num_clusters=3, patience=5), schedule=schedule)).engine.ledger.totals()
    assert many["down"] == 3 * one["down"]  # the model to train is one of those that were judged
    assert many["up"] == one["up"] + 2 * 9 * 3 * 8  # and the losses


@pytest.mark.parametrize("seed", range(3))
def test_finds_the_groups_of_rotated_digits(seed):
    import coterie

    assert coterie.run("clove", "rotated-digits", rounds=4, seed=seed).summary["ari"] == 1.0
