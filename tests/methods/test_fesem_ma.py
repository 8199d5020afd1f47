from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import coterie
from coterie.client.work import SGD
from coterie.engines.mock import MockEngine
from coterie.errors import ConfigError, ModelError
from coterie.methods.fedavg import FedAvg
from coterie.methods.fesem import FeSEM
from coterie.methods.fesem_ma import FeSEMMA
from coterie.methods.parts.matching import Plan, matched_mean
from coterie.nets.flat import Layout, Network, flatten
from coterie.randomness import Rng
from coterie.runs.loop import Schedule
from tests.helpers import assert_same, finished, outcome, ragged_federation, setup_of, trainer_of

RNG = Rng.seed(0)
SHAPE = (3,)


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


PLAN = Plan.of(network(0), SHAPE)
ONE, OTHER, COMMON = (flatten(network(seed)) for seed in (1, 2, 0))


def shuffled(model, seed):
    """The same function, its hidden units in another order."""
    return PLAN.permute(model, [Rng.seed(seed).permutation(5)])


CLIENTS = torch.stack([shuffled(model, seed) for seed, model in enumerate([ONE, ONE, ONE, OTHER, OTHER, OTHER])])


def engine_of(models=CLIENTS):
    """Clients that answer with these models, whatever they are sent."""

    def respond(step, client, sent, watch=None):
        if step == "choose":
            return {"choice": (outputs_of(sent) - outputs_of(models[client])).flatten(1).norm(dim=1).argmin()}
        return {"params": models[client], "samples": client + 1}

    engine = MockEngine(respond, num_clients=len(models), chunk=4)
    module = network(0)
    engine.task = replace(
        engine.task, module=module, layout=Layout.of(module), initial=flatten(module), input_shape=SHAPE
    )
    engine.begin(1, "round")
    return engine


def state_of(method, engine, centers, labels):
    return replace(method.empty_state(engine), centers=torch.stack(centers), labels=torch.tensor(labels))


def outputs(vector):
    x = Rng.seed(3).normal(20, 3).float()
    module = network(0)
    return Network(module, torch.float32, torch.device("cpu"))(Layout.of(module).unpack(vector), x)


def outputs_of(vectors):
    return torch.stack([outputs(vector) for vector in vectors.reshape(-1, vectors.shape[-1])])


def test_round_brings_permuted_copies_back_to_their_network():
    engine = engine_of()
    wrong = [1, 0, 1, 0, 1, 0]
    after = {}
    for method in (FeSEMMA(num_clusters=2, guard=False), FeSEM(num_clusters=2, guard=False)):
        state = state_of(method, engine, [ONE + 0.01, OTHER - 0.01], wrong)
        after[method.key] = method.round(state, engine, engine.everyone(), RNG)
    matched = after["fesem_ma"]
    assert matched.labels.tolist() == [0, 0, 0, 1, 1, 1]
    # In the order of the center it had.
    assert torch.allclose(matched.centers[0], ONE, atol=1e-6)
    assert torch.allclose(matched.centers[1], OTHER, atol=1e-6)
    for k in range(2):
        assert not torch.allclose(outputs(after["fesem"].centers[k]), outputs(matched.centers[k]), atol=0.05)


def test_distance_is_measured_after_aligning_to_each_center():
    engine = engine_of()
    method = FeSEMMA(num_clusters=2)
    state = state_of(method, engine, [shuffled(ONE, 8) + 0.5, OTHER], [0] * 6)
    found = method.distances(CLIENTS, state, engine)
    assert found[:3, 0].tolist() == pytest.approx([0.25 * len(ONE)] * 3, rel=1e-4)
    assert found[3:, 1].tolist() == pytest.approx([0.0] * 3, abs=1e-9)
    plain = FeSEM(num_clusters=2).distances(CLIENTS, state, engine)
    assert (plain >= found - 1e-6).all()
    assert (plain > found + 0.1).any()


def test_cosine_distance_is_measured_after_aligning_too():
    engine = engine_of()
    method = FeSEMMA(num_clusters=2, distance="cosine")
    far = COMMON + 3 * (ONE - COMMON)  # the same way from the common start
    state = state_of(method, engine, [far, OTHER], [0] * 6)
    models = torch.stack([PLAN.permute(far, [RNG.permutation(5)]), shuffled(OTHER, 4)])
    found = method.distances(models, state, engine)
    assert found.diagonal().tolist() == pytest.approx([0.0, 0.0], abs=1e-5)
    assert found.argmin(1).tolist() == [0, 1]
    assert (found <= 2).all()


def test_members_are_weighted_by_samples():
    engine = engine_of(torch.stack([ONE, shuffled(ONE + 0.01, 5)]))
    method = FeSEMMA(num_clusters=1, weighting="samples")
    after = method.round(state_of(method, engine, [ONE], [0, 0]), engine, engine.everyone(), RNG)
    assert torch.allclose(after.centers[0], ONE + 0.01 * 2 / 3, atol=1e-6)


def test_an_empty_cluster_keeps_its_center_and_a_new_client_finds_its_own():
    engine = engine_of()
    method = FeSEMMA(num_clusters=3, guard=False)
    nobody = ONE + 100
    state = state_of(method, engine, [ONE, OTHER, nobody], [0, 0, -1, 1, 1, 1])
    after = method.round(state, engine, engine.everyone(), RNG)
    assert torch.equal(after.centers[2], nobody)
    assert torch.allclose(after.centers[0], ONE, atol=1e-6)
    assert after.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert engine.calls[0] == ("choose", [2])


def test_start_clusters_models_after_aligning_them_to_the_common_start():
    engine = engine_of()
    engine.begin(0, "start")
    state = FeSEMMA(num_clusters=2, signal="updates").start(engine.task, engine, RNG)
    a, b = int(state.labels[0]), int(state.labels[3])
    assert a != b
    assert state.labels.tolist() == [a, a, a, b, b, b]
    for k, model in ((a, ONE), (b, OTHER)):
        assert torch.allclose(outputs(state.centers[k]), outputs(model), atol=1e-5)


def test_a_network_without_hidden_units_is_fesem_but_for_rounding():
    federation = ragged_federation()
    made = [
        outcome(finished(setup_of(cls(num_clusters=2), federation, model="mclr", model_settings={})))
        for cls in (FeSEM, FeSEMMA)
    ]
    assert made[0]["labels"] == made[1]["labels"]
    assert_same(made[0]["state"], made[1]["state"], exact=False, tolerance=1e-12)


def test_repaired_clusters_are_matched_means_too():
    models = torch.stack([shuffled(model, seed) for seed, model in enumerate([ONE, ONE, OTHER, OTHER])])
    engine = engine_of(models)
    method = FeSEMMA(num_clusters=2)
    state = state_of(method, engine, [(ONE + OTHER) / 2, ONE + 100], [0] * 4)
    after = method.round(state, engine, engine.everyone(), RNG)
    assert len(after.repairs) == 1
    for k in range(2):
        members = models[after.labels == k]
        assert len(members) == 2
        expected, _ = matched_mean(members, PLAN, state.centers[k], sweeps=method.sweeps)
        assert torch.allclose(after.centers[k], expected, atol=1e-6)


# ---- what it refuses ----


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        x = self.first(x.flatten(1)).relu()
        return self.last(x + self.second(x))


def test_a_network_that_cannot_be_matched_is_refused_by_its_layer_before_anybody_is_asked():
    trainer = trainer_of(setup_of(FeSEMMA(num_clusters=2), model=Residual, model_settings={}))
    with pytest.raises(ModelError, match=r"FeSEM-MA cannot match layer 'first' \(Linear\): .* or fesem\.$"):
        trainer.run()
    assert not trainer.engine.ledger.entries


def test_models_that_do_not_fit_are_refused_with_the_number(monkeypatch):
    trainer = trainer_of(setup_of(FeSEMMA(num_clusters=2)))
    monkeypatch.setattr("coterie.engines.base.available_memory", lambda device: 1000)
    with pytest.raises(ConfigError, match="FeSEM-MA holds the models of all 9 clients at once: needs 0.0 GB"):
        trainer.run()


# ---- on data ----


def test_traffic_is_that_of_fedavg_and_the_start():
    one = finished(setup_of(FedAvg())).engine.ledger.totals()
    for first, trainings in (("common", 4), ("independent", 1)):  # only a common start is warmed up
        many = finished(setup_of(FeSEMMA(num_clusters=3, first_models=first))).engine.ledger.totals()
        assert (many["down"], many["up"]) == (one["down"], one["up"])
        assert many["start"]["down"] == trainings * one["down"] // 3


def test_from_independent_starts_matching_is_what_makes_the_mean_useful():
    """Everyone starts from a model of its own; after one round of much work the center is their mean."""
    from coterie.runs.experiment import merge, resolve

    federation = resolve(merge({"run": {"dataset": "digits", "scenario": "iid", "clients": 4}})).federation()
    work = SGD(lr=0.2, epochs=20, batch_size=20)
    method = FeSEMMA(num_clusters=1, first_models="independent", guard=False)
    setup = setup_of(method, federation, model_settings={"hidden": 10}, work=work, schedule=Schedule(rounds=1))
    scores = []
    for average in (FeSEMMA.average, FeSEM.average):
        trainer = trainer_of(setup)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FeSEMMA, "average", average)
            trainer._start()
        trainer._evaluate(1, trainer._evaluation(1))
        scores.append(trainer.progress.scores[-1]["accuracy"].mean())
    assert scores[0] >= scores[1] + 0.15


def test_independent_first_models_are_each_clients_own():
    trainer = trainer_of(setup_of(FeSEMMA(num_clusters=2, first_models="independent")))
    call, sent = trainer.engine.call, {}

    def recorded(step, cohort, **more):
        sent.update({int(c): more["models"][int(row)] for c, row in zip(cohort, more["refs"], strict=True)})
        yield from call(step, cohort, **more)

    trainer.engine.call = recorded
    trainer._start()
    assert any("starts as with init=paper" in note for note in trainer.engine.notes)
    assert len(torch.unique(torch.stack(list(sent.values())), dim=0)) == 9
    trainer._round(1)
    assert len(torch.unique(torch.stack(list(sent.values())), dim=0)) == 2  # from then on the centers


@pytest.mark.parametrize("settings", [{}, {"init": "paper"}, {"init": "paper", "first_models": "independent"}])
def test_only_the_start_that_is_not_as_asked_is_noted(settings):
    trainer = trainer_of(setup_of(FeSEMMA(num_clusters=2, **settings)))
    trainer._start()
    assert not any("init=paper" in note for note in trainer.engine.notes)


def test_finds_the_groups_of_rotated_digits():
    summary = coterie.run("fesem_ma", "rotated-digits", rounds=5).summary
    assert summary["ari"] == 1.0
    assert summary["accuracy"]["macro"] >= 0.93
