"""From what was typed to an experiment: defaults that suit the data, overridden by file, flags and --set."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie import IFCA, SGD, FedAvg, FeSEM
from coterie.data.dataset import presets
from coterie.errors import ConfigError, CoterieError, DataError, UnknownName
from coterie.methods.base import algorithms
from coterie.methods.coterie import Coterie
from coterie.nets.flat import flatten
from coterie.randomness import Rng
from coterie.runs.experiment import resolve, resolve_each
from coterie.runs.loop import Schedule
from coterie.runs.settings import TABLES, RunSettings, apply_set, merge, read_tables
from coterie.settings import fields_of


def resolved(**run: Any) -> Any:
    return resolve(merge({"run": run}))


# ---- defaults ----


def test_nothing_typed_is_coterie_on_rotated_digits():
    found = resolve({})
    assert found.algorithm == Coterie()
    assert (found.dataset, found.clients, found.scenario.name) == ("rotated-digits", 40, "rotated")
    assert (found.engine, found.device, found.loss) == ("vectorized", "auto", "cross_entropy")
    assert found.schedule == Schedule(keep_pictures=True)
    assert found.notes == []


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_dataset_brings_the_defaults_that_suit_it(name: str):
    preset, found = presets()[name], resolved(dataset=name)
    assert found.model == preset.model
    assert found.model_settings == dict(preset.model_settings)
    assert {key: getattr(found.work, key) for key in preset.work} == dict(preset.work)
    assert found.clients == preset.clients
    assert found.schedule == Schedule(**preset.run, keep_pictures=True)
    assert resolved(dataset=name, rounds=3).schedule.rounds == 3


def test_every_default_of_the_dataset_can_be_overridden():
    tables = merge({"run": {"model": "mclr", "clients": 8}, "work": {"lr": 0.5, "epochs": 2, "batch_size": "full"}})
    found = resolve(tables)
    assert (found.model, found.clients) == ("mclr", 8)
    assert found.model_settings == {}  # hidden=64 was for the dataset's own model
    assert found.work == SGD(lr=0.5, epochs=2, batch_size="full")


def test_integers_become_floats_where_floats_are_expected():
    found = resolve({"work": {"lr": 1}, "run": {"participation": 1}})
    assert isinstance(found.work.lr, float)
    assert isinstance(found.schedule.participation, float)


@pytest.mark.parametrize("dataset", sorted(presets()))
@pytest.mark.parametrize("algorithm", sorted(algorithms()))
def test_what_is_written_is_read_back_into_the_same(dataset: str, algorithm: str):
    changes = {
        "run": {"dataset": dataset, "algorithm": algorithm, "seed": 7, "rounds": 3, "participation": 0.5},
        "work": {"steps": 4, "batch_size": "full", "momentum": 0.9},
        "engine": {"precision": "float64"},
    }
    found = resolve(merge(changes))
    again = resolve(merge(found.tables()))
    assert again == found
    assert again.tables() == found.tables()


def test_the_federation_hangs_on_the_seed_and_on_nothing_else():
    digests = [resolved(clients=8, seed=seed, algorithm=name).federation().digest() for seed, name in DIGESTS]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_first_weights_may_be_the_same_for_every_seed():
    one, other = (resolved(clients=8, seed=seed, initial=42, model="mclr").task() for seed in (0, 1))
    torch.manual_seed(42)
    assert torch.equal(one.initial, flatten(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))))
    assert torch.equal(one.initial, other.initial)
    point = Rng.seed(0).at("other")
    assert not torch.equal(one.draw(point), one.initial)  # other weights are drawn as before
    assert torch.equal(one.draw(point), resolved(clients=8, model="mclr").task().draw(point))


DIGESTS = [(0, "fesem"), (0, "fedavg"), (1, "fesem")]


def test_clusters_for_a_method_without_clusters_is_a_note():
    found = resolve({"run": {"algorithm": "fedavg"}, "algorithm": {"num_clusters": 4}})
    assert found.algorithm == FedAvg()
    assert found.notes == ["fedavg has no clusters; --clusters is ignored"]


def test_a_field_goes_to_the_methods_that_have_it():
    found = resolve_each({"algorithm": {"prox": 0.5, "num_clusters": 3}}, ["local", "fesem"], [0, 1])
    assert list(found) == [("local", 0), ("fesem", 0), ("local", 1), ("fesem", 1)]
    assert found["fesem", 1].algorithm == FeSEM(prox=0.5, num_clusters=3)
    with pytest.raises(UnknownName, match="field of algorithm \\(local, fesem\\) named 'prx'. Did you mean 'prox'"):
        resolve_each({"algorithm": {"prx": 0.5}}, ["local", "fesem"], [0])


# ---- layers ----


def test_later_layers_win_field_by_field():
    merged = merge({"run": {"seed": 1, "rounds": 5}}, {"run": {"seed": 2}, "work": {"lr": 0.1}})
    assert merged["run"] == {"seed": 2, "rounds": 5}
    assert merged["work"] == {"lr": 0.1}
    assert merged.keys() == set(TABLES)


def test_set_comes_on_top_and_changes_no_layer():
    layers = merge({"run": {"seed": 1}})
    found = apply_set(layers, ["run.seed=2", "algorithm.layers=head", "work.batch_size=full", "scenario.groups = 2"])
    assert found["run"]["seed"] == 2
    assert found["algorithm"] == {"layers": "head"}
    assert found["work"] == {"batch_size": "full"}
    assert found["scenario"] == {"groups": 2}
    assert layers["run"] == {"seed": 1}
    assert layers["algorithm"] == {}


def test_the_last_of_two_sets_wins():
    assert apply_set({}, ["work.lr=1", "work.lr=2"])["work"] == {"lr": 2}


@pytest.mark.parametrize("text", ["", "lr", "lr=1", "work.=1", "work.lr", "=1", "."])
def test_set_in_a_wrong_form_shows_the_right_one(text: str):
    with pytest.raises(ConfigError) as caught:
        apply_set({}, [text])
    assert f"TABLE.FIELD=VALUE, such as algorithm.prox=0.1. Got '{text}' instead." in str(caught.value)


def test_set_of_an_unknown_table_names_the_nearest():
    with pytest.raises(UnknownName, match="Did you mean 'algorithm'"):
        apply_set({}, ["algoritm.prox=1"])


# ---- files ----


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_config_file_is_read(tmp_path: Path):
    file = write(tmp_path / "a.toml", 'schema = 1\n[run]\nalgorithm = "ifca"\n[work]\nlr = 0.5\n')
    tables = read_tables(file)
    assert tables == {"run": {"algorithm": "ifca"}, "work": {"lr": 0.5}}
    assert resolve(tables).algorithm == IFCA()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[run\n", r"cannot be read: .*line 1"),
        (b"\xff\xfe", "cannot be read"),
        ("[runs]\nseed = 1\n", "Did you mean 'run'"),
        ("[algoritm]\n", "Did you mean 'algorithm'"),
        ("run = 1\n", r"run in .* must be a table, \[run\]"),
        ("seed = 1\n", "named 'seed'"),
    ],
)
def test_a_bad_config_file_is_one_sentence(tmp_path: Path, content: str | bytes, said: str):
    with pytest.raises(ConfigError, match=said) as caught:
        read_tables(write(tmp_path / "bad.toml", content))
    assert "bad.toml" in str(caught.value)


def test_a_config_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"There is no config file .*none\.toml"):
        read_tables(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tables(tmp_path)


# ---- refusals ----


@pytest.mark.parametrize(
    ("tables", "nearest"),
    [
        ({"run": {"algorithm": "fesm"}}, "fesem"),
        ({"run": {"algorithm": "FedAVG"}}, "fedavg"),
        ({"run": {"dataset": "rotated_digits"}}, "rotated-digits"),
        ({"run": {"model": "leafcnn"}}, "leaf-cnn"),
        ({"run": {"scenario": "rotate"}}, "rotated"),
        ({"run": {"loss": "crossentropy"}}, "cross_entropy"),
        ({"run": {"round": 3}}, "rounds"),
        ({"run": {"algorithm": "fesem"}, "algorithm": {"proxx": 1}}, "prox"),
        ({"algorithm": {"clusters": 3}}, "num_clusters"),
        ({"work": {"learning_rate": 1, "batchsize": 3}}, None),
        ({"work": {"batchsize": 3}}, "batch_size"),
        ({"scenario": {"group": 2}}, "groups"),
        ({"model": {"hiden": 2}}, "hidden"),
        ({"run": {"dataset": "synthetic"}, "dataset": {"clases": 3}}, "classes"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(tables: dict[str, Any], nearest: str | None):
    with pytest.raises(UnknownName) as caught:
        resolve(tables)
    assert caught.value.nearest == nearest
    if nearest:
        assert f"Did you mean '{nearest}'?" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", list(fields_of(RunSettings)))
@pytest.mark.parametrize("value", [True, 1.5, [1]])
def test_a_value_of_the_wrong_kind_is_one_sentence(key: str, value: Any):
    with pytest.raises(ConfigError, match=rf"^{key} of RunSettings must be .* Got .* instead\.$"):
        resolved(**{key: value})


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "many", True, 2.5])
def test_clients_must_be_a_number_of_clients(value: Any):
    with pytest.raises(
        ConfigError, match=r"clients of RunSettings must be an int >= 1 and <= 10,000,000 or None\. Got .* instead"
    ):
        resolved(clients=value)


def numeric_fields() -> list[Any]:
    """Every numeric field that a user can set, from the registries."""
    owners = [("run", {}, Schedule), ("work", {}, SGD)]
    owners += [("algorithm", {"algorithm": name}, cls) for name, cls in algorithms().items()]
    cases = []
    for table, run, cls in owners:
        for field in fields_of(cls).values():
            if isinstance(field.default, (int, float)) and not isinstance(field.default, bool):
                cases.append(pytest.param(table, run, field, id=f"{cls.__name__}.{field.name}"))
    return cases


@pytest.mark.parametrize(("table", "run", "field"), numeric_fields())
def test_numbers_out_of_bounds_are_refused_with_field_and_value(table: str, run: dict[str, Any], field: Any):
    assert "ge" in field.bounds or "gt" in field.bounds  # nothing is without a lower bound
    bad = [math.nan, math.inf, -math.inf, min(0, field.bounds.get("ge", 0)) - 1, "three", True]
    bad += [0] if field.bounds.get("gt") == 0 or field.bounds.get("ge", 0) >= 1 else []
    bad += [field.bounds["le"] + 1] if "le" in field.bounds else []
    bad += [field.bounds["lt"]] if "lt" in field.bounds else []
    for value in bad:
        with pytest.raises(ConfigError) as caught:
            resolve(merge({"run": run}, {table: {field.name: value}}))
        said = str(caught.value)
        assert said.startswith(f"{field.name} of ")
        assert re.search(rf"Got {re.escape(repr(value))}(\.0)? instead\.$", said), said


def test_more_clusters_than_clients_are_refused():
    with pytest.raises(ConfigError, match=r"must be at most the number of clients, 8\. Got 9 instead"):
        resolve({"run": {"clients": 8}, "algorithm": {"num_clusters": 9}}).federation()


def test_fewer_clients_than_groups_are_refused():
    with pytest.raises(ConfigError, match=r"at least the number of groups, 4\. Got 3 instead"):
        resolved(clients=3).federation()


def test_more_clients_than_samples_are_refused():
    with pytest.raises(DataError, match=r"cannot share 1437 training samples .* use at most 1437 clients"):
        resolved(dataset="digits", clients=1500).federation()


def test_a_file_of_ones_own(tmp_path: Path):
    rng = np.random.default_rng(0)
    x, y, user = rng.normal(size=(40, 5)), np.arange(40) % 2, np.arange(40) // 10
    np.savez(tmp_path / "own.npz", x=x, y=y, user=user)
    found = resolve({"run": {"dataset": str(tmp_path / "own.npz")}, "algorithm": {"num_clusters": 2}})
    assert found.scenario.name == "by_user"
    assert len(found.federation()) == 4
    assert resolve(merge(found.tables())).federation().digest() == found.federation().digest()


def test_a_missing_file_is_a_sentence(tmp_path: Path):
    with pytest.raises(CoterieError, match=r"There is no file .*none\.npz"):
        resolved(dataset=str(tmp_path / "none.npz"))


@pytest.mark.parametrize(("text", "rounds"), [("scenario.at=7", [7]), ("scenario.at=[4, 8]", [4, 8])])
def test_the_rounds_of_a_drift_may_be_one_number(text: str, rounds: list[int]):
    found = resolve(apply_set(merge({"run": {"scenario": "rotated+drift", "clients": 8}}), [text]))
    assert found.tables()["scenario"]["at"] == rounds
    assert [move.round for move in found.federation().moves] == rounds
