"""APFL: every step against a loop in plain numbers; the local model and its share stay with the client."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from coterie.client.work import SGD
from coterie.methods.apfl import APFL
from coterie.methods.fedavg import FedAvg
from coterie.runs.loop import Schedule
from coterie.runs.result import personal_vector
from tests.convex import gradient, problem, trainer
from tests.helpers import assert_same, finished, outcome, setup_of, trainer_of


def by_hand(x, y, w, v, alpha, work, adaptive=True):
    """One client in a round; with the velocity of momentum."""
    if adaptive:
        alpha = (alpha - work.lr * (v - w) @ gradient(x, y, alpha * v + (1 - alpha) * w)).clamp(0, 1)
    fast = [torch.zeros_like(w), torch.zeros_like(v)]
    for _ in range(work.steps):
        found = [gradient(x, y, w), alpha * gradient(x, y, alpha * v + (1 - alpha) * w)]
        fast = [work.momentum * old + new for old, new in zip(fast, found, strict=True)]
        w, v = w - work.lr * fast[0], v - work.lr * fast[1]
    return w, v, alpha


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("adaptive", [True, False])
def test_three_rounds_against_a_loop(adaptive, momentum):
    federation, xs, ys = problem()
    work = SGD(lr=0.07, steps=4, batch_size="full", momentum=momentum)
    run = trainer(APFL(alpha=0.3, adaptive=adaptive, weighting="equal"), federation, work, rounds=3)
    run._start()
    center = run.state.centers[0].clone()
    run.run()
    own = [(center, torch.tensor(0.3, dtype=torch.float64)) for _ in xs]
    for _ in range(3):
        found = [by_hand(x, y, center, *kept, work, adaptive) for x, y, kept in zip(xs, ys, own, strict=True)]
        center = torch.stack([w for w, _, _ in found]).mean(0)
        own = [(v, alpha) for _, v, alpha in found]
    assert torch.allclose(run.state.centers[0], center, rtol=1e-10)
    memory = run.engine.memory_tensors()
    for client, (v, alpha) in enumerate(own):
        assert torch.allclose(memory["value.model"][client], v, rtol=1e-10)
        assert float(memory["value.share"][client]) == pytest.approx(float(alpha), rel=1e-10)
        # Served after mixing, with the center of now: not v, and not the mean of before the round.
        assert torch.allclose(personal_vector(run, client), alpha * v + (1 - alpha) * center, rtol=1e-10)
    moved = {round(float(alpha), 6) for _, alpha in own}
    assert (len(moved) > 1) == adaptive


def test_the_share_stays_in_its_interval():
    federation, _, _ = problem()
    run = trainer(APFL(), federation, SGD(lr=0.6, steps=30, batch_size="full"), rounds=8)
    run.run()
    shares = run.engine.memory_tensors()["value.share"]
    assert bool(((shares >= 0) & (shares <= 1)).all())
    assert bool((shares == 1).any())  # the problem is one where a client wants more than all


def test_a_share_of_zero_is_fedavg():
    """With alpha = 0 nothing of v is served, and v does not move: its gradient has the factor alpha."""
    one, other = finished(setup_of(FedAvg())), finished(setup_of(APFL(alpha=0.0, adaptive=False)))
    assert_same(one.state.tensors(), other.state.tensors(), exact=False, tolerance=1e-12)
    row, again = one.progress.rows[-1], other.progress.rows[-1]
    assert row["loss"]["micro"] == pytest.approx(again["loss"]["micro"], rel=1e-9)


def test_an_absent_client_keeps_its_model_and_mixes_it_with_the_new_center():
    run = trainer_of(setup_of(APFL()))
    run._start()
    run._round(1)
    engine, before = run.engine, run.engine.memory_tensors()["value.model"].clone()
    share = engine.memory_tensors()["value.share"][0].clone()
    engine.begin(2, "round")
    run.state = run.algorithm.round(run.state, engine, torch.arange(4, 9), run._rng.at("test"))
    assert torch.equal(engine.memory_tensors()["value.model"][0], before[0])
    assert not torch.equal(engine.memory_tensors()["value.model"][5], before[5])
    assert torch.allclose(personal_vector(run, 0), share * before[0] + (1 - share) * run.state.centers[0])


def test_only_the_global_model_travels():
    run = finished(setup_of(APFL(), schedule=Schedule(rounds=2)))
    totals, size = run.engine.ledger.totals(), run.engine.task.layout.size * 8
    assert (totals["down"], totals["up"]) == (2 * 9 * size, 2 * 9 * size)
    samples = int(run.federation.train.sizes.sum()) * run.engine.task.work.epochs
    once = int(run.federation.train.sizes.sum())  # for the share
    assert totals["gradients"]["round"] == 2 * (2 * samples + once)


def with_norm(input_shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, outputs))


def test_both_models_have_statistics_of_their_own():
    plain = setup_of(APFL(), model=with_norm, model_settings={}, schedule=Schedule(rounds=2))
    loop, fast = (finished(replace(plain, engine=engine)) for engine in ("loop", "vectorized"))
    assert_same(outcome(loop)["memory"], outcome(fast)["memory"], exact=False, tolerance=1e-9)
    cut = loop.engine.task.layout.num_parameters
    own = loop.engine.memory_tensors()["value.model"][:, cut:]
    assert not torch.allclose(own, loop.state.centers[:, cut:].expand_as(own))
    assert torch.equal(personal_vector(loop, 3)[cut:], own[3])
