"""The vote of members on their center, with hand-checked numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coterie.client.block import Models
from coterie.client.steps import Answer
from coterie.engines.attacks import Attack
from coterie.engines.mock import MockEngine
from coterie.errors import ConfigError
from coterie.methods.coterie import Coterie
from coterie.methods.fesem import FeSEM
from coterie.methods.ifca import IFCA
from coterie.methods.md_icfl import MDICFL
from coterie.methods.parts.vote import is_worse
from coterie.randomness import Rng, name_keys
from coterie.runs.loop import Schedule
from tests.helpers import assert_same, finished, outcome, ragged_federation, setup_of

RNG = Rng.seed(0)
VOTERS = {
    "fesem": FeSEM(num_clusters=2, vote=True),
    "fesem-paper": FeSEM(num_clusters=2, vote=True, guard=False, prox=0.1, prox_scale="paper"),
    "md_icfl": MDICFL(num_clusters=2, vote=True, privacy="strong", iterations=3, pseudo_samples=2),
    "coterie": Coterie(num_clusters="2", vote=True),
}


class Remembering:
    """A block of clients that remember."""

    def __init__(self):
        self.memory, self._kept = self, {}

    def get(self, name, default):
        return self._kept.get(name, default)

    def put(self, name, value):
        self._kept[name] = value.clone()


def test_worse_by_hand():
    """Worse is more than 1.1 times the loss of the center before, whatever it was earlier."""
    block = Remembering()
    assert is_worse(block, torch.tensor([1.0, 2.0])).tolist() == [False, False]  # nothing to compare with
    assert is_worse(block, torch.tensor([1.05, 2.5])).tolist() == [False, True]
    assert is_worse(block, torch.tensor([1.2, 2.6])).tolist() == [True, False]


def mock(worse, clients=5):
    """Clients 0 to 3 train to (1, 1) more than what they were sent; those in `worse` find it worse."""

    def respond(step, client, sent, watch=None, vote=None):
        said = {} if vote is None else {"worse": client in worse}
        return {"params": sent + 1, "samples": 1} | said

    return MockEngine(respond, num_clients=clients, chunk=2)


def round_of(method, state, engine, number, cohort=None):
    engine.begin(number, "round")
    return method.round(state, engine, engine.everyone() if cohort is None else cohort, RNG)


def begun(method, engine, labels=(0, 0, 0, 0, 1)):
    state = method.empty_state(engine)
    centers = torch.tensor([[0.0, 0.0], [9.0, 9.0]])
    return replace(state, centers=centers, labels=torch.tensor(labels))


@pytest.mark.parametrize(("worse", "taken"), [((0, 1, 2), False), ((0, 1), True), ((4,), True), ((), True)])
def test_a_center_that_most_members_find_worse_is_not_taken(worse, taken):
    """Of four members more than two must say so; the one member of the other cluster has too few votes."""
    method, engine = FeSEM(num_clusters=2, vote=True, guard=False), mock(worse)
    state = round_of(method, begun(method, engine), engine, 1)
    assert state.centers.tolist() == [[1.0, 1.0], [10.0, 10.0]]  # nobody has voted yet
    state = round_of(method, state, engine, 2)
    assert state.centers.tolist() == [[2.0, 2.0] if taken else [0.0, 0.0], [11.0, 11.0]]
    # After a return the members are not asked whether the old center is worse than the refused one.
    state = round_of(method, state, engine, 3)
    assert state.centers.tolist() == [[3.0, 3.0] if taken else [1.0, 1.0], [12.0, 12.0]]


def test_who_was_not_asked_before_or_was_elsewhere_has_no_vote():
    method, engine = FeSEM(num_clusters=2, vote=True, guard=False), mock(worse=range(5))
    state = round_of(method, begun(method, engine), engine, 1, cohort=torch.tensor([0, 1]))
    state = round_of(method, state, engine, 2)
    assert state.centers[0].tolist() == [2.0, 2.0]  # two votes are too few
    assert state.judged.tolist() == [1, 1, 1, 1, 2]
    moved = replace(state, labels=torch.tensor([0, 0, 1, 1, 1]))
    after = round_of(method, moved, engine, 3)
    assert after.centers[0].tolist() == [3.0, 3.0]  # two are left, and the two that came have judged another center
    assert round_of(method, state, engine, 3).centers[0].tolist() == [1.0, 1.0]


def test_without_a_vote_nothing_is_sent_or_kept():
    method, engine = FeSEM(num_clusters=2), mock(worse=range(5))
    state = begun(method, engine)
    for number in (1, 2):
        state = round_of(method, state, engine, number)
    assert state.centers[0].tolist() == [2.0, 2.0]
    assert (len(state.judged), len(state.past_centers)) == (0, 0)


def test_the_ledger_counts_one_bit_for_a_client():
    def scalars(vote):
        engine = mock(worse=())
        method = FeSEM(num_clusters=2, guard=False, vote=vote)
        round_of(method, begun(method, engine), engine, 1)
        return engine.ledger.totals()["scalars"]

    # A bool in the answer, and a float32 that asks for it.
    assert scalars(True) - scalars(False) == 5 * (1 + 4)


def test_attackers_vote_the_opposite():
    keys = name_keys(tuple(f"c{i}" for i in range(10)))
    attack = Attack.of(keys, "hijack", 0.3, 0.0, 0)
    sent = Models(torch.zeros(2, 2), torch.zeros(10, dtype=torch.int64))
    answer = Answer(params=torch.ones(10, 2), worse=torch.arange(10) < 5)
    found = attack.on_answer(answer, torch.arange(10), keys, sent, RNG)
    assert found.worse.tolist() == [(i < 5) != bool(attack.attackers[i]) for i in range(10)]


def test_ifca_has_no_vote():
    with pytest.raises(ConfigError, match=r"vote of IFCA must be false: .* Got True instead"):
        IFCA(num_clusters=2, vote=True).check(9)


@pytest.mark.parametrize("name", VOTERS)
def test_votes_are_the_same_on_both_engines(name):
    def voted(engine):
        schedule = Schedule(rounds=4, participation=0.8)
        return finished(setup_of(VOTERS[name], ragged_federation(9), engine=engine, schedule=schedule))

    ours, theirs = voted("vectorized"), voted("loop")
    assert len(ours.state.judged) == 9
    assert bool((ours.state.judged > 0).any())
    assert "value.judged loss" in ours.engine.memory_tensors()
    for what in ("state", "memory", "ledger"):
        assert_same(outcome(ours)[what], outcome(theirs)[what], exact=False, tolerance=1e-9)
