from __future__ import annotations

import pytest
import torch

from coterie.api import Result
from coterie.errors import ConfigError
from coterie.methods.local import Local
from coterie.runs.loop import Schedule
from coterie.runs.result import personal_vector
from tests.helpers import WORK, finished, setup_of, trainer_of


def test_nothing_is_ever_sent():
    totals = finished(setup_of(Local())).engine.ledger.totals()
    assert (totals["down"], totals["up"], totals["start"]) == (0, 0, {"down": 0, "up": 0, "scalars": 0})


def test_each_client_has_a_model_of_its_own():
    trainer = finished(setup_of(Local()))
    vectors = torch.stack([personal_vector(trainer, client) for client in range(9)])
    assert len(torch.unique(vectors, dim=0)) == 9
    assert trainer.state.labels.tolist() == list(range(9))
    module = Result(trainer, {}).personal_model(3)
    flat = torch.cat([p.flatten() for p in module.parameters()])
    assert torch.allclose(flat.double(), vectors[3], atol=1e-6)


def test_clients_not_met_have_the_common_start():
    trainer = finished(setup_of(Local(), schedule=Schedule(rounds=1, participation=0.3)))
    absent = int((trainer.state.labels < 0).nonzero()[0])
    assert torch.equal(personal_vector(trainer, absent), trainer.engine.initial())
    assert trainer.summary()["clients_met"] == 3


def test_models_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr("coterie.engines.base.available_memory", lambda device: 1000)
    trainer = trainer_of(setup_of(Local(), work=WORK))
    with pytest.raises(ConfigError, match="Local keeps a model for each of 9 clients: needs"):
        trainer.run()
