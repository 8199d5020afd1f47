"""Choice of K: the numbers by hand, the recommendation on known kinds of clients, and what it may not see."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from coterie.errors import ConfigError
from coterie.methods.fesem import FeSEM
from coterie.randomness import Rng
from coterie.runs.choose_k import (
    Choice,
    Row,
    choose_k,
    first_by_gap,
    gap_statistic,
    principal_coordinates,
    recommend,
    silhouette,
)
from coterie.runs.experiment import merge, resolve
from coterie.views import plots
from tests.helpers import ragged_federation, setup_of


def experiment(name: str = "rotated-digits", seed: int = 0, clients: int = 40, **tables: Any) -> Any:
    return resolve(merge({"run": {"dataset": name, "seed": seed, "clients": clients, "device": "cpu"}}, tables))


def row(clusters: int, silhouette: float | None, gap: float | None, accuracy: float | None = None) -> Row:
    return Row(clusters, 1.0, silhouette, gap, None if gap is None else 0.05, accuracy, None)


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


def test_intra_distance_is_that_of_models_to_their_mean():
    federation = ragged_federation(6)
    setup = setup_of(FeSEM(num_clusters=2), federation)
    found = [choose_k(setup, k, k, rounds=1).rows[0] for k in (1, 2, 6)]
    assert found[-1].intra_distance == pytest.approx(0, abs=1e-6)  # everyone is its own center
    assert found[0].intra_distance > found[1].intra_distance > 0


# ---- the rule ----


def test_the_best_separated_k_is_taken():
    rows = [row(1, None, 0.1, 0.5), row(2, 0.3, 0.2, 0.8), row(3, 0.5, 0.6, 0.9), row(4, 0.4, 0.6, 0.92)]
    assert first_by_gap(rows) == 3
    chosen, reason = recommend(rows)
    assert chosen == 3
    assert reason == (
        "its clusters are best separated: silhouette 0.50; its gap statistic is 0.60, against 0.10 at K = 1; "
        "the gap rule agrees; validation accuracy 90.0 % (best: 92.0 % at K = 4)"
    )


def test_where_the_gap_stops_too_early_the_silhouette_does_not():
    rows = [row(1, None, 0.1), row(2, 0.2, 0.1), row(3, 0.3, 0.3), row(4, 0.5, 0.8), row(5, 0.4, 0.7)]
    chosen, reason = recommend(rows)
    assert chosen == 4
    assert "the gap rule alone would choose K = 1" in reason


def test_without_clusters_k_is_one():
    chosen, reason = recommend([row(1, None, 0.5), row(2, 0.07, 0.45), row(3, 0.05, 0.44)])
    assert chosen == 1
    assert "the best silhouette, 0.07 at K = 2, is below 0.2" in reason


def test_one_far_client_is_no_cluster():
    chosen, reason = recommend([row(1, None, 0.85), row(2, 0.48, 0.75), row(3, 0.18, 0.73)])
    assert chosen == 1
    assert "0.75 at K = 2, where the silhouette is largest (0.48), is not above 0.85 at K = 1" in reason


def test_the_reason_says_where_the_range_was_too_small():
    assert "it is the largest K that was tried" in recommend([row(1, None, 0.1), row(2, 0.4, 0.5)])[1]
    chosen, reason = recommend([row(2, 0.1, 0.4), row(3, 0.05, 0.4)])
    assert chosen == 2
    assert "the clusters are weak; K = 1 was not tried" in reason
    assert recommend([row(3, 0.1, 0.4)]) == (3, "it is the only K that was tried")


# ---- known kinds of clients ----


@pytest.mark.parametrize("seed", [0, 1])
def test_four_rotations_are_four_clusters(seed: int):
    found = choose_k(experiment(seed=seed), last=6)
    assert found.recommended == 4
    assert [row.clusters for row in found.rows] == [1, 2, 3, 4, 5, 6]
    assert (found.clients, found.rounds, found.seed) == (40, 3, seed)
    best = found.rows[3]
    assert best.valid_accuracy is not None
    assert best.valid_accuracy > 0.9
    assert found.rows[0].silhouette is None
    assert found.rows[0].intra_distance > 2 * best.intra_distance


@pytest.mark.parametrize(
    ("dataset", "tables", "true"),
    [
        ("rotated-digits", {"scenario": {"groups": 2}}, 2),
        ("digits", {}, 1),
        ("digits", {"scenario": {"quantity": 3.0}}, 1),
        ("rotated-digits", {"scenario": {"quantity": 3.0}}, 4),
        ("synthetic", {"dataset": {"groups": 3, "shape": [1, 8, 8]}}, 3),
    ],
)
def test_other_kinds(dataset: str, tables: dict[str, Any], true: int):
    assert choose_k(experiment(dataset, **tables), last=5, rounds=1).recommended == true


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


def test_without_validation_samples_there_is_no_accuracy():
    found = choose_k(experiment(clients=8, scenario={"valid": 0.0}), 1, 3, rounds=1)
    assert all(row.valid_accuracy is None and row.valid_loss is None for row in found.rows)
    assert "validation" not in found.reason


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
    rows = (row(1, None, 0.1, 0.5), row(2, 0.3, 0.2, 0.8), row(3, 0.2, None, 0.9))
    figure = plots.k_curves(Choice(2, "so", rows, 9, 3, 0))
    assert isinstance(figure, Figure)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["intra-cluster distance", "silhouette", "gap statistic", "validation accuracy"]
    for axes in figure.axes:
        mark = next(line for line in axes.lines if line.get_gid() == "recommended")
        assert list(mark.get_xdata()) == [2, 2]
        assert list(axes.get_xticks()) == [1, 2, 3]
    assert "K = 2 is recommended (9 clients, 3 round(s) each)" in figure.texts[0].get_text()
    blind = tuple(replace(one, valid_accuracy=None, valid_loss=1.0) for one in rows)
    assert plots.k_curves(Choice(2, "so", blind, 9, 3, 0), dark=True).axes[3].get_title() == "validation loss"
