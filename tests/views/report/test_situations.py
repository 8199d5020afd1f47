"""The heat map of situations and methods."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coterie.runs.reading import RunData, read_run
from coterie.views.report.compare import compared_to_best, rows_of
from coterie.views.report.page import report_html
from coterie.views.report.payload import compare_payload
from coterie.views.report.situations import shades

from .made import make_run

SITUATIONS = [{"name": "easy", "about": "nothing is difficult"}, {"name": "hard", "about": "<b>much</b> is"}]
SCORES = {("hard", "fesem"): 0.6, ("hard", "fedavg"): 0.5, ("easy", "fesem"): 0.9, ("easy", "fedavg"): 0.7}


def runs_of(root: Path, seeds: int = 2) -> list[RunData]:
    """Two methods in two situations; `local` is the same run in both."""
    found = [
        replace(
            read_run(
                make_run(root / situation, f"{method}-s{seed}", algorithm=method, seed=seed, best=best + 0.01 * seed)
            ),
            situations=(situation,),
        )
        for (situation, method), best in SCORES.items()
        for seed in range(seeds)
    ]
    shared = read_run(make_run(root / "easy", "local-s0", algorithm="local", best=0.3))
    return [*found, replace(shared, situations=("easy", "hard"))]


def test_rows_are_those_of_a_situation_in_the_order_of_the_list(tmp_path: Path):
    rows = rows_of(runs_of(tmp_path), ["easy", "hard"])
    assert [(row.situation, row.label) for row in rows] == [
        *[("easy", "fesem"), ("easy", "fedavg"), ("easy", "local")],
        *[("hard", "fesem"), ("hard", "fedavg"), ("hard", "local")],
    ]
    assert rows[2].runs == rows[5].runs  # one run stands for both


def test_methods_are_tested_within_a_situation(tmp_path: Path):
    runs = runs_of(tmp_path)
    tests = compared_to_best(runs, rows_of(runs, ["easy", "hard"]))
    assert [test.best for test in tests] == [True, False, False, True, False, False]


def test_cells_hold_the_numbers_and_colours_are_relative_to_the_best(tmp_path: Path):
    runs = runs_of(tmp_path)
    heat = compare_payload(runs, SITUATIONS)["heat"]
    assert (heat["names"], heat["methods"]) == (["easy", "hard"], ["fesem", "fedavg", "local"])
    mean = sum(run.last("accuracy") or 0 for run in runs[:2]) / 2
    assert heat["cells"][1][0]["accuracy"][0] == pytest.approx(mean, abs=1e-5)
    assert heat["cells"][1][0]["accuracy"][1] > 0
    assert heat["cells"][1][0]["seeds"] == 2
    accuracy, ari = (next(m for m in heat["maps"] if m["key"] == key) for key in ("accuracy", "ari"))
    assert [row[0] for row in accuracy["shades"]] == [1.0, 1.0]  # the best of each situation, easy or hard
    gap = heat["cells"][1][0]["accuracy"][0] - heat["cells"][1][1]["accuracy"][0]
    assert accuracy["shades"][1][1] == pytest.approx(1 - gap / 0.15, abs=1e-3)
    assert accuracy["shades"][0][2] == 0.0
    assert {shade for row in ari["shades"] for shade in row} == {0.9}  # its value


def test_regret_is_a_map_of_its_own_with_the_worst_of_each_method(tmp_path: Path):
    heat = compare_payload(runs_of(tmp_path), SITUATIONS)["heat"]
    assert [m["key"] for m in heat["maps"]] == ["accuracy", "regret", "bottom5", "ari"]
    for line in heat["cells"]:
        best = max(cell["accuracy"][0] for cell in line)
        assert [cell["regret"][0] for cell in line] == pytest.approx([best - cell["accuracy"][0] for cell in line])
    assert heat["worst"] == [max(line[c]["regret"][0] for line in heat["cells"]) for c in range(3)]
    assert heat["worst"][0] == 0 < heat["worst"][1] < heat["worst"][2]
    assert compare_payload(runs_of(tmp_path / "b")[2:], SITUATIONS)["heat"]["worst"][0] is None  # one is missing


def test_a_method_without_a_run_in_a_situation_is_an_empty_cell(tmp_path: Path):
    heat = compare_payload(runs_of(tmp_path)[2:], SITUATIONS)["heat"]
    assert heat["methods"] == ["fesem", "fedavg", "local"]
    assert heat["cells"][1][0] is None
    assert heat["maps"][0]["shades"][1][0] is None


def test_without_classes_loss_and_r2_take_the_place_of_accuracy(tmp_path: Path):
    runs = []
    for run in runs_of(tmp_path):
        nothing = {key: np.full_like(values, np.nan) for key, values in run.curves.items() if "accuracy" in key}
        nothing["bottom5"] = nothing["accuracy"]
        runs.append(replace(run, summary=None, curves=run.curves | nothing | {"r2": 1 - run.curves["loss"]}))
    heat = compare_payload(runs, SITUATIONS)["heat"]
    assert [m["key"] for m in heat["maps"]] == ["loss", "regret", "r2", "ari"]
    for line in heat["cells"]:
        lowest = min(cell["loss"][0] for cell in line)
        assert [cell["regret"][0] for cell in line] == pytest.approx([cell["loss"][0] - lowest for cell in line])
    tests = compared_to_best(runs, rows_of(runs, ["easy", "hard"]))
    means = [row.mean("loss") for row in rows_of(runs, ["easy", "hard"])]
    assert [test.best for test in tests] == [
        mean == min(means[place : place + 3]) for place in (0, 3) for mean in means[place : place + 3]
    ]


def test_no_colours_without_values():
    assert shades([None, None], "accuracy") == [None, None]


def test_without_situations_there_is_no_map(tmp_path: Path):
    plain = [replace(run, situations=()) for run in runs_of(tmp_path)]
    assert compare_payload(plain)["heat"] is None
    assert compare_payload(runs_of(tmp_path / "b"), SITUATIONS[:1])["heat"] is None


def test_the_page_holds_the_map_and_no_markup_of_it(tmp_path: Path):
    text = report_html(runs_of(tmp_path), tsne=False, situations=SITUATIONS)
    assert '"heat":{"names":["easy","hard"]' in text
    assert "Situations and methods" in text
    assert "<b>much</b>" not in text
