"""Clients that do not answer: every method completes the run, and their state does not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from coterie.client.steps import choose, train
from coterie.engines.base import Request
from coterie.errors import ConfigError, Interrupted
from coterie.methods.base import Algorithm, algorithms
from coterie.methods.fedavg import FedAvg
from coterie.methods.fesem import FeSEM
from coterie.methods.local import Local
from coterie.methods.md_icfl import MDICFL
from coterie.methods.parts.own_parts import OwnParts
from coterie.randomness import Rng
from coterie.runs.execution import execute
from coterie.runs.folder import RunFolder
from coterie.runs.loop import Schedule
from coterie.settings import fields_of
from tests.helpers import assert_same, finished, outcome, ragged_federation, setup_of, trainer_of

METHODS = sorted(algorithms())
SMALL = {"num_clusters": 2, "iterations": 3, "pseudo_samples": 2, "indicators": 2}
LATE = "did not answer (simulated)"
FEDERATION = ragged_federation(reserve=2)


def make(name: str, **values: Any) -> Algorithm:
    """The method, two clusters, and little work on the server."""
    cls = algorithms()[name]
    return cls(**{key: value for key, value in SMALL.items() if key in fields_of(cls)} | values)


def half(dropout: float, rounds: int = 4, **more: Any) -> Schedule:
    return Schedule(rounds=rounds, participation=0.5, dropout=dropout, **more)


@pytest.mark.parametrize("name", METHODS)
class TestEveryMethod:
    def test_gets_through_with_half_of_the_clients_and_stragglers(self, name):
        trainer = finished(setup_of(make(name), FEDERATION, schedule=half(0.3)))
        summary = trainer.summary()
        assert summary["rounds"] == 4
        assert summary["failures"] == len(trainer.engine.failures) > 0
        assert {failure.reason for failure in trainer.engine.failures} == {LATE}
        assert bool(torch.isfinite(trainer.state.centers).all())
        clusters = trainer.state.num_clusters or trainer.engine.num_clients
        assert bool(((trainer.state.labels >= -1) & (trainer.state.labels < clusters)).all())

    def test_the_same_clients_fail_on_both_engines(self, name):
        loop = finished(setup_of(make(name), FEDERATION, schedule=half(0.3, 2), engine="loop"))
        fast = finished(setup_of(make(name), FEDERATION, schedule=half(0.3, 2)))

        def failed(trainer: Any) -> list[Any]:
            return sorted(tuple(vars(failure).values()) for failure in trainer.engine.failures)

        assert failed(loop) == failed(fast)
        one, other = outcome(loop), outcome(fast)
        assert one["labels"] == other["labels"]
        if isinstance(loop.algorithm, OwnParts):  # to be evaluated, all of a block train a part if one has none
            for ledger in (one["ledger"], other["ledger"]):
                del ledger["gradients"]["evaluate"], ledger["by_step"]["evaluate/served.evaluate"]["gradients"]
        assert one["ledger"] == other["ledger"]
        assert_same(one["state"], other["state"], exact=False, tolerance=1e-9)

    def test_a_round_without_answers_changes_nothing(self, name):
        trainer = trainer_of(setup_of(make(name, **_unguarded(name)), FEDERATION))
        trainer._start()
        trainer._round(1)
        before, memory = trainer.state, {k: v.clone() for k, v in trainer.engine.memory_tensors().items()}
        trainer.engine.dropout = 1.0
        trainer._round(2)
        assert torch.equal(trainer.state.labels, before.labels)
        assert torch.equal(trainer.state.centers, before.centers)
        assert_same(trainer.engine.memory_tensors(), memory)
        assert trainer.progress.rows[-1]["failures"] >= len(trainer.federation)
        trainer.engine.dropout = 0.0
        trainer._round(3)
        assert trainer.progress.rows[-1]["failures"] == 0
        assert trainer.summary()["clients_met"] == len(trainer.federation)

    def test_completes_if_no_client_ever_answers(self, name):
        trainer = trainer_of(setup_of(make(name), FEDERATION, schedule=half(0.0, 2)))
        trainer.engine.dropout = 1.0
        trainer.run()
        assert bool(torch.isfinite(trainer.state.centers).all())
        assert not any("lr too large" in note for note in trainer.engine.notes)

    def test_resumed_equals_uninterrupted(self, name, tmp_path):
        what = setup_of(make(name), FEDERATION, schedule=half(0.3, 3))
        whole = finished(what)
        folder = RunFolder.create(tmp_path, "run", "", {"run": {}})
        with pytest.raises(Interrupted, match="after round 1 of 3"):
            trainer_of(what, folder, should_stop=lambda: True).run()
        rest = trainer_of(what, folder)
        checkpoint, _ = folder.load_checkpoint()
        assert checkpoint is not None
        rest.restore(checkpoint)
        rest.run()
        folder.unlock()
        assert_same(outcome(whole), outcome(rest))
        assert whole.engine.failures == rest.engine.failures


def _unguarded(name: str) -> dict[str, Any]:
    return {"guard": False} if "guard" in fields_of(algorithms()[name]) else {}


def test_a_client_that_fails_keeps_its_label_and_its_memory():
    trainer = trainer_of(setup_of(Local(), FEDERATION, schedule=Schedule(rounds=2, dropout=0.5)))
    trainer._start()
    trainer._round(1)
    first = {failure.client for failure in trainer.engine.failures}
    assert 0 < len(first) < len(FEDERATION)
    for client, name in enumerate(FEDERATION.names):
        assert (int(trainer.state.labels[client]) == -1) == (name in first)
        assert bool(trainer.engine.memory_tensors()["present.model"][client]) == (name not in first)


def test_the_share_is_the_one_asked_for_and_changes_by_round():
    trainer = finished(setup_of(FedAvg(), FEDERATION, schedule=Schedule(rounds=30, dropout=0.3)))
    failures = trainer.engine.failures
    assert 0.2 < len(failures) / (30 * len(FEDERATION)) < 0.4
    by_round = [frozenset(f.client for f in failures if f.round == number) for number in range(1, 31)]
    assert len(set(by_round)) > 10
    assert sum(row["failures"] for row in trainer.progress.rows) == len(failures)


def test_stragglers_get_the_model_and_send_nothing():
    all_there = finished(setup_of(FedAvg(), FEDERATION)).engine.ledger.totals()
    trainer = finished(setup_of(FedAvg(), FEDERATION, schedule=Schedule(rounds=3, dropout=0.3)))
    some_late = trainer.engine.ledger.totals()
    assert some_late["down"] == all_there["down"]
    answered = 3 * len(FEDERATION) - len(trainer.engine.failures)
    assert some_late["up"] * 3 * len(FEDERATION) == all_there["up"] * answered


def test_the_mean_is_over_those_who_answer():
    late = trainer_of(setup_of(FedAvg(), FEDERATION, schedule=Schedule(rounds=1, dropout=0.4)))
    late.run()
    failed = {failure.client for failure in late.engine.failures}
    there = torch.tensor([i for i, name in enumerate(FEDERATION.names) if name not in failed])
    other = trainer_of(setup_of(FedAvg(), FEDERATION))
    other._start()
    other.engine.begin(1, "round")
    rng = other._rng.at("round", 1).at("work")
    after = other.algorithm.round(other.state, other.engine, there, rng)
    assert torch.allclose(after.centers, late.state.centers, atol=1e-12)


def test_evaluation_and_repair_always_get_an_answer():
    trainer = trainer_of(setup_of(FeSEM(num_clusters=2), FEDERATION))
    trainer.engine.dropout = 1.0
    for phase, late in (("start", True), ("round", True), ("repair", False), ("evaluate", False)):
        trainer.engine.begin(1, phase)
        request = Request(train, trainer.engine.everyone(), Rng.seed(0), trainer.engine.task.work)
        assert bool(trainer.engine.is_late(request).all()) == late


def test_the_same_call_is_late_alike_and_another_call_of_the_same_step_is_not():
    """The start calls one step several times: were it the same clients each time, some would never be seen."""
    federation = ragged_federation(200)
    trainer = trainer_of(setup_of(FedAvg(), federation, schedule=Schedule(rounds=1, dropout=0.3)))
    engine = trainer.engine
    engine.begin(0, "start")

    def late(rng, cohort=None, step=train):
        return engine.is_late(Request(step, engine.everyone() if cohort is None else cohort, rng, engine.task.work))

    calls = [late(Rng.seed(0).at("warm-up", number)) for number in range(4)]
    assert all(0.2 < float(found.double().mean()) < 0.4 for found in calls)
    both = (calls[0] & calls[1]).double().mean()
    assert 0.04 < float(both) < 0.15  # 0.3 * 0.3
    assert not torch.stack(calls).all(0).sum() > 10
    again = late(Rng.seed(0).at("warm-up", 2))
    assert torch.equal(again, calls[2])
    order = Rng.seed(1).permutation(200)
    assert torch.equal(late(Rng.seed(0).at("warm-up", 2), order), calls[2][order])
    assert not torch.equal(late(Rng.seed(0).at("warm-up", 2), step=choose), calls[2])


def test_dropout_hits_other_clients_in_every_call_of_the_start():
    trainer = trainer_of(setup_of(FeSEM(num_clusters=2), ragged_federation(40), schedule=Schedule(dropout=0.3)))
    call, late = trainer.engine.call, []

    def spy(step, cohort, **more):
        before = len(trainer.engine.failures)
        yield from call(step, cohort, **more)
        late.append(frozenset(failure.client for failure in trainer.engine.failures[before:]))

    trainer.engine.call = spy
    trainer._start()
    assert len(late) == 4  # three of the warm-up, one to sign
    assert all(late)
    assert len(set(late)) == 4
    assert not frozenset.intersection(*late)


def test_a_second_question_that_fails_keeps_the_old_label():
    method = MDICFL(num_clusters=2, privacy="strong", iterations=3, pseudo_samples=2, guard=False)
    trainer = trainer_of(setup_of(method, FEDERATION, schedule=Schedule(rounds=3, dropout=0.4)))
    trainer._start()
    # Everyone is in the wrong cluster: who answers both questions goes home, and nobody else moves.
    right = finished(setup_of(method, FEDERATION, schedule=Schedule(rounds=1))).state
    everyone = 1 - right.labels
    trainer.state = replace(trainer.state, centers=right.centers, labels=everyone)
    trainer._round(1)
    failed = {
        kind: {f.client for f in trainer.engine.failures if f.round == 1 and kind in f.step}
        for kind in ("train_only", "nearest")
    }
    assert failed["nearest"]
    assert not failed["nearest"] & failed["train_only"]  # nobody is asked the second who did not answer the first
    silent = torch.tensor([name in failed["nearest"] | failed["train_only"] for name in FEDERATION.names])
    assert torch.equal(trainer.state.labels[silent], everyone[silent])
    assert bool((trainer.state.labels[~silent] != everyone[~silent]).any())


def test_a_run_counts_its_failures(tmp_path):
    setup = setup_of(FedAvg(), FEDERATION, schedule=Schedule(rounds=3, dropout=0.3))
    folder = RunFolder.create(tmp_path, "run", "", setup.tables())
    summary = execute(setup, folder).summary
    written = folder.read_json("artifacts/failures.json")
    assert summary["failures"] == len(written) > 0
    assert written[0]["reason"] == LATE


@pytest.mark.parametrize("value", [-0.1, 1.0, 2.0])
@pytest.mark.parametrize("field", ["dropout", "unseen"])
def test_shares_out_of_range_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field} of Schedule must be a number >= 0 and < 1. Got {value}"):
        finished(setup_of(FedAvg(), FEDERATION, schedule=Schedule(**{field: value})))
