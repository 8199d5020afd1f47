"""FedProx: the squared norm; without it FedAvg, with much of it nobody moves."""

from __future__ import annotations

import pytest
import torch

from coterie.client.work import SGD
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedprox import FedProx
from tests.convex import gradient, hessian, problem, trainer
from tests.helpers import assert_same, finished, outcome, setup_of


def test_without_a_pull_it_is_fedavg():
    one, other = outcome(finished(setup_of(FedAvg()))), outcome(finished(setup_of(FedProx(mu=0.0))))
    assert_same(one["state"], other["state"])
    assert one["rows"] == other["rows"]


def test_with_a_large_pull_it_stays():
    federation, _, _ = problem()
    run = trainer(FedProx(mu=1e4), federation, SGD(lr=1e-4, steps=200, batch_size="full"))
    run._start()
    start = run.state.centers[0].clone()
    run.run()
    assert float((run.state.centers[0] - start).norm()) < 1e-3


@pytest.mark.parametrize(("mu", "steps"), [(0.5, 500), (2.0, 150)])
def test_converged_clients_are_at_the_minimum_of_loss_and_squared_distance(mu, steps):
    """With the unsquared norm, a known fault, the pull would not fade near the start."""
    federation, xs, ys = problem()
    run = trainer(FedProx(mu=mu, weighting="equal"), federation, SGD(lr=0.1, steps=steps, batch_size="full"))
    run._start()
    w = run.state.centers[0].clone()
    run.run()
    eye = torch.eye(len(w), dtype=w.dtype)
    minima = [w - torch.linalg.solve(hessian(x) + mu * eye, gradient(x, y, w)) for x, y in zip(xs, ys, strict=True)]
    assert torch.allclose(run.state.centers[0], torch.stack(minima).mean(0), rtol=1e-8, atol=1e-10)
