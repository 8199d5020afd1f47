"""PACFL: principal angles that do not depend on the basis, the classes that count, and the cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.linalg import subspace_angles

from coterie.engines.mock import MockEngine
from coterie.methods.fedavg import FedAvg
from coterie.methods.pacfl import PACFL, basis, principal_angles
from coterie.randomness import Rng
from coterie.runs.loop import Schedule
from tests.helpers import finished, ragged_federation, setup_of, trainer_of


def drawn(seed, count, size=12, rank=3):
    """Orthonormal bases [count, size, rank]."""
    return torch.linalg.qr(Rng.seed(seed).normal(count, size, rank))[0]


def test_angles_are_those_of_the_subspaces():
    some, others = drawn(0, 4), drawn(1, 5)
    found, count = principal_angles(some, others)
    assert found.shape == (4, 5, 3)
    assert (count == 3).all()
    for i in range(4):
        for j in range(5):
            expected = torch.rad2deg(torch.from_numpy(subspace_angles(some[i].numpy(), others[j].numpy())))
            assert found[i, j].tolist() == pytest.approx(sorted(expected.tolist()), abs=1e-5)


def test_a_rotated_basis_changes_nothing():
    """The arccos of the diagonal, as in public code, changes with the basis."""
    some, others = drawn(0, 1), drawn(1, 1)
    turned = others @ torch.linalg.qr(Rng.seed(2).normal(3, 3))[0]
    assert torch.allclose(principal_angles(some, others)[0], principal_angles(some, turned)[0], atol=1e-6)
    diagonals = [torch.rad2deg((some[0].T @ other[0]).diagonal().arccos()).sum() for other in (others, turned)]
    assert abs(float(diagonals[0] - diagonals[1])) > 1.0
    same = principal_angles(others, turned)[0]
    assert same.flatten().tolist() == pytest.approx([0, 0, 0], abs=1e-4)


def test_a_subspace_of_lower_rank_has_fewer_angles():
    plane = torch.eye(4, dtype=torch.float64)[:, :2]
    line = torch.nn.functional.pad(torch.tensor([[1.0], [0.0], [1.0], [0.0]], dtype=torch.float64) / 2**0.5, (0, 1))
    angles, count = principal_angles(plane.unsqueeze(0), line.unsqueeze(0))
    assert int(count) == 1
    assert angles.flatten().tolist() == pytest.approx([45.0, 0.0])


@pytest.mark.parametrize("samples", [1, 2, 5, 40])
def test_a_basis_spans_the_leading_directions(samples):
    rows = Rng.seed(3).normal(samples, 12)
    found = basis(rows, 3)
    rank = min(samples, 3)
    assert found.shape == (12, 3)
    assert torch.allclose(found[:, :rank].T @ found[:, :rank], torch.eye(rank, dtype=torch.float64), atol=1e-9)
    assert float(found[:, rank:].abs().sum()) == 0
    _, _, expected = torch.linalg.svd(rows, full_matrices=False)
    assert torch.allclose(found[:, :rank].abs(), expected[:rank].T.abs(), atol=1e-6)


def test_no_samples_and_equal_samples():
    assert float(basis(torch.zeros(0, 5, dtype=torch.float64), 2).abs().sum()) == 0
    same = basis(torch.ones(4, 5, dtype=torch.float64), 2)
    assert same[:, 0].abs().tolist() == pytest.approx([5**-0.5] * 5)
    assert float(same[:, 1].abs().sum()) == 0


def test_only_shared_classes_count():
    a, b = drawn(0, 1, rank=1)[0], drawn(1, 1, rank=1)[0]
    none = torch.zeros_like(a)
    # Clients hold classes (0, 1), (0), (1); the second has the same class 0 as the first.
    bases = torch.stack([torch.stack([a, b]), torch.stack([a, none]), torch.stack([none, a])])
    found = PACFL()._distances(bases, bases)
    angle = float(principal_angles(a.unsqueeze(0), b.unsqueeze(0))[0])
    assert found[0].tolist() == pytest.approx([0.0, 0.0, angle], abs=1e-4)
    assert float(found[1, 2]) == 90.0  # nothing in common


@pytest.mark.parametrize(("angle", "expected"), [("smallest", 0.0), ("mean", 30.0)])
def test_which_angles_count(angle, expected):
    first = torch.eye(4, dtype=torch.float64)[:, :2]
    turn = torch.deg2rad(torch.tensor(60.0, dtype=torch.float64))
    second = torch.stack([first[:, 0], first[:, 1] * turn.cos() + torch.eye(4, dtype=torch.float64)[:, 2] * turn.sin()])
    found = PACFL(angle=angle)._distances(first.reshape(1, 1, 4, 2), second.T.reshape(1, 1, 4, 2))
    assert float(found) == pytest.approx(expected, abs=1e-4)


def lines(degrees):
    """Clients whose data are lines in a plane, at these angles."""
    angle = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    return torch.stack([angle.cos(), angle.sin()], dim=1).reshape(-1, 1, 2, 1)


def mock(degrees):
    def respond(step, client, sent, vectors=None):
        if step == "subspaces":
            return {"bases": lines(degrees)[client]}
        return {"params": sent + client + 1, "samples": 1}

    return MockEngine(respond, num_clients=len(degrees))


def same(labels):
    return (labels.unsqueeze(0) == labels.unsqueeze(1)).tolist()


def test_average_linkage_is_cut_at_beta():
    engine = mock([0.0, 10.0, 20.0, 60.0])
    # 0 and 10 join at 10, then 20 at the mean of 20 and 10, which is 15; 60 at the mean of 60, 50 and 40.
    for beta, expected in [(9.0, [0, 1, 2, 3]), (14.0, [0, 0, 1, 2]), (16.0, [0, 0, 0, 1]), (51.0, [0, 0, 0, 0])]:
        labels = PACFL(beta=beta).start(engine.task, engine, Rng.seed(0)).labels
        partition = same(torch.tensor(expected))
        if beta == 14.0:  # 10 is as near to 0 as to 20
            assert same(labels) in (partition, same(torch.tensor([0, 1, 1, 2])))
        else:
            assert same(labels) == partition


def test_then_each_cluster_is_averaged_alone():
    engine, method = mock([0.0, 5.0, 80.0, 85.0]), PACFL()
    state = method.start(engine.task, engine, Rng.seed(0))
    engine.begin(1, "round")
    after = method.round(state, engine, engine.everyone(), Rng.seed(1))
    assert after.centers[after.labels[0]].tolist() == [1.5, 1.5]
    assert after.centers[after.labels[2]].tolist() == [3.5, 3.5]
    assert [name for name, _ in engine.calls] == ["subspaces", "train"]


def test_newcomers_join_the_nearest_cluster_and_do_not_move():
    engine, method = mock([0.0, 5.0, 80.0, 85.0, 30.0]), PACFL()
    state = method._clustered(method.start(engine.task, engine, Rng.seed(0)), engine, torch.arange(4), Rng.seed(0))
    state = replace(state, labels=torch.tensor([*state.labels[:4].tolist(), -1]))
    engine.begin(1, "round")
    after = method.round(state, engine, torch.tensor([4, 2]), Rng.seed(1))
    assert after.labels[4] == after.labels[0]
    engine.calls.clear()
    method.round(after, engine, torch.tensor([4]), Rng.seed(2))
    assert [name for name, _ in engine.calls] == ["train"]


def test_made_up_for_if_nobody_answered():
    engine, method = mock([0.0, 5.0, 80.0]), PACFL()
    engine.dropout = 1.0
    state = method.start(engine.task, engine, Rng.seed(0))
    assert method.assign(state, engine, torch.tensor([1]), Rng.seed(0)).tolist() == [-1]
    engine.dropout = 0.0
    engine.begin(1, "round")
    assert same(method.round(state, engine, engine.everyone(), Rng.seed(1)).labels) == same(torch.tensor([0, 0, 1]))


def test_traffic_is_that_of_fedavg_and_the_vectors_once():
    one, many = (finished(setup_of(m, schedule=Schedule(rounds=2))).engine.ledger.totals() for m in (FedAvg(), PACFL()))
    assert (many["down"], many["up"]) == (one["down"], one["up"])
    assert many["start"]["up"] == 9 * 3 * 16 * 3 * 8  # clients, classes, pixels, vectors, bytes


def test_regression_is_one_class():
    federation = ragged_federation()
    federation = replace(federation, y=federation.y.float(), num_classes=0)
    run = trainer_of(
        setup_of(
            PACFL(),
            federation,
            loss="mse",
            model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 1)),
            model_settings={},
        )
    )
    run._start()
    assert run.state.bases.shape == (9, 1, 16, 3)


@pytest.mark.parametrize("seed", range(2))
def test_finds_the_groups_of_rotated_digits(seed):
    import coterie

    assert coterie.run("pacfl", "rotated-digits", rounds=1, seed=seed).summary["ari"] == 1.0
