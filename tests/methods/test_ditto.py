"""Ditto: the pull is towards the received model, the global model is FedAvg's, and the personal one is served."""

from __future__ import annotations

import pytest
import torch

from coterie.client.work import SGD
from coterie.methods.ditto import Ditto
from coterie.methods.fedavg import FedAvg
from coterie.methods.local import Local
from coterie.runs.loop import Schedule
from coterie.runs.result import personal_vector
from tests.convex import gradient, hessian, problem, trainer
from tests.helpers import assert_same, finished, outcome, setup_of, trainer_of


def test_the_global_model_is_fedavg():
    one, other = finished(setup_of(FedAvg())), finished(setup_of(Ditto()))
    assert_same(one.state.tensors(), other.state.tensors())


@pytest.mark.parametrize(("lam", "steps"), [(0.5, 500), (2.0, 150)])
def test_converged_personal_models_are_at_the_minimum_of_loss_and_squared_distance(lam, steps):
    """In the second round start and received model differ: pulled towards the start, the result would be another."""
    federation, xs, ys = problem()
    run = trainer(Ditto(lam=lam), federation, SGD(lr=0.1, steps=steps, batch_size="full"), rounds=2)
    run._start()
    run._round(1)
    w = run.state.centers[0].clone()  # received in round 2
    run._round(2)
    eye = torch.eye(len(w), dtype=w.dtype)
    for client, (x, y) in enumerate(zip(xs, ys, strict=True)):
        expected = w - torch.linalg.solve(hessian(x) + lam * eye, gradient(x, y, w))
        assert torch.allclose(personal_vector(run, client), expected, rtol=1e-8, atol=1e-10)


def test_steps_against_a_loop():
    federation, xs, ys = problem()
    lam, lr = 0.7, 0.05
    run = trainer(Ditto(lam=lam, weighting="equal"), federation, SGD(lr=lr, steps=3, batch_size="full"), rounds=3)
    run._start()
    w = run.state.centers[0].clone()
    run.run()
    own = [w] * len(xs)
    for _ in range(3):
        copies = []
        for client, (x, y) in enumerate(zip(xs, ys, strict=True)):
            v, copy = own[client], w
            for _ in range(3):
                v = v - lr * (gradient(x, y, v) + lam * (v - w))
                copy = copy - lr * gradient(x, y, copy)
            own[client] = v
            copies.append(copy)
        w = torch.stack(copies).mean(0)
    for client, v in enumerate(own):
        assert torch.allclose(personal_vector(run, client), v, rtol=1e-10)


def test_without_a_pull_clients_train_alone():
    federation, _, _ = problem()
    work = SGD(lr=0.1, steps=4, batch_size="full")
    runs = [trainer(method, federation, work, rounds=3) for method in (Ditto(lam=0.0), Local())]
    for run in runs:
        run.run()
    for client in range(3):
        assert torch.allclose(personal_vector(runs[0], client), personal_vector(runs[1], client), rtol=1e-12)


def test_the_two_trainings_draw_their_batches_apart():
    """In the first round both start at the common model; without a pull only the batches can make a difference."""
    run = trainer_of(setup_of(Ditto(lam=0.0, weighting="equal"), work=SGD(lr=0.1, batch_size=3)))
    run._start()
    run._round(1)
    own = run.engine.memory_tensors()["value.model"]
    assert not torch.allclose(own.mean(0), run.state.centers[0], rtol=1e-6)


def test_epochs_of_the_personal_model():
    run = finished(setup_of(Ditto(personal_epochs=5)))
    samples, epochs = int(run.federation.train.sizes.sum()), run.engine.task.work.epochs
    assert run.engine.ledger.totals()["gradients"]["round"] == 3 * samples * (epochs + 5)


def test_an_absent_client_keeps_its_model_and_only_the_global_one_travels():
    run = finished(setup_of(Ditto(), schedule=Schedule(rounds=4, participation=0.4)))
    totals, size = run.engine.ledger.totals(), run.engine.task.layout.size * 8
    assert (totals["down"], totals["up"]) == (4 * 4 * size, 4 * 4 * size)
    memory = run.engine.memory_tensors()
    met = run.state.labels >= 0
    assert torch.equal(memory["present.model"], met)
    before = {name: tensor.clone() for name, tensor in memory.items()}
    cohort = torch.tensor([2, 5])
    run.engine.begin(5, "round")
    run.algorithm.round(run.state, run.engine, cohort, run._rng.at("test"))
    others = torch.tensor([i for i in range(9) if i not in (2, 5)])
    assert torch.equal(memory["value.model"][others], before["value.model"][others])
    assert not torch.equal(memory["value.model"][2], before["value.model"][2])
    assert outcome(run)["memory"].keys() == {"value.model", "present.model"}
