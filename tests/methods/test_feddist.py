from __future__ import annotations

import pytest
import torch

from coterie.engines.mock import MockEngine
from coterie.methods.fedavg import FedAvg
from coterie.methods.feddist import FedDist
from coterie.randomness import Rng
from tests.helpers import assert_same, finished, outcome, setup_of


@pytest.mark.parametrize("weighting", ["equal", "samples"])
def test_step_one_is_fedavg_with_the_same_weights(weighting):
    one = outcome(finished(setup_of(FedAvg(weighting=weighting))))
    other = outcome(finished(setup_of(FedDist(step=1.0, weighting=weighting))))
    assert_same(one["state"], other["state"], exact=False, tolerance=1e-12)
    assert one["ledger"] == other["ledger"]


@pytest.mark.parametrize(("weighting", "mean"), [("equal", 2.0), ("samples", 14 / 6)])
def test_goes_part_of_the_way(weighting, mean):
    def respond(step, client, sent):
        return {"params": sent + client + 1, "samples": client + 1}

    engine = MockEngine(respond, num_clients=3)
    method = FedDist(step=0.6, weighting=weighting)
    state = method.start(engine.task, engine, Rng.seed(0))
    after = method.round(state, engine, engine.everyone(), Rng.seed(0))
    assert after.centers[0].tolist() == pytest.approx([0.6 * mean] * 2)


def test_equal_weights_by_default():
    assert FedDist().weighting == "equal"
    assert FedDist().step == 0.6
    assert torch.is_tensor(FedDist().start(*(lambda e: (e.task, e))(MockEngine(lambda *a: {}, 1)), Rng.seed(0)).centers)
