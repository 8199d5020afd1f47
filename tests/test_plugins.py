"""Plugins: entry points of installed packages, found by name, and imported only when the user chooses them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.errors import ConfigError, RunError, UnknownName
from coterie.methods.base import find_algorithm
from coterie.nets.registry import find_model
from coterie.runs.trackers import trackers
from coterie.trust import check_trust, plugins
from tests.test_extending import DATASET

MODULE = """
import pathlib

pathlib.Path(__file__).with_name("imported").touch()

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from coterie.client.optimizers import Optimizer, move
from coterie.data.dataset import Preset
from coterie.methods.fedavg import FedAvg
from coterie.runs.observers import Observer


@dataclass(frozen=True)
class Mine(FedAvg):
    key: ClassVar[str] = "mine"


def tiny(input_shape, num_outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(input_shape).numel(), num_outputs))


class Sign(Optimizer):
    def step(self, params, direction, state, lr, count):
        move(params, [part.sign() for part in direction], lr)


class Diary(Observer):
    def round(self, row):
        with open("diary.txt", "a") as file:
            file.write(f"{row['round']}\\n")


wines = Preset("x", "wines", "wine", "iid", clients=4, model="tiny-net", work={"lr": 0.01})
"""
POINTS = """
[coterie.methods]
my-method = own_things:Mine
broken = own_things:nothing

[coterie.datasets]
my-wines = own_things:wines
wine-source = own_things:Wine

[coterie.models]
tiny-net = own_things:tiny

[coterie.optimizers]
my-sign = own_things:Sign

[coterie.trackers]
diary = own_things:Diary
"""
RUN = "run -a my-method -d my-wines --optimizer my-sign --track diary --rounds 2 --quiet --json --name a"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages with one that has plugins."""
    packages = tmp_path / "packages"
    folder = packages / "own_things-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: own-things\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(POINTS)
    (packages / "own_things.py").write_text(MODULE + DATASET.partition("register_preset(P")[0])
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.delitem(sys.modules, "own_things", raising=False)
    return packages


def coterie(folder: Path, installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    source = Path(__file__).parents[1] / "src"
    environment = os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{installed}"}
    command = [sys.executable, "-m", "coterie", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_a_run_of_plugins_and_what_their_run_folder_may_do(tmp_path: Path, installed: Path):
    done = coterie(tmp_path, installed, *RUN.split())
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["algorithm"], summary["dataset"], summary["model"]) == ("my-method", "my-wines", "tiny-net")
    assert (tmp_path / "diary.txt").read_text() == "1\n2\n"
    assert (installed / "imported").exists()

    (installed / "imported").unlink()
    (tmp_path / "runs" / "a" / "summary.json").unlink()  # as if somebody else had sent an unfinished run
    refused = coterie(tmp_path, installed, "resume", "runs/a")
    assert refused.returncode == 2
    assert "run.algorithm = 'own_things:Mine'" in refused.stderr
    assert "work.optimizer = 'my-sign', a plugin" in refused.stderr
    assert coterie(tmp_path, installed, "show", "runs/a").returncode == 0
    assert coterie(tmp_path, installed, "report", "runs/a").returncode == 0
    listed = coterie(tmp_path, installed, "list", "algorithms")
    assert "plugin: own_things:Mine" in listed.stdout
    assert not (installed / "imported").exists()  # by none of these
    assert coterie(tmp_path, installed, "resume", "runs/a", "--trust", "--quiet").returncode == 0


def test_names_are_found_without_importing(installed: Path):
    assert plugins("coterie.methods")["my-method"] == "own_things:Mine"
    with pytest.raises(UnknownName, match="Did you mean 'my-method'"):
        find_algorithm("my-metod")
    with pytest.raises(UnknownName, match="tiny-net"):
        find_model("no-net")
    with pytest.raises(UnknownName, match="diary"):
        trackers(["nothing"])
    assert "own_things" not in sys.modules


def test_our_own_names_win(installed: Path):
    points = installed / "own_things-1.0.dist-info" / "entry_points.txt"
    points.write_text("[coterie.methods]\nfedavg = own_things:Mine\n")
    assert find_algorithm("fedavg").__module__ == "coterie.methods.fedavg"
    assert "own_things" not in sys.modules


def test_what_is_no_method_is_refused(installed: Path):
    with pytest.raises(ConfigError, match=r"algorithm broken, a plugin: own_things:nothing cannot be imported"):
        find_algorithm("broken")
    points = installed / "own_things-1.0.dist-info" / "entry_points.txt"
    points.write_text("[coterie.methods]\nno-method = own_things:tiny\n")
    with pytest.raises(ConfigError, match="algorithm no-method is not a subclass of coterie.Algorithm"):
        find_algorithm("no-method")


def test_fields_that_the_user_gives_again_need_no_trust(installed: Path):
    tables = {"run": {"model": "tiny-net"}}
    with pytest.raises(RunError, match="run.model = 'tiny-net', a plugin"):
        check_trust(tables, Path("x"), trust=False)
    check_trust(tables, Path("x"), trust=True)
    check_trust(tables, Path("x"), trust=False, given={("run", "model")})
