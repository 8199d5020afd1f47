"""The watch over losses: alarms by hand, the budget of those who choose anew, and recovery after a drift."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import coterie
from coterie.client.steps import clearly_lowest
from coterie.client.work import SGD
from coterie.engines.mock import MockEngine
from coterie.methods.base import algorithms
from coterie.methods.fedds import FedDSMIC
from coterie.methods.fesem import FeSEM
from coterie.methods.parts.centers import CenterMethod, watched
from coterie.methods.parts.guard import rechosen, with_misplaced
from coterie.randomness import Rng
from coterie.runs.experiment import merge, resolve
from coterie.runs.loop import Schedule
from tests.helpers import ragged_federation, reserved_for, setup_of, trainer_of

RNG = Rng.seed(0)
CENTERED = sorted(key for key, cls in algorithms().items() if issubclass(cls, CenterMethod))
ON = torch.ones(())


# ---- the alarm ----


class Watching:
    """A block of clients with these losses on validation and on training samples."""

    def __init__(self, clients):
        self.held, self.trained = torch.zeros(clients), torch.zeros(clients)
        self.samples = torch.ones(clients)
        self.memory, self._kept = self, {}

    def get(self, name, default):
        return self._kept.get(name, default)

    def put(self, name, value):
        self._kept[name] = value.clone()

    def evaluate(self, models, split):
        assert split == "valid"
        return {"loss": self.held.double(), "samples": self.samples}

    def losses(self, models):
        return self.trained.double()

    def alarms(self, *held):
        self.held = torch.tensor(held)
        return watched(self, None, ON)["alarm"].tolist()


def test_the_alarm_by_hand():
    """Above 1.5 times the past loss and a tenth of the first, 2.0; the past is a running mean of halves."""
    block = Watching(1)
    assert block.alarms(2.0) == [False]  # the first one: nothing to compare with
    assert block.alarms(3.1) == [False]  # limit 1.5 * 2.0 + 0.2 = 3.2; past 2.55
    assert block.alarms(4.0) == [False]  # limit 4.025; past 3.275
    assert block.alarms(5.2) == [True]  # limit 5.1125; past 5.2: the reference is renewed
    assert block.alarms(5.3) == [False]
    assert block.alarms(2.0) == [False]  # it falls; past (5.25 + 2) / 2 = 3.625
    assert block.alarms(5.6) == [False]  # limit 5.6375
    assert block.alarms(9.0) == [True]


def test_a_small_loss_may_double_without_alarm():
    """A tenth of the first loss is slack: a loss near zero is noisy."""
    block = Watching(1)
    block.alarms(2.0)
    for _ in range(12):
        assert block.alarms(0.01) == [False]
    assert block.alarms(0.19) == [False]
    assert Watching(1).alarms(100.0) == [False]


def test_each_client_is_watched_by_itself():
    block = Watching(3)
    assert block.alarms(1.0, 2.0, 0.5) == [False] * 3
    assert block.alarms(1.0, 9.0, 0.5) == [False, True, False]
    assert block.alarms(3.0, 9.0, 0.9) == [True, False, True]


def test_without_validation_samples_the_training_loss_is_watched():
    block = Watching(2)
    block.samples, block.trained = torch.tensor([0, 5]), torch.tensor([1.0, 1.0])
    assert block.alarms(0.0, 1.0) == [False, False]
    block.trained = torch.tensor([5.0, 5.0])
    assert block.alarms(0.0, 1.0) == [True, False]


def test_without_watch_nothing_is_computed_and_nothing_sent():
    assert watched(None, None, None) == {}


# ---- alarmed clients ----

HOMES = torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 8.0], [8.0, 0.0], [8.0, 2.0], [8.0, 4.0]])


def mock(alarmed=(), clients=6, round=1):
    def respond(step, client, sent, watch=None, own=None):
        if step == "choose":
            losses = (sent - HOMES[client % 6]).norm(dim=1).unsqueeze(0)
            return {"choice": clearly_lowest(losses, own.reshape(1))[0]}
        if step == "sign":  # by class 0 only: who is at home on the right signs (1, 0), the others (0, 1)
            is_right = float(HOMES[client % 6][0] > 4)
            return {"signature": torch.tensor([[is_right, 1 - is_right], [0.0, 0.0]]), "counts": torch.tensor([9, 0])}
        alarm = {} if watch is None else {"alarm": client in alarmed}
        return {"params": HOMES[client % 6], "samples": 1} | alarm

    engine = MockEngine(respond, num_clients=clients, chunk=4)
    engine.begin(round, "round")
    return engine


def state_of(method, engine, labels, **more):
    centers = torch.tensor([[0.0, 4.0], [8.0, 2.0]])
    return replace(method.empty_state(engine), centers=centers, labels=torch.tensor(labels), **more)


def test_an_alarmed_client_keeps_its_label_moves_no_center_and_waits():
    method, engine = FeSEM(num_clusters=2), mock(alarmed=(2, 3))
    signed = {"signatures": torch.ones(6, 1, 2), "counts": torch.ones(6, 1, dtype=torch.int64)}
    # Client 3 is in the wrong cluster: by its model it would move, but its loss has risen.
    state = state_of(method, engine, [0, 0, 0, 0, 1, 1], **signed)
    after = method.round(state, engine, engine.everyone(), RNG)
    assert after.labels.tolist() == [0, 0, 0, 0, 1, 1]
    assert after.centers.tolist() == [[0.0, 2.0], [8.0, 3.0]]  # of clients 0 and 1, and 4 and 5
    assert after.pending.tolist() == [False, False, True, True, False, False]
    assert after.alarmed.tolist() == [False, False, True, True, False, False]
    assert after.counts.flatten().tolist() == [1] * 6  # signatures are kept until they sign again
    assert after.sent_in_rounds == 12
    assert engine.calls == [("train_member", [0, 1, 2, 3, 4, 5])]  # round 1: nobody chooses anew yet


def test_where_all_are_alarmed_the_center_stays():
    method, engine = FeSEM(num_clusters=2), mock(alarmed=range(6))
    state = state_of(method, engine, [0, 0, 0, 1, 1, 1])
    after = method.round(state, engine, engine.everyone(), RNG)
    assert torch.equal(after.centers, state.centers)
    assert after.pending.all()


def test_in_the_next_round_it_chooses_by_loss():
    method, engine = FeSEM(num_clusters=2), mock(alarmed=(3,), round=2)
    state = state_of(method, engine, [0, 0, 0, 0, 1, 1], sent_in_rounds=100)
    after = method.round(state, engine, engine.everyone(), RNG)
    assert engine.calls[1:] == [("choose", [3])]
    assert after.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert not after.pending.any()
    assert after.sent_to_choose == 2
    assert after.chose_in.tolist() == [0, 0, 0, 2, 0, 0]
    assert after.repairs == [
        {
            "round": 2,
            "cluster": None,
            "reason": "1 of 1 client that chose anew moved to another cluster",
        }
    ]
    totals = engine.ledger.totals()
    # Two models of two floats go to it, less the one it has; an index comes back.
    assert totals["repair"]["up"] == 0
    assert 8 <= totals["repair"]["down"] <= 16
    assert engine.phase == "round"


def test_without_the_guard_nobody_is_watched():
    method, engine = FeSEM(num_clusters=2, guard=False), mock(alarmed=range(6), round=2)
    state = state_of(method, engine, [0, 0, 0, 0, 1, 1], sent_in_rounds=100, pending=torch.ones(6, dtype=torch.bool))
    after = method.round(state, engine, engine.everyone(), RNG)
    assert engine.calls == [("train_member", [0, 1, 2, 3, 4, 5])]
    assert after.labels.tolist() == [0, 0, 0, 1, 1, 1]  # by distance, as in the paper
    assert after.centers.tolist() == [[0.0, 4.0], [8.0, 2.0]]
    assert after.repairs == []
    assert engine.ledger.totals()["scalars"] == 6 * 8  # samples; no payload


@pytest.mark.parametrize("name", CENTERED)
def test_only_rounds_with_the_guard_send_the_watch_payload(name):
    for guard in (True, False):
        cls = algorithms()[name]
        small = {"iterations": 3, "pseudo_samples": 2} if name == "md_icfl" else {}
        method = cls(num_clusters=2, guard=guard, **small)
        trainer = trainer_of(setup_of(method, ragged_federation(9, reserve=reserved_for(method))))
        call, seen = trainer.engine.call, set()

        def spy(step, cohort, payload=None, call=call, seen=seen, engine=trainer.engine, **more):
            seen.add((engine.phase, "watch" in (payload or {})))
            yield from call(step, cohort, payload=payload, **more)

        trainer.engine.call = spy
        trainer.run()
        assert (("round", True) in seen) == (guard and name != "ifca")
        assert not {(phase, True) for phase in ("start", "repair", "evaluate")} & seen
        kept = trainer.engine.memory_tensors()
        assert ("value.past loss" in kept) == (guard and name != "ifca")


# ---- the budget ----


@pytest.mark.parametrize(
    ("sent", "spent", "asked"), [(100, 0, 4), (100, 2, 3), (100, 5, 1), (100, 7, 0), (24, 0, 0), (25, 0, 1)]
)
def test_so_many_choose_as_the_budget_allows_and_the_others_wait(sent, spent, asked):
    """8 % of the models sent in rounds; a client that chooses costs K = 2 of them."""
    method, engine = FeSEM(num_clusters=2), mock(round=3)
    state = state_of(
        method,
        engine,
        [1, 1, 1, 0, 0, 0],
        pending=torch.ones(6, dtype=torch.bool),
        sent_in_rounds=sent,
        sent_to_choose=spent,
    )
    after = rechosen(method, state, engine, engine.everyone(), RNG)
    moved = after.labels != state.labels
    assert int(moved.sum()) == asked
    assert torch.equal(after.pending, ~moved)
    assert after.sent_to_choose == spent + 2 * asked
    if asked:  # those with the lowest keys
        assert set(moved.nonzero().flatten().tolist()) == set(engine.keys.argsort()[:asked].tolist())


def test_only_clients_of_the_round_choose():
    method, engine = FeSEM(num_clusters=2), mock(round=3)
    pending = torch.tensor([True, True, False, True, False, False])
    state = state_of(method, engine, [1, 1, 1, 0, 0, 0], pending=pending, sent_in_rounds=1000)
    after = rechosen(method, state, engine, torch.tensor([1, 2]), RNG)
    assert engine.calls == [("choose", [1])]
    assert after.labels.tolist() == [1, 0, 1, 0, 0, 0]
    assert after.pending.tolist() == [True, False, False, True, False, False]


def test_a_cluster_admits_so_many_of_those_who_choose_anew_and_the_others_wait():
    """All six would change places. With three members each, a share of 0.4 is one."""
    method, engine = FeSEM(num_clusters=2, admission=0.4), mock(round=3)
    everyone = torch.ones(6, dtype=torch.bool)
    state = state_of(method, engine, [1, 1, 1, 0, 0, 0], pending=everyone, sent_in_rounds=1000)
    after = rechosen(method, state, engine, engine.everyone(), RNG)
    first = [int(engine.keys[:3].argmin()), 3 + int(engine.keys[3:].argmin())]
    assert (after.labels != state.labels).nonzero().flatten().tolist() == first
    assert (~after.pending).nonzero().flatten().tolist() == first
    assert (after.chose_in > 0).nonzero().flatten().tolist() == first
    assert after.sent_to_choose == 12  # all were asked
    # One has moved to cluster 0 in this round already.
    since = state.labels.index_fill(0, torch.tensor([3]), 1)
    after = rechosen(method, state, engine, engine.everyone(), RNG, since)
    assert (after.labels != state.labels).nonzero().flatten().tolist() == first[1:]


def test_a_client_that_does_not_answer_keeps_its_label():
    def silent(step, client, sent, watch=None, own=None):
        raise TimeoutError("gone")

    method, engine = FeSEM(num_clusters=2), MockEngine(silent, num_clients=6)
    engine.begin(3, "round")
    state = state_of(method, engine, [1, 1, 1, 0, 0, 0], pending=torch.ones(6, dtype=torch.bool), sent_in_rounds=1000)
    after = rechosen(method, state, engine, engine.everyone(), RNG)
    assert torch.equal(after.labels, state.labels)
    assert after.repairs == []


def signed_by_class(who):
    """The signatures of six clients as the mock signs, of those in `who`."""
    rows, held = torch.zeros(6, 2, 2), torch.zeros(6, 2, dtype=torch.int64)
    for client in who:
        rows[client, 0] = torch.tensor([0.0, 1.0] if client < 3 else [1.0, 0.0])
        held[client, 0] = 9
    return {"signatures": rows, "counts": held}


@pytest.mark.parametrize(("other", "moves"), [(-0.9, True), (-1.0, True), (-1.2, False)])
def test_a_client_with_a_signature_moves_only_if_the_loss_is_clearly_lower(other, moves):
    """Its loss is 3.0 at its center and 1 - other at the other one; 0.7 times 3.0 is 2.1."""
    method, engine = FeSEM(num_clusters=2), mock(round=3)
    pending = torch.tensor([True, False, False, False, False, False])
    signed = signed_by_class(range(6))
    state = state_of(method, engine, [0, 0, 0, 1, 1, 1], pending=pending, sent_in_rounds=1000, **signed)
    state = replace(state, centers=torch.tensor([[0.0, 4.0], [0.0, other]]))
    after = rechosen(method, state, engine, engine.everyone(), RNG)
    assert engine.calls == [("choose", [0])]
    assert after.labels.tolist() == [int(moves), 0, 0, 1, 1, 1]
    assert not after.pending.any()  # it has chosen, either way
    assert after.chose_in.tolist() == [3, 0, 0, 0, 0, 0]
    assert after.sent_to_choose == 2
    assert len(after.repairs) == int(moves)
    assert after.counts[0].tolist() == [9, 0]  # its loss has not risen: what it signed still holds


def test_clearly_lowest_by_hand():
    losses = torch.tensor([[1.0, 0.71], [1.0, 0.69], [1.0, 0.71], [0.2, 0.3], [0.2, 0.3]])
    own = torch.tensor([0, 0, -1, 1, 0])
    assert clearly_lowest(losses, own).tolist() == [0, 1, 1, 0, 0]
    assert clearly_lowest(losses, None).tolist() == [1, 1, 1, 0, 0]


def test_clients_whose_data_has_changed_are_asked_first_and_sign_again():
    """The loss of client 3 has risen. It signs like clients 4 and 5, whose center is also the best by loss."""
    method, engine = FeSEM(num_clusters=2), mock(round=3)
    state = state_of(
        method,
        engine,
        [0, 0, 0, 0, 1, 1],
        pending=torch.ones(6, dtype=torch.bool),
        alarmed=torch.arange(6) == 3,
        sent_in_rounds=24,  # room for one model: to sign at, and for nobody else
        **signed_by_class([0, 1, 2, 4, 5]),
    )
    assert int(engine.keys.argmin()) != 3  # by keys alone it would not be the first
    after = rechosen(method, state, engine, engine.everyone(), RNG)
    assert engine.calls == [("sign", [3])]  # a clear signature settles it
    assert after.sent_to_choose == 1
    assert after.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert after.pending.tolist() == [True, True, True, False, True, True]
    assert not after.alarmed.any()
    assert after.counts[:, 0].tolist() == [9] * 6  # the new signature is kept
    assert after.signatures[3, 0].tolist() == [1.0, 0.0]
    assert engine.phase == "round"


def test_a_signature_that_is_not_clear_decides_unless_another_loss_is_clearly_lower():
    """Client 3, at (8, 0), has too few samples to sign clearly. At its label 0 the loss is 5; at the other center 6."""
    few = mock(round=3)
    respond = few._respond
    few._respond = lambda step, *more, **own: (
        respond(step, *more, **own) | ({"counts": torch.tensor([1, 0])} if step == "sign" else {})
    )
    method, which = FeSEM(num_clusters=2), torch.arange(6) == 3
    risen = {"pending": which, "alarmed": which}
    signed = signed_by_class([0, 1, 2, 4, 5])
    state = state_of(method, few, [0, 0, 0, 0, 1, 1], sent_in_rounds=1000, **risen, **signed)
    near = replace(state, centers=torch.tensor([[8.0, 5.0], [8.0, 6.0]]))
    assert rechosen(method, near, few, few.everyone(), RNG).labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert few.calls == [("sign", [3]), ("choose", [3])]
    clear = replace(state, centers=torch.tensor([[8.0, 4.0], [8.0, 6.0]]))  # 4 < 0.7 * 6
    assert rechosen(method, clear, few, few.everyone(), RNG).labels.tolist() == [0, 0, 0, 0, 1, 1]


def test_a_client_whose_signature_is_as_before_stays_and_is_sent_no_center():
    """The loss of client 1 has risen, and it signs as clients 0 and 2 did: its center has changed, not its data."""
    method, engine = FeSEM(num_clusters=2), mock(round=3)
    which = torch.arange(6) == 1
    risen = {"pending": which, "alarmed": which}
    state = state_of(method, engine, [0, 0, 0, 1, 1, 1], sent_in_rounds=1000, **risen, **signed_by_class(range(6)))
    state = replace(state, centers=torch.tensor([[90.0, 90.0], [0.0, 2.0]]))  # by loss it would go to cluster 1
    after = rechosen(method, state, engine, engine.everyone(), RNG)
    assert engine.calls == [("sign", [1])]
    assert after.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert not after.pending.any()
    assert not after.alarmed.any()


@pytest.mark.parametrize(("round", "pending"), [(8, [1]), (7, [])])
def test_a_client_that_signed_as_another_cluster_does_should_choose_anew(round, pending):
    """Client 1 signed as clients 0 and 2, and has the label of the others; looked up every other round."""
    method, engine = FeSEM(num_clusters=2), mock(round=round)
    state = state_of(method, engine, [0, 1, 0, 1, 1, 1], **signed_by_class(range(6)))
    assert with_misplaced(state, engine).pending.nonzero().flatten().tolist() == pending
    chosen = replace(state, chose_in=torch.full((6,), round - 4))  # not again within five rounds
    assert not with_misplaced(chosen, engine).pending.any()


@pytest.mark.parametrize("participation", [1.0, 0.3])
def test_the_budget_holds_in_every_round_of_a_run_in_which_everybody_always_waits(participation):
    trainer = trainer_of(
        setup_of(FeSEM(num_clusters=3), ragged_federation(30), schedule=Schedule(rounds=8, participation=participation))
    )
    trainer._start()
    for number in range(1, 9):
        trainer.state = replace(trainer.state, pending=torch.ones(30, dtype=torch.bool))
        trainer._round(number)
        assert trainer.state.sent_to_choose <= 0.08 * trainer.state.sent_in_rounds
    assert trainer.state.sent_to_choose > 0
    totals = trainer.engine.ledger.totals()
    size = trainer.engine.task.layout.size * 8
    assert totals["up"] + totals["down"] <= trainer.state.sent_in_rounds * size
    if not any(repair["cluster"] is not None for repair in trainer.state.repairs):
        assert totals["repair"]["down"] <= trainer.state.sent_to_choose * size


# ---- drift ----


@pytest.fixture(scope="module")
def drifting():
    asked = {"run": {"dataset": "digits", "scenario": "rotated+drift", "clients": 40}, "scenario": {"at": [5]}}
    federation = resolve(merge(asked)).federation()
    assert int((federation.moves[0].view != federation.view).sum()) >= 10
    work = SGD(lr=0.2, epochs=4)
    return {
        guard: coterie.run(FeSEM(guard=guard), federation, "mlp", work=work, rounds=12, seed=0, unseen=0.2)
        for guard in (True, False)
    }


def test_clusters_recover_from_a_drift_at_little_cost(drifting):
    with_guard, without = (drifting[guard]._trainer.progress.rows for guard in (True, False))
    assert [row["ari"] for row in with_guard[:4]] == [1.0] * 4
    assert without[4]["ari"] < 0.7
    assert with_guard[-1]["ari"] == 1.0
    assert without[-1]["ari"] < 0.7

    def sent(row):
        return row["bytes"]["down"] + row["bytes"]["up"] + row["bytes"]["repair"]

    assert sent(without[-1]) < sent(with_guard[-1]) <= 1.1 * sent(without[-1])


def test_before_the_drift_the_guard_changes_nothing(drifting):
    one, other = (drifting[guard]._trainer.progress for guard in (True, False))
    for number in range(5):  # the start and rounds 1 to 4
        assert one.labels[number].tolist() == other.labels[number].tolist()


def test_after_a_drift_newcomers_get_a_model_of_their_kind(drifting):
    summary = drifting[True].summary
    assert summary["unseen"]["clients"] == 8
    assert summary["unseen"]["ari"] == 1.0
    assert summary["unseen"]["accuracy"]["macro"] >= summary["accuracy"]["macro"] - 0.03


def scores_of_centers(result, client):
    """Training loss and test accuracy of a newcomer under every center, by plain torch."""
    unseen, losses, accuracies = result.unseen, [], []
    for center in result._trainer.state.centers:
        named = unseen.engine.task.layout.unpack(center)
        x, y = unseen.federation.samples(client, "train")
        losses.append(torch.nn.functional.cross_entropy(unseen.engine.network(named, x.to(center)), y).item())
        x, y = unseen.federation.samples(client, "test")
        accuracies.append((unseen.engine.network(named, x.to(center)).argmax(1) == y).double().mean().item())
    return losses, accuracies


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", [FeSEM(init="random"), FedDSMIC(init="paper")], ids=["fesem", "feddsmic"])
def test_without_signatures_newcomers_choose_by_loss(method, seed):
    """From random centers some kinds may have no good center. Newcomers get the best there is; where the clusters of
    the members are right, they are as good as members.
    """
    result = coterie.run(method, "rotated-digits", rounds=8, seed=seed, unseen=0.2)
    assert result._trainer.state.signatures.numel() == 0
    chosen, best = [], []
    for client, label in enumerate(result.unseen.labels.tolist()):
        losses, accuracies = scores_of_centers(result, client)
        assert label == losses.index(min(losses))
        chosen.append(accuracies[label])
        best.append(max(accuracies))
    assert sum(chosen) >= sum(best) - 0.02 * len(best)
    summary = result.summary
    if summary["ari"] == 1.0:
        assert summary["unseen"]["accuracy"]["macro"] >= summary["accuracy"]["macro"] - 0.03
    # FedDSMIC finds the kinds from random centers with seed 1; FeSEM does with none of these, a known limit.
    assert (summary["ari"] == 1.0) == (method.key == "feddsmic" and seed == 1)
