"""A run over sites, taken home: its folder is extended, exported, and finds the model of a new site."""

from __future__ import annotations

import functools
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="needs pip install 'coterie[flower]'")

import coterie
from coterie.deploy.client import deployed_client_app
from coterie.deploy.example import rotated_shares
from coterie.deploy.server import serve
from coterie.errors import ConfigError, RunError
from tests.cli.conftest import Command, command
from tests.flower.fakes import FakeGrid

__all__ = ["command"]


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@functools.cache
def shares():
    return rotated_shares(shares=8, turns=(0, 180))


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The task.py of an app, as `take_home_task`."""
    made = ModuleType("take_home_task")
    network.__module__, network.__qualname__ = "take_home_task", "model"
    made.CLASSES, made.INPUT, made.model = 10, (1, 8, 8), network  # type: ignore[attr-defined]
    made.load_data = lambda context: shares()[f"site-{context.node_config['partition-id']}"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "take_home_task", made)
    return made


def deployed(task: ModuleType, folder: Path, algorithm: str, rounds: int = 2, **config: object) -> dict[str, object]:
    grid, app = FakeGrid(), deployed_client_app(task)
    for i in range(4):
        grid.add(10 + i, app, **{"partition-id": i, "name": f"site-{i}", "state-dir": str(folder / f"state-{i}")})
    common = {"identity": "claimed", "min-clients": 4, "lr": 0.2, "epochs": 2, "batch-size": 10, "poll": 0.001}
    named = {"algorithm": algorithm, "rounds": rounds, "run-dir": str(folder / "runs"), "name": "a"}
    return serve(grid, {**common, **named, **config}, task)


def test_models_and_new_sites(command: Command, task: ModuleType, tmp_path: Path):
    summary = deployed(task, tmp_path, "fesem", clusters=2)
    assert deployed(task, tmp_path, "fesem", rounds=3, clusters=2)["notes"][-1].startswith(  # type: ignore[index]
        "extended from 2 to 3 rounds after round 2; the result equals"
    )
    path = Path(shutil.move(tmp_path / "runs" / "a", tmp_path / "copy"))
    shutil.rmtree(tmp_path / "state-0")
    told = command("export", path, "--client", "site-1", "-o", "m.safetensors", "--json").json
    assert told["metadata"]["network"] == "take_home_task:model"
    assert told["metadata"]["inputs"] == "as load_data of the sites gives them"
    assert told["metadata"]["round"] == "3"
    assert command("export", path, "--all", "-o", "all", "--json").json["files"] == 2
    assert (
        "run.model = 'take_home_task:model'"
        in command("export", path, "--cluster", 0, "--format", "torch.export").error
    )
    program = ("--format", "torch.export", "--model", "take_home_task:model", "-o", "m.pt2")
    assert command("export", path, "--client", "site-1", *program).code == 0
    module = coterie.open_run(path, data=False, model=network).personal_model("site-1")
    x, y = shares()["site-1"]
    torch.testing.assert_close(torch.export.load("m.pt2").module()(x), module(x))
    assert (module(x).argmax(1) == y).float().mean() > 0.7
    # New sites, one of each kind, where their data is.
    parts = [shares()[f"site-{i}"] for i in (5, 6)]
    arrays = {"x": np.concatenate([x.numpy() for x, _ in parts]), "y": np.concatenate([y.numpy() for _, y in parts])}
    np.savez("new.npz", **arrays, user=np.repeat(["site-5", "site-6"], [len(y) for _, y in parts]))
    found = command("onboard", path, "-d", "new.npz", "--model", "take_home_task:model", "--json").json
    members = coterie.open_run(path, data=False).clusters
    assert [row["cluster"] for row in found["clients"]] == [members["site-1"], members["site-0"]]
    assert found["accuracy"]["macro"] > 0.7
    assert summary["rounds"] == 2


def test_personal_models_are_the_sites_own(command: Command, task: ModuleType, tmp_path: Path):
    deployed(task, tmp_path, "ditto")
    said = command("export", tmp_path / "runs" / "a", "--client", "site-1").error
    assert said.endswith('Let the sites send theirs when the run is started: set = "run.keep_models=64".')
    shutil.rmtree(tmp_path / "runs")
    deployed(task, tmp_path, "ditto", set="run.keep_models=64")
    assert command("export", tmp_path / "runs" / "a", "--client", "site-1").code == 0


def test_the_type_of_samples_is_checked(task: ModuleType, tmp_path: Path):
    task.DTYPE = "uint8"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="Only 0 of at least 4 sites|DTYPE of task.py is torch.uint8"):
        deployed(task, tmp_path, "fedavg", wait=0)
    task.DTYPE = "float32"  # type: ignore[attr-defined]
    deployed(task, tmp_path, "fedavg")
    facts = coterie.open_run(tmp_path / "runs" / "a", data=False).facts(cluster=0)
    assert facts["inputs"] == "float32 numbers, not scaled"
    task.DTYPE = "double"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="DTYPE of task.py must be one of uint8, int64, float32"):
        deployed(task, tmp_path, "fedavg")


def test_such_a_run_is_resumed_by_its_app(command: Command, task: ModuleType, tmp_path: Path):
    deployed(task, tmp_path, "fedavg")
    with pytest.raises(RunError, match="its data is at the sites; resume it with its run.sh"):
        coterie.runs.opening.stored_experiment(coterie.runs.folder.RunFolder.open(tmp_path / "runs" / "a"))
