from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import coterie
from coterie.client.work import SGD
from coterie.engines.mock import MockEngine
from coterie.methods.fedavg import FedAvg
from coterie.methods.fesem import FeSEM
from coterie.randomness import Rng
from coterie.runs.loop import Schedule
from tests.helpers import assert_same, finished, outcome, ragged_federation, setup_of, trainer_of

RNG = Rng.seed(0)
TARGETS = torch.tensor([[0.0, 1.0], [0.0, 1.2], [5.0, 0.0], [5.2, 0.0], [5.1, 0.3]])


def go_home(step, client, sent, watch=None):
    """Each client's model is its own fixed point, wherever it started."""
    if step == "choose":
        return {"choice": (sent - TARGETS[client]).norm(dim=1).argmin()}
    return {"params": TARGETS[client], "samples": client + 1}


def started(method: FeSEM, respond=go_home, clients: int = 5):
    engine = MockEngine(respond, num_clients=clients, chunk=2)
    return engine, method.start(engine.task, engine, Rng.seed(0))


def test_start_is_k_means_of_models_from_one_start():
    engine, state = started(FeSEM(num_clusters=2, init="paper", weighting="equal"))
    assert engine.calls == [("train_member", [0, 1, 2, 3, 4])]
    a, b = int(state.labels[0]), int(state.labels[2])
    assert state.labels.tolist() == [a, a, b, b, b]
    assert a != b
    assert state.centers[a].tolist() == pytest.approx([0.0, 1.1])
    assert state.centers[b].tolist() == pytest.approx([5.1, 0.1])
    assert state.signatures.numel() == 0
    assert state.mean_samples == 3.0


def test_start_counts_as_round_zero():
    engine, _ = started(FeSEM(num_clusters=2, init="paper"))
    totals = engine.ledger.totals()
    assert (totals["down"], totals["up"]) == (0, 0)
    assert totals["start"] == {"down": 5 * 8, "up": 5 * 8, "scalars": 5 * 8}


def test_weighting_by_samples():
    _, state = started(FeSEM(num_clusters=2, init="paper"))
    a = int(state.labels[0])
    assert state.centers[a].tolist() == pytest.approx([0.0, (1 * 1.0 + 2 * 1.2) / 3])


def test_round_assigns_to_the_nearest_center_and_averages():
    method = FeSEM(num_clusters=2, init="paper", weighting="equal")
    engine, state = started(method)
    wrong = replace(state, centers=torch.tensor([[0.0, 0.0], [4.0, 0.0]]), labels=torch.tensor([1, 0, 0, 1, 0]))
    after = method.round(wrong, engine, engine.everyone(), Rng.seed(0))
    assert after.labels.tolist() == [0, 0, 1, 1, 1]
    assert after.centers[0].tolist() == pytest.approx([0.0, 1.1])
    assert after.centers[1].tolist() == pytest.approx([5.1, 0.1])


def test_round_with_a_cohort_averages_the_cohort():
    method = FeSEM(num_clusters=2, init="paper")
    engine, state = started(method)
    after = method.round(state, engine, torch.tensor([1, 4]), Rng.seed(0))
    assert torch.equal(after.labels, state.labels)
    assert after.centers[int(state.labels[1])].tolist() == pytest.approx([0.0, 1.2])
    assert after.centers[int(state.labels[4])].tolist() == pytest.approx([5.1, 0.3])


def test_cosine_looks_at_the_direction_of_the_update():
    turned = torch.tensor([[1.0, 0.1], [9.0, 1.0], [0.1, 1.0], [1.0, 9.0], [0.0, 5.0]])
    _, state = started(
        FeSEM(num_clusters=2, distance="cosine", init="paper"), lambda s, c, m: {"params": turned[c], "samples": 1}
    )
    a, b = int(state.labels[0]), int(state.labels[2])
    assert a != b
    assert state.labels.tolist() == [a, a, b, b, b]
    _, by_l2 = started(FeSEM(num_clusters=2, init="paper"), lambda s, c, m: {"params": turned[c], "samples": 1})
    assert by_l2.labels[0] != by_l2.labels[1]


def test_head_looks_at_the_last_layer_only():
    setup = setup_of(FeSEM(num_clusters=2, layers="head"))
    trainer = trainer_of(setup)
    trainer._start()
    seen = trainer.algorithm._columns(trainer.engine.task)
    head = [slot for slot in trainer.engine.task.layout.parameters if slot.name.startswith("3.")]
    assert (seen.start, seen.stop) == (head[0].start, head[-1].stop)
    centers = trainer.state.centers.clone()
    centers[:, : seen.start] += 50.0 * torch.tensor([[1.0], [-1.0]])  # far apart, but not in the head
    state = replace(trainer.state, centers=centers)
    trainer.engine.begin(1, "round")
    rng = trainer._rng.at("x")
    models = torch.randn(3, centers.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = trainer.algorithm.distances(models, state, trainer.engine)
    assert torch.allclose(found, torch.cdist(models[:, seen], centers[:, seen]) ** 2)
    assert trainer.algorithm.round(state, trainer.engine, trainer.engine.everyone(), rng).labels.min() >= 0


def test_a_client_seen_late_is_placed_trains_from_its_center_and_counts_in_it():
    method = FeSEM(num_clusters=2, init="paper", weighting="equal")
    engine, state = started(method)
    sent_to = {}

    def respond(step, client, sent, watch=None):
        sent_to.setdefault(client, []).append((step, sent.tolist()))
        return go_home(step, client, sent)

    late = MockEngine(respond, num_clients=5)
    late.begin(1, "round")
    new = replace(state, labels=state.labels.clone().index_fill(0, torch.tensor([3]), -1))
    after = method.round(new, late, torch.tensor([2, 3]), Rng.seed(0))
    home = state.centers[int(state.labels[2])].tolist()
    assert sent_to[3] == [("choose", state.centers.tolist()), ("train_member", home)]
    assert sent_to[2] == [("train_member", home)]
    assert after.labels[3] == state.labels[2]
    assert after.centers[int(after.labels[2])].tolist() == pytest.approx(TARGETS[2:4].mean(0).tolist())
    assert method.assign(state, engine, torch.tensor([4, 0]), Rng.seed(0)).tolist() == state.labels[[4, 0]].tolist()


def test_stops_when_stable():
    trainer = finished(setup_of(FeSEM(num_clusters=2, tolerance=1e9, patience=2), schedule=Schedule(rounds=20)))
    summary = trainer.summary()
    assert summary["stopped_early"]
    assert 2 <= summary["rounds"] < 20
    assert finished(setup_of(FeSEM(num_clusters=2))).summary()["rounds"] == 3


def test_proximal_term_holds_models_near_their_center():
    loose = finished(setup_of(FeSEM(num_clusters=2), schedule=Schedule(rounds=1)))
    tight = finished(setup_of(FeSEM(num_clusters=2, prox=4.0), schedule=Schedule(rounds=1)))

    def moved(trainer):
        return float((trainer.state.centers - trainer.engine.initial()).norm())

    assert moved(tight) < 0.8 * moved(loose)


def test_proximal_term_of_the_paper_is_larger_for_small_clients():
    """prox_i = prox * mean samples / samples: equal to the plain one where all clients are equal."""
    even = ragged_federation(spread=0.0)
    methods = [FeSEM(num_clusters=2, prox=1.0, prox_scale=scale) for scale in ("equal", "paper")]
    plain, paper = (finished(setup_of(m, even)) for m in methods)
    assert_same(outcome(plain)["state"], outcome(paper)["state"], exact=False, tolerance=1e-9)
    plain, paper = (finished(setup_of(m)) for m in methods)
    assert not torch.allclose(plain.state.centers, paper.state.centers, rtol=1e-3)


def test_sketched_start_finds_the_same_clusters(monkeypatch):
    """Where the local models do not fit: sketches for k-means, a second pass for the centers."""
    federation = ragged_federation(20, shape=(1, 12, 12), samples=40)
    work = SGD(lr=0.2, epochs=3, batch_size=10)
    method = FeSEM(num_clusters=2, init="paper")
    small = setup_of(method, federation, model_settings={"hidden": 500}, work=work)
    held, sketched = trainer_of(small), trainer_of(small)
    sketched.engine.memory_budget = lambda: 1
    held._start()
    monkeypatch.setattr("coterie.methods.parts.start._WHOLE", 0)
    sketched._start()
    assert torch.equal(held.state.labels, sketched.state.labels)
    assert torch.allclose(held.state.centers, sketched.state.centers, rtol=1e-9, atol=1e-12)
    start = sketched.engine.ledger.totals()["start"]
    assert start["up"] == 2 * start["down"]  # answers twice, the same model down once
    assert small.task().layout.size > 4096  # wider than the sketches it was clustered by


def test_traffic_is_that_of_fedavg_and_the_start():
    one = finished(setup_of(FedAvg())).engine.ledger.totals()
    many = finished(setup_of(FeSEM(num_clusters=3))).engine.ledger.totals()
    assert (many["down"], many["up"]) == (one["down"], one["up"])
    assert many["start"]["down"] == 4 * one["down"] // 3  # three rounds of warm-up, and the models that are clustered
    # Nine clients sign: a row for each of three classes, as wide as the model (123 floats), and three counts.
    size = setup_of(FedAvg()).task().layout.num_parameters
    assert size == 16 * 6 + 6 + 6 * 3 + 3
    assert many["start"]["up"] == 4 * one["up"] // 3 + 9 * (3 * size * 8 + 3 * 8)
    bare = finished(setup_of(FeSEM(num_clusters=3, init="paper"))).engine.ledger.totals()
    assert bare["start"]["down"] == one["down"] // 3
    assert one["start"]["down"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_finds_four_kinds_and_beats_one_model(seed):
    fesem = coterie.run("fesem", "rotated-digits", rounds=20, seed=seed).summary
    fedavg = coterie.run("fedavg", "rotated-digits", rounds=20, seed=seed).summary
    assert fesem["ari"] == 1.0
    assert fesem["accuracy"]["macro"] >= 0.95
    assert fedavg["accuracy"]["macro"] <= fesem["accuracy"]["macro"] - 0.06


def test_assign_from_python_puts_new_clients_with_their_kind():
    from coterie.runs.experiment import merge, resolve

    whole = resolve(merge({"run": {"dataset": "rotated-digits"}})).federation()
    old, new = [i for i in range(40) if i % 5], [i for i in range(40) if i % 5 == 0]
    result = coterie.run("fesem", whole.select(old), "mlp", rounds=5, work=SGD(lr=0.2, epochs=4))
    labels = result.assign(whole.select(new))
    kind_of = {int(group): int(result.labels[old.index(i)]) for i in old for group in [whole.groups[i]]}
    assert labels.tolist() == [kind_of[int(whole.groups[i])] for i in new]


# ---- the proximal weight of the paper ----


def test_the_papers_proximal_weight_after_a_random_start_asks_one_cohort_for_its_samples_once():
    """And the answer counts: the run is that of a start which told the same mean."""
    method = FeSEM(num_clusters=2, init="random", prox=1.0, prox_scale="paper")
    trainer = trainer_of(setup_of(method, schedule=Schedule(rounds=3, participation=0.5)))
    calls = []
    call = trainer.engine.call

    def spy(step, cohort, **more):
        calls.append((step.__name__, cohort.tolist(), more.get("payload")))
        return call(step, cohort, **more)

    trainer.engine.call = spy
    trainer.run()
    [(_, asked, _)] = [entry for entry in calls if entry[0] == "count"]
    assert len(asked) == trainer.engine.cohort_size == 4
    mean = float(trainer.federation.train.sizes[asked].double().mean())
    assert trainer.state.mean_samples == pytest.approx(mean)
    payloads = [payload for name, _, payload in calls if name == "train_near_center"]
    assert len(payloads) == 3
    assert all(float(payload["mean_samples"]) == pytest.approx(mean) for payload in payloads)


def test_mean_samples_that_nobody_tells_are_asked_for_again():
    counted = []

    def respond(step, client, sent, **payload):
        if step == "count":
            counted.append(engine.round)
            if engine.round == 1:
                raise TimeoutError("gone")
            return {"samples": client + 1}
        return {"params": TARGETS[client], "samples": client + 1}

    method = FeSEM(num_clusters=2, init="random", prox=1.0, prox_scale="paper")
    engine, state = started(method, respond)
    for number, expected in ((1, 0.0), (2, 3.0), (3, 3.0)):
        engine.begin(number, "round")
        state = method.round(state, engine, engine.everyone(), Rng.seed(number))
        assert state.mean_samples == expected
    assert counted == [1] * 5 + [2] * 5


def test_with_auto_the_papers_start_shortens_updates_before_it_clusters_them():
    """The last client would be a cluster by itself; cut to the median length 8, its update is like those of 2 and 3."""
    homes = torch.tensor([[0.0, 1.0], [0.0, 2.0], [8.0, 0.0], [9.0, 0.0], [90.0, 1.0]])

    def labels(robust):
        engine = MockEngine(lambda step, client, sent: {"params": sent + homes[client], "samples": 1}, num_clients=5)
        method = FeSEM(num_clusters=2, init="paper", robust=robust, robust_share=0.0)
        return method.start(engine.task, engine, RNG).labels

    found = labels("auto")
    assert found[0] == found[1]
    assert found[2] == found[3] == found[4] != found[0]
    plain = labels("median")
    assert plain[0] == plain[1] == plain[2] == plain[3] != plain[4]


@pytest.mark.parametrize("attack", ["sign_flip", "label_flip", "ipm"])
def test_attackers_that_look_like_a_kind_take_no_cluster(attack):
    """With `auto`; with the first clustering of the plain mean, two honest kinds would share a cluster."""
    hostile = {"attack": attack, "attackers": 0.3, "rounds": 1, "seed": 1}
    found = coterie.run("fesem", "rotated-digits", set={"algorithm.robust": "auto"}, **hostile)
    assert found.summary["ari"] == 1.0
    assert coterie.run("fesem", "rotated-digits", **hostile).summary["ari"] < 0.8
