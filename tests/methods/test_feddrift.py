"""FedDrift: when a client starts a model, when models are merged, and what becomes of their clients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coterie.engines.mock import MockEngine
from coterie.methods.feddrift import DriftState, FedDrift, model_distances
from coterie.methods.parts.clustering import merged_within
from coterie.randomness import Rng
from coterie.runs.experiment import merge, resolve
from coterie.runs.loop import Schedule
from tests.helpers import finished, setup_of, trainer_of


def mock(places):
    """A client's model is its place; the loss of a model is its distance from the place. Places may change later."""

    def respond(step, client, sent):
        if step == "judge":
            return {"losses": (sent[:, 0] - places[client]).abs()}
        if step == "choose":
            return {"choice": (sent[:, 0] - places[client]).abs().argmin()}
        return {"params": torch.full((2,), float(places[client])), "samples": 1}

    return MockEngine(respond, num_clients=len(places))


def state_of(engine, labels, centers, past=0.0):
    start = DriftState.common_start(engine, 1)
    return replace(
        start,
        labels=torch.tensor(labels),
        centers=torch.tensor(centers).unsqueeze(1).expand(-1, 2).clone(),
        past=torch.full((engine.num_clients,), past, dtype=torch.float64),
        alive=torch.ones(len(centers), dtype=torch.bool),
    )


def played(method, engine, state, cohort=None, number=1):
    engine.begin(number, "round")
    return method.round(state, engine, engine.everyone() if cohort is None else torch.tensor(cohort), Rng.seed(number))


def test_distances_are_excess_losses_in_the_worse_direction():
    losses = torch.tensor([[1.0, 4.0, 9.0], [3.0, 2.0, 9.0], [5.0, 4.0, 9.0]], dtype=torch.float64)
    found = model_distances(losses, torch.tensor([0, 1, 1]))
    # Model 0 on its own data 1, on those of model 1 (3 + 5) / 2; model 1 on its own data 3, on those of model 0: 4.
    assert float(found[0, 1]) == pytest.approx(max(4.0 - 1.0, 4.0 - 3.0))
    assert torch.equal(found, found.T)
    assert float(found[0, 2]) > 1e6  # nobody took model 2: nothing is known


def test_linkage_is_complete():
    """A chain does not hold together: its ends are too far apart."""
    places = torch.tensor([0.0, 1.0, 2.1])
    apart = (places.unsqueeze(0) - places.unsqueeze(1)).abs().double()
    assert merged_within(apart, 1.5, "complete").unique(return_counts=True)[1].tolist() in ([2, 1], [1, 2])
    assert merged_within(apart, 2.2, "complete").tolist() == [0, 0, 0]


def test_the_start_merges_models_that_fit_each_other():
    engine = mock([0.0, 0.4, 20.0, 20.4, 0.2])
    state = FedDrift(delta=1.0).start(engine.task, engine, Rng.seed(0))
    low, high = int(state.labels[0]), int(state.labels[2])
    assert state.labels.tolist() == [low, low, high, high, low]
    assert state.centers[low].tolist() == pytest.approx([0.2, 0.2])
    assert state.centers[high].tolist() == pytest.approx([20.2, 20.2])


def test_clients_train_alone_for_longer_at_the_start():
    works = []
    engine = mock([0.0, 5.0])
    call = engine.call

    def spy(step, cohort, work=None, **more):
        works.append(work)
        return call(step, cohort, work=work, **more)

    engine.call = spy
    FedDrift(alone=3).start(engine.task, engine, Rng.seed(0))
    assert works[0].epochs == 3 * engine.task.work.epochs


@pytest.mark.parametrize(("past", "starts"), [(0.0, True), (3.9, True), (4.1, False)])
def test_a_client_starts_a_model_if_its_lowest_loss_has_risen_by_more_than_delta(past, starts):
    engine = mock([0.0, 0.0, 15.0])  # the last one is 5 from the nearest model
    state = state_of(engine, [0, 0, 1], [0.0, 20.0], past=past)
    after = played(FedDrift(delta=1.0), engine, state)
    assert after.labels.tolist() == [0, 0, 2 if starts else 1]
    assert after.num_clusters == (3 if starts else 2)
    assert after.past.tolist() == [0.0, 0.0, 5.0]
    if starts:
        assert after.centers[2].tolist() == [15.0, 15.0]
        assert torch.equal(after.centers[1], state.centers[1])  # nobody trains it any more


def test_a_client_whose_data_are_those_of_another_model_moves_and_starts_none():
    engine = mock([0.0, 0.0, 0.0, 20.0])
    after = played(FedDrift(delta=1.0), engine, state_of(engine, [0, 0, 1, 1], [0.0, 20.0]))
    assert after.labels.tolist() == [0, 0, 0, 1]
    assert after.num_clusters == 2


def test_a_client_without_a_past_takes_the_best_model():
    engine = mock([0.0, 0.0, 15.0])
    after = played(FedDrift(delta=1.0), engine, state_of(engine, [0, 0, -1], [0.0, 20.0]))
    assert after.labels.tolist() == [0, 0, 1]


def test_merging_takes_everyone_along_and_weighs_models_by_clients():
    engine = mock([0.0, 0.0, 0.0, 0.4, 30.0, 0.4])
    state = state_of(engine, [0, 0, 0, 1, 2, 1], [0.0, 0.4, 30.0])
    after = played(FedDrift(delta=1.0), engine, state, cohort=[0, 3, 4])
    assert after.labels.tolist() == [0, 0, 0, 0, 2, 0]  # absent members too
    assert after.alive.tolist() == [True, False, True]
    assert after.num_clusters == 3
    silent = engine._respond

    def respond(step, client, sent):
        if step == "train":
            raise RuntimeError("no")
        return silent(step, client, sent)

    engine._respond = respond
    before_training = played(FedDrift(delta=1.0), engine, state, cohort=[0, 3, 4])
    assert before_training.centers[0].tolist() == pytest.approx([(3 * 0.0 + 2 * 0.4) / 5] * 2)


def test_models_far_from_each_other_are_never_merged():
    engine = mock([0.0, 3.0])
    after = played(FedDrift(delta=1.0), engine, state_of(engine, [0, 1], [0.0, 3.0]))
    assert after.labels.tolist() == [0, 1]
    assert bool(after.alive.all())


def test_a_free_row_is_used_again_and_is_not_shown_before():
    places = [0.0, 0.0, 0.4, 30.0]
    engine = mock(places)
    method = FedDrift(delta=1.0)
    state = played(method, engine, state_of(engine, [0, 0, 1, 2], [0.0, 0.4, 30.0]))
    assert state.alive.tolist() == [True, False, True]
    assert method.assign(state, engine, torch.tensor([2]), Rng.seed(0)).tolist() == [0]  # row 1 would fit as well
    places[3] = 15.0
    after = played(method, engine, state, number=2)
    assert after.labels.tolist() == [0, 0, 0, 1]
    assert after.num_clusters == 3
    assert after.centers[1].tolist() == [15.0, 15.0]


def test_there_are_never_too_many_models():
    places = [0.0, 0.0, 0.0, 0.0]
    engine = mock(places)
    method = FedDrift(delta=1.0, max_clusters=3)
    state = state_of(engine, [0, 0, 0, 0], [0.0])
    places[1:] = [20.0, 30.0, 40.0]
    after = played(method, engine, state)
    assert after.num_clusters == 3
    assert after.labels.tolist() == [0, 1, 2, 0]


def test_clients_of_a_new_kind_find_together():
    places = [0.0] * 3 + [20.0] * 3
    engine = mock(places)
    method = FedDrift(delta=1.0)
    state = method.start(engine.task, engine, Rng.seed(0))
    state = played(method, engine, state)
    places[2] = places[5] = 40.0
    for number in (2, 3, 4):
        state = played(method, engine, state, number=number)
    assert state.labels[2] == state.labels[5]
    assert len(state.labels.unique()) == 3
    assert state.centers[state.labels[2]].tolist() == [40.0, 40.0]


def test_traffic_is_k_models_down():
    run = trainer_of(setup_of(FedDrift(delta=50.0, alone=1), schedule=Schedule(rounds=1)))
    run._start()
    size = 9 * run.engine.task.layout.size * 8
    assert run.engine.ledger.totals()["start"]["down"] == (1 + 9) * size
    run._round(1)
    assert run.state.num_clusters == 1
    assert run.engine.ledger.totals()["down"] == size


@pytest.mark.parametrize(("scenario", "settings"), [("rotated", {}), ("rotated+drift", {"at": [2]})])
def test_finds_the_groups_of_rotated_digits(scenario, settings):
    tables = {"dataset": "rotated-digits", "algorithm": "feddrift", "rounds": 4, "scenario": scenario, "device": "cpu"}
    run = finished(resolve(merge({"run": tables, "scenario": settings})))
    assert run.progress.rows[-1]["ari"] == 1.0
    assert run.state.num_clusters == 4


def test_stragglers_do_not_break_it():
    run = finished(setup_of(FedDrift(), schedule=Schedule(rounds=5, participation=0.5, dropout=0.3)))
    assert bool(torch.isfinite(run.state.centers).all())
