"""Clients that a run never trained: held out of it, or brought to it later."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import coterie
from coterie import SGD, FedAvg, FeSEM, Local
from coterie.api import Result, open_run
from coterie.data.federation import Federation
from coterie.errors import CheckpointError, ConfigError, DataError, RunError
from coterie.methods.base import algorithms
from coterie.methods.fedds import FedDSMIC
from coterie.methods.md_icfl import MDICFL
from coterie.runs.execution import execute
from coterie.runs.experiment import merge, resolve
from coterie.runs.folder import RunFolder
from coterie.runs.loop import Schedule
from coterie.runs.newcomers import Newcomers, like_the_run, split_unseen
from coterie.settings import fields_of
from tests.helpers import ragged_federation, setup_of

WORK = SGD(lr=0.2, epochs=2, batch_size=20)


def digits(clients: int = 24, seed: int = 0, reserve: int = 0) -> Federation:
    tables = {"run": {"clients": clients, "seed": seed}, "scenario": {"reserve": reserve}}
    return resolve(merge(tables)).federation()


def at_home(result: Result) -> float:
    """Share of the newcomers that are in the cluster where most of their own rotation are."""
    groups, newcomers = result.federation.groups, result.unseen
    assert groups is not None
    assert newcomers is not None
    assert newcomers.federation.groups is not None
    found = []
    for label, group in zip(newcomers.labels.tolist(), newcomers.federation.groups.tolist(), strict=True):
        members = groups[result.labels == label]
        found.append(len(members) > 0 and int(members.mode().values) == group)
    return float(np.mean(found))


@pytest.fixture(scope="module")
def held_out() -> Result:
    return coterie.run("fesem", digits(), "mlp", rounds=4, work=WORK, unseen=0.25)


# ---- who is held out ----


def test_the_share_is_held_out_by_seed_and_key():
    federation = digits()
    seen, unseen = split_unseen(federation, 0.25, seed=0)
    assert unseen is not None
    assert len(unseen) == 6
    assert sorted((*seen.names, *unseen.names)) == sorted(federation.names)
    renamed = federation.rename({name: f"hospital {name}" for name in federation.names})
    assert split_unseen(renamed, 0.25, 0)[1].names == tuple(f"hospital {name}" for name in unseen.names)
    turned = split_unseen(federation.select(torch.arange(23, -1, -1)), 0.25, 0)[1]
    assert set(turned.names) == set(unseen.names)
    assert split_unseen(federation, 0.25, 1)[1].names != unseen.names


def test_a_share_of_zero_is_no_client_and_a_small_share_is_one():
    federation = digits()
    assert split_unseen(federation, 0.0, 0) == (federation, None)
    assert len(split_unseen(federation, 1e-9, 0)[1]) == 1


def test_somebody_must_be_left_to_train():
    with pytest.raises(ConfigError, match=r"unseen=0.99 leaves none of 9 clients to train"):
        coterie.run(FedAvg(), ragged_federation(), rounds=1, unseen=0.99)
    with pytest.raises(ConfigError, match="num_clusters of FeSEM must be at most the number of clients, 5"):
        coterie.run(FeSEM(num_clusters=6), ragged_federation(), rounds=1, unseen=0.4)


# ---- what becomes of them ----


def test_held_out_clients_are_assigned_and_evaluated(held_out: Result):
    unseen = held_out.summary["unseen"]
    assert unseen["clients"] == 6
    assert held_out.summary["clients"] == 18
    assert unseen["ari"] == 1.0
    assert unseen["right_kind"] == 1.0
    assert unseen["accuracy"]["macro"] > 0.85
    assert at_home(held_out) == 1.0


def newcomers_of(labels: list[int], groups: list[int] | None, members: list[int], theirs: list[int] | None):
    """Newcomers with these clusters and groups, in a run whose clients have those."""
    of = None if groups is None else torch.tensor(groups)
    data: Any = SimpleNamespace(groups=of)
    nothing: Any = None
    known = None if theirs is None else torch.tensor(theirs)
    return Newcomers(data, nothing, torch.tensor(labels), nothing, {}, nothing, torch.tensor(members), known)


def test_the_right_kind_and_the_joint_ari_by_hand():
    members, kinds = [0, 0, 0, 1, 1, 1], [5, 5, 5, 7, 7, 7]
    right = newcomers_of([0, 1], [5, 7], members, kinds)
    assert (right.right_kind, right.ari) == (1.0, 1.0)
    # Swapped: among themselves they would agree perfectly. Clusters and groups of 4 and 4 share pairs of 3 and 3, 1 and
    # 1: 3 + 3 = 6 pairs together in both, 12 in each, 28 in all. By chance 144 / 28; (6 - 36/7) / (12 - 36/7) = 1 / 8.
    swapped = newcomers_of([1, 0], [5, 7], members, kinds)
    assert swapped.right_kind == 0.0
    assert swapped.ari == pytest.approx(1 / 8)
    # In no cluster; in a cluster without members; in one whose majority is of the own kind; in one of the other kind.
    mixed = newcomers_of([-1, 2, 0, 1], [5, 5, 5, 5], [0, 0, 0, 1, 1, -1], [5, 5, 7, 7, 7, 5])
    assert mixed.right_kind == 1 / 4
    for unknown in (newcomers_of([0], None, members, kinds), newcomers_of([0], [5], members, None)):
        assert unknown.right_kind is None
        assert unknown.ari is None


def test_without_a_share_there_are_none():
    result = coterie.run(FedAvg(), ragged_federation(), rounds=1)
    assert result.summary["unseen"] is None
    assert result.unseen is None


def test_held_out_clients_change_nothing_for_the_others(held_out: Result):
    seen, _ = split_unseen(digits(), 0.25, 0)
    alone = coterie.run("fesem", seen, "mlp", rounds=4, work=WORK)
    assert torch.equal(alone.centers, held_out.centers)
    assert torch.equal(alone.labels, held_out.labels)


def test_every_method_meets_the_same_clients():
    names = set()
    for key in ("fedavg", "local", "fesem", "ifca"):
        setup = setup_of(algorithms()[key](), ragged_federation(), schedule=Schedule(rounds=1, unseen=0.3))
        if "num_clusters" in fields_of(algorithms()[key]):
            setup = replace(setup, algorithm=algorithms()[key](num_clusters=2))
        result = execute(setup)
        assert result.unseen is not None
        names.add(result.unseen.federation.names)
    assert len(names) == 1


def test_their_test_samples_are_only_for_their_score(held_out: Result):
    federation = digits()
    _, unseen = split_unseen(federation, 0.25, 0)
    used = unseen.test.index.unique()
    y = federation.y.clone()
    y[used] = (y[used] + 1) % 10
    other = coterie.run("fesem", replace(federation, y=y), "mlp", rounds=4, work=WORK, unseen=0.25)
    assert torch.equal(held_out.unseen.labels, other.unseen.labels)
    assert held_out.summary["unseen"]["accuracy"] != other.summary["unseen"]["accuracy"]


def test_a_held_out_client_has_the_model_that_was_evaluated(held_out: Result):
    newcomers = held_out.unseen
    for number, row in enumerate(newcomers.rows()):
        x, y = newcomers.federation.samples(number, "test")
        with torch.no_grad():
            right = (held_out.personal_model(row["name"])(x).argmax(1) == y).double().mean()
        assert float(right) == pytest.approx(row["accuracy"])


def test_adapted_models_are_the_ones_that_were_evaluated():
    method = FedDSMIC(num_clusters=4, indicators=3, inner_lr=0.1, adapt_steps=3)
    result = coterie.run(method, digits(reserve=3), "mlp", rounds=2, work=WORK, unseen=0.25)
    scores = {row["name"]: row["accuracy"] for row in result.unseen.rows()}
    scores |= result.frame("clients").set_index("name")["accuracy"].to_dict()
    whole = digits(reserve=3)
    for name in (*result.federation.names[:3], *result.unseen.federation.names[:3]):
        x, y = whole.samples(whole.names.index(name), "test")
        with torch.no_grad():
            right = (result.personal_model(name)(x).argmax(1) == y).double().mean()
        assert float(right) == pytest.approx(scores[name])
    center = result.centers[result.unseen.labels[0]]
    assert not torch.equal(next(result.unseen.models())[1].params[0], center)  # adapted


def test_local_has_nothing_for_newcomers_but_the_start():
    result = coterie.run(Local(), ragged_federation(), rounds=1, unseen=0.3)
    assert result.unseen.labels.tolist() == [-1, -1, -1]
    assert result.summary["unseen"]["ari"] is None
    assert result.unseen.rows()[0]["cluster"] is None
    for _, model in result.unseen.models():
        assert torch.equal(model.params[0], result._trainer.engine.initial())


def test_under_strong_privacy_only_scores_leave_a_newcomer():
    method = MDICFL(num_clusters=2, privacy="strong", iterations=3, pseudo_samples=2)
    result = coterie.run(method, ragged_federation(), rounds=1, unseen=0.3)
    assert set(result.unseen.scores) == {"accuracy", "f1", "samples", "valid_accuracy", "valid_samples"}
    assert result.unseen.scores["valid_samples"].max() == 1  # it says only that there are some
    assert bool((result.unseen.scores["samples"] == 1).all())


def test_data_that_the_network_cannot_take_are_refused_in_one_sentence():
    run = ragged_federation()
    with pytest.raises(
        DataError, match=r"samples of shape \(1, 8, 8\), but the run was trained on samples of shape \(1, 4, 4\)"
    ):
        like_the_run(digits(4), run)
    with pytest.raises(
        DataError, match="has 5 classes, but the run was trained on 3 classes. Labels must be less than 3"
    ):
        like_the_run(ragged_federation(classes=5), run)
    with pytest.raises(DataError, match="has numeric targets, but the run was trained on 3 classes"):
        like_the_run(replace(run, num_classes=0), run)
    assert like_the_run(ragged_federation(classes=2), run).num_classes == 3  # newcomers need not have every class


# ---- a run, opened again ----


def kept_run(out: Path, **values: Any) -> tuple[Result, Path]:
    tables = {"clients": 12, "rounds": 2, "unseen": 0.25, "seed": 3} | values
    experiment = resolve(merge({"run": tables, "work": {"epochs": 1}}))
    folder = RunFolder.create(out, "a", "", experiment.tables())
    return execute(experiment, folder), folder.path


@pytest.mark.parametrize("algorithm", ["fesem", "feddsmic", "local"])
def test_an_opened_run_is_the_run(algorithm: str, tmp_path: Path):
    made, path = kept_run(tmp_path, algorithm=algorithm)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    found = open_run(path)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    assert found.summary == made.summary
    assert found.rows == made.rows
    assert found.clusters == made.clusters
    assert torch.equal(found.centers, made.centers)
    assert found.unseen.rows() == made.unseen.rows()
    for name in (made.federation.names[0], made.unseen.federation.names[0]):
        one, other = found.client_state_dict(name), made.client_state_dict(name)
        assert all(torch.equal(one[key], other[key]) for key in other)


def test_a_run_that_cannot_be_opened_says_why(tmp_path: Path):
    _, path = kept_run(tmp_path)
    config = (path / "config.toml").read_text()
    (path / "config.toml").write_text(config.replace("clients = 12", "clients = 16"))
    with pytest.raises(RunError, match="run.clients was 12 and is 16"):
        open_run(path)
    with pytest.raises(RunError, match="has changed since the run in .* began: client 'r000-003' is new"):
        open_run(path, override=True)
    (path / "config.toml").write_text(config)
    last = sorted((path / "checkpoint").glob("round-*"))[-1]
    whole = (last / "state.json").read_bytes()
    (last / "state.json").write_bytes(whole[:-9])
    with pytest.raises(CheckpointError, match=r"The last checkpoint .* is missing or damaged\. .*is truncated"):
        open_run(path)
    (last / "state.json").write_bytes(whole)
    (path / "summary.json").unlink()
    with pytest.raises(RunError, match="is not finished. Resume it with 'coterie resume"):
        open_run(path)
    with pytest.raises(RunError, match="is not a run folder"):
        open_run(tmp_path)
    coterie.run(FedAvg(), ragged_federation(), rounds=1, out=tmp_path, name="python")
    with pytest.raises(RunError, match="started from Python"):
        open_run(tmp_path / "python")


def test_a_resumed_run_meets_the_same_newcomers(tmp_path: Path):
    made, path = kept_run(tmp_path)
    (path / "summary.json").unlink()
    tables = RunFolder.open(path).config()
    tables.pop("schema")
    again = execute(resolve(tables), RunFolder.open(path))
    assert again.summary["unseen"] == made.summary["unseen"]


# ---- newcomers go where their kind is ----


@pytest.mark.parametrize("name", ["fesem", "ifca", "md_icfl", "fedds", "feddsmic"])
def test_newcomers_land_in_the_cluster_of_their_rotation(name: str):
    result = coterie.run(name, "rotated-digits", rounds=4, seed=2, unseen=0.2, evaluate_every=4)
    assert at_home(result) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "fesem",
        "fesem_ma",
        "ifca",
        "md_icfl",
        "fedds",
        "feddsmic",
    ],
)
def test_newcomers_find_their_rotation_on_five_seeds(name: str):
    found = [coterie.run(name, "rotated-digits", seed=seed, unseen=0.2, evaluate_every=20) for seed in range(5)]
    assert np.mean([at_home(result) for result in found]) >= 0.95


def test_classes_of_newcomers_are_known_by_their_names():
    x = torch.ones(6, 2)
    run = Federation.from_clients({"a": (x, np.array(["cat", "dog", "owl"] * 2))}, test=0.0, valid=0.0)
    new = Federation.from_clients({"b": (x, np.array(["owl", "dog"] * 3))}, test=0.0, valid=0.0)
    assert like_the_run(new, run).samples(0)[1].tolist() == [2, 1] * 3
    other = Federation.from_clients({"b": (x, np.array(["owl", "emu"] * 3))})
    with pytest.raises(DataError, match="own has the class 'emu', which the run was not trained on"):
        like_the_run(other, run)


def test_groups_of_newcomers_are_those_of_the_same_name():
    x, y = np.zeros((10, 2), np.float32), np.arange(10) % 2
    run = Federation.from_clients({"a": (x, y), "b": (x, y)}, groups={"a": "north", "b": "south"})
    new = Federation.from_clients({"c": (x, y), "d": (x, y)}, groups={"c": "south", "d": "east"})
    found = like_the_run(new, run)
    assert (found.groups.tolist(), found.group_names()) == ([1, 2], {1: "south", 2: "east"})
