"""Robust means, with hand-checked numbers, and what methods make of them."""

from __future__ import annotations

import pytest
import torch

import coterie
from coterie.engines.mock import MockEngine
from coterie.errors import ConfigError
from coterie.methods.base import algorithms
from coterie.methods.parts import averaging
from coterie.methods.parts.averaging import (
    Averaging,
    HeldModels,
    TrustedModels,
    UsualModels,
    is_usual,
    robust_mean,
    shortened,
)
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


def test_bulyan_chooses_by_krum_and_averages_near_the_median():
    """Seven models, one bad. By hand: Krum chooses 5, 6, 3, 7.5 and 4; 5, 6 and 4 are the nearest to their median."""
    rows = column(7.5, 4, 0, 3, 5, 6, 100)
    assert float(robust_mean(rows, "bulyan", 0.1)) == 5.0
    assert float(robust_mean(rows, "bulyan", 0.0)) == pytest.approx(125.5 / 7)  # none is bad
    assert float(robust_mean(rows, "krum", 0.1)) == 4.25


def test_bulyan_of_too_few_is_the_median():
    """Six models with one bad, and ten with two: four times as many and three would be needed."""
    assert float(robust_mean(column(0, 1, 2, 4, 5, 100), "bulyan", 0.1)) == 3.0
    ten = column(0, 1, 2, 3, 4, 7, 8, 9, 100, 100)
    assert float(robust_mean(ten, "bulyan", 0.2)) == 5.5


def test_bulyan_leaves_out_one_extreme_number_in_an_otherwise_usual_model():
    """What Krum alone does not see: far from the others in one of many numbers."""
    rows = torch.randn(11, 400, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rows[4] = 0
    rows[4, 7] = 9.0  # shorter than the others, but all in one number
    assert abs(float(robust_mean(rows, "krum", 0.1)[7])) > 0.5
    assert abs(float(robust_mean(rows, "bulyan", 0.1)[7])) < 0.5


def test_geometric_median_has_the_least_sum_of_distances():
    # Of the corners of a triangle with angles below 120 degrees, it is the point that sees all sides at 120 degrees.
    corners = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 3.0**0.5]], dtype=torch.float64)
    assert robust_mean(corners, "geometric_median", 0.2).tolist() == pytest.approx([1.0, 3**-0.5], abs=1e-5)
    # On a line it is the median, also far from the mean.
    assert float(robust_mean(column(0, 1, 1000), "geometric_median", 0.2)) == pytest.approx(1.0, abs=1e-2)
    assert float(robust_mean(column(4, 4, 4), "geometric_median", 0.2)) == 4.0


def test_centered_clipping_balances_differences_that_are_cut_off():
    # Around 2.5 the distances are 2.5, 1.5, 0.5, 0.5, 97.5, the median is 1.5: -1.5 - 1.5 - 0.5 + 0.5 + 1.5 = -1.5.
    # Around 2 they are 2, 1, 0, 1, 98, the median is 1: -1 - 1 + 0 + 1 + 1 = 0.
    assert float(robust_mean(column(0, 1, 2, 3, 100), "centered_clipping", 0.2)) == pytest.approx(2.0, abs=1e-5)


def test_auto_is_the_mean_of_those_that_agree():
    rows = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [40.0, 0.0], [40.0, 1.0]])
    assert robust_mean(rows[:5], "auto", 0.2).tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    assert robust_mean(rows[:4], "auto", 0.2).tolist() == pytest.approx([0.0, 0.0], abs=1e-6)  # all of them


def test_updates_are_shortened_to_the_median_length():
    found = shortened(torch.tensor([[3.0, 4.0], [0.0, 2.0], [10.0, 0.0]]))
    assert torch.equal(found, torch.tensor([[3.0, 4.0], [0.0, 2.0], [5.0, 0.0]]))
    assert is_usual(torch.tensor([[3.0, 4.0], [0.0, 2.0], [10.0, 0.0], [0.0, 10.1], [0.0, 0.0]])).tolist() == [
        True,
        True,
        True,
        False,
        True,
    ]


def test_auto_withstands_the_majority_of_a_cluster_that_pulls_hard():
    """Five of seven members of cluster 1 send three times the opposite; of all twenty clients they are a quarter."""
    keep = torch.tensor([[5.0, 5.0], [-2.0, 1.0]])
    labels = torch.tensor([0] * 13 + [1] * 7)
    updates = torch.tensor([[1.0, 0.0]]).repeat(20, 1)
    updates[15:] *= -3
    means = UsualModels(2, lambda cluster, rows, weights: robust_mean(rows, "auto", 0.2))
    plain = robust_means(2, "median")
    for average in (means, plain):
        average.add(keep[labels] + updates, labels)
    assert means.means(keep).tolist() == [[6.0, 5.0], [-1.0, 1.0]]
    assert plain.means(keep).tolist() == [[6.0, 5.0], [-5.0, 1.0]]


def test_auto_keeps_the_center_of_a_cluster_without_usual_members():
    keep = torch.tensor([[0.0], [7.0]])
    means = UsualModels(2, lambda cluster, rows, weights: robust_mean(rows, "auto", 0.2))
    means.add(torch.tensor([[1.0], [1.0], [1.0], [99.0]]), torch.tensor([0, 0, 0, 1]))
    assert means.means(keep).tolist() == [[1.0], [7.0]]


def test_fltrust_by_hand(monkeypatch):
    """The server's update is (2, 0). The first has its direction, the second agrees by half the root of two.

    The third is at right angles, the fourth against it. In the other cluster nobody agrees.
    """
    engine = MockEngine(lambda *given: {}, num_clients=6)
    monkeypatch.setattr(averaging, "trained_on_reserved", lambda engine, models, work, rng: models + own)
    own, keep = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 1.0], [5.0, 5.0]])
    updates = torch.tensor([[4.0, 0.0], [1.0, 1.0], [0.0, 3.0], [-9.0, 0.0], [0.0, -1.0], [1.0, 0.0]])
    labels = torch.tensor([0, 0, 0, 0, 1, 1])
    means = TrustedModels(2, engine)
    means.add(keep[labels] + updates, labels, torch.ones(6))
    half = 0.5**0.5
    # Both are of length 2 then: (2, 0), and (1, 1) times the root of two.
    expected = [1 + (2 + 1) / (1 + half), 1 + 1 / (1 + half)]
    assert means.means(keep)[0].tolist() == pytest.approx(expected)
    assert means.means(keep)[1].tolist() == [5.0, 5.0]


def test_fltrust_needs_samples_on_the_server_and_whole_models():
    def mean_of(key, reserve):
        run = trainer_of(setup_of(algorithms()[key](robust="fltrust"), ragged_federation(reserve=reserve)))
        run._start()
        run._round(1)

    mean_of("fedavg", 2)
    with pytest.raises(ConfigError, match=r"robust=fltrust of FedAvg needs samples on the server; .*scenario.reserve"):
        mean_of("fedavg", 0)
    for key in ("feddane", "fedper", "fedrep", "fedsgd", "scaffold"):
        with pytest.raises(ConfigError, match=r"robust=fltrust compares whole models .* use another robust mean\."):
            mean_of(key, 2)
    with pytest.raises(ConfigError, match=r"here there is none; use another robust mean\."):
        mean_of("fesem_ma", 2)


def test_with_fltrust_sign_flips_do_little_harm():
    """FedAvg, whose clients are all of one kind; 40 % flip."""
    given = {"rounds": 8, "attack": "sign_flip", "attackers": 0.4}
    data = {"scenario.groups": 1, "scenario.reserve": 10}
    plain = coterie.run("fedavg", "rotated-digits", set=data, **given).summary
    found = coterie.run("fedavg", "rotated-digits", set=data | {"algorithm.robust": "fltrust"}, **given).summary
    assert found["accuracy"]["macro"] > plain["accuracy"]["macro"] + 0.2


def test_auto_averages_gradients_as_they_are():
    """A gradient is no model: it is not compared with the center."""
    run = trainer_of(setup_of(algorithms()["fedsgd"](robust="auto")))
    assert isinstance(run.algorithm.mean_of(1, run.engine, run.engine.initial()), UsualModels)
    seen = []
    made = run.algorithm.mean_of

    def noted(*given, **more):
        seen.append(type(made(*given, **more)))
        return made(*given, **more)

    object.__setattr__(run.algorithm, "mean_of", noted)
    run._start()
    run._round(1)
    assert seen == [HeldModels]


def test_a_registered_robust_mean_is_a_choice_of_every_method(monkeypatch):
    monkeypatch.setitem(averaging._ROBUST_MEANS, "lowest", lambda rows, share: rows.amin(0))
    assert float(robust_mean(column(1, 2, 100), "lowest", 0.2)) == 1.0
    assert build(algorithms()["fesem"], {"robust": "lowest"}, "algorithm").robust == "lowest"
    with pytest.raises(ConfigError, match=r"robust of RobustTKM must be 'none', .*'fltrust' or 'lowest'\. Got 'foo'"):
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


@pytest.mark.parametrize(
    "kind", ["trimmed_mean", "median", "krum", "bulyan", "geometric_median", "centered_clipping", "auto"]
)
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


@pytest.mark.parametrize("kind", ["median", "auto"])
@pytest.mark.parametrize("name", AVERAGING)
def test_every_method_that_averages_can_do_so_robustly(name, kind):
    """One client of nine answers with a far model; with a robust mean the centers stay near the others'."""
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

    honest, plain, robust = center("none", False), center("none", True), center(kind, True)
    assert float((robust - honest).norm()) < 0.2 * float((plain - honest).norm())


def test_a_robust_mean_that_does_not_fit_is_refused(monkeypatch):
    run = trainer_of(setup_of(algorithms()["fedavg"](robust="median")))
    monkeypatch.setattr("coterie.engines.base.available_memory", lambda device: 1)
    with pytest.raises(ConfigError, match="holds the models of 9 clients"):
        run.run()


def test_the_plain_mean_streams():
    run = finished(setup_of(algorithms()["fedavg"]()))
    assert isinstance(run.algorithm.mean_of(1, run.engine, run.state.centers), CenterSums)
