"""The forms of answers: what fits and what does not. That every method's answers fit is in tests/flower."""

from __future__ import annotations

import math

import pytest
import torch

from coterie.client import forms
from coterie.client.forms import Asked, Form
from coterie.client.steps import Answer, client_step, forms_of, train
from coterie.errors import ConfigError
from coterie.methods.base import algorithms
from coterie.nets.flat import mse
from tests.helpers import setup_of

SIZES = {"train": 10, "valid": 0, "test": 4}
NUMBER = Form((), torch.float64, 0, 1)
SAMPLES = Form((), torch.int64, 1, splits=("train",))
COUNTS = Form((3,), torch.int64, 0, splits=("train",))


def task():
    from coterie.methods.fedavg import FedAvg

    return setup_of(FedAvg()).task()


@pytest.mark.parametrize(
    ("form", "value", "problem"),
    [
        (NUMBER, 0.5, None),
        (NUMBER, 1.5, "of 1.5, outside 0 to 1"),
        (NUMBER, -0.25, "of -0.25, outside 0 to 1"),
        (NUMBER, math.nan, "of nan, outside 0 to 1"),
        (NUMBER, math.inf, "of inf, outside 0 to 1"),
        (NUMBER, [0.5], "of shape (1,) instead of ()"),
        (NUMBER, 1, "of type int64 instead of float64"),
        (SAMPLES, 10, None),
        (SAMPLES, 11, "of 11 samples; it declared 10 when it joined"),
        (SAMPLES, 2**62, "of 4611686018427387904 samples; it declared 10 when it joined"),
        (SAMPLES, 0, "of 0, outside 1 to inf"),
        (Form((), torch.int64, 0, splits=("valid", "train")), 10, None),
        (Form((), torch.int64, 0, splits=("valid",)), 1, "of 1 samples; it declared 0 when it joined"),
        (COUNTS, [0, 10, 0], None),
        (COUNTS, [5, 5, 1], "of 11 samples; it declared 10 when it joined"),
        (COUNTS, [2**62, 2**62, 2**62], "of 13835058055282163712 samples; it declared 10 when it joined"),
        (COUNTS, [-1, 5, 5], "of -1, outside 0 to inf"),
        (Form((2,), torch.float64, longest=5), [3.0, 4.0], None),
        (Form((2,), torch.float64, longest=5), [3.1, 4.0], "longer than 5"),
        (Form((2,), torch.float64, longest=5), [math.nan, 0.0], "longer than 5"),
        (Form((0,), torch.float64, 0, 1), torch.empty(0, dtype=torch.float64), None),
    ],
)
def test_what_does_not_fit_is_said(form, value, problem):
    row = torch.as_tensor(value)
    assert form.problem(row.double() if row.is_floating_point() else row, SIZES) == problem


def test_every_step_of_every_method_declares_its_answer():
    from coterie.client.steps import _STEPS

    algorithms()
    ours = {name: step for name, step in _STEPS.items() if step.__module__.startswith("coterie.")}
    assert len(ours) > 40
    assert [name for name, step in ours.items() if step.answers is None] == []


def test_a_step_that_declares_nothing_is_named():
    @client_step
    def silent(block, models, work):
        return Answer()

    with pytest.raises(ConfigError, match="silent does not say what it answers with"):
        forms_of(silent, Asked(task(), torch.float32, 3))

    @client_step(answers=lambda asked: {"update": asked.model()})
    def told(block, models, work):
        return Answer()

    assert forms_of(told, Asked(task(), torch.float32, 3)) == {"update": Form((3,), torch.float32)}
    assert told.wire_name.endswith(":test_a_step_that_declares_nothing_is_named.<locals>.told")


def test_scores_of_numbers_have_r2_unless_only_the_client_knows():
    from dataclasses import replace

    def own(outputs, y):
        return (outputs - y).abs()

    for loss, optional in ((mse, False), (own, True)):
        regression = replace(task(), num_classes=0, loss=loss)
        found = forms.scored(Asked(regression, torch.float32, 3))
        assert set(found) == {"samples", "loss", "r2", "valid_samples", "valid_loss"}
        assert found["r2"].optional is optional
        assert (found["loss"].low < 0) is optional
    assert set(forms_of(train, Asked(task(), torch.float32, 3))) == {"params", "samples"}
