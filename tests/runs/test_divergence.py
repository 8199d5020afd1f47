"""A run that diverges says so; a run that does not says nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from coterie.data.federation import Federation
from coterie.engines.base import NOT_FINITE, Failure
from coterie.methods.fedavg import FedAvg
from coterie.runs.divergence import divergence, large_features, loss_of_guessing
from tests.helpers import setup_of

NUMBERS = Federation.from_clients({"a": (torch.ones(10, 2), torch.arange(10.0))}, test=0.0, valid=0.0)
PIXELS = Federation.from_clients({"a": (torch.ones(10, 2, dtype=torch.uint8), torch.arange(10.0))}, test=0.0, valid=0.0)


def row(number, loss, cohort=2):
    return {"round": number, "cohort": cohort, "loss": None if loss is None else {"macro": loss}}


def failed(number, client, reason=NOT_FINITE):
    return Failure(number, client, "train", reason)


@pytest.mark.parametrize(
    ("rows", "failures", "guessing", "why"),
    [
        ([], [], 1.0, None),
        ([row(1, 0.5), row(2, 9.9)], [], 1.0, None),
        ([row(1, 0.5), row(2, 10.1)], [], 1.0, "the loss is 10.1, where guessing has 1;"),
        ([row(1, 0.5), row(2, 5.1)], [], None, "the loss is 5.1, where it was 0.5 after one round;"),
        ([row(1, 0.5), row(2, math.nan)], [], 1.0, "the loss is not finite;"),
        ([row(1, 0.5)], [failed(1, "a"), failed(1, "b")], 1.0, "in the last round no client had a usable model;"),
        ([row(1, 0.5)], [failed(1, "a"), failed(1, "a")], 1.0, None),  # one client, asked twice
        ([row(1, 0.5), row(2, 0.5)], [failed(1, "a"), failed(1, "b")], 1.0, None),  # it recovered
        ([row(1, 0.5)], [failed(1, "a", "left"), failed(1, "b", "left")], 1.0, None),
    ],
)
def test_what_counts_as_divergence(rows, failures, guessing, why):
    said = divergence(rows, failures, guessing, NUMBERS)
    assert (
        said is None if why is None else said.startswith(f"training diverged: {why} use a smaller --lr, or scale the")
    )


def test_pixels_are_scaled_already():
    said = divergence([row(1, 99.0)], [], 1.0, PIXELS)
    assert said == "training diverged: the loss is 99, where guessing has 1; use a smaller --lr."


def test_loss_of_guessing():
    classes = setup_of(FedAvg())
    assert loss_of_guessing(classes.task(), classes.federation()) == pytest.approx(math.log(3))
    numbers = replace(classes, data=NUMBERS, loss="mse")
    assert loss_of_guessing(numbers.task(), NUMBERS) == pytest.approx(8.25)  # the variance of 0 ... 9
    own = replace(numbers, loss=lambda outputs, y: (outputs[:, 0] - y).abs())
    assert loss_of_guessing(own.task(), NUMBERS) is None


def test_large_features_are_told_until_they_are_scaled():
    x = torch.tensor([[1.0, 40.0], [2.0, -40.0]]).repeat(5, 1)
    federation = Federation.from_clients({"a": (x, torch.arange(10) % 2)}, test=0.0, valid=0.0)
    note = large_features(federation)
    assert note is not None
    assert note.startswith("features are not scaled and have values around 40; scale the features (--set dataset.stand")
    assert large_features(federation.standardized()) is None
    assert large_features(NUMBERS) is None
    assert large_features(PIXELS) is None
