from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import coterie
from coterie.client.steps import Answer
from coterie.engines.base import Chunk
from coterie.engines.mock import MockEngine
from coterie.errors import ConfigError
from coterie.methods.fedavg import FedAvg
from coterie.methods.md_icfl import MDICFL, weighted
from coterie.methods.parts.pseudo import Forward, class_distances, probabilities, search
from coterie.nets.flat import Network
from coterie.randomness import Rng
from coterie.runs.loop import Schedule
from coterie.settings import build
from tests.helpers import assert_same, finished, outcome, setup_of, trainer_of

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


def choose(method, context, chunk, state, engine):
    x, predictions = context
    distances = class_distances(engine.forward, chunk.answer.params, predictions, x)
    return method.nearest(distances, chunk.clients, state.counts, engine, RNG)


def test_weights_are_shares_of_labels():
    distances = torch.tensor([[[1.0, 2.0], [4.0, 0.0]]])  # one client, two centers, two classes
    assert weighted(distances, torch.tensor([[3, 1]])).tolist() == [[1.25, 3.0]]
    assert weighted(distances, torch.tensor([[0, 5]])).tolist() == [[2.0, 0.0]]
    assert weighted(distances, torch.tensor([[0, 0]])).tolist() == [[0.0, 0.0]]  # no NaN


def test_the_nearest_center_by_hand():
    """Class-wise distances: a sure model is 0.3 from center 0 at x = +-1, 0 at x = 0; from center 1 it is 1.3."""
    asked = []

    def respond(step, client, sent, distances):
        asked.append(distances)
        return {"choice": client % 2}

    engine, context = toy(respond)
    params = torch.stack([SURE, DUMB, -SURE])
    chunk = Chunk(torch.arange(3), torch.arange(3), Answer(params=params))
    strong = MDICFL(num_clusters=2, privacy="strong")
    state = strong.state_type.common_start(engine, 2)
    assert choose(strong, context, chunk, state, engine).tolist() == [0, 1, 0]
    by_class = torch.stack(asked)
    # Center 0, class 0: both samples at 1; class 1: one at -1, one at 0. The other center mirrored.
    assert by_class[0].tolist() == [pytest.approx([0.3, 0.15], abs=1e-6), pytest.approx([1.3, 0.65], abs=1e-6)]
    assert by_class[1].tolist() == [pytest.approx([0.5, 0.25], abs=1e-6), pytest.approx([0.5, 0.25], abs=1e-6)]
    assert by_class[2].tolist() == [pytest.approx([1.3, 0.65], abs=1e-6), pytest.approx([0.3, 0.15], abs=1e-6)]

    weak = MDICFL(num_clusters=2)
    for counts in ([[1, 1]] * 3, [[4, 0]] * 3, [[0, 9]] * 3):
        known = replace(state, counts=torch.tensor(counts))
        chosen = choose(weak, context, chunk, known, engine)
        assert chosen[[0, 2]].tolist() == [0, 1]


def test_what_a_client_has_decides():
    """Near center 0 on class 0 and near center 1 on class 1: the labels say which matters."""
    engine, _ = toy(lambda *a: {})
    x = torch.tensor([[[1.0], [1.0]], [[0.0], [1.0]]]).unsqueeze(-1)
    centers = torch.tensor([[LOG3, 0.0], [0.0, 0.0]])
    context = (x, probabilities(engine.forward, centers, x))
    chunk = Chunk(torch.arange(2), torch.arange(2), Answer(params=torch.stack([SURE, SURE])))
    # d(center 0) = (0.3, 0.3), d(center 1) = (0, 0.8): center 0 wherever class 1 is more than 3/8.
    method = MDICFL(num_clusters=2)
    state = replace(method.state_type.common_start(engine, 2), counts=torch.tensor([[6, 4], [7, 3]]))
    assert choose(method, context, chunk, state, engine).tolist() == [0, 1]


# ---- privacy ----


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("init", ["warm", "paper"])
@pytest.mark.parametrize("sampler", ["search", "generator"])
def test_weak_and_strong_privacy_give_the_same_run(sampler, init, participation):
    made = []
    for privacy in ("weak", "strong"):
        method = MDICFL(
            num_clusters=3, iterations=5, pseudo_samples=3, sampler=sampler, privacy=privacy, init=init, warmup=0
        )
        made.append(finished(setup_of(method, schedule=Schedule(rounds=4, participation=participation))))
    weak, strong = made
    assert_same(outcome(weak)["labels"], outcome(strong)["labels"])
    assert torch.equal(weak.state.centers, strong.state.centers)
    assert len({tuple(labels) for labels in outcome(weak)["labels"]}) > 1  # somebody moved


def answers_of(method, **schedule):
    """Every answer of a whole run, evaluation included: step -> names of what it tells."""
    trainer = trainer_of(setup_of(method, schedule=Schedule(rounds=4, **schedule)))
    answers: dict[str, set[str]] = {}
    call = trainer.engine.call

    def recorded(step, cohort, **more):
        for chunk in call(step, cohort, **more):
            answers.setdefault(step.__name__, set()).update(chunk.answer)
            for name, tensor in chunk.answer.items():
                wide = {"params": trainer.engine.task.layout.size, "counts": 3}.get(name, 1)
                assert tensor[0].numel() == wide
            yield chunk

    trainer.engine.call = recorded
    trainer.run()
    return answers, trainer


@pytest.mark.parametrize("init", ["warm", "paper"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_under_strong_privacy_nothing_but_the_nearest_center_is_told_of_labels(init, participation):
    answers, trainer = answers_of(MDICFL(**SMALL, privacy="strong", init=init), participation=participation)
    assert answers == {"train_only": {"params"}, "nearest": {"choice"}, "evaluate_privately": {"accuracy", "f1"}}
    steps = {name.partition("/")[2] for name in trainer.engine.ledger.entries}
    assert steps == set(answers)  # the ledger knows of no other
    assert trainer.state.counts.numel() == 0
    assert trainer.state.mean_samples in (0.0, 1.0)
    for row in trainer.progress.rows:
        assert row["loss"] is None
        assert row["accuracy"] is not None
        assert row["f1"] is not None


def test_under_strong_privacy_newcomers_and_repairs_tell_no_more():
    # From noise: after five iterations from old samples, some clients would agree with the center made below.
    answers, trainer = answers_of(MDICFL(**SMALL, privacy="strong", search_from="noise"))
    trainer.algorithm.assign(trainer.state, trainer.engine, torch.tensor([1, 2]), RNG)
    centers = trainer.state.centers.clone()
    centers[1] = 100 * RNG.at("far").normal(centers.shape[1])
    trainer.state = replace(trainer.state, centers=centers, labels=torch.zeros(9, dtype=torch.int64))
    trainer._round(5)
    assert trainer.state.repairs
    assert "repair/train_only" in trainer.engine.ledger.entries
    assert answers == {"train_only": {"params"}, "nearest": {"choice"}, "evaluate_privately": {"accuracy", "f1"}}


def test_under_weak_privacy_label_counts_are_told_once():
    answers, trainer = answers_of(MDICFL(**SMALL))
    assert answers.keys() == {"train_only", "label_counts", "evaluate"}
    assert (answers["train_only"], answers["label_counts"]) == ({"params"}, {"counts"})
    entries = trainer.engine.ledger.entries
    assert [name for name in entries if name.endswith("label_counts")] == ["start/label_counts"]
    assert entries["start/label_counts"]["messages"] == 9
    assert torch.equal(trainer.state.counts, trainer.federation.label_counts())


def test_models_are_not_weighted_by_what_clients_do_not_tell():
    with pytest.raises(ConfigError, match="weighting of MDICFL must be 'equal'"):
        build(MDICFL, {"weighting": "samples"}, "algorithm")


# ---- traffic ----


def test_traffic_is_that_of_fedavg_and_the_start():
    one = finished(setup_of(FedAvg())).engine.ledger.totals()
    many = finished(setup_of(MDICFL(**SMALL, warmup=0))).engine.ledger.totals()
    assert (many["down"], many["up"]) == (one["down"], one["up"])
    # Once more at the start, and 3 label counts of 8 bytes from each of 9 clients.
    assert many["start"]["down"] == one["down"] // 3
    assert many["start"]["up"] == one["up"] // 3 + 9 * 3 * 8


def test_strong_privacy_costs_a_small_table_each_round():
    one = finished(setup_of(FedAvg())).engine.ledger.totals()
    many = finished(setup_of(MDICFL(**SMALL, privacy="strong", warmup=0))).engine.ledger.totals()
    assert many["up"] == one["up"]
    assert many["down"] - one["down"] == 3 * 9 * 2 * 3 * 8  # rounds, clients, K, L, bytes
    assert many["scalars"] == 3 * 9 * 8  # the choice
    assert many["start"]["up"] == one["up"] // 3


# ---- failures ----


def test_a_client_that_does_not_answer_the_second_question_keeps_its_label():
    def respond(step, client, sent, distances=None):
        if step == "nearest":
            if client in (0, 3):
                raise TimeoutError("no answer")
            return {"choice": 1}
        return {"params": sent + client}

    engine, _ = toy(respond, clients=4)
    engine.begin(1, "round")
    method = MDICFL(**SMALL, privacy="strong", guard=False)
    state = method.state_type.common_start(engine, 2, sketches=torch.zeros(4, 2))
    state = replace(state, centers=CENTERS.clone(), labels=torch.tensor([0, 0, 1, -1]))
    engine.task = replace(engine.task, input_shape=(1,))
    after = method.round(state, engine, engine.everyone(), RNG)
    assert after.labels.tolist() == [0, 1, 1, -1]
    assert torch.equal(after.centers[0], CENTERS[0])  # client 0, which came back with its center
    assert torch.allclose(after.centers[1], (CENTERS[0] + 1 + CENTERS[1] + 2) / 2)  # clients 1 and 2
    assert {failure.step for failure in engine.failures} == {"coterie.algorithms.md_icfl:nearest"}


def test_data_without_classes_are_refused():
    engine, _ = toy(lambda *a: {})
    engine.task = replace(engine.task, num_classes=0)
    state = MDICFL().state_type.common_start(engine, 4)
    with pytest.raises(ConfigError, match="MD-ICFL generates pseudo data of classes; these data have none."):
        MDICFL().pseudo(state, engine, RNG)


def test_a_client_that_did_not_tell_its_label_counts_stays_where_it_is_and_is_asked_again():
    asked = []

    def respond(step, client, sent):
        if step == "label_counts":
            asked.append((engine.round, client))
            if client == 2 and engine.round < 2:
                raise TimeoutError("no answer")
            return {"counts": torch.tensor([1, 3])}
        return {"params": SURE}

    engine, _ = toy(respond, clients=4)
    engine.task = replace(engine.task, input_shape=(1,))
    method = MDICFL(**SMALL, init="paper", guard=False)
    state = method.start(engine.task, engine, RNG)
    assert state.counts.tolist() == [[1, 3], [1, 3], [0, 0], [1, 3]]
    state = replace(state, centers=CENTERS.clone(), labels=torch.tensor([1, 1, 1, -1]))
    engine.begin(1, "round")
    after = method.round(state, engine, engine.everyone(), RNG)
    assert after.labels.tolist() == [0, 0, 1, 0]
    engine.begin(2, "round")
    after = method.round(replace(after, centers=CENTERS.clone()), engine, engine.everyone(), RNG)
    assert after.labels.tolist() == [0, 0, 0, 0]
    assert asked == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 2)]


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
