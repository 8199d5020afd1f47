"""FedSGD is gradient descent on the union of everyone's data."""

from __future__ import annotations

import torch

from coterie.client.work import SGD
from coterie.engines.mock import MockEngine
from coterie.methods.fedsgd import FedSGD
from coterie.randomness import Rng
from tests.convex import gradient, problem, trainer
from tests.helpers import setup_of, trainer_of


def test_equals_centralized_gradient_descent():
    federation, xs, ys = problem()
    run = trainer(FedSGD(), federation, SGD(lr=0.05, momentum=0.9, epochs=7, batch_size=2), rounds=5)
    run._start()
    w = run.state.centers[0].clone()
    run.run()
    x, y = torch.cat(xs), torch.cat(ys)
    for _ in range(5):  # epochs, batches and momentum play no part
        w = w - 0.05 * gradient(x, y, w)
    assert torch.allclose(run.state.centers[0], w, rtol=1e-12, atol=1e-12)


def test_equal_weights_descend_along_the_mean_of_the_clients():
    federation, xs, ys = problem()
    run = trainer(FedSGD(weighting="equal"), federation, SGD(lr=0.1))
    run._start()
    w = run.state.centers[0].clone()
    run.run()
    mean = torch.stack([gradient(x, y, w) for x, y in zip(xs, ys, strict=True)]).mean(0)
    assert torch.allclose(run.state.centers[0], w - 0.1 * mean, rtol=1e-12)


def test_one_gradient_of_every_sample_a_round_is_counted():
    run = trainer_of(setup_of(FedSGD()))
    run.run()
    assert run.engine.ledger.totals()["gradients"]["round"] == 3 * int(run.federation.train.sizes.sum())


def test_nobody_answers():
    def silent(step, client, sent):
        raise RuntimeError("off")

    engine = MockEngine(silent, num_clients=2)
    state = FedSGD().start(engine.task, engine, Rng.seed(0))
    assert FedSGD().round(state, engine, engine.everyone(), Rng.seed(0)) is state
