"""Situations: the built-in list, files of one's own, and what a situation changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.data.scenario import Scenario
from coterie.errors import ConfigError, CoterieError, UnknownName
from coterie.runs.settings import apply_set
from coterie.runs.situations import (
    Situation,
    default_situations,
    find_situations,
    read_situations,
    resolve_situations,
)

FILE = """
[skewed]
about = "few labels each"
run.scenario = "label_swapped"
scenario.alpha = 0.5
algorithm.num_clusters = 3

[plain]
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(text)
    return path


def scenario_of(experiment) -> Scenario:
    assert experiment.scenario is not None
    return experiment.scenario


def test_a_file_has_names_and_tables_as_a_config_file(tmp_path: Path):
    skewed, plain = read_situations(written(tmp_path, FILE))
    assert (skewed.name, skewed.about) == ("skewed", "few labels each")
    assert skewed.settings == "run.scenario=label_swapped scenario.alpha=0.5 algorithm.num_clusters=3"
    assert plain == Situation("plain")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no situation"),
        ("a = 1", "a in .* must be a table, \\[a\\]. Got 1 instead"),
        ('["a b"]', "needs a name of letters"),
        ('["../a"]', "needs a name of letters"),
        ("[a]\nwrok.lr = 1", "named 'wrok'. Did you mean 'work'\\?"),
        ("[a]\nwork = 1", "work of \\[a\\] in .* must be a table"),
        ("[a]\nabout = 1", "about of \\[a\\] in .* must be a string"),
        ("[a]\nrun.seed = 1", "choose it with --seeds"),
        ('[a]\nrun.algorithm = "ifca"', "choose it with --algorithm"),
        ("[a", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(tmp_path: Path, text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        read_situations(written(tmp_path, text))


def test_a_wrong_value_names_its_situation(tmp_path: Path):
    situations = read_situations(written(tmp_path, "[good]\n[bad]\nwork.lr = -1"))
    with pytest.raises(ConfigError, match="Situation 'bad': lr of .* must be a number > 0"):
        resolve_situations(situations, {}, ["fesem"], [0])


def test_the_built_in_list_resolves_for_every_method_with_the_same_data():
    names = ["local", "fesem", "fedds"]
    situations = find_situations("default", {})
    found = resolve_situations(situations, {}, names, [3, 1])
    assert len(found) == 2 * len(situations) * 3
    assert [key[0] for key in found] == [3] * (len(found) // 2) + [1] * (len(found) // 2)
    for situation in situations:
        scenarios = [found[3, situation.name, name].scenario for name in names]
        assert scenarios[0] == scenarios[1] == scenarios[2]
        assert scenario_of(found[3, situation.name, "local"]).common.reserve > 0  # fedds needs it
    clusters = {s: found[3, s, "fesem"].algorithm.num_clusters for _, s, _ in found}
    told = {"kinds-2": 2, "kinds-8": 8, "kind-5": 2, "k-small": 2, "k-large": 6}
    assert clusters == {situation.name: told.get(situation.name, 4) for situation in situations}
    skewed = scenario_of(found[1, "swap-dirichlet", "fesem"])
    assert (skewed.common.alpha, skewed.common.sense, skewed.values["groups"]) == (0.3, "per_class", 4)
    assert scenario_of(found[1, "kind-5", "fesem"]).common.kinds == (0.95, 0.05)
    few = found[1, "part-10", "fesem"].schedule
    assert (few.participation, few.rounds, found[1, "drift", "fesem"].schedule.rounds) == (0.1, 60, 20)


def test_the_list_by_kind_differs_only_in_tests_and_in_what_is_served():
    pairs = list(zip(find_situations("default", {}), find_situations("kind", {}), strict=True))
    for like, kind in pairs:
        assert (like.tables["scenario"]["tests"], kind.tables["scenario"]["tests"]) == ("like", "kind")
        changed = {**like.tables, "scenario": like.tables["scenario"] | {"tests": "kind"}}
        assert kind.tables == changed | {"algorithm": like.tables["algorithm"] | {"serve": "kind"}}
    found = resolve_situations([kind for _, kind in pairs], {}, ["fedavg", "coterie"], [0])
    assert {found[0, kind.name, "coterie"].algorithm.serve for _, kind in pairs} == {"kind"}
    resolve_situations([pairs[0][1]], {}, ["fedavg"], [0])  # no method here has the field


def test_a_method_that_finds_the_number_of_clusters_is_told_it_only_by_the_command():
    situations = find_situations("default", {})
    found = resolve_situations(situations, {}, ["coterie", "ifca"], [0])
    assert {found[0, s.name, "coterie"].algorithm.num_clusters for s in situations} == {"auto"}
    base = apply_set({}, ["algorithm.num_clusters=3"])
    (by_hand,) = resolve_situations(situations[:1], base, ["coterie"], [0]).values()
    assert by_hand.algorithm.num_clusters == 3


def test_a_field_that_no_method_has_is_refused():
    situations = [Situation("a", tables={"algorithm": {"serv": "kind"}})]
    with pytest.raises(ConfigError, match="Situation 'a': .* named 'serv'. Did you mean 'serve'"):
        resolve_situations(situations, {}, ["fedavg"], [0])


def test_the_example_of_natural_users_resolves():
    situations = read_situations(Path(__file__).parents[2] / "examples" / "writers.toml")
    base = apply_set({}, ["run.dataset=writers-mnist"])
    found = resolve_situations(situations, base, ["fedavg", "coterie"], [0])
    assert {scenario_of(e).name for e in found.values()} == {"by_user"}
    assert [scenario_of(found[0, s.name, "fedavg"]).common.tests for s in situations] == ["own", "kind"]
    assert [found[0, s.name, "coterie"].algorithm.serve for s in situations] == ["own", "kind"]


@pytest.mark.parametrize(("settings", "rounds"), [([], 30), (["run.rounds=5"], 15)])
def test_rounds_are_relative_to_those_of_the_command_or_the_dataset(settings: list[str], rounds: int):
    base = apply_set({}, ["run.dataset=flux-mnist", *settings])
    few = next(s for s in find_situations("default", base) if s.name == "part-10")
    assert few.tables["run"]["rounds"] == rounds


@pytest.mark.parametrize("rounds", [1, 7, 40])
def test_drift_happens_in_the_middle(rounds: int):
    base = apply_set({}, [f"run.rounds={rounds}"])
    drift = next(s for s in find_situations("default", base) if s.name == "drift")
    assert drift.tables["scenario"]["at"] == [max(1, rounds // 2)]


def test_a_situation_wins_over_the_command_and_leaves_the_rest():
    base = apply_set({}, ["algorithm.num_clusters=9", "work.lr=0.5", "scenario.valid=0.3"])
    ((_, found),) = resolve_situations(default_situations(20)[:1], base, ["fesem"], [0]).items()
    assert found.algorithm.num_clusters == 4
    assert found.work.lr == 0.5
    assert scenario_of(found).common.valid == 0.3


def test_the_samples_of_the_dataset_stay_where_the_scenario_changes():
    base = apply_set({}, ["run.dataset=rotated-mnist"])
    found = {s.name: s.over(base)["scenario"] for s in default_situations(20)}
    assert {s["samples"] for s in found.values()} == {1000}
    assert "groups" not in found["iid"]
    assert (found["swap"]["alpha"], found["swap-dirichlet"]["alpha"]) == (100.0, 0.3)


def test_a_field_of_some_scenarios_goes_to_those():
    situations = [
        Situation("a", tables={"run": {"scenario": "iid"}}),
        Situation("b", tables={"run": {"scenario": "rotated+drift"}}),
    ]
    base = apply_set({}, ["scenario.share=0.9"])
    found = resolve_situations(situations, base, ["fedavg"], [0])
    assert scenario_of(found[0, "b", "fedavg"]).values["share"] == 0.9
    assert "share" not in scenario_of(found[0, "a", "fedavg"]).values
    with pytest.raises(UnknownName, match="Did you mean 'share'"):
        resolve_situations(situations, apply_set({}, ["scenario.shar=0.9"]), ["fedavg"], [0])


def test_a_missing_file_says_what_is_taken():
    with pytest.raises(CoterieError, match="'default', 'kind' or a TOML file"):
        find_situations("defalt", {})
