"""Simulated attacks: who attacks, what arrives, what is refused, and who is scored."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

import coterie
from coterie.client.block import Models
from coterie.client.steps import Answer
from coterie.engines.attacks import (
    TARGET,
    Attack,
    FlipLabels,
    inner_product,
    little_is_enough,
    min_max,
    triggered,
)
from coterie.engines.base import too_large
from coterie.engines.settings import AttackKind
from coterie.errors import ConfigError
from coterie.methods.base import algorithms
from coterie.methods.fedavg import FedAvg
from coterie.methods.fesem import FeSEM
from coterie.randomness import Rng, name_keys
from coterie.runs.loop import Schedule, attack_of
from tests.convex import problem
from tests.helpers import assert_same, finished, outcome, ragged_federation, reserved_for, setup_of, trainer_of

KEYS = name_keys(tuple(f"c{i}" for i in range(10)))


def attack(kind="sign_flip", share=0.3, corrupt=0.0, seed=0):
    return Attack.of(KEYS, kind, share, corrupt, seed)


def test_attackers_are_a_share_that_depends_on_seed_and_key():
    found = attack().attackers
    assert int(found.sum()) == 3
    order = torch.tensor([3, 1, 4, 0, 5, 9, 2, 6, 8, 7])
    assert torch.equal(Attack.of(KEYS[order], "gaussian", 0.3, 0.0, 0).attackers, found[order])
    assert any(not torch.equal(attack(seed=s).attackers, found) for s in range(1, 4))
    assert not attack("none").attackers.any()
    assert attack("none").is_none
    assert not attack("none", corrupt=0.1).is_none


def test_sign_flip_sends_the_opposite():
    attacking = attack()
    start = torch.arange(20.0).reshape(10, 2)
    sent = Models(start, torch.arange(10))
    answer = Answer(params=start + 1.0, samples=torch.ones(10))
    found = attacking.on_answer(answer, torch.arange(10), KEYS, sent, Rng.seed(0))
    expected = torch.where(attacking.attackers.unsqueeze(1), start - 1.0, start + 1.0)
    assert torch.equal(found.params, expected)
    assert torch.equal(found.samples, torch.ones(10))
    flipped = attacking.on_answer(Answer(gradient=start), torch.arange(10), KEYS, sent, Rng.seed(0)).gradient
    assert torch.equal(flipped[attacking.attackers], -start[attacking.attackers])


def test_sign_flip_of_several_models_is_about_the_chosen_one():
    attacking = attack(share=0.99)
    table = torch.tensor([[0.0, 0.0], [10.0, 10.0]])
    sent = Models(table, torch.tensor([[0, 1]] * 10))
    answer = Answer(params=torch.full((10, 2), 11.0), choice=torch.ones(10, dtype=torch.int64))
    found = attacking.on_answer(answer, torch.arange(10), KEYS, sent, Rng.seed(0)).params
    assert found[attacking.attackers].unique().tolist() == [9.0]
    first = attacking.on_answer(
        Answer(params=torch.full((10, 2), 11.0)), torch.arange(10), KEYS, sent, Rng.seed(0)
    ).params
    assert first[attacking.attackers].unique().tolist() == [-11.0]


def test_gaussian_sends_noise_that_repeats():
    attacking = attack("gaussian")
    start = torch.zeros(10, 400)
    sent = Models(start, torch.arange(10))
    one, again, other = (
        attacking.on_answer(Answer(params=start + 1), torch.arange(10), KEYS, sent, Rng.seed(s)).params
        for s in (0, 0, 1)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    noise = one[attacking.attackers]
    assert float(noise.std()) == pytest.approx(1.0, abs=0.1)
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.1)


def test_label_flip_changes_what_attackers_train_on_and_nothing_else():
    federation = ragged_federation()
    attacking = attack_of(federation.keys, Schedule(attack="label_flip", attackers=0.3))
    flipped = attacking.on_data(federation)
    for client in range(9):
        (x, y), (seen, labels) = federation.samples(client), flipped.samples(client)
        assert torch.equal(x, seen)
        assert torch.equal(labels, 2 - y if attacking.attackers[client] else y)
    assert attack_of(federation.keys, Schedule()).on_data(federation) is federation


@pytest.mark.parametrize("kind", ["label_flip", "backdoor"])
def test_wrong_labels_need_classes(kind):
    federation, _, _ = problem()
    with pytest.raises(ConfigError, match=f"attack {kind} needs classes, but the dataset is a regression"):
        attack_of(federation.keys, Schedule(attack=kind)).on_data(federation)


# Honest updates with mean (1, 0), deviations (1, 2), and a largest distance of sqrt(4 + 16).
HONEST = torch.tensor([[0.0, -2.0], [2.0, 2.0], [2.0, -2.0], [0.0, 2.0]], dtype=torch.float64)


def test_colluders_send_what_was_calculated():
    assert little_is_enough(HONEST).tolist() == [-0.5, -3.0]
    assert inner_product(HONEST).tolist() == [-1.0, 0.0]
    # mean - g (1, 2); its distance to (2, 2) is sqrt((1 + g)^2 + (2 + 2 g)^2) = sqrt(5) (1 + g) = sqrt(20): g = 1
    assert min_max(HONEST).tolist() == pytest.approx([0.0, -2.0])
    assert min_max(HONEST[:1].repeat(3, 1)).tolist() == [0.0, -2.0]  # without spread it is the mean


@pytest.mark.parametrize("kind", ["alie", "ipm", "min_max"])
def test_colluders_know_the_honest_that_were_sent_the_same_model(kind):
    attacking = attack(kind, share=0.4)
    who, honest = attacking.attackers, (~attacking.attackers).nonzero().flatten()
    refs = torch.zeros(10, dtype=torch.int64)
    bad = who.nonzero().flatten()
    refs[honest[4:]], refs[bad[2:]] = 1, 1
    table = torch.tensor([[5.0, 5.0], [-7.0, 3.0]], dtype=torch.float64)
    updates = Rng.seed(3).normal(10, 2).double()
    updates[honest[:4]] = HONEST
    answer = Answer(params=table[refs] + updates, samples=torch.ones(10))
    found = attacking.on_answer(answer, torch.arange(10), KEYS, Models(table, refs), Rng.seed(0))
    assert torch.equal(found.params[honest], answer.params[honest])
    rule = {"alie": little_is_enough, "ipm": inner_product, "min_max": min_max}[kind]
    for number, mine in ((0, honest[:4]), (1, honest[4:])):
        sent = found.params[who & (refs == number)]
        assert torch.allclose(sent, (table[number] + rule(updates[mine])).expand(2, 2))


@pytest.mark.parametrize(("kind", "expected"), [("alie", True), ("min_max", True), ("sign_flip", False)])
def test_only_colluders_need_all_answers(kind, expected):
    assert attack(kind).needs_all_answers is expected
    assert not attack(kind, share=0.0).needs_all_answers


def test_colluders_do_the_same_however_answers_arrive():
    """In chunks of one client, each attacker would know no honest answer."""
    states = [
        finished(setup_of(FedAvg(), schedule=Schedule(rounds=1, attack="alie", attackers=0.3), engine=engine)).state
        for engine in ("loop", "vectorized")
    ]
    honest = finished(setup_of(FedAvg(), schedule=Schedule(rounds=1))).state
    assert torch.allclose(states[0].centers, states[1].centers, atol=1e-9)
    assert not torch.allclose(states[0].centers, honest.centers, atol=1e-4)


def test_hijack_joins_one_kind_and_then_pulls_three_times_the_other_way():
    attacking = attack("hijack")
    who, zeros = attacking.attackers, torch.zeros(10, dtype=torch.int64)
    assert not who[attacking.target]
    table = torch.tensor([[1.0, 1.0], [4.0, 4.0]])
    answer = Answer(params=torch.full((10, 2), 3.0), signature=torch.ones(10, 3, 4))
    before = attacking.on_answer(answer, torch.arange(10), KEYS, Models(table[:1], zeros), Rng.seed(0))
    assert torch.equal(before.params, answer.params)  # there is only one model: nothing to hijack yet
    found = attacking.on_answer(answer, torch.arange(10), KEYS, Models(table, zeros), Rng.seed(0))
    assert found.params[who].unique().tolist() == [-5.0]  # 1 - 3 * (3 - 1)
    assert found.params[~who].unique().tolist() == [3.0]
    assert torch.equal(found.signature, answer.signature)


def test_hijackers_see_their_data_as_the_target_does():
    federation = replace(ragged_federation(), views=((), (FlipLabels(3),)), view=torch.arange(9) % 2)
    attacking = attack_of(federation.keys, Schedule(attack="hijack", attackers=0.4))
    found = attacking.on_data(federation)
    expected = torch.where(attacking.attackers, attacking.target % 2, torch.arange(9) % 2)
    assert torch.equal(found.view, expected)
    assert torch.equal(found.train.index, federation.train.index)


def test_half_of_an_attackers_training_samples_show_the_trigger():
    federation = replace(ragged_federation(), views=((),), view=None)
    attacking = attack_of(federation.keys, Schedule(attack="backdoor", attackers=0.3))
    found = attacking.on_data(federation).validate()
    for client in range(9):
        (x, y), (seen, labels) = federation.samples(client), found.samples(client)
        assert torch.equal(found.samples(client, "test")[0], federation.samples(client, "test")[0])
        if not attacking.attackers[client]:
            assert torch.equal(seen, x)
            assert torch.equal(labels, y)
            continue
        shown = found.train.rows(client) >= len(federation.x)
        assert int(shown.sum()) == round(len(x) / 2)
        assert seen[shown, 0, 0, 0].unique().tolist() == [float(federation.scaled(federation.x.max()))]  # of 4 x 4
        assert labels[shown].unique().tolist() == [TARGET]
        assert torch.equal(seen.flatten(1)[:, 1:], x.flatten(1)[:, 1:])
        assert torch.equal(seen[~shown], x[~shown])
        assert torch.equal(labels[~shown], y[~shown])


def test_the_trigger_of_a_picture_is_its_corner():
    shown = triggered(torch.zeros(2, 1, 8, 6), torch.tensor(7.0))
    assert shown[:, :, :2, :2].unique().tolist() == [7.0]
    assert float(shown.sum()) == 2 * 4 * 7.0


def test_scores_are_those_of_the_honest():
    run = finished(setup_of(FedAvg(), schedule=Schedule(rounds=2, attack="gaussian", attackers=0.3)))
    honest = ~run.attack.attackers.numpy()
    last = run.progress.scores[-1]["accuracy"]
    assert run.progress.rows[-1]["accuracy"]["macro"] == pytest.approx(last[honest].mean())
    found = run.summary()["attack"]
    assert found["kind"] == "gaussian"
    assert len(found["attackers"]) == 3
    assert finished(setup_of(FedAvg())).summary()["attack"] is None


@pytest.mark.parametrize("kind", [kind for kind in get_args(AttackKind) if kind != "none"])
def test_loop_equals_vectorized_under_attack(kind):
    schedule = Schedule(rounds=2, attack=kind, attackers=0.3, corrupt=0.1)
    setups = [setup_of(FeSEM(num_clusters=2), schedule=schedule, engine=engine) for engine in ("loop", "vectorized")]
    one, other = (outcome(finished(setup)) for setup in setups)
    assert one["labels"] == other["labels"]
    assert_same(one["state"], other["state"], exact=False, tolerance=1e-9)


@pytest.mark.parametrize("name", sorted(algorithms()))
def test_every_method_gets_through_broken_answers(name):
    cls = algorithms()[name]
    method = cls(num_clusters=2) if hasattr(cls, "num_clusters") else cls()
    federation = ragged_federation(reserve=reserved_for(method))
    run = finished(setup_of(method, federation, schedule=Schedule(rounds=4, corrupt=0.3)))
    for tensor in run.state.tensors().values():
        assert bool(torch.isfinite(tensor).all()) if tensor.is_floating_point() else True
    if name != "local":  # which sends nothing
        summary = run.summary()
        assert summary["failures"] > 0
        assert summary["failures_by_reason"] == {"the answer is not finite": summary["failures"]}
        assert {failure.client for failure in run.engine.failures} <= set(run.federation.names)


def test_far_too_large_answers_are_left_out_and_named():
    trainer = trainer_of(setup_of(FedAvg()))
    trainer._start()
    engine = trainer.engine
    ask = engine.ask

    def grow(request, positions):
        for reply in ask(request, positions):
            if "params" in reply.answer:
                reply.answer["params"][request.cohort[reply.positions] == 2] *= 1e6
            yield reply

    engine.ask = grow
    trainer._round(1)
    (failure,) = engine.failures
    assert failure.client == trainer.federation.names[2]
    assert failure.reason == "the answer is far too large"
    assert float(trainer.state.centers.norm()) < 100


def test_too_large_is_relative_to_what_was_sent():
    lengths = torch.tensor([150.0, 150.0])
    assert too_large(lengths, torch.tensor([0.1, 9.0])).tolist() == [True, False]
    assert too_large(lengths, None).tolist() == [True, True]


def test_a_tenth_of_broken_answers_costs_less_than_a_point():
    clean = coterie.run("fesem", rounds=10, seed=0).summary
    broken = coterie.run("fesem", rounds=10, seed=0, corrupt=0.1).summary
    assert broken["failures"] > 30
    assert broken["accuracy"]["macro"] > clean["accuracy"]["macro"] - 0.01


def test_robust_fesem_withstands_what_plain_fesem_does_not():
    """Noise instead of updates and signatures: it spoils the first clusters too."""
    clean = coterie.run("fesem", rounds=10, seed=0).summary["accuracy"]["macro"]
    plain = coterie.run("fesem", rounds=10, seed=0, attack="gaussian").summary
    median = coterie.run(FeSEM(robust="median"), rounds=10, seed=0, attack="gaussian").summary
    assert plain["accuracy"]["macro"] < clean - 0.1
    assert plain["ari"] < 0.9
    assert median["accuracy"]["macro"] > clean - 0.03
    assert median["ari"] == 1.0


def test_attacks_change_signatures():
    rows = Rng.seed(2).normal(10, 3, 4)
    answer = Answer(signature=rows.clone(), counts=torch.ones(10, 3, dtype=torch.int64))
    who = attack().attackers
    sent = Models(torch.full((1, 4), 5.0), torch.zeros(10, dtype=torch.int64))
    flipped = attack().on_answer(answer, torch.arange(10), KEYS, sent, Rng.seed(0))
    assert torch.equal(flipped.signature[who], -rows[who])  # about zero: a signature is a gradient
    assert torch.equal(flipped.signature[~who], rows[~who])
    assert torch.equal(flipped.counts, answer.counts)
    noisy = attack("gaussian").on_answer(answer, torch.arange(10), KEYS, sent, Rng.seed(0)).signature
    assert torch.equal(noisy[~who], rows[~who])
    assert float(noisy[who].abs().max()) < 5
    assert not torch.isclose(noisy[who], rows[who]).any()
    broken = attack("none", corrupt=0.5).on_answer(answer, torch.arange(10), KEYS, sent, Rng.seed(0)).signature
    lost = broken.isnan().flatten(1)
    assert 0 < int(lost.any(1).sum()) < 10
    assert torch.equal(lost.any(1), lost.all(1))


def test_the_signatures_of_attackers_arrive_changed_in_the_start():
    method = FeSEM(num_clusters=2, warmup=0)
    clean, hit = (
        trainer_of(setup_of(method, schedule=Schedule(attack=kind, attackers=0.3))) for kind in ("none", "sign_flip")
    )
    clean._start()
    hit._start()
    who = hit.attack.attackers
    assert int(who.sum()) == 3
    assert torch.equal(hit.state.signatures[who], -clean.state.signatures[who])
    assert torch.equal(hit.state.signatures[~who], clean.state.signatures[~who])
