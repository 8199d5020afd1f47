"""FedALA: weights and models against a loop; below the weighted layers the global model is taken over."""

from __future__ import annotations

import torch

from coterie.client.work import SGD
from coterie.methods.fedala import FedALA
from coterie.methods.fedavg import FedAvg
from coterie.runs.loop import Schedule
from coterie.runs.result import personal_vector
from tests.convex import gradients, problem, trainer, two_layers
from tests.helpers import assert_same, finished, ragged_federation, setup_of, trainer_of


def test_rounds_against_a_loop():
    """A body that is taken over, and a head that is mixed: three rounds, so that weights and models are remembered."""
    federation, xs, ys = problem()
    lr, eta, steps, passes = 0.05, 2.0, 4, 3
    method = FedALA(eta=eta, weight_epochs=passes, weighting="equal")
    work = SGD(lr=lr, steps=steps, batch_size="full")
    run = trainer(method, federation, work, rounds=4, model=two_layers)
    run._start()
    start = run.state.centers[0].clone()
    run.run()
    center, own = start, [start] * len(xs)
    weights = [torch.ones(2, dtype=torch.float64)] * len(xs)
    inside = 0
    for _ in range(4):
        for client, (x, y) in enumerate(zip(xs, ys, strict=True)):
            body, gap = center[:6].reshape(2, 3), center[6:] - own[client][6:]
            for _ in range(passes):
                head = own[client][6:] + weights[client] * gap
                weights[client] = (weights[client] - eta * gradients(x, y, body, head)[1] * gap).clamp(0, 1)
            head = own[client][6:] + weights[client] * gap
            inside += int(((weights[client] > 0) & (weights[client] < 1)).sum())
            for _ in range(steps):
                of_body, of_head = gradients(x, y, body, head)
                body, head = body - lr * of_body, head - lr * of_head
            own[client] = torch.cat([body.flatten(), head])
        center = torch.stack(own).mean(0)
    assert torch.allclose(run.state.centers[0], center, rtol=1e-10)
    for client in range(len(xs)):
        assert torch.allclose(personal_vector(run, client), own[client], rtol=1e-10)
        assert torch.allclose(run.engine.memory_tensors()["value.weights"][client], weights[client], rtol=1e-9)
    assert inside > 0  # the weights were not all at an end of their interval


def test_the_first_round_is_fedavg():
    runs = [trainer_of(setup_of(method)) for method in (FedALA(), FedAvg())]
    for run in runs:
        run._start()
        run._round(1)
    assert_same(runs[0].state.tensors(), runs[1].state.tensors(), exact=False, tolerance=1e-12)
    assert bool((runs[0].engine.memory_tensors()["value.weights"] == 1).all())


def test_more_layers_have_more_weights():
    for layers, entries in ((1, 6 * 3 + 3), (2, 16 * 6 + 6 + 6 * 3 + 3), (9, 16 * 6 + 6 + 6 * 3 + 3)):
        run = finished(setup_of(FedALA(layers=layers)))
        weights = run.engine.memory_tensors()["value.weights"]
        assert weights.shape == (9, entries)
        assert bool(((weights >= 0) & (weights <= 1)).all())
        assert bool((weights < 1).any())


def test_an_absent_client_keeps_its_model_and_weights():
    run = finished(setup_of(FedALA()))
    before = {name: tensor.clone() for name, tensor in run.engine.memory_tensors().items()}
    run.engine.begin(4, "round")
    run.algorithm.round(run.state, run.engine, torch.tensor([0, 6]), run._rng.at("test"))
    for name in ("value.model", "value.weights"):
        changed = (run.engine.memory_tensors()[name] != before[name]).any(1)
        assert changed.nonzero().flatten().tolist() == [0, 6]
    assert torch.equal(personal_vector(run, 3), before["value.model"][3])


def test_costs():
    run = finished(setup_of(FedALA(weight_epochs=2), ragged_federation(), schedule=Schedule(rounds=2)))
    totals, size = run.engine.ledger.totals(), run.engine.task.layout.size * 8
    assert (totals["down"], totals["up"]) == (2 * 9 * size, 2 * 9 * size)
    samples, epochs = int(run.federation.train.sizes.sum()), run.engine.task.work.epochs
    assert totals["gradients"]["round"] == 2 * samples * (epochs + 2)
