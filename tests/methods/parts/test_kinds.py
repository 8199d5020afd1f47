"""Finding kinds: D is unbiased, its noise is known, and kinds are found whatever the sizes and labels of clients."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from coterie.methods.parts import kinds
from coterie.methods.parts.kinds import Halves, Kinds, Limits, Noise, Pairs, find_kinds
from coterie.randomness import Rng, name_keys

FIRST, SECOND = torch.tensor([0]), torch.tensor([1])
SIZES = [((4, 4), (4, 4)), ((1, 1), (50, 49)), ((9, 8), (3, 2)), ((200, 200), (1, 1))]


def keys_of(count):
    return name_keys([f"client-{i}" for i in range(count)])


def drawn(means, counts, scales, rng):
    """Two halves around `means` [n, L, D]; one sample has independent noise with deviations `scales` [D]."""
    halves = [
        means + rng.at(part).normal(*means.shape) * scales / counts[..., part, None].clamp_min(1).sqrt()
        for part in range(2)
    ]
    held = [counts[..., part, None] > 0 for part in range(2)]
    return Halves(halves[0] * held[0], halves[1] * held[1], counts.double())


def pair(sizes, gap, draws, scales, seed=0):
    """Two groups whose true gradients differ by `gap` [D]: independent draws, as if each were a class."""
    means = torch.stack([torch.ones_like(gap), 1 + gap]).unsqueeze(1).expand(2, draws, -1).double()
    counts = torch.tensor(sizes).unsqueeze(1).expand(2, draws, 2)
    return drawn(means, counts, scales, Rng.seed(seed))


def made(members, classes=5, width=24, held=3, noise=0.5, seed=0, most=60):
    """Kinds with these numbers of members. Each client holds `held` of the classes, in very different numbers."""
    rng = Rng.seed(seed)
    true = torch.arange(len(members)).repeat_interleave(torch.tensor(members))
    shared, of_kind = 5 * rng.at("common").normal(classes, width), rng.at("kind").normal(len(members), classes, width)
    counts = torch.zeros(len(true), classes, dtype=torch.int64)
    for i in range(len(true)):
        own = rng.at("classes", i).permutation(classes)[:held]
        counts[i, own] = (4 + most * rng.at("sizes", i).uniform(held) ** 3).long()
    parts = torch.stack([(counts + 1) // 2, counts // 2], dim=2)
    found = drawn((shared + of_kind[true]), parts, noise * torch.ones(width), rng.at("noise"))
    return found, true


def evidence(found, noise, one, other):
    return Pairs.of(found).evidence(noise, one, other)


def kinds_of(found, limits=None, keys=None, noise=None):
    keys = keys_of(len(found)) if keys is None else keys
    return find_kinds(found, Noise.of(found) if noise is None else noise, keys, limits or Limits())


def is_partition(found, count):
    """Whether labels have no gaps."""
    return sorted(found.labels.unique().tolist()) == list(range(found.count)) and len(found.labels) == count


# ---- halves ----


def test_halves_come_back_from_the_whole_and_the_difference():
    counts = torch.tensor([[7, 2, 1, 0], [10, 3, 5, 4]])
    parts = torch.stack([(counts + 1) // 2, counts // 2], dim=2)
    true = drawn(Rng.seed(1).normal(2, 4, 6), parts, torch.ones(6), Rng.seed(2))
    share = parts / counts.clamp_min(1).unsqueeze(2)
    rows = share[..., :1] * true.first + share[..., 1:] * true.second
    contrasts = (true.first - true.second) * (parts[..., 1:] > 0)
    found = Halves.of(rows, contrasts, counts)
    assert torch.equal(found.counts, parts.double())
    assert found.counts[0].tolist() == [[4, 3], [1, 1], [1, 0], [0, 0]]
    torch.testing.assert_close(found.first, true.first)
    filled = parts[..., 1] > 0
    torch.testing.assert_close(found.second[filled], true.second[filled])


def test_a_group_is_the_mean_of_its_members_by_their_samples():
    found, _ = made([5])
    labels = torch.tensor([0, 1, 0, 0, 1])
    groups = found.grouped(labels, 2)
    for group in range(2):
        mine = labels == group
        for part, (rows, got) in enumerate(((found.first, groups.first), (found.second, groups.second))):
            weights = found.counts[mine][..., part, None]
            torch.testing.assert_close(got[group], (rows[mine] * weights).sum(0) / weights.sum(0).clamp_min(1))
    assert torch.equal(groups.counts.sum(0), found.counts.sum(0))


def test_halves_are_joined_one_after_the_other():
    found, _ = made([7])
    joined = Halves.joined([found.at(torch.arange(3)), found.at(torch.arange(3, 3)), found.at(torch.arange(3, 7))])
    for name in ("first", "second", "counts"):
        assert torch.equal(getattr(joined, name), getattr(found, name))


# ---- D, z and q ----


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("length", [0.0, 0.5, 3.0])
def test_the_distance_is_estimated_without_bias(sizes, length):
    """The mean of D over 4000 draws is the squared distance, within four standard errors; 0 for one kind."""
    draws, scales = 4000, torch.tensor([2.0, 1.0, 0.5, 0.1]).double()
    gap = length * torch.tensor([0.6, 0.0, 0.8, 0.0]).double()
    found = pair(sizes, gap, draws, scales)
    total = [sum(size) for size in sizes]
    both = total[0] * total[1] / sum(total)
    unit = torch.ones(draws).double()
    _, q = evidence(found, Noise(unit, unit), FIRST, SECOND)
    mean = float(q) / both
    few = [sum(1 / size[part] for size in sizes) for part in range(2)]
    variance = float(scales.pow(4).sum()) * few[0] * few[1] + float((gap * scales).square().sum()) * sum(few)
    assert mean == pytest.approx(length**2, abs=4 * math.sqrt(variance / draws))
    # The check of the check: the plain distance of the means is far off, by the noise of both.
    whole = [
        sum(half[i] * size[p] for p, half in enumerate((found.first, found.second))) for i, size in enumerate(sizes)
    ]
    plain = float((whole[0] / total[0] - whole[1] / total[1]).square().sum(1).mean())
    assert plain - length**2 == pytest.approx(float(scales.square().sum()) / both, rel=0.2)


@pytest.mark.parametrize("sizes", SIZES)
def test_z_has_unit_variance_where_there_is_one_kind(sizes):
    """Over 800 pairs with three classes each; the noise is estimated from the same halves."""
    draws, scales = 800, torch.linspace(0.2, 2, 12).double()
    counts = torch.tensor(sizes).repeat_interleave(draws, dim=0).unsqueeze(1).expand(-1, 3, 2)
    found = drawn(torch.ones(2 * draws, 3, 12).double(), counts, scales, Rng.seed(5))
    left = torch.arange(draws)
    z = evidence(found, Noise.of(found.at(torch.arange(0, 2 * draws, 4))), left, draws + left)[0].diagonal()
    assert float(z.mean()) == pytest.approx(0, abs=4 / math.sqrt(draws))
    assert float(z.std()) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize(("left", "right"), [(10, 10), (2, 500), (30, 90)])
def test_at_q_one_a_common_model_costs_as_much_as_two(left, right):
    """The risk over all samples: of one mean for both, its bias and noise; of two means, the noise of each."""
    trace, total = 7.0, left + right
    square = trace * (1 / left + 1 / right)
    common = left * (right / total) ** 2 * square + right * (left / total) ** 2 * square + total * trace / total
    apart = left * trace / left + right * trace / right
    assert common == pytest.approx(apart)
    rows = torch.tensor([[[0.0, 0.0]], [[math.sqrt(square), 0.0]]]).double()
    halves = torch.tensor([[[left / 2] * 2], [[right / 2] * 2]]).double()
    noise = Noise(torch.tensor([trace]).double(), torch.tensor([1.0]).double())
    z, q = evidence(Halves(rows, rows, halves), noise, FIRST, SECOND)
    assert float(q) == pytest.approx(1)
    assert float(z) == pytest.approx(square / (2 / left + 2 / right))  # by the variance of the module's docstring


def test_only_classes_that_both_hold_are_compared():
    """Of three classes they share the second; a class with one sample has no second half, and does not count."""
    rows = torch.tensor([[[9.0], [2.0], [5.0]], [[0.0], [0.0], [0.0]]]).double()
    counts = torch.tensor([[[4, 4], [4, 4], [1, 0]], [[0, 0], [4, 4], [4, 4]]]).double()
    noise = Noise(torch.tensor([1.0, 2.0, 1.0]).double(), torch.tensor([1.0, 4.0, 1.0]).double())
    z, q = evidence(Halves(rows, rows, counts), noise, FIRST, SECOND)
    assert float(z) == pytest.approx(4 / (2 * 0.5))  # D = 4, sqrt(tr(S^2)) = 2, sqrt(1/2 * 1/2)
    assert float(q) == pytest.approx(4 * 4 / 2)  # 8 * 8 / 16 samples, tr(S) = 2


def test_without_a_shared_class_nothing_is_clear():
    rows = torch.tensor([[[9.0], [0.0]], [[0.0], [-9.0]]]).double()
    counts = torch.tensor([[[4, 4], [0, 0]], [[0, 0], [4, 4]]]).double()
    found = Halves(rows, rows, counts)
    z, q = evidence(found, Noise.of(found), FIRST, SECOND)
    assert not bool(Limits().differ(z, q))
    assert float(q) == 0


# ---- noise ----


def test_noise_recovers_a_known_covariance():
    """Two classes; some clients lack the first, and some have one sample of it, which tells nothing."""
    rng, clients = Rng.seed(3), 600
    basis = torch.linalg.qr(rng.at("basis").normal(8, 8)).Q
    scales = torch.tensor([3.0, 1.0, 1.0, 0.5, 0.3, 0.1, 0.0, 0.0]).double()
    counts = (1 + 40 * rng.at("counts").uniform(clients, 2)).long()
    counts[:100, 0], counts[100:200, 0] = 0, 1
    parts = torch.stack([(counts + 1) // 2, counts // 2], dim=2)
    found = drawn(5 * rng.at("means").normal(clients, 2, 8), parts, scales, rng.at("noise"))
    turned = Halves(found.first @ basis, found.second @ basis, found.counts)
    noise = Noise.of(turned)
    for label, holders in ((0, 400), (1, 600)):
        deviation = math.sqrt(2 * float(scales.pow(4).sum()) / holders)
        assert float(noise.size[label]) == pytest.approx(float(scales.square().sum()), abs=4 * deviation)
        assert float(noise.spread[label]) == pytest.approx(float(scales.pow(4).sum()), rel=0.25)


def test_with_one_holder_no_difference_is_clear():
    """The noise may have one direction only: z is at most the squared length of the difference in units of it."""
    found, _ = made([2], classes=1, held=1)
    noise = Noise.of(Halves(found.first, found.second, found.counts * torch.tensor([1, 0]).reshape(2, 1, 1)))
    assert torch.equal(noise.spread, noise.size.square())


def test_nobody_holds_a_class():
    found, _ = made([6])
    counts = found.counts.clone()
    counts[:, 2] = 0
    empty = Halves(found.first, found.second, counts)
    noise = Noise.of(empty)
    assert noise.size[2] == noise.spread[2] == 0
    assert kinds_of(empty).count == 1


# ---- kinds ----


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("members", [[40], [25, 15], [12, 9, 8, 6, 5], [38, 2]], ids=str)
def test_kinds_are_found_although_sizes_and_labels_differ(members, seed):
    found, true = made(members, seed=seed)
    samples = found.counts.sum((1, 2))
    assert float(samples.max()) > 4 * float(samples.min())
    assert bool((found.counts.sum(2) == 0).any(1).all())  # every client lacks a class
    answer = kinds_of(found)
    assert answer.count == len(members)
    assert adjusted_rand_score(true, answer.labels) == 1.0
    if len(members) > 1:
        assert answer.z >= kinds.CLEAR
        assert answer.q >= kinds.WORTH
    else:
        assert answer.z == answer.q == torch.inf


def test_where_all_differ_each_is_a_kind():
    found, _ = made([1] * 12, held=5)
    answer = kinds_of(found)
    assert answer.count == 12
    assert len(answer.labels.unique()) == 12


def test_a_difference_that_is_clear_but_not_worth_a_model():
    """Many samples make a small difference clear; with few samples of each, one model is better than two."""
    found, true = made([20, 20], held=5, noise=6.0)
    answer = kinds_of(found, Limits(worth=0.0))
    assert adjusted_rand_score(true, answer.labels) > 0.9
    assert answer.z > kinds.CLEAR
    assert kinds_of(found, Limits(worth=2 * answer.q)).count == 1
    assert kinds_of(found, Limits(clear=2 * answer.z, worth=0.0)).count == 1


def test_merging_products_is_averaging_the_halves():
    found, _ = made([3, 3])
    pairs = Pairs.of(found)
    pairs.merge(4, 1)
    pairs.merge(4, 0)
    expected = Pairs.of(found.grouped(torch.tensor([1, 1, 0, 2, 1, 3]), 4))
    there = torch.tensor([2, 4, 3, 5])
    torch.testing.assert_close(pairs.cross[there.unsqueeze(1), there], expected.cross)
    torch.testing.assert_close(pairs.counts[there], expected.counts)
    assert not torch.equal(found.counts[4], pairs.counts[4])  # the signatures themselves stay


def test_the_evidence_is_that_of_the_least_clear_difference():
    found, _ = made([10, 10, 10])
    answer = kinds_of(found)
    groups, noise = found.grouped(answer.labels, 3), Noise.of(found)
    pairs = [evidence(groups, noise, torch.tensor([a]), torch.tensor([b])) for a, b in ((0, 1), (0, 2), (1, 2))]
    least = min(pairs, key=lambda pair: float(pair[0]))
    assert (answer.z, answer.q) == pytest.approx((float(least[0]), float(least[1])))


@pytest.mark.parametrize("members", [[12], [20, 20]], ids=str)
def test_the_last_pair_that_was_merged(members):
    """With room for one kind only, it is the pair that is left if there is room for two."""
    found, _ = made(members)
    noise = Noise.of(found)
    pair, before = kinds._merged(found, noise, Limits(least=2, most=2))
    one, last = kinds._merged(found, noise, Limits(most=1))
    assert (int(pair.max()), int(one.max())) == (1, 0)
    assert last == pytest.approx(float(kinds._between(found, pair, noise)[0][0, 1]))
    assert (last >= kinds.CLEAR) == (len(members) > 1)
    assert kinds_of(found, Limits(least=2, most=2)).last == pytest.approx(before)  # keys change the order
    assert kinds_of(found, Limits(most=1)).last == pytest.approx(last)
    assert kinds_of(found).last < kinds.CLEAR


def test_what_was_never_merged_leaves_no_doubt():
    found, _ = made([1] * 12, held=5)
    assert kinds_of(found).last == 0
    assert kinds_of(made([1])[0]).last == 0


@pytest.mark.parametrize(("least", "most", "expected"), [(1, 2, 2), (1, 1, 1), (5, None, 5), (3, 3, 3), (4, 9, 4)])
def test_limits_are_kept(least, most, expected):
    found, true = made([14, 14, 12])
    answer = kinds_of(found, Limits(least=least, most=most))
    assert answer.count == expected
    assert is_partition(answer, 40)
    whole = adjusted_rand_score(true, answer.labels)
    if expected >= 3:  # no group has two kinds
        assert all(len(true[answer.labels == k].unique()) == 1 for k in range(expected))
    elif expected == 2:  # no kind is in two groups
        assert all(len(answer.labels[true == k].unique()) == 1 for k in range(3))
        assert whole > 0.5


@pytest.mark.parametrize("least", [2, 7, 12])
def test_one_kind_is_cut_if_it_must_be(least):
    found, _ = made([12], held=5)
    answer = kinds_of(found, Limits(least=least, most=least))
    assert answer.count == least
    assert is_partition(answer, 12)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("noise", [0.5, 8.0])
def test_the_order_of_clients_does_not_matter(seed, noise):
    found, _ = made([9, 6, 3], noise=noise, seed=1)
    keys, order = keys_of(18), Rng.seed(seed).permutation(18)
    for limits in (Limits(), Limits(least=4)):
        one = kinds_of(found, limits, keys)
        other = kinds_of(found.at(order), limits, keys[order])
        assert torch.equal(other.labels, one.labels[order])
        assert (other.z, other.q) == pytest.approx((one.z, one.q))


def test_more_clients_than_are_merged_pair_by_pair(monkeypatch):
    monkeypatch.setattr(kinds, "_MOST", 30)
    found, true = made([50, 30, 20])
    answer = kinds_of(found)
    assert adjusted_rand_score(true, answer.labels) == 1.0


# ---- after merging ----


def test_a_group_that_was_cut_without_reason_is_joined():
    found, true = made([16, 8])
    noise = Noise.of(found)
    cut = torch.where(torch.arange(24) < 5, 2, true)
    assert torch.equal(kinds._joined(found, cut, noise, Limits()), torch.where(true == 0, 0, 1))
    assert torch.equal(kinds._joined(found, cut, noise, Limits(least=3)), cut)
    assert int(kinds._joined(found, true, noise, Limits(most=1)).max()) == 0
    assert adjusted_rand_score(true, kinds._settled(found, cut, noise, Limits())) == 1.0
    one, _ = made([12])
    assert not kinds._settled(one, torch.arange(12) % 2, Noise.of(one), Limits()).any()


def test_a_group_of_clients_of_several_kinds_is_dissolved():
    """Kinds differ in the first class only; five clients of each hold none of it, and are a group of their own."""
    found, true = made([12, 12], classes=2, held=2)
    same = drawn(torch.ones(24, 24).double(), found.counts[:, 1], 0.5 * torch.ones(24), Rng.seed(8))
    found.first[:, 1], found.second[:, 1] = same.first, same.second
    apart = torch.arange(24) % 12 < 5
    found.counts[apart, 0] = 0
    labels = torch.where(apart, 2, true)
    answer = kinds._dissolved(found, labels, Noise.of(found), Limits())
    assert set(answer.tolist()) == {0, 1}
    assert adjusted_rand_score(true[~apart], answer[~apart]) == 1.0
    settled = kinds._settled(found, labels, Noise.of(found), Limits())
    assert set(settled.tolist()) == {0, 1}
    assert adjusted_rand_score(true[~apart], settled[~apart]) == 1.0
    assert torch.equal(kinds._dissolved(found, labels, Noise.of(found), Limits(least=3)), labels)


def test_a_kind_is_not_dissolved():
    found, true = made([9, 8, 7])
    assert torch.equal(kinds._dissolved(found, true, Noise.of(found), Limits()), true)


def test_the_mean_of_a_small_group_is_far_by_its_own_noise():
    """Client 0 is 1.1 from client 1, the only other one in its group, and 0.5 from a large group.

    Of the first distance, tr(S) / 4 = 1 is the noise of four samples; of the second, almost nothing.
    """
    rows = torch.tensor([0.0, math.sqrt(1.1), math.sqrt(0.5), math.sqrt(0.5)]).double().reshape(4, 1, 1)
    counts = torch.tensor([2.0, 2.0, 4e3, 4e3]).double().reshape(4, 1, 1).expand(4, 1, 2)
    noise = Noise(torch.tensor([4.0]).double(), torch.tensor([16.0]).double())
    everyone, labels = torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    assert int(kinds._nearest(kinds._distances(Halves(rows, rows, counts), labels, everyone, noise), labels)[0]) == 0
    quiet = Noise(noise.size / 1e6, noise.spread)
    assert int(kinds._nearest(kinds._distances(Halves(rows, rows, counts), labels, everyone, quiet), labels)[0]) == 1


# ---- people ----


def people(members, apart, classes=4, width=64, samples=60, seed=0):
    """Kinds whose members differ from each other too, by 1; two kinds differ by `apart`, both relative to noise 4."""
    rng = Rng.seed(seed)
    true = torch.arange(len(members)).repeat_interleave(torch.tensor(members))
    own = rng.at("own").normal(len(true), classes, width) / math.sqrt(2 * width)
    of_kind = apart * rng.at("kind").normal(len(members), classes, width) / math.sqrt(2 * width)
    counts = torch.full((len(true), classes, 2), samples // 2)
    return drawn(own + of_kind[true], counts, 4 / math.sqrt(width) * torch.ones(width), rng.at("noise")), true


@pytest.mark.parametrize("seed", range(3))
def test_people_who_all_differ_are_of_one_kind(seed):
    found, _ = people([60], apart=0, seed=seed)
    z, q = evidence(found, Noise.of(found), torch.arange(30), torch.arange(30, 60))
    assert float(z.median()) > kinds.CLEAR  # any two differ clearly
    assert float(q.median()) > kinds.WORTH
    assert kinds_of(found).count == 1


@pytest.mark.parametrize("members", [[30, 30], [50, 10]])
def test_kinds_of_people_who_all_differ_are_found(members):
    found, true = people(members, apart=4)
    answer = kinds_of(found)
    assert adjusted_rand_score(true, answer.labels) == 1.0


def test_a_single_strange_client_is_no_kind_but_a_very_strange_one_is():
    for apart, count in ((0.7, 1), (6.0, 2)):
        found, _ = people([40, 1], apart=apart)
        assert kinds_of(found).count == count, apart


def test_the_spread_is_how_far_members_are_from_each_other():
    """Members have true gradients of squared length 1/2 around the mean; the noise of one sample is 16."""
    found, true = people([40, 40], apart=4, width=256)
    spread = kinds.Spread.of(found, true, Noise(torch.full((4,), 16.0), torch.ones(4)), 2)
    expected = 0.5 * (1 + 1 / 39) / 16
    assert (spread.sums / spread.weights).tolist() == pytest.approx([expected] * 2, rel=0.1)
    assert float(spread.between()[0, 1]) == pytest.approx(expected * (1 + 4 * 2 / 40), rel=0.25)
    alike = kinds.Spread.of(found.at(true == 0), torch.zeros(40, dtype=torch.int64), Noise.of(found), 1)
    assert float(alike.weights) == 40 * 4 * 60
    alone = kinds.Spread.of(found.at(torch.tensor([0, 40])), torch.tensor([0, 1]), Noise.of(found), 2)
    assert alone.between().tolist() == [[0, 0], [0, 0]]


def test_distances_are_those_to_the_means_of_the_others():
    """One table for all groups is the plain definition, client by client."""
    found, true = made([5, 4, 1])
    noise, known = Noise.of(found), torch.arange(10) != 2
    table = kinds._distances(found, true, known, noise)
    counts = found.counts.sum(2)
    for i in range(10):
        for group in range(3):
            others = (true == group) & known & (torch.arange(10) != i)
            weights = counts[others].sum(0)
            mean = (counts[others].unsqueeze(2) * found.whole[others]).sum(0) / weights.clamp_min(1).unsqueeze(1)
            apart = (found.whole[i] - mean).square().sum(1) - noise.size / weights.clamp_min(1)
            shared = counts[i] * weights / (counts[i] + weights).clamp_min(1) / noise.size
            if group == 2 and i == 9:  # alone
                apart, shared = noise.size / counts[i].clamp_min(1), counts[i] / noise.size
            expected = (shared * apart).sum() / shared.sum() if float(shared.sum()) > 0 else torch.inf
            assert float(table[i, group]) == pytest.approx(float(expected), rel=1e-9)


# ---- hard cases ----


def test_nobody_shares_a_class_with_anybody():
    found, _ = made([1] * 5, held=5)
    counts = found.counts * torch.eye(5).unsqueeze(2)
    answer = kinds_of(Halves(found.first, found.second, counts))
    assert answer.labels.tolist() == [0] * 5
    forced = kinds_of(Halves(found.first, found.second, counts), Limits(least=3, most=3))
    assert forced.count == 3
    assert is_partition(forced, 5)


def test_clients_that_share_a_class_only_with_some():
    """Kind 0 holds classes 0 and 1, kind 1 holds 1 and 2; two clients share nothing with each other."""
    found, true = made([8, 8], classes=3, held=3)
    counts = found.counts.clone()
    counts[true == 0, 2], counts[true == 1, 0] = 0, 0
    counts[0, 1], counts[8, 1] = 0, 0
    answer = kinds_of(Halves(found.first, found.second, counts))
    assert adjusted_rand_score(true, answer.labels) == 1.0


def test_a_client_that_could_go_nowhere_else():
    """Only two clients of the first kind hold the last class, and one of them holds nothing else."""
    found, true = made([8, 8, 8], classes=4, held=4)
    counts = found.counts.clone()
    counts[:, 3], counts[0, :3] = 0, 0
    counts[:2, 3] = 6
    answer = kinds_of(Halves(found.first, found.second, counts))
    assert adjusted_rand_score(true, answer.labels) == 1.0


def test_one_client():
    found, _ = made([1])
    assert kinds_of(found).labels.tolist() == [0]
    forced = kinds_of(found, Limits(least=2, most=2))
    assert forced.labels.tolist() == [0]
    assert forced.z == torch.inf


def test_two_clients():
    alike, _ = made([2], held=5, most=400)
    assert kinds_of(alike).count == 1
    different, _ = made([1, 1], held=5, most=400, width=200)
    assert kinds_of(different).labels.tolist() in ([0, 1], [1, 0])
    assert kinds_of(different, Limits(most=1)).count == 1
    assert kinds_of(alike, Limits(least=2)).count == 2


def test_no_client():
    assert Kinds(torch.empty(0, dtype=torch.int64)).count == 0


def test_the_unit_of_gradients_does_not_matter():
    """Up to the largest number of half precision, in single precision."""
    found, _ = made([10, 10, 5])
    plain = kinds_of(found)
    for factor in (1e-4, 4e3):
        scaled = Halves((found.first * factor).float(), (found.second * factor).float(), found.counts.float())
        answer = kinds_of(scaled)
        assert torch.equal(answer.labels, plain.labels)
        assert (answer.z, answer.q) == pytest.approx((plain.z, plain.q), rel=1e-2)
    assert float((found.first * 4e3).abs().max()) > 6e4


def test_gradients_that_are_zero_are_one_kind():
    found, _ = made([6])
    answer = kinds_of(Halves(found.first * 0, found.second * 0, found.counts))
    assert answer.count == 1


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_ever_not_a_number(seed):
    """Clients with no sample at all, with one, with one class; a client with huge gradients; hard limits."""
    rng = Rng.seed(seed)
    counts = (rng.at("counts").uniform(15, 4) ** 4 * 8).long()
    counts[0] = 0
    parts = torch.stack([(counts + 1) // 2, counts // 2], dim=2)
    found = drawn(3 * rng.at("means").normal(15, 4, 6), parts, torch.ones(6), rng.at("noise"))
    first, second = found.first.float(), found.second.float()
    first[3], second[3] = 6e4 * (counts[3] > 0).unsqueeze(1), 6e4 * (counts[3] > 1).unsqueeze(1)
    found = Halves(first, second, found.counts.float())
    noise, every = Noise.of(found), torch.arange(15)
    for values in (noise.size, noise.spread, *evidence(found, noise, every, every)):
        assert bool(values.isfinite().all())
    for limits in (Limits(), Limits(most=2), Limits(least=6, most=6), Limits(clear=1e-9, worth=0.0)):
        answer = kinds_of(found, limits)
        assert is_partition(answer, 15)
        assert answer.count >= limits.least
        assert answer.count <= (limits.most or 15)
        assert not math.isnan(answer.z)
        assert not math.isnan(answer.q)
