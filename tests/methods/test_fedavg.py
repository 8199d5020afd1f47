from __future__ import annotations

import pytest
import torch

from coterie.engines.mock import MockEngine
from coterie.methods.fedavg import FedAvg
from coterie.randomness import Rng


def respond(step, client, sent):
    return {"params": sent + torch.tensor([1.0, 10.0]) * (client + 1), "samples": client + 1}


@pytest.mark.parametrize(("weighting", "expected"), [("samples", [14 / 6, 140 / 6]), ("equal", [2.0, 20.0])])
def test_mean_of_the_answers(weighting, expected):
    engine = MockEngine(respond, num_clients=3, chunk=2)
    method = FedAvg(weighting=weighting)
    state = method.start(engine.task, engine, Rng.seed(0))
    after = method.round(state, engine, engine.everyone(), Rng.seed(0))
    assert after.centers[0].tolist() == pytest.approx(expected)
    assert after.labels.tolist() == [0, 0, 0]


def test_nobody_answers():
    def silent(step, client, sent):
        raise RuntimeError("off")

    engine = MockEngine(silent, num_clients=2)
    state = FedAvg().start(engine.task, engine, Rng.seed(0))
    after = FedAvg().round(state, engine, engine.everyone(), Rng.seed(0))
    assert torch.equal(after.centers, state.centers)
    assert after.labels.tolist() == [-1, -1]
