"""Validation: its scores in rounds and summary, early stopping, the best round, and observers that stop a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import coterie
from coterie import SGD
from coterie.engines.vectorized import VectorizedEngine
from coterie.errors import ConfigError, StopRun
from coterie.methods.base import find_algorithm
from coterie.runs.execution import execute
from coterie.runs.experiment import Experiment
from coterie.runs.folder import RunFolder
from coterie.runs.observers import Several
from coterie.runs.opening import open_run
from tests.cli.conftest import Command, command
from tests.runs import test_loop
from tests.runs.test_loop import Killed, federation, outcome, resume, start

__all__ = ["command"]

METHODS = ("fedavg", "local", "ditto", "fedper")  # with and without models that clients keep
LONG = 12


def setup(method: Any = "local", **changes: Any) -> Experiment:
    """Clients that overfit soon: three labels in ten are wrong."""
    data = federation()
    wrong = torch.rand(len(data.y), generator=torch.Generator().manual_seed(0)) < 0.3
    data = replace(data, y=torch.where(wrong, 1 - data.y, data.y))
    usual = {"rounds": LONG, "data": data, "model": "mlp", "work": SGD(lr=0.3, epochs=2, batch_size=5)}
    made = test_loop.setup(method, **usual | changes)
    return replace(made, model_settings={"hidden": 8}, engine_settings={"plan": "stacked"})


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row["valid_loss"]["micro"] for row in rows]


def stops(values: list[float], patience: int) -> tuple[int, int]:
    """The best round and the last one, by the letter of `--patience`."""
    best = 0
    for place, value in enumerate(values):
        best = place if value < values[best] else best
        if place - best == patience:
            return best + 1, place + 1
    return best + 1, len(values)


def test_validation_scores_are_those_of_the_served_models_on_validation_samples():
    data = federation()
    result = execute(setup("fedavg", data=data, rounds=2, participation=1.0))
    wrong, right, counts = [], [], []
    for client, name in enumerate(data.names):
        x, y = data.samples(client, "valid")
        outputs = result.personal_model(name)(x)
        wrong.append(torch.nn.functional.cross_entropy(outputs, y).item())
        right.append((outputs.argmax(1) == y).double().mean().item())
        counts.append(len(y))
    shares = torch.tensor(counts) / sum(counts)
    expected = {"macro": sum(wrong) / len(wrong), "micro": float((shares * torch.tensor(wrong)).sum())}
    for record in (result.rows[-1], result.summary):
        assert record["valid_loss"] == pytest.approx(expected, rel=1e-5)
        assert record["valid_accuracy"]["macro"] == pytest.approx(sum(right) / len(right))


def test_a_run_without_validation_samples_has_no_such_scores():
    data = federation()
    nobody = replace(data.valid, index=data.valid.index[:0], offsets=torch.zeros_like(data.valid.offsets))
    empty = replace(data, valid=nobody)
    result = execute(setup("fedavg", data=empty, rounds=1))
    assert result.rows[-1]["valid_loss"] is None
    assert result.summary["valid_accuracy"] is None
    with pytest.raises(ConfigError, match="patience=2 needs validation samples"):
        execute(setup("fedavg", data=empty, patience=2))


@pytest.mark.parametrize(("method", "later"), [*((method, False) for method in METHODS), ("fedavg", True)])
def test_the_models_are_those_of_a_run_that_ended_in_the_best_round(
    method: str, later: bool, monkeypatch: pytest.MonkeyPatch
):
    whole = execute(setup(method))
    best, last = stops(losses(whole.rows), 2)
    assert best < last < LONG
    monkeypatch.setattr(VectorizedEngine, "carries", later)
    stopped = execute(setup(method, patience=2))
    assert stopped.summary["rounds"] == last + later
    assert stopped.summary["best_round"] == best
    assert stopped.summary["valid_loss"] == whole.rows[best - 1]["valid_loss"]
    short = execute(setup(method, rounds=best))
    assert torch.equal(stopped.centers, short.centers)
    assert torch.equal(stopped.labels, short.labels)
    for client in short.federation.names:
        ours, theirs = (run.client_state_dict(client) for run in (stopped, short))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("method", ["local", "fedavg"])
def test_a_killed_run_stops_where_it_would_have(method: str, tmp_path: Path):
    what = setup(method, patience=2)
    last = start(what, tmp_path, "whole").summary["rounds"]
    assert last < LONG
    for after in range(1, last):

        def kill(row: dict[str, Any], after: int = after) -> None:
            if row["round"] == after:
                raise Killed

        with pytest.raises(Killed):
            start(what, tmp_path, f"killed {after}", observer=kill)
        resume(what, tmp_path, f"killed {after}")
        assert outcome(tmp_path / f"killed {after}") == outcome(tmp_path / "whole")


def test_a_run_that_was_killed_before_its_summary_ends_at_once(tmp_path: Path):
    what = setup(patience=2)
    start(what, tmp_path)
    before = outcome(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    seen: list[Any] = []
    again = resume(what, tmp_path, observer=seen.append)
    assert seen == []
    assert outcome(tmp_path / "run") == before
    assert len([note for note in again.summary["notes"] if note.startswith("stopped after")]) == 1


def test_the_last_round_is_kept_beside_the_best_one(tmp_path: Path):
    what = setup(patience=2)
    done = start(what, tmp_path)
    assert done.summary["best_round"] < done.summary["rounds"]
    checkpoint, _ = RunFolder.open(tmp_path / "run").load_checkpoint()
    assert checkpoint is not None
    straight = execute(setup("local", rounds=done.summary["rounds"]))
    memory = straight._trainer.engine.memory_tensors()["value.model"]
    assert torch.equal(checkpoint.tensors["other.memory.value.model"], memory)
    assert not torch.equal(checkpoint.tensors["memory.value.model"], memory)


def test_private_methods_are_judged_by_accuracy():
    algorithm = find_algorithm("md_icfl")(num_clusters=2, privacy="strong")
    result = execute(setup(algorithm, rounds=6, patience=2))
    assert all(row["valid_loss"] is None and row["valid_accuracy"] is not None for row in result.rows)
    values = [-row["valid_accuracy"]["micro"] for row in result.rows]
    assert (result.summary["best_round"], result.summary["rounds"]) == stops(values, 2)


def test_from_python():
    result = coterie.run("local", "rotated-digits", rounds=40, patience=1)
    assert result.summary["best_round"] == result.summary["rounds"] - 1


def test_the_flag_and_the_file_of_a_finished_run(command: Command):
    done = command("run", "-a", "local", "--clients", 8, "--rounds", 40, "--patience", 2, "--name", "a", "--json").json
    assert done["best_round"] == done["rounds"] - 2
    assert done["stopped_early"]
    shown = command("show", "runs/a").out
    assert f"{done['best_round']} of {done['rounds']}, by validation" in shown
    command("run", "-a", "local", "--clients", 8, "--rounds", done["best_round"], "--name", "b", "--quiet")
    client = open_run("runs/a").federation.names[0]
    for name in ("a", "b"):
        assert command("export", f"runs/{name}", "--client", client, "-o", f"{name}.safetensors").code == 0
    one, other = (load_file(f"{name}.safetensors") for name in ("a", "b"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert "patience must be" in command("run", "--patience", 0).error


# ---- observers ----


@pytest.mark.parametrize(("every", "last"), [(1, 3), (2, 4)])
def test_an_observer_ends_a_run(every: int, last: int, tmp_path: Path):
    seen: list[int] = []

    def enough(row: dict[str, Any]) -> None:
        if row["round"] == 3:
            raise StopRun("good enough")

    both = Several([enough, lambda row: seen.append(row["round"])])
    done = start(setup("fedavg", rounds=9, evaluate_every=every), tmp_path, observer=both).summary
    assert done["rounds"] == last  # it is evaluated, as every last round
    assert done["stopped_early"]
    assert f"stopped after round {last}: good enough" in done["notes"]
    assert seen == list(range(1, last + 1))
    assert RunFolder.open(tmp_path / "run").rows()[-1]["accuracy"] is not None
