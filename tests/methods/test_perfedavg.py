"""Per-FedAvg: the direction is the gradient of the loss after adapting; nothing is adapted on test data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coterie.client.work import SGD, FirstOrderMAML, HessianFreeMAML
from coterie.data.federation import Split
from coterie.methods.perfedavg import PerFedAvg
from tests.convex import gradient, hessian, problem, trainer
from tests.helpers import finished, ragged_federation, setup_of


def softplus_gradient(stack, stream):
    """Of sum(log(1 + exp(3 w)) + w^2 / 2): its second derivative is not constant."""
    (w,) = stack
    return [3 * torch.sigmoid(3 * w) + w]


def after_adapting(w, alpha):
    inner = w - alpha * (3 * torch.sigmoid(3 * w) + w)
    return (torch.nn.functional.softplus(3 * inner) + inner**2 / 2).sum()


def finite_differences(w, alpha, step=1e-5):
    found = torch.empty_like(w)
    for i in range(len(w)):
        e = torch.zeros_like(w)
        e[i] = step
        found[i] = (after_adapting(w + e, alpha) - after_adapting(w - e, alpha)) / (2 * step)
    return found


def test_hessian_free_gradient_against_finite_differences():
    w = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
    true = finite_differences(w, 0.1)
    (found,) = HessianFreeMAML(inner_lr=0.1).direction(softplus_gradient, [w.unsqueeze(0)], [], {})
    assert torch.allclose(found[0], true, rtol=1e-4)
    (first_order,) = FirstOrderMAML(inner_lr=0.1).direction(softplus_gradient, [w.unsqueeze(0)], [], {})
    assert not torch.allclose(first_order[0], true, rtol=1e-2)  # it leaves the second derivative out


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_a_step_on_least_squares(variant):
    """One full-batch step: (I - alpha H) grad(w'), and without the matrix for first order."""
    federation, xs, ys = problem()
    alpha, lr = 0.05, 0.1
    method = PerFedAvg(variant=variant, inner_lr=alpha, weighting="equal")
    run = trainer(method, federation, SGD(lr=lr, steps=1, batch_size="full"))
    run._start()
    w = run.state.centers[0].clone()
    run.run()
    moved = []
    for x, y in zip(xs, ys, strict=True):
        outer = gradient(x, y, w - alpha * gradient(x, y, w))
        outer = outer - alpha * hessian(x) @ outer if variant == "hf" else outer
        moved.append(w - lr * outer)
    assert torch.allclose(run.state.centers[0], torch.stack(moved).mean(0), rtol=1e-9)


def test_personal_model_is_one_step_on_training_data():
    federation, xs, ys = problem()
    run = trainer(PerFedAvg(inner_lr=0.05), federation, SGD(lr=0.1, steps=1, batch_size="full"))
    run.run()
    from coterie.runs.result import personal_vector

    w = run.state.centers[0]
    assert torch.allclose(personal_vector(run, 1), w - 0.05 * gradient(xs[1], ys[1], w), rtol=1e-12)


def test_test_samples_change_nothing_but_scores():
    federation = ragged_federation()
    flipped = federation.y.clone()
    rows = federation.test.index
    flipped[rows] = (flipped[rows] + 1) % 3
    both = [finished(setup_of(PerFedAvg(), data)) for data in (federation, replace(federation, y=flipped))]
    assert torch.equal(both[0].state.centers, both[1].state.centers)
    assert both[0].progress.rows[-1]["accuracy"] != both[1].progress.rows[-1]["accuracy"]
    assert isinstance(federation.test, Split)


def test_gradients_of_both_variants_are_counted():
    for variant, times in (("fo", 2), ("hf", 4)):
        run = finished(setup_of(PerFedAvg(variant=variant)))
        samples = int(run.federation.train.sizes.sum()) * run.engine.task.work.epochs
        assert run.engine.ledger.totals()["gradients"]["round"] == 3 * samples * times
