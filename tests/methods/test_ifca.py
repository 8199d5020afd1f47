from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coterie.client.steps import clearly_lowest
from coterie.client.work import SGD
from coterie.engines.mock import MockEngine
from coterie.errors import ConfigError
from coterie.methods.fedavg import FedAvg
from coterie.methods.ifca import IFCA
from coterie.randomness import Rng
from coterie.runs.loop import Schedule
from tests.helpers import finished, ragged_federation, setup_of, trainer_of


def test_centers_are_means_of_those_who_chose_them():
    def respond(step, client, sent):
        choice = client % 2
        return {"params": sent[choice] + client, "choice": choice, "samples": client + 1}

    engine = MockEngine(respond, num_clients=4, chunk=3)
    method = IFCA(num_clusters=3, init="paper", guard=False, weighting="equal")
    state = method.start(engine.task, engine, Rng.seed(0))
    after = method.round(state, engine, engine.everyone(), Rng.seed(0))
    assert torch.allclose(after.centers[0], state.centers[0] + 1)  # clients 0 and 2
    assert torch.allclose(after.centers[1], state.centers[1] + 2)  # clients 1 and 3
    assert torch.equal(after.centers[2], state.centers[2])  # nobody
    assert after.labels.tolist() == [0, 1, 0, 1]
    weighted = replace(method, weighting="samples").round(state, engine, engine.everyone(), Rng.seed(0))
    assert torch.allclose(weighted.centers[1], state.centers[1] + (2 * 1 + 4 * 3) / 6)


def test_gradient_averaging_divides_by_all_who_took_part():
    def respond(step, client, sent):
        assert step == "choose_and_gradient"
        return {"gradient": torch.full((2,), float(client)), "choice": 0 if client < 3 else 1}

    engine = MockEngine(respond, num_clients=4)
    method = IFCA(num_clusters=2, init="paper", average_of="gradients")
    state = method.start(engine.task, engine, Rng.seed(0))
    after = method.round(state, engine, engine.everyone(), Rng.seed(0))
    lr = engine.task.work.lr
    assert torch.allclose(after.centers[0], state.centers[0] - lr * (0 + 1 + 2) / 4)
    assert torch.allclose(after.centers[1], state.centers[1] - lr * 3 / 4)


def test_first_centers_are_independent():
    engine = MockEngine(lambda *a: {}, num_clients=4)
    state = IFCA(num_clusters=3, init="paper").start(engine.task, engine, Rng.seed(0))
    assert len(torch.unique(state.centers, dim=0)) == 3
    assert state.labels.tolist() == [-1] * 4


@pytest.mark.parametrize("guard", [False, True])
def test_clients_choose_on_training_data(guard):
    """The chosen center is the one with the least loss on the train shard, not on the test shard.

    With the guard it must be less than 0.7 times that of the client's cluster after the start.
    """
    trainer = trainer_of(setup_of(IFCA(num_clusters=3, guard=guard)))
    trainer._start()
    centers, before = trainer.state.centers, trainer.state.labels.clone()
    trainer.engine.begin(1, "round")
    after = trainer.algorithm.round(trainer.state, trainer.engine, trainer.engine.everyone(), trainer._rng.at("x"))
    for client in range(9):
        x, y = trainer.federation.samples(client, "train")
        losses = []
        for center in centers:
            outputs = trainer.engine.network(trainer.engine.task.layout.unpack(center), x.double())
            losses.append(torch.nn.functional.cross_entropy(outputs, y).item())
        own, least = int(before[client]), min(losses)
        keeps = guard and least >= 0.7 * losses[own]
        assert after.labels[client] == (own if keeps else losses.index(least))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, [0, 1, 1, 0]), ({"guard": False}, [1, 1, 1, 0]), ({"init": "paper"}, [1, 1, 1, 0])],
)
def test_after_a_warm_start_a_client_keeps_its_model_unless_another_is_clearly_better(settings, expected):
    """Client 0: 0.8 is not less than 0.7 * 1.0; client 1: 0.6 is. Client 2 has no cluster yet. Client 3 is at home."""
    losses = torch.tensor([[1.0, 0.8], [1.0, 0.6], [1.0, 0.8], [0.1, 5.0]])

    def respond(step, client, sent, own=None):
        choice = int(clearly_lowest(losses[[client]], None if own is None else own.reshape(1)))
        return {"params": sent[choice], "choice": choice, "samples": 1}

    engine, method = MockEngine(respond, num_clients=4), IFCA(num_clusters=2, **settings)
    engine.begin(1, "round")
    centers = torch.tensor([[0.0, 0.0], [9.0, 9.0]])
    state = replace(method.empty_state(engine), centers=centers, labels=torch.tensor([0, 0, -1, 0]))
    assert method.round(state, engine, engine.everyone(), Rng.seed(0)).labels.tolist() == expected


def test_traffic_is_one_plus_k_over_two_of_fedavg():
    one = finished(setup_of(FedAvg())).engine.ledger.totals()
    for clusters in (1, 2):  # an empty cluster keeps its center, which is then not sent again
        many = finished(setup_of(IFCA(num_clusters=clusters))).engine.ledger.totals()
        assert 2 * (many["down"] + many["up"]) == (1 + clusters) * (one["down"] + one["up"])


def test_gradients_with_batch_norm_move_the_statistics():
    network = lambda: torch.nn.Sequential(  # noqa: E731
        torch.nn.Flatten(), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3)
    )
    setup = setup_of(IFCA(num_clusters=1, average_of="gradients"), model=network, model_settings={}, work=SGD(lr=0.1))
    trainer = finished(setup)
    running_mean = trainer.state.centers[0, -32:-16]
    assert (running_mean != 0).all()


def test_newcomers_choose_by_loss():
    trainer = finished(setup_of(IFCA(num_clusters=2), ragged_federation(12, samples=40), schedule=Schedule(rounds=6)))
    newcomers = torch.tensor([3, 0, 11])
    labels = trainer.algorithm.assign(trainer.state, trainer.engine, newcomers, Rng.seed(0))
    losses = []
    for client in newcomers.tolist():
        x, y = trainer.federation.samples(client, "train")
        outputs = [
            trainer.engine.network(trainer.engine.task.layout.unpack(c), x.double()) for c in trainer.state.centers
        ]
        losses.append([torch.nn.functional.cross_entropy(o, y).item() for o in outputs])
    assert labels.tolist() == torch.tensor(losses).argmin(1).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_finds_the_groups_of_rotated_digits(seed):
    import coterie

    summary = coterie.run("ifca", "rotated-digits", rounds=8, seed=seed).summary
    assert summary["ari"] == 1.0


def test_gradients_have_no_limit_on_admission():
    with pytest.raises(ConfigError, match=r"admission of IFCA must be 1 with average_of=gradients.* Got 0.5 instead"):
        IFCA(num_clusters=2, average_of="gradients", admission=0.5).check(9)
    IFCA(num_clusters=2, admission=0.5).check(9)
