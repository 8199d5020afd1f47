"""SCAFFOLD: both sides' updates against a loop, the server's control as the mean of all, and drift that is gone."""

from __future__ import annotations

import pytest
import torch

from coterie.client.work import SGD
from coterie.errors import ConfigError
from coterie.methods.fedavg import FedAvg
from coterie.methods.scaffold import Scaffold, plain_steps
from coterie.runs.loop import Schedule
from tests.convex import gradient, hessian, problem, trainer
from tests.helpers import finished, setup_of, trainer_of


def by_hand(x, y, w, own, control, lr, steps, momentum=0.0):
    """y and c_i+ of one client."""
    now, fast, reach, pushed = w, torch.zeros_like(w), 0.0, 0.0
    for _ in range(steps):
        fast = momentum * fast + gradient(x, y, now) - own + control
        pushed = momentum * pushed + 1
        reach += pushed
        now = now - lr * fast
    return now, own - control + (w - now) / (reach * lr)


@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("lr_g", [1.0, 0.7])
def test_rounds_with_some_of_the_clients_against_a_loop(lr_g, momentum):
    federation, xs, ys = problem(sizes=(8, 12, 20, 9))
    lr, steps = 0.05, 3
    work = SGD(lr=lr, steps=steps, batch_size="full", momentum=momentum)
    run = trainer(Scaffold(lr_g=lr_g), federation, work, rounds=4)
    run._start()
    w, control = run.state.centers[0].clone(), torch.zeros(3, dtype=torch.float64)
    own = [torch.zeros(3, dtype=torch.float64) for _ in xs]
    state = run.state
    for number, cohort in enumerate(([0, 1, 2, 3], [1, 3], [0], [2, 3, 0]), start=1):
        run.engine.begin(number, "round")
        state = run.algorithm.round(state, run.engine, torch.tensor(sorted(cohort)), run._rng.at(number))
        found = {i: by_hand(xs[i], ys[i], w, own[i], control, lr, steps, momentum) for i in cohort}
        w = w + lr_g * torch.stack([model - w for model, _ in found.values()]).mean(0)
        change = torch.stack([new - own[i] for i, (_, new) in found.items()]).mean(0)
        control = control + len(cohort) / 4 * change
        for i, (_, new) in found.items():
            own[i] = new
        assert torch.allclose(state.centers[0], w, rtol=1e-9)
        assert torch.allclose(state.control, control, rtol=1e-9, atol=1e-12)
        assert torch.allclose(state.control, torch.stack(own).mean(0), rtol=1e-9, atol=1e-12)
        for i, expected in enumerate(own):
            kept = run.engine.memory_tensors()["value.control"][i]
            assert torch.allclose(kept, expected, rtol=1e-9, atol=1e-12)  # also of the absent


def test_reaches_the_common_minimum_where_fedavg_does_not():
    federation, xs, ys = problem()
    work = SGD(lr=0.05, steps=10, batch_size="full")
    minimum = torch.linalg.solve(
        torch.stack([hessian(x) for x in xs]).mean(0),
        torch.stack([2 * x.T @ y / len(x) for x, y in zip(xs, ys, strict=True)]).mean(0),
    )
    away = []
    for method in (Scaffold(), FedAvg(weighting="equal")):
        run = trainer(method, federation, work, rounds=200)
        run.run()
        away.append(float((run.state.centers[0] - minimum).norm()))
    assert away[0] < 1e-9
    assert away[1] > 1e-2


def test_plain_steps_of_momentum():
    for momentum in (0.0, 0.5, 0.9):
        speed, reach = 0.0, 0.0
        for count in range(1, 8):
            speed = momentum * speed + 1
            reach += speed
            assert float(plain_steps(torch.tensor(count), momentum)) == pytest.approx(reach)


def test_each_client_divides_by_its_own_number_of_steps():
    """Ragged clients: in the first round c_i+ is (x - y) / (K_i lr), with K_i the batches of that client."""
    work = SGD(lr=0.1, batch_size=5, epochs=2)
    run = trainer_of(setup_of(Scaffold(), work=work))
    run._start()
    w = run.state.centers.clone()
    clients = run.engine.everyone()
    run.engine.begin(1, "round")
    run.algorithm.round(run.state, run.engine, clients, run._rng.at("a"))
    kept = run.engine.memory_tensors()["value.control"]
    from coterie.client.steps import train

    refs = torch.zeros(9, dtype=torch.int64)
    for chunk in run.engine.call(train, clients, models=w, refs=refs, work=work, rng=run._rng.at("a")):
        for client, params in zip(chunk.clients.tolist(), chunk.answer.params, strict=True):
            steps = 2 * -(-int(run.federation.train.sizes[client]) // 5)
            assert torch.allclose(kept[client], (w[0] - params) / (steps * 0.1), rtol=1e-8, atol=1e-12)
    assert len(set((2 * -(-run.federation.train.sizes // 5)).tolist())) > 1


def test_messages_are_twice_as_large():
    run = finished(setup_of(Scaffold(), schedule=Schedule(rounds=2, participation=0.4)))
    size = run.engine.task.layout.size * 8
    totals = run.engine.ledger.totals()
    assert (totals["down"], totals["up"]) == (2 * 4 * 2 * size, 2 * 4 * 2 * size)


def test_nobody_answers():
    run = trainer_of(setup_of(Scaffold(), schedule=Schedule(rounds=2, dropout=0.999)))
    run.run()
    assert torch.equal(run.state.centers[0], run.engine.initial())
    assert not run.state.control.any()


@pytest.mark.parametrize("work", [SGD(optimizer="adam"), SGD(clip_norm=1.0)])
def test_other_optimizers_are_refused(work):
    with pytest.raises(ConfigError, match="SCAFFOLD needs the optimizer sgd without clip_norm"):
        trainer_of(setup_of(Scaffold(), work=work)).run()
