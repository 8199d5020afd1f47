"""Ray on this machine: results are those of the vectorized engine. `make test-ray`."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from coterie.client.steps import Answer, train
from coterie.data.federation import Move
from coterie.data.transforms import Noise, Rotate
from coterie.engines.ray import require_ray
from coterie.errors import ConfigError, CoterieError, EngineError, Interrupted
from coterie.methods.base import algorithms
from coterie.randomness import Rng
from coterie.runs.execution import execute
from coterie.runs.experiment import merge, resolve
from coterie.runs.folder import RunFolder
from coterie.runs.loop import Schedule
from coterie.runs.opening import open_run
from tests.engines.ray.runs import MARKS, WORKERS
from tests.helpers import assert_same, finished, outcome, ragged_federation, setup_of, trainer_of
from tests.test_contracts import make

pytestmark = MARKS


def on_both(algorithm, federation=None, chunk=None, **changes):
    """The same run on Ray workers and in this process."""
    chunks = {} if chunk is None else {"chunk": chunk}
    ours = finished(setup_of(algorithm, federation, engine="ray", engine_settings=WORKERS | chunks, **changes))
    theirs = finished(setup_of(algorithm, federation, engine_settings={"precision": "float64"} | chunks, **changes))
    return ours, theirs


def assert_equal_results(ours, theirs):
    one, other = outcome(ours), outcome(theirs)
    assert one["labels"] == other["labels"]
    assert one["ledger"] == other["ledger"]
    assert_same(one["state"], other["state"], exact=False, tolerance=1e-9)
    assert_same(one["memory"], other["memory"], exact=False, tolerance=1e-9)
    for mine, its in zip(one["rows"], other["rows"], strict=True):
        assert mine["accuracy"] == pytest.approx(its["accuracy"])
        assert mine["failures"] == its["failures"]
    assert sorted(map(str, ours.engine.failures)) == sorted(map(str, theirs.engine.failures))


@pytest.fixture(scope="module")
def processes():
    return {}


@pytest.fixture
def same_processes(processes, monkeypatch):
    """Workers are started once and loaded for each run: most of a start is importing torch."""
    from coterie.engines.ray.engine import RayEngine

    start = RayEngine._start

    def start_once(engine, seat):
        if seat.number not in processes:
            start(engine, seat)
            processes[seat.number] = seat.actor
        seat.actor = processes[seat.number]

    monkeypatch.setattr(RayEngine, "_start", start_once)


@pytest.mark.usefixtures("same_processes")
@pytest.mark.parametrize("name", sorted(algorithms()))
def test_every_method_gives_what_vectorized_gives(name):
    assert_equal_results(*on_both(make(name), chunk=2))


def test_calls_inside_a_call():
    assert_equal_results(*on_both(make("md_icfl", privacy="strong"), chunk=1))


def test_simulated_failures_attacks_and_robust_means():
    schedule = Schedule(rounds=3, participation=0.7, dropout=0.2, attack="sign_flip", corrupt=0.1)
    ours, theirs = on_both(make("fesem", robust="median"), schedule=schedule)
    assert theirs.engine.failures
    assert_equal_results(ours, theirs)


def test_clients_that_drift_and_random_views():
    made = ragged_federation()
    view, later = torch.arange(9) % 2, (torch.arange(9) + 1) % 3
    moves = (Move(2, later, later), Move(3, view, view))
    federation = replace(made, views=((), (Noise(0.5),), (Rotate(90),)), view=view, groups=view, moves=moves)
    assert_equal_results(*on_both(make("coterie"), federation))


def test_held_out_clients_and_a_finished_run_from_its_folder(tmp_path):
    head = {"algorithm": "coterie", "dataset": "rotated-digits", "clients": 8, "rounds": 2, "unseen": 0.3}
    made = resolve(merge({"run": head | {"engine": "ray"}, "engine": WORKERS}))
    folder = RunFolder.create(tmp_path, "run", "run", made.tables())
    ours = execute(made, folder)
    theirs = execute(resolve(merge({"run": head, "engine": {"precision": "float64"}})))
    one, other = ours.summary["unseen"], theirs.summary["unseen"]
    assert one.pop("accuracy") == pytest.approx(other.pop("accuracy"))
    assert one == other
    again = open_run(folder.path)  # without workers
    assert again.labels.tolist() == ours.labels.tolist()
    for name, tensor in again.client_state_dict(0).items():
        assert torch.allclose(tensor, ours.client_state_dict(0)[name])


@pytest.mark.parametrize("name", ["local", "coterie"])
def test_a_resumed_run_equals_one_that_was_not_stopped(name, tmp_path):
    what = setup_of(make(name), engine="ray", engine_settings=WORKERS, schedule=Schedule(rounds=3, participation=0.6))
    folder = RunFolder.create(tmp_path, "run", "run", what.tables())
    stops = iter([True])
    with pytest.raises(Interrupted):
        execute(what, folder, should_stop=lambda: next(stops, False))
    rest = execute(what, RunFolder.open(folder.path))
    whole = execute(what)
    assert_same(outcome(whole._trainer), outcome(rest._trainer))


def test_fesem_on_rotated_digits_from_the_command_line(tmp_path, capsys):
    from coterie.cli.main import main

    found = {}
    for engine, more in (("vectorized", []), ("ray", ["--set", "engine.workers=2"])):
        command = ["run", "-a", "fesem", "-d", "rotated-digits", "--rounds", "5", "--engine", engine, "--json"]
        with pytest.raises(SystemExit) as ended:
            main([*command, *more, "--out", str(tmp_path), "--name", engine])
        assert ended.value.code in (0, None)
        found[engine] = json.loads(capsys.readouterr().out)
    ours, theirs = found["ray"], found["vectorized"]
    labels = [np.load(tmp_path / name / "labels.npy") for name in found]
    assert np.array_equal(*labels)
    assert ours["cluster_sizes"] == theirs["cluster_sizes"]
    assert ours["ari"] == theirs["ari"]
    assert ours["bytes"] == theirs["bytes"]
    for mean in ("micro", "macro"):
        assert ours["accuracy"][mean] == pytest.approx(theirs["accuracy"][mean], abs=0.001)


def test_steps_of_any_origin_are_sent_and_calls_may_be_left():
    trainer = trainer_of(setup_of(make("fedavg"), engine="ray", engine_settings=WORKERS | {"chunk": 1}))
    engine = trainer.engine

    def own(block, models, work, scale, shift):
        return Answer(value=models.rows()[:, :1] * scale + shift.unsqueeze(1))

    models = torch.arange(6.0, dtype=torch.float64).reshape(3, 2)
    refs, shift = torch.arange(9) % 3, torch.arange(9.0, dtype=torch.float64)
    values = torch.zeros(9, dtype=torch.float64)
    order = []
    call = {"models": models, "refs": refs, "rng": Rng.seed(0)}
    more = {"payload": {"scale": torch.tensor(2.0)}, "each": {"shift": shift}}
    for chunk in engine.call(own, engine.everyone(), **call, **more):
        values[chunk.positions] = chunk.answer["value"][:, 0]
        order += chunk.clients.tolist()
    assert values.tolist() == (models[refs, 0] * 2 + shift).tolist()
    owner = [int(engine._owner[client]) for client in order]
    assert owner[:6] == [0, 1, 0, 1, 0, 1]  # in turns, whoever is faster

    wide = {"models": engine.initial().unsqueeze(0), "refs": torch.zeros(9, dtype=torch.int64), "rng": Rng.seed(0)}
    first = next(engine.call(train, engine.everyone(), **wide))
    again = next(engine.call(train, engine.everyone(), **wide))
    assert torch.equal(first.answer.params, again.answer.params)


def test_a_step_that_fails_everywhere_is_an_error():
    engine = trainer_of(setup_of(make("fedavg"), engine="ray", engine_settings=WORKERS)).engine

    def broken(block, models, work):
        raise ValueError("always")

    with pytest.raises(EngineError, match="failed at every client: ValueError: always"):
        list(engine.call(broken, engine.everyone(), rng=Rng.seed(0)))


def test_ray_on_this_machine_listens_on_loopback_only():
    engine = trainer_of(setup_of(make("fedavg"), engine="ray", engine_settings=WORKERS)).engine
    assert not engine.notes
    import ray  # by the engine first: Ray reads its environment when it is imported

    assert {node["NodeManagerAddress"] for node in ray.nodes()} == {"127.0.0.1"}


def test_more_workers_than_clients_are_refused():
    with pytest.raises(ConfigError, match="engine.workers=10 is more than the 9 clients"):
        trainer_of(setup_of(make("fedavg"), engine="ray", engine_settings={"workers": 10}))


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("cluster", "engine.address must be 'auto' or HOST:PORT. Got 'cluster' instead."),
        ("127.0.0.1:9", "Ray cannot be reached at engine.address=127.0.0.1:9: .*; start a cluster with 'ray start"),
    ],
)
def test_a_cluster_that_is_not_there_is_one_sentence(address, sentence):
    require_ray(None)
    import ray

    ray.shutdown()
    with pytest.raises(CoterieError, match=sentence):
        trainer_of(setup_of(make("fedavg"), engine="ray", engine_settings={"address": address}))
