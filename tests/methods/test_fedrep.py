"""FedRep: head, then body, each with the other frozen; the body is averaged, the head stays where it is."""

from __future__ import annotations

import pytest
import torch

from coterie.client.work import SGD, Partial
from coterie.methods.fedrep import FedRep
from coterie.methods.parts.own_parts import head_of, train_part
from coterie.runs.loop import Schedule
from coterie.runs.result import personal_vector
from tests.convex import gradients, problem, trainer, two_layers
from tests.helpers import finished, ragged_federation, setup_of, trainer_of


def test_three_rounds_against_a_loop():
    federation, xs, ys = problem()
    lr, steps = 0.03, 4
    work = SGD(lr=lr, steps=steps, batch_size="full")
    run = trainer(FedRep(head_epochs=5), federation, work, rounds=3, model=two_layers)
    start = run.engine.initial()
    run.run()
    body, heads = start[:6].reshape(2, 3), [start[6:]] * len(xs)
    for _ in range(3):
        sent = []
        for client, (x, y) in enumerate(zip(xs, ys, strict=True)):
            for _ in range(5):
                heads[client] = heads[client] - lr * gradients(x, y, body, heads[client])[1]
            own = body
            for _ in range(steps):
                own = own - lr * gradients(x, y, own, heads[client])[0]
            sent.append(own)
        body = torch.stack(sent).mean(0)
    assert torch.allclose(run.state.centers[0], body.flatten(), rtol=1e-10)  # nobody's head has reached the server
    for client, head in enumerate(heads):
        assert torch.allclose(personal_vector(run, client), torch.cat([body.flatten(), head]), rtol=1e-10)


@pytest.mark.parametrize(
    "work",
    [
        SGD(lr=0.1, momentum=0.9, weight_decay=0.1, batch_size=5),
        SGD(lr=0.1, momentum=0.9, weight_decay=0.1, batch_size=5, optimizer="nesterov"),
        SGD(lr=0.01, weight_decay=0.1, batch_size=5, optimizer="adam"),
        SGD(lr=0.01, weight_decay=0.1, batch_size=5, optimizer="adamw", clip_norm=0.1),
    ],
    ids=lambda work: work.optimizer,
)
@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_nothing_moves_what_is_frozen(work, engine):
    """Also between the steps: the same as a network in which the frozen layers have no gradient."""
    run = trainer_of(setup_of(FedRep(), engine=engine, work=work))
    block = run.engine.block_of(torch.tensor([0, 3]), run.engine.plan)
    mine = head_of(block.task)
    with torch.no_grad():
        found = train_part(block, block.initial.clone(), work, mine)
    assert torch.equal(found[:, ~mine], block.initial[:, ~mine])
    x, _ = run.federation.samples(0)
    module = torch.nn.Linear(6, 3).double()
    body, head = block.task.layout.unpack(block.task.initial.double()), block.task.layout.head
    names = [slot.name for slot in block.task.layout.parameters]
    inside = torch.relu(x.double().flatten(1) @ body[names[0]].T + body[names[1]])
    with torch.no_grad():
        module.weight.copy_(body[names[2]])
        module.bias.copy_(body[names[3]])
    kinds = {"sgd": torch.optim.SGD, "nesterov": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    more = {"momentum": 0.9} if work.momentum else {}
    more |= {"nesterov": True} if work.optimizer == "nesterov" else {}
    optimizer = kinds[work.optimizer](module.parameters(), lr=work.lr, weight_decay=0.1, **more)
    from coterie.client.batches import Batches, StepCounts

    counts = StepCounts(torch.tensor([len(x)]), work)
    batches = Batches(run.engine.data, torch.tensor([0]), counts, block.rng("batches 0")[:1])
    for step in range(counts.num_steps):
        seen, labels, _ = batches.at(step)
        rows = [int((x.double() == row).flatten(1).all(1).nonzero()[0]) for row in seen[0]]
        loss = torch.nn.functional.cross_entropy(module(inside[rows]), labels[0])
        optimizer.zero_grad()
        loss.backward()
        if work.clip_norm:
            torch.nn.utils.clip_grad_norm_(module.parameters(), work.clip_norm)
        optimizer.step()
    expected = torch.cat([module.weight.detach().flatten(), module.bias.detach()])
    assert torch.allclose(found[0, head], expected, rtol=1e-8)


def test_statistics_of_a_frozen_body_stay():
    def with_norm(input_shape, outputs):
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(16, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, outputs)
        )

    run = trainer_of(setup_of(FedRep(), model=with_norm, model_settings={}))
    block = run.engine.block_of(torch.tensor([0, 3]), run.engine.plan)
    with torch.no_grad():
        found = train_part(block, block.initial.clone(), run.engine.task.work, head_of(block.task))
    cut = block.task.layout.num_parameters
    assert torch.equal(found[:, cut:], block.initial[:, cut:])


def test_the_body_is_trained_under_the_new_head():
    """With no step of the body to speak of, what is sent is the received body; the head moves all the same."""
    run = trainer_of(setup_of(FedRep(), ragged_federation(), schedule=Schedule(rounds=1)))
    run._start()
    start = run.state.centers[0].clone()
    run._round(1)
    head = run.engine.task.layout.head
    part = run.engine.memory_tensors()["value.part"]
    assert part.shape == (9, head.stop - head.start)
    assert not any(torch.equal(row, start[head]) for row in part)
    assert not torch.equal(run.state.centers[0, : head.start], start[: head.start])
    assert torch.equal(run.state.centers[0, head], start[head])


def test_costs():
    run = finished(setup_of(FedRep(head_epochs=3), schedule=Schedule(rounds=2)))
    layout, totals = run.engine.task.layout, run.engine.ledger.totals()
    size = (layout.size - (layout.head.stop - layout.head.start)) * 8
    assert (totals["down"], totals["up"]) == (2 * 9 * size, 2 * 9 * size)
    samples, epochs = int(run.federation.train.sizes.sum()), run.engine.task.work.epochs
    assert totals["gradients"]["round"] == 2 * samples * (3 + epochs)


def test_the_work_can_be_sent():
    from coterie.client.work import from_dict, to_dict

    work = Partial.of(SGD(lr=0.3), [True, False])
    assert work.still == "10"
    assert from_dict(to_dict(work)) == work
