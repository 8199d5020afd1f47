"""Numbers of a round: against scikit-learn, and by hand."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn

from coterie.errors import ConfigError, UnknownName
from coterie.runs.metrics import (
    METRICS,
    ari,
    best_rounds,
    bottom_clients,
    churn,
    cluster_sizes,
    measured,
    metrics,
    of_clusters,
    of_scores,
    purity,
    register_metric,
    summarized,
    worst_tenth,
)

partitions = st.integers(1, 40).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 5), min_size=n, max_size=n), st.lists(st.integers(3, 7), min_size=n, max_size=n)
    )
)


def agreement(labels, groups):
    return measured(of_clusters(labels, groups))


def arrays(pair):
    return np.array(pair[0]), np.array(pair[1])


@given(partitions)
@settings(max_examples=100, deadline=None)
def test_purity_is_of_scikit_learns_table(pair):
    labels, groups = arrays(pair)
    table = sklearn.cluster.contingency_matrix(groups, labels)
    assert purity(labels, groups) == pytest.approx(table.max(0).sum() / table.sum(), abs=1e-12)


@given(partitions)
@settings(max_examples=50, deadline=None)
def test_agreement_is_within_its_bounds(pair):
    labels, groups = arrays(pair)
    found = agreement(labels, groups)
    assert -0.5 <= found["ari"] <= 1.0
    assert 0.0 <= found["nmi"] <= 1.0
    assert 0.0 < found["purity"] <= 1.0


@given(partitions)
@settings(max_examples=30, deadline=None)
def test_a_partition_agrees_with_itself_under_other_names(pair):
    _, groups = arrays(pair)
    assert agreement(11 - groups, groups) == pytest.approx({"ari": 1.0, "nmi": 1.0, "purity": 1.0})


def test_agreement_by_hand():
    labels, groups = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 1, 1])
    # pairs together in both: 1 + 3 = 4; by cluster 6, by group 1 + 6 = 7, expected 6 * 7 / 15
    assert ari(labels, groups) == pytest.approx((4 - 2.8) / (6.5 - 2.8))
    assert purity(labels, groups) == pytest.approx(5 / 6)


def test_agreement_leaves_out_clients_not_seen_yet():
    labels, groups = np.array([0, -1, 1, -1, 1]), np.array([3, 3, 4, 4, 4])
    assert agreement(labels, groups) == {"ari": 1.0, "nmi": 1.0, "purity": 1.0}


def test_agreement_without_groups_or_without_clients():
    nothing = {"ari": None, "nmi": None, "purity": None}
    assert agreement(np.array([0, 1]), None) == nothing
    assert agreement(np.array([-1, -1]), np.array([0, 1])) == nothing


def test_means_weigh_by_samples_and_leave_out_clients_without():
    scores = {"loss": np.array([1.0, 0.5, 123.0]), "samples": np.array([1, 3, 0])}
    assert measured(of_scores(scores))["loss"] == {"macro": 0.75, "micro": 0.625}
    assert measured(of_scores(scores | {"samples": np.zeros(3, dtype=int)}))["loss"] is None


def test_fairness_is_of_the_worst_clients():
    accuracy = np.array([0.9, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0] * 2)
    assert bottom_clients(accuracy) == pytest.approx((0.1 + 0.1 + 0.2 + 0.2 + 0.3) / 5)
    assert worst_tenth(accuracy) == pytest.approx(0.1)  # two of twenty


def test_fairness_of_few_clients():
    assert bottom_clients(np.array([0.5, 1.0])) == 0.75
    assert worst_tenth(np.array([0.5, 1.0])) == 0.5


def test_best_rounds_are_the_five_best():
    def rows(values):
        return [{"accuracy": None}, {}, *({"accuracy": {"micro": value}} for value in values)]

    assert best_rounds(rows([0.1, 0.9, 0.2, 0.8, 0.7, 0.6, 0.5])) == pytest.approx(0.7)
    assert best_rounds(rows([0.25, 0.75])) == 0.5
    assert best_rounds(rows([])) is None


def test_churn_is_of_clients_seen_before():
    before, after = np.array([0, 1, -1, 2]), np.array([0, 2, 1, 2])
    assert churn(before, after) == pytest.approx(1 / 3)
    assert churn(np.array([-1, -1]), np.array([0, 1])) == 0.0
    assert churn(before, before) == 0.0


def test_cluster_sizes_count_empty_ones_and_leave_out_unseen_clients():
    assert cluster_sizes(np.array([0, 2, 2, -1]), 4) == [1, 0, 2, 0]
    assert cluster_sizes(np.array([-1, -1]), 2) == [0, 0]
    assert cluster_sizes(np.array([-1]), 0) == []


SCORES = {
    "samples": np.array([1.0, 3.0, 0.0]),
    "loss": np.array([2.0, 1.0, 0.0]),
    "accuracy": np.array([1.0, 0.5, 0.0]),
    "f1": np.array([1.0, 0.25, 0.0]),
}


def test_evaluation_of_classes():
    assert measured(of_scores(SCORES)) == {
        "accuracy": {"micro": 0.625, "macro": 0.75, "bottom5": 0.75, "worst_decile": 0.5},
        "f1": {"micro": 0.4375, "macro": 0.625},
        "loss": {"micro": 1.25, "macro": 1.5},
        "r2": None,
    }


def test_evaluation_of_a_regression_has_loss_and_r2():
    scores = {"samples": np.array([1, 3]), "loss": np.array([2.0, 4.0]), "r2": np.array([0.0, 0.8])}
    means = {"loss": {"micro": 3.5, "macro": 3.0}, "r2": {"micro": pytest.approx(0.6), "macro": 0.4}}
    assert measured(of_scores(scores)) == {"accuracy": None, "f1": None, **means}


def test_evaluation_of_nothing():
    nothing = {name: np.zeros(2) for name in ("samples", "loss", "accuracy", "f1")}
    assert measured(of_scores(nothing)) == {"accuracy": None, "f1": None, "loss": None, "r2": None}


def test_the_summary_has_the_last_evaluation_the_clusters_of_now_and_the_best_rounds():
    rows = [measured(of_scores(SCORES)), {"ari": 0.0, "churn": 1.0}]  # the last round was not evaluated
    found = summarized(rows, of_clusters(np.array([0, 1]), np.array([1, 0])))
    assert found["accuracy"] == rows[0]["accuracy"] | {"best5": 0.625}
    assert found["loss"] == rows[0]["loss"]
    assert found["ari"] == 1.0
    assert "churn" not in found
    assert summarized([], of_clusters(np.array([-1]), None)) == dict.fromkeys(found)


# ---- the registry ----


def test_every_metric_is_explained_and_has_a_place_of_its_own():
    assert all(metric.label and metric.about and metric.needs for metric in METRICS.values())
    assert len({metric.path for metric in METRICS.values()}) == len(METRICS)
    assert [metric.key for metric in metrics("terminal")] == ["accuracy", "bottom5", "ari"]


def test_a_metric_may_join_scores_and_clusters():
    with patch.dict(METRICS):

        @register_metric("accuracy.least", "least", "accuracy of the worst cluster")
        def least(accuracy, clusters):
            return min(accuracy[clusters == k].mean() for k in np.unique(clusters))

        assert measured(of_scores(SCORES, np.array([0, 1, 1])))["accuracy"]["least"] == 0.5


@pytest.mark.parametrize("path", ["ari.macro", "accuracy", "bytes", "seconds.more", "loss.bottom5"])
def test_a_metric_that_would_hide_something_else_is_refused(path):
    with pytest.raises(ConfigError, match="already .* metric .* another name"):
        register_metric(path, "mine", "mine")(lambda accuracy: 0.0)


def test_an_unknown_parameter_is_refused():
    with pytest.raises(UnknownName, match="There is no parameter of metric mine named 'acuracy'. Did you mean 'accur"):
        register_metric("mine", "mine", "mine")(lambda acuracy: 0.0)
    assert "mine" not in METRICS
