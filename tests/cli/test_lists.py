"""`coterie list`: everything registered, for people and for programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.data.dataset import presets
from coterie.data.scenario import parts
from coterie.methods.base import algorithms
from coterie.nets.registry import models
from coterie.runs.folder import RunFolder
from coterie.settings import fields_of
from tests.views.report.made import make_run

from .conftest import Command

THINGS = {"algorithms": algorithms, "datasets": presets, "models": models, "scenarios": parts}


@pytest.mark.parametrize("what", sorted(THINGS))
def test_json_is_a_list_of_objects_with_names(command: Command, what: str):
    done = command("list", what, "--json")
    assert done.code == 0
    assert done.err == ""
    assert [item["name"] for item in done.json] == sorted(THINGS[what]())
    assert all(item["about"].strip() for item in done.json)


@pytest.mark.parametrize("what", sorted(THINGS))
def test_the_table_has_every_name(command: Command, what: str):
    done = command("list", what)
    assert done.code == 0
    for name in THINGS[what]():
        assert f" {name} " in done.out


def test_what_the_issue_asks_for_is_there(command: Command):
    names = {what: {item["name"] for item in command("list", what, "--json").json} for what in THINGS}
    assert names["algorithms"] >= {"local", "fedavg", "ifca", "fesem"}
    assert names["datasets"] >= {"rotated-digits", "synthetic"}
    assert names["models"] >= {"mclr", "mlp", "lenet", "leaf-cnn"}


def test_fields_of_a_method_are_explained(command: Command):
    found = {item["name"]: item for item in command("list", "algorithms", "--json").json}
    for name, cls in algorithms().items():
        shown = {field["name"]: field for field in found[name]["fields"]}
        assert shown.keys() == fields_of(cls).keys()
        for field in fields_of(cls).values():
            assert shown[field.name]["default"] == field.default
            assert shown[field.name]["help"] == field.help
            assert shown[field.name]["allowed"] == field.expected
    assert found["fesem"]["paper"] == "Long et al. 2022"


def test_settings_of_a_model_and_its_defaults(command: Command):
    found = {item["name"]: item["settings"] for item in command("list", "models", "--json").json}
    assert found["leaf-cnn"] == {"hidden": 2048}
    assert found["mclr"] == {"std": 0.0}


@pytest.mark.parametrize(
    ("typed", "meant"), [("algorithm", "algorithms"), ("model", "models"), ("dataset", "datasets")]
)
def test_an_unknown_list_names_the_nearest(command: Command, typed: str, meant: str):
    assert f"There is no list '{typed}'. Did you mean '{meant}'?" in command("list", typed, "--json").error


# ---- runs ----


def test_runs_with_state_and_progress_and_damaged_ones_with_the_reason(command: Command, tmp_path: Path):
    make_run(tmp_path / "runs", "done", rounds=3)
    live = make_run(tmp_path / "runs" / "compare-x", "live", rounds=2, planned=10, finished=False)
    (make_run(tmp_path / "runs", "bad") / "config.toml").write_text("[")
    with RunFolder.open(live).held():
        found = {run["name"]: run for run in command("list", "runs", "--json").json}
        shown = command("list", "runs").out
    assert set(found) == {"done", "compare-x/live", "bad"}
    assert (found["done"]["state"], found["done"]["rounds_done"]) == ("finished", 3)
    live_run = found["compare-x/live"]
    assert (live_run["state"], live_run["rounds_done"], live_run["rounds"]) == ("running", 2, 10)
    assert live_run["seconds_left"] == pytest.approx(8 * 0.35)
    assert found["bad"]["state"] == "damaged"
    assert "config.toml is damaged" in found["bad"]["reason"]
    for words in ("3 runs in runs", "compare-x/live", "running", "2/10", "0:03", "damaged"):
        assert words in shown


def test_runs_of_another_folder_and_none_at_all(command: Command, tmp_path: Path):
    make_run(tmp_path / "x", "a[b]")
    assert "a[b]" in command("list", "runs", "x").out
    (tmp_path / "empty").mkdir()
    assert command("list", "runs", "empty", "--json").json == []
    assert command("list", "runs").error == "There is no folder runs."
    (tmp_path / "file").write_text("")
    assert command("list", "runs", "file").error == "file is a file."
    assert command("list", "models", "x").error == "'coterie list models' takes no folder. Got 'x'."


def test_the_built_in_situations_are_listed_with_what_they_change(command: Command):
    found = {item["name"]: item for item in command("list", "situations", "--json").json}
    assert "algorithm.num_clusters=2" in found["k-small"]["changes"]
    assert "run.participation=0.1" in command("list", "situations").out
