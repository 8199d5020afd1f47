"""FedDANE on quadratics has a closed form: w - (H_i + mu I)^-1 g, whatever the client's own gradient was."""

from __future__ import annotations

import pytest
import torch

from coterie.client.work import SGD
from coterie.methods.feddane import FedDANE
from tests.convex import gradient, hessian, problem, trainer
from tests.helpers import finished, setup_of


@pytest.mark.parametrize("weighting", ["samples", "equal"])
def test_matches_its_closed_form(weighting):
    federation, xs, ys = problem()
    method = FedDANE(mu=0.5, weighting=weighting)
    run = trainer(method, federation, SGD(lr=0.1, steps=3000, batch_size="full"))
    run._start()
    w = run.state.centers[0].clone()
    run.run()
    share = torch.tensor([float(len(x)) if weighting == "samples" else 1.0 for x in xs], dtype=torch.float64)
    share = share / share.sum()
    g = sum(s * gradient(x, y, w) for s, x, y in zip(share, xs, ys, strict=True))
    eye = torch.eye(len(w), dtype=w.dtype)
    expected = sum(s * (w - torch.linalg.solve(hessian(x) + 0.5 * eye, g)) for s, x in zip(share, xs, strict=True))
    assert torch.allclose(run.state.centers[0], expected, rtol=1e-8, atol=1e-10)


def test_a_draw_for_gradients_and_the_cohort_for_training():
    from coterie.runs.loop import Schedule

    run = finished(setup_of(FedDANE(), schedule=Schedule(rounds=3, participation=0.4)))
    steps = run.engine.ledger.totals()["by_step"]
    assert steps["round/full_gradient"]["messages"] == steps["round/train_corrected"]["messages"] == 3 * 4
    size = run.engine.task.layout.size * 8
    assert steps["round/train_corrected"]["up"] == 12 * size
    assert steps["round/full_gradient"]["up"] == 12 * size
    # Whoever is in both draws gets the model once; the mean gradient goes to the cohort.
    assert steps["round/train_corrected"]["down"] <= 12 * (size + run.engine.task.layout.num_parameters * 8)


def test_its_extra_gradients_are_counted():
    run = finished(setup_of(FedDANE()))
    samples = int(run.federation.train.sizes.sum())
    epochs = run.engine.task.work.epochs
    assert run.engine.ledger.totals()["gradients"]["round"] == 3 * samples * (epochs + 2)
