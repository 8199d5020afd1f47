"""The round loop: what a round records, and that a run stopped anywhere ends as if it had not been."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

import coterie
from coterie import SGD, Algorithm, FeSEM
from coterie.api import Result
from coterie.data.federation import Federation
from coterie.engines.vectorized import VectorizedEngine
from coterie.errors import ConfigError, Interrupted, StorageError
from coterie.methods.base import algorithms
from coterie.methods.coterie import Coterie
from coterie.methods.parts.own_parts import OwnParts
from coterie.runs.execution import execute
from coterie.runs.experiment import Experiment
from coterie.runs.folder import RunFolder
from coterie.runs.loop import Schedule
from coterie.settings import fields_of
from tests.helpers import trainer_of


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are tiny here: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def federation(clients: int = 6) -> Federation:
    """Two kinds of client of ragged sizes; the second kind calls class 0 what is 1 for the first."""
    random = torch.Generator().manual_seed(5)
    data, groups = {}, {}
    for i in range(clients):
        y = torch.randint(0, 2, (14 + 3 * i,), generator=random)
        x = torch.randn(len(y), 3, generator=random) + 3.0 * y[:, None]
        data[f"c{i}"], groups[f"c{i}"] = (x, y if i % 2 == 0 else 1 - y), i % 2
    return Federation.from_clients(data, name="two kinds", groups=groups)


def of_two(name: str) -> Algorithm:
    """A registered method, with two clusters where it has clusters."""
    cls = algorithms()[name]
    return cls(num_clusters=2) if "num_clusters" in fields_of(cls) else cls()


def setup(algorithm: Algorithm | str = "fesem", **changes: Any) -> Experiment:
    chosen = of_two(algorithm) if isinstance(algorithm, str) else algorithm
    data = changes.pop("data", None) or federation()
    if hasattr(chosen, "indicators"):
        data = replace(data, reserved=torch.arange(4))  # it needs samples on the server; which ones is not the point
    work = changes.pop("work", SGD(lr=0.2, epochs=2, batch_size=5, momentum=0.5))
    # Methods in which clients keep a part of the model need more than one layer, or nothing is left to share.
    model = changes.pop("model", "mlp" if isinstance(chosen, OwnParts) else "mclr")
    schedule = Schedule(**{"rounds": 4, "checkpoint_every": 0.0, "participation": 0.7, "seed": 3} | changes)
    return Experiment(chosen, chosen.key, data.name, model, work, schedule, device="cpu", data=data)


def start(what: Experiment, root: Path, name: str = "run", **more: Any) -> Result:
    return execute(what, RunFolder.create(root, name, name, what.tables()), **more)


def resume(what: Experiment, root: Path, name: str = "run", **more: Any) -> Result:
    return execute(what, RunFolder.open(root / name), **more)


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def outcome(path: Path) -> dict[str, Any]:
    """All that a finished run has to say, bit for bit, but for what its clock showed."""
    last = sorted((path / "checkpoint").glob("round-*"))[-1]
    tensors: dict[str, Tensor] = safetensors.torch.load_file(last / "tensors.safetensors")
    plain = json.loads((last / "state.json").read_text())
    summary = json.loads((path / "summary.json").read_text())
    with np.load(path / "clients.npz", allow_pickle=False) as arrays:
        clients = {name: arrays[name].tobytes() for name in arrays.files}
    return {
        "checkpoint": last.name,
        "tensors": {name: (str(t.dtype), tuple(t.shape), t.numpy().tobytes()) for name, t in tensors.items()},
        "plain": {k: v for k, v in plain.items() if k not in ("seconds", "rows_bytes", "notes", "settings")},
        "rows": timeless([json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]),
        "labels": np.load(path / "labels.npy").tolist(),
        "clients": clients,
        "summary": {k: v for k, v in summary.items() if k not in ("seconds", "path", "notes")},
        "failures": json.loads((path / "artifacts" / "failures.json").read_text()),
    }


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


# ---- what is recorded ----


@pytest.mark.parametrize(
    "changes", [{}, {"evaluate_every": 3}, {"rounds": 1}, {"attack": "sign_flip", "attackers": 0.3}]
)
def test_rows_are_the_same_where_scores_come_a_round_later(tmp_path, monkeypatch: pytest.MonkeyPatch, changes):
    what = setup("ifca", **{"rounds": 5} | changes)
    start(what, tmp_path, "at once")
    monkeypatch.setattr(VectorizedEngine, "carries", True)
    seen: list[int] = []
    start(what, tmp_path, "later", observer=lambda row: seen.append(row["round"]))
    assert outcome(tmp_path / "later") == outcome(tmp_path / "at once")
    assert seen == list(range(1, what.schedule.rounds + 1))


def test_a_row_without_scores_waits_for_the_next_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(VectorizedEngine, "carries", True)
    what = setup("ifca", rounds=5, evaluate_every=2)
    written = []
    with RunFolder.create(tmp_path, "run", "run", what.tables()).held() as folder:
        trainer = trainer_of(what, folder)
        trainer._start()
        for number in range(1, 6):
            trainer._round(number)
            written.append([row["round"] for row in folder.rows()])
    assert written == [[1], [1], [1, 2, 3], [1, 2, 3], [1, 2, 3, 4, 5]]
    assert ["accuracy" in row for row in folder.rows()] == [False, True, False, True, True]
    assert trainer.progress.score_rounds == [2, 4, 5]


def test_a_stopped_run_has_the_scores_of_its_last_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(VectorizedEngine, "carries", True)
    with pytest.raises(Interrupted):
        start(setup("ifca"), tmp_path, should_stop=iter([False, True]).__next__)
    assert [row["round"] for row in RunFolder.open(tmp_path / "run").rows() if row["accuracy"]] == [1, 2]


def test_a_row_for_each_round_with_the_numbers_that_matter(tmp_path: Path):
    seen: list[dict[str, Any]] = []
    result = start(setup(), tmp_path, observer=lambda row: seen.append(json.loads(json.dumps(row))))
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert seen == rows == result.rows
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row.keys() == {
            *("round", "cohort", "accuracy", "f1", "loss", "r2", "ari", "nmi", "purity", "churn", "cluster_sizes"),
            *(
                "valid_accuracy",
                "valid_loss",
                "clients_met",
                "failures",
                "repairs",
                "decisions",
                "bytes",
                "seconds",
                "spread",
            ),
        }
        assert row["cohort"] == 4  # 0.7 of 6
        assert sum(row["cluster_sizes"]) == row["clients_met"] == 6
        assert min(row["seconds"].values()) >= 0
    sent = [row["bytes"]["up"] for row in rows]
    assert sent == [sent[0] * n for n in (1, 2, 3, 4)]
    assert sent[0] == 4 * result.centers.shape[1] * 4  # four clients, P floats of four bytes


def test_movement_by_hand():
    """Six clients of kinds 0 1 0 1 0 1. After the start two are wrong, and the last one was not seen."""
    trainer = execute(setup(rounds=1))._trainer
    history = [[0, 1, 0, 1, 1, -1], [0, 1, 0, 1, 0, 1], [1, 1, 0, 1, 0, 0], [0, 1, 0, 0, 0, 1]]
    trainer.progress.labels = [np.array(row) for row in history]
    summary = trainer.summary()
    # Clusters of the five that were seen: {0, 2} and {1, 3, 4}; kinds: {0, 2, 4} and {1, 3}. Two pairs agree; of ten
    # pairs, four are together in each. By chance 4 * 4 / 10 = 1.6; (2 - 1.6) / (4 - 1.6) = 1 / 6.
    assert summary["start_ari"] == pytest.approx(1 / 6)
    assert summary["moved_since_start"] == 2  # clients 3 and 4; client 5 had no cluster then
    assert summary["label_changes"] == [1, 2, 3]  # 4; 0 and 5; 0, 3 and 5. A first cluster is not a change.
    trainer.progress.labels[0] = np.full(6, -1)  # a method without a start
    assert trainer.summary()["moved_since_start"] is None


def test_movement_without_true_groups():
    trainer = execute(setup(rounds=1, data=replace(federation(), groups=None)))._trainer
    summary = trainer.summary()
    assert summary["start_ari"] is None
    assert summary["label_changes"] == [0]
    assert trainer.groups() is None


def test_the_summary_is_what_the_clients_scored(tmp_path: Path):
    result = start(setup(rounds=7), tmp_path)
    with np.load(tmp_path / "run" / "clients.npz", allow_pickle=False) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    assert found["round"].tolist() == list(range(1, 8))
    assert found["name"].tolist() == [f"c{i}" for i in range(6)]
    assert found["group"].tolist() == [0, 1, 0, 1, 0, 1]
    accuracy, samples = found["accuracy"], found["samples"]
    assert accuracy.shape == (7, 6)
    score = result.summary["accuracy"]
    assert score["macro"] == pytest.approx(accuracy[-1].mean())
    assert score["micro"] == pytest.approx((accuracy[-1] * samples[-1]).sum() / samples[-1].sum())
    assert score["bottom5"] == pytest.approx(np.sort(accuracy[-1])[:5].mean())
    assert score["worst_decile"] == pytest.approx(accuracy[-1].min())
    micro = (accuracy * samples).sum(1) / samples.sum(1)
    assert score["best5"] == pytest.approx(np.sort(micro)[-5:].mean())
    assert result.summary["f1"]["macro"] == pytest.approx(found["f1"][-1].mean())
    seconds = result.summary["seconds"]
    assert seconds["total"] == pytest.approx(sum(v for k, v in seconds.items() if k != "total"))


def test_labels_hold_the_start_and_every_round(tmp_path: Path):
    result = start(setup(), tmp_path)
    labels = np.load(tmp_path / "run" / "labels.npy", allow_pickle=False)
    assert labels.shape == (5, 6)
    assert labels[-1].tolist() == result.labels.tolist()


def test_clients_not_seen_have_no_label_and_are_counted():
    result = coterie.run("fedavg", federation(), "mclr", rounds=1, participation=0.5, work=SGD(lr=0.1))
    assert result.summary["clients_met"] == 3
    assert sorted(result.labels.tolist()) == [-1, -1, -1, 0, 0, 0]
    assert result.summary["cluster_sizes"] == [3]


def test_evaluation_can_be_rarer_but_the_last_round_is_always_looked_at(tmp_path: Path):
    result = start(setup(rounds=5, evaluate_every=2), tmp_path)
    assert [row["round"] for row in result.rows if "accuracy" in row] == [2, 4, 5]
    assert result.summary["accuracy"]["macro"] == result.rows[-1]["accuracy"]["macro"]
    with np.load(tmp_path / "run" / "clients.npz") as arrays:
        assert arrays["round"].tolist() == [2, 4, 5]


def test_no_true_groups_give_null():
    data = replace(federation(), groups=None)
    summary = coterie.run(FeSEM(num_clusters=2), data, "mclr", rounds=1).summary
    assert [summary[key] for key in ("ari", "nmi", "purity")] == [None, None, None]


def test_answers_that_are_not_finite_are_failures_and_the_run_continues(tmp_path: Path):
    result = start(setup("fedavg", work=SGD(lr=1e38, steps=3), rounds=2), tmp_path)
    path = tmp_path / "run"
    assert result.summary["rounds"] == 2
    assert result.summary["failures"] > 0
    failures = json.loads((path / "artifacts" / "failures.json").read_text())
    assert len(failures) == result.summary["failures"]
    assert {f["reason"] for f in failures} <= {"the answer is not finite", "the answer is far too large"}
    assert sum(row["failures"] for row in result.rows) == len(failures)
    assert "is lr too large?" in result.summary["notes"][0]

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    for text in [(path / "summary.json").read_text(), *(path / "rounds.jsonl").read_text().splitlines()]:
        json.loads(text, parse_constant=refuse)


def test_a_method_may_stop_early(tmp_path: Path):
    calm = FeSEM(num_clusters=2, tolerance=1e6, patience=2)
    result = start(setup(calm, rounds=9), tmp_path)
    assert result.summary["rounds"] == 2
    assert result.summary["stopped_early"] is True
    assert "accuracy" in result.rows[-1]
    (tmp_path / "run" / "summary.json").unlink()
    again = resume(setup(calm, rounds=9), tmp_path)
    assert timeless(again.rows) == timeless(result.rows)


@pytest.mark.parametrize(
    "change",
    [{"rounds": 0}, {"participation": 0.0}, {"participation": 1.1}, {"seed": -1}, {"checkpoint_every": -1.0}],
)
def test_an_impossible_schedule_is_one_sentence_and_leaves_nothing(tmp_path: Path, change: dict[str, Any]):
    (name,) = change
    with pytest.raises(ConfigError, match=rf"^{name} of Schedule must be .* Got .* instead\.$"):
        start(setup(**change), tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---- checkpoints ----


@pytest.mark.parametrize(
    ("every", "kept"), [(0.0, ["round-000003", "round-000004"]), (1e9, ["round-000004"])], ids=["each", "rarely"]
)
def test_checkpoints_come_as_often_as_asked(tmp_path: Path, every: float, kept: list[str]):
    start(setup(checkpoint_every=every), tmp_path)
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoint").iterdir()) == kept


def test_how_often_it_is_saved_changes_nothing(tmp_path: Path):
    start(setup(checkpoint_every=0.0), tmp_path, "often")
    start(setup(checkpoint_every=1e9), tmp_path, "rarely")
    assert outcome(tmp_path / "often") == outcome(tmp_path / "rarely")


@pytest.mark.parametrize("name", sorted(algorithms()))
def test_stopped_after_every_round_and_resumed_is_as_if_never_stopped(tmp_path: Path, name: str):
    start(setup(name), tmp_path, "whole")
    for round in (1, 2, 3):
        begin = start if round == 1 else resume
        with pytest.raises(Interrupted, match=f"Stopped after round {round} of 4"):
            begin(setup(name), tmp_path, should_stop=lambda: True)
    resume(setup(name), tmp_path)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_decisions_are_in_rows_summary_and_checkpoint_and_survive_a_stop(tmp_path: Path):
    what = setup(Coterie(num_clusters=2, warmup=1), participation=1.0)
    result = start(what, tmp_path, "whole")
    (cut,) = [one for one in result.summary["decisions"] if one["what"] == "cut"]
    assert cut["round"] == 2
    assert cut["clusters"] == [0, 1]
    assert cut["sizes"] == [3, 3]
    assert result.rows[0]["decisions"] == []
    assert result.rows[1]["decisions"][0] == cut
    assert [one for row in result.rows for one in row["decisions"]] == result.summary["decisions"]
    for begin in (start, resume, resume):
        with pytest.raises(Interrupted):
            begin(what, tmp_path, should_stop=lambda: True)
    resume(what, tmp_path)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert outcome(tmp_path / "run")["plain"]["state"]["decisions"] == result.summary["decisions"]


def test_networks_with_statistics_and_dropout_resume_exactly_too(tmp_path: Path):
    def network() -> torch.nn.Module:
        nn = torch.nn
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.3), nn.Linear(4, 2))

    what = setup("fesem", model=network, rounds=3, work=SGD(lr=0.1, batch_size=4, lr_decay=0.5))
    start(what, tmp_path, "whole")
    with pytest.raises(Interrupted):
        start(what, tmp_path, should_stop=lambda: True)
    resume(what, tmp_path)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_schedules_optimizers_and_frozen_layers_resume_exactly_too(tmp_path: Path):
    def network() -> torch.nn.Module:
        nn = torch.nn
        return nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.ReLU(), nn.Linear(4, 2))

    work = SGD(lr=0.1, batch_size=4, optimizer="adam", clip_norm=1.0, schedule="cosine", warmup_rounds=1)
    what = setup("fesem", model=network, rounds=3, work=work)
    start(what, tmp_path, "whole")
    with pytest.raises(Interrupted):
        start(what, tmp_path, should_stop=lambda: True)
    resume(what, tmp_path)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def kill_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> list[str]:
    """Die just before the `moment`-th thing done to the disk; gives what was done until then."""
    done: list[str] = []

    def watched(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if len(done) == moment:
                raise Killed
            done.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner, name in [(RunFolder, "append"), (os, "replace"), (os, "fsync"), (os, "mkdir"), (shutil, "rmtree")]:
        watched(owner, name)
    watched(safetensors.torch, "save_file")
    return done


@pytest.mark.parametrize(
    ("name", "carries"), [("fesem", False), ("fesem", True), pytest.param("local", False, marks=pytest.mark.slow)]
)
def test_killed_before_anything_it_does_to_the_disk_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, carries: bool
):
    """Also where the scores of a round come with the next one, and a checkpoint holds a row without them."""
    what = setup(name, rounds=2, work=SGD(lr=0.2, batch_size=10))
    start(what, tmp_path, "whole")
    expected = outcome(tmp_path / "whole")
    monkeypatch.setattr(VectorizedEngine, "carries", carries)
    moments = 0
    while True:
        run = f"run-{moments}"
        folder = RunFolder.create(tmp_path, run, run, what.tables())
        with monkeypatch.context() as patch:
            kill_at(patch, moments)
            try:
                execute(what, folder)
            except Killed:
                moments += 1
            else:
                break
        resume(what, tmp_path, run)
        assert outcome(tmp_path / run) == expected, f"killed at moment {moments - 1}"
    assert moments > 30  # two rows, two checkpoints of several files each, arrays, summary


def test_killed_five_times_over_with_half_written_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    what = setup("ifca", rounds=4)
    start(what, tmp_path, "whole")
    folder = RunFolder.create(tmp_path, "run", "run", what.tables())
    for moment in (9, 17, 12, 20, 3):
        with monkeypatch.context() as patch:
            kill_at(patch, moment)
            with pytest.raises(Killed):
                execute(what, folder)
        with (folder.path / "rounds.jsonl").open("a") as lines:
            lines.write('{"round": 99, "half')
        half = folder.path / "checkpoint" / ".round-000003.tmp"
        half.mkdir(parents=True, exist_ok=True)
        (half / "state.json").write_text("{")
        (folder.path / ".labels.npy.tmp").write_bytes(b"half")
        folder = RunFolder.open(folder.path)
    execute(what, folder)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_a_damaged_last_checkpoint_costs_a_round_and_is_reported(tmp_path: Path):
    what = setup()
    start(what, tmp_path, "whole")
    with pytest.raises(Interrupted):
        start(what, tmp_path, should_stop=iter([False, False, True]).__next__)
    state = tmp_path / "run" / "checkpoint" / "round-000003" / "state.json"
    state.write_text(state.read_text()[:-9])
    result = resume(what, tmp_path)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert "round-000003" in result.summary["notes"][0]
    assert result.summary["notes"][1] == "The checkpoint of round 2 is used."


def test_without_an_intact_checkpoint_the_run_starts_again_and_says_so(tmp_path: Path):
    what = setup()
    start(what, tmp_path, "whole")
    with pytest.raises(Interrupted):
        start(what, tmp_path, should_stop=iter([False, True]).__next__)
    for tensors in (tmp_path / "run").glob("checkpoint/*/tensors.safetensors"):
        tensors.write_bytes(tensors.read_bytes()[:100])
    result = resume(what, tmp_path)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert "starts again from the first round" in result.summary["notes"][-1]


def test_a_disk_that_fills_up_costs_nothing_that_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    what = setup()
    start(what, tmp_path, "whole")
    real = safetensors.torch.save_file

    def full_in_round_3(tensors: Any, path: Path) -> None:
        if "round-000003" in str(path):
            raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
        real(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full_in_round_3)
        with pytest.raises(
            StorageError, match=r"No space left.*\. The checkpoint of round 2 is kept\. Free some space"
        ):
            start(what, tmp_path)
    resume(what, tmp_path)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
