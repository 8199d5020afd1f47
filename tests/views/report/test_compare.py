"""Several runs in one table."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from coterie.runs.reading import RunData, read_run
from coterie.views.report.compare import best_of, columns, compared_to_best, holm, paired_t, rows_of, value_of

from .made import make_run


def runs_of(root: Path, scores: dict[str, list[float]]) -> list[RunData]:
    """Runs whose last accuracy is about the score, by method and seed."""
    return [
        read_run(make_run(root, f"{method}-s{seed}", algorithm=method, seed=seed, best=score, rounds=3))
        for method, values in scores.items()
        for seed, score in enumerate(values)
    ]


def test_runs_that_differ_in_their_seed_are_one_row(tmp_path: Path):
    runs = runs_of(tmp_path, {"fesem": [0.8, 0.7], "fedavg": [0.5, 0.4]})
    rows = rows_of(runs)
    assert [(row.label, row.runs) for row in rows] == [("fesem", [0, 1]), ("fedavg", [2, 3])]
    values = [run.last("accuracy") for run in runs[:2]]
    assert rows[0].mean("accuracy") == pytest.approx(np.mean(values))
    assert rows[0].deviation("accuracy") == pytest.approx(np.std(values, ddof=1))


def test_rows_of_one_method_say_what_sets_them_apart(tmp_path: Path):
    paths = [
        make_run(tmp_path, f"k{k}-{p}", clusters=k, settings={"prox": p}) for k, p in ((2, 0.0), (3, 0.0), (3, 0.5))
    ]
    labels = [row.label for row in rows_of([read_run(path) for path in paths])]
    assert labels == [
        "fesem (num_clusters=2, prox=0.0)",
        "fesem (num_clusters=3, prox=0.0)",
        "fesem (num_clusters=3, prox=0.5)",
    ]


def test_the_best_of_each_dataset_is_marked(tmp_path: Path):
    runs = [
        *runs_of(tmp_path / "x", {"fesem": [0.8], "fedavg": [0.5]}),
        read_run(make_run(tmp_path, "other", algorithm="ifca", dataset="else", best=0.2)),
    ]
    rows = rows_of(runs)
    accuracy = next(column for column in columns() if column.key == "accuracy")
    loss = next(column for column in columns() if column.key == "loss")
    clusters = next(column for column in columns() if column.key == "clusters")
    assert best_of(rows, accuracy) == {0}  # one row alone is not the best of anything
    assert best_of(rows, loss) == {0}  # the lowest
    assert best_of(rows, clusters) == set()
    assert [test.best for test in compared_to_best(runs, rows)] == [True, False, False]


def test_p_values_are_those_of_scipy_with_holms_correction(tmp_path: Path):
    scores = {"a": [0.80, 0.82, 0.81, 0.83], "b": [0.79, 0.80, 0.80, 0.81], "c": [0.6, 0.9, 0.5, 0.7]}
    runs = runs_of(tmp_path, scores)
    rows = rows_of(runs)
    tests = compared_to_best(runs, rows)
    values = [[run.last("accuracy") for run in runs[i : i + 4]] for i in (0, 4, 8)]
    raw = [float(stats.ttest_rel(values[0], values[i]).pvalue) for i in (1, 2)]
    assert tests[0].best
    assert tests[0].p is None
    small, large = min(raw), max(raw)
    expected = {small: min(1, 2 * small), large: max(large, min(1, 2 * small))}
    assert [test.p for test in tests[1:]] == pytest.approx([expected[p] for p in raw])
    assert [test.seeds for test in tests] == [4, 4, 4]


def test_only_common_seeds_are_paired(tmp_path: Path):
    runs = runs_of(tmp_path, {"a": [0.8, 0.81, 0.82]})
    runs += [read_run(make_run(tmp_path, f"b{seed}", algorithm="b", seed=seed, best=0.5)) for seed in (2, 7)]
    tests = compared_to_best(runs, rows_of(runs))
    assert (tests[1].p, tests[1].seeds) == (None, 1)  # one pair tells nothing


def test_a_difference_that_is_always_the_same():
    assert paired_t([0.5, 0.6, 0.7], [0.4, 0.5, 0.6]) == 0.0
    assert paired_t([0.5, 0.5], [0.5, 0.5]) == 1.0
    assert paired_t([], []) is None


def test_holm_never_goes_down_nor_beyond_one():
    assert holm({}) == {}
    assert holm({0: 0.9, 1: 0.8}) == {1: 1.0, 0: 1.0}
    assert holm({5: 0.02}) == {5: 0.02}


def test_costs_count_both_ways_and_the_start(tmp_path: Path):
    run = read_run(make_run(tmp_path, rounds=4))
    assert value_of(run, "megabytes") == pytest.approx((4 * 3000 + 500) / 1e6)
    assert value_of(run, "seconds") == pytest.approx(0.35 * 4)


def test_runs_that_go_on_are_compared_as_far_as_they_are(tmp_path: Path):
    path = make_run(tmp_path, finished=False, rounds=3, planned=10)
    run = read_run(path)
    assert value_of(run, "best5") is None
    assert value_of(run, "clusters") == 3
    seconds = value_of(run, "seconds")
    assert seconds is not None
    assert math.isclose(seconds, 0.35 * 3)
