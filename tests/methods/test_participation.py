"""No call of a clustered method asks more clients than the participation says; clients are placed when first seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coterie.client.work import SGD
from coterie.data.scenario import Scenario
from coterie.data.sources.synthetic import Synthetic
from coterie.methods.base import algorithms
from coterie.methods.fesem import FeSEM
from coterie.methods.parts.centers import CenterMethod
from coterie.methods.parts.once import ClusterOnce
from coterie.methods.parts.start import enough_clients
from coterie.randomness import Rng
from coterie.runs.loop import Schedule
from coterie.settings import fields_of
from tests.helpers import ragged_federation, reserved_for, setup_of, trainer_of

CENTERED = sorted(key for key, cls in algorithms().items() if issubclass(cls, CenterMethod))
ONCE = sorted(key for key, cls in algorithms().items() if issubclass(cls, ClusterOnce))


def spied(trainer):
    """Every call of the run but those of evaluation: round, phase, step, clients, refs."""
    calls, call = [], trainer.engine.call

    def spy(step, cohort, refs=None, **more):
        if trainer.engine.phase != "evaluate":
            calls.append((trainer.engine.round, trainer.engine.phase, step.__name__, cohort.tolist(), refs))
        return call(step, cohort, refs=refs, **more)

    trainer.engine.call = spy
    return calls


def small(name, **more):
    cls = algorithms()[name]
    values = {"num_clusters": 2, "iterations": 3, "pseudo_samples": 2, "indicators": 2, "pretrain": 1} | more
    return cls(**{key: value for key, value in values.items() if key in fields_of(cls)})


@pytest.mark.parametrize("settings", [{}, {"init": "paper"}, {"privacy": "strong"}, {"first_models": "independent"}])
@pytest.mark.parametrize("name", [*CENTERED, *ONCE, "feddrift", "robust_tkm"])
def test_no_call_asks_more_clients_than_a_cohort(name, settings):
    if not settings.keys() <= set(fields_of(algorithms()[name])):
        pytest.skip("no such setting")
    method = small(name, **settings)
    federation = ragged_federation(40, reserve=reserved_for(method))
    trainer = trainer_of(setup_of(method, federation, schedule=Schedule(rounds=4, participation=0.25)))
    calls = spied(trainer)
    trainer._start()
    for number in range(1, 5):
        if isinstance(method, CenterMethod):  # as many repairs as there can be
            state = replace(trainer.state, pending=torch.ones(40, dtype=torch.bool), sent_in_rounds=10**4)
            if number == 3:  # everybody in cluster 0, and nobody near center 1
                centers = state.centers.clone()
                centers[1] = 100 * Rng.seed(0).normal(centers.shape[1])
                state = replace(state, labels=torch.zeros(40, dtype=torch.int64), centers=centers)
            trainer.state = state
        trainer._round(number)
    assert trainer.engine.cohort_size == 10
    assert max(len(clients) for _, _, _, clients, _ in calls) <= 10
    for _, _, _, clients, _ in calls:
        assert len(set(clients)) == len(clients)
    phases = {phase for _, phase, _, _, _ in calls}
    if isinstance(method, CenterMethod):
        assert "repair" in phases


def thousand():
    source = Synthetic(samples=12, shape=(1, 4, 4), classes=4, groups=4, noise=0.2)
    rng = Rng.seed(0)
    return Scenario.named("by_user", {}).partition(source.load(1000, rng, None), None, rng)


def test_fesem_over_a_thousand_clients_at_a_twentieth():
    trainer = trainer_of(
        setup_of(
            FeSEM(num_clusters=4),
            thousand(),
            work=SGD(lr=0.2, epochs=2, batch_size=5),
            schedule=Schedule(rounds=4, participation=0.05, evaluate_every=4),
        )
    )
    calls = spied(trainer)
    trainer._start()
    assert enough_clients(4, 1000) == 50
    # Three rounds of warm-up and one cohort that signs.
    assert [(step, len(clients)) for _, _, step, clients, _ in calls] == [
        ("train_member", 50),
        ("train_member", 50),
        ("train_member", 50),
        ("train_and_sign", 50),
    ]
    signed = set(calls[3][3])
    known = trainer.state.labels >= 0
    assert set(known.nonzero().flatten().tolist()) == signed  # the warm-up places nobody
    for number in range(1, 5):
        before, start = trainer.state, len(calls)
        trainer._round(number)
        cohort = next(clients for _, _, step, clients, _ in calls[start:] if step == "train_member")
        new = [client for client in cohort if before.labels[client] < 0]
        asked = [clients for _, phase, step, clients, _ in calls[start:] if phase == "round" and step == "sign"]
        assert asked == [new]
        assert len(new) > 25
        # In the same round they train from the center they were placed at, with the others.
        [refs] = [refs for _, phase, step, _, refs in calls[start:] if phase == "round" and step == "train_member"]
        assert len(cohort) == 50
        assert int(refs.min()) >= 0
        assert (trainer.state.labels[cohort] >= 0).all()
        absent = torch.ones(1000, dtype=torch.bool)
        absent[cohort] = False
        assert torch.equal(trainer.state.labels[absent], before.labels[absent])
    assert max(len(clients) for _, _, _, clients, _ in calls) == 50


def test_newly_placed_clients_join_their_kind():
    federation = thousand()
    trainer = trainer_of(
        setup_of(
            FeSEM(num_clusters=4),
            federation,
            work=SGD(lr=0.2, epochs=2, batch_size=5),
            schedule=Schedule(rounds=3, participation=0.05, evaluate_every=3),
        )
    )
    trainer.run()
    from sklearn.metrics import adjusted_rand_score

    met = trainer.state.labels >= 0
    assert 100 < int(met.sum()) < 250
    assert adjusted_rand_score(federation.groups[met], trainer.state.labels[met]) >= 0.95


def test_a_larger_start_calls_several_cohorts():
    """Twelve clusters need 120 clients: three cohorts of 50, none of them called twice."""
    trainer = trainer_of(
        setup_of(
            FeSEM(num_clusters=12, warmup=1),
            thousand(),
            work=SGD(lr=0.2, batch_size=5),
            schedule=Schedule(rounds=1, participation=0.05),
        )
    )
    calls = spied(trainer)
    trainer._start()
    cohorts = [clients for _, _, step, clients, _ in calls if step == "train_and_sign"]
    assert [len(clients) for clients in cohorts] == [50, 50, 50]
    assert len({client for clients in cohorts for client in clients}) == 150
