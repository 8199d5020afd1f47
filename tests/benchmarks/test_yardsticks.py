"""The scripts that repeat published benchmarks, on a tiny dataset: runs, resuming, limits and tables."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scripts():
    """The modules, with runs in this process instead of new ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        names = ("pool", "yardstick", "corn", "flux")
        found = {name: importlib.import_module(name) for name in names}

        def here(work, cases, jobs, out=""):
            return [row for row in (work(*case) for case in cases) if row]

        patch.setattr(found["yardstick"], "run_all", here)
        yield found
    for name in names:
        del sys.modules[name]


@pytest.fixture
def data(tmp_path):
    """A tiny mnist.npz: each class has a brightness of its own."""
    rng = np.random.default_rng(0)
    y = np.tile(np.arange(10), 60)
    x = (20 * y[:, None, None] + rng.integers(0, 20, (600, 12, 12))).astype(np.uint8)
    np.savez(tmp_path / "mnist.npz", x=x, y=y, is_train=np.arange(600) < 400)
    return tmp_path


def call(scripts, name, data, monkeypatch, *more):
    arguments = ["--data-dir", str(data), "--out", str(data / "runs"), "--device", "cpu", "--seeds", "42"]
    monkeypatch.setattr(sys, "argv", [name, *arguments, "--set", "run.rounds=1", "--set", "work.epochs=1", *more])
    scripts[name].main()
    return json.loads((data / "runs" / name / "table.json").read_text())


CORN = ("--set", "run.clients=4", "--set", "scenario.per_class=5", "--skews", "none", "--shifts", "swap,erosion")
FLUX = ("--data", "mnist", "--levels", "3", "--methods", "ifca")


def test_corn_runs_once_and_goes_on_where_it_stopped(scripts, data, monkeypatch, capsys):
    first = call(scripts, "corn", data, monkeypatch, *CORN, "--methods", "fedavg")
    assert [(line["cell"], line["method"], line["seeds"]) for line in first["table"]] == [
        ("erosion-none", "fedavg", 1),
        ("swap-none", "fedavg", 1),
    ]
    line = first["table"][1]
    assert line["best published"] == 91.63
    assert line["same method published"] == 71.02
    assert line["difference"] == pytest.approx(line["accuracy"] - 91.63, abs=0.006)
    files = sorted((data / "runs" / "corn").glob("corn-*.json"))
    assert [file.name for file in files] == [
        "corn-mnist-erosion-none-fedavg-s42.json",
        "corn-mnist-swap-none-fedavg-s42.json",
    ]
    row = json.loads(files[0].read_text())
    files[0].write_text(json.dumps(row | {"accuracy": 12.5}))
    again = call(scripts, "corn", data, monkeypatch, *CORN, "--methods", "fedavg,fesem")
    found = {(line["cell"], line["method"]): line for line in again["table"]}
    assert found["erosion-none", "fedavg"]["accuracy"] == 12.5  # read, not run
    assert set(found) == {(c, m) for c in ("erosion-none", "swap-none") for m in ("fedavg", "fesem")}
    assert "4 of 4 runs, 0 failed" in capsys.readouterr().out


def test_no_run_starts_after_the_limit(scripts, data, monkeypatch, capsys):
    found = call(scripts, "corn", data, monkeypatch, *CORN, "--limit-seconds", "-1")
    assert found == {"table": [], "rows": []}
    assert "0 of 6 runs" in capsys.readouterr().out


def test_runs_with_other_options_are_not_mixed(scripts, data, monkeypatch):
    call(scripts, "corn", data, monkeypatch, *CORN, "--methods", "fedavg")
    with pytest.raises(SystemExit, match="made with other options"):
        call(scripts, "corn", data, monkeypatch, *CORN, "--methods", "fedavg", "--set", "work.lr=0.1")


def test_a_run_that_fails_is_reported_and_not_kept(scripts, data, monkeypatch, capsys):
    found = call(scripts, "corn", data, monkeypatch, *CORN, "--methods", "fedavg", "--set", "run.clients=6")
    assert found["rows"] == []
    assert "0 of 2 runs, 2 failed" in capsys.readouterr().out


def test_flux_tells_the_true_number_of_clusters_and_compares_whole_levels(scripts, data, monkeypatch):
    part = call(scripts, "flux", data, monkeypatch, *FLUX, "--shifts", "px,pyx")
    (line,) = part["table"]
    assert line["accuracy"] is None
    assert line["difference"] is None
    assert (line["px"] is None, line["py"] is None) == (False, True)
    assert line["clusters true"] == 4.5  # 4 and 5 in the first fold
    assert {row["groups"] for row in part["rows"]} == {4, 5}
    (whole,) = call(scripts, "flux", data, monkeypatch, *FLUX)["table"]
    assert whole["runs"] == 4
    assert whole["accuracy"] == pytest.approx(np.mean([whole[s] for s in ("px", "py", "pyx", "pxy")]), abs=0.01)
    assert (whole["of"], whole["best published"]) == ("flux-prior", 95.55)
    assert whole["same method published"] == 89.74


def test_means_over_cells_need_all_of_them(scripts):
    corn, flux = scripts["corn"], scripts["flux"]
    row = {"method": "fesem", "ari": 1.0, "found": 4, "groups": 4}
    rows = [
        row | {"shift": shift, "degree": skew, "seed": seed, "accuracy": 90.0 + seed}
        for shift in corn.SHIFTS
        for skew in ("none", "within")
        for seed in (1, 3)
    ]
    lines = {line["cell"]: line for line in corn.table(rows)}
    assert lines["mean, none"]["accuracy"] == 92.0
    assert lines["mean, none"]["sd"] == pytest.approx(2**0.5, abs=0.01)
    assert (lines["mean, none"]["of"], lines["mean, none"]["best published"]) == ("cornflqs 1-10-10", 89.65)
    assert "mean, between" not in lines
    assert "mean, all" not in lines
    rows = [
        row
        | {"dataset": "flux-cifar10", "shift": shift, "degree": level, "seed": seed, "accuracy": 40.0 + level + seed}
        for shift in flux.SHIFTS
        for level in flux.LEVELS
        for seed in (1, 3)
    ]
    last = flux.table(rows)[-1]
    assert (last["level"], last["accuracy"], last["sd"], last["of"]) == ("mean", 46.5, 1.0, "apfl")
    assert last["difference"] == pytest.approx(46.5 - 44.67, abs=0.01)


def test_cases_that_were_not_run_are_left_out(scripts):
    assert importlib.import_module("pool").run_all(dict, [([("a", 1)],), ((),)], jobs=1) == [{"a": 1}]
