"""Coterie: the warm-up is FedAvg, kinds are found and followed, cuts by their closed form, and what it costs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from sklearn.metrics import adjusted_rand_score
from torch import nn

import coterie
from coterie.client.block import Models
from coterie.client.steps import OWN_MODEL
from coterie.client.work import SGD
from coterie.data.federation import Federation
from coterie.engines.base import unusable
from coterie.engines.mock import MockEngine
from coterie.errors import ConfigError
from coterie.methods.coterie import Coterie, _told
from coterie.methods.fedavg import FedAvg
from coterie.methods.parts import personal
from coterie.methods.parts.centers import has_signature
from coterie.methods.parts.cuts import Update
from coterie.methods.parts.found import with_shares
from coterie.methods.parts.halves import coarsened, halves_shape, restored, sign_at, signed_halves
from coterie.methods.parts.kinds import Halves, Kinds, Noise, find_kinds
from coterie.methods.parts.member import train_member
from coterie.methods.parts.personal import NUM_MIXES, SHIFTS, lengthened
from coterie.nets.mixture import MixtureModel
from coterie.nets.sketch import sketch_of
from coterie.randomness import Rng
from coterie.runs.experiment import merge, resolve
from coterie.runs.folder import RunFolder
from coterie.runs.loop import Schedule
from coterie.runs.result import personal_vector
from tests.helpers import assert_same, finished, outcome, ragged_federation, setup_of, trainer_of

RNG = Rng.seed(0)
WORK = SGD(lr=0.2, epochs=2, batch_size=5)


def two_kinds(clients=30, **settings):
    return ragged_federation(clients, **{"samples": 40, "classes": 4} | settings)


def doubtful():
    """Two kinds that are hard to tell apart: a cut is proposed, refused, proposed again and made."""
    return two_kinds(samples=30, noise=2.0)


def setup(method=None, federation=None, **schedule):
    federation = two_kinds() if federation is None else federation
    return setup_of(method or Coterie(), federation, work=WORK, schedule=Schedule(**{"rounds": 6} | schedule))


def whats(state):
    return [(decision["round"], decision["what"]) for decision in state.decisions]


def spied(engine):
    """Every call: round, phase, step, clients, what was sent to each of them, and the answers as they arrive."""
    calls, call = [], engine.call

    def spy(step, cohort, **more):
        answers = []
        calls.append((engine.round, engine.phase, step.__name__, cohort.tolist(), more, answers))
        for chunk in call(step, cohort, **more):
            answers.append(chunk)
            yield chunk

    engine.call = spy
    return calls


# ---- the warm-up ----


@pytest.mark.parametrize("batch_size", [5, "full"])
def test_the_warm_up_is_fedavg(batch_size):
    work = replace(WORK, batch_size=batch_size)
    schedule = Schedule(rounds=4, participation=0.8)
    methods = Coterie(warmup=3), FedAvg()
    one, other = (trainer_of(setup_of(method, two_kinds(), work=work, schedule=schedule)) for method in methods)
    for run in (one, other):
        run._start()
    for number in (1, 2, 3):
        for run in (one, other):
            run._round(number)
        assert torch.equal(one.state.centers, other.state.centers)
        assert torch.equal(one.state.labels, other.state.labels)
    assert not has_signature(one.state).any()
    common = one.state.centers[0]
    one._round(4)
    assert torch.equal(one.state.common, common)  # clients sign at the model of the warm-up
    assert one.state.signed_in == 4
    assert one.state.num_clusters == 2


def test_rounds_in_which_clients_sign():
    """6, 18, 42 ... rounds after the first time; not at the end, where a new cluster has no time left."""
    engine = MockEngine(lambda *a, **k: {}, num_clients=3)
    state = replace(Coterie().start(engine.task, engine, RNG), signed_in=4)

    def signing(total):
        engine.task = replace(engine.task, work=replace(engine.task.work, total_rounds=total))
        found = []
        for number in range(1, 60):
            engine.round = number
            found += [number] if number >= 4 and Coterie()._signs_now(state, engine) else []
        return found

    assert signing(None) == [4, 10, 22, 46]
    assert [number for number in signing(24) if number <= 24] == [4, 10, 22]
    assert [number for number in signing(23) if number <= 23] == [4, 10]
    assert [number for number in signing(4) if number <= 4] == [4]


@pytest.mark.parametrize(
    ("clusters", "doubt", "clear", "signs"),
    [(2, 7.4, 10, False), (2, 7.5, 10, True), (3, 0.0, 10, False), (1, 0.0, 10, True), (2, 7.4, 9.8, True)],
)
def test_a_second_look_is_skipped_where_the_first_found_kinds_and_left_no_doubt(clusters, doubt, clear, signs):
    """The third is not: clients may have changed, and the centers have learnt more."""
    engine, method = MockEngine(lambda *a, **k: {}, num_clients=3), Coterie(clear=clear)
    state = method.start(engine.task, engine, RNG)
    state = replace(state, centers=state.centers.repeat(clusters, 1), signed_in=2, doubt=doubt)
    for number, expected in ((2, True), (8, signs), (20, True), (44, True)):
        engine.round = number
        assert method._signs_now(state, engine) == expected


# ---- finding kinds ----


@pytest.fixture(scope="module")
def rotated():
    return coterie.run(Coterie(), "rotated-digits", rounds=20)


def test_four_rotations_are_four_kinds(rotated):
    assert len(rotated.centers) == 4
    assert rotated.summary["ari"] == 1.0
    [cut] = [decision for decision in rotated._trainer.state.decisions if decision["what"] == "cut"]
    assert (cut["round"], cut["clusters"], cut["sizes"]) == (2, [0, 1, 2, 3], [10, 10, 10, 10])
    assert rotated.rows[1]["ari"] == 1.0


def test_it_costs_fedavgs_bytes(rotated):
    plain = coterie.run(FedAvg(), "rotated-digits", rounds=20, evaluate_every=20)
    sent = [sum(run.rows[-1]["bytes"][way] for way in ("down", "up", "start", "repair")) for run in (rotated, plain)]
    assert sent[1] < sent[0] <= 1.05 * sent[1]


@pytest.mark.parametrize("scenario", ["iid", "dirichlet"])
def test_without_kinds_there_is_one_cluster(scenario):
    tables = {"run": {"dataset": "digits", "scenario": scenario, "clients": 30}}
    federation = resolve(merge(tables)).federation()
    run = coterie.run(Coterie(), federation, "mlp", rounds=5, work=SGD(lr=0.2, epochs=2, batch_size=20))
    assert len(run.centers) == 1
    assert whats(run._trainer.state) == [(2, "refused")]


def test_the_personal_model_that_is_exported_scores_as_the_run_says(rotated):
    scores = rotated._trainer.progress.scores[-1]
    kinds = set()
    for client in range(0, 40, 3):
        module = rotated.personal_model(client)
        x, y = rotated.federation.samples(client, "test")
        outputs = module(x.float()).detach()
        kinds.add(type(module))
        assert float((outputs.argmax(1) == y).float().mean()) == pytest.approx(scores["accuracy"][client], abs=1e-6)
        loss = float(nn.functional.cross_entropy(outputs, y))
        assert loss == pytest.approx(scores["loss"][client], rel=1e-3, abs=1e-5)
    assert MixtureModel in kinds


def test_signatures_that_tell_nothing_about_classes():
    """What goes over the wire: one row per signature, one count, and no label proportions."""
    run = trainer_of(setup(Coterie(signal="updates", warmup=1), rounds=4, participation=0.8))
    calls = spied(run.engine)
    run.run()
    answers = [chunk.answer for *_, chunks in calls for chunk in chunks]
    signed = [answer for answer in answers if "signature" in answer]
    assert "sign_at" in {call[2] for call in calls}  # some signed later
    for answer in signed:
        assert answer.counts.shape[1:] == (1,)
        assert answer.signature.shape[1] == answer.contrast.shape[1] == 1
    known = {"params", "samples", "losses", "held", "alarm", "signature", "contrast", "counts"}
    assert {name for call in calls if call[1] != "evaluate" for chunk in call[5] for name in chunk.answer} <= known
    for call in calls:
        assert all(rows.shape[1] == 0 for name, rows in (call[4].get("each") or {}).items() if name == "shares")
    met = has_signature(run.state)
    assert torch.equal(run.state.counts[met, 0], run.federation.train.sizes[met])
    assert run.state.num_clusters == 2
    assert adjusted_rand_score(run.federation.groups[met], run.state.labels[met]) == 1.0


# ---- the number of clusters ----


@pytest.mark.parametrize(
    ("asked", "expected"), [("auto", 2), (1, 1), ("1", 1), (3, 3), ("3-5", 3), ("2-6", 2), ("1-1", 1), ("5", 5)]
)
def test_a_number_or_a_range_of_clusters(asked, expected):
    run = finished(setup(Coterie(num_clusters=asked, warmup=1), rounds=4))
    assert run.state.num_clusters == expected
    for label in run.state.labels.unique():  # if there are enough clusters, none has two kinds
        assert expected == 1 or len(run.federation.groups[run.state.labels == label].unique()) == 1


@pytest.mark.parametrize("asked", ["many", "2.5", "-1", "2-", "", 2.5, "2 - 6"])
def test_what_is_no_number_of_clusters(asked):
    with pytest.raises(ConfigError, match=r"num_clusters of Coterie must be 'auto', an int >= 1, or a range") as caught:
        Coterie(num_clusters=asked).check(10)
    assert str(caught.value).endswith(f"Got {asked!r} instead.")


@pytest.mark.parametrize("asked", [0, "0", "0-3", "4-2"])
def test_numbers_of_clusters_that_cannot_be(asked):
    with pytest.raises(ConfigError, match="must be at least 1, and a range must rise") as caught:
        Coterie(num_clusters=asked).check(10)
    assert str(caught.value).endswith(f"Got {asked!r} instead.")


@pytest.mark.parametrize("asked", [11, "11-20"])
def test_more_clusters_than_clients(asked):
    with pytest.raises(ConfigError, match="must be at most the number of clients, 10. Got"):
        Coterie(num_clusters=asked).check(10)
    Coterie(num_clusters="10-20").check(10)


# ---- participation ----


@pytest.fixture(scope="module")
def partly():
    """Three kinds, of which a round asks a third of the clients; most sign later than the first."""
    run = trainer_of(setup(federation=two_kinds(60, samples=30, groups=3), rounds=10, participation=0.3))
    calls, cohorts, draw = spied(run.engine), {}, run.engine.draw

    def drawn(rng, size):
        cohorts[run.engine.round] = draw(rng, size)
        return cohorts[run.engine.round]

    run.engine.draw = drawn
    run.run()
    return run, [call for call in calls if call[1] != "evaluate"], cohorts


def test_nobody_outside_the_cohort_is_asked(partly):
    run, calls, cohorts = partly
    assert len(calls) > 15
    assert set(cohorts) == set(range(1, 11))
    for number, _, step, clients, _, _ in calls:
        assert set(clients) <= set(cohorts[number].tolist()), step
        assert len(clients) <= 18
    absent = torch.ones(60, dtype=torch.bool)
    absent[torch.cat(list(cohorts.values()))] = False
    assert run.state.labels[absent].tolist() == [-1] * int(absent.sum())
    assert not has_signature(run.state)[absent].any()


def test_clients_that_come_later_sign_once_and_join_their_kind(partly):
    run, calls, cohorts = partly
    first = set(cohorts[2].tolist())
    late = [
        client
        for _, phase, step, clients, _, _ in calls
        if step == "sign_at" and phase == "round"
        for client in clients
    ]
    assert len(late) == len(set(late)) > 20
    assert not first & set(late)
    assert first | set(late) == set(torch.cat([cohorts[number] for number in range(2, 11)]).tolist())
    met = has_signature(run.state)
    assert run.state.num_clusters == 3
    assert adjusted_rand_score(run.federation.groups[met], run.state.labels[met]) >= 0.9


def test_too_few_signatures_are_no_reason_to_cut():
    """Ten of thirty clients sign in the first round; with the next cohort there are enough."""
    run = trainer_of(setup(Coterie(warmup=1), rounds=4, participation=0.33))
    run._start()
    for number in (1, 2):
        run._round(number)
    assert int(has_signature(run.state).sum()) == 10
    assert run.state.decisions == []
    for number in (3, 4):
        run._round(number)
    assert int(has_signature(run.state).sum()) >= 16
    assert run.state.decisions[0]["what"] == "cut"


def test_newcomers_are_of_the_right_kind():
    run = coterie.run(Coterie(), two_kinds(40), "mlp", rounds=6, work=WORK, unseen=0.2)
    assert run.summary["unseen"]["clients"] == 8
    assert run.summary["unseen"]["right_kind"] == 1.0
    assert run.summary["unseen"]["accuracy"]["macro"] > 0.95
    scores = run.unseen.scores
    for place, name in enumerate(run.unseen.federation.names[:3]):  # and they are served with what was scored
        x, y = run.unseen.federation.samples(place, "test")
        loss = float(nn.functional.cross_entropy(run.personal_model(name)(x.float()).detach(), y))
        assert loss == pytest.approx(scores["loss"][place], rel=1e-3, abs=1e-5)


def test_a_drift_is_followed():
    tables = {"run": {"dataset": "digits", "scenario": "rotated+drift", "clients": 24}}
    federation = resolve(merge(tables | {"scenario": {"at": [6], "groups": 2}})).federation()
    moved = (federation.moves[0].view != federation.view).nonzero().flatten()
    assert len(moved) == 6
    runs = [
        coterie.run(Coterie(guard=guard), federation, "mlp", rounds=9, work=SGD(lr=0.2, epochs=4))
        for guard in (True, False)
    ]
    assert [row["ari"] for row in runs[0].rows[1:5]] == [1.0] * 4
    assert runs[0].rows[-1]["ari"] == 1.0
    assert runs[1].rows[-1]["ari"] < 0.5
    state = runs[0]._trainer.state
    assert whats(state) == [(2, "cut"), (6, "move"), (6, "apart")]
    assert state.repairs == []
    assert sorted(move["client"] for move in state.decisions[1]["moves"]) == sorted(
        federation.names[i] for i in moved.tolist()
    )
    assert state.decisions[1]["loss_rose"] == 6
    assert len(runs[0].centers) == 2


# ---- cuts by their closed form ----

SIDE = 20  # clients of the mock; even ones are of one kind, odd ones of another
SAMPLES = torch.arange(1, SIDE + 1)
WIDE = 32


def answer_of(client, gap):
    """A signature in two classes of ten samples each, as the client sends it."""
    noise = Rng.seed(7).at(client).normal(2, 2, WIDE).float() / math.sqrt(5)
    noise[..., 0] += (client % 2) * math.sqrt(gap)
    contrast = (noise[0] - noise[1]).half()
    return {"signature": noise.mean(0).half(), "contrast": contrast, "counts": torch.tensor([10, 10])}


def trained_by(client, sent):
    """The model that a client of the mock sends: half of what it was sent, and a part of its own."""
    return 0.5 * sent + torch.linspace(0, 1, WIDE) * client


def mock(gap, gains=None, alarmed=(), silent=(), changed=()):
    """Clients whose kinds differ by `gap`; `gains` [SIDE] are what a part would spare each of them.

    Those who have `changed` sign as the other kind.
    """

    def respond(step, client, sent, shares=None, curve=None, watch=None, sign=None, **more):
        if client in silent:
            raise RuntimeError("off")
        if step == "sign_at":
            return answer_of(client ^ (client in changed), gap)
        center = sent[0] if step == "try_member" else sent
        found = {"params": trained_by(client, center), "samples": SAMPLES[client]}
        if curve is not None:
            found |= {"losses": torch.full((NUM_MIXES,), 1.0), "held": client + 1}
        if step == "try_member":
            found["tried"] = torch.full((NUM_MIXES,), 1.0 - float(gains[client]))
        if watch is not None:
            found["alarm"] = client in alarmed
        return found | (answer_of(client, gap) if sign is not None else {})

    return MockEngine(respond, num_clients=SIDE, size=WIDE, chunk=7)


def driven(method, engine, rounds, state=None, first=1):
    """The states after each of these rounds."""
    state = method.start(engine.task, engine, RNG) if state is None else state
    states = []
    for number in range(first, first + rounds):
        engine.begin(number, "round")
        state = method.round(state, engine, engine.everyone(), RNG.at(number))
        states.append(state)
    return states


def mean_of(rows, weights):
    return (rows * weights.unsqueeze(1)).sum(0) / weights.sum()


def test_the_parts_of_a_cut_start_from_the_means_of_their_members():
    before, after = driven(Coterie(warmup=1), mock(gap=20.0), 2)
    models = torch.stack([trained_by(client, before.centers[0]) for client in range(SIDE)])
    assert after.labels.tolist() == [0, 1] * 10
    for label in range(2):
        expected = mean_of(models[label::2], SAMPLES[label::2])
        torch.testing.assert_close(after.centers[label], expected)
    assert whats(after) == [(2, "cut")]
    [cut] = after.decisions
    assert (cut["clusters"], cut["sizes"], cut["signed_at"]) == ([0, 1], [10, 10], "common model")
    assert cut["z"] > 10
    assert cut["q"] == pytest.approx(50 * 20 / WIDE, rel=0.3)  # D n_a n_b / (n_a + n_b) / tr(S)
    assert after.shares.tolist() == [[4.75, 4.75], [4.75, 4.75]]  # all are alike: of the largest weight
    assert torch.equal(after.common, before.centers[0])


def test_label_proportions_are_those_of_each_cluster():
    """Members of the first differ, those of the second do not, and those of the third have not signed."""
    engine = mock(gap=0.0)
    state, counts = three_clusters(engine), torch.zeros(SIDE, 2, dtype=torch.int64)
    counts[::3], counts[::6], counts[1::3] = torch.tensor([2, 14]), torch.tensor([14, 2]), torch.tensor([3, 1])
    state = replace(state, counts=counts, labels=state.labels.index_fill(0, torch.tensor([18]), -1))
    light, heavy = 15 / 8 - 0.5, 9.5
    expected = [[light / 2, light / 2], [0.75 * heavy, 0.25 * heavy], [0.0, 0.0]]
    torch.testing.assert_close(with_shares(state).shares, torch.tensor(expected))
    told = _told(with_shares(state), torch.tensor([1, -1, 0]))
    torch.testing.assert_close(told["shares"], torch.tensor([expected[1], [0.0, 0.0], expected[0]]))


def test_a_robust_mean_is_that_of_each_part():
    before, after = driven(Coterie(warmup=1, robust="median"), mock(gap=20.0), 2)
    models = torch.stack([trained_by(client, before.centers[0]) for client in range(SIDE)])
    for label in range(2):
        expected = models[label::2].double().quantile(0.5, dim=0).float()
        torch.testing.assert_close(after.centers[label], expected)


def test_clients_that_do_not_answer_break_nothing():
    """Clients 0 to 3 are silent in every round: they give no evidence."""
    states = driven(Coterie(warmup=1), mock(gap=20.0, silent=range(4)), 5)
    for state in states[1:]:
        assert state.labels[4:].tolist() == [0, 1] * 8
        assert state.labels[:4].tolist() == [-1] * 4
        assert not has_signature(state)[:4].any()
        assert bool(state.centers.isfinite().all())
    everybody = driven(Coterie(warmup=1), mock(gap=20.0, silent=range(SIDE)), 4)
    assert all(torch.equal(state.centers, everybody[0].centers) for state in everybody)
    assert everybody[-1].decisions == []
    assert everybody[-1].labels.tolist() == [-1] * SIDE


def test_only_those_who_never_answered_are_unseen():
    """Clients 0 and 1 answer for the first time after the cut; clients 8 and 9 fall silent before it."""
    method = Coterie(warmup=1)
    [first] = driven(method, mock(gap=20.0, silent=(0, 1)), 1)
    assert first.labels.tolist() == [-1] * 2 + [0] * 18
    states = driven(method, mock(gap=20.0, silent=(0, 1, 8, 9)), 2, first, first=2)
    for state in states:
        assert state.labels.tolist() == [-1] * 2 + [0, 1] * 3 + [0, 0] + [0, 1] * 5
        assert has_signature(state).tolist() == [False] * 2 + [True] * 6 + [False] * 2 + [True] * 10
    [after] = driven(method, mock(gap=20.0), 1, states[-1], first=4)
    assert after.labels.tolist() == [0, 1] * 10
    assert bool(has_signature(after).all())


def test_a_client_whose_loss_has_risen_counts_if_it_stays():
    method = Coterie(warmup=1)
    states = driven(method, mock(gap=20.0), 2)
    engine = mock(gap=21.0, alarmed=(5,))
    [after] = driven(method, engine, 1, states[-1], first=3)
    models = torch.stack([trained_by(client, states[-1].centers[1]) for client in range(SIDE)])
    torch.testing.assert_close(after.centers[1], mean_of(models[1::2], SAMPLES[1::2]))
    # It signs again, and stays: its signature is of its cluster still.
    assert ("sign_at", [5]) in engine.calls
    assert after.labels.tolist() == [0, 1] * 10
    assert not after.pending.any()
    assert after.repairs == []
    # That signature has no halves and is no evidence; the client signs as all others when it takes part again.
    assert has_signature(after).tolist() == [client != 5 for client in range(SIDE)]
    calm = mock(gap=20.0)
    [later] = driven(method, calm, 1, after, first=4)
    assert calm.calls[0] == ("sign_at", [5])
    assert later.labels.tolist() == [0, 1] * 10
    assert torch.equal(later.signatures[5], answer_of(5, 20.0)["signature"].float())
    assert torch.equal(later.contrasts[5], answer_of(5, 20.0)["contrast"].float())


def test_clients_that_have_changed_do_not_move_the_center_that_they_leave():
    """Most members of the second cluster have changed; of the first one most find their center worse."""
    method = Coterie(warmup=1)
    before = replace(driven(method, mock(gap=20.0), 2)[-1], sent_in_rounds=10_000)  # enough for all to choose
    changed, stayed = list(range(1, SIDE - 7, 2)), list(range(0, SIDE - 7, 2))
    engine = mock(gap=21.0, alarmed=(*changed, *stayed), changed=changed)
    [after] = driven(method, engine, 1, before, first=3)
    assert after.labels.tolist() == [0 if client in changed else client % 2 for client in range(SIDE)]
    for cluster, left_out in ((0, []), (1, changed)):
        models = torch.stack([trained_by(client, before.centers[cluster]) for client in range(cluster, SIDE, 2)])
        weights = SAMPLES.clone().index_fill(0, torch.tensor(left_out, dtype=torch.int64), 0)[cluster::2]
        torch.testing.assert_close(after.centers[cluster], mean_of(models, weights))
    [move] = [one for one in after.decisions if one["what"] == "move"]
    assert (len(move["moves"]), move["loss_rose"]) == (len(changed), len(changed))


def test_losses_of_mixes_are_means_over_held_out_samples_and_fade():
    """In every fourth round and in the last one; in the last one, clients finish their own models too."""
    method, engine = Coterie(warmup=99), mock(gap=0.0)
    engine.task = replace(engine.task, work=replace(engine.task.work, total_rounds=10))
    finished_in = {}

    def respond(step, client, sent, curve=None, shares=None, balance=None, finish=None):
        if finish is not None:
            finished_in[engine.round] = float(finish)
        found = {"params": sent, "samples": 1}
        told = {"losses": engine.round * (client + falling), "held": client + 1}
        return found if curve is None else found | told

    engine._respond = respond
    falling = torch.arange(NUM_MIXES).flip(0).float()  # the more of the own model, the better
    mean = mean_of(torch.arange(SIDE).unsqueeze(1) + falling, SAMPLES)
    levels = [0.0] * 3 + [4.0] * 4 + [0.5 * 4 + 0.5 * 8] * 2 + [0.5 * 6 + 0.5 * 10]
    for state, level in zip(driven(method, engine, 10), levels, strict=True):
        torch.testing.assert_close(state.curves[0], level * mean)
    assert finished_in == {10: pytest.approx(0.25 * 10)}


@pytest.mark.parametrize(
    ("method", "participation", "total", "expected"),
    [
        (Coterie(), 1.0, 10, [4, 8, 10]),
        (Coterie(), 1.0, None, [4, 8]),
        (Coterie(), 0.5, 10, list(range(1, 11))),
        (Coterie(serve="kind"), 1.0, 10, [4, 8]),  # the loss of the center is needed, the last mix is not
    ],
)
def test_rounds_in_which_mixes_are_compared(method, participation, total, expected):
    """A client that seldom takes part compares whenever it does."""
    engine = mock(gap=0.0)
    engine.participation = participation
    engine.task = replace(engine.task, work=replace(engine.task.work, total_rounds=total))
    found = []
    for engine.round in range(1, 11):
        found += [engine.round] if method._mixes_now(engine) else []
    assert found == expected


# ---- centers of few models ----


def served_after(cohorts, method=None):
    """The states after rounds with these cohorts."""
    method, engine = method or Coterie(warmup=99), mock(gap=0.0)
    state, states = method.start(engine.task, engine, RNG), []
    for number, cohort in enumerate(cohorts, start=1):
        engine.begin(number, "round")
        state = method.round(state, engine, torch.tensor(list(cohort), dtype=torch.int64), RNG.at(number))
        states.append(state)
    return states


@pytest.mark.parametrize("models", [10, SIDE])
def test_a_center_of_many_models_is_served_as_it_is(models):
    for state in served_after([range(models)] * 4):
        assert torch.equal(state.served, state.centers)
        assert state.behind.tolist() == [models]


def test_a_center_of_one_model_is_served_as_a_mean_over_recent_rounds():
    """Round r of n counts as r (r + 1) (r + 2), until there are ten models; then the past counts nine times as much."""
    states = served_after([[number % SIDE] for number in range(45)])
    centers = torch.cat([state.centers for state in states])
    sent = torch.zeros(WIDE)
    for number, center in enumerate(centers):  # clients train from the center, not from what is served
        sent = trained_by(number % SIDE, sent)
        torch.testing.assert_close(center, sent)
    for number, state in enumerate(states[:37], start=1):
        weights = torch.tensor([r * (r + 1) * (r + 2) for r in range(1, number + 1)], dtype=torch.float64)
        expected = (weights @ centers[:number].double() / weights.sum()).float()
        torch.testing.assert_close(state.served[0], expected)
        assert state.behind.tolist() == [1 + (number - 1) / 4]
    for number, state in enumerate(states[37:], start=37):
        expected = 0.9 * expected + 0.1 * centers[number]
        torch.testing.assert_close(state.served[0], expected)
        assert state.behind.tolist() == [10]
    found = Coterie().personal(states[-1], torch.arange(2))
    assert torch.equal(found.models[found.refs], states[-1].served.expand(2, -1))


def test_a_center_of_a_few_models_counts_by_their_number():
    states = served_after([range(4), range(4), range(4), range(6), [], range(12)])
    centers = torch.cat([state.centers for state in states])
    assert [state.behind.tolist() for state in states] == [[4], [5], [6], [7.5], [7.5], [12]]
    expected = torch.zeros(WIDE)
    for state, center, share in zip(states, centers, (1, 4 / 5, 4 / 6, 6 / 7.5, 0, 1), strict=True):
        expected = expected + share * (center - expected)
        torch.testing.assert_close(state.served[0], expected)


def three_clusters(engine):
    """Three clusters, all of whose numbers differ."""
    rows = torch.arange(1.0, 4.0).unsqueeze(1)
    return replace(
        Coterie().start(engine.task, engine, RNG),
        centers=rows.expand(3, WIDE),
        served=10 * rows.expand(3, WIDE),
        behind=torch.tensor([4.0, 5.0, 6.0]),
        curves=rows.expand(3, NUM_MIXES),
        shares=rows.expand(3, 2),
        made_in=torch.tensor([7, 8, 9]),
        due_in=torch.tensor([10, 0, 12]),
        merged=torch.tensor([False, True, False]),
        labels=torch.arange(SIDE) % 3,
    )


def test_the_parts_of_a_cut_are_served_as_they_are():
    """The mean over rounds is of the past; the other clusters keep theirs."""
    engine = mock(gap=0.0)
    engine.begin(5, "round")
    state = three_clusters(engine)
    update = Update(Coterie(), state, engine, keep=False)
    members = (state.labels == 1).nonzero().flatten()
    after = update._cut(state, 1, members, Kinds(torch.arange(len(members)) % 3, 11.0, 12.0))
    assert after.decisions[-1]["clusters"] == [1, 3, 4]
    assert after.centers[:, 0].tolist() == [1, 2, 3, 2, 2]
    assert after.served[:, 0].tolist() == [10, 2, 30, 2, 2]
    assert after.behind.tolist() == [4, 0, 6, 0, 0]
    assert after.curves[:, 0].tolist() == [1, 2, 3, 2, 2]
    assert after.made_in.tolist() == [7, 5, 9, 5, 5]
    assert after.due_in.tolist() == [10, 8, 12, 8, 8]
    assert after.merged.tolist() == [False] * 5


# ---- cuts that are tried ----

SMALL = 3.2  # q is about 5: clear, and not sure
PAYS = 0.2 + 0.1 * Rng.seed(3).normal(SIDE)  # what a part spares each client
COSTS = 0.1 * Rng.seed(3).normal(SIDE)
COSTS -= COSTS.mean()


def t_of(gains):
    return float(gains.mean() / gains.std() * math.sqrt(len(gains)))


def test_a_cut_that_is_not_sure_is_tried_first():
    engine = mock(SMALL, PAYS)
    warm, tried = driven(Coterie(warmup=1), engine, 2)
    assert tried.num_clusters == 1
    assert whats(tried) == [(2, "proposed")]
    assert tried.proposals == tried.decisions
    assert 0.4 < tried.proposals[0]["q"] < 10 < tried.proposals[0]["z"]
    models = torch.stack([trained_by(client, warm.centers[0]) for client in range(SIDE)])
    parts = [int(tried.tried[0]), int(tried.tried[1])]
    assert sorted(parts) == [0, 1]
    assert tried.tried.tolist() == parts * 10
    for label, part in enumerate(parts):
        torch.testing.assert_close(tried.trials[part], mean_of(models[label::2], SAMPLES[label::2]))
    torch.testing.assert_close(tried.centers[0], mean_of(models, SAMPLES))


@pytest.mark.parametrize(("gains", "what"), [(PAYS, "cut"), (COSTS, "refused"), (-PAYS, "refused")])
def test_a_cut_that_was_tried_is_made_if_its_members_gain(gains, what):
    engine = mock(SMALL, gains)
    _, proposed, after = driven(Coterie(warmup=1), engine, 3)
    assert [step for step, _ in engine.calls] == ["train_member", "train_member", "try_member"]
    assert whats(after) == [(2, "proposed"), (3, what)]
    assert after.decisions[-1]["t"] == pytest.approx(t_of(gains), abs=0.02)
    assert after.decisions[-1]["sizes"] == [10, 10]
    assert (after.proposals, len(after.trials), set(after.tried.tolist())) == ([], 0, {-1})
    models = torch.stack([trained_by(client, proposed.centers[0]) for client in range(SIDE)])
    if what == "cut":
        assert after.labels.tolist() in ([0, 1] * 10, [1, 0] * 10)
        for client in range(2):
            expected = mean_of(models[client::2], SAMPLES[client::2])
            torch.testing.assert_close(after.centers[after.labels[client]], expected)
    else:
        assert after.num_clusters == 1
        torch.testing.assert_close(after.centers[0], mean_of(models, SAMPLES))


@pytest.mark.parametrize(("serve", "what"), [("own", "refused"), ("kind", "cut")])
def test_a_cut_is_judged_by_what_clients_would_be_served_with(serve, what):
    """The part is better as it is, in the first mix; but another mix of the center is as good as it."""
    engine = mock(SMALL, PAYS)

    def respond(step, client, sent, **more):
        found = dict(original(step, client, sent, **more))
        if step == "try_member":
            found["losses"], found["tried"] = torch.full((2, NUM_MIXES), 1.0)
            found["tried"][:5] = 1.0 - float(PAYS[client])
            found["losses"][8] = 1.0 - float(PAYS[client]) - 0.01 * (client % 3)
        return found

    original, engine._respond = engine._respond, respond
    after = driven(Coterie(warmup=1, serve=serve), engine, 3)[-1]
    assert whats(after) == [(2, "proposed"), (3, what)]


def test_if_nobody_answers_the_trial_is_over():
    method, engine = Coterie(warmup=1), mock(SMALL, PAYS)
    states = driven(method, engine, 2)
    [after] = driven(method, mock(SMALL, PAYS, silent=range(SIDE)), 1, states[-1], first=3)
    assert (after.proposals, len(after.trials), set(after.tried.tolist())) == ([], 0, {-1})
    assert torch.equal(after.centers, states[-1].centers)
    assert after.labels.tolist() == [0] * SIDE
    proposed, refused = after.decisions
    assert refused == proposed | {"round": 3, "what": "refused"}
    assert refused["sizes"] == [10, 10]


def test_each_cut_is_judged_by_the_members_of_its_cluster():
    """Of two clusters that try a cut, nobody of the second answers."""
    engine = mock(SMALL)
    engine.begin(4, "round")
    labels, clients = torch.arange(SIDE) // 10, torch.arange(SIDE)
    proposals = [
        {"what": "proposed", "clusters": [cluster], "sizes": [5, 5], "z": 11.0 + cluster, "q": 5.0}
        for cluster in range(2)
    ]
    state = replace(
        three_clusters(engine),
        labels=labels,
        tried=2 * labels + clients % 2,
        trials=torch.zeros(4, WIDE),
        proposals=proposals,
        merged=torch.zeros(3, dtype=torch.bool),
    )
    update = Update(Coterie(), state, engine, keep=True)
    ones = torch.ones(10, NUM_MIXES).double()
    update._verdicts.add(clients[:10], ones, ones - PAYS[:10].unsqueeze(1))
    after = update.with_verdicts(state)
    assert whats(after) == [(4, "cut"), (4, "refused")]
    assert [decision["z"] for decision in after.decisions] == [11.0, 12.0]
    assert [decision["t"] for decision in after.decisions] == [pytest.approx(t_of(PAYS[:10]), abs=0.01), 0.0]
    assert after.labels.tolist() == [0, 3] * 5 + [1] * 10


def test_a_cut_that_too_few_could_try_is_not_proposed():
    """A fifth of twenty clients are four, which is enough; three are not."""
    for participation, what in ((0.2, "proposed"), (0.15, "refused")):
        engine = mock(SMALL, PAYS)
        engine.participation = participation
        state = driven(Coterie(warmup=1), engine, 2)[-1]
        assert whats(state) == [(2, what)]
        assert len(state.trials) == (2 if what == "proposed" else 0)


def test_a_refusal_is_recorded_when_all_were_to_sign():
    """Four clients sign in round 3, which is no news for the record; in round 8 all sign."""
    everyone = range(SIDE)
    states = served_after([everyone, range(16), *[everyone] * 6], Coterie(warmup=1))
    assert int(has_signature(states[1]).sum()) == 16
    assert int(has_signature(states[2]).sum()) == SIDE
    assert whats(states[-1]) == [(2, "refused"), (8, "refused")]
    assert [decision["signed_at"] for decision in states[-1].decisions] == ["common model", "centers"]
    assert [sum(decision["sizes"]) for decision in states[-1].decisions] == [16, SIDE]


def test_noise_is_estimated_from_all_who_signed(monkeypatch):
    """Also when clusters are looked at one by one."""
    seen = []

    def spy(found, noise, keys, limits):
        seen.append((len(found), noise))
        return find_kinds(found, noise, keys, limits)

    monkeypatch.setattr("coterie.methods.parts.cuts.find_kinds", spy)
    state = driven(Coterie(warmup=1), mock(gap=20.0), 20)[-1]
    assert whats(state) == [(2, "cut"), (20, "refused"), (20, "refused")]
    answers = [answer_of(client, 20.0) for client in range(SIDE)]
    rows, contrasts, counts = (
        torch.stack([answer[name] for answer in answers]) for name in ("signature", "contrast", "counts")
    )
    expected = Noise.of(Halves.of(rows.float(), contrasts.float(), counts))
    assert {count for count, _ in seen} == {SIDE, SIDE // 2}
    for _, noise in seen:
        torch.testing.assert_close(noise.size, expected.size)
        torch.testing.assert_close(noise.spread, expected.spread)


def with_a_third_kind(small):
    """Clients of which every other even one differs from the other even ones too, by `small`."""
    engine = mock(gap=20.0)

    def respond(step, client, sent, **more):
        found = dict(original(step, client, sent, **more))
        if "signature" in found and client % 4 == 2:
            found["signature"] = found["signature"] + math.sqrt(small) * torch.eye(WIDE)[1].half()
        return found

    original, engine._respond = engine._respond, respond
    return engine


@pytest.mark.parametrize(("small", "looks"), [(0.0, [2, 20]), (2.4, [2, 8, 20])])
def test_a_difference_that_is_almost_clear_is_looked_at_again(small, looks, monkeypatch):
    """Doubt is z of the last pair that was merged within a kind; from 3/4 of what is clear, there is a second look."""
    seen, signed_in = [], []

    def spy(*asked):
        seen.append(find_kinds(*asked))
        return seen[-1]

    monkeypatch.setattr("coterie.methods.parts.cuts.find_kinds", spy)
    engine = with_a_third_kind(small)
    respond = engine._respond

    def noted(step, client, sent, sign=None, **more):
        signed_in.append(engine.round) if sign is not None else None
        return respond(step, client, sent, sign=sign, **more)

    engine._respond = noted
    method = Coterie(warmup=1)
    states = driven(method, engine, 2)
    assert whats(states[-1]) == [(2, "cut")]
    whole, *parts = seen  # all clients, and then each of the two kinds by itself
    assert [len(part.labels) for part in parts] == [10, 10]
    assert states[-1].doubt == max(part.last for part in parts)
    assert (states[-1].doubt >= 0.75 * method.clear) == (8 in looks)
    assert whole.last < method.clear
    driven(method, engine, 18, states[-1], first=3)
    assert sorted(set(signed_in)) == looks


def test_a_client_that_moves_does_not_try_the_cut_of_its_old_cluster():
    """Two clusters try a cut each; client 0 moves from one to the other."""
    engine = MockEngine(lambda step, client, sent, **more: {"choice": 1}, num_clients=6)
    method = Coterie()
    engine.begin(8, "round")
    state = replace(
        method.start(engine.task, engine, RNG),
        centers=torch.tensor([[0.0, 0.0], [5.0, 5.0]]),
        labels=torch.tensor([0, 0, 0, 1, 1, 1]),
        pending=torch.tensor([True, False, False, False, False, False]),
        tried=torch.tensor([0, 0, 1, 2, 3, 3]),
        sent_in_rounds=1000,
    )
    after = method._rechosen(state, engine, engine.everyone(), RNG)
    assert after.labels.tolist() == [1, 0, 0, 1, 1, 1]
    assert after.tried.tolist() == [-1, 0, 1, 2, 3, 3]
    assert after.decisions[-1]["moves"] == [{"client": "client-0", "from_cluster": 0, "to_cluster": 1}]
    assert after.repairs == []  # a move is a decision


def test_the_parts_that_are_tried_are_means_of_those_who_signed():
    """Clients 0 and 1 train, but have nothing to sign with."""
    engine = mock(SMALL, PAYS)

    def respond(step, client, sent, **more):
        found = dict(original(step, client, sent, **more))
        if "counts" in found and client < 2:
            found |= {name: torch.zeros_like(found[name]) for name in ("signature", "contrast", "counts")}
        return found

    original, engine._respond = engine._respond, respond
    warm, tried = driven(Coterie(warmup=1), engine, 2)
    assert whats(tried) == [(2, "proposed")]
    assert tried.tried[:2].tolist() == [-1, -1]
    models = torch.stack([trained_by(client, warm.centers[0]) for client in range(SIDE)])
    for client in (2, 3):
        expected = mean_of(models[client::2], SAMPLES[client::2])
        torch.testing.assert_close(tried.trials[tried.tried[client]], expected)
    after = driven(Coterie(warmup=1), engine, 1, tried, first=3)[-1]
    assert engine.calls[-2:] == [("train_member", [0, 1]), ("try_member", list(range(2, SIDE)))]
    assert whats(after)[-1] == (3, "cut")
    assert after.labels[:2].tolist() == [0, 0]  # they stay


def test_a_client_whose_loss_has_risen_is_no_reason_to_cut():
    state = driven(Coterie(warmup=1), mock(gap=20.0), 2)[-1]
    state = replace(state, alarmed=torch.arange(SIDE) == 4)
    engine = mock(gap=20.0)
    engine.begin(8, "round")
    update = Update(Coterie(), state, engine, keep=True)
    members, found = update._evidence(state, 0)
    assert members.tolist() == [0, 2, *range(6, SIDE, 2)]
    assert len(found) == 9
    payload = {"sign": torch.ones(())}
    refs = torch.zeros(SIDE, dtype=torch.int64)
    for chunk in engine.call(
        train_member, engine.everyone(), models=state.centers, refs=refs, payload=payload, rng=RNG
    ):
        update.add(chunk)
    fresh, again = update._evidence(state, 0)
    assert fresh.tolist() == members.tolist()
    torch.testing.assert_close(again.first, found.first)


def test_a_client_that_was_not_seen_is_served_with_the_common_model():
    state = driven(Coterie(warmup=1), mock(gap=20.0), 2)[-1]
    state = replace(state, labels=state.labels.index_fill(0, torch.tensor([3]), -1), served=state.served + 1)
    found = Coterie().personal(state, torch.tensor([2, 3]))
    assert torch.equal(found.models[found.refs], torch.stack([state.served[0], state.common]))
    assert found.each["shares"].tolist() == [[4.75, 4.75], [0.0, 0.0]]


def test_clients_that_join_try_no_cut():
    [state] = driven(Coterie(), mock(gap=0.0), 1)
    more = state.with_more_clients(3)
    assert more.tried.tolist() == [-1] * (SIDE + 3)
    assert more.labels[SIDE:].tolist() == [-1] * 3
    assert more.contrasts.shape == (SIDE + 3, 2, WIDE)


def test_one_that_does_not_answer_keeps_its_cluster():
    """Its signature is gone, and so are those of its cluster: it is to choose by loss, and does not answer."""

    def respond(step, client, sent, **more):
        if client == 4 and step in ("choose", "sign_at"):
            raise RuntimeError("off")
        return {"choice": 0} if step == "choose" else answer_of(client, 0.0)

    engine, method = MockEngine(respond, num_clients=6, size=WIDE), Coterie()
    engine.begin(7, "round")
    state = method.start(engine.task, engine, RNG)
    state = replace(state, centers=state.centers.repeat(2, 1), labels=torch.tensor([0, 0, 0, 1, 1, -1]), signed_in=4)
    after = method._placed(state, engine, torch.tensor([3, 4, 5]), RNG)
    assert after.labels.tolist() == [0, 0, 0, 0, 1, 0]


def test_clusters_that_all_have_left_are_removed():
    method, engine = Coterie(), mock(gap=0.0)
    state = replace(three_clusters(engine), labels=torch.tensor([0, 2] * 9 + [-1, 2]))
    after = method._without_empty(state, engine)
    for name in ("centers", "served", "behind", "curves", "shares", "made_in", "due_in", "merged"):
        assert torch.equal(getattr(after, name), getattr(state, name)[[0, 2]]), name
    assert after.labels.tolist() == [0, 1] * 9 + [-1, 1]
    assert after.decisions[-1]["clusters"] == [1]
    assert replace(method, num_clusters=3)._without_empty(state, engine) is state


# ---- mergers ----


@pytest.mark.parametrize(("gains", "what"), [(COSTS, "merged"), (PAYS, "merged"), (-PAYS, "apart")])
def test_parts_that_one_model_serves_as_well_are_merged(gains, what):
    """Here gains are what the mean of both centers would spare each member."""
    states = driven(Coterie(warmup=1), mock(20.0, gains), 6)
    assert whats(states[-1]) == [(2, "cut"), (6, what)]
    assert [len(state.trials) for state in states] == [0, 0, 0, 0, 1, 0]
    torch.testing.assert_close(states[4].trials[0], states[4].centers.mean(0))
    assert states[-1].num_clusters == (1 if what == "merged" else 2)
    assert states[-1].merged.tolist() == ([True] if what == "merged" else [False, False])


@pytest.mark.parametrize(("errors", "what"), [(4.0, "cut"), (2.0, "refused")])
def test_a_merged_cluster_is_cut_only_if_a_trial_shows_it_clearly(errors, what):
    """The evidence for the same cut is as strong in round 8; now it is tried, and has to pay by three errors."""
    states = driven(Coterie(warmup=1), mock(20.0, COSTS), 7)
    gains = COSTS + errors * COSTS.std() / math.sqrt(SIDE)
    after = driven(Coterie(warmup=1), mock(20.0, gains), 2, states[-1], first=8)[-1]
    assert whats(after) == [(2, "cut"), (6, "merged"), (8, "proposed"), (9, what)]
    assert after.decisions[-1]["t"] == pytest.approx(errors, abs=0.01)
    assert after.merged.tolist() == ([False, False] if what == "cut" else [True])


def test_without_rounds_left_nothing_is_compared():
    method, engine = Coterie(warmup=1), mock(20.0, COSTS)
    engine.task = replace(engine.task, work=replace(engine.task.work, total_rounds=7))
    assert whats(driven(method, engine, 7)[-1]) == [(2, "cut")]


def test_a_number_of_clusters_that_was_asked_for_is_kept():
    states = driven(Coterie(warmup=1, num_clusters=2), mock(20.0, PAYS), 7)
    assert whats(states[-1]) == [(2, "cut")]


def test_nobody_signs_and_tries_in_one_round():
    """Two parts that were cut in round 4 are due after round 7; but in round 8 clients sign."""
    method, engine = Coterie(warmup=1), mock(20.0)
    state = driven(method, engine, 2)[-1]
    state = replace(state, due_in=torch.tensor([7, 7]), doubt=9.0)
    compared = []
    for number in (6, 7, 8):
        engine.begin(number, "round")
        compared.append(len(method._with_comparisons(state, engine).proposals))
    assert method._signs_in(state, 8, 20)
    assert compared == [0, 0, 1]


# ---- a whole run with trials ----


def test_a_trial_survives_a_restart(tmp_path):
    """Stopped after the round in which a cut was proposed: the rest is as if nothing had happened."""
    method = Coterie(warmup=1)
    whole = finished(setup(method, doubtful(), rounds=10))
    assert whats(whole.state)[:2] == [(2, "proposed"), (3, "cut")]
    folder = RunFolder.create(tmp_path, "run", "", {"run": {}})
    half = trainer_of(setup(method, doubtful(), rounds=10, checkpoint_every=0.0), folder)
    half._start()
    for number in (1, 2):
        half._round(number)
    assert half.state.proposals
    half._save()
    rest = trainer_of(setup(method, doubtful(), rounds=10), folder)
    checkpoint, problems = folder.load_checkpoint()
    assert checkpoint is not None
    assert not problems
    rest.restore(checkpoint)
    assert rest.state.proposals == half.state.proposals
    rest.run()
    folder.unlock()
    assert_same(outcome(whole), outcome(rest))


# ---- what is served ----


def test_a_kind_is_served_with_its_center():
    run = trainer_of(setup(Coterie(serve="kind")))
    run.run()
    for client in range(0, 30, 7):
        assert torch.equal(personal_vector(run, client), run.state.centers[run.state.labels[client]])
    block = run.engine.block_of(run.engine.everyone(), run.engine.plan)
    scores = block.evaluate(Models(run.state.centers, run.state.labels))
    assert torch.equal(torch.from_numpy(run.progress.scores[-1]["loss"]), scores["loss"])


def own_models(run):
    block = run.engine.block_of(run.engine.everyone(), run.engine.plan)
    return block.memory.get(OWN_MODEL, block.initial)


def test_clients_keep_the_model_that_they_trained_last():
    run = trainer_of(setup())
    calls = spied(run.engine)
    run._start()
    for number in range(1, 6):  # of six
        run._round(number)
    last = [call for call in calls if call[2] == "train_member"][-1]
    assert last[0] == 5
    bias = run.engine.task.output_bias
    for chunk in last[5]:
        own, sent = own_models(run)[chunk.clients], chunk.answer.params
        assert torch.equal(own[:, : bias.start], sent[:, : bias.start])
        assert not torch.equal(own[:, bias], sent[:, bias])  # what is sent has the cluster's label proportions


def test_own_models_are_finished_in_the_last_round(monkeypatch):
    """Clients keep what they finish, here where it helps at all, and send what they would have sent.

    One model for two kinds: own models have the larger share.
    """
    monkeypatch.setattr(personal, "_CLEAR", 1e-6)
    what = setup(Coterie(num_clusters=1), doubtful(), rounds=8)
    run = finished(what)
    monkeypatch.setattr(Coterie, "_finishing", lambda self, state, engine: torch.zeros(1, dtype=torch.bool))
    plain = finished(what)
    assert_same(run.state.tensors(), plain.state.tensors())
    finer = (own_models(run) != own_models(plain)).any(1)
    assert 0 < int(finer.sum()) < 30


def finishing_of(calls):
    """The rounds in which clients finish their own models, and the work for it."""
    return {
        number: float(call["payload"]["finish"]) for number, *_, call, _ in calls if "finish" in call.get("payload", {})
    }


def test_with_partial_participation_each_client_finishes_about_once():
    federation = two_kinds(60, samples=30, groups=3)
    run = trainer_of(setup(Coterie(num_clusters=1), federation, rounds=10, participation=0.3))
    calls = spied(run.engine)
    run.run()
    assert finishing_of(calls) == {8: 2.5, 9: 2.5, 10: 2.5}


def test_where_centers_serve_well_own_models_are_not_finished(partly):
    run, calls, _ = partly
    assert finishing_of(calls) == {}
    assert bool((run.state.curves.argmin(1) < 2 * len(SHIFTS)).all())  # an own share of at most 0.25


def test_own_models_are_finished_where_they_have_the_larger_share():
    """Clusters that prefer own shares of 0, 0.25, 0.5, 0.75 and 1; one of which nothing is known."""
    engine, method = mock(gap=0.0), Coterie()
    curves = torch.ones(6, NUM_MIXES)
    curves[torch.arange(5), len(SHIFTS) * torch.arange(5) + 1] = 0.5
    curves[5] = 0
    state = replace(method.start(engine.task, engine, RNG), curves=curves)
    larger, nowhere = [False, False, True, True, True, False], [False] * 6

    def finishing(number, total, participation=1.0, serve="own"):
        engine.round, engine.participation = number, participation
        engine.task = replace(engine.task, work=replace(engine.task.work, total_rounds=total))
        return replace(method, serve=serve)._finishing(state, engine).tolist()

    assert finishing(10, 10) == larger
    assert finishing(9, 10) == nowhere
    assert finishing(9, None) == nowhere
    assert finishing(10, 10, serve="kind") == nowhere
    assert [finishing(number, 10, 0.3) for number in (7, 8, 9, 10)] == [nowhere, larger, larger, larger]


def test_some_clusters_finish_and_others_do_not():
    """Only members of the second are told to; all train from their centers, and are averaged as ever."""
    method, engine = Coterie(), mock(gap=0.0)
    engine.task = replace(engine.task, work=replace(engine.task.work, total_rounds=10))
    told, respond = {}, engine._respond

    def noted(step, client, sent, finish=None, **more):
        told[client] = finish if finish is None else float(finish)
        return respond(step, client, sent, **more)

    engine._respond = noted
    state = three_clusters(engine)
    curves = torch.ones(3, NUM_MIXES).index_put((torch.arange(3), torch.tensor([0, 7, 4])), torch.tensor(0.5))
    state = replace(state, curves=curves, counts=state.counts + 1, signed_in=5)
    [after] = driven(method, engine, 1, state, first=10)
    assert told == {client: 2.5 if client % 3 == 1 else None for client in range(SIDE)}
    for label in range(3):
        models = torch.stack([trained_by(client, state.centers[label]) for client in range(label, SIDE, 3)])
        torch.testing.assert_close(after.centers[label], mean_of(models, SAMPLES[label::3]))


def test_longer_work():
    epochs, steps = replace(WORK, epochs=2), replace(WORK, steps=10)
    assert lengthened(epochs, 3.2) == replace(epochs, epochs=6)
    assert lengthened(epochs, 0.15) == replace(epochs, epochs=1)
    assert lengthened(epochs, 40.0) == replace(epochs, epochs=20)
    assert lengthened(steps, 3.2) == replace(steps, steps=32)
    assert lengthened(steps, 0.01) == replace(steps, steps=1)


# ---- signatures ----


def module() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 4)).double()


def gradient_by_hand(params, x, y):
    network = module()
    nn.utils.vector_to_parameters(params.clone(), network.parameters())
    nn.functional.cross_entropy(network(x.double()), y).backward()
    return nn.utils.parameters_to_vector([p.grad for p in network.parameters()])


def test_a_signature_is_of_two_halves_of_each_class():
    """Every other sample of a class is in the first half: their gradients by autograd."""
    run = trainer_of(setup())
    engine, federation = run.engine, run.federation
    block = engine.block_of(torch.tensor([3, 8, 21]), engine.plan)
    row = Rng.seed(2).normal(engine.task.layout.size)
    found = signed_halves(block, Models(row.unsqueeze(0), torch.zeros(3, dtype=torch.int64)), by_class=True)
    classes, width = halves_shape(engine.task, by_class=True)
    assert (classes, width) == (4, 32)
    sketch = sketch_of(engine.task.layout.num_parameters, width, Rng.seed(0).at("signature"), row.device)
    assert torch.equal(found["counts"], federation.label_counts()[[3, 8, 21]])
    for place, client in enumerate((3, 8, 21)):
        x, y = federation.samples(client, "train")
        for label in range(4):
            mine = (y == label).nonzero().flatten()
            if len(mine) < 2:
                continue
            halves = [gradient_by_hand(row, x[mine[part::2]], y[mine[part::2]]) for part in range(2)]
            whole = gradient_by_hand(row, x[mine], y[mine])
            expected = [sketch(rows.unsqueeze(0))[0] for rows in (whole, halves[0] - halves[1])]
            for name, rows in zip(("signature", "contrast"), expected, strict=True):
                assert found[name].dtype == torch.float16
                torch.testing.assert_close(found[name][place, label].double(), rows, rtol=2e-3, atol=1e-3)


def test_one_sample_of_a_class_has_no_contrast():
    rows = {f"c{i}": (RNG.at(i).normal(3, 1, 4, 4).float(), torch.tensor([0, 1, 1])) for i in range(2)}
    run = trainer_of(setup(federation=Federation.from_clients(rows, test=0.0, valid=0.0, num_classes=4)))
    block = run.engine.block_of(torch.arange(2), run.engine.plan)
    found = signed_halves(block, Models(block.initial, torch.arange(2)), by_class=True)
    assert found["counts"].tolist() == [[1, 2, 0, 0]] * 2
    assert not found["contrast"][:, 0].any()
    assert found["contrast"][:, 1].any()
    assert not found["signature"][:, 2:].any()


def test_those_who_sign_later_sign_at_the_same_coarse_model():
    run = trainer_of(setup())
    engine = run.engine
    row = Rng.seed(2).normal(engine.task.layout.size)
    clients, refs, sign = torch.arange(4), torch.zeros(4, dtype=torch.int64), torch.ones(())
    [first] = engine.call(train_member, clients, models=row.unsqueeze(0), refs=refs, payload={"sign": sign}, rng=RNG)
    coarse, scales = coarsened(row, engine.task.layout)
    payload = {"coarse": coarse, "scales": scales, "sign": sign}
    [later] = engine.call(sign_at, clients, payload=payload, rng=RNG)
    for name in ("signature", "contrast", "counts"):
        assert torch.equal(first.answer[name], later.answer[name])


def test_a_coarse_model_is_near():
    layout = trainer_of(setup()).engine.task.layout
    row = Rng.seed(2).normal(layout.size)
    row[layout.slots[1].start : layout.slots[1].stop] = 0
    coarse, scales = coarsened(row, layout)
    assert coarse.dtype == torch.int8
    found = restored(coarse, scales, layout)
    for slot, scale in zip(layout.slots, scales.tolist(), strict=True):
        mine = slice(slot.start, slot.stop)
        assert float((found[mine] - row[mine]).abs().max()) <= 0.5 * scale + 1e-12
        assert scale == pytest.approx(float(row[mine].abs().max()) / 127)


def test_gradients_that_are_too_large_for_half_precision_are_usable():
    rows = torch.full((2, 3, 400), 6e4).half()
    assert not torch.stack(list(unusable({"signature": rows}, 2, None).values())).any()
    rows[1, 0, 0] = torch.nan
    assert unusable({"signature": rows}, 2, None)["the answer is not finite"].tolist() == [False, True]


# ---- hard cases ----


def test_numbers_instead_of_classes():
    """Two kinds of clients with opposite slopes."""
    clients = {}
    for i in range(20):
        x = RNG.at("x", i).normal(30, 4).float()
        clients[f"c{i}"] = (x, (1 - 2 * (i % 2)) * x.sum(1, keepdim=True) + 0.1 * RNG.at("y", i).normal(30, 1).float())
    federation = Federation.from_clients(clients, groups={f"c{i}": i % 2 for i in range(20)})
    assert federation.num_classes == 0
    run = coterie.run(
        Coterie(), federation, lambda: nn.Linear(4, 1), loss="mse", rounds=10, work=SGD(lr=0.05, batch_size=5)
    )
    assert run.summary["ari"] == 1.0
    assert len(run.centers) == 2
    assert run.summary["loss"]["macro"] < 0.1
    assert run._trainer.state.shares.shape == (2, 0)


def test_clients_with_one_sample():
    clients = {f"c{i}": (RNG.at(i).normal(1, 1, 4, 4).float(), torch.tensor([i % 3])) for i in range(20)}
    federation = Federation.from_clients(clients, test=0.0, valid=0.0)
    run = finished(setup(Coterie(warmup=1), federation, rounds=9))
    assert run.state.num_clusters == 1
    assert not run.engine.failures
    assert bool(run.state.centers.isfinite().all())
    forced = finished(setup(Coterie(num_clusters=3, warmup=1), federation, rounds=9))
    assert forced.state.num_clusters == 3
    assert bool(forced.state.centers.isfinite().all())


def test_a_client_whose_model_is_not_a_number():
    """Client 5 has an input beyond all bounds among its training samples: it fails, and nobody else notices."""
    federation = two_kinds()
    x = federation.x.float()
    x[federation.train.rows(5)[0]] = 1e30
    run = finished(setup(federation=replace(federation, x=x), rounds=8))
    assert {failure.client for failure in run.engine.failures} == {federation.names[5]}
    assert run.state.num_clusters == 2
    others = torch.arange(30) != 5
    assert adjusted_rand_score(federation.groups[others], run.state.labels[others]) == 1.0
    for name, tensor in run.state.tensors().items():
        assert bool(tensor.isfinite().all()), name
    scores = run.progress.scores[-1]
    assert scores["accuracy"][others.numpy()].mean() > 0.95
    assert math.isfinite(scores["loss"][5])  # it is served with its center


def test_answers_that_arrive_broken():
    run = finished(setup(rounds=8, corrupt=0.1))
    assert {failure.reason for failure in run.engine.failures} == {"the answer is not finite"}
    assert run.summary()["ari"] == 1.0
    assert bool(run.state.centers.isfinite().all())


def test_attackers_do_not_hide_the_kinds_of_the_others():
    run = finished(setup(Coterie(robust="median"), rounds=8, attack="sign_flip", attackers=0.2))
    honest = ~run.attack.attackers
    assert int(honest.sum()) == 24
    assert adjusted_rand_score(run.federation.groups[honest], run.state.labels[honest]) == 1.0
    assert not set(run.state.labels[honest].tolist()) & set(run.state.labels[~honest].tolist())
    assert run.summary()["accuracy"]["macro"] > 0.95


def test_one_client_and_two():
    for count in (1, 2):
        run = finished(setup(Coterie(warmup=1), two_kinds(count), rounds=4))
        assert run.state.labels.tolist() in ([0], [0, 0], [0, 1])
        assert bool(run.state.centers.isfinite().all())
