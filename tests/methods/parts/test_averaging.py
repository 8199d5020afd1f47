"""Robust means, with hand-checked numbers, and what methods make of them."""

from __future__ import annotations

import pytest
import torch

from coterie.errors import ConfigError
from coterie.methods.base import algorithms
from coterie.methods.parts import averaging
from coterie.methods.parts.averaging import Averaging, HeldModels, robust_mean
from coterie.methods.parts.clustering import CenterSums
from coterie.settings import build
from tests.helpers import finished, ragged_federation, reserved_for, setup_of, trainer_of

AVERAGING = sorted(key for key, cls in algorithms().items() if issubclass(cls, Averaging))


def robust_means(num_clusters, kind):
    return HeldModels(num_clusters, lambda cluster, rows, weights: robust_mean(rows, kind, 0.2))


def column(*values):
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def test_trimmed_mean_leaves_out_both_ends():
    assert float(robust_mean(column(1, 2, 3, 4, 1000), "trimmed_mean", 0.2)) == 3.0
    assert float(robust_mean(column(-1000, 2, 3, 4, 1000, 3), "trimmed_mean", 0.1)) == 3.0  # rounded up
    assert float(robust_mean(column(1, 2, 6), "trimmed_mean", 0.0)) == 3.0


def test_median_of_even_and_odd():
    assert float(robust_mean(column(1, 2, 100), "median", 0.2)) == 2.0
    assert float(robust_mean(column(1, 2, 4, 100), "median", 0.2)) == 3.0


def test_krum_keeps_those_with_near_neighbours():
    rows = torch.tensor([[0.0, 0.0], [0.1, 0.0], [0.0, 0.1], [0.1, 0.1], [9.0, -9.0]])
    assert robust_mean(rows, "krum", 0.2).tolist() == pytest.approx([0.05, 0.05])


def test_a_registered_robust_mean_is_a_choice_of_every_method(monkeypatch):
    monkeypatch.setitem(averaging._ROBUST_MEANS, "lowest", lambda rows, share: rows.amin(0))
    assert float(robust_mean(column(1, 2, 100), "lowest", 0.2)) == 1.0
    assert build(algorithms()["fesem"], {"robust": "lowest"}, "algorithm").robust == "lowest"
    with pytest.raises(ConfigError, match=r"robust of RobustTKM must be 'none', .*'krum' or 'lowest'\. Got 'foo'"):
        build(algorithms()["robust_tkm"], {"robust": "foo"}, "algorithm")


def test_two_members_have_a_plain_mean():
    assert float(robust_mean(column(1, 3), "median", 0.4)) == 2.0
    assert float(robust_mean(column(7), "krum", 0.4)) == 7.0


def test_each_parameter_by_itself_and_in_pieces(monkeypatch):
    rows = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    whole = robust_mean(rows, "median", 0.2)
    assert torch.equal(whole, rows.median(0).values)
    monkeypatch.setattr("coterie.methods.parts.averaging._COLUMNS", 21)
    assert torch.equal(robust_mean(rows, "median", 0.2), whole)


@pytest.mark.parametrize("kind", ["trimmed_mean", "median", "krum"])
def test_a_fifth_of_bad_members_hardly_moves_the_center(kind):
    generator = torch.Generator().manual_seed(1)
    good = 1 + 0.1 * torch.randn(16, 30, generator=generator)
    rows = torch.cat([good, -50 * torch.ones(4, 30)])
    means = robust_means(2, kind)
    means.add(rows[:11], torch.zeros(11, dtype=torch.int64))
    means.add(rows[11:], torch.zeros(9, dtype=torch.int64))
    keep = torch.full((2, 30), 5.0)
    found = means.means(keep)
    assert float((found[0] - 1).abs().max()) < 0.2
    assert torch.equal(found[1], keep[1])  # nobody is in it
    assert float((rows.mean(0) - 1).abs().max()) > 5


def test_weight_zero_is_left_out():
    means = robust_means(1, "median")
    means.add(column(1, 2, 3, 50, 60), torch.zeros(5, dtype=torch.int64), torch.tensor([1, 1, 1, 0, 0]))
    assert float(means.means(torch.zeros(1, 1, dtype=torch.float64))) == 2.0
    assert float(robust_means(1, "median").means(torch.ones(1, 1))) == 1.0


@pytest.mark.parametrize("name", AVERAGING)
def test_every_method_that_averages_can_do_so_robustly(name):
    """One client of nine answers with a far model; with a median the centers stay near the others'."""
    cls = algorithms()[name]
    small = {key: value for key, value in {"num_clusters": 1, "beta": 90.0}.items() if hasattr(cls, key)}

    def center(robust, harm):
        method = cls(**small, robust=robust)
        run = trainer_of(setup_of(method, ragged_federation(reserve=reserved_for(method))))
        call = run.engine.call

        def tampered(step, cohort, **more):
            for chunk in call(step, cohort, **more):
                for key in ("params", "gradient"):
                    if key in chunk.answer and harm:
                        chunk.answer[key][chunk.clients == 3] += 30.0
                yield chunk

        run.engine.call = tampered
        run._start()
        run._round(1)
        return run.state.centers[0]

    honest, plain, median = center("none", False), center("none", True), center("median", True)
    assert float((median - honest).norm()) < 0.2 * float((plain - honest).norm())


def test_a_robust_mean_that_does_not_fit_is_refused(monkeypatch):
    run = trainer_of(setup_of(algorithms()["fedavg"](robust="median")))
    monkeypatch.setattr("coterie.engines.base.available_memory", lambda device: 1)
    with pytest.raises(ConfigError, match="holds the models of 9 clients"):
        run.run()


def test_the_plain_mean_streams():
    run = finished(setup_of(algorithms()["fedavg"]()))
    assert isinstance(run.algorithm.mean_of(1, run.engine, run.state.centers), CenterSums)
