"""FedEM: responsibilities sample by sample, weighted training, shares that stay with the client, mixed predictions."""

from __future__ import annotations

import pytest
import torch

from coterie.client.work import SGD
from coterie.data.federation import Federation
from coterie.methods.fedem import FedEM, e_step
from coterie.runs.loop import Schedule
from coterie.runs.newcomers import onboard, personal_models
from tests.convex import problem, trainer
from tests.helpers import finished, ragged_federation, setup_of, trainer_of


def test_responsibilities_against_the_closed_form():
    shares = torch.tensor([[0.2, 0.8], [0.5, 0.5]], dtype=torch.float64)
    losses = torch.tensor([[[1.0, 0.1, 2.0], [0.5, 3.0, 2.0]], [[0.0, 9.0, 9.0], [0.7, 9.0, 9.0]]], dtype=torch.float64)
    real = torch.tensor([[True, True, True], [True, False, False]])
    found, known = e_step(shares, losses, real)
    raw = shares.unsqueeze(2) * (-losses).exp()
    expected = raw / raw.sum(1, keepdim=True)
    assert torch.allclose(known[0], expected[0])
    assert torch.allclose(known[1, :, :1], expected[1, :, :1])
    assert not known[1, :, 1:].any()  # there are no such samples
    assert torch.allclose(found[0], expected[0].mean(1))
    assert torch.allclose(found[1], expected[1, :, 0])


def by_hand(x, y, centers, shares, lr, steps):
    """One client in a round, on least squares: the shares and the trained models."""
    losses = torch.stack([(x @ w - y) ** 2 for w in centers])
    raw = shares.unsqueeze(1) * (-losses).exp()
    known = raw / raw.sum(0)
    trained = []
    for w, q in zip(centers, known, strict=True):
        for _ in range(steps):
            w = w - lr * 2 * x.T @ (q * (x @ w - y)) / len(x)  # the mean over all samples, not over the weights
        trained.append(w)
    return known.mean(1), torch.stack(trained)


def test_three_rounds_against_a_loop():
    federation, xs, ys = problem()
    lr, steps = 0.05, 4
    run = trainer(FedEM(components=2), federation, SGD(lr=lr, steps=steps, batch_size="full"), rounds=3)
    run._start()
    centers = run.state.centers.clone()
    assert not torch.allclose(centers[0], centers[1])
    run.run()
    shares = [torch.full((2,), 0.5, dtype=torch.float64) for _ in xs]
    for _ in range(3):
        total = torch.zeros_like(centers)
        for client, (x, y) in enumerate(zip(xs, ys, strict=True)):
            shares[client], found = by_hand(x, y, centers, shares[client], lr, steps)
            total += len(x) * found
        centers = total / sum(len(x) for x in xs)
    assert torch.allclose(run.state.centers, centers, rtol=1e-10)
    kept = run.engine.memory_tensors()["value.shares"]
    assert torch.allclose(kept, torch.stack(shares), rtol=1e-10)
    assert run.state.labels.tolist() == kept.argmax(1).tolist()
    personal = run.algorithm.personal(run.state, torch.tensor([1]))
    [(_, served)] = personal_models(run.engine, personal, torch.tensor([1]), run._rng)
    assert torch.equal(served.params, run.state.centers)  # after averaging
    assert torch.equal(served.weights, kept[1])


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_weights_follow_their_samples_into_batches(engine):
    """A weight of 0 is as if the sample were not there, but that the mean is over the whole batch."""
    from coterie.client.work import Weighted

    run = trainer_of(setup_of(FedEM(), engine=engine))
    block = run.engine.block_of(torch.tensor([0, 5]), run.engine.plan)
    longest = int(block.samples.max())
    weights = (torch.arange(longest) % 2 == 0).to(torch.float64).expand(2, -1).contiguous()
    work = SGD(lr=0.1, batch_size=1, epochs=2)  # a sample of weight 0 makes no step
    with torch.no_grad():
        found = block.train(block.initial.clone(), Weighted.of(work), weights=weights)
        counts = block.train(block.initial.clone(), Weighted.of(work), weights=torch.ones_like(weights))
        plain = block.train(block.initial.clone(), work)
    assert torch.allclose(counts, plain, rtol=1e-10)
    from coterie.client.batches import Batches, StepCounts

    x, y = run.federation.samples(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3)).double()
    torch.nn.utils.vector_to_parameters(block.task.initial.double(), model.parameters())
    batches = Batches(
        run.engine.data, torch.tensor([0]), StepCounts(torch.tensor([len(x)]), work), block.rng("batches 0")[:1]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2 * len(x)):
        place = int(batches.positions_at(step))
        if place % 2 == 0:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(
                model(x[place].double().flatten().unsqueeze(0)), y[place : place + 1]
            ).backward()
            optimizer.step()
    expected = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    assert torch.allclose(found[0], expected, rtol=1e-9)


def test_finds_two_sources_within_clients():
    """Each sample is of one of two lines; clients differ only in how many they have of each."""
    torch.manual_seed(0)
    lines = torch.tensor([[3.0, -2.0], [-3.0, 1.0]])
    shares, clients = [0.9, 0.7, 0.3, 0.1], {}
    for i, share in enumerate(shares):
        x = torch.randn(120, 2)
        which = (torch.arange(120) % 10 >= round(10 * share)).long()
        clients[f"c{i}"] = (x, (x * lines[which]).sum(1))
    federation = Federation.from_clients(clients)
    run = trainer(FedEM(components=2), federation, SGD(lr=0.1, batch_size=20, epochs=2), rounds=30)
    run.run()
    order = [0, 1] if float(run.state.centers[0, 0]) > 0 else [1, 0]
    assert torch.allclose(run.state.centers[order], lines.double(), atol=0.05)
    found = run.engine.memory_tensors()["value.shares"][:, order[0]]
    assert found.tolist() == pytest.approx(shares, abs=0.1)


def test_an_absent_client_keeps_its_shares():
    run = finished(setup_of(FedEM()))
    before = run.engine.memory_tensors()["value.shares"].clone()
    run.engine.begin(4, "round")
    after = run.algorithm.round(run.state, run.engine, torch.tensor([2]), run._rng.at("test"))
    changed = (run.engine.memory_tensors()["value.shares"] != before).any(1)
    assert changed.nonzero().flatten().tolist() == [2]
    assert not torch.equal(after.centers, run.state.centers)


def test_newcomers_find_shares_of_their_own():
    run = finished(setup_of(FedEM(components=2), schedule=Schedule(rounds=20)))
    new = ragged_federation(15).select(torch.arange(9, 15))
    found = onboard(run.algorithm, run.state, run.engine, new, 20, run._rng.at("new"))
    for place, (_, served) in enumerate(found.models()):
        assert float(served.weights.sum()) == pytest.approx(1)
        assert int(served.weights.argmax()) == int(found.labels[place])
        assert float(served.weights.max()) > 0.51
    assert found.summary()["accuracy"]["macro"] > 0.6


def test_costs():
    run = finished(setup_of(FedEM(), schedule=Schedule(rounds=2)))
    totals, size = run.engine.ledger.totals(), run.engine.task.layout.size * 8
    assert (totals["down"], totals["up"]) == (2 * 9 * 3 * size, 2 * 9 * 3 * size)
    samples = int(run.federation.train.sizes.sum()) * run.engine.task.work.epochs
    assert totals["gradients"]["round"] == 2 * 3 * samples


@pytest.mark.parametrize("attack", ["sign_flip", "gaussian"])
def test_attacks_reach_all_models(attack):
    plain = finished(setup_of(FedEM(), schedule=Schedule(rounds=2)))
    other = finished(setup_of(FedEM(), schedule=Schedule(rounds=2, attack=attack, attackers=0.3)))
    assert not any(torch.allclose(a, b) for a, b in zip(plain.state.centers, other.state.centers, strict=True))
    assert bool(torch.isfinite(other.state.centers).all())
