"""Choice of K: the numbers by hand, the recommendation on known kinds of clients, and what it may not see."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from coterie.data.federation import Split
from coterie.engines import make_engine
from coterie.errors import ConfigError
from coterie.methods.fesem import FeSEM
from coterie.randomness import Rng
from coterie.runs.choose_k import (
    FOLDS,
    LEAST,
    Choice,
    Gain,
    Row,
    Scores,
    Trial,
    _Fold,
    choose_k,
    first_by_gap,
    folds_of,
    gap_statistic,
    principal_coordinates,
    recommend,
    silhouette,
    weighted_mean,
)
from coterie.runs.experiment import merge, resolve
from coterie.views import plots
from tests.helpers import ragged_federation, setup_of


def experiment(name: str = "rotated-digits", seed: int = 0, clients: int = 40, **tables: Any) -> Any:
    return resolve(merge({"run": {"dataset": name, "seed": seed, "clients": clients, "device": "cpu"}}, tables))


def row(clusters: int, silhouette: float | None = None, gap: float | None = None, accuracy: float | None = 0.5) -> Row:
    gap_error, error = None if gap is None else 0.05, None if accuracy is None else 0.01
    return Row(clusters, accuracy, error, 1.0, 1.0, silhouette, gap, gap_error)


def trial(clusters: int, right: list[float], samples: list[float] | None = None, loss: float = 1.0) -> Trial:
    """Clients with these accuracies."""
    accuracy = torch.tensor(right, dtype=torch.float64)
    held = torch.full_like(accuracy, 100) if samples is None else torch.tensor(samples, dtype=torch.float64)
    scores = Scores(held, torch.full_like(accuracy, loss), accuracy)
    return Trial(Row(clusters, *scores.means, 1.0, None, None, None), scores)


# ---- the numbers ----


def test_silhouette_by_hand():
    points = torch.tensor([[0.0], [2.0], [7.0]])
    # 0: a = 2, b = 7; 2: a = 2, b = 5; 7 is alone.
    assert silhouette(points, torch.tensor([0, 0, 1])) == pytest.approx((5 / 7 + 3 / 5 + 0) / 3)
    assert silhouette(points, torch.tensor([0, 0, 0])) is None
    assert silhouette(points, torch.tensor([0, 0, 2])) == silhouette(points, torch.tensor([1, 1, 0]))


def test_silhouette_is_that_of_scikit_learn():
    from sklearn.metrics import silhouette_score

    points, labels = Rng.seed(0).normal(40, 6), torch.arange(40) % 5
    assert silhouette(points, labels) == pytest.approx(silhouette_score(points.numpy(), labels.numpy()))


def test_models_that_coincide_have_silhouette_zero():
    assert silhouette(torch.zeros(4, 2), torch.tensor([0, 0, 1, 1])) == 0


def test_principal_coordinates_keep_distances():
    rows = Rng.seed(1).normal(12, 500).float() + 100
    points = principal_coordinates(rows)
    assert points.shape == (12, 11)
    assert torch.allclose(torch.cdist(points, points), torch.cdist(rows.double(), rows.double()), rtol=1e-4)
    assert (points.var(0).diff() <= 1e-9).all()
    assert principal_coordinates(torch.ones(5, 3)).shape == (5, 0)


def test_the_gap_is_a_difference_of_logarithms():
    reference = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)  # inertia 2 with one cluster
    gap, error = gap_statistic(0.5, [reference, 2 * reference], 1, Rng.seed(0), torch.arange(3))
    assert gap == pytest.approx((math.log(2) + math.log(8)) / 2 - math.log(0.5))
    assert error == pytest.approx(math.log(2) * math.sqrt(1.5))
    assert gap_statistic(0.0, [reference], 1, Rng.seed(0), torch.arange(3)) == (None, None)
    assert gap_statistic(0.5, [reference], 3, Rng.seed(0), torch.arange(3)) == (None, None)


def test_intra_distance_is_that_of_models_to_the_mean_of_their_cluster():
    setup = experiment(clients=6)
    engine = make_engine("vectorized", setup.task(), setup.federation(), "cpu", {})
    fold = _Fold(engine, Rng.seed(0))
    assert fold._averaged(6, torch.arange(6), rounds=1)[1] == pytest.approx(0, abs=1e-6)  # everyone is its own center
    chunks = list(fold._first_models())
    order = torch.cat([chunk.clients for chunk in chunks]).argsort()
    models = torch.cat([chunk.answer.params for chunk in chunks])[order].double()
    apart = [models[:2] - models[:2].mean(0), models[2:] - models[2:].mean(0)]
    expected = torch.cat(apart).square().sum(1).mean().sqrt()
    assert fold._averaged(2, torch.tensor([0, 0, 1, 1, 1, 1]), rounds=0)[1] == pytest.approx(float(expected), rel=1e-5)


# ---- held-out samples ----


def test_each_sample_is_held_out_in_one_fold_and_trained_on_in_the_others():
    federation = ragged_federation(6)
    folds = folds_of(federation, Rng.seed(0))
    assert len(folds) == FOLDS
    for client in range(len(federation)):
        own = torch.cat([federation.train.rows(client), federation.valid.rows(client)]).sort().values
        assert torch.equal(torch.cat([fold.valid.rows(client) for fold in folds]).sort().values, own)
        for fold in folds:
            both = torch.cat([fold.train.rows(client), fold.valid.rows(client)])
            assert torch.equal(both.sort().values, own)
            assert len(fold.train.rows(client))
    assert all(fold.test is federation.test for fold in folds)


def test_a_client_with_one_sample_keeps_it_and_the_draw_depends_on_the_client_only():
    federation = ragged_federation(6)
    lonely = replace(federation, train=Split.of([federation.train.rows(c)[:1] for c in range(6)]))
    lonely = replace(lonely, valid=Split.of([torch.empty(0, dtype=torch.int64)] * 6))
    assert all(fold.train.sizes.tolist() == [1] * 6 for fold in folds_of(lonely, Rng.seed(0)))
    order = torch.tensor([3, 0, 5, 1, 2, 4])
    one, other = folds_of(federation, Rng.seed(0))[1], folds_of(federation.select(order), Rng.seed(0))[1]
    assert all(torch.equal(one.valid.rows(int(c)), other.valid.rows(i)) for i, c in enumerate(order))


def test_scores_of_folds_are_weighted_by_their_samples():
    folds = [
        Scores(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0])),
        Scores(torch.tensor([3.0, 0.0]), torch.tensor([6.0, 0.0]), torch.tensor([0.0, 0.0])),
    ]
    found = Scores.summed(folds)
    assert found.samples.tolist() == [4, 0]
    assert found.loss.tolist() == [5, 0]
    assert found.accuracy is not None
    assert found.accuracy.tolist() == [0.25, 0]


# ---- the error bar ----


def test_the_standard_error_is_over_clients():
    values = torch.tensor([0.1, 0.3, 0.2, 0.6])
    mean, error = weighted_mean(values, torch.ones(4))
    assert mean == pytest.approx(0.3)
    assert error == pytest.approx(float(values.std()) / 2)
    # A client with weight 0 does not count, and one client alone has no error.
    assert weighted_mean(torch.tensor([1.0, 9.0]), torch.tensor([2.0, 0.0])) == (1.0, None)
    assert weighted_mean(torch.ones(2), torch.zeros(2)) == (None, None)


def test_a_gain_must_be_large_and_certain():
    zeros, weights = torch.zeros(16), torch.ones(16)
    noisy = torch.tensor([0.2, -0.1] * 8)  # mean 0.05, standard error 0.0387
    found = Gain.of(zeros, noisy, weights, LEAST)
    assert (found.value, found.error) == (pytest.approx(0.05), pytest.approx(0.15 / math.sqrt(15)))
    assert found.bar == pytest.approx(1.7531 * found.error, rel=1e-4)  # t with 15 degrees of freedom, 5 %
    assert not found.is_clear
    assert Gain.of(zeros, noisy + 0.05, weights, LEAST).is_clear
    # Of five comparisons, one is above 5 % by chance more often: the bar is that of 1 %.
    assert Gain.of(zeros, noisy, weights, LEAST, comparisons=5).bar == pytest.approx(2.6025 * found.error, rel=1e-4)
    assert not Gain.of(zeros, noisy + 0.03, weights, LEAST, comparisons=5).is_clear
    assert not Gain.of(zeros, zeros + 0.004, weights, LEAST).is_clear  # certain, but less than half a point
    assert not Gain.of(zeros[:1], zeros[:1] + 1, weights[:1], LEAST).is_clear  # one client


def test_large_clients_do_not_decide_alone():
    before, after = [0.5] * 10, [0.9, *[0.5] * 9]
    skewed = [10_000.0, *[100.0] * 9]
    gain = trial(2, after, skewed).gain_over(trial(1, before, skewed))
    assert gain.value == pytest.approx(0.4 * (10_000 / 10_020) / (10_000 / 10_020 + 9 * 100 / 120))
    assert not gain.is_clear


# ---- the rule ----

WIGGLE = [0.01, -0.01] * 10


def around(mean: float, share: float = 1.0) -> list[float]:
    return [mean + share * wiggle for wiggle in WIGGLE]


def test_the_smallest_k_that_no_larger_one_beats():
    trials = [trial(1, around(0.5)), trial(2, around(0.8, -1)), trial(3, around(0.9)), trial(4, around(0.902, -1))]
    chosen, reason = recommend(trials)
    assert chosen == 3
    assert reason == (
        "held-out accuracy is 90.0 %, +10.0 ±0.5 points over K = 2; no larger K is clearly better "
        "(best: K = 4, +0.2 ±0.5 points); second opinions: K = 1 by loss, K = 1 by silhouette"
    )
    rows = [one.compared_with(trials[2]) for one in trials]
    assert [one.gain for one in rows] == [pytest.approx(x) for x in (-0.4, -0.1, 0.0, 0.002)]
    assert rows[3].gain_error == pytest.approx(0.02 / math.sqrt(19))
    assert rows[2].gain_error == 0


def test_two_clusters_may_be_no_better_than_one_where_four_are():
    trials = [trial(1, around(0.5)), trial(2, around(0.5)), trial(3, around(0.49)), trial(4, around(0.8, -1))]
    chosen, reason = recommend(trials)
    assert chosen == 4
    assert "it is the largest K that was tried, and a larger one may be better" in reason


def test_without_a_gain_k_is_one():
    chosen, reason = recommend([trial(1, around(0.9)), trial(2, around(0.88, -1)), trial(3, around(0.901, -1))])
    assert chosen == 1
    assert reason.startswith(
        "held-out accuracy is 90.0 %; no larger K is clearly better (best: K = 3, +0.1 ±0.5 points); second opinions"
    )


def test_the_reason_says_what_was_not_tried():
    assert "a smaller K was not tried" in recommend([trial(2, around(0.9)), trial(3, around(0.9))])[1]
    assert recommend([trial(3, around(0.9))]) == (3, "it is the only K that was tried")
    nobody = [trial(k, [0.0, 0.0], [0.0, 0.0]) for k in (2, 3)]
    assert recommend(nobody) == (2, "no client has samples to hold out, and it is the smallest K that was tried")
    assert nobody[1].compared_with(nobody[0]).gain is None


def test_second_opinions_do_not_decide():
    trials = [trial(1, around(0.9)), trial(2, around(0.9), loss=0.5), trial(3, around(0.9), loss=0.5)]
    numbers = [(None, 0.1), (0.3, 0.2), (0.5, 0.6)]
    trials = [
        replace(one, row=replace(one.row, silhouette=s, gap=g, gap_error=0.05))
        for one, (s, g) in zip(trials, numbers, strict=True)
    ]
    chosen, reason = recommend(trials)
    assert chosen == 1
    assert reason.endswith("second opinions: K = 2 by loss, K = 3 by silhouette")
    assert first_by_gap([row(1, None, 0.1), row(2, 0.3, 0.2), row(3, 0.5, 0.6), row(4, 0.4, 0.6)]) == 3


def test_without_classes_the_loss_decides():
    def of(k: int, loss: float) -> Trial:
        values = torch.tensor(around(loss), dtype=torch.float64)
        scores = Scores(torch.full_like(values, 50), values, r2=1 - values / 4)
        return Trial(Row(k, *scores.means, 1.0, None, None, None, r2=scores.mean_r2), scores)

    chosen, reason = recommend([of(1, 2.0), of(2, 1.5), of(3, 1.499)])
    assert chosen == 2
    assert reason.startswith("held-out loss is 1.5 (R2 0.625), -0.5 ±")
    assert " of loss over K = 1; no larger K is clearly better" in reason
    assert "by loss" not in reason


# ---- known kinds of clients ----


@pytest.mark.parametrize("seed", [0, 1])
def test_four_rotations_are_four_clusters(seed: int):
    found = choose_k(experiment(seed=seed), last=6)
    assert found.recommended == 4
    assert [row.clusters for row in found.rows] == [1, 2, 3, 4, 5, 6]
    assert (found.clients, found.rounds, found.seed) == (40, 3, seed)
    best = found.rows[3]
    assert best.accuracy is not None
    assert best.accuracy > 0.9
    assert (best.gain, best.gain_error) == (0, 0)
    assert found.rows[0].silhouette is None
    assert found.rows[0].intra_distance > 2 * best.intra_distance


@pytest.mark.parametrize(
    ("dataset", "tables", "true"),
    [
        ("rotated-digits", {"scenario": {"groups": 2}}, 2),
        ("digits", {}, 1),
        ("digits", {"scenario": {"quantity": 3.0}}, 1),
        ("rotated-digits", {"scenario": {"quantity": 3.0}}, 4),
        ("rotated-digits", {"scenario": {"alpha": 3.0}}, 4),  # label skew: the silhouette would choose 1
        ("rotated-digits", {"scenario": {"groups": 1, "alpha": 3.0}}, 1),
        ("synthetic", {"dataset": {"groups": 3, "shape": [1, 8, 8]}}, 3),
    ],
)
def test_other_kinds(dataset: str, tables: dict[str, Any], true: int):
    assert choose_k(experiment(dataset, **tables), last=5).recommended == true


def test_only_the_sample_and_neither_groups_nor_test_data_matter():
    setup = experiment(clients=24).loaded()
    found = choose_k(setup, 3, 4, sample=16, rounds=1)
    assert found.clients == 16
    data = setup.federation()
    assert data.groups is not None
    blind = replace(
        data,
        groups=data.groups.flip(0),
        test=replace(data.test, index=data.train.index[:1].repeat(len(data.test.index))),
    )
    assert choose_k(replace(setup, data=blind), 3, 4, sample=16, rounds=1) == found
    assert choose_k(setup, 3, 4, sample=16, rounds=1, seed=5) != found


def test_the_method_plays_no_part_and_unseen_clients_take_none():
    one = setup_of(FeSEM(num_clusters=2, prox=1.0))
    assert choose_k(one, 1, 2) == choose_k(replace(one, algorithm=FeSEM()), 1, 2)
    held_out = replace(one, schedule=replace(one.schedule, unseen=0.34))
    assert choose_k(held_out, 1, 1).clients == len(one.federation()) - 3


def test_models_that_do_not_fit_are_trained_again_and_come_back_the_same():
    setup = resolve(merge({"run": {"clients": 60, "device": "cpu"}, "model": {"hidden": 64}})).loaded()
    small = replace(setup, engine_settings={"memory": 1, "chunk": 20})
    large = replace(setup, engine_settings={"memory": 64, "chunk": 20})
    assert choose_k(small, 3, 4, rounds=1) == choose_k(large, 3, 4, rounds=1)


def test_validation_samples_are_not_needed():
    found = choose_k(experiment(clients=8, scenario={"valid": 0.0}), 1, 3, rounds=1)
    assert all(row.accuracy is not None and row.accuracy_error is not None for row in found.rows)


def test_clients_that_learn_nothing_are_of_one_kind():
    still = experiment(clients=8, work={"lr": 1e-30})
    found = choose_k(still, 1, 3, rounds=1)
    assert found.recommended == 1


def test_clients_that_all_fail_are_said_so():
    with pytest.raises(
        ConfigError, match=r"Only 0 of 8 clients could train, too few for 3 clusters\. Likely cause: lr=1e\+30"
    ):
        choose_k(experiment(clients=8, work={"lr": 1e30}), 1, 3)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"first": 0}, "The smallest K must be an int >= 1. Got 0 instead."),
        ({"first": 4, "last": 3}, "The smallest K must be at most the largest, 3. Got 4 instead."),
        ({"last": 10}, "The largest K must be at most the number of clients, 9. Got 10 instead."),
        ({"last": 5, "sample": 4}, "The largest K must be at most the number of clients, 4. Got 5 instead."),
        ({"sample": 0}, "sample must be an int >= 1. Got 0 instead."),
        ({"rounds": 0}, "rounds must be an int >= 1. Got 0 instead."),
        ({"seed": -1}, "seed of Schedule must be an int >= 0. Got -1 instead."),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(values: dict[str, Any], said: str):
    with pytest.raises(ConfigError) as caught:
        choose_k(setup_of(FeSEM()), **values)
    assert str(caught.value) == said


# ---- the picture ----


def test_the_curves_show_every_k_and_mark_the_chosen_one():
    rows = (row(1, None, 0.1, 0.5), row(2, 0.3, 0.2, 0.8), row(3, 0.2, None, 0.81))
    figure = plots.k_curves(Choice(2, "so", rows, 9, 3, 0))
    assert isinstance(figure, Figure)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["held-out accuracy", "intra-cluster distance", "silhouette", "gap statistic"]
    for axes in figure.axes:
        mark = next(line for line in axes.lines if line.get_gid() == "recommended")
        assert list(mark.get_xdata()) == [2, 2]
        assert list(axes.get_xticks()) == [1, 2, 3]
    assert "K = 2 is recommended (9 clients, 3 rounds each)" in figure.texts[0].get_text()
    bars = figure.axes[0].containers[0].lines[2][0].get_segments()
    assert [[float(y) for _, y in bar] for bar in bars] == [
        pytest.approx([a - 0.01, a + 0.01]) for a in (0.5, 0.8, 0.81)
    ]
    blind = tuple(replace(one, accuracy=None, accuracy_error=None) for one in rows)
    assert plots.k_curves(Choice(2, "so", blind, 9, 3, 0), dark=True).axes[0].get_title() == "held-out loss"
