"""`coterie compare`: the same data for every method, mean and standard deviation over seeds."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.runs.folder import RunFolder

from .conftest import TINY, Command


def nothing_was_made() -> bool:
    return not list(Path().glob("runs/*"))


def test_json_has_a_row_for_each_method_over_the_seeds(command: Command):
    done = command("compare", "-a", "fedavg", "-a", "fesem", "--seeds", 3, *TINY, "--json")
    assert done.code == 0
    assert done.err == ""
    found = done.json
    assert found["dataset"] == "rotated-digits"
    assert [row["algorithm"] for row in found["rows"]] == ["fedavg", "fesem"]
    root = Path(found["path"])
    assert json.loads((root / "table.json").read_text()) == found["rows"]
    for row in found["rows"]:
        key = row["algorithm"]
        summaries = [json.loads((root / f"{key}-s{seed}" / "summary.json").read_text()) for seed in range(3)]
        assert [s["seed"] for s in summaries] == [0, 1, 2]
        assert row["seeds"] == 3
        macro = [s["accuracy"]["macro"] for s in summaries]
        assert row["accuracy"]["macro"]["mean"] == pytest.approx(statistics.fmean(macro))
        assert row["accuracy"]["macro"]["std"] == pytest.approx(statistics.stdev(macro))
        assert row["accuracy"]["macro"]["std"] > 0
        assert row["bytes"]["up"] == {"mean": summaries[0]["bytes"]["up"], "std": 0}
        assert row["f1"]["macro"]["mean"] == pytest.approx(statistics.fmean(s["f1"]["macro"] for s in summaries))
    fedavg, fesem = found["rows"]
    assert fesem["accuracy"]["macro"]["mean"] > fedavg["accuracy"]["macro"]["mean"] + 0.06
    assert fesem["ari"] == {"mean": 1.0, "std": 0.0}
    assert fedavg["start_bytes"]["up"]["mean"] == 0 < fesem["start_bytes"]["up"]["mean"]


def test_methods_meet_the_same_data_and_seeds_do_not(command: Command):
    root = Path(command("compare", "-a", "fedavg", "-a", "ifca", "--seeds", 2, *TINY, "--json").json["path"])
    digest = {
        (key, seed): json.loads((root / f"{key}-s{seed}" / "summary.json").read_text())["digest"]
        for key in ("fedavg", "ifca")
        for seed in (0, 1)
    }
    assert digest["fedavg", 0] == digest["ifca", 0]
    assert digest["fedavg", 1] == digest["ifca", 1]
    assert digest["fedavg", 0] != digest["fedavg", 1]


def test_a_comparison_is_made_of_runs_like_any_other(command: Command):
    root = Path(command("compare", "-a", "fesem", *TINY, "--json").json["path"])
    alone = command("run", "-a", "fesem", *TINY, "--json").json
    within = json.loads((root / "fesem-s0" / "summary.json").read_text())
    for key in ("accuracy", "f1", "loss", "cluster_sizes", "bytes", "digest"):
        assert within[key] == alone[key]
    assert command("resume", root / "fesem-s0").code == 0
    assert command("show", root / "fesem-s0", "--json").json == within


def test_by_default_the_five_methods_in_a_table(command: Command):
    done = command("compare", *TINY, "--seeds", 2)
    assert done.code == 0
    lines = {line.split()[1]: line for line in done.out.splitlines() if line.startswith("│")}
    assert list(lines) == ["local", "fedavg", "ifca", "fesem", "coterie"]
    for key, line in lines.items():
        assert line.count("±") == 5, key  # accuracy, the worst, F1, ARI, seconds
    assert "rotated-digits, 8 clients, 2 seeds; mean ± standard deviation" in done.out
    assert "run folders: runs/compare-rotated-digits" in done.err
    assert "[10/10] coterie seed 1: accuracy" in done.err
    assert re.search(r"\[9/10\] fesem seed 1: accuracy .* s; left 0:\d\d\n", done.err)


def test_one_seed_has_no_spread(command: Command):
    done = command("compare", "-a", "fedavg", *TINY, "--quiet")
    assert done.out.splitlines()[0].rstrip() == "rotated-digits, 8 clients, 1 seed"
    assert "±" not in done.out
    assert "±" not in Path("runs/compare-rotated-digits/table.md").read_text()
    assert "round" not in done.err


def test_a_method_named_twice_runs_once(command: Command):
    found = command("compare", "-a", "fedavg", "-a", "fedavg", *TINY, "--json").json
    assert [row["algorithm"] for row in found["rows"]] == ["fedavg"]


def test_numbers_instead_of_classes_are_compared_by_loss(command: Command):
    x = np.random.default_rng(0).normal(size=(80, 3))
    np.savez("own.npz", x=x, y=x.sum(1), user=np.arange(80) // 20)
    base = ("compare", "-a", "fedavg", "--dataset", "own.npz", "--set", "run.loss=mse", "--rounds", 2)
    (row,) = command(*base, "--json").json["rows"]
    assert row["accuracy"] == {"macro": None, "micro": None, "bottom5": None}
    assert row["ari"] is None
    assert row["loss"]["macro"]["mean"] > 0
    assert " - " in command(*base).out


def test_config_file_and_flags(command: Command):
    Path("e.toml").write_text("[run]\nclients = 8\nrounds = 9\n[work]\nepochs = 1\nlr = 0.5\n")
    root = Path(command("compare", "-a", "fedavg", "--config", "e.toml", "--rounds", 1, "--json").json["path"])
    config = RunFolder.open(root / "fedavg-s0").config()
    assert (config["run"]["clients"], config["run"]["rounds"], config["work"]["lr"]) == (8, 1, 0.5)


def test_a_name_that_is_taken_is_refused(command: Command):
    Path("runs/mine").mkdir(parents=True)
    assert "runs/mine exists and is not a run folder" in command("compare", *TINY, "--name", "mine").error
    command("run", "-a", "fedavg", *TINY, "--name", "one", "--json")
    before = sorted(Path("runs/one").rglob("*"))
    assert "runs/one already exists" in command("compare", *TINY, "--name", "one").error
    assert sorted(Path("runs/one").rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seeds", "0"], "--seeds must be a count >= 1 (3), a range (5-9) or a list (1,4,7). Got '0' instead."),
        (["--seeds", "-2"], "or a list (1,4,7). Got '-2' instead."),
        (["--seeds", "nan"], "or a list (1,4,7). Got 'nan' instead."),
        (["--seeds", "9-5"], "Got '9-5' instead."),
        (["--jobs", "0"], "--jobs must be an int >= 1. Got '0' instead."),
        (
            ["--scenarios", "none.toml"],
            "There is no file none.toml; --scenarios takes 'default', 'kind' or a TOML file",
        ),
        (["--scenarios", "default", "--set", "scenario.alfa=1"], "Did you mean 'alpha'?"),
        (["--scenarios", "default", "--clients", "5"], "Situation 'kinds-8': clients must be at least"),
        (["-a", "fedavg", "-a", "fesm"], "Did you mean 'fesem'?"),
        (["--clusters", "9"], "must be at most the number of clients, 8. Got 9 instead."),
        (["--clusters", "0"], "Got '0' instead."),
        (["--lr", "nan"], "--lr must be a number > 0. Got 'nan' instead."),
        (["--dataset", "none.npz"], "There is no file none.npz; check the path."),
        (["--model", "lenet"], "takes images of at least 12x12"),
        (["--device", "gpu"], "Got 'gpu' instead."),
        (["--config", "none.toml"], "There is no config file none.toml. Check the path."),
    ],
)
def test_what_cannot_be_compared_costs_nothing(command: Command, arguments: list[str], said: str):
    done = command("compare", *TINY, *arguments)
    assert said in done.error
    assert len(done.err.splitlines()) == 1  # not a round was run for it
    assert nothing_was_made()


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(
    command: Command, monkeypatch: pytest.MonkeyPatch, presses: int
):
    real = RunFolder.append

    def append(self: RunFolder, row: Any) -> None:
        real(self, row)
        if self.path.name == "fesem-s0":
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append", append)
        done = command("compare", "-a", "fedavg", "-a", "fesem", "-a", "ifca", *TINY, "--name", "c", "--quiet")
    assert done.code == 130
    assert done.out == ""
    assert "1 of 3 runs are in runs/c; the same command continues." in done.err
    assert {p.name for p in Path("runs/c").iterdir() if p.is_dir()} == {"fedavg-s0", "fesem-s0"}
    assert command("resume", "runs/c/fesem-s0", "--json").json["rounds"] == 2
    assert command("show", "runs/c/fedavg-s0", "--json").json["rounds"] == 2


# ---- situations, processes, continuing ----

SITUATIONS = """
[equal]
about = "nothing is difficult"
algorithm.num_clusters = 4

[skewed]
scenario.quantity = 0.5
"""
PLAN = ("--set", "engine.plan=layers")  # nothing is compiled or measured


def without_time(found: dict[str, Any]) -> dict[str, Any]:
    """A table in which nothing depends on the clock or the folder."""
    rows = [{**row, "seconds": None} for row in found["rows"]]
    runs = [{**run, "seconds": None, "path": None} for run in found["runs"]]
    return {**found, "rows": rows, "runs": runs, "path": None}


def test_every_method_in_every_situation(command: Command):
    Path("own.toml").write_text(SITUATIONS)
    base = ("compare", "--scenarios", "own.toml", "-a", "fedavg", "-a", "fesem", *TINY, *PLAN, "--seeds", "1,4")
    found = command(*base, "--json", "--name", "one").json
    assert [(row["labels"]["situation"], row["algorithm"]) for row in found["rows"]] == [
        *[("equal", "fedavg"), ("equal", "fesem"), ("skewed", "fedavg"), ("skewed", "fesem")]
    ]
    assert [(run["situation"], run["method"], run["seed"]) for run in found["runs"]] == [
        (situation, method, seed)
        for seed in (1, 4)
        for situation in ("equal", "skewed")
        for method in ("fedavg", "fesem")
    ]
    first = found["runs"][0]
    stored = json.loads(Path("runs/one/equal/fedavg-s1/summary.json").read_text())
    assert first["accuracy_macro"] == stored["accuracy"]["macro"]
    assert first["bytes"] == stored["bytes"]["down"] + stored["bytes"]["up"]
    assert (first["digest"], first["path"]) == (stored["digest"], "runs/one/equal/fedavg-s1")
    assert len({run["digest"] for run in found["runs"]}) == 4  # by situation and seed, the same for both methods
    assert json.loads(Path("runs/one/runs.json").read_text()) == found["runs"]
    page = Path("runs/one/table.md").read_text()
    assert "| method | equal | skewed |" in page
    best = max(row["accuracy"]["macro"]["mean"] for row in found["rows"][:2])
    assert f"**{100 * best:.1f}±" in page
    assert "| equal | nothing is difficult | `algorithm.num_clusters=4` |" in page
    assert "| method | equal | skewed | worst regret | bytes / fedavg |" in page
    worst = max(row["regret"] for row in found["rows"] if row["algorithm"] == "fedavg")
    assert [item["method"] for item in found["methods"]] == ["fedavg", "fesem"]
    assert (found["methods"][0]["worst_regret"], found["methods"][0]["bytes_to_fedavg"]) == (worst, 1.0)
    assert f"| {100 * worst:.1f} | 1.00 |" in page

    together = command(*base, "--json", "--jobs", 2, "--name", "two").json
    assert without_time(together) == without_time(found)


def test_the_terminal_shows_a_table_for_each_number(command: Command):
    Path("own.toml").write_text(SITUATIONS)
    done = command("compare", "--scenarios", "own.toml", "-a", "local", "-a", "fesem", *TINY, *PLAN)
    lines = [line.strip() for line in done.out.splitlines()]
    assert lines[0] == "rotated-digits, 8 clients, 1 seed; the best of each situation is bold"
    regret = "regret: points behind the best accuracy"
    titles = ["accuracy, %", regret, "5 worst clients, %", "ARI", "bytes sent per run"]
    assert [line for line in lines if line in titles] == titles
    assert done.out.count("┃ method ┃ equal ┃ skewed ┃") == 4
    assert (
        "┃ method ┃ equal ┃ skewed ┃ worst regret ┃" in done.out
    )  # without fedavg, there are no bytes to compare with
    assert "[4/4] skewed fesem seed 0: accuracy" in done.err


def test_the_number_of_clusters_is_shown_for_methods_that_find_it(command: Command):
    Path("own.toml").write_text(SITUATIONS)
    found = command("compare", "--scenarios", "own.toml", "-a", "fesem", "-a", "cfl", *TINY, *PLAN, "--json").json
    page = (Path(found["path"]) / "table.md").read_text()
    table = page.partition("## clusters found\n\n")[2].partition("\n\n")[0]
    assert [line.split(" | ")[0] for line in table.splitlines()] == ["| method", "| ---", "| cfl"]
    means = [row["clusters"]["mean"] for row in found["rows"] if row["algorithm"] == "cfl"]
    assert table.endswith(f"| {means[0]:.1f} | {means[1]:.1f} |")


def test_the_same_command_continues_a_stopped_comparison(command: Command, monkeypatch: pytest.MonkeyPatch):
    Path("own.toml").write_text(SITUATIONS)
    base = ("compare", "--scenarios", "own.toml", "-a", "fedavg", "-a", "fesem", *TINY, *PLAN, "--json")
    base = (*base, "--checkpoint-every", 0)
    whole = command(*base, "--name", "whole").json
    real = RunFolder.append

    def append(self: RunFolder, row: Any) -> None:
        real(self, row)
        if self.path.name == "fesem-s0":
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append", append)
        assert command(*base, "--name", "parts").code == 130
    before = {path: path.stat().st_mtime_ns for path in Path("runs/parts").glob("*/*/summary.json")}
    assert [path.parent.name for path in before] == ["fedavg-s0"]
    again = command(*base, "--name", "parts").json
    assert without_time(again) == without_time(whole)
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())  # finished runs were not touched
    assert "work.lr is 0.2 there and 0.5 here" in command(*base, "--name", "parts", "--lr", 0.5).error
    fewer = command("compare", "-a", "fedavg", *TINY, *PLAN, "--name", "parts").error
    assert "also has equal fedavg seed 0, which this command does not ask for" in fewer
    more = command(*base, "--name", "parts", "--seeds", 2).json
    assert [row["seeds"] for row in more["rows"]] == [2, 2, 2, 2]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failing_run_is_reported_and_the_rest_goes_on(command: Command, jobs: int):
    base = ("compare", "-a", "fedavg", "-a", "fesem", "-a", "ifca", *TINY, *PLAN, "--name", "c", "--jobs", jobs)
    assert command(*base, "--json").code == 0
    for name in ("fesem-s0", "ifca-s0"):
        shutil.rmtree(Path("runs/c") / name)
    Path("runs/c/fesem-s0").write_text("in the way")
    done = command(*base)
    assert done.code == 1
    assert "[1/3] fedavg seed 0: accuracy" in done.err
    assert re.search(r"\d/3\] fesem seed 0: failed: runs/c/fesem-s0 exists and is not a run folder", done.err)
    assert "error: 1 of 3 runs failed. fesem seed 0 failed:" in done.err
    assert [line.split()[1] for line in done.out.splitlines() if line.startswith("│")] == ["fedavg", "ifca"]
    records = json.loads(Path("runs/c/runs.json").read_text())
    assert [bool(record["problem"]) for record in records] == [False, True, False]


def is_there(group: int) -> bool:
    """Whether a group of processes still has one."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_ctrl_c_stops_all_processes(tmp_path: Path):
    start = [sys.executable, "-m", "coterie", "compare", "-a", "fedavg", "-a", "fesem", "--rounds", "20000"]
    start += ["--seeds", "2", "--jobs", "2", "--name", "c", "--set", "engine.plan=layers", "--clients", "8"]
    process = subprocess.Popen(start, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("runs/c/*/rounds.jsonl"))) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "0 of 4 runs are in runs/c; the same command continues." in said
    assert "Traceback" not in said
    while is_there(process.pid):
        assert time.monotonic() < deadline + 60
        time.sleep(0.1)
    assert len(list(tmp_path.glob("runs/c/*/checkpoint/round-*"))) >= 2
