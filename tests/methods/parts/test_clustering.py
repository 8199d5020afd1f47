"""Grouping of models: distances, running means and k-means against independent arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from sklearn.cluster import KMeans as SklearnKMeans
from sklearn.metrics import adjusted_rand_score
from torch.overrides import TorchFunctionMode

from coterie.methods.parts import clustering
from coterie.methods.parts.clustering import CenterSums, cosine_distances, kmeans, squared_distances
from coterie.randomness import Rng, name_keys

CPU = torch.device("cpu")


def blobs(groups=4, members=10, width=6, noise=0.1, seed=0, dtype=torch.float64):
    """Rows around well separated centers, mixed; their groups; their keys."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(groups, width)) * 5
    true = rng.permutation(np.repeat(np.arange(groups), members))
    rows = centers[true] + noise * rng.normal(size=(len(true), width))
    return torch.from_numpy(rows).to(dtype), true, name_keys([f"c{i}" for i in range(len(true))])


# ---- distances ----


def test_distances_are_scipys():
    rng = np.random.default_rng(0)
    rows, centers = rng.normal(size=(7, 5)), rng.normal(size=(3, 5))
    ours = torch.from_numpy(rows), torch.from_numpy(centers)
    np.testing.assert_allclose(squared_distances(*ours), cdist(rows, centers, "sqeuclidean"), atol=1e-12)
    np.testing.assert_allclose(cosine_distances(*ours), cdist(rows, centers, "cosine"), atol=1e-12)


def test_distances_far_from_zero_keep_their_digits():
    rows = torch.full((1, 4), 1000.0)
    assert squared_distances(rows, rows + 2**-10).item() == pytest.approx(4 * 2.0**-20, rel=1e-6)


def test_a_zero_vector_has_cosine_distance_one():
    rows = torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    assert cosine_distances(rows, torch.tensor([[1.0, 0.0], [0.0, 0.0], [-2.0, 0.0]])).tolist() == [
        [1.0, 1.0, 1.0],
        [0.0, 1.0, 2.0],
    ]


# ---- running means ----


def test_means_of_clusters_in_chunks():
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 9.0]])
    labels = torch.tensor([0, 2, 0, 0])
    keep = torch.tensor([[9.0, 9.0], [8.0, 8.0], [7.0, 7.0]])
    sums = CenterSums(3, keep)
    sums.add(rows[:1], labels[:1])
    sums.add(rows[1:], labels[1:])
    means = sums.means(keep)
    torch.testing.assert_close(means[0], torch.tensor([13 / 3, 17 / 3]))
    assert means[2].tolist() == [3.0, 4.0]
    assert means[1].tolist() == [8.0, 8.0]  # nobody chose it: it keeps its center
    assert sums.weights.tolist() == [3.0, 0.0, 1.0]


def test_weighted_means():
    sums = CenterSums(2, torch.zeros(2, 1, dtype=torch.float64))
    sums.add(torch.tensor([[1.0], [5.0], [7.0]]).double(), torch.tensor([0, 0, 1]), torch.tensor([30, 10, 4]))
    assert sums.means(torch.zeros(2, 1).double()).tolist() == [[2.0], [7.0]]  # (30 * 1 + 10 * 5) / 40
    assert sums.weights.tolist() == [40.0, 4.0]


def test_members_that_weigh_nothing_leave_the_center():
    keep = torch.tensor([[4.0]])
    sums = CenterSums(1, keep)
    sums.add(torch.tensor([[1.0]]), torch.tensor([0]), torch.tensor([0.0]))
    assert sums.means(keep).tolist() == [[4.0]]


def test_no_member_at_all():
    keep = torch.tensor([[4.0], [5.0]])
    assert torch.equal(CenterSums(2, keep).means(keep), keep)


@given(st.integers(1, 30), st.integers(1, 7), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_means_do_not_depend_on_the_chunks(count, chunk, seed):
    rng = np.random.default_rng(seed)
    rows, labels, weights = rng.normal(size=(count, 3)), rng.integers(0, 4, count), rng.random(count) + 0.1
    keep = np.full((4, 3), 9.0)
    sums = CenterSums(4, torch.from_numpy(keep))
    for start in range(0, count, chunk):
        part = slice(start, start + chunk)
        sums.add(*(torch.from_numpy(array[part]) for array in (rows, labels, weights)))
    expected = [
        np.average(rows[labels == k], axis=0, weights=weights[labels == k]) if (labels == k).any() else keep[k]
        for k in range(4)
    ]
    np.testing.assert_allclose(sums.means(torch.from_numpy(keep)), expected, atol=1e-12)


# ---- k-means ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(3))
def test_kmeans_finds_separated_groups(dtype, seed):
    rows, true, keys = blobs(seed=seed, dtype=dtype)
    found = kmeans(rows, 4, Rng.seed(seed), keys)
    assert adjusted_rand_score(true, found.labels) == 1.0
    assert found.centers.dtype == dtype
    for k in range(4):
        torch.testing.assert_close(found.centers[k], rows[found.labels == k].mean(0), rtol=1e-5, atol=1e-5)


def test_kmeans_is_as_good_as_scikit_learns_where_groups_overlap():
    rows = torch.from_numpy(np.random.default_rng(3).normal(size=(80, 3)))
    keys = name_keys([str(i) for i in range(80)])
    ours = kmeans(rows, 5, Rng.seed(0), keys, restarts=50)
    theirs = SklearnKMeans(5, n_init=50, random_state=0).fit(rows.numpy())
    assert ours.inertia <= theirs.inertia_ * 1.01
    distances = cdist(rows, ours.centers, "sqeuclidean")
    np.testing.assert_array_equal(distances.argmin(1), ours.labels)
    assert ours.inertia == pytest.approx(distances.min(1).sum())


def test_kmeans_far_from_zero():
    rows, true, keys = blobs(noise=0.01)
    found = kmeans(rows / 100 + 1e4, 4, Rng.seed(0), keys)
    assert adjusted_rand_score(true, found.labels) == 1.0


@given(st.integers(0, 1000), st.sampled_from([0.1, 3.0]))
@settings(max_examples=20, deadline=None)
def test_kmeans_does_not_depend_on_the_order_of_rows(seed, noise):
    rows, _, keys = blobs(members=8, noise=noise)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(rows)))
    one, other = kmeans(rows, 4, Rng.seed(0), keys), kmeans(rows[order], 4, Rng.seed(0), keys[order])
    # The names of clusters are the same too.
    assert torch.equal(other.labels, one.labels[order])
    torch.testing.assert_close(other.centers, one.centers)


def test_kmeans_hangs_on_the_seed():
    rows = torch.from_numpy(np.random.default_rng(3).normal(size=(60, 3)))
    keys = name_keys([str(i) for i in range(60)])
    one, again, other = (kmeans(rows, 6, Rng.seed(s), keys, restarts=1).labels for s in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_more_restarts_are_not_worse():
    rows = torch.from_numpy(np.random.default_rng(5).normal(size=(60, 2)))
    keys = name_keys([str(i) for i in range(60)])
    found = [kmeans(rows, 8, Rng.seed(0), keys, restarts=r).inertia for r in (1, 5, 40)]
    assert found[0] >= found[1] >= found[2]
    assert found[0] > found[2]


def test_one_cluster_is_the_mean():
    rows, _, keys = blobs()
    found = kmeans(rows, 1, Rng.seed(0), keys)
    assert set(found.labels.tolist()) == {0}
    torch.testing.assert_close(found.centers[0], rows.mean(0))
    assert found.inertia == pytest.approx(float(rows.var(0, correction=0).sum() * len(rows)))


def test_as_many_clusters_as_rows():
    rows, _, keys = blobs(groups=2, members=3)
    found = kmeans(rows, 6, Rng.seed(0), keys)
    assert sorted(found.labels.tolist()) == [0, 1, 2, 3, 4, 5]
    assert found.inertia == pytest.approx(0, abs=1e-18)


@pytest.mark.parametrize("distinct", [1, 2, 3])
def test_more_clusters_than_distinct_rows(distinct):
    rows = torch.arange(float(distinct)).repeat(4).reshape(-1, 1) * 10
    found = kmeans(rows, 5, Rng.seed(0), name_keys([str(i) for i in range(len(rows))]))
    assert found.inertia == 0
    assert bool(torch.isfinite(found.centers).all())
    assert len(found.labels.unique()) == distinct
    torch.testing.assert_close(found.centers[found.labels], rows)


def test_a_center_that_has_no_rows_is_moved_to_the_farthest_one(monkeypatch):
    rows = torch.tensor([[0.0], [0.1], [10.0], [10.1], [30.0], [30.1]])
    keys = name_keys([str(i) for i in range(6)])
    # Seeds that k-means++ would not draw: nobody's nearest.
    far = torch.tensor([[1e6]], dtype=torch.float64)
    monkeypatch.setattr(clustering, "_seeds", lambda x, *_: torch.cat([x[[0, 2]], far]))
    found = kmeans(rows, 3, Rng.seed(0), keys, restarts=1)
    assert adjusted_rand_score([0, 0, 1, 1, 2, 2], found.labels) == 1.0
    assert found.inertia == pytest.approx(3 * 2 * 0.05**2, rel=1e-4)
    monkeypatch.setattr(clustering, "_seeds", lambda x, *_: torch.cat([x[[0]], far, -far]))
    assert sorted(kmeans(rows, 3, Rng.seed(0), keys, restarts=1).labels.unique().tolist()) == [0, 1, 2]


class Largest(TorchFunctionMode):
    """Notes the entries of the largest tensor that is made."""

    entries = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.entries = max(self.entries, made.numel())
        return made


def test_kmeans_does_not_hold_the_rows_once_for_each_restart():
    rows = torch.randn(200, 100, generator=torch.Generator().manual_seed(0))
    with Largest() as largest:
        kmeans(rows, 2, Rng.seed(0), name_keys([str(i) for i in range(200)]), restarts=20)
    assert rows.numel() <= largest.entries < 3 * rows.numel()
