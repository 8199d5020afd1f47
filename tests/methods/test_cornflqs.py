"""CORNFLQS: Ward's clusters, the clients' choices, when the server stops clustering and when clusters are frozen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coterie.engines.mock import MockEngine
from coterie.methods.cornflqs import Cornflqs
from coterie.randomness import Rng
from coterie.runs.loop import Schedule
from tests.helpers import finished, ragged_federation, setup_of, trainer_of

PLACES = [0.0, 1.0, 2.0, 30.0, 31.0, 32.0]


def mock(choice=None):
    """A client's model is its place, whatever it got; it chooses the nearest center, or as `choice` says."""

    def respond(step, client, sent):
        place = torch.full((2,), PLACES[client])
        nearest = None if step in ("train", "train_twice") else int((sent - place).norm(dim=1).argmin())
        if nearest is not None and choice is not None:
            nearest = choice(engine.round, client, nearest)
        if step == "choose":
            return {"choice": nearest}
        if step == "choose_and_train":
            return {"params": place, "choice": nearest, "samples": client + 1}
        return {"params": place, "samples": client + 1}

    engine = MockEngine(respond, num_clients=6)
    return engine


def played(method, engine, rounds):
    engine.begin(0, "start")
    state = method.start(engine.task, engine, Rng.seed(0))
    for number in range(1, rounds + 1):
        engine.begin(number, "round")
        state = method.round(state, engine, engine.everyone(), Rng.seed(number))
    return state


def steps(engine):
    return [name for name, _ in engine.calls]


def same(labels):
    return (labels.unsqueeze(0) == labels.unsqueeze(1)).tolist()


def test_agreement_stops_the_clusterings_and_a_round_without_a_move_freezes():
    engine = mock()
    state = played(Cornflqs(num_clusters=2), engine, 5)
    # The first choice is trivially the same as that of the start: only the second one counts.
    assert steps(engine) == ["train_twice", "choose", "choose_and_train", "choose_and_train", "train", "train", "train"]
    assert state.frozen
    assert same(state.labels) == same(torch.tensor([0, 0, 0, 1, 1, 1]))
    low = int(state.labels[0])
    assert state.centers[low].tolist() == pytest.approx([(0 * 1 + 1 * 2 + 2 * 3) / 6] * 2)
    assert state.centers[1 - low].tolist() == pytest.approx([(30 * 4 + 31 * 5 + 32 * 6) / 15] * 2)


def test_disagreement_clusters_again_but_not_for_ever():
    engine = mock(lambda round, client, nearest: 0 if round < 9 else nearest)
    played(Cornflqs(num_clusters=2, clusterings=4), engine, 6)
    assert steps(engine) == [
        "train_twice", "choose", *["train", "choose"] * 3, "choose_and_train", "choose_and_train", "train"
    ]  # fmt: skip


def test_one_mover_prevents_the_freezing():
    engine = mock(lambda round, client, nearest: 1 - nearest if client == 4 and round == 2 else nearest)
    method = Cornflqs(num_clusters=2)
    assert [played(method, engine, rounds).frozen for rounds in (2, 3, 4)] == [False, False, True]


def test_the_earlier_version_clusters_m_times_and_never_freezes():
    engine = mock()
    state = played(Cornflqs(num_clusters=2, clusterings=3, self_stopping=False), engine, 6)
    assert not state.frozen
    assert steps(engine) == ["train_twice", "choose", *["train", "choose"] * 2, *["choose_and_train"] * 4]


def test_warm_up_rounds_are_averaged_with_equal_weights():
    engine = mock()
    engine.begin(0, "start")
    Cornflqs(num_clusters=2, warmup=3).start(engine.task, engine, Rng.seed(0))
    assert steps(engine) == ["train", "train", "train_twice", "choose"]
    sent = []
    respond = engine._respond

    def spy(step, client, given):
        sent.append((step, float(given.flatten()[0])))
        return respond(step, client, given)

    engine._respond = spy
    Cornflqs(num_clusters=2, warmup=2).start(engine.task, engine, Rng.seed(0))
    assert ("train_twice", pytest.approx(sum(PLACES) / 6)) in sent


def test_clusters_keep_the_name_of_the_nearest_center():
    method = Cornflqs(num_clusters=3)
    rows = torch.tensor([[50.0], [0.0], [100.0], [1.0], [51.0]])
    centers = torch.tensor([[101.0], [48.0], [3.0]])
    assert method._ward(rows, centers).tolist() == [1, 2, 0, 2, 1]
    assert method._ward(rows[:1], centers).tolist() == [0]


def test_absent_clients_keep_a_label_that_still_means_their_cluster():
    engine = mock()
    method = Cornflqs(num_clusters=2, self_stopping=False)
    state = played(method, engine, 0)
    engine.begin(1, "round")
    after = method.round(state, engine, torch.tensor([5, 1, 3]), Rng.seed(1))
    assert torch.equal(after.labels, state.labels)
    assert after.centers[after.labels[0]].tolist() == [1.0, 1.0]


def test_clusters_are_frozen_once_everyone_has_chosen_again():
    engine = mock()
    method = Cornflqs(num_clusters=2)
    state = played(method, engine, 0)
    frozen = []
    for number, cohort in enumerate([[0, 1], [2, 3], [0, 3], [4, 5], [0, 1]], start=1):
        engine.begin(number, "round")
        state = method.round(state, engine, torch.tensor(cohort), Rng.seed(number))
        frozen.append(state.frozen)
    assert frozen == [False, False, False, False, True]


def test_a_newcomer_chooses_by_loss():
    engine = mock()
    method = Cornflqs(num_clusters=2)
    state = played(method, engine, 4)
    assert state.frozen
    lost = replace(state, labels=torch.tensor([*state.labels[:5].tolist(), -1]))
    engine.begin(5, "round")
    after = method.round(lost, engine, engine.everyone(), Rng.seed(5))
    assert torch.equal(after.labels, state.labels)


def test_prox_pulls_only_after_the_clusterings():
    plain, pulled = (trainer_of(setup_of(Cornflqs(num_clusters=2, clusterings=1, prox=prox))) for prox in (0.0, 1.0))
    for run in (plain, pulled):
        run._start()
    assert torch.equal(plain.state.centers, pulled.state.centers)
    before = plain.state.centers.clone()
    for run in (plain, pulled):
        run._round(1)
    assert float((pulled.state.centers - before).norm()) < float((plain.state.centers - before).norm())


def test_traffic():
    size = 9 * trainer_of(setup_of(Cornflqs())).engine.task.layout.size * 8
    run = finished(setup_of(Cornflqs(num_clusters=2, self_stopping=False), schedule=Schedule(rounds=2)))
    totals = run.engine.ledger.totals()
    assert totals["down"] == 2 * 3 * size  # two rounds: the chosen model and the two new ones
    assert totals["up"] == 2 * size


@pytest.mark.parametrize("seed", range(2))
def test_finds_the_groups_of_rotated_digits(seed):
    import coterie

    assert coterie.run("cornflqs", "rotated-digits", rounds=4, seed=seed).summary["ari"] == 1.0


def test_works_with_few_clients_per_round():
    schedule = Schedule(rounds=8, participation=0.34)
    run = finished(setup_of(Cornflqs(num_clusters=2), ragged_federation(12, samples=40), schedule=schedule))
    assert run.progress.rows[-1]["ari"] == 1.0
