from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import coterie
from coterie.client.steps import Answer
from coterie.data.federation import Move
from coterie.data.transforms import SwapLabels
from coterie.engines.base import Chunk
from coterie.engines.mock import MockEngine
from coterie.methods.fedavg import FedAvg
from coterie.methods.md_icfl import MDICFL, class_weights, nearest_center
from coterie.methods.parts.pseudo import Forward, class_distances, probabilities, search
from coterie.nets.flat import Network
from coterie.randomness import Rng
from coterie.runs.loop import Schedule
from tests.helpers import assert_same, finished, outcome, ragged_federation, setup_of, trainer_of

RNG = Rng.seed(0)
SMALL = {"num_clusters": 2, "iterations": 5, "pseudo_samples": 3}

# ---- by hand ----

LOG3 = math.log(3)
CENTERS = torch.tensor([[LOG3, 0.0], [0.0, LOG3]])
# One input, two outputs (a x, b x): softmax of center 0 is (3/4, 1/4) at x = 1 and (1/4, 3/4) at x = -1.
SAMPLES = torch.tensor([[[1.0, 1.0], [-1.0, 0.0]], [[-1.0, -1.0], [1.0, 0.0]]]).unsqueeze(-1)  # [K, L, M, 1]
DUMB = torch.zeros(2)  # (1/2, 1/2) everywhere, as all models at x = 0
SURE = torch.tensor([2 * LOG3, 0.0])  # (9/10, 1/10) at x = 1, (1/10, 9/10) at x = -1


def toy(respond, clients=3):
    """Two classes, one input, two weights."""
    engine = MockEngine(respond, num_clients=clients)
    engine.forward = Forward(Network(torch.nn.Linear(1, 2, bias=False), torch.float32, torch.device("cpu")), (1,))
    return engine, (SAMPLES, probabilities(engine.forward, CENTERS, SAMPLES))


def choose(method, context, chunk, labels, engine):
    x, predictions = context
    distances = class_distances(engine.forward, chunk.answer.params, predictions, x)
    return method.nearest(distances, chunk, torch.tensor(labels), engine, RNG)


def test_class_weights():
    counts = torch.tensor([[3, 0, 1], [0, 0, 0]])
    assert class_weights(counts, "plain").tolist() == [[3, 0, 1], [0, 0, 0]]
    assert class_weights(counts, "balanced").tolist() == [[1, 0, 1], [0, 0, 0]]


def test_by_the_plain_rule_classes_count_by_their_share():
    distances = torch.tensor([[[1.0, 2.0], [4.0, 0.0]]])  # one client, two centers, two classes
    for counts, expected in (([3, 1], 0), ([1, 3], 1), ([2, 3], 1), ([2, 2], 0), ([0, 5], 1), ([5, 0], 0)):
        # (3 + 2) / 4 against 12 / 4; (1 + 6) / 4 against 4 / 4; (2 + 6) / 5, 8 / 5 is a draw but for class 1 ...
        a, b = (sum(c * float(d) for c, d in zip(counts, row, strict=True)) for row in distances[0])
        assert nearest_center(distances, torch.tensor([counts]), None).tolist() == [expected if a != b else 0]


def test_by_the_balanced_rule_all_classes_held_count_alike():
    """Means over the classes held: 1.5 and 2.0 with both, 1 and 4 with the first, 2 and 0 with the second."""
    distances = torch.tensor([[[1.0, 2.0], [4.0, 0.0]]])
    nobody = torch.tensor([-1])
    for counts in ([1, 1], [1, 99], [99, 1]):
        assert nearest_center(distances, torch.tensor([counts]), nobody).tolist() == [0]
    assert nearest_center(distances, torch.tensor([[7, 0]]), nobody).tolist() == [0]
    assert nearest_center(distances, torch.tensor([[0, 7]]), nobody).tolist() == [1]
    assert nearest_center(distances, torch.tensor([[1, 99]]), None).tolist() == [1]  # the plain rule


def test_by_the_balanced_rule_a_client_moves_only_to_a_clearly_nearer_center():
    own = torch.tensor([1, 1, 1, -1, 0])
    least = torch.tensor([0.71, 0.69, 1.0, 0.99, 5.0])
    distances = torch.stack([least, torch.ones(5)], dim=1).unsqueeze(2)  # [5, 2, 1], 1 from center 1
    found = nearest_center(distances, torch.ones(5, 1, dtype=torch.int64), own)
    # Not clearly; clearly; a draw; has no center yet; five times as far as the other.
    assert found.tolist() == [1, 0, 1, 0, 1]
    silent = nearest_center(distances, torch.zeros(5, 1, dtype=torch.int64), own)
    assert silent.tolist() == [1, 1, 1, 0, 0]  # no samples, no distance: it stays


def test_the_nearest_center_by_hand():
    """Class-wise distances: a sure model is 0.3 from center 0 at x = +-1, 0 at x = 0; from center 1 it is 1.3."""
    asked = []

    def respond(step, client, sent, distances, own):
        asked.append(distances)
        assert own == [1, 1, 0][client]
        return {"choice": client % 2}

    engine, context = toy(respond)
    params = torch.stack([SURE, DUMB, -SURE])
    chunk = Chunk(torch.arange(3), torch.arange(3), Answer(params=params))
    strong = MDICFL(num_clusters=2, privacy="strong")
    assert choose(strong, context, chunk, [1, 1, 0], engine).tolist() == [0, 1, 0]
    by_class = torch.stack(asked)
    # Center 0, class 0: both samples at 1; class 1: one at -1, one at 0. The other center mirrored.
    assert by_class[0].tolist() == [pytest.approx([0.3, 0.15], abs=1e-6), pytest.approx([1.3, 0.65], abs=1e-6)]
    assert by_class[1].tolist() == [pytest.approx([0.5, 0.25], abs=1e-6), pytest.approx([0.5, 0.25], abs=1e-6)]
    assert by_class[2].tolist() == [pytest.approx([1.3, 0.65], abs=1e-6), pytest.approx([0.3, 0.15], abs=1e-6)]

    for rule in ("balanced", "plain"):
        weak = MDICFL(num_clusters=2, rule=rule)
        for counts in ([[1, 1]] * 3, [[4, 0]] * 3, [[0, 9]] * 3):
            known = Chunk(torch.arange(3), torch.arange(3), Answer(params=params, counts=torch.tensor(counts)))
            assert choose(weak, context, known, [1, 1, 0], engine)[[0, 2]].tolist() == [0, 1]


def test_what_a_client_has_decides():
    """Near center 0 on class 0 and near center 1 on class 1: the labels say which matters."""
    engine, _ = toy(lambda *a: {})
    x = torch.tensor([[[1.0], [1.0]], [[0.0], [1.0]]]).unsqueeze(-1)
    centers = torch.tensor([[LOG3, 0.0], [0.0, 0.0]])
    context = (x, probabilities(engine.forward, centers, x))
    # d(center 0) = (0.3, 0.3), d(center 1) = (0, 0.8): center 0 wherever class 1 is more than 3/8.
    counts = torch.tensor([[6, 4], [7, 3]])
    chunk = Chunk(torch.arange(2), torch.arange(2), Answer(params=torch.stack([SURE, SURE]), counts=counts))
    assert choose(MDICFL(num_clusters=2, rule="plain"), context, chunk, [1, 0], engine).tolist() == [0, 1]
    # Balanced: 0.3 against 0.4, which is not clearly nearer.
    assert choose(MDICFL(num_clusters=2), context, chunk, [1, 0], engine).tolist() == [1, 0]


# ---- privacy ----


@pytest.mark.parametrize("rule", ["balanced", "plain"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("init", ["warm", "paper"])
@pytest.mark.parametrize("sampler", ["search", "generator"])
def test_weak_and_strong_privacy_give_the_same_run(sampler, init, participation, rule):
    """If the weak one keeps to what the strong one may use: updates in the start, and equal weights."""
    made = []
    for privacy in ("weak", "strong"):
        method = MDICFL(
            num_clusters=3,
            iterations=5,
            pseudo_samples=3,
            sampler=sampler,
            privacy=privacy,
            init=init,
            guard=init == "paper" or rule == "balanced",  # without it, the plain rule moves clients by itself
            warmup=0,
            rule=rule,
            signal="updates",
            weighting="equal",
        )
        made.append(finished(setup_of(method, schedule=Schedule(rounds=4, participation=participation))))
    weak, strong = made
    assert_same(outcome(weak)["labels"], outcome(strong)["labels"])
    assert torch.equal(weak.state.centers, strong.state.centers)
    assert torch.equal(weak.state.pending, strong.state.pending)
    if init == "paper" or rule == "plain":  # after a warm start, the balanced rule has nobody to move
        assert len({tuple(labels) for labels in outcome(weak)["labels"]}) > 1


def answers_of(method, **schedule):
    """Every answer of a whole run, evaluation included: step -> names of what it tells."""
    trainer = trainer_of(setup_of(method, schedule=Schedule(rounds=4, **schedule)))
    answers: dict[str, set[str]] = {}
    answers_to = trainer.engine.answers

    def recorded(request):
        for chunk in answers_to(request):
            answers.setdefault(request.step.__name__, set()).update(chunk.answer)
            for name, tensor in chunk.answer.items():
                size = trainer.engine.task.layout.size
                wide = {"params": size, "counts": 3, "signature": 3 * size}.get(name, 1)
                assert tensor[0].numel() == wide
            yield chunk

    trainer.engine.answers = recorded
    trainer.run()
    return answers, trainer


TOLD = {  # what may leave a client under strong privacy: models, an alarm, an index, and scores
    "train_only": {"params", "alarm"},
    "nearest": {"choice"},
    "choose": {"choice"},
    "evaluate_privately": {"accuracy", "f1", "valid_accuracy", "valid_samples"},  # the last: whether there are some
}


@pytest.mark.parametrize("init", ["warm", "paper"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_under_strong_privacy_nothing_is_told_of_labels_losses_and_samples(init, participation):
    answers, trainer = answers_of(MDICFL(**SMALL, privacy="strong", init=init), participation=participation)
    assert answers.keys() >= {"train_only", "nearest", "evaluate_privately"}
    for step, names in answers.items():
        assert names <= TOLD[step]
    steps = {name.partition("/")[2] for name in trainer.engine.ledger.entries}
    assert steps == set(answers)  # the ledger knows of no other
    starts = {name for name in trainer.engine.ledger.entries if name.startswith("start/")}
    assert starts == ({"start/train_only"} if init == "warm" else set())
    assert trainer.state.counts.numel() == 0 or set(trainer.state.counts.flatten().tolist()) <= {0, 1}
    assert trainer.state.mean_samples in (0.0, 1.0)
    for row in trainer.progress.rows:
        assert row["loss"] is None
        assert row["accuracy"] is not None
        assert row["f1"] is not None


def test_the_alarm_is_one_bit():
    trainer = trainer_of(setup_of(MDICFL(**SMALL, privacy="strong")))
    alarms = []
    call = trainer.engine.call

    def recorded(step, cohort, **more):
        for chunk in call(step, cohort, **more):
            if "alarm" in chunk.answer:
                alarms.append(chunk.answer.alarm)
            yield chunk

    trainer.engine.call = recorded
    trainer.run()
    assert len(alarms) == 3
    assert all(alarm.dtype == torch.bool and alarm.shape == (9,) for alarm in alarms)


def test_under_strong_privacy_newcomers_and_repairs_tell_no_more():
    # From noise: after five iterations from old samples, some clients would agree with the center made below.
    answers, trainer = answers_of(MDICFL(**SMALL, privacy="strong", search_from="noise"))
    trainer.algorithm.assign(trainer.state, trainer.engine, torch.tensor([1, 2]), RNG)
    centers = trainer.state.centers.clone()
    centers[1] = 100 * RNG.at("far").normal(centers.shape[1])
    pending = torch.ones(9, dtype=torch.bool)
    labels = torch.zeros(9, dtype=torch.int64)
    trainer.state = replace(trainer.state, centers=centers, labels=labels, pending=pending, sent_in_rounds=1000)
    trainer._round(5)  # the empty cluster is repaired; in the next round the pending clients choose
    trainer._round(6)
    assert trainer.state.repairs
    assert {"repair/train_only", "repair/choose"} <= set(trainer.engine.ledger.entries)
    for step, names in answers.items():
        assert names <= TOLD[step]


def test_under_weak_privacy_label_counts_come_with_the_model():
    answers, trainer = answers_of(MDICFL(**SMALL))
    assert answers.keys() == {"train_and_count", "train_and_sign", "evaluate"}
    assert answers["train_and_count"] == {"params", "counts", "alarm"}
    assert answers["train_and_sign"] == {"params", "samples", "signature", "counts"}
    assert torch.equal(trainer.state.counts, trainer.federation.label_counts())


def test_without_the_guard_no_alarm_is_sent():
    answers, _ = answers_of(MDICFL(**SMALL, guard=False))
    assert answers["train_and_count"] == {"params", "counts"}


def test_weak_privacy_uses_the_label_counts_of_the_round():
    """Labels 0 and 2 are exchanged from round 2 on: the counts that the server sees are exchanged too."""
    federation = ragged_federation(9)
    swapped = replace(
        federation,
        views=((), (SwapLabels(0, 2),)),
        view=torch.zeros(9, dtype=torch.int64),
        moves=(Move(2, torch.ones(9, dtype=torch.int64), federation.groups),),
    )
    trainer = trainer_of(setup_of(MDICFL(**SMALL), swapped))
    seen = {}
    plain = MDICFL.nearest

    def spy(self, distances, chunk, labels, engine, rng):
        seen.setdefault(engine.round, {}).update(zip(chunk.clients.tolist(), chunk.answer.counts.tolist(), strict=True))
        return plain(self, distances, chunk, labels, engine, rng)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MDICFL, "nearest", spy)
        trainer.run()
    true = federation.label_counts().tolist()
    assert [seen[1][i] for i in range(9)] == true
    for number in (2, 3):
        assert [seen[number][i] for i in range(9)] == [row[::-1] for row in true]
    assert true != [row[::-1] for row in true]


def test_models_are_weighted_by_samples_where_counts_are_told():
    chunk = Chunk(
        torch.arange(2), torch.arange(2), Answer(params=torch.zeros(2, 1), counts=torch.tensor([[3, 1], [0, 2]]))
    )
    bare = Chunk(torch.arange(2), torch.arange(2), Answer(params=torch.zeros(2, 1)))
    assert MDICFL().weights_of(chunk).tolist() == [4, 2]
    assert MDICFL(weighting="equal").weights_of(chunk).tolist() == [1.0, 1.0]
    assert MDICFL(privacy="strong").weights_of(bare).tolist() == [1.0, 1.0]


# ---- traffic ----


def test_traffic_is_that_of_fedavg_and_the_start():
    one = finished(setup_of(FedAvg())).engine.ledger.totals()
    many = finished(setup_of(MDICFL(**SMALL, warmup=0))).engine.ledger.totals()
    # Each answer has 3 label counts of 8 bytes besides.
    assert (many["down"], many["up"]) == (one["down"], one["up"] + 3 * 9 * 3 * 8)
    # Once more at the start, with a row of 123 floats for each of 3 classes.
    assert many["start"]["down"] == one["down"] // 3
    assert many["start"]["up"] == one["up"] // 3 + 9 * (3 * 123 * 8 + 3 * 8)


def test_strong_privacy_costs_a_small_table_each_round():
    one = finished(setup_of(FedAvg())).engine.ledger.totals()
    many = finished(setup_of(MDICFL(**SMALL, privacy="strong", warmup=0))).engine.ledger.totals()
    assert many["up"] == one["up"]
    assert many["down"] - one["down"] == 3 * 9 * 2 * 3 * 8  # rounds, clients, K, L, bytes
    # The choice, the present center that it is compared with, the alarm, and the scalar that asks for it (float32).
    assert many["scalars"] == 3 * 9 * (8 + 8 + 1 + 4)
    assert many["start"]["up"] == one["up"] // 3


# ---- failures ----


def test_a_client_that_does_not_answer_the_second_question_keeps_its_label():
    def respond(step, client, sent, distances=None, own=None):
        if step == "choose":
            raise TimeoutError("no answer")
        if step == "nearest":
            if client in (0, 3):
                raise TimeoutError("no answer")
            return {"choice": 1}
        return {"params": sent + client}

    engine, _ = toy(respond, clients=4)
    engine.begin(1, "round")
    method = MDICFL(**SMALL, privacy="strong", guard=False)
    state = replace(method.empty_state(engine), centers=CENTERS.clone(), labels=torch.tensor([0, 0, 1, -1]))
    engine.task = replace(engine.task, input_shape=(1,))
    after = method.round(state, engine, engine.everyone(), RNG)
    assert after.labels.tolist() == [0, 1, 1, -1]
    assert torch.equal(after.centers[0], CENTERS[0])  # client 0, which came back with its center
    assert torch.allclose(after.centers[1], (CENTERS[0] + 1 + CENTERS[1] + 2) / 2)  # clients 1 and 2
    assert {(failure.step, failure.client) for failure in engine.failures} == {
        ("coterie.block:choose", "client-3"),
        ("coterie.algorithms.md_icfl:nearest", "client-0"),
    }


# ---- samples of the last round ----


def with_centers(method, samples=None):
    engine, _ = toy(lambda *a: {})
    engine.task = replace(engine.task, input_shape=(1,))
    state = replace(method.state_type.common_start(engine, 2), centers=CENTERS.clone())
    return engine, state if samples is None else replace(state, samples=samples)


def test_a_search_starts_from_the_samples_of_the_last_round():
    method = MDICFL(**SMALL, refresh=3)
    engine, state = with_centers(method)
    first, _ = method.pseudo(state, engine, RNG)
    assert torch.equal(first, MDICFL(**SMALL, search_from="noise").pseudo(state, engine, RNG)[0])
    kept = method.with_samples(state, first)
    again, _ = method.pseudo(kept, engine, Rng.seed(7))
    more = {"samples": 3, "iterations": 3, "start": first}
    assert torch.equal(again, search(engine.forward, CENTERS, 2, (1,), RNG, **more))
    few = method.pseudo_data(kept, engine, Rng.seed(7), 2)  # as the exhibits want them
    assert torch.equal(few, again[:, :, :2])


def test_after_a_repair_and_with_random_centers_a_search_starts_from_noise():
    method = MDICFL(**SMALL, refresh=3)
    engine, state = with_centers(method)
    first, _ = method.pseudo(state, engine, RNG)
    kept = replace(state, samples=first + 1)
    for repaired_in, goes_on in [(2, True), (4, False), (5, False)]:
        engine.begin(5, "round")
        again, _ = method.pseudo(replace(kept, repaired_in=repaired_in), engine, RNG)
        assert torch.equal(again, first) is not goes_on
    paper = MDICFL(**SMALL, init="paper")
    assert torch.equal(paper.pseudo(kept, engine, RNG)[0], first)
    assert paper.with_samples(state, first).samples.numel() == 0


@pytest.mark.parametrize("shape", [(3, 2, 3, 1), (2, 2, 2, 1), (2, 2, 3, 1, 1)])
def test_samples_of_another_shape_are_not_used(shape):
    method = MDICFL(**SMALL)
    engine, state = with_centers(method)
    expected, _ = method.pseudo(state, engine, RNG)
    assert torch.equal(method.pseudo(replace(state, samples=torch.ones(shape)), engine, RNG)[0], expected)


@pytest.mark.parametrize("more", [{"search_from": "noise"}, {"sampler": "generator"}])
def test_samples_are_kept_only_where_they_are_used(more):
    assert finished(setup_of(MDICFL(**SMALL, **more))).state.samples.numel() == 0
    assert finished(setup_of(MDICFL(**SMALL))).state.samples.shape[:3] == (2, 3, 3)


# ---- after a run ----


@pytest.fixture(scope="module")
def trained():
    return coterie.run(MDICFL(), "rotated-digits", rounds=4, evaluate_every=4)


@pytest.mark.parametrize("sampler", ["search", "generator"])
def test_pseudo_samples_are_called_their_class_by_their_own_center(trained, sampler):
    trainer = trained._trainer
    x, predictions = MDICFL(sampler=sampler).pseudo(trainer.state, trainer.engine, RNG)
    assert x.shape[:3] == (4, 10, 30)
    called = predictions.argmax(-1)  # [K, L, M]
    share = (called == torch.arange(10).reshape(1, -1, 1)).double().mean((1, 2))
    assert (share >= 0.95).all()


def test_samples_of_another_center_become_its_own_in_one_round(trained):
    """A repair replaces a center: the samples in the state are then those of another model."""
    trainer = trained._trainer
    state = trainer.state
    other = replace(state, samples=state.samples.roll(1, dims=0))
    method = MDICFL()
    before = probabilities(trainer.engine.forward, state.centers, other.samples)
    _, after = method.pseudo(other, trainer.engine, RNG)
    right = [(p.argmax(-1) == torch.arange(10).reshape(1, -1, 1)).double().mean() for p in (before, after)]
    assert right[0] < 0.7
    assert right[1] > 0.95


def test_finds_the_groups_of_rotated_digits(trained):
    assert trained.summary["ari"] == 1.0
