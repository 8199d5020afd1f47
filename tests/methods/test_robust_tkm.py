"""Trimmed k-means once, then a robust mean in each cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coterie.engines.mock import MockEngine
from coterie.methods.parts.clustering import kmeans
from coterie.methods.robust_tkm import RobustTKM
from coterie.randomness import Rng, name_keys
from tests.helpers import finished, setup_of, trainer_of


@pytest.mark.parametrize("seed", range(5))
def test_trimmed_k_means_recovers_centers_with_outliers(seed):
    """20 % of the rows lie far away, in every direction."""
    generator = torch.Generator().manual_seed(seed)
    true = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    good = true.repeat_interleave(16, 0) + 0.3 * torch.randn(48, 2, generator=generator)
    bad = 60 * torch.nn.functional.normalize(torch.randn(12, 2, generator=generator), dim=1)
    rows = torch.cat([good, bad])
    keys = name_keys(tuple(f"c{i}" for i in range(60)))
    found = kmeans(rows, 3, Rng.seed(seed), keys, trim=12)
    assert found.outliers.tolist() == [False] * 48 + [True] * 12
    nearest = torch.cdist(true, found.centers).min(1).values
    assert float(nearest.max()) < 0.3
    plain = kmeans(rows, 3, Rng.seed(seed), keys)
    assert float(torch.cdist(true, plain.centers).min(1).values.max()) > 1.0
    assert not plain.outliers.any()


HOMES = torch.tensor([[0.0, 1.0], [0.0, 1.2], [0.2, 1.0], [5.0, 0.0], [5.2, 0.2], [5.0, 0.4], [60.0, 60.0]])


def respond(step, client, sent):
    if step == "choose":
        return {"choice": (sent - HOMES[client]).norm(dim=1).argmin()}
    return {"params": HOMES[client], "samples": 1}


def started(**settings):
    engine = MockEngine(respond, num_clients=7, chunk=3)
    engine.begin(0, "start")
    method = RobustTKM(num_clusters=2, trim=0.15, robust="none", **settings)
    return method, engine, method.start(engine.task, engine, Rng.seed(0))


def test_the_trimmed_client_gets_a_label_and_moves_no_center():
    _, _, state = started()
    a, b = int(state.labels[0]), int(state.labels[3])
    assert state.labels.tolist()[:6] == [a, a, a, b, b, b]
    assert state.labels[6] in (0, 1)
    assert state.centers[a].tolist() == pytest.approx([0.2 / 3, 3.2 / 3])
    assert state.centers[b].tolist() == pytest.approx([15.2 / 3, 0.2])


def test_labels_never_change_and_each_cluster_trains_its_own():
    method, engine, state = started()
    engine.begin(1, "round")
    turned = replace(state, labels=1 - state.labels)  # wrong on purpose: the method does not repair labels
    after = method.round(turned, engine, engine.everyone(), Rng.seed(1))
    assert torch.equal(after.labels, turned.labels)
    a = int(turned.labels[0])
    assert after.centers[a].tolist() == pytest.approx(HOMES[turned.labels == a].mean(0).tolist())


def test_a_client_that_missed_the_start_is_clustered_when_it_is_seen():
    method, engine, state = started()
    late = replace(state, labels=state.labels.clone().index_fill(0, torch.tensor([4]), -1))
    engine.begin(1, "round")
    engine.calls.clear()
    after = method.round(late, engine, torch.tensor([3, 4]), Rng.seed(1))
    assert engine.calls == [("choose", [4]), ("train", [3, 4])]  # by loss: the first models are of the past
    assert after.labels[4] == state.labels[3]
    assert method.assign(state, engine, torch.tensor([1, 5]), Rng.seed(2)).tolist() == [
        int(state.labels[0]),
        int(state.labels[3]),
    ]


def test_training_alone_is_in_the_ledger_as_the_start():
    run = finished(setup_of(RobustTKM(num_clusters=2, pretrain=5)))
    totals = run.engine.ledger.totals()["gradients"]
    assert totals["start"] == 5 * totals["round"] // 3


def test_where_models_do_not_fit_sketches_are_clustered(monkeypatch):
    setup = setup_of(RobustTKM(num_clusters=2))
    held, sketched = trainer_of(setup), trainer_of(setup)
    sketched.engine.memory_budget = lambda: 1
    held._start()
    monkeypatch.setattr("coterie.methods.parts.start._WHOLE", 0)
    sketched._start()
    assert torch.equal(held.state.labels, sketched.state.labels)
    assert torch.allclose(held.state.centers, sketched.state.centers)
