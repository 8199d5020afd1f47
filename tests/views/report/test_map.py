"""The map of the clients' models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.decomposition import PCA

from coterie.runs.reading import read_run
from coterie.views.report.map import MOST_POINTS, mapped_clients, neighbours, principal

from .made import make_run


def test_principal_components_are_those_of_scikit_learn():
    rows = np.random.default_rng(0).standard_normal((30, 7)) * np.arange(1, 8)
    points, share = principal(rows)
    reference = PCA(2).fit(rows)
    np.testing.assert_allclose(np.abs(points), np.abs(reference.transform(rows)), atol=1e-9)
    np.testing.assert_allclose(share, reference.explained_variance_ratio_, atol=1e-12)


def test_models_that_are_all_the_same_have_a_map():
    points, share = principal(np.ones((5, 3)))
    assert np.abs(points).max() < 1e-12
    assert share == [0.0, 0.0]
    found = neighbours(np.ones((8, 3)))
    assert found is not None
    assert np.isfinite(found).all()


def test_t_sne_keeps_groups_together_and_is_the_same_each_time(tmp_path: Path):
    run = read_run(make_run(tmp_path, clients=30, clusters=3))
    assert run.sketches is not None
    assert run.groups is not None
    found = neighbours(run.sketches)
    assert found is not None
    np.testing.assert_array_equal(found, neighbours(run.sketches))
    apart = np.linalg.norm(found[:, None] - found[None], axis=2)
    np.fill_diagonal(apart, np.inf)
    assert (run.groups[apart.argmin(1)] == run.groups).all()  # everyone's nearest is of its own group


@pytest.mark.parametrize("count", [1, 4])
def test_a_handful_has_no_t_sne(count: int):
    assert neighbours(np.eye(count)) is None


def test_only_clients_with_a_model_are_on_the_map_and_not_too_many(tmp_path: Path):
    path = make_run(tmp_path, clients=1500, rounds=1)
    run = read_run(path)
    who = mapped_clients(run)
    assert len(who) == MOST_POINTS == len(set(who.tolist()))
    with np.load(path / "artifacts" / "sketches.npz") as found:
        sketch, rounds = found["sketch"], found["round"]
    rounds[2:] = 0
    np.savez(path / "artifacts" / "sketches.npz", sketch=sketch, round=rounds)
    assert mapped_clients(read_run(path)).tolist() == [0, 1]
