"""Clustering of signatures: kinds are found whatever the sizes and labels; distances by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score

from coterie.methods.parts import signatures
from coterie.methods.parts.signatures import Means, Signatures, cluster, is_odd, kinds_in, nearest, pair_distances
from coterie.randomness import Rng, name_keys

RNG = Rng.seed(0)


def keys_of(count):
    return name_keys([f"client-{i}" for i in range(count)])


def made(kinds=3, members=12, classes=5, width=20, held=3, noise=0.3, seed=0, common=5.0, equal=0):
    """Signatures: a large part common to all, a part by kind and class, and noise that shrinks with the samples.

    Each client holds `held` of the classes, in very different numbers; or with `equal`, so many samples of each.
    """
    rng = Rng.seed(seed)
    true = torch.arange(kinds).repeat(members)
    count = len(true)
    shared = common * rng.at("common").normal(classes, width)
    of_kind = rng.at("kind").normal(kinds, classes, width)
    counts = torch.zeros(count, classes, dtype=torch.int64)
    for i in range(count):
        own = rng.at("classes", i).permutation(classes)[:held]
        counts[i, own] = equal or (1 + 60 * rng.at("sizes", i).uniform(held) ** 3).long()
    blur = noise * rng.at("noise").normal(count, classes, width) / counts.clamp_min(1).sqrt().unsqueeze(2)
    rows = (shared + of_kind[true] + blur) * (counts > 0).unsqueeze(2)
    return rows, counts, true


def labels_of(rows, counts, kinds=3, keys=None, **more):
    keys = keys_of(len(rows)) if keys is None else keys
    return cluster(Signatures.of(rows, counts), kinds, RNG, keys, **more)


# ---- kinds ----


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("held", [2, 3, 5])
def test_kinds_are_found_although_sizes_and_labels_differ(seed, held):
    rows, counts, true = made(held=held, seed=seed)
    assert int(counts.sum(1).max()) > 4 * int(counts.sum(1).min())
    found = labels_of(rows, counts)
    assert adjusted_rand_score(true, found.labels) == 1.0
    assert not found.outliers.any()


def test_what_would_cluster_by_labels_is_not_what_is_compared():
    """The check of the check: k-means on the plain rows finds labels, not kinds."""
    from coterie.methods.parts.clustering import kmeans

    rows, _, true = made()
    plain = kmeans(rows.flatten(1), 3, RNG, keys_of(len(rows))).labels
    assert adjusted_rand_score(true, plain) < 0.3


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000))
def test_the_order_of_clients_does_not_matter(seed):
    rows, counts, _ = made(members=6, noise=1.5, seed=1)  # noisy: several answers are near
    keys, order = keys_of(18), Rng.seed(seed).permutation(18)
    one = labels_of(rows, counts, keys=keys, trim=2)
    other = labels_of(rows[order], counts[order], keys=keys[order], trim=2)
    assert torch.equal(other.labels, one.labels[order])
    assert torch.equal(other.outliers, one.outliers[order])
    assert torch.equal(other.in_doubt, one.in_doubt[order])


def test_clients_without_a_shared_class_do_not_break_it():
    """Kind 0 holds classes 0 and 1, and kind 1 holds 1 and 2; two clients share nothing with each other."""
    rows, counts, true = made(kinds=2, members=8, classes=3, held=2)
    counts[:], counts[:, 1] = 0, 4
    counts[true == 0, 0], counts[true == 1, 2] = 6, 6
    counts[0], counts[1] = torch.tensor([9, 0, 0]), torch.tensor([0, 0, 9])
    rows, _, _ = made(kinds=2, members=8, classes=3, held=3)
    found = labels_of(rows * (counts > 0).unsqueeze(2), counts, kinds=2)
    assert adjusted_rand_score(true, found.labels) == 1.0


def test_two_clients_that_cannot_be_compared():
    rows = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]])
    for kinds in (1, 2):
        found = labels_of(rows, torch.tensor([[3, 0], [0, 3]]), kinds=kinds)
        assert ((found.labels >= 0) & (found.labels < kinds)).all()


def test_a_client_that_holds_nothing_has_a_label_too():
    rows, counts, true = made()
    rows[4], counts[4] = 0, 0
    found = labels_of(rows, counts)
    rest = torch.arange(36) != 4
    assert adjusted_rand_score(true[rest], found.labels[rest]) == 1.0
    assert 0 <= int(found.labels[4]) < 3
    nobody = labels_of(torch.zeros(3, 2, 4), torch.zeros(3, 2, dtype=torch.int64), kinds=2)
    assert nobody.labels.tolist() == [0, 0, 0]


def test_more_clusters_than_kinds():
    rows, counts, true = made(kinds=2, members=12, noise=0.1)
    found = labels_of(rows, counts, kinds=5)
    assert ((found.labels >= 0) & (found.labels < 5)).all()
    for label in found.labels.unique():  # no cluster has two kinds
        assert len(true[found.labels == label].unique()) == 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("held", [3, 5])
def test_as_many_kinds_as_clients(seed, held):
    rows, counts, _ = made(kinds=8, members=1, held=held, width=60, seed=seed, equal=50)
    found = labels_of(rows, counts, 8)
    assert sorted(found.labels.tolist()) == list(range(8))
    assert not found.in_doubt.any()


@pytest.mark.parametrize("seed", range(5))
def test_kinds_of_one_client_beside_larger_ones(seed):
    rows, counts, true = made(kinds=5, members=5, held=5, width=60, seed=seed, equal=50)
    there = torch.tensor([kind > 1 or i < 5 for i, kind in enumerate(true.tolist())])  # 1, 1, 5, 5, 5 clients
    found = labels_of(rows[there], counts[there], 5)
    assert adjusted_rand_score(true[there], found.labels) == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_kind_of_its_own(seed):
    """A client of noise may be alone, but not at the price of two kinds in one cluster."""
    rows, counts, true = made(members=4, held=5, seed=seed, equal=50)
    rows[0] += 3 * Rng.seed(seed).at("own").normal(*rows.shape[1:])
    found = labels_of(rows, counts)
    assert adjusted_rand_score(true[1:], found.labels[1:]) == 1.0


def test_one_client_and_clients_that_are_all_the_same():
    one = labels_of(torch.ones(1, 2, 3), torch.ones(1, 2, dtype=torch.int64), kinds=1)
    assert (one.labels.tolist(), one.outliers.tolist(), one.in_doubt.tolist()) == ([0], [False], [False])
    same = labels_of(torch.ones(6, 2, 3), torch.full((6, 2), 9), kinds=2)
    assert ((same.labels >= 0) & (same.labels < 2)).all()
    assert not same.outliers.any()
    zero = labels_of(torch.zeros(6, 2, 3), torch.full((6, 2), 9), kinds=2)
    assert ((zero.labels >= 0) & (zero.labels < 2)).all()


def test_clients_beyond_those_compared_in_pairs_join_the_nearest(monkeypatch):
    rows, counts, true = made(members=20)
    monkeypatch.setattr(signatures, "_MOST", 24)
    assert adjusted_rand_score(true, labels_of(rows, counts).labels) == 1.0


def test_pieces_give_the_same_distances(monkeypatch):
    rows, counts, true = made()
    found = Signatures.of(rows, counts)
    means = Means.of(found, true, torch.ones(36, dtype=torch.bool), 3)
    whole = means.distances(found, true, torch.ones(36, dtype=torch.bool))
    monkeypatch.setattr(signatures, "_AT_ONCE", 5 * 5 * 20)
    for one, other in zip(whole, means.distances(found, true, torch.ones(36, dtype=torch.bool)), strict=True):
        torch.testing.assert_close(one, other)


# ---- outliers and long rows ----


def test_odd_signatures_are_those_like_no_other_and_copies():
    # One class; the mean over all is subtracted, and it is zero. In degrees: two kinds of four, each 10 degrees apart.
    degrees = torch.tensor([0.0, 10, 20, 30, 180, 190, 200, 210])
    pairs = torch.stack([torch.cos(torch.deg2rad(degrees)), torch.sin(torch.deg2rad(degrees))], 1)
    rows = torch.cat([pairs, torch.zeros(8, 2)], 1)
    alone = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, -1.0, 0.0]])  # at right angles to all, and opposite
    copies = torch.tensor([[0.0, 0.0, 0.0, 1.0]] * 3 + [[0.0, 0.0, 0.0, -1.0]] * 3)
    every = torch.cat([rows, alone, copies]).unsqueeze(1)
    assert is_odd(Signatures.of(every, torch.ones(16, 1))).tolist() == [False] * 8 + [True] * 8
    assert not is_odd(Signatures.of(every[:8], torch.ones(8, 1))).any()


def test_without_a_share_noise_and_copies_are_outliers():
    rows, counts, true = made(held=5)
    counts = torch.full_like(counts, 20)
    good = torch.arange(36) >= 10
    rows[:5] = 10 * RNG.at("noise").normal(5, 5, 20)
    rows[5:10] = -rows[20].clone()
    found = labels_of(rows, counts, trim=None)
    assert torch.equal(found.outliers, ~good)
    assert adjusted_rand_score(true[good], found.labels[good]) == 1.0
    assert adjusted_rand_score(true[good], labels_of(rows, counts).labels[good]) < 1.0


@pytest.mark.parametrize("seed", range(3))
def test_without_a_share_attackers_that_lie_alike_are_outside(seed):
    """Five of the first kind flip their signatures, and five others sign as a kind of their own."""
    rows, counts, true = made(held=5, seed=seed, equal=20)
    flip, lie = torch.arange(0, 15, 3), torch.tensor([1, 2, 4, 5, 7])
    rows[flip] = -rows[flip]
    rows[lie] += 2 * Rng.seed(seed + 9).normal(5, 20)
    honest = torch.ones(36, dtype=torch.bool).index_fill(0, torch.cat([flip, lie]), False)
    found = labels_of(rows, counts, trim=None)
    assert found.outside is not None
    assert torch.equal(found.outside, ~honest)
    assert torch.equal(found.outliers, ~honest)
    assert adjusted_rand_score(true[honest], found.labels[honest]) == 1.0
    order = Rng.seed(seed).permutation(36)
    other = labels_of(rows[order], counts[order], keys=keys_of(36)[order], trim=None)
    assert torch.equal(other.labels, found.labels[order])
    assert torch.equal(other.outside, found.outside[order])


def test_a_group_against_the_median_of_all_is_no_kind_however_large():
    """In degrees: three kinds of 3, 3 and 2 around the common direction, and four that point the other way."""
    degrees = torch.tensor([-60.0, -58, -56, 0, 2, 4, 60, 62, 178, 180, 182, 184])
    rows = torch.stack([torch.cos(torch.deg2rad(degrees)), torch.sin(torch.deg2rad(degrees))], 1).unsqueeze(1)
    found = kinds_in(Signatures.of(rows, torch.ones(12, 1)), 3, keys_of(12))
    assert sorted(found[:3].unique().tolist() + found[3:6].unique().tolist() + found[6:8].unique().tolist()) == [
        0,
        1,
        2,
    ]
    assert found[8:].tolist() == [-1] * 4


def test_groups_with_few_of_the_clients_are_no_kinds():
    """Label skew: hardly two clients are alike, and nobody is outside for that."""
    rows = RNG.at("alone").normal(20, 1, 20)
    rows[1], rows[3] = rows[0] + 0.1 * rows[1], rows[2] + 0.1 * rows[3]
    assert kinds_in(Signatures.of(rows, torch.ones(20, 1)), 2, keys_of(20)).tolist() == [-1] * 20
    assert labels_of(rows, torch.ones(20, 1), 2, trim=None).outside is None


def test_beyond_those_compared_clients_are_outside_if_they_are_far(monkeypatch):
    rows, counts, true = made(held=5, equal=20)
    keys = torch.arange(36)  # the first are compared
    monkeypatch.setattr(signatures, "_MOST", 24)
    rows[33:] = -rows[33:]
    found = labels_of(rows, counts, keys=keys, trim=None)
    assert found.outside.tolist() == [False] * 33 + [True] * 3
    assert adjusted_rand_score(true[:33], found.labels[:33]) == 1.0


def test_trimmed_clients_are_outliers_and_are_spread():
    rows, counts, true = made(members=12)
    bad = torch.tensor([0, 7, 13, 20, 29])
    rows[bad] = 5 * Rng.seed(9).normal(5, 5, 20) * (counts[bad] > 0).unsqueeze(2)
    found = labels_of(rows, counts, trim=5)
    assert found.outliers.nonzero().flatten().tolist() == bad.tolist()
    good = ~found.outliers
    assert adjusted_rand_score(true[good], found.labels[good]) == 1.0
    sizes = torch.bincount(found.labels[bad], minlength=3)
    assert int(sizes.max()) <= 2  # no cluster gets them all
    assert not labels_of(rows, counts, trim=0).outliers.any()


def test_very_long_rows_are_shortened_to_ten_times_the_median_of_their_class():
    rows = torch.zeros(5, 2, 2)
    rows[:, 0, 0] = torch.tensor([1.0, 2.0, 3.0, 29.0, 500.0])
    rows[:, 1, 1] = torch.tensor([0.0, 0.0, 4.0, 100.0, 6.0])
    counts = torch.tensor([[1, 0], [1, 0], [1, 1], [1, 1], [1, 1]])
    found = Signatures.of(rows, counts).rows
    assert found[:, 0, 0].tolist() == pytest.approx([1.0, 2.0, 3.0, 29.0, 30.0])  # median 3
    assert found[:, 1, 1].tolist() == pytest.approx([0.0, 0.0, 4.0, 60.0, 6.0])  # median 6 of those who hold it


@pytest.mark.parametrize("seed", range(3))
def test_attackers_that_agree_with_each_other_are_no_cluster(seed):
    """Flipped signatures are all alike: the common part decides them. Without trimming they would be a kind."""
    rows, counts, true = made(held=5, seed=seed)
    honest = torch.arange(len(rows)) >= 6
    rows = torch.where(honest.reshape(-1, 1, 1), rows, -rows)
    found = labels_of(rows, counts, trim=6)
    assert torch.equal(found.outliers, ~honest)
    assert adjusted_rand_score(true[honest], found.labels[honest]) == 1.0
    assert adjusted_rand_score(true[honest], labels_of(rows, counts).labels[honest]) < 1.0


@pytest.mark.parametrize("seed", range(3))
def test_one_huge_signature_is_trimmed(seed):
    rows, counts, true = made(seed=seed)
    rows[5] *= 1e6
    found = labels_of(rows, counts, trim=2)
    assert found.outliers[5]
    rest = torch.arange(36) != 5
    assert adjusted_rand_score(true[rest], found.labels[rest]) == 1.0


# ---- distances by hand ----


def test_distances_of_pairs_by_hand():
    """One class: less the mean (1, 1), clients are at (1, 0), (-1, 0), (0, 1), (0, -1): cosines 1, -1 and 0."""
    rows = torch.tensor([[2.0, 1.0], [0.0, 1.0], [1.0, 2.0], [1.0, 0.0]]).unsqueeze(1)
    distances, comparable = pair_distances(Signatures.of(rows, torch.full((4, 1), 3)))
    expected = torch.tensor([[0.0, 2.0, 1.0, 1.0], [2.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 2.0], [1.0, 1.0, 2.0, 0.0]])
    torch.testing.assert_close(distances, expected)
    assert comparable.tolist() == [[1.0] * 4] * 4


def test_shared_classes_are_weighted_by_their_evidence():
    """Two clients: in class 0 (counts 2 and 2, evidence 1) opposite, in class 1 (6 and 3, evidence 2) too.

    A third one makes them the same in class 1: then (1 * 2 + 2 * 0.5) / 3.
    """
    rows = torch.tensor([[[1.0], [1.0]], [[-1.0], [1.0]], [[0.0], [-8.0]]])
    counts = torch.tensor([[2, 6], [2, 3], [0, 4]])
    distances, _ = pair_distances(Signatures(rows, counts.to(rows)))
    assert float(distances[0, 1]) == pytest.approx((1 * 2 + 2 * 0) / 3)
    assert float(distances[0, 2]) == pytest.approx(2.0)  # class 1 only
    apart = pair_distances(Signatures(rows[:2], torch.tensor([[2.0, 0.0], [0.0, 3.0]])))
    assert (float(apart[0][0, 1]), float(apart[1][0, 1])) == (1.0, 0.0)


def test_distances_to_means_leave_out_the_client_itself():
    rows = torch.tensor([[[0.0, 0.0]], [[4.0, 0.0]], [[10.0, 0.0]]])
    found = Signatures.of(rows, torch.tensor([[1], [3], [2]]))
    labels, kept = torch.tensor([0, 0, 1]), torch.ones(3, dtype=torch.bool)
    squared, angles = Means.of(found, labels, kept, 2).distances(found, labels, kept)
    # The mean of cluster 0 is 3 by samples; without client 0 it is 4, without client 1 it is 0.
    assert squared[:, 0].tolist() == [16.0, 16.0, 49.0]
    assert squared[:, 1].tolist() == pytest.approx([100.0, 36.0, 0.0])  # client 2 is alone, and far from cluster 0
    assert float(angles[2, 1]) == 0
    plain, _ = Means.of(found, labels, kept, 2).distances(found)
    assert plain[:, 0].tolist() == [9.0, 1.0, 49.0]


# ---- newcomers ----


def test_a_client_alone_in_its_cluster_leaves_it_for_one_that_it_resembles():
    rows = torch.tensor([[[1.0, 0.0]], [[1.0, 0.1]], [[1.0, -0.1]], [[0.0, 1.0]], [[-1.0, 0.0]], [[-1.0, 0.1]]])
    found, kept = Signatures.of(rows, torch.full((6, 1), 5)), torch.ones(6, dtype=torch.bool)
    labels = torch.tensor([0, 1, 1, 2, 3, 3])  # client 0 is of the kind of 1 and 2, client 3 of no other
    squared, _ = Means.of(found, labels, kept, 4).distances(found, labels, kept)
    assert squared.argmin(1)[[0, 3]].tolist() == [1, 2]
    assert float(squared[0, 0]) == math.inf


def test_newcomers_join_the_nearest_kind():
    rows, counts, true = made(members=14)
    old = torch.arange(42) < 30
    members = Signatures.of(rows[old], counts[old])
    found, doubt = nearest(Signatures.of(rows[~old], counts[~old]), members, true[old], 3)
    assert torch.equal(found, true[~old])
    few = counts[~old].sum(1) < 5
    assert torch.equal(doubt, few)


def test_a_newcomer_without_a_shared_class_is_nowhere():
    rows = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]]])
    members = Signatures.of(rows, torch.tensor([[9, 0], [9, 0]]))
    new = Signatures.of(
        torch.tensor([[[0.0, 0.0], [3.0, 3.0]], [[0.9, 0.1], [0.0, 0.0]]]), torch.tensor([[0, 9], [9, 0]])
    )
    found, _ = nearest(new, members, torch.tensor([1, 0]), 2)
    assert found.tolist() == [-1, 1]


def test_members_without_a_label_do_not_count():
    rows = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[0.0, 1.1]]])
    members = Signatures.of(rows, torch.full((3, 1), 9))
    new = Signatures.of(torch.tensor([[[0.0, 1.2]]]), torch.tensor([[9]]))
    assert nearest(new, members, torch.tensor([0, 1, 1]), 2)[0].tolist() == [1]
    assert nearest(new, members, torch.tensor([0, -1, -1]), 2)[0].tolist() == [0]


# ---- doubt ----


def test_who_is_in_doubt():
    angles = torch.tensor([[0.1, 1.0], [0.79, 1.0], [0.81, 1.0], [1.0, 0.2], [0.1, math.inf], [math.inf, math.inf]])
    many = torch.full((6, 2), 9)
    assert signatures._in_doubt(angles, many)[:5].tolist() == [False, False, True, False, False]
    few = torch.tensor([[2, 2], [3, 2]] + [[9, 9]] * 4)
    assert signatures._in_doubt(angles, few)[:2].tolist() == [True, False]
    assert not signatures._in_doubt(angles[:, :1], few).any()  # one cluster: no second one


def test_counts_of_signatures_by_update_say_nothing():
    angles = torch.tensor([[0.1, 1.0], [0.9, 1.0]])
    assert signatures._in_doubt(angles, torch.ones(2, 1)).tolist() == [False, True]


def test_a_client_between_two_kinds_is_in_doubt():
    rows, counts, _ = made(kinds=2, members=10, held=5, noise=0.1)
    counts[:] = 20
    between = (rows[2::2].mean(0) + rows[1::2].mean(0)) / 2
    rows[0] = between + Rng.seed(8).normal(5, 20)
    found = labels_of(rows, counts, kinds=2)
    assert found.in_doubt.nonzero().flatten().tolist() == [0]
