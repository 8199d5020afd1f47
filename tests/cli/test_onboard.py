"""`coterie onboard`, `export`, `--unseen`, `--dropout`: what is written, what is shown, every refusal."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from coterie.api import open_run
from coterie.cli.main import main
from coterie.nets.registry import build_model
from coterie.randomness import Rng
from coterie.runs.experiment import merge, resolve

from .conftest import TINY, Command

SMALL = ("--clients", "20", "--rounds", "3", "--epochs", "4", "--quiet")
NEW = ("--dataset", "rotated-digits", "--clients", "8", "--seed", "7")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of fesem, `a`, that was made once."""
    out = tmp_path_factory.mktemp("runs")
    with pytest.raises(SystemExit):
        main(["run", "-a", "fesem", *SMALL, "--unseen", "0.15", "--out", str(out), "--name", "a"])
    return out


def network() -> torch.nn.Module:
    return build_model("mlp", {"hidden": 64}, (1, 8, 8), 10, Rng.seed(1))


# ---- onboard ----


def test_onboard_writes_clusters_scores_and_models(command: Command, runs: Path):
    done = command("onboard", runs / "a", *NEW, "--name", "new", "--json")
    assert done.code == 0, done.err
    path = runs / "onboard-new"
    assert done.json["path"] == str(path)
    written = json.loads((path / "clients.json").read_text())
    assert written == {key: value for key, value in done.json.items() if key != "path"}
    assert written["ari"] == 1.0
    assert written["accuracy"]["macro"] > 0.8
    federation = resolve(merge({"run": {"clients": 8, "seed": 7}})).federation()
    assert [row["name"] for row in written["clients"]] == list(federation.names)
    assert [row["group"] for row in written["clients"]] == federation.groups.tolist()
    for number, row in enumerate(written["clients"]):
        module = network()
        module.load_state_dict(safetensors.torch.load_file(path / row["model"]))
        x, y = federation.samples(number, "test")
        with torch.no_grad():
            assert float((module(x).argmax(1) == y).double().mean()) == pytest.approx(row["accuracy"])
    assert not list(path.rglob("*.tmp"))


def test_onboard_shows_a_table_and_counts_up(command: Command, runs: Path):
    done = command("onboard", runs / "a", *NEW)
    assert "8 new clients" in done.out
    assert "r090-000" in done.out
    assert (runs / "onboard-a" / "clients.json").exists()
    assert command("onboard", runs / "a", *NEW, "--json").json["path"] == str(runs / "onboard-a-2")


def test_onboard_leaves_the_run_as_it_is(command: Command, runs: Path):
    before = {file: file.read_bytes() for file in (runs / "a").rglob("*") if file.is_file()}
    assert command("onboard", runs / "a", *NEW, "--name", "same").code == 0
    assert {file: file.read_bytes() for file in (runs / "a").rglob("*") if file.is_file()} == before


def test_onboard_takes_a_file_of_ones_own(command: Command, runs: Path):
    whole = resolve(merge({"run": {"clients": 8, "seed": 9}})).federation()
    parts = [(whole.x[whole.train.rows(0)], whole.y[whole.train.rows(0)]) for _ in range(2)]
    keep = parts[0][1] < 9  # the new clients need not have every class
    x = np.concatenate([part[0][keep].numpy() for part in parts])
    y = np.concatenate([part[1][keep].numpy() for part in parts])
    user = np.repeat(["ward/1", "ward 2"], len(y) // 2)
    np.savez("own.npz", x=x, y=y, user=user)
    done = command("onboard", runs / "a", "--dataset", "own.npz", "--name", "own", "--json")
    rows = done.json["clients"]
    assert [row["name"] for row in rows] == ["ward 2", "ward/1"]
    # Not turned, and scaled as the run's own data: they go where the clients that are not turned are.
    result = open_run(runs / "a")
    upright = next(label for name, label in result.clusters.items() if name.startswith("r000"))
    assert [row["cluster"] for row in rows] == [upright, upright]
    assert {row["group"] for row in rows} == {None}
    assert done.json["ari"] is None
    assert all((runs / "onboard-own" / row["model"]).is_file() for row in rows)


def test_one_newcomer_is_enough(command: Command, runs: Path):
    done = command("onboard", runs / "a", "--dataset", "digits", "--clients", 1, "--name", "one", "--json")
    assert len(done.json["clients"]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "onboard needs the data of the new clients: --dataset NAME"),
        (("--dataset", "rotatd-digits"), "Did you mean 'rotated-digits'?"),
        (
            ("--dataset", "digits", "--clients", "x"),
            "--clients must be an int >= 1 and <= 10,000,000. Got 'x' instead.",
        ),
        (
            ("--dataset", "digits", "--set", "work.lr=1"),
            "--set takes fields of dataset or scenario here.",
        ),
        (("--dataset", "synthetic"), "the run was trained on samples of shape (1, 8, 8)"),
        (("--dataset", "none.npz"), "There is no file none.npz; check the path."),
    ],
)
def test_onboard_refuses_in_one_sentence(command: Command, runs: Path, arguments: tuple[str, ...], said: str):
    before = set(runs.iterdir())
    assert said in command("onboard", runs / "a", *arguments).error
    assert set(runs.iterdir()) == before


def test_onboard_refuses_more_classes(command: Command, runs: Path):
    np.savez("more.npz", x=np.zeros((40, 8, 8), dtype=np.uint8), y=np.arange(40) % 12)
    done = command("onboard", runs / "a", "--dataset", "more.npz")
    assert done.error == "more has 12 classes, but the run was trained on 10 classes. Labels must be less than 10."


def test_onboard_refuses_a_name_that_is_taken_and_a_folder_that_is_no_run(command: Command, runs: Path):
    (runs / "onboard-taken").mkdir()
    assert "exists; choose another --name" in command("onboard", runs / "a", *NEW, "--name", "taken").error
    assert "is not a run folder" in command("onboard", runs, *NEW).error


# ---- export ----


def test_export_a_client_and_a_cluster(command: Command, runs: Path):
    result = open_run(runs / "a")
    name = result.federation.names[3]
    done = command("export", runs / "a", "--client", name, "-o", "mine.safetensors")
    assert done.code == 0
    module = network()
    module.load_state_dict(safetensors.torch.load_file("mine.safetensors"))
    x, _ = result.federation.samples(3, "test")
    assert torch.equal(module(x), result.personal_model(name)(x))
    done = command("export", runs / "a", "--cluster", int(result.labels[3]), "--json")
    assert done.json["file"] == f"a-cluster-{int(result.labels[3])}.safetensors"
    assert done.json["tensors"].keys() == module.state_dict().keys()
    assert done.json["metadata"]["inputs"] == result.federation.scaling
    with safetensors.safe_open("mine.safetensors", "pt") as file:
        assert file.metadata() == done.json["metadata"] | {"client": name}
        assert file.metadata().items() >= result.federation.input_facts().items()
    weights = safetensors.torch.load_file(done.json["file"])
    assert all(torch.equal(weights[key], value) for key, value in module.state_dict().items())


def test_export_a_client_that_was_held_out(command: Command, runs: Path):
    result = open_run(runs / "a")
    name = result.unseen.federation.names[0]
    assert command("export", runs / "a", "--client", name).code == 0
    weights = safetensors.torch.load_file(f"a-{name}.safetensors")
    expected = result.cluster_state_dict(int(result.unseen.labels[0]))
    assert all(torch.equal(weights[key], value) for key, value in expected.items())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "export needs one of --client NAME, --cluster K and --all."),
        (("--client", "r000-000", "--cluster", "1"), "export needs one of --client NAME, --cluster K and --all."),
        (
            ("--client", "r000_000"),
            "There is no client 'r000_000'. Clients are r000-000 ... r270-004. Did you mean 'r000-000'?",
        ),
        (("--cluster", "4"), "There is no cluster 4. Clusters are 0 ... 3."),
        (("--cluster", "-1"), "There is no cluster -1. Clusters are 0 ... 3."),
        (("--cluster", "two"), "--cluster must be an int. Got 'two' instead."),
        (("--cluster", "1", "-o", "no/such/folder.safetensors"), "no/such/folder.safetensors cannot be written"),
    ],
)
def test_export_refuses_in_one_sentence(command: Command, runs: Path, arguments: tuple[str, ...], said: str):
    assert said in command("export", runs / "a", *arguments).error
    assert not list(Path().iterdir())


# ---- in a run ----


def test_unseen_clients_are_in_the_summary(command: Command, runs: Path):
    summary = command("show", runs / "a", "--json").json
    assert summary["unseen"].keys() == {"clients", "accuracy", "ari", "right_kind"}
    assert summary["unseen"]["clients"] == 3
    assert summary["unseen"]["accuracy"].keys() == {"micro", "macro"}
    rows = json.loads((runs / "a" / "artifacts" / "unseen.json").read_text())
    manifest = json.loads((runs / "a" / "artifacts" / "manifest.json").read_text())
    assert [row["name"] for row in rows] == manifest["unseen"]
    assert "3 clients: accuracy" in command("show", runs / "a").out


def test_compare_holds_out_the_same_clients_for_all(command: Command):
    shares = ("--unseen", "0.3", "--dropout", "0.2", "--json")
    done = command("compare", *TINY, "-a", "fedavg", "-a", "fesem", *shares)
    assert all(row["unseen"]["macro"]["mean"] > 0 for row in done.json["rows"])
    found = [json.loads(file.read_text()) for file in sorted(Path(done.json["path"]).glob("*/artifacts/unseen.json"))]
    assert len(found) == 2
    assert [row["name"] for row in found[0]] == [row["name"] for row in found[1]]


def test_dropout_is_counted(command: Command):
    done = command("run", *TINY, "-a", "fedavg", "--dropout", "0.5", "--name", "late", "--json")
    assert done.json["failures"] > 0
    assert "failed answers" in command("show", "runs/late").out


@pytest.mark.parametrize("flag", ["--unseen", "--dropout"])
def test_shares_are_refused_in_one_sentence(command: Command, flag: str):
    assert command("run", flag, "1").error == f"{flag} must be a number >= 0 and < 1. Got '1' instead."
    assert command("run", flag, "many").error == f"{flag} must be a number >= 0 and < 1. Got 'many' instead."
