"""FLUX: when the warm-up ends, the descriptor, its scale, the knee, and clients that come later."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.cluster import DBSCAN

from coterie.data.federation import Split
from coterie.engines.mock import MockEngine
from coterie.errors import ConfigError
from coterie.methods.flux import Flux, descriptor, knee, latents, projection
from coterie.randomness import Rng
from coterie.runs.loop import Schedule
from tests.helpers import finished, ragged_federation, setup_of, trainer_of


def mock(accuracies=(), places=None, num_clients=6):
    """Clients at given places of a line, and a model whose accuracy is known by round."""
    places = [0.0, 0.1, 0.2, 9.0, 9.1, 9.2] if places is None else places

    def respond(step, client, sent, **payload):
        if step == "report":
            return {"accuracy": accuracies[engine.round - 2] if accuracies else 0.5, "samples": 1, "peak": 1.0}
        if step == "describe":
            return {"descriptor": torch.full((2, 1), places[client], dtype=torch.float64)}
        return {"params": sent + client + 1, "samples": client + 1}

    engine = MockEngine(respond, num_clients=num_clients)
    engine.task = replace(engine.task, work=replace(engine.task.work, total_rounds=10))
    return engine


def played(method, engine, rounds, cohorts=None):
    state = method.start(engine.task, engine, Rng.seed(0))
    for number in range(1, rounds + 1):
        engine.begin(number, "round")
        cohort = engine.everyone() if cohorts is None else torch.tensor(cohorts[number - 1])
        state = method.round(state, engine, cohort, Rng.seed(number))
    return state


@pytest.mark.parametrize(
    ("accuracies", "clustered_in"),
    [
        ([0.1, 0.3, 0.5, 0.55, 0.9, 0.9, 0.9, 0.9, 0.9], 5),  # the fourth gains 0.05
        ([0.1, 0.12, 0.5, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9], 4),  # an early small gain counts, but not before round 3
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], 9),  # after 0.8 of the rounds in any case
    ],
)
def test_the_warm_up_ends_by_the_rule(accuracies, clustered_in):
    engine = mock(accuracies)
    played(Flux(), engine, 10)
    steps = [name for name, _ in engine.calls]
    assert steps.count("describe") == 1
    assert steps[: steps.index("describe")].count("train") == clustered_in - 1
    assert steps.count("report") == clustered_in - 1


def test_models_of_the_round_of_clustering_are_averaged_in_clusters():
    engine = mock()
    before = played(Flux(cluster_in=3), engine, 2)
    after = played(Flux(cluster_in=3), engine, 3)
    assert after.labels.tolist() == [0, 0, 0, 1, 1, 1]
    expected = [before.common + (1 + 4 + 9) / 6, before.common + (16 + 25 + 36) / 15]
    assert torch.allclose(after.centers, torch.stack(expected))
    assert torch.equal(after.common, before.common)  # descriptors are computed at it from now on


def test_a_client_that_is_far_from_all_is_a_cluster_of_its_own():
    engine = mock(places=[0.0, 0.1, 0.2, 9.0, 9.1, 50.0])
    state = played(Flux(cluster_in=2), engine, 2)
    assert state.labels.tolist() == [0, 0, 0, 1, 1, 2]


def test_prior_gives_the_number_of_clusters():
    engine = mock(places=[0.0, 1.0, 3.0, 4.0, 90.0, 91.0])
    assert played(Flux(cluster_in=2, prior=3), engine, 2).labels.unique().tolist() == [0, 1, 2]
    assert played(Flux(cluster_in=2, prior=9), engine, 2).num_clusters <= 6


def test_those_who_missed_the_clustering_are_placed_when_they_come_back():
    engine = mock()
    method = Flux(cluster_in=2)
    cohorts = [[0, 1, 3, 4, 5], [0, 1, 3, 4], [5, 2], [0, 1, 2, 3, 4, 5]]
    second = played(method, engine, 2, cohorts)
    # Label 0 is the model of the warm-up, which client 5 still has; nobody else has it.
    assert second.labels.tolist() == [1, 1, -1, 2, 2, 0]
    assert torch.equal(second.centers[0], second.common)
    third = played(method, engine, 3, cohorts)
    assert third.labels.tolist() == [1, 1, 1, 2, 2, 2]
    assert torch.equal(third.centers[0], second.common)
    assert method.assign(third, engine, torch.tensor([3, 0]), Rng.seed(0)).tolist() == [2, 1]


def test_one_who_does_not_answer_waits():
    engine = mock()
    state = played(Flux(cluster_in=2), engine, 2, [[0, 1, 3, 4, 5], [0, 1, 3, 4]])
    silent = engine._respond

    def respond(step, client, sent, **payload):
        if step == "describe":
            raise RuntimeError("no")
        return silent(step, client, sent, **payload)

    engine._respond = respond
    engine.begin(3, "round")
    after = Flux(cluster_in=2).round(state, engine, torch.tensor([2, 5]), Rng.seed(3))
    assert torch.equal(after.labels, state.labels)
    assert torch.equal(after.centers, state.centers)


def test_the_descriptor_by_hand():
    rows = torch.tensor([[0.0, 1.0], [2.0, 3.0], [10.0, 10.0]], dtype=torch.float64)
    found = descriptor(rows, torch.tensor([0, 0, 2]), 3)
    assert found[0].tolist() == pytest.approx([4.0, 14 / 3])
    assert found[1].tolist() == pytest.approx(rows.numpy().std(0))
    assert found[2].tolist() == [1.0, 2.0]  # class 0
    assert found[3].tolist() == found[4].tolist() == [-1.0, -1.0]  # no sample, and only one
    assert found[5].tolist() == [1.0, 1.0]
    assert found[6].tolist() == found[7].tolist() == [-1.0, -1.0]


def test_the_projection_is_orthonormal_and_keeps_no_more_than_there_is():
    middle, directions = projection(30, 4)
    assert torch.allclose(directions @ directions.T, torch.eye(4, dtype=torch.float64))
    assert middle.shape == (30,)
    assert projection(2, 10)[1].shape == (2, 2)


def test_blocks_are_scaled_by_one_range_each():
    from coterie.methods.flux import _scaled

    rows = torch.tensor([[[0.0, 4.0], [1.0, 1.0]], [[2.0, 2.0], [1.0, 1.0]]])
    found = _scaled(rows, rows.amin((0, 2)), rows.amax((0, 2)))
    assert found.tolist() == [[0.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ([1.0, 1.0, 1.0, 1.0, 1.0], 4),  # no range: all of them
        ([1.0, 1.1, 1.2, 1.3, 5.0, 9.0], 3),
        ([0.0, 0.0, 0.0, 10.0], 2),
    ],
)
def test_knees(values, place):
    assert knee(np.array(values)) == place


def test_the_clusters_are_those_of_dbscan():
    rows = Rng.seed(4).normal(30, 2)
    method = Flux()
    found = method._found(rows, torch.arange(30), Rng.seed(0)).numpy()
    distances = np.linalg.norm(rows.numpy()[:, None] - rows.numpy()[None], axis=2)
    nearest = np.sort((distances + np.diag(np.full(30, np.inf))).min(1))
    expected = DBSCAN(eps=nearest[knee(nearest)] * (1 + 1e-12), min_samples=2).fit_predict(rows.numpy())
    alone = expected < 0
    assert 0 < alone.sum() < 30
    same, known = found[:, None] == found[None], expected[:, None] == expected[None]
    assert (same[~alone][:, ~alone] == known[~alone][:, ~alone]).all()
    assert (same[alone].sum(1) == 1).all()


@pytest.mark.parametrize("model", ["mlp", "lenet", "resnet18"])
def test_latents_are_the_inputs_of_a_dense_layer(model):
    federation = ragged_federation(2, shape=(1, 14, 14), samples=6)
    settings = {"resnet18": {"width": 8}, "mlp": {"hidden": 6}}.get(model, {})
    run = trainer_of(setup_of(Flux(), federation, model=model, model_settings=settings))
    task, x = run.engine.task, run.federation.samples(0)[0].double()
    weights = task.initial.double()
    z = latents(run.engine.network, weights, x, first=False)
    named = task.layout.unpack(weights)
    last = max((name for name in named if name.endswith("weight")), key=list(named).index)
    outputs = z @ named[last].T + named[last.replace("weight", "bias")]
    assert torch.allclose(outputs, run.engine.network(named, x), atol=1e-9)
    if model == "mlp":
        assert torch.equal(latents(run.engine.network, weights, x, first=True), x.flatten(1))


def test_a_network_without_a_dense_layer_is_refused():
    def network():
        return torch.nn.Sequential(torch.nn.Conv2d(1, 3, 4), torch.nn.Flatten())

    with pytest.raises(ConfigError, match="dense layer"):
        finished(setup_of(Flux(cluster_in=1), model=network, model_settings={}, schedule=Schedule(rounds=1)))


def test_costs_as_much_as_fedavg_and_one_descriptor():
    from coterie.methods.fedavg import FedAvg

    plain, flux = (
        finished(setup_of(method)).engine.ledger.totals() for method in (FedAvg(), Flux(cluster_in=2, prior=1))
    )
    assert flux["down"] == plain["down"]
    assert flux["up"] == plain["up"] + 9 * (2 + 2 * 3) * 3 * 8


def test_without_validation_samples_it_reports_on_training_samples():
    federation = ragged_federation()
    nothing = Split.of([torch.empty(0, dtype=torch.int64)] * 9)
    without = finished(setup_of(Flux(), replace(federation, valid=nothing))).state
    instead = finished(setup_of(Flux(), replace(federation, valid=federation.train))).state
    assert without.accuracies == instead.accuracies
    assert without.peak == instead.peak > 0


def test_finds_rotated_digits_with_the_prior():
    import coterie

    summary = coterie.run(Flux(prior=4), "rotated-digits", rounds=8, seed=0).summary
    assert summary["ari"] == 1.0
