"""`coterie choose-k`, and `--clusters auto` of `run`."""

from __future__ import annotations

import builtins
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from .conftest import Command

SMALL = ("--clients", "24", "--device", "cpu", "--epochs", "1")
QUICK = (*SMALL, "--to", "5", "--rounds", "1")


def test_json_is_one_object_with_the_recommendation_and_the_table(command: Command):
    done = command("choose-k", "--dataset", "rotated-digits", *QUICK, "--seed", 3, "--json")
    assert done.code == 0
    assert done.err == ""
    found = done.json
    assert (found["recommended"], found["seed"], found["clients"], found["rounds"]) == (4, 3, 24, 1)
    assert [row["clusters"] for row in found["table"]] == [1, 2, 3, 4, 5]
    assert set(found["table"][0]) == {
        "clusters",
        "accuracy",
        "accuracy_error",
        "loss",
        "intra_distance",
        "silhouette",
        "gap",
        "gap_error",
        "gain",
        "gain_error",
        "r2",
    }
    assert found["reason"].startswith("held-out accuracy is ")
    assert found["plot"] == "choose-k-rotated-digits.png"
    assert Path(found["plot"]).read_bytes().startswith(b"\x89PNG")
    assert command("choose-k", *QUICK, "--seed", 3, "--json").json == found
    assert command("choose-k", *QUICK, "--from", 5, "--seed", 4, "--json").json["table"] != found["table"][-1:]


def test_a_table_and_a_sentence(command: Command):
    done = command("choose-k", *QUICK, "--from", 2, "-o", "pictures")
    assert done.code == 0
    assert "rotated-digits: 24 clients, 1 round for each K" in done.out
    rows = [line for line in done.out.splitlines() if line.startswith("│")]
    assert [line.split()[1] for line in rows] == ["2", "3", "4", "5"]
    assert "gain over K = 4" in done.out
    assert "+0.00 ±0.00" in rows[2]
    assert "recommended: K = 4, because held-out accuracy is " in done.out
    assert " points over K = 3; no larger K is clearly better (best: K = 5, " in done.out
    assert "K = 5 done" in done.err
    assert "plot: pictures/choose-k-rotated-digits.png" in done.err
    assert Path("pictures/choose-k-rotated-digits.png").exists()
    quiet = command("choose-k", *QUICK, "--from", 5, "--quiet")
    assert quiet.err == ""
    assert "recommended: K = 5, because it is the only K that was tried" in quiet.out


def test_settings_of_data_model_and_work_are_taken(command: Command):
    more = ("--set", "scenario.groups=2", "--model", "mclr", "--lr", "0.1", "--batch-size", "10", "--sample", "16")
    found = command("choose-k", *QUICK, *more, "--json").json
    assert (found["recommended"], found["clients"]) == (2, 16)
    Path("own.toml").write_text(
        '[run]\nalgorithm = "ifca"\nclients = 20\nrounds = 90\n[algorithm]\nnum_clusters = 7\n[scenario]\ngroups = 2\n'
    )
    found = command("choose-k", "--config", "own.toml", "--to", 3, "--epochs", 1, "--json").json
    assert (found["recommended"], found["clients"], found["rounds"]) == (2, 20, 3)


def test_by_default_not_more_clusters_than_clients(command: Command):
    assert (
        len(command("choose-k", "--clients", 5, "--epochs", 1, "--from", 4, "--rounds", 1, "--json").json["table"]) == 2
    )


def test_without_matplotlib_there_is_no_plot_and_it_is_said(command: Command, monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    done = command("choose-k", *SMALL, "--to", 2, "--rounds", 1)
    assert done.code == 0
    assert "no plot: " in done.err
    assert "coterie[report]" in done.err
    assert command("choose-k", *SMALL, "--to", 2, "--rounds", 1, "--json").json["plot"] is None
    assert not list(Path().glob("*.png"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--from", 5, "--to", 3), "The smallest K must be at most the largest, 3. Got 5 instead."),
        (("--to", 25), "The largest K must be at most the number of clients, 24. Got 25 instead."),
        (
            ("--sample", 4, "--to", 5),
            "The largest K must be at most the number of clients, 4. Got 5 instead.",
        ),
        (("--from", 0), "--from must be an int >= 1. Got '0' instead."),
        (("--to", "many"), "--to must be an int >= 1. Got 'many' instead."),
        (("--sample", 0), "--sample must be an int >= 1. Got '0' instead."),
        (("--rounds", -1), "--rounds must be an int >= 1. Got '-1' instead."),
        (("--seed", "x"), "--seed must be an int >= 0. Got 'x' instead."),
        (("--dataset", "rotated-digit"), "Did you mean 'rotated-digits'?"),
        (("--set", "algorithm.prox=1"), "--set takes fields of work, dataset, scenario, model or engine here."),
        (("--set", "run.rounds=1"), "Got 'run.rounds=1' instead."),
        (("--set", "nonsense"), "--set takes TABLE.FIELD=VALUE"),
        (("-o", "a-file"), "a-file is a file; name a folder to write to with -o."),
    ],
)
def test_bad_input_is_one_sentence(command: Command, arguments: tuple[object, ...], said: str):
    Path("a-file").write_text("")
    assert said in command("choose-k", *SMALL, *arguments).error
    assert not list(Path().glob("*.png"))


# ---- coterie run --clusters auto ----


def test_auto_chooses_before_the_run_and_keeps_the_number(command: Command):
    run = ("run", "-a", "fesem", *SMALL, "--rounds", 2, "--set", "scenario.groups=2")
    done = command(*run, "--clusters", "auto", "--name", "one")
    assert done.code == 0
    assert "choosing the number of clusters of rotated-digits" in done.err
    assert "chosen: 2 clusters, because held-out accuracy is " in done.err
    folder = Path("runs/one")
    assert tomllib.loads((folder / "config.toml").read_text())["algorithm"]["num_clusters"] == 2
    chosen = json.loads((folder / "artifacts/choose-k.json").read_text())
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["clusters"] == chosen["recommended"] == 2
    assert summary["notes"] == [f"--clusters auto chose K = 2: {chosen['reason']}"]
    given = command(*run, "--clusters", 2, "--json").json
    for key in ("accuracy", "loss", "cluster_sizes", "bytes", "digest"):
        assert given[key] == summary[key]
    assert not given["notes"]


def test_a_resumed_run_does_not_choose_again(command: Command, monkeypatch: pytest.MonkeyPatch):
    whole = command("run", "-a", "fesem", *SMALL, "--rounds", 2, "-k", "auto", "--name", "one", "--json").json
    Path("runs/one/summary.json").unlink()

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("chosen again")

    monkeypatch.setattr("coterie.runs.choose_k.choose_k", refuse)
    again = command("resume", "runs/one", "--json").json
    assert {k: v for k, v in again.items() if k != "seconds"} == {k: v for k, v in whole.items() if k != "seconds"}
    assert len(again["notes"]) == 1


def test_auto_from_a_config_file_and_a_number_that_overrides_it(command: Command):
    Path("own.toml").write_text('[algorithm]\nnum_clusters = "auto"\n[scenario]\ngroups = 2\n')
    few = ("run", "-a", "fesem", "--config", "own.toml", *SMALL, "--rounds", 1, "--json")
    assert command(*few).json["clusters"] == 2
    assert command(*few, "--clusters", 3).json["clusters"] == 3


def test_auto_with_a_method_without_clusters_is_not_used(command: Command):
    done = command("run", "-a", "fedavg", *SMALL, "--rounds", 1, "--clusters", "auto")
    assert done.code == 0
    assert "note: fedavg has no clusters; --clusters is ignored" in done.err
    assert "choosing" not in done.err


def test_auto_with_a_method_that_finds_the_number_is_left_to_it(command: Command):
    done = command("run", *SMALL, "--rounds", 2, "--clusters", "auto", "--name", "one")
    assert done.code == 0
    assert "choosing" not in done.err
    assert tomllib.loads(Path("runs/one/config.toml").read_text())["algorithm"]["num_clusters"] == "auto"
    assert json.loads(Path("runs/one/summary.json").read_text())["clusters"] == 4
    assert not Path("runs/one/artifacts/choose-k.json").exists()


def test_other_words_are_refused_and_compare_has_no_auto(command: Command):
    said = command("run", "--clusters", "many").error
    assert said == (
        "num_clusters of Coterie must be 'auto', an int >= 1, or a range such as '2-6'. Got 'many' instead."
    )
    said = command("run", "-a", "fesem", "--clusters", "many").error
    assert said == "num_clusters of FeSEM must be an int >= 1. Got 'many' instead."
    said = command("compare", "-a", "fesem", "--clusters", "auto").error
    assert said == "num_clusters of FeSEM must be an int >= 1. Got 'auto' instead."
