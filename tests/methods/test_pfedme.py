"""pFedMe: every step against a loop, the envelope's minimum in closed form, and theta is what is served."""

from __future__ import annotations

import pytest
import torch

from coterie.client.work import SGD
from coterie.errors import ConfigError
from coterie.methods.pfedme import PFedMe
from coterie.runs.loop import Schedule
from coterie.runs.result import personal_vector
from tests.convex import gradient, hessian, problem, trainer
from tests.helpers import finished, setup_of, trainer_of


@pytest.mark.parametrize("beta", [1.0, 0.4])
def test_three_rounds_against_a_loop(beta):
    federation, xs, ys = problem()
    lr, lam, eta, steps = 0.05, 3.0, 0.2, 4
    method = PFedMe(lam=lam, eta=eta, inner_steps=3, beta=beta)
    run = trainer(method, federation, SGD(lr=lr, steps=steps, batch_size="full"), rounds=3)
    run._start()
    center = run.state.centers[0].clone()
    run.run()
    own = []
    for _ in range(3):
        sent, own = [], []
        for x, y in zip(xs, ys, strict=True):
            w = center
            for _ in range(steps):
                theta = w
                for _ in range(3):
                    theta = (theta - lr * gradient(x, y, theta) + lr * lam * w) / (1 + lr * lam)
                w = w - eta * lam * (w - theta)
            sent.append(w)
            own.append(theta)
        center = (1 - beta) * center + beta * torch.stack(sent).mean(0)
    assert torch.allclose(run.state.centers[0], center, rtol=1e-10)
    for client, theta in enumerate(own):
        assert torch.allclose(personal_vector(run, client), theta, rtol=1e-9)


def test_converges_to_the_minimum_of_the_mean_envelope():
    """On a quadratic the envelope has the Hessian lam H (H + lam I)^-1 around the client's own minimum."""
    federation, xs, ys = problem()
    lam = 2.0
    work = SGD(lr=0.1, steps=1, batch_size="full")
    run = trainer(PFedMe(lam=lam, inner_steps=40), federation, work, rounds=60, evaluate_every=60)
    run.run()
    eye = torch.eye(3, dtype=torch.float64)
    bent = [lam * hessian(x) @ torch.linalg.inv(hessian(x) + lam * eye) for x in xs]
    best = [torch.linalg.lstsq(x, y).solution for x, y in zip(xs, ys, strict=True)]
    expected = torch.linalg.solve(sum(bent), sum(b @ w for b, w in zip(bent, best, strict=True)))
    w = run.state.centers[0]
    assert torch.allclose(w, expected, rtol=1e-4)
    for client, (x, y) in enumerate(zip(xs, ys, strict=True)):
        theta = personal_vector(run, client)
        assert torch.allclose(lam * (w - theta), gradient(x, y, theta), atol=1e-3)  # the inner problem is solved


def test_a_strong_pull_does_not_diverge():
    run = finished(setup_of(PFedMe(lam=1000.0)))
    assert not run.engine.failures
    away = (run.engine.memory_tensors()["value.model"] - run.state.centers).norm(dim=1)
    assert float(away.max()) < 0.1


def test_an_absent_client_keeps_its_model():
    run = trainer_of(setup_of(PFedMe()))
    run._start()
    run._round(1)
    before = run.engine.memory_tensors()["value.model"].clone()
    run.engine.begin(2, "round")
    run.state = run.algorithm.round(run.state, run.engine, torch.tensor([3, 7]), run._rng.at("test"))
    changed = (run.engine.memory_tensors()["value.model"] != before).any(1)
    assert changed.nonzero().flatten().tolist() == [3, 7]
    assert torch.equal(personal_vector(run, 0), before[0])


def test_costs():
    run = finished(setup_of(PFedMe(inner_steps=4), schedule=Schedule(rounds=2)))
    totals, size = run.engine.ledger.totals(), run.engine.task.layout.size * 8
    assert (totals["down"], totals["up"]) == (2 * 9 * size, 2 * 9 * size)
    samples = int(run.federation.train.sizes.sum()) * run.engine.task.work.epochs
    assert totals["gradients"]["round"] == 2 * 4 * samples


def test_a_step_beyond_theta_is_refused():
    with pytest.raises(ConfigError, match=r"eta of PFedMe must be at most 1 / lam, 0\.1\. Got 0\.2 instead"):
        PFedMe(lam=10.0, eta=0.2).check(9)
