"""The start, the round and the guard that clustered methods share, with hand-checked numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from coterie.data.federation import Split
from coterie.engines.mock import MockEngine
from coterie.methods.base import algorithms
from coterie.methods.parts.centers import Alarms, CenterMethod, CenterState, RoundUpdate, Watch, admitted, tells_outside
from coterie.methods.parts.clustering import squared_distances
from coterie.methods.parts.guard import guarded, repaired, split_widest
from coterie.methods.parts.start import enough_clients, find_clusters, placed, random_start, warm_start
from coterie.randomness import Rng, name_keys
from coterie.runs.loop import Schedule
from coterie.settings import fields_of
from tests.helpers import assert_same, outcome, ragged_federation, reserved_for, setup_of, trainer_of

RNG = Rng.seed(0)
CENTERED = sorted(key for key, cls in algorithms().items() if issubclass(cls, CenterMethod))


@dataclass(frozen=True)
class Nearest(CenterMethod):
    """The least that a method must say."""

    key: ClassVar[str] = "nearest"
    signal: str = "updates"
    weighting: str = "equal"

    def start(self, task, engine, rng):
        begin = random_start if self.init == "paper" else warm_start
        return begin(self, self.empty_state(engine), engine, rng)

    def choose(self, chunk, state):
        return squared_distances(chunk.answer.params, state.centers).argmin(1)

    def round(self, state, engine, cohort, rng):
        state = placed(self, state, engine, cohort, rng)
        update = RoundUpdate(self, state, engine)
        for chunk in self.train(state, engine, cohort, rng.at("train")):
            update.add(chunk, self.choose(chunk, state))
        return guarded(self, state, update, engine, rng)

    def assign(self, state, engine, newcomers, rng):
        return find_clusters(self, state, engine, newcomers, rng).labels


FREE = [{"init": "paper"}, {"guard": False}]  # with these, the rule moves clients by itself


def at_home(homes, **more):
    """Each client's model is its own fixed point, wherever it started; its loss is the distance to it."""
    table = torch.tensor(homes)

    def respond(step, client, sent, watch=None):
        if step == "choose":
            return {"choice": (sent - table[client]).norm(dim=1).argmin()}
        return {"params": table[client], "samples": client + 1} | more

    return respond


def engine_of(respond, clients, round=1, chunk=3):
    engine = MockEngine(respond, num_clients=clients, chunk=chunk)
    engine.begin(round, "round" if round else "start")
    return engine


def state_of(method, engine, centers, labels, **more):
    """A state as it may be in the middle of a run."""
    assert len(labels) == engine.num_clients
    return replace(method.empty_state(engine), centers=torch.tensor(centers), labels=torch.tensor(labels), **more)


# ---- clients that are of no kind ----


def outside_of(engine, *clients):
    return torch.zeros(engine.num_clients, dtype=torch.bool).index_fill(0, torch.tensor(clients), True)


def test_a_client_outside_keeps_a_label_and_moves_no_center():
    engine = engine_of(at_home([[0.0, 2.0], [0.0, 4.0], [9.0, 9.0], [8.0, 0.0]]), 4)
    method = Nearest(num_clusters=2)
    state = state_of(method, engine, [[0.0, 0.0], [8.0, 0.0]], [0, 0, 0, 1])
    assert method.round(state, engine, engine.everyone(), RNG).centers.tolist() == [[3.0, 5.0], [8.0, 0.0]]
    state = replace(state, outside=outside_of(engine, 2))
    after = method.round(state, engine, engine.everyone(), RNG)
    assert after.centers.tolist() == [[0.0, 3.0], [8.0, 0.0]]
    assert after.labels.tolist() == [0, 0, 0, 1]


def test_a_client_outside_whose_loss_has_risen_does_not_sign_again():
    engine = engine_of(at_home([[0.0, 2.0], [0.0, 4.0], [8.0, 0.0]], alarm=True), 3)
    method = Nearest(num_clusters=2)
    state = state_of(method, engine, [[0.0, 0.0], [8.0, 0.0]], [0, 0, 1], outside=outside_of(engine, 1))
    after = method.round(state, engine, engine.everyone(), RNG)
    assert after.alarmed.tolist() == [True, False, True]
    assert after.pending.tolist() == [True, True, True]


def test_new_clients_are_outside_if_their_signature_is_far_from_every_cluster():
    """Clients 0 to 3 have signed at right angles to each other in pairs; of the new, 5 signs against both."""
    table = torch.tensor([[4.0, 0.1], [4.0, 0.3], [0.1, 4.0], [0.3, 4.0], [4.0, 0.2], [-4.0, -4.0]])
    engine = engine_of(lambda step, client, sent, watch=None: {"params": sent + table[client], "samples": 1}, 6)
    method = Nearest(num_clusters=2)
    rows = torch.nn.functional.normalize(table, dim=1).unsqueeze(1)
    rows[4:] = 0
    counts = torch.tensor([[1]] * 4 + [[0]] * 2)
    state = state_of(method, engine, [[0.0, 0.0], [0.0, 0.0]], [0, 0, 1, 1, -1, -1], signatures=rows, counts=counts)
    assert tells_outside(state) is False
    plain = placed(method, state, engine, engine.everyone(), RNG)
    assert plain.counts.flatten().tolist() == [1] * 6
    after = placed(
        method, replace(state, outside=outside_of(engine, 0)[:0].new_zeros(6)), engine, engine.everyone(), RNG
    )
    assert after.outside.tolist() == [False] * 5 + [True]
    assert after.labels[4] == 0
    assert after.labels[5] >= 0
    assert after.counts.flatten().tolist() == [1] * 5 + [0]
    assert after.pending[5]


# ---- admission ----


def test_a_cluster_admits_a_share_of_its_members_by_key():
    """Cluster 1 has five members, so 0.4 are two; cluster 0 has three, and takes one at least."""
    since = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, -1])
    wanted = torch.tensor([1, 1, 1, 0, 0, 1, 1, 1, 1])
    keys = torch.tensor([30, 10, 20, 7, 5, 1, 2, 3, 99])
    assert admitted(since, since, wanted, keys, 0.4).tolist() == [0, 1, 1, 1, 0, 1, 1, 1, 1]
    assert admitted(since, since, wanted, keys, 0.01).tolist() == [0, 1, 0, 1, 0, 1, 1, 1, 1]
    assert torch.equal(admitted(since, since, wanted, keys, 1.0), wanted)
    now = torch.tensor([0, 1, 0, 1, 1, 1, 1, 1, 1])  # one has moved already; the new client does not count
    assert admitted(since, now, torch.where(now == 0, 1, now), keys, 0.4).tolist() == [0, 1, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("free", FREE)
def test_clients_that_move_under_a_limit_count_in_no_center(free):
    """Clients 0 and 1 are at home in cluster 1, which has four members and admits one."""
    homes = [[8.0, 8.0], [8.0, 6.0], [0.0, 2.0], [8.0, 0.0], [8.0, 0.0], [8.0, 0.0], [8.0, 0.0]]
    engine = engine_of(at_home(homes), 7)
    labels = [0, 0, 0, 1, 1, 1, 1]
    method = Nearest(num_clusters=2, admission=0.25, **free)
    state = state_of(method, engine, [[0.0, 0.0], [8.0, 0.0]], labels)
    after = method.round(state, engine, engine.everyone(), RNG)
    assert sorted(after.labels[:2].tolist()) == [0, 1]
    first = 0 if engine.keys[0] < engine.keys[1] else 1
    assert after.labels[first] == 1
    assert after.centers.tolist() == [[0.0, 2.0], [8.0, 0.0]]
    unlimited = replace(method, admission=1.0).round(state, engine, engine.everyone(), RNG)
    assert unlimited.labels.tolist() == [1, 1, 0, 1, 1, 1, 1]
    assert unlimited.centers[1].tolist() == [8.0, pytest.approx(14 / 6)]


# ---- the start ----

TWO_PAIRS = [[0.0, 1.0], [0.0, 2.0], [8.0, 0.0], [8.0, 2.0], [8.0, 4.0]]


def test_warm_start_begins_with_common_rounds():
    """Everyone trains from one model, which becomes the sample-weighted mean; only then models are clustered."""
    sent = []

    def respond(step, client, model, watch=None):
        assert watch is None
        sent.append(model.tolist())
        return {"params": model + client, "samples": 1 + client}  # weighted mean of 0, 1, 2: 4/3

    engine = engine_of(respond, 3, round=0)
    state = Nearest(num_clusters=2, warmup=2).start(engine.task, engine, RNG)
    laps = [sent[i : i + 3] for i in range(0, 9, 3)]
    assert len(sent) == 9
    for lap, expected in enumerate([0.0, 4 / 3, 8 / 3]):
        assert laps[lap] == [[pytest.approx(expected)] * 2] * 3
    assert state.common.tolist() == [pytest.approx(8 / 3)] * 2
    # Measured from the warm model, and of length one; client 0 did not move.
    assert state.signatures[0].tolist() == [[0.0, 0.0]]
    assert state.signatures[1:].flatten().tolist() == pytest.approx([0.5**0.5] * 4)
    assert state.counts.tolist() == [[1]] * 3


def test_the_papers_start_is_not_warmed_up():
    engine = engine_of(at_home(TWO_PAIRS), 5, round=0)
    state = Nearest(num_clusters=2, init="paper", warmup=5).start(engine.task, engine, RNG)
    assert engine.calls == []
    assert state.common.tolist() == [0.0, 0.0]


def test_a_repair_whose_leaving_half_does_not_answer_is_none():
    """Nobody is there to make the freed center of: the round stays as it was, and nothing is recorded."""
    calls = []

    def respond(step, client, model, watch=None):
        calls.append(client)
        if len(calls) > 6 and client in (4, 5):
            raise TimeoutError("gone")
        far = 1.0 if client in (4, 5) else 0.0
        return {"params": model + torch.tensor([far, 0.01 * client]), "samples": 1}

    method = Nearest(num_clusters=2)
    engine = engine_of(respond, 6)
    labels = torch.zeros(6, dtype=torch.int64)
    state = replace(method.empty_state(engine), labels=labels, centers=torch.tensor([[0.0, 0.0], [50.0, 50.0]]))
    after = method.round(state, engine, engine.everyone(), RNG)
    assert len(calls) > 6  # a repair was tried
    assert after.repairs == []
    assert after.labels.tolist() == [0] * 6


def test_warm_start_clusters_what_everyone_made_of_the_common_model():
    sent_to = {}

    def respond(step, client, sent, watch=None):
        sent_to[client] = sent.tolist()
        return at_home(TWO_PAIRS)(step, client, sent)

    engine = engine_of(respond, 5, round=0)
    state = Nearest(num_clusters=2, warmup=0).start(engine.task, engine, RNG)
    [(step, asked)] = engine.calls
    assert step == "train_member"
    assert sorted(asked) == [0, 1, 2, 3, 4]
    assert sent_to == {client: [0.0, 0.0] for client in range(5)}
    a, b = int(state.labels[0]), int(state.labels[2])
    assert state.labels.tolist() == [a, a, b, b, b]
    assert {a, b} == {0, 1}
    assert state.centers[a].tolist() == [0.0, 1.5]
    assert state.centers[b].tolist() == [8.0, 2.0]
    assert state.common.tolist() == [0.0, 0.0]
    assert state.mean_samples == 3.0
    directions = torch.nn.functional.normalize(torch.tensor(TWO_PAIRS), dim=1)
    torch.testing.assert_close(state.signatures, directions.unsqueeze(1))
    assert not state.pending.any()


def test_warm_start_with_a_silent_client():
    homes = [[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], *TWO_PAIRS[2:]]

    def respond(step, client, sent, watch=None):
        if client == 1:
            raise TimeoutError("no answer")
        return at_home(homes)(step, client, sent)

    engine = engine_of(respond, 6, round=0)
    state = Nearest(num_clusters=2, warmup=0, weighting="samples").start(engine.task, engine, RNG)
    assert state.labels[1] == -1
    assert state.signatures[1].tolist() == [[0.0, 0.0]]
    assert state.counts.tolist() == [[1], [0], [1], [1], [1], [1]]
    assert state.centers[int(state.labels[0])].tolist() == pytest.approx([0.0, (1 * 1 + 3 * 3) / 4])
    assert state.centers[int(state.labels[3])].tolist() == pytest.approx([8.0, (5 * 2 + 6 * 4) / 15])
    assert state.mean_samples == (1 + 3 + 4 + 5 + 6) / 5


def test_paper_start_is_random_centers_and_random_labels():
    engine = engine_of(at_home(TWO_PAIRS * 8), 40, round=0)
    state = Nearest(num_clusters=3, init="paper").start(engine.task, engine, RNG)
    assert not engine.calls
    assert len(torch.unique(state.centers, dim=0)) == 3
    assert min(torch.bincount(state.labels, minlength=3).tolist()) >= 5
    assert state.labels.max() == 2
    again = Nearest(num_clusters=3, init="paper").start(engine.task, engine, Rng.seed(1))
    assert not torch.equal(again.centers, state.centers)
    assert not torch.equal(again.labels, state.labels)


def test_a_start_that_nobody_answers_is_the_random_one():
    def silent(step, client, sent, watch=None):
        raise TimeoutError("no answer")

    engine = engine_of(silent, 5, round=0)
    state = Nearest(num_clusters=2).start(engine.task, engine, RNG)
    assert bool(torch.isfinite(state.centers).all())
    assert len(torch.unique(state.centers, dim=0)) == 2
    assert ((state.labels >= 0) & (state.labels < 2)).all()


def test_more_clusters_than_answers():
    def respond(step, client, sent, watch=None):
        if client > 1:
            raise TimeoutError("no answer")
        return at_home(TWO_PAIRS)(step, client, sent)

    engine = engine_of(respond, 5, round=0)
    state = Nearest(num_clusters=4).start(engine.task, engine, RNG)
    assert sorted(state.labels.tolist()) == [-1, -1, -1, 0, 1]
    assert bool(torch.isfinite(state.centers).all())


# ---- the round ----


@pytest.mark.parametrize("free", FREE)
def test_round_trains_from_the_own_center_assigns_and_averages(free):
    sent_to = {}

    def respond(step, client, sent, watch=None):
        sent_to[client] = sent.tolist()
        return at_home(TWO_PAIRS)(step, client, sent)

    method = Nearest(num_clusters=2, **free)
    engine = engine_of(respond, 5)
    state = state_of(method, engine, [[1.0, 1.0], [5.0, 1.0]], [1, 0, 0, 1, 1])
    after = method.round(state, engine, engine.everyone(), RNG)
    assert sent_to == {0: [5.0, 1.0], 1: [1.0, 1.0], 2: [1.0, 1.0], 3: [5.0, 1.0], 4: [5.0, 1.0]}
    assert after.labels.tolist() == [0, 0, 1, 1, 1]
    assert after.centers.tolist() == [[0.0, 1.5], [8.0, 2.0]]
    assert after.repairs == []
    assert not after.pending.any()


def test_after_a_warm_start_the_rule_only_proposes():
    """Clients 0 and 2 are nearer to the other center: they keep their label, count in their cluster, and wait."""
    method, engine = Nearest(num_clusters=2), engine_of(at_home(TWO_PAIRS), 5)
    state = state_of(method, engine, [[1.0, 1.0], [5.0, 1.0]], [1, 0, 0, 1, 1])
    after = method.round(state, engine, engine.everyone(), RNG)
    assert after.labels.tolist() == [1, 0, 0, 1, 1]
    assert after.pending.tolist() == [True, False, True, False, False]
    assert after.centers[0].tolist() == [4.0, 1.0]  # of (0, 2) and (8, 0)
    assert after.centers[1].tolist() == pytest.approx([16 / 3, 7 / 3])  # of (0, 1), (8, 2) and (8, 4)
    assert after.repairs == []
    assert engine.calls == [("train_member", [0, 1, 2, 3, 4])]  # round 1: nobody chooses anew yet


@pytest.mark.parametrize(("chose_in", "waits"), [(0, True), (1, True), (2, True), (3, False), (7, False)])
def test_who_has_chosen_is_not_proposed_again_for_five_rounds(chose_in, waits):
    """In round 7; 0 means that the client never chose. Nothing was sent so far, so nobody may choose now."""
    method, engine = Nearest(num_clusters=2), engine_of(at_home(TWO_PAIRS), 5, round=7)
    when = torch.tensor([chose_in, 0, 0, 0, 0])
    state = state_of(method, engine, [[0.0, 1.5], [8.0, 2.0]], [1, 0, 1, 1, 1], chose_in=when)
    after = method.round(state, engine, engine.everyone(), RNG)
    assert after.labels.tolist() == [1, 0, 1, 1, 1]
    assert after.pending.tolist() == [waits, False, False, False, False]


def test_without_the_guard_patience_does_not_matter():
    method, engine = Nearest(num_clusters=2, guard=False), engine_of(at_home(TWO_PAIRS), 5, round=7)
    when = torch.full((5,), 6)
    state = state_of(method, engine, [[0.0, 1.5], [8.0, 2.0]], [1, 0, 1, 1, 1], chose_in=when)
    after = method.round(state, engine, engine.everyone(), RNG)
    assert after.labels.tolist() == [0, 0, 1, 1, 1]


def test_a_proposed_client_moves_in_the_round_in_which_it_chooses():
    """It is asked in the same round, if there is room: 8 % of 100 + 2 * 5 models are 8, and one choice costs 2."""

    owns = []

    def respond(step, client, sent, watch=None, own=None):
        if step == "choose":
            owns.append(own.item())
            return {"choice": 0}
        return at_home(TWO_PAIRS)(step, client, sent)

    method, engine = Nearest(num_clusters=2), engine_of(respond, 5, round=7)
    state = signed_state(method, engine, [1, 0, 1, 1, 1], sent_in_rounds=100)
    after = method.round(state, engine, engine.everyone(), RNG)
    assert engine.calls == [("train_member", [0, 1, 2, 3, 4]), ("choose", [0])]
    assert owns == [0]  # it signed as client 1 did: this is the cluster to compare with
    assert after.labels.tolist() == [0, 0, 1, 1, 1]
    assert not after.pending.any()
    assert after.chose_in.tolist() == [7, 0, 0, 0, 0]
    assert after.sent_to_choose == 2
    assert after.counts.tolist() == [[1]] * 5  # signatures still hold
    assert after.centers[1].tolist() == [6.0, 1.75]  # it still counted there: (0, 1), (8, 0), (8, 2), (8, 4)


def test_a_client_that_fails_keeps_its_label_and_moves_nothing():
    def respond(step, client, sent, watch=None):
        if client == 4:
            raise TimeoutError("no answer")
        return at_home(TWO_PAIRS)(step, client, sent)

    method = Nearest(num_clusters=2)
    engine = engine_of(respond, 5)
    state = state_of(method, engine, [[0.0, 0.0], [9.0, 0.0]], [0, 0, 1, 1, 0])
    after = method.round(state, engine, engine.everyone(), RNG)
    assert after.labels.tolist() == [0, 0, 1, 1, 0]
    assert after.centers.tolist() == [[0.0, 1.5], [8.0, 1.0]]


def test_a_round_that_nobody_answers_changes_nothing():
    def silent(step, client, sent, watch=None):
        raise TimeoutError("no answer")

    method = Nearest(num_clusters=2)
    engine = engine_of(silent, 5)
    state = state_of(method, engine, [[0.0, 0.0], [9.0, 0.0]], [0, 0, 0, 0, 0])
    after = method.round(state, engine, engine.everyone(), RNG)
    assert_same(after.tensors(), state.tensors())
    assert_same(after.plain(), state.plain())


@dataclass(frozen=True)
class Undecided(Nearest):
    """Cannot say where odd clients belong."""

    def choose(self, chunk, state):
        return torch.where(chunk.clients % 2 == 1, -1, super().choose(chunk, state))


def test_a_client_that_the_method_cannot_place_stays_where_it_is():
    method = Undecided(num_clusters=2, init="paper")
    engine = engine_of(at_home(TWO_PAIRS), 5)
    state = state_of(method, engine, [[0.0, 0.0], [9.0, 0.0]], [0, 1, 0, 0, 0])
    after = method.round(state, engine, engine.everyone(), RNG)
    assert after.labels.tolist() == [0, 1, 1, 0, 1]
    assert after.centers[0].tolist() == [4.0, 1.5]
    assert after.centers[1].tolist() == pytest.approx([16 / 3, 2.0])


# ---- clients seen later ----


def test_without_signatures_a_new_client_chooses_by_loss_and_trains_from_its_center_in_the_same_round():
    sent_to = {}

    def respond(step, client, sent, watch=None):
        sent_to.setdefault(client, []).append((step, sent.tolist()))
        return at_home(TWO_PAIRS)(step, client, sent)

    method, engine = Nearest(num_clusters=2), engine_of(respond, 5)
    centers = [[0.0, 0.0], [9.0, 0.0]]
    state = state_of(method, engine, centers, [0, -1, 1, -1, -1])
    after = method.round(state, engine, torch.tensor([0, 1, 3]), RNG)
    assert [(step, sorted(who)) for step, who in engine.calls] == [("choose", [1, 3]), ("train_member", [0, 1, 3])]
    assert sent_to[1] == [("choose", centers), ("train_member", centers[0])]
    assert sent_to[3] == [("choose", centers), ("train_member", centers[1])]
    assert after.labels.tolist() == [0, 0, 1, 1, -1]
    assert after.centers.tolist() == [[0.0, 1.5], [8.0, 2.0]]  # they count from the first round on
    assert state.labels.tolist() == [0, -1, 1, -1, -1]


def signed_state(method, engine, labels, **more):
    """The state after a start in which the clients with a label have signed."""
    known = torch.tensor(labels) >= 0
    directions = torch.nn.functional.normalize(torch.tensor(TWO_PAIRS), dim=1)
    rows = (directions * known.unsqueeze(1)).unsqueeze(1)
    centers = [[0.0, 1.5], [8.0, 2.0]]
    return state_of(method, engine, centers, labels, signatures=rows, counts=known.long().unsqueeze(1), **more)


def test_with_signatures_a_new_client_signs_and_joins_the_nearest():
    method, engine = Nearest(num_clusters=2), engine_of(at_home(TWO_PAIRS), 5)
    state = signed_state(method, engine, [0, -1, 1, 1, -1])
    after = method.round(state, engine, torch.tensor([1, 4]), RNG)
    # Signed at the common model (here: trained from it), then trained from the own center.
    assert engine.calls == [("train_member", [1, 4]), ("train_member", [1, 4])]
    assert after.labels.tolist() == [0, 0, 1, 1, 1]
    assert after.counts.tolist() == [[1]] * 5
    torch.testing.assert_close(after.signatures[4, 0], torch.tensor([8.0, 4.0]) / 80**0.5)
    assert state.counts.tolist() == [[1], [0], [1], [1], [0]]


def test_a_new_client_that_does_not_answer_has_no_place_and_is_asked_again():
    asked = []

    def respond(step, client, sent, watch=None):
        asked.append(client)
        if client == 4 and asked.count(4) == 1:
            raise TimeoutError("gone")
        return at_home(TWO_PAIRS)(step, client, sent)

    method, engine = Nearest(num_clusters=2), engine_of(respond, 5)
    state = signed_state(method, engine, [0, 0, 1, 1, -1])
    after = method.round(state, engine, torch.tensor([0, 4]), RNG)
    assert after.labels.tolist() == [0, 0, 1, 1, -1]
    assert after.counts[4].tolist() == [0]
    assert asked.count(4) == 1  # it was not sent a center
    again = method.round(after, engine, torch.tensor([0, 4]), RNG)
    assert again.labels.tolist() == [0, 0, 1, 1, 1]
    assert asked.count(4) == 3


def test_a_new_client_that_shares_no_class_with_anybody_chooses_by_loss():
    """Its signature cannot be compared; without a place it would never train."""
    signature = {1: [[0.0, 0.0], [1.0, 1.0]], 4: [[0.9, 0.1], [0.0, 0.0]]}
    counts = {1: [0, 9], 4: [9, 0]}

    def respond(step, client, sent, watch=None):
        if step == "sign":
            return {"signature": torch.tensor(signature[client]), "counts": torch.tensor(counts[client])}
        return at_home(TWO_PAIRS)(step, client, sent)

    method, engine = Nearest(num_clusters=2, signal="classes"), engine_of(respond, 5)
    rows = torch.zeros(5, 2, 2)
    rows[[2, 3], 0, 0], rows[0, 0, 1] = 1.0, 1.0
    held = torch.tensor([[9, 0], [0, 0], [9, 0], [9, 0], [0, 0]])
    centers = [[0.0, 1.5], [8.0, 2.0]]
    state = state_of(method, engine, centers, [0, -1, 1, 1, -1], signatures=rows, counts=held)
    after = method.round(state, engine, torch.tensor([1, 4]), RNG)
    assert engine.calls == [("sign", [1, 4]), ("choose", [1]), ("train_member", [1, 4])]
    assert after.labels.tolist() == [0, 0, 1, 1, 1]
    assert method.assign(state, engine, torch.tensor([4, 1]), RNG).tolist() == [1, 0]


def test_signatures_decide_only_if_every_cluster_with_members_has_one():
    method, engine = Nearest(num_clusters=3), engine_of(at_home(TWO_PAIRS), 5)
    state = replace(signed_state(method, engine, [0, 0, 1, 1, -1]), centers=torch.zeros(3, 2))
    method.assign(state, engine, torch.tensor([4]), RNG)  # cluster 2 has no members: nothing is missing
    lost = replace(state, counts=torch.tensor([[1], [1], [0], [0], [0]]))
    method.assign(lost, engine, torch.tensor([4]), RNG)  # cluster 1 has members, but all of its signatures are old
    assert engine.calls == [("train_member", [4]), ("choose", [4])]


@pytest.mark.parametrize("free", FREE)
def test_a_client_that_moves_loses_its_signature(free):
    method, engine = Nearest(num_clusters=2, **free), engine_of(at_home(TWO_PAIRS), 5)
    state = signed_state(method, engine, [0, 1, 1, 1, 1])
    after = method.round(state, engine, torch.tensor([0, 1, 2]), RNG)
    assert after.labels.tolist() == [0, 0, 1, 1, 1]
    assert after.counts.tolist() == [[1], [0], [1], [1], [1]]
    assert after.signatures[1].abs().sum() == 0
    assert torch.equal(after.signatures[[0, 2, 3, 4]], state.signatures[[0, 2, 3, 4]])


# ---- the widest cluster ----


def keys_of(count):
    return name_keys([f"client-{i}" for i in range(count)])


def split(updates, labels, num_clusters=2, **more):
    rows = torch.tensor(updates)
    return split_widest(rows, torch.tensor(labels), keys_of(len(rows)), num_clusters, RNG, **more)


def test_the_cluster_that_pulls_apart_is_split():
    # Cluster 0 has large updates that agree but for noise, cluster 1 small ones in two directions.
    agree = [[90.0, 1.0], [91.0, 0.0], [90.0, -1.0], [89.0, 0.0]]
    apart = [[1.0, 0.0], [1.1, 0.0], [-1.0, 0.0], [-1.1, 0.0]]
    wide, half = split(agree + apart, [0] * 4 + [1] * 4)
    assert wide == 1
    assert half.tolist() in ([True, True, False, False], [False, False, True, True])


def test_the_smaller_part_leaves():
    wide, half = split([[1.0], [-1.0], [1.2], [1.1], [-1.1], [0.9]], [0] * 6)
    assert (wide, half.tolist()) == (0, [False, True, False, False, True, False])


def test_the_larger_of_two_clusters_that_pull_apart_alike_is_split():
    apart = [[1.0], [1.0], [-1.0], [-1.0]]
    assert split(apart + apart + apart, [0] * 4 + [1] * 8)[0] == 1


@pytest.mark.parametrize(
    ("updates", "labels", "reason"),
    [
        ([[1.0], [-1.0], [1.0]], [0, 0, 0], "fewer than two twos"),
        ([[1.0], [1.0], [1.0], [1.0]], [0, 0, 0, 0], "all the same"),
        ([[9.0], [1.0], [1.1], [1.2]], [0, 0, 0, 0], "one against the rest"),
        ([[1.0], [1.0], [-1.0], [-1.0]], [0, 0, 1, 1], "each too small"),
    ],
)
def test_what_is_not_split(updates, labels, reason):
    assert split(updates, labels) is None, reason


def test_the_order_of_clients_does_not_matter_to_the_split():
    updates = RNG.at("updates").normal(12, 3)
    order = RNG.at("order").permutation(12)
    labels = torch.arange(12) % 2
    wide, half = split_widest(updates, labels, keys_of(12), 2, RNG)
    again, other = split_widest(updates[order], labels[order], keys_of(12)[order], 2, RNG)
    leaving = (labels == wide).nonzero().flatten()[half]
    assert again == wide
    assert set(order[labels[order] == wide][other].tolist()) == set(leaving.tolist())


# ---- the guard ----

SIX = [[4.0, 1.0], [4.0, 1.5], [4.0, 2.0], [-4.0, 1.0], [-4.0, 1.25], [-4.0, 1.5]]


def emptied(round=3, respond=None, **settings):
    """Two kinds of clients in cluster 0; cluster 1 is far from all of them."""
    method = Nearest(num_clusters=2, **settings)
    engine = engine_of(respond or at_home(SIX), 6, round)
    return method, engine, state_of(method, engine, [[0.0, 0.0], [0.0, 90.0]], [0] * 6)


def test_an_empty_cluster_gets_half_of_the_widest():
    method, engine, state = emptied()
    after = method.round(state, engine, engine.everyone(), RNG)
    a, b = int(after.labels[0]), int(after.labels[3])
    assert after.labels.tolist() == [a, a, a, b, b, b]
    assert {a, b} == {0, 1}
    # The mean of each half's models, to the last bit.
    assert after.centers[a].tolist() == [4.0, 1.5]
    assert after.centers[b].tolist() == [-4.0, 1.25]
    assert after.repairs == [
        {"round": 3, "cluster": 1, "reason": "cluster 1 was empty: cluster 0 was split into 3 and 3 clients"}
    ]
    assert after.repaired_in == 3


def test_a_repair_is_weighted_as_the_round_is():
    method, engine, state = emptied(weighting="samples")
    after = method.round(state, engine, engine.everyone(), RNG)
    assert after.centers[int(after.labels[0])].tolist() == pytest.approx([4.0, (1 * 1.0 + 2 * 1.5 + 3 * 2.0) / 6])


def test_the_traffic_of_a_repair_is_in_its_own_phase():
    method, engine, state = emptied()
    method.round(state, engine, engine.everyone(), RNG)
    totals = engine.ledger.totals()
    one = {"down": 6 * 8, "up": 6 * 8, "scalars": 6 * 8}  # models of two floats, and a number of samples
    assert totals["repair"] == one
    watch = 6 * 4  # the payload that asks for the alarm
    assert {key: totals[key] for key in one} == one | {"scalars": 6 * 8 + watch}
    assert totals["start"]["up"] == totals["evaluate"]["up"] == 0
    assert engine.calls == [("train_member", [0, 1, 2, 3, 4, 5])] * 2
    assert engine.phase == "round"


def test_only_members_of_the_split_cluster_are_asked_again():
    homes = [*SIX, [0.0, 60.0], [0.0, 61.0]]
    method = Nearest(num_clusters=3)
    engine = engine_of(at_home(homes), 8)
    state = state_of(method, engine, [[0.0, 0.0], [0.0, 900.0], [0.0, 60.0]], [0] * 6 + [2] * 2)
    after = method.round(state, engine, engine.everyone(), RNG)
    assert engine.calls[1:] == [("train_member", [0, 1, 2, 3, 4, 5])]
    assert after.labels[6:].tolist() == [2, 2]
    assert after.centers[2].tolist() == [0.0, 60.5]


def twins(**more):
    """Clusters 0 and 1 are the same but for noise; cluster 2 has two kinds of clients."""
    homes = [
        [0.0, 0.0625],
        [0.0, 0.0625],
        [0.0, -0.0625],
        [0.0, -0.0625],
        [50.0, 9.0],
        [50.0, 7.0],
        [50.0, -9.0],
        [50.0, -7.0],
    ]
    method = Nearest(num_clusters=3, **more)
    engine = engine_of(at_home(homes), 8)
    centers = [[0.0, 0.0625], [0.0, -0.0625], [50.0, 0.0]]
    return method, engine, state_of(method, engine, centers, [0, 0, 1, 1, 2, 2, 2, 2])


def test_of_two_clusters_that_are_the_same_one_is_freed():
    method, engine, state = twins()
    after = method.round(state, engine, engine.everyone(), RNG)
    assert after.labels[:4].tolist() == [0, 0, 0, 0]
    a, b = int(after.labels[4]), int(after.labels[6])
    assert after.labels[4:].tolist() == [a, a, b, b]
    assert {a, b} == {1, 2}
    assert after.centers[a].tolist() == [50.0, 8.0]
    assert after.centers[b].tolist() == [50.0, -8.0]
    assert after.repairs == [
        {"round": 1, "cluster": 1, "reason": "clusters 0 and 1 were the same: cluster 2 was split into 2 and 2 clients"}
    ]


def test_clusters_that_are_apart_by_a_typical_update_are_left_alone():
    method, engine, state = twins()
    near = replace(state, centers=torch.tensor([[0.0, 2.0], [0.0, -2.0], [50.0, 0.0]]))
    homes = [[0.0, 2.0], [0.0, 2.0], [0.0, -2.0], [0.0, -2.0], [50.0, 9.0], [50.0, 7.0], [50.0, -9.0], [50.0, -7.0]]
    engine = engine_of(at_home(homes), 8)
    after = method.round(near, engine, engine.everyone(), RNG)
    assert after.repairs == []
    assert torch.equal(after.labels, state.labels)
    assert len(engine.calls) == 1


def test_no_repair_within_two_rounds_of_the_last():
    for last, is_due in ((3, False), (2, False), (1, True), (-2, True)):
        method, engine, state = emptied(round=3)
        after = method.round(replace(state, repaired_in=last), engine, engine.everyone(), RNG)
        assert bool(after.repairs) == is_due
        assert after.repaired_in == (3 if is_due else last)
        assert ("repair/train_member" in engine.ledger.entries) == is_due


def test_a_repair_is_added_to_those_before():
    method, engine, state = emptied(round=9)
    old = {"round": 2, "cluster": 0, "reason": "x"}
    after = method.round(replace(state, repairs=[old], repaired_in=2), engine, engine.everyone(), RNG)
    assert [repair["round"] for repair in after.repairs] == [2, 9]
    assert state.repairs == []


@pytest.mark.parametrize("broken", [emptied, twins])
def test_without_the_guard_nothing_is_repaired(broken):
    method, engine, state = broken(guard=False)
    after = method.round(state, engine, engine.everyone(), RNG)
    assert after.repairs == []
    assert torch.equal(after.labels, state.labels)
    assert "repair/train_member" not in engine.ledger.entries
    if broken is emptied:
        assert torch.equal(after.centers[1], state.centers[1])


def test_what_cannot_be_split_is_left_as_it_is():
    """All members want the same: there is nothing to give to the empty cluster."""
    method, engine, state = emptied(respond=at_home([[1.0, 1.0]] * 6))
    after = method.round(state, engine, engine.everyone(), RNG)
    assert after.repairs == []
    assert after.labels.tolist() == [0] * 6
    assert torch.equal(after.centers[1], state.centers[1])


def test_one_cluster_is_never_repaired():
    method = Nearest(num_clusters=1)
    engine = engine_of(at_home(SIX), 6)
    after = method.round(state_of(method, engine, [[0.0, 0.0]], [0] * 6), engine, engine.everyone(), RNG)
    assert after.repairs == []


def test_the_guard_has_nothing_to_look_at_where_nobody_answered():
    method, engine, state = emptied()
    assert repaired(method, state, state, engine, Watch(engine, True), RNG) is state


def test_absent_clients_are_not_split():
    method, engine, state = emptied()
    present = torch.tensor([0, 1, 3, 4])
    after = method.round(state, engine, present, RNG)
    assert after.labels[[2, 5]].tolist() == [0, 0]
    assert after.labels[0] == after.labels[1] != after.labels[3] == after.labels[4]
    assert after.centers[1].tolist() in ([4.0, 1.25], [-4.0, 1.125])


def test_clients_met_in_the_round_of_a_repair_are_split_with_the_others():
    method, engine, state = emptied()
    state = replace(state, labels=torch.tensor([0, 0, 0, 0, 0, -1]))
    after = method.round(state, engine, engine.everyone(), RNG)
    assert after.repairs[0]["reason"].endswith("was split into 3 and 3 clients")
    assert after.centers[int(after.labels[0])].tolist() == [4.0, 1.5]
    assert after.centers[int(after.labels[5])].tolist() == [-4.0, 1.25]


def test_an_empty_cluster_is_left_alone_until_enough_clients_were_seen():
    """Of 60 clients 50 must have been seen: those of the empty cluster may be among the others."""
    homes = [SIX[i % 6] for i in range(60)]
    for seen, is_due in ((49, False), (50, True), (60, True)):
        method, engine = Nearest(num_clusters=2), engine_of(at_home(homes), 60, round=3)
        state = state_of(method, engine, [[0.0, 0.0], [0.0, 90.0]], [0] * seen + [-1] * (60 - seen))
        after = method.round(state, engine, torch.arange(40), RNG)
        assert bool(after.repairs) == is_due
    assert enough_clients(2, 60) == 50
    assert enough_clients(8, 1000) == 80
    assert enough_clients(8, 30) == 30


# ---- on data ----


def shuffled(federation):
    """The same clients and training samples; true groups and test shards are exchanged at random."""
    order = Rng.seed(5).permutation(len(federation))
    test = Split.of([federation.test.rows(i) for i in order.tolist()])
    y = federation.y.clone()
    rows = federation.test.index
    y[rows] = y[rows[Rng.seed(6).permutation(len(rows))]]
    return replace(federation, groups=federation.groups[order], test=test, y=y)


def broken(name, federation=None, init="warm", **settings):
    """A run that has started, and in which cluster 1 has lost all its clients."""
    cls = algorithms()[name]
    small = {"iterations": 5, "pseudo_samples": 3} if name == "md_icfl" else {}
    init = "random" if init == "paper" and "random" in str(fields_of(cls)["init"].kind) else init
    method = cls(num_clusters=2, init=init, **small | settings)
    federation = federation or ragged_federation(14, reserve=reserved_for(method))
    trainer = trainer_of(setup_of(method, federation, schedule=Schedule(rounds=4)))
    trainer._start()
    centers = trainer.state.centers.clone()
    centers[1] = 100 * trainer._rng.at("far").normal(centers.shape[1])  # nobody is near it
    trainer.state = replace(trainer.state, centers=centers, labels=trainer.state.labels.clamp_max(0))
    return trainer


@pytest.mark.parametrize("init", ["warm", "paper"])
@pytest.mark.parametrize("name", CENTERED)
def test_start_and_guard_see_neither_true_groups_nor_test_data(name, init):
    one = broken(name, init=init)
    other = broken(name, shuffled(one.federation), init=init)
    one.run()
    other.run()
    for key in ("state", "plain", "memory", "labels"):
        assert_same(outcome(one)[key], outcome(other)[key])
    assert one.state.repairs  # what was compared has a repair in it
    assert one.progress.rows[-1]["accuracy"] != other.progress.rows[-1]["accuracy"]


@pytest.mark.parametrize("name", [name for name in CENTERED if name != "fesem_ma"])  # its means are matched ones
def test_a_repaired_center_is_the_mean_of_what_its_members_made_in_the_round(name):
    """The second training is the first one again."""
    trainer = broken(name, weighting="equal")
    call, made = trainer.engine.call, {}

    def recorded(step, cohort, **more):
        for chunk in call(step, cohort, **more):
            if trainer.engine.phase == "round" and "params" in chunk.answer:
                made.update(zip(chunk.clients.tolist(), chunk.answer.params, strict=True))
            yield chunk

    trainer.engine.call = recorded
    trainer._round(1)
    assert [(repair["round"], repair["cluster"]) for repair in trainer.state.repairs] == [(1, 1)]
    for k in range(2):
        members = (trainer.state.labels == k).nonzero().flatten().tolist()
        mean = torch.stack([made[i] for i in members]).mean(0)
        assert torch.allclose(trainer.state.centers[k], mean, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CENTERED)
def test_a_repair_is_told_in_its_round_and_in_the_summary(name):
    trainer = broken(name)
    trainer.run()
    assert trainer.progress.rows[0]["repairs"][0]["reason"].startswith("cluster 1 was empty: cluster 0 was split into")
    recorded = [repair for row in trainer.progress.rows for repair in row["repairs"]]
    assert trainer.summary()["repairs"] == trainer.state.repairs == recorded
    assert trainer.summary()["bytes"]["repair"]["up"] > 0


@pytest.mark.parametrize("name", CENTERED)
def test_the_guard_can_be_switched_off(name):
    trainer = broken(name, guard=False)
    trainer.run()
    assert trainer.state.repairs == []
    assert trainer.summary()["bytes"]["repair"] == {"down": 0, "up": 0, "scalars": 0}
    assert set(trainer.progress.labels[-1]) == {0}


@pytest.mark.parametrize(
    ("chose_in", "labels", "num_clusters", "expected"),
    [
        ([10, 10, 10], [0, 0, 1], 2, [0, 2]),  # all of them have chosen, and stayed
        ([10, 9, 10], [0, 0, 1], 2, [0, 2]),
        ([0, 10, 9], [0, 0, 1], 2, []),  # one waits, one chose earlier
        ([10, 10, 10], [1, 0, 1], 2, [2]),  # one has moved
        ([0, 0, 0], [0, 0, 0], 1, [0, 2]),  # with one cluster there is no choice
    ],
)
def test_models_of_alarmed_clients_count_if_they_have_chosen_their_center_again(
    chose_in: list[int], labels: list[int], num_clusters: int, expected: list[int]
):
    engine = MockEngine(lambda *_: {}, num_clients=3, size=2)
    engine.begin(10, "round")
    alarms, before = Alarms(engine), torch.tensor([0, 0, num_clusters - 1])
    rows, alarmed = torch.arange(3.0).unsqueeze(1).expand(3, 2), torch.tensor([True, False, True])
    for part in (slice(0, 2), slice(2, 3)):
        alarms.add(torch.arange(3)[part], rows[part], before[part], 1 + rows[part, 0], alarmed[part])
    assert alarms.clients.tolist() == [0, 2]
    state = CenterState.common_start(engine, num_clusters, chose_in=torch.tensor(chose_in))
    state = replace(state, labels=torch.tensor(labels))
    found = list(alarms.counted(state, engine))
    assert [client for clients, *_ in found for client in clients.tolist()] == expected
    assert [int(row[0]) for _, models, _, _ in found for row in models] == expected
    assert [int(weight) for *_, weights in found for weight in weights] == [1 + one for one in expected]
