"""Trackers: what they write is what the rounds said."""

from __future__ import annotations

import json
import math
import struct
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import Interrupted, MissingExtra, UnknownName
from coterie.methods.base import find_algorithm
from coterie.runs.execution import execute
from coterie.runs.folder import RunFolder
from coterie.runs.loop import Schedule
from coterie.runs.observers import Observer, RunInfo
from coterie.runs.trackers import Tolerant, scalars, trackers
from tests.cli.conftest import TINY, Command, command
from tests.helpers import setup_of

__all__ = ["command"]  # the fixture

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages that are written to


def run(root: Path, name: str, track: str, rounds: int = 3) -> tuple[RunFolder, list[dict[str, Any]]]:
    setup = setup_of(find_algorithm("fesem")(), schedule=Schedule(rounds=rounds))
    folder = RunFolder.create(root, name, name, setup.tables())
    result = execute(setup, folder, trackers([track], pytest.fail)[0])
    return folder, result.rows


def test_numbers_by_name():
    row = {
        "round": 2,
        "accuracy": {"macro": 0.5, "micro": math.nan},
        "f1": None,
        "spread": {"accuracy": [0.1, 0.2, 0.3, 0.4, 0.5]},
        "cluster_sizes": [3, 0],
        "repairs": [{"reason": "x"}],
        "failures": 1,
        "flag": True,
    }
    assert scalars(row) == {
        "accuracy/macro": 0.5,
        "accuracy/tenth": 0.1,
        "accuracy/median": 0.3,
        "cluster_size/0": 3.0,
        "cluster_size/1": 0.0,
        "failures": 1.0,
    }
    assert scalars({"cluster_sizes": [1] * 40}) == {}  # every client alone: no curve for each


# ---- TensorBoard ----


def events(folder: RunFolder) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder.path / "tensorboard"))
    found.Reload()
    return {tag: {item.step: item.value for item in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


def test_tensorboard_reads_the_curves(tmp_path: Path):
    folder, rows = run(tmp_path, "a", "tensorboard")
    found = events(folder)
    assert found["accuracy/macro"] == pytest.approx({row["round"]: row["accuracy"]["macro"] for row in rows})
    assert found["bytes/up"] == pytest.approx({row["round"]: row["bytes"]["up"] for row in rows})
    assert found["cluster_size/0"].keys() == {1, 2, 3}


def test_tensorboard_continues_after_a_resume(tmp_path: Path):
    setup = setup_of(find_algorithm("fesem")(), schedule=Schedule(rounds=4))
    folder = RunFolder.create(tmp_path, "a", "a", setup.tables())
    with pytest.raises(Interrupted):
        execute(setup, folder, trackers(["tensorboard"])[0], lambda: len(folder.rows()) == 2)
    result = execute(setup, RunFolder.open(folder.path), trackers(["tensorboard"])[0])
    found = events(folder)
    assert found["accuracy/macro"] == pytest.approx({row["round"]: row["accuracy"]["macro"] for row in result.rows})


def test_tensorboard_without_a_folder_is_reported_and_the_run_continues():
    notes: list[str] = []
    setup = setup_of(find_algorithm("fedavg")(), schedule=Schedule(rounds=1))
    result = execute(setup, None, trackers(["tensorboard"], notes.append)[0])
    assert result.summary["rounds"] == 1
    assert notes == ["note: tensorboard is disabled: --track tensorboard writes to the run folder; set out."]


# ---- MLflow ----


def mlflow_runs(root: Path) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(root / "mlruns").resolve().as_uri())
    experiment = client.get_experiment_by_name("ragged")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    return [(item, {m: client.get_metric_history(item.info.run_id, m) for m in item.data.metrics}) for item in found]


def test_mlflow_has_settings_curves_and_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder, rows = run(tmp_path, "a", "mlflow")
    [(found, history)] = mlflow_runs(tmp_path)
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "a"
    assert found.data.params["run.algorithm"] == "fesem"
    assert {m.step: m.value for m in history["accuracy/macro"]} == {r["round"]: r["accuracy"]["macro"] for r in rows}
    assert found.data.metrics["final/accuracy/macro"] == rows[-1]["accuracy"]["macro"]
    assert json.loads((folder.path / "artifacts" / "mlflow.json").read_text())["run_id"] == found.info.run_id


def test_mlflow_continues_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    setup = setup_of(find_algorithm("fesem")(), schedule=Schedule(rounds=4))
    folder = RunFolder.create(tmp_path, "a", "a", setup.tables())
    with pytest.raises(Interrupted):
        execute(setup, folder, trackers(["mlflow"])[0], lambda: len(folder.rows()) == 2)
    assert [item.info.status for item, _ in mlflow_runs(tmp_path)] == ["KILLED"]
    execute(setup, RunFolder.open(folder.path), trackers(["mlflow"])[0])
    [(found, history)] = mlflow_runs(tmp_path)
    assert found.info.status == "FINISHED"
    assert [m.step for m in history["accuracy/macro"]] == [1, 2, 3, 4]


# ---- W&B ----


def wandb_records(path: Path) -> list[Any]:
    """What W&B wrote to a file offline; its own process ends the file some time after the run."""
    from wandb.proto import wandb_internal_pb2

    found: list[Any] = []
    data, at, record = path.read_bytes(), 7, b""  # the log format of leveldb after a header of 7 bytes
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(wandb_internal_pb2.Record.FromString(record))
            record = b""
    return found


def test_wandb_writes_curves_and_result_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    folder, rows = run(tmp_path, "a", "wandb")
    name = json.loads((folder.path / "artifacts" / "wandb.json").read_text())["run_id"]
    [file] = (tmp_path / "wandb").glob(f"offline-run-*/run-{name}.wandb")
    deadline = time.monotonic() + 60
    while not (found := wandb_records(file)) or found[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline, "W&B did not end its file"
        time.sleep(0.1)
    values = [{"/".join(i.nested_key) or i.key: i.value_json for i in r.history.item} for r in found]
    curve = {int(row["_step"]): float(row["accuracy/macro"]) for row in values if row}
    assert curve == pytest.approx({row["round"]: row["accuracy"]["macro"] for row in rows})
    final = {i.key or i.nested_key[0]: i.value_json for r in found for i in r.summary.update}
    assert float(final["final/accuracy/macro"]) == pytest.approx(rows[-1]["accuracy"]["macro"])


class FakeWandb(types.ModuleType):
    """What the tracker uses of wandb; `calls` is what arrives there."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[str, Any]] = []
        self.id = "new"
        self.summary: dict[str, float] = {}

    def Settings(self, **values: Any) -> dict[str, Any]:  # noqa: N802
        return values

    def init(self, **values: Any) -> FakeWandb:
        self.calls.append(("init", values))
        self.id = values["id"] or "new"
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append(("log", step))

    def finish(self, exit_code: int) -> None:
        self.calls.append(("finish", exit_code))


def test_wandb_continues_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    setup = setup_of(find_algorithm("fesem")(), schedule=Schedule(rounds=4))
    folder = RunFolder.create(tmp_path, "a", "a", setup.tables())
    with pytest.raises(Interrupted):
        execute(setup, folder, trackers(["wandb"])[0], lambda: len(folder.rows()) == 2)
    assert [call for call, _ in fake.calls] == ["init", "log", "log", "finish"]
    assert fake.calls[-1] == ("finish", 1)
    first, fake.calls, fake.id = fake.calls[0][1], [], "lost"
    result = execute(setup, RunFolder.open(folder.path), trackers(["wandb"])[0])
    assert (first["id"], first["name"], first["project"]) == (None, "a", "ragged")
    assert first["config"]["run"]["algorithm"] == "fesem"
    assert fake.calls[0][1]["id"] == "new"
    assert fake.calls[1:] == [("log", 3), ("log", 4), ("finish", 0)]
    assert fake.summary["final/accuracy/macro"] == result.rows[-1]["accuracy"]["macro"]


# ---- what goes wrong ----


class Broken(Observer):
    def __init__(self) -> None:
        self.calls = 0

    def round(self, row: dict[str, Any]) -> None:
        self.calls += 1
        raise ConnectionError("nobody answers\nat all")


def test_a_failing_tracker_is_reported_once_and_the_run_continues():
    notes: list[str] = []
    inner = Broken()
    setup = setup_of(find_algorithm("fedavg")(), schedule=Schedule(rounds=3))
    result = execute(setup, None, Tolerant("mine", inner, notes.append))
    assert result.summary["rounds"] == 3
    assert inner.calls == 1
    assert notes == ["note: mine is disabled: nobody answers."]


def test_unknown_and_missing_trackers_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UnknownName, match="There is no tracker 'tensorbord'. Did you mean 'tensorboard'"):
        trackers(["tensorbord"])
    assert trackers(None) == []
    for module in ("mlflow", "torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    for name in ("mlflow", "tensorboard", "wandb"):
        with pytest.raises(MissingExtra, match=rf"--track {name} requires .*coterie\[{name}\]"):
            trackers([name])


def test_an_observer_that_never_began_can_end():
    for tracker in trackers(["tensorboard", "mlflow"]):
        tracker.end(None)
    Observer().begin(RunInfo("x"))


def test_the_command_line_tracks_runs_comparisons_and_sweeps(command: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert command("run", *TINY, "--name", "a", "--quiet", "--track", "tensorboard", "--track", "mlflow").code == 0
    assert set(events(RunFolder.open(Path("runs/a")))["accuracy/macro"]) == {1, 2}
    assert Path("runs/mlruns").is_dir()
    done = command("compare", "-a", "fedavg", *TINY, "--name", "c", "--quiet", "--track", "tensorboard")
    assert done.code == 0
    assert list(Path("runs/c/fedavg-s0/tensorboard").glob("events.*"))
    swept = command("sweep", "-g", "work.lr=0.1", *TINY, "--name", "s", "--quiet", "--track", "tensorboard")
    assert swept.code == 0
    assert len(list(Path("runs/s").glob("*/tensorboard/events.*"))) == 1
    for verb in (("run",), ("compare",), ("sweep", "-g", "work.lr=0.1"), ("resume", "runs/a")):
        assert "There is no tracker 'aim'" in command(*verb, "--track", "aim").error
