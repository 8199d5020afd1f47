"""Many runs: sharing what is equal, going on after an error, and several processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.errors import Interrupted, RunError
from coterie.runs import batch
from coterie.runs.batch import Case, Clock, Loader, Outcome, check_cases, check_folders, run_cases
from coterie.runs.experiment import resolve_each
from coterie.runs.folder import RunFolder
from coterie.runs.settings import apply_set

# A fixed plan: nothing is compiled or measured, and sums do not depend on the number of threads.
TINY = ("run.clients=8", "run.rounds=2", "work.epochs=1", "engine.plan=layers")


def cases_of(names: list[str], seeds: list[int], *settings: str, situation: str = "") -> list[Case]:
    found = resolve_each(apply_set({}, [*TINY, *settings]), names, seeds)
    head = (("situation", situation),) if situation else ()
    return [Case((*head, ("method", name)), experiment) for (name, _), experiment in found.items()]


def results(outcomes: list[Outcome]) -> dict[str, Any]:
    """What does not depend on time, by title."""
    found = {}
    for outcome in outcomes:
        assert outcome.summary is not None, outcome.problem
        found[outcome.case.title] = {k: outcome.summary[k] for k in ("accuracy", "ari", "cluster_sizes", "digest")}
    return found


def test_places_and_titles():
    (case,) = cases_of(["fesem"], [3])
    assert (case.place, case.title) == ("fesem-s3", "fesem seed 3")
    (case,) = cases_of(["fesem"], [3], situation="drift")
    assert (case.place, case.title) == ("drift/fesem-s3", "drift fesem seed 3")


def test_cases_with_the_same_settings_run_once(tmp_path: Path):
    cases = [
        *cases_of(["fedavg"], [0], "algorithm.num_clusters=2", situation="a"),
        *cases_of(["fedavg"], [0], "algorithm.num_clusters=3", situation="b"),  # fedavg has no clusters
    ]
    outcomes = list(run_cases(cases, tmp_path))
    assert [outcome.case.title for outcome in outcomes] == ["a fedavg seed 0", "b fedavg seed 0"]
    assert outcomes[0].summary == outcomes[1].summary
    assert [path.parent.name for path in tmp_path.glob("*/*/")] == ["a"]


def test_processes_compute_what_one_process_does(tmp_path: Path):
    cases = cases_of(["fedavg", "fesem", "ifca"], [0, 1])
    alone = results(list(run_cases(cases, tmp_path / "one")))
    together = results(list(run_cases(cases, tmp_path / "two", jobs=2)))
    assert together == alone
    again = list(run_cases(cases, tmp_path / "two", jobs=2))
    assert all(outcome.was_there for outcome in again)
    assert results(again) == alone


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = batch.execute

    def execute(experiment: Any, folder: Any, *rest: Any) -> Any:
        if experiment.algorithm_name == "fesem":
            folder.discard()
            raise ZeroDivisionError("by nobody")
        return real(experiment, folder, *rest)

    monkeypatch.setattr(batch, "execute", execute)
    first, second, third = run_cases(cases_of(["fedavg", "fesem", "ifca"], [0]), tmp_path)
    assert second.summary is None
    assert second.problem == "ZeroDivisionError: by nobody"
    assert first.summary
    assert third.summary


def test_a_process_that_ends_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = """
import multiprocessing, os
from torch import nn
def net(shape, outputs):
    if multiprocessing.parent_process() is not None:
        os._exit(7)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))
"""
    (tmp_path / "ends.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    cases = [
        *cases_of(["fedavg"], [0], "run.model=ends:net", situation="bad"),
        *cases_of(["fedavg", "local"], [0], situation="good"),
    ]
    found = {outcome.case.title: outcome for outcome in run_cases(cases, tmp_path / "runs", jobs=2)}
    assert found["bad fedavg seed 0"].problem == "its process ended with code 7."
    assert found["good fedavg seed 0"].summary
    assert found["good local seed 0"].summary


TELLS = """
import os
from pathlib import Path
from torch import nn
def net(shape, outputs):
    maps = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    own = [os.path.basename(name) for name in maps if "/samples-" in name]
    Path(f"told-{os.getpid()}").write_text(f"{os.environ.get('CUDA_VISIBLE_DEVICES')} {' '.join(sorted(set(own)))}")
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_are_used_again_share_the_samples_and_take_gpus_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "tells.py").write_text(TELLS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7, GPU-5,GPU-9")
    cases = cases_of(["fedavg", "local", "fesem"], [0, 1], "run.model=tells:net")
    loader = Loader()
    check_cases(cases, loader)
    (tmp_path / f"told-{os.getpid()}").unlink()
    assert all(outcome.summary for outcome in run_cases(cases, tmp_path / "runs", jobs=2, loader=loader))
    told = [path.read_text().split() for path in tmp_path.glob("told-*")]
    assert sorted(gpu for gpu, *_ in told) == ["GPU-5", "GPU-7"]  # two processes ran six cases
    assert {len(files) for _, *files in told} == {1}
    assert told[0][1] == told[1][1]  # one file, also for two seeds


@pytest.mark.parametrize(
    ("devices", "visible", "expected"),
    [(["auto", "cuda"], None, ["0", "1"]), (["auto"], "1,3", ["1", "3"]), (["auto", "cuda:1"], None, [None])],
)
def test_gpus_are_taken_in_turn_unless_a_case_names_one(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], visible: str | None, expected: list[str | None]
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cases = [case for device in devices for case in cases_of(["fedavg"], [0], f"run.device={device}")]
    assert batch.gpus_of(cases) == expected


def test_one_gpu_is_not_placed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert batch.gpus_of(cases_of(["fedavg"], [0])) == [None]


def test_samples_drawn_from_the_seed_are_not_shared_by_seeds():
    first, second = cases_of(["fedavg"], [0, 1], "run.dataset=synthetic")
    assert first.samples_key != second.samples_key
    first, second = cases_of(["fedavg"], [0, 1])
    assert first.samples_key == second.samples_key
    assert first.data_key != second.data_key


def test_without_space_every_process_loads_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(path: Path, samples: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(batch, "save_samples", full)
    (case,) = cases_of(["fedavg"], [0])
    loader = Loader()
    digest = loader.federation(case).digest()
    loader.share(tmp_path)
    assert loader.federation(case).digest() == digest


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_stopped_batch_continues_to_the_same_results(tmp_path: Path, jobs: int):
    cases = cases_of(["fedavg", "fesem"], [0], "run.rounds=6", "run.checkpoint_every=0")
    whole = results(list(run_cases(cases, tmp_path / "whole")))
    root = tmp_path / "parts"

    def is_under_way() -> bool:
        return any(path.stat().st_size for path in root.glob("*/rounds.jsonl"))

    with pytest.raises(Interrupted):
        list(run_cases(cases, root, jobs=jobs, should_stop=is_under_way))
    assert len(list(root.glob("*/summary.json"))) < 2
    assert results(list(run_cases(cases, root, jobs=jobs))) == whole


def test_a_folder_that_was_never_complete_is_made_again(tmp_path: Path):
    cases = cases_of(["fedavg"], [0])
    (tmp_path / "fedavg-s0" / "artifacts").mkdir(parents=True)
    (outcome,) = run_cases(cases, tmp_path)
    assert outcome.summary


def test_other_settings_are_refused_with_the_difference(tmp_path: Path):
    cases = cases_of(["fedavg"], [0])
    list(run_cases(cases, tmp_path))
    check_folders(cases, tmp_path)
    with pytest.raises(RunError, match=r"work.lr is 0.2 there and 0.5 here. Choose another --name"):
        check_folders(cases_of(["fedavg"], [0], "work.lr=0.5"), tmp_path)


def test_samples_and_federations_are_shared_by_neighbours():
    loader = Loader()
    first, second = cases_of(["fedavg", "fesem"], [0])
    (skewed,) = cases_of(["fedavg"], [0], "scenario.quantity=1.0")
    federation = loader.federation(first)
    assert loader.federation(second) is federation
    assert loader.federation(skewed).digest() == skewed.experiment.federation().digest()
    assert loader.federation(skewed).x is federation.x


def test_what_cannot_work_is_found_before_the_first_run():
    with pytest.raises(RunError, match="Situation 'big': .*num_clusters"):
        check_cases(cases_of(["fesem"], [0], "algorithm.num_clusters=9", situation="big"), Loader())


def test_the_time_left_counts_only_runs_of_this_call(monkeypatch: pytest.MonkeyPatch):
    (case,) = cases_of(["fedavg"], [0])
    now = [0.0]
    monkeypatch.setattr(batch.time, "monotonic", lambda: now[0])
    clock = Clock(10)
    assert clock.left(Outcome(case, {}, was_there=True)) is None
    now[0] = 30  # processes start
    assert clock.left(Outcome(case, {})) is None
    now[0] = 32
    assert clock.left(Outcome(case, {})) == 2 * 7


def test_a_run_of_an_earlier_version_has_the_defaults_of_fields_that_it_did_not_write(tmp_path):
    (case,) = cases_of(["fesem"], [0])
    folder = RunFolder.create(tmp_path, case.place, "", case.tables)
    folder.unlock()
    path = folder.path / "config.toml"
    lines = path.read_text().splitlines()
    old = [line for line in lines if not line.startswith(("admission", "momentum"))]
    assert len(old) == len(lines) - 2
    path.write_text("\n".join(old))
    check_folders([case], tmp_path)
    old.insert(old.index("[work]") + 1, "momentum = 0.5")
    path.write_text("\n".join(old))
    with pytest.raises(RunError, match="work.momentum is 0.5 there and 0.0 here"):
        check_folders([case], tmp_path)
