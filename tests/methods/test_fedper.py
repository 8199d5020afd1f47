"""FedPer: body and head are trained together, the body is averaged, the head stays where it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coterie.client.work import SGD
from coterie.errors import ConfigError
from coterie.methods.fedper import FedPer
from coterie.runs.loop import Schedule
from coterie.runs.newcomers import onboard
from coterie.runs.result import personal_vector
from tests.convex import gradients, problem, trainer, two_layers
from tests.helpers import finished, ragged_federation, setup_of, trainer_of


def test_three_rounds_against_a_loop():
    federation, xs, ys = problem()
    lr, steps = 0.03, 4
    run = trainer(FedPer(), federation, SGD(lr=lr, steps=steps, batch_size="full"), rounds=3, model=two_layers)
    start = run.engine.initial()
    run.run()
    body, heads = start[:6].reshape(2, 3), [start[6:]] * len(xs)
    for _ in range(3):
        total = torch.zeros_like(body)
        for client, (x, y) in enumerate(zip(xs, ys, strict=True)):
            own, head = body, heads[client]
            for _ in range(steps):
                of_body, of_head = gradients(x, y, own, head)
                own, head = own - lr * of_body, head - lr * of_head
            heads[client] = head
            total += len(x) * own
        body = total / sum(len(x) for x in xs)
    assert torch.allclose(run.state.centers[0], body.flatten(), rtol=1e-10)  # nobody's head has reached the server
    for client, head in enumerate(heads):
        # The averaged body with the client's own head: not the body the client has trained.
        assert torch.allclose(personal_vector(run, client), torch.cat([body.flatten(), head]), rtol=1e-10)


def test_only_the_body_travels():
    run = finished(setup_of(FedPer(), schedule=Schedule(rounds=2)))
    layout = run.engine.task.layout
    size = (layout.size - (layout.head.stop - layout.head.start)) * 8
    totals = run.engine.ledger.totals()
    assert (totals["down"], totals["up"]) == (2 * 9 * size, 2 * 9 * size)


def test_an_absent_client_keeps_its_head_and_gets_the_new_body():
    run = trainer_of(setup_of(FedPer()))
    run._start()
    run._round(1)
    head = run.engine.task.layout.head
    before = personal_vector(run, 0)
    run.engine.begin(2, "round")
    run.state = run.algorithm.round(run.state, run.engine, torch.arange(4, 9), run._rng.at("test"))
    after = personal_vector(run, 0)
    assert torch.equal(after[head], before[head])
    assert not torch.equal(after[: head.start], before[: head.start])
    assert torch.equal(after[: head.start], run.state.centers[0, : head.start])


def test_newcomers_train_a_head_on_the_frozen_body():
    run = finished(setup_of(FedPer(), schedule=Schedule(rounds=15)))
    others = ragged_federation(12, seed=5)
    found = onboard(run.algorithm, run.state, run.engine, others, 15, run._rng.at("newcomers"))
    head = run.engine.task.layout.head
    rows = torch.stack([served.params[0] for _, served in found.models()])
    assert torch.equal(rows[:, : head.start], run.state.centers[:, : head.start].expand(12, -1))
    assert len(rows[:, head].unique(dim=0)) == 12
    assert found.labels.tolist() == [0] * 12
    assert found.summary()["accuracy"]["macro"] > 0.6  # three classes; the initial head knows nothing


def test_weight_decay_reaches_the_head_too():
    """What is trained together decays together."""
    plain = setup_of(FedPer(), work=SGD(lr=0.1))
    run, other = (finished(replace(plain, work=SGD(lr=0.1, weight_decay=w))) for w in (0.0, 0.1))
    head = run.engine.task.layout.head
    assert float(personal_vector(other, 2)[head].norm()) < float(personal_vector(run, 2)[head].norm())


def test_a_network_of_one_layer_is_refused():
    federation, _, _ = problem()
    run = trainer(FedPer(), federation, SGD())
    with pytest.raises(ConfigError, match="FedPer leaves nothing to share in a network of one layer"):
        run.run()
