"""`coterie list`: everything registered, for people and for programs."""

from __future__ import annotations

import pytest

from coterie.algorithm import algorithms
from coterie.dataset import presets
from coterie.models import models
from coterie.scenario import parts
from coterie.settings import fields_of

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
    assert found["mclr"] == {}


@pytest.mark.parametrize(
    ("typed", "meant"), [("algorithm", "algorithms"), ("model", "models"), ("dataset", "datasets")]
)
def test_an_unknown_list_names_the_nearest(command: Command, typed: str, meant: str):
    assert f"There is no list '{typed}'. Did you mean '{meant}'?" in command("list", typed, "--json").error
