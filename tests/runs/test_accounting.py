"""Epsilon from clip and noise, with and without the accountant."""

from __future__ import annotations

import math
import sys

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from coterie.errors import MissingExtra, RunError
from coterie.runs.accounting import DELTA, epsilon, privacy_lines, with_epsilon

RECORD = {"clip": 1.0, "noise": 2.0, "participation": 0.5, "rounds": 9, "releases": 4}
RECORD |= {"noised": ["params"], "exact": ["samples", "scores"]}


def exact(noise: float, releases: int) -> float:
    """The smallest epsilon of Gaussian noise, of which the accountant computes a bound."""
    mu = 2 * math.sqrt(releases) / noise

    def missing(eps: float) -> float:
        return float(norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu)) - DELTA

    return float(brentq(missing, 0, 200))


@pytest.mark.parametrize(("noise", "releases"), [(10.0, 20), (2.0, 4), (20.0, 1)])
def test_epsilon_is_a_bound_that_is_not_far_off(noise: float, releases: int):
    pytest.importorskip("dp_accounting", reason="needs pip install 'coterie[privacy]'")
    assert exact(noise, releases) <= epsilon(noise, releases) <= 1.2 * exact(noise, releases)


def test_without_noise_there_is_no_guarantee():
    assert epsilon(0.0, 1) == math.inf
    assert epsilon(0.0, 0) == 0.0
    assert "no noise" in privacy_lines(RECORD | {"noise": 0.0})[1]
    assert with_epsilon({"privacy": RECORD | {"noise": 0.0}})["privacy"]["epsilon"] is None


def test_without_the_accountant_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(MissingExtra, match=r"coterie\[privacy\]"):
        epsilon(1.0, 1)
    lines = privacy_lines(RECORD)
    assert "coterie[privacy]" in lines[1]
    assert lines[2] == "not covered, sent without noise: samples, scores"
    assert with_epsilon({"privacy": RECORD})["privacy"] == RECORD | {"epsilon": None, "delta": DELTA}


def test_runs_without_clip_are_as_they_were():
    assert with_epsilon({"privacy": None}) == {"privacy": None}
    assert with_epsilon({}) == {}


@pytest.mark.parametrize("wrong", [{"noise": "much"}, {"noise": -1.0}, {"releases": 2.5}, {"releases": 1 << 60}])
def test_a_damaged_record_is_one_sentence(wrong: dict[str, object]):
    with pytest.raises(RunError, match="damaged"):
        with_epsilon({"privacy": RECORD | wrong})
