"""Extending a run: equal to one long run where the schedule allows, and a sentence where it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.client.work import SGD
from coterie.errors import RunError
from coterie.methods.base import algorithms
from coterie.runs.execution import execute
from coterie.runs.experiment import Experiment, resolve
from coterie.runs.extension import extended
from coterie.runs.folder import RunFolder
from coterie.runs.opening import stored_experiment
from coterie.runs.settings import Tables, merge


def tables(method: str, rounds: int, **more: dict[str, Any]) -> Tables:
    head = {"run": {"algorithm": method, "clients": 8, "rounds": rounds, "seed": 3}, "work": {"epochs": 1}}
    return merge(head, more)


def trained(method: str, rounds: int, out: Path, **more: dict[str, Any]) -> tuple[Experiment, RunFolder]:
    experiment = resolve(tables(method, rounds, **more))
    folder = RunFolder.create(out, f"{method}-{rounds}", "x", experiment.tables())
    execute(experiment, folder)
    return experiment, folder


EXACT = sorted(key for key, method in algorithms().items() if method().ending(3, 1.0) is None)
FEW = ("fedavg", "fesem", "ifca", "local", "scaffold")


def extend(folder: RunFolder, rounds: int) -> Any:
    with folder.held():
        return execute(extended(folder, stored_experiment(folder), rounds), folder)


@pytest.mark.parametrize("method", [key if key in FEW else pytest.param(key, marks=pytest.mark.slow) for key in EXACT])
def test_an_extended_run_equals_one_long_run(method: str, tmp_path: Path):
    more = {"run": {"participation": 0.5}}
    _, short = trained(method, 3, tmp_path / "a", **more)
    result = extend(short, 5)
    _, long = trained(method, 5, tmp_path / "b", **more)
    ends = [folder.load_checkpoint()[0] for folder in (short, long)]
    assert ends[0] is not None
    assert ends[1] is not None
    states = [end.tensors for end in ends]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert result.summary["accuracy"] == (long.summary() or {})["accuracy"]
    note = "extended from 3 to 5 rounds after round 3; the result equals that of one run of 5 rounds"
    assert result.summary["notes"][-1] == note
    assert len(short.rows()) == 5
    assert short.config()["run"]["rounds"] == 5


@pytest.mark.parametrize(
    ("method", "work", "why"),
    [
        ("coterie", {}, "coterie finishes personal models in the last rounds"),
        ("flux", {}, "flux ends its warm-up after a share of the rounds"),
        ("fedavg", {"schedule": "cosine"}, "its learning rates follow the schedule cosine over all rounds"),
    ],
)
def test_where_the_schedule_does_not_allow_it_the_run_says_so(
    method: str, work: dict[str, Any], why: str, tmp_path: Path
):
    _, folder = trained(method, 2, tmp_path, work=work)
    result = extend(folder, 3)
    expected = (
        f"extended from 2 to 3 rounds after round 2; the result may differ from that of one run of 3 rounds, {why}"
    )
    assert expected.replace("rounds, ", "rounds, because ", 1) in result.summary["notes"]


def test_rounds_before_the_end_are_those_of_a_longer_run():
    experiment = resolve(tables("coterie", 20))
    assert experiment.ending == (19, "coterie finishes personal models in the last rounds")
    assert resolve(tables("coterie", 20, run={"participation": 0.1})).ending == (
        11,
        "coterie finishes personal models in the last rounds",
    )
    assert resolve(tables("flux", 20, algorithm={"cluster_in": 4})).ending is None


def test_what_cannot_be_extended_is_left_as_it_is(tmp_path: Path):
    experiment, folder = trained("fedavg", 3, tmp_path)
    with pytest.raises(RunError, match="has done 3 rounds; --rounds must be larger. Got 2 instead."):
        extended(folder, experiment, 2)
    assert folder.summary() is not None
    assert extended(folder, experiment, 3) is experiment
    folder.drop_checkpoints()
    with pytest.raises(RunError, match="the checkpoint of its last round is not there"):
        extended(folder, experiment, 5)
    assert folder.config()["run"]["rounds"] == 3


def test_schedules_say_whether_they_depend_on_the_end():
    from coterie.client.schedules import depends_on_rounds

    assert [depends_on_rounds(SGD(schedule=name)) for name in ("constant", "step", "cosine")] == [False, False, True]
