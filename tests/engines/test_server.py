"""The server trains on its own samples."""

from __future__ import annotations

import pytest
import torch

from coterie.client.work import SGD
from coterie.engines.server import fitting, trained_on_reserved
from coterie.methods.fedavg import FedAvg
from coterie.randomness import Rng
from tests.helpers import ragged_federation, setup_of, trainer_of


@pytest.fixture
def engine():
    return trainer_of(setup_of(FedAvg(), ragged_federation(reserve=4))).engine


@pytest.mark.parametrize("count", [1, 2])
def test_one_full_batch_is_one_step_along_the_gradient_of_the_samples_that_fit_best(engine, count):
    x, y = engine.reserved
    models = torch.stack([engine.initial(), -engine.initial()])[:count]
    leaf = models.clone().requires_grad_()
    outputs = engine.forward(leaf, x)
    losses = torch.stack([torch.nn.functional.cross_entropy(rows, y, reduction="none") for rows in outputs])  # [K, R]
    total = 0
    for label in range(3):
        of_class = losses[:, y == label]
        total = total + of_class.sort(1).values[:, : of_class.shape[1] // count].sum() * count
    [gradient] = torch.autograd.grad(total / len(x), leaf)
    found = trained_on_reserved(engine, models, SGD(lr=0.1, epochs=1, batch_size="full"), Rng.seed(0))
    torch.testing.assert_close(found, models - 0.1 * gradient)
    assert engine.ledger.totals()["down"] == 0


def test_each_class_counts_as_much_as_it_has_samples(engine):
    x, y = engine.reserved
    weights = fitting(engine, torch.stack([engine.initial(), -engine.initial(), 0.5 * engine.initial()]))
    for label in range(3):
        assert weights[:, y == label].sum(1).tolist() == pytest.approx([int((y == label).sum())] * 3)
    assert int((weights == 0).sum()) > 0
    assert torch.equal(fitting(engine, engine.initial().unsqueeze(0)), torch.ones(1, len(x)))
