"""Outcomes: means over seeds, parts and columns, differences, what is missing, and what was written before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import ConfigError, RunError, UnknownName
from coterie.reproduce.outcome import (
    Found,
    draw,
    measure,
    of_result,
    read_result,
    read_runs,
    read_written,
    result_of,
    write,
)
from coterie.reproduce.page import page
from coterie.reproduce.suite import Suite, read_suite

MACHINE = {"platform": "Linux", "processor": "x86_64", "threads": 1, "gpu": None, "torch": "2", "python": "3"}


def summary(accuracy: float, ari: float | None = None, **more: Any) -> dict[str, Any]:
    return {
        "accuracy": {"macro": accuracy},
        "ari": ari,
        "rounds": 4,
        "clusters": 2,
        "bytes": {"down": 30, "up": 10},
        "seconds": {"total": 1.5},
        **more,
    }


def found(places: dict[str, dict[str, Any]], **more: Any) -> Found:
    environments = {place: MACHINE | {"date": f"2026-01-0{i}"} for i, place in enumerate(places, 1)}
    return Found(places, environments, more.get("problems", {}))


def result(suite: Suite, places: dict[str, dict[str, Any]], seeds=(0, 1), **more: Any) -> dict[str, Any]:
    return result_of(suite, suite.chosen(), seeds, found(places, **more), command="coterie reproduce tiny")


def cell(of: dict[str, Any], row: str, column: str, table: str = "cells") -> dict[str, Any]:
    (one,) = (one for one in of[table] if (one["row"], one["column"]) == (row, column))
    return one


def test_a_cell_is_the_mean_over_seeds_beside_the_published_number(tiny: Suite):
    got = result(tiny, {"all/global-s0": summary(0.81, 0.0), "all/global-s1": summary(0.83, 0.5)})
    one = cell(got, "Global", "all")
    assert one["ours"]["accuracy"]["values"] == pytest.approx([81, 83])
    assert one["ours"]["accuracy"]["mean"] == pytest.approx(82)
    assert one["ours"]["accuracy"]["std"] == pytest.approx(2**0.5)
    assert one["ours"]["ari"]["mean"] == 0.25
    assert one["published"] == {"accuracy": 80.0}
    assert one["difference"] == {"accuracy": pytest.approx(2)}
    assert (one["bytes"], one["rounds"], one["seconds"]) == ({"mean": 40}, 4, {"mean": 1.5})
    assert (one["method"], one["mode"]) == ("fedavg", "paper")
    assert (got["schema"], got["seconds"], got["date"], got["machine"]["torch"]) == (1, 3.0, "2026-01-02", "2")


def test_a_stand_in_is_shown_beside_the_published_number_without_a_difference(toml: Path):
    toml.write_text("stand_in = true\n" + toml.read_text())
    suite = read_suite(toml, "tiny")
    places = {f"{column}/global-s0": summary(0.8) for column in ("all", "half")}
    got = result(suite, places, seeds=(0,))
    both = cell(got, "Global", "all"), cell(got, "Global", "both", "means")
    assert [(one["published"], one["difference"]) for one in both] == [
        ({"accuracy": 80.0}, {}),
        ({"accuracy": 75.0}, {}),
    ]
    assert "| Global | 80.00 → 80.00 | 70.00 → 80.00 | 75.00 → 80.00 |" in page(got)


def test_what_was_not_run_is_missing_with_its_problem(tiny: Suite):
    got = result(tiny, {"all/global-s0": summary(0.8)}, seeds=(0,), problems={"all/ifca-s0": "no luck"})
    assert got["missing"] == [
        {"row": "IFCA", "column": "all", "seed": 0, "problem": "no luck"},
        {"row": "Global", "column": "half", "seed": 0},
        {"row": "coterie", "column": "half", "seed": 0},
    ]
    assert cell(got, "coterie", "half")["ours"] == {}
    magic = cell(got, "Magic", "all")
    assert (magic["method"], magic["published"], magic["ours"]) == (None, {"accuracy": 99.0}, {})


def test_a_run_without_true_groups_has_no_ari(tiny: Suite):
    assert "ari" not in cell(result(tiny, {"all/global-s0": summary(0.8, None)}), "Global", "all")["ours"]


def test_means_over_columns_need_all_of_them(tiny: Suite):
    part = {"all/global-s0": summary(0.8), "all/global-s1": summary(0.9)}
    assert cell(result(tiny, part), "Global", "both", "means")["ours"] == {}
    whole = part | {"half/global-s0": summary(0.6), "half/global-s1": summary(0.5)}
    one = cell(result(tiny, whole), "Global", "both", "means")
    assert one["ours"]["accuracy"]["values"] == pytest.approx([70, 70])
    assert (one["published"], one["difference"]) == ({"accuracy": 75.0}, {"accuracy": pytest.approx(-5)})
    assert cell(result(tiny, whole), "Magic", "both", "means")["published"] == {"accuracy": 98.5}


def test_a_mean_over_columns_is_over_the_seeds_that_all_of_them_have(tiny: Suite):
    places = {"all/global-s0": summary(0.8), "all/global-s1": summary(0.9), "half/global-s1": summary(0.5)}
    assert cell(result(tiny, places), "Global", "both", "means")["ours"]["accuracy"]["values"] == pytest.approx([70])
    apart = {"all/global-s0": summary(0.8), "half/global-s1": summary(0.5)}
    assert cell(result(tiny, apart), "Global", "both", "means")["ours"] == {}


def test_a_cell_with_parts_is_their_mean_once_all_are_there(toml: Path):
    parts = '[[parts]]\nname = "px"\n[[parts]]\nname = "py"\nscenario.groups = 2\n'
    toml.write_text(toml.read_text().replace("groups = [4, 3]", "").replace("[[columns]]", f"{parts}\n[[columns]]", 1))
    suite = read_suite(toml, "tiny")
    places = {"all/global-px-s0": summary(0.8), "all/global-py-s0": summary(0.7), "all/global-px-s1": summary(0.1)}
    one = cell(result(suite, places), "Global", "all")
    assert one["ours"]["accuracy"]["values"] == pytest.approx([75])
    assert (one["bytes"], one["seconds"]) == ({"mean": 80}, {"mean": 3.0})


def test_notes_say_what_differs(tiny: Suite):
    assert result(tiny, {})["notes"] == ["Digits in place of faces.", "all: full participation"]
    quick = result_of(tiny, tiny.chosen(), [0], found({}), command="", scale=0.5)
    assert quick["notes"][0] == "A quick look, not the experiment: run.rounds, run.clients times 0.5."
    assert quick["notes"][-1] == "Seeds 0, not 0, 1 as the suite has them."
    other = Found({}, {"a": MACHINE, "b": MACHINE | {"gpu": "H200"}}, {})
    assert "2 machines" in result_of(tiny, tiny.chosen(), (0, 1), other, command="")["notes"][-1]


def test_finished_runs_are_read_from_their_folders(tiny: Suite, tmp_path: Path):
    spots = tiny.spots(tiny.chosen(["Global"], ["all"]), [0, 1])
    done = tmp_path / "all" / "global-s1"
    done.mkdir(parents=True)
    (done / "summary.json").write_text(json.dumps(summary(0.5)))
    (done / "environment.json").write_text(json.dumps(MACHINE))
    got = read_runs(tmp_path, spots)
    assert list(got.summaries) == ["all/global-s1"]
    assert got.environments["all/global-s1"] == MACHINE


def test_a_result_is_written_and_read_again(tiny: Suite, tmp_path: Path):
    made = result(tiny, {"all/global-s0": summary(0.5)})
    write(tmp_path / "a" / "b", made)
    assert read_result(tmp_path / "a" / "b") == made
    assert (tmp_path / "a" / "b" / "table.md").read_text() == page(made)
    assert read_result(tmp_path) is None
    write(tmp_path, made | {"schema": 2})
    with pytest.raises(RunError, match="has schema 2"):
        read_result(tmp_path)


def figure(made: dict[str, Any], runs: Path, folder: Path) -> list[Path]:
    (folder / "figure.txt").write_text(f"{made['suite']} {runs.name}")
    return [folder / "figure.txt"]


@of_result
def figure_of_result(made: dict[str, Any], runs: Path, folder: Path) -> list[Path]:
    return [folder / f"{made['suite']}.txt"]


def test_figures_are_functions_of_the_result_and_the_runs(toml: Path, tmp_path: Path):
    toml.write_text(f'figures = ["{__name__}:figure"]\n{toml.read_text()}')
    suite = read_suite(toml, "tiny")
    assert draw(suite, result(suite, {}), tmp_path / "runs", tmp_path) == [tmp_path / "figure.txt"]
    assert (tmp_path / "figure.txt").read_text() == "tiny runs"
    assert draw(suite, result(suite, {}), None, tmp_path) == []  # without runs
    toml.write_text(toml.read_text().replace(":figure", ":figure_of_result"))
    assert draw(read_suite(toml, "tiny"), {"suite": "tiny"}, None, tmp_path) == [tmp_path / "tiny.txt"]
    toml.write_text(toml.read_text().replace(":figure_of_result", ":nothing"))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        draw(read_suite(toml, "tiny"), {}, tmp_path, tmp_path)


def test_measures_are_metrics_of_runs_and_of_unseen_clients():
    assert measure("accuracy_micro").read({"accuracy": {"micro": 0.5}}) == 50
    assert measure("unseen").read({"unseen": {"accuracy": {"micro": 0.25}}}) == 25
    assert measure("unseen").read({"unseen": None}) is None
    assert measure("ari").read({"ari": 0.5}) == 0.5
    with pytest.raises(UnknownName, match="no metric 'acuracy'"):
        measure("acuracy")


# ---- continuing a written result ----


def settings(row: Any, column: Any) -> dict[str, Any]:
    return {"run.algorithm": row.method, "run.clients": (3, 4)}  # a tuple: JSON has lists


def put(folder: Path, suite: Suite, runs: Found, seeds: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    got = result_of(suite, suite.chosen(), seeds, runs, command="", settings=settings)
    write(folder, got)
    return got


def test_a_written_result_is_continued_without_its_runs(tiny: Suite, tmp_path: Path):
    first = found({"all/global-s0": summary(0.81, 0.0), "all/ifca-s1": summary(0.9, 0.5)})
    put(tmp_path, tiny, first)
    written = read_written(tmp_path, tiny, settings)
    assert written.places == {"all/global-s0", "all/ifca-s1"}
    later = found({"all/global-s1": summary(0.83, 0.5)})
    both = put(tmp_path, tiny, Found(later.summaries, later.environments, {}, written))
    whole = put(tmp_path / "whole", tiny, found(dict(first.summaries) | dict(later.summaries)))
    assert both["cells"] == whole["cells"]
    assert (both["missing"], both["seconds"]) == (whole["missing"], whole["seconds"])
    assert cell(both, "Global", "all")["runs"] == ["all/global-s0", "all/global-s1"]
    assert (both["date"], both["machine"]) == ("2026-01-02", MACHINE)  # of the newest run, which is not here


def test_a_run_that_is_here_counts_instead_of_the_written_one(tiny: Suite, tmp_path: Path):
    put(tmp_path, tiny, found({"all/global-s0": summary(0.5)}))
    again = Found({"all/global-s0": summary(0.6)}, {}, {}, read_written(tmp_path, tiny, settings))
    assert cell(put(tmp_path, tiny, again), "Global", "all")["ours"]["accuracy"]["values"] == [pytest.approx(60)]


def test_cells_with_other_settings_are_not_continued(tiny: Suite, tmp_path: Path):
    put(tmp_path, tiny, found({"all/global-s0": summary(0.5)}))
    assert read_written(tmp_path, tiny, lambda row, column: {"run.clients": 3}).places == set()
    assert read_written(tmp_path / "nothing", tiny, settings).places == set()


def test_several_machines_stay_several(tiny: Suite, tmp_path: Path):
    two = Found(
        {"all/global-s0": summary(0.5), "all/global-s1": summary(0.5)},
        {"all/global-s0": MACHINE, "all/global-s1": MACHINE | {"gpu": "H200"}},
        {},
    )
    put(tmp_path, tiny, two)
    alone = Found({}, {}, {}, read_written(tmp_path, tiny, settings))
    assert "on 2 machines" in put(tmp_path, tiny, alone)["notes"][-1]


def test_a_damaged_result_is_not_continued(tiny: Suite, tmp_path: Path):
    put(tmp_path, tiny, found({"all/global-s0": summary(0.5)}))
    damaged = json.loads((tmp_path / "result.json").read_text())
    cell(damaged, "Global", "all")["ours"]["accuracy"]["values"] = []
    (tmp_path / "result.json").write_text(json.dumps(damaged))
    with pytest.raises(RunError, match=r"result\.json cannot be continued: IndexError"):
        read_written(tmp_path, tiny, settings)


def test_parts_are_continued_as_whole_seeds(toml: Path, tmp_path: Path):
    parts = '[[parts]]\nname = "px"\n[[parts]]\nname = "py"\nscenario.groups = 2\n'
    toml.write_text(toml.read_text().replace("groups = [4, 3]", "").replace("[[columns]]", f"{parts}\n[[columns]]", 1))
    parted = read_suite(toml, "tiny")
    runs = {f"all/global-{part}-s0": summary(value) for part, value in (("px", 0.5), ("py", 0.7))}
    before = put(tmp_path, parted, found(runs), seeds=(0,))
    after = put(tmp_path, parted, Found({}, {}, {}, read_written(tmp_path, parted, settings)), seeds=(0,))
    assert after["cells"] == before["cells"]
    assert cell(after, "Global", "all")["ours"]["accuracy"]["values"] == [pytest.approx(60)]
