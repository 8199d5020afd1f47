from __future__ import annotations

import pytest
import torch

from coterie.client.work import SGD
from coterie.engines.mock import MockEngine
from coterie.methods.fedavg import FedAvg
from coterie.methods.feddist import FedDist
from coterie.methods.fedprox import FedProx
from coterie.randomness import Rng
from coterie.runs.result import personal_vector
from tests.convex import gradient, problem, trainer
from tests.helpers import assert_same, finished, outcome, setup_of


def respond(step, client, sent):
    return {"params": sent + torch.tensor([1.0, 10.0]) * (client + 1), "samples": client + 1}


@pytest.mark.parametrize(("weighting", "expected"), [("samples", [14 / 6, 140 / 6]), ("equal", [2.0, 20.0])])
def test_mean_of_the_answers(weighting, expected):
    engine = MockEngine(respond, num_clients=3, chunk=2)
    method = FedAvg(weighting=weighting)
    state = method.start(engine.task, engine, Rng.seed(0))
    after = method.round(state, engine, engine.everyone(), Rng.seed(0))
    assert after.centers[0].tolist() == pytest.approx(expected)
    assert after.labels.tolist() == [0, 0, 0]


def test_nobody_answers():
    def silent(step, client, sent):
        raise RuntimeError("off")

    engine = MockEngine(silent, num_clients=2)
    state = FedAvg().start(engine.task, engine, Rng.seed(0))
    after = FedAvg().round(state, engine, engine.everyone(), Rng.seed(0))
    assert torch.equal(after.centers, state.centers)
    assert after.labels.tolist() == [-1, -1]


def test_without_adaptation_the_center_is_served():
    federation, _, _ = problem()
    run = trainer(FedAvg(adapt_lr=0.3), federation, SGD(lr=0.1, steps=1, batch_size="full"))
    run.run()
    assert torch.equal(personal_vector(run, 0), run.state.centers[0])


@pytest.mark.parametrize("lr", [None, 0.02])
def test_fine_tuning_is_gradient_steps_on_training_data(lr):
    federation, xs, ys = problem()
    method = FedAvg(adapt_steps=3, adapt_lr=lr)
    run = trainer(method, federation, SGD(lr=0.1, steps=1, batch_size="full"))
    run.run()
    expected = run.state.centers[0]
    for _ in range(3):
        expected = expected - (lr or 0.1) * gradient(xs[1], ys[1], expected)
    assert torch.allclose(personal_vector(run, 1), expected, rtol=1e-12)


@pytest.mark.parametrize("method", [FedAvg, FedProx, FedDist])
def test_fine_tuning_does_not_change_the_server(method):
    plain, tuned = finished(setup_of(method())), finished(setup_of(method(adapt_steps=5)))
    assert_same(outcome(plain)["state"], outcome(tuned)["state"])
    assert outcome(plain)["memory"] == outcome(tuned)["memory"] == {}
    assert plain.progress.rows[-1]["loss"] != tuned.progress.rows[-1]["loss"]
    assert plain.engine.ledger.totals()["gradients"]["round"] == tuned.engine.ledger.totals()["gradients"]["round"]
