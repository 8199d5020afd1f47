"""The double itself."""

from __future__ import annotations

import torch

from coterie.client.steps import train
from coterie.engines.mock import MockEngine
from coterie.randomness import Rng


def test_raising_makes_a_client_fail():
    def respond(step, client, sent):
        if client == 1:
            raise RuntimeError("no power")
        return {"params": sent * client, "samples": 3}

    engine = MockEngine(respond, num_clients=3, chunk=2)
    refs = torch.tensor([0, 0, 1])
    chunks = list(engine.call(train, engine.everyone(), models=torch.ones(2, 2), refs=refs, rng=Rng.seed(0)))
    assert [chunk.clients.tolist() for chunk in chunks] == [[0], [2]]
    assert chunks[1].answer.params.tolist() == [[2.0, 2.0]]
    assert [(f.client, f.reason) for f in engine.failures] == [("client-1", "no power")]
    assert engine.calls == [("train", [0, 1, 2])]
