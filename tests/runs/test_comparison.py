"""A comparison: its folder, its rows and the list of its runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from coterie.errors import RunError
from coterie.runs.batch import Outcome
from coterie.runs.comparison import Comparison, read_comparison, record_of, rows_of, standings_of
from coterie.runs.situations import Situation

from .test_batch import cases_of


def summary_of(score: float, **more: object) -> dict[str, object]:
    spent = {"start": 1, "round": 2, "repair": 3, "evaluate": 9}
    traffic = {"down": 10, "up": 20, "start": {"down": 1, "up": 2}, "gradients": spent}
    accuracy = {"macro": score, "micro": score, "bottom5": score - 0.1}
    return {"algorithm": "fedavg", "accuracy": accuracy, "bytes": traffic, "seconds": {"total": 1.5}} | more


def test_rows_are_means_over_the_seeds_that_finished():
    cases = cases_of(["fedavg"], [0, 1, 2])
    outcomes = [Outcome(cases[0], summary_of(0.5)), Outcome(cases[1], summary_of(0.7)), Outcome(cases[2], problem="no")]
    (row,) = rows_of(outcomes)
    assert row["seeds"] == 2
    assert row["accuracy"]["macro"] == {"mean": pytest.approx(0.6), "std": pytest.approx(0.02**0.5)}
    assert row["gradients"]["mean"] == 6
    assert row["ari"] is None


def outcomes_of(scores: dict[tuple[str, str], float], **more: object) -> list[Outcome]:
    """One run for each situation and method."""
    return [
        Outcome(cases_of([method], [0], situation=situation)[0], summary_of(score, algorithm=method, **more))
        for (situation, method), score in scores.items()
    ]


def test_regret_is_the_distance_to_the_best_of_a_situation():
    scores = {("a", "fedavg"): 0.7, ("a", "cfl"): 0.9, ("b", "fedavg"): 0.5, ("b", "cfl"): 0.375}
    rows = rows_of(outcomes_of(scores))
    assert [row["regret"] for row in rows] == pytest.approx([0.2, 0.0, 0.0, 0.125])
    fedavg, cfl = standings_of(rows)
    assert (fedavg["worst_regret"], fedavg["worst_situation"]) == (pytest.approx(0.2), "a")
    assert (cfl["worst_regret"], cfl["worst_situation"]) == (0.125, "b")
    assert cfl["mean_regret"] == 0.0625
    assert (fedavg["finds_clusters"], cfl["finds_clusters"]) == (False, True)


def test_a_method_that_lacks_a_situation_has_no_worst_regret():
    rows = rows_of(outcomes_of({("a", "fedavg"): 0.7, ("a", "cfl"): 0.9, ("b", "fedavg"): 0.5}))
    assert [standing["worst_regret"] for standing in standings_of(rows)] == [pytest.approx(0.2), None]
    (alone,) = rows_of(outcomes_of({("a", "fedavg"): 0.7}, accuracy=None))
    assert alone["regret"] is None
    assert standings_of([alone])[0]["worst_regret"] is None


def test_bytes_are_relative_to_fedavg():
    rows = rows_of(outcomes_of({("a", "fedavg"): 0.7, ("a", "cfl"): 0.7, ("b", "cfl"): 0.7}))
    rows[1]["bytes"]["up"] = {"mean": 50.0, "std": 0.0}  # 60 in all, where fedavg sends 30
    assert [standing["bytes_to_fedavg"] for standing in standings_of(rows)] == [1.0, 2.0]
    assert standings_of(rows[1:])[0]["bytes_to_fedavg"] is None


def test_the_list_of_runs_has_one_flat_row_for_each():
    (case,) = cases_of(["fedavg"], [4], situation="drift")
    found = record_of(Outcome(case, summary_of(0.5, ari=1.0, start_ari=0.25)))
    assert (found["situation"], found["method"], found["seed"]) == ("drift", "fedavg", 4)
    assert (found["accuracy_macro"], found["accuracy_bottom5"]) == (0.5, 0.4)
    assert (found["ari"], found["start_ari"]) == (1.0, 0.25)
    assert (found["bytes"], found["start_bytes"], found["seconds"]) == (30, 3, 1.5)
    assert record_of(Outcome(case, problem="no memory"))["problem"] == "no memory"


def test_the_files_of_a_comparison(tmp_path: Path):
    cases = cases_of(["fedavg"], [0], situation="a")
    root = Comparison.create(tmp_path, "c", "default", cases, [Situation("a", "easy")])
    outcomes = [Outcome(cases[0], summary_of(0.5))]
    root.write_tables(rows_of(outcomes), [record_of(outcome) for outcome in outcomes], "# page\n")
    names = {path.name for path in root.path.iterdir()}
    assert names == {
        ".lock",
        "comparison.json",
        *(f"{a}.{b}" for a in ("table", "runs") for b in ("csv", "json")),
        "table.md",
    }
    with (root.path / "table.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["situation"], row["method"], float(row["accuracy.macro.mean"])) == ("a", "fedavg", 0.5)
    assert json.loads((root.path / "runs.json").read_text())[0]["seed"] == 0


def test_a_comparison_can_grow_but_not_change(tmp_path: Path):
    Comparison.create(tmp_path, "c", "default", cases_of(["fedavg", "ifca"], [0]))
    Comparison.create(tmp_path, "c", "default", cases_of(["fedavg", "ifca", "local"], [0, 1]))
    with pytest.raises(RunError, match="also has local seed 0, which this command does not ask for"):
        Comparison.create(tmp_path, "c", "default", cases_of(["fedavg", "ifca"], [0, 1]))


def test_only_one_process_adds_runs(tmp_path: Path):
    root = Comparison.create(tmp_path, "c", "default", cases_of(["fedavg"], [0]))
    with root.held(), pytest.raises(RunError, match="in use by another process"), Comparison(root.path).held():
        pass


def test_runs_that_share_a_folder_have_several_situations(tmp_path: Path):
    cases = [
        *cases_of(["fedavg", "ifca"], [0], "algorithm.num_clusters=2", situation="a"),
        *cases_of(["fedavg", "ifca"], [0], "algorithm.num_clusters=3", situation="b"),
    ]
    Comparison.create(tmp_path, "c", "default", cases, [Situation("a", "x"), Situation("b", "y")])
    found = read_comparison(tmp_path / "c")
    assert [item["name"] for item in found.situations] == ["a", "b"]
    home = (tmp_path / "c").resolve()
    assert found.runs == {home / "a/fedavg-s0": ["a", "b"], home / "a/ifca-s0": ["a"], home / "b/ifca-s0": ["b"]}
    assert not read_comparison(tmp_path).runs
    (tmp_path / "c" / "comparison.json").write_text('{"runs": [1]}')
    with pytest.raises(RunError, match=r"comparison.json is damaged"):
        read_comparison(tmp_path / "c")
