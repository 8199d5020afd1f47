"""The success of a backdoor, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

import coterie
from coterie.engines.attacks import TARGET, triggered
from coterie.methods.fedavg import FedAvg
from coterie.runs.backdoor import backdoor_success
from coterie.runs.loop import Schedule
from tests.helpers import finished, setup_of


def test_success_is_the_share_of_triggered_samples_of_other_classes_taken_for_the_target():
    run = finished(setup_of(FedAvg(), schedule=Schedule(rounds=2, attack="backdoor", attackers=0.3)))
    federation, engine = run.federation, run.engine
    hits = []
    for client in (~run.attack.attackers).nonzero().flatten().tolist():
        shown = replace(federation, x=triggered(federation.x, federation.x.max()))
        x, y = shown.samples(client, "test")
        x = x[y != TARGET].to(engine.dtype)
        outputs = engine.forward(run.state.centers[:1], x)[0]
        hits += (outputs.argmax(1) == TARGET).tolist()
    assert backdoor_success(run) == pytest.approx(sum(hits) / len(hits))
    assert backdoor_success(finished(setup_of(FedAvg()))) is None


def test_the_summary_has_it_and_a_plain_mean_is_fooled():
    summary = coterie.run("fedavg", "rotated-digits", rounds=15, attack="backdoor", attackers=0.3).summary
    assert summary["attack"]["success"] > 0.2
    assert "success" not in coterie.run("local", rounds=1, attack="label_flip").summary["attack"]
