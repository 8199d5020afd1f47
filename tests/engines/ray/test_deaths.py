"""Workers that die: real processes, killed. `make test-ray`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from coterie.engines.ray import require_ray
from coterie.runs.experiment import merge, resolve
from coterie.runs.folder import RunFolder
from coterie.runs.loop import Schedule
from tests.engines.ray.runs import MARKS, WORKERS, clients_of, kill_in_round, process_of
from tests.helpers import assert_same, finished, outcome, setup_of, trainer_of
from tests.test_contracts import make

pytestmark = MARKS


def digits(engine, **settings):
    head = {"algorithm": "fesem", "dataset": "rotated-digits", "rounds": 5, "engine": engine}
    return resolve(merge({"run": head, "engine": settings})).loaded()


def test_a_worker_killed_in_the_middle_of_round_3():
    whole = finished(digits("vectorized"))
    trainer = trainer_of(digits("ray", workers=2, cpus=1, chunk=4))
    engine = trainer.engine
    theirs = set(clients_of(engine, 1))
    killed = kill_in_round(engine, worker=1, round=3, replies=3)
    trainer.run()
    assert len(killed) == 1
    failures = engine.failures
    assert failures
    assert {failure.round for failure in failures} == {3}
    assert {failure.client for failure in failures} < theirs  # some had answered
    assert all(f"Ray worker 1 (process {killed[0]} on " in failure.reason for failure in failures)
    assert trainer.progress.rows[2]["failures"] == len(failures)
    assert trainer.progress.round == 5
    assert trainer.state.labels.tolist() == whole.state.labels.tolist()
    assert any("round 3: Ray worker 1" in note and "was started again" in note for note in engine.notes)
    assert process_of(engine, 1) not in (killed[0], os.getpid())


def test_what_its_clients_remember_comes_back_from_the_checkpoint(tmp_path):
    schedule = Schedule(rounds=4, checkpoint_every=0.0)
    folder = RunFolder.create(tmp_path, "run", "", {"run": {}})
    trainer = trainer_of(setup_of(make("local"), engine="ray", engine_settings=WORKERS, schedule=schedule), folder)
    engine = trainer.engine
    lost = engine._owner == 1
    killed = kill_in_round(engine, worker=1, round=3, replies=0)
    trainer.run()
    folder.unlock()
    assert killed
    assert [failure.client for failure in engine.failures] == clients_of(engine, 1)
    assert any("what its clients remember is that of round 2" in note for note in engine.notes)

    expected = trainer_of(setup_of(make("local"), schedule=schedule))  # the same clients do not answer in round 3
    late = expected.engine
    late.is_late = lambda request: lost[request.cohort] & (late.round == 3) & (late.phase == "round")
    expected.run()
    one, other = outcome(trainer), outcome(expected)
    assert one["labels"] == other["labels"]
    assert_same(one["memory"], other["memory"], exact=False, tolerance=1e-9)


def test_every_worker_may_die_and_the_run_goes_on():
    trainer = trainer_of(setup_of(make("fedavg"), engine="ray", engine_settings=WORKERS))
    engine = trainer.engine
    killed = [kill_in_round(engine, worker, round=2, replies=0) for worker in (0, 1)]
    trainer.run()
    assert all(killed)
    assert len(engine.failures) == 9
    assert trainer.progress.rows[2]["failures"] == 0
    assert bool(torch.isfinite(trainer.state.centers).all())


@pytest.fixture
def two_nodes():
    require_ray(None)
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    node = cluster.add_node(num_cpus=2)
    yield cluster, node
    ray.shutdown()
    cluster.shutdown()


def parent_of(process):
    status = Path(f"/proc/{process}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))


def test_two_nodes_one_of_which_dies(two_nodes):
    cluster, node = two_nodes
    settings = {"precision": "float64", "address": cluster.address, "workers": 2, "cpus": 1}
    whole = finished(setup_of(make("fesem"), schedule=Schedule(rounds=4)))
    trainer = trainer_of(setup_of(make("fesem"), engine="ray", engine_settings=settings, schedule=Schedule(rounds=4)))
    engine = trainer.engine
    nodes = {parent_of(process_of(engine, worker)) for worker in (0, 1)}  # Ray starts one such process per node
    assert len(nodes) == 2
    ask, removed = engine.ask, []

    def listening(request, positions):
        if engine.round == 3 and engine.phase == "round" and not removed:
            removed.append(cluster.remove_node(node, allow_graceful=False))
        yield from ask(request, positions)

    engine.ask = listening
    trainer.run()
    assert removed
    assert {failure.round for failure in engine.failures} == {3}
    assert trainer.state.labels.tolist() == whole.state.labels.tolist()
    assert trainer.progress.rows[3]["failures"] == 0
