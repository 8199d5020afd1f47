"""Personal models: mixes against an explicit loop over the formula, and the choice between them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from coterie.client.block import Mixture, Models, mixed_outputs
from coterie.client.steps import OWN_MODEL
from coterie.client.work import SGD
from coterie.data.federation import Federation, Split
from coterie.data.transforms import Rotate, SwapLabels
from coterie.engines import make_engine
from coterie.methods.fedavg import FedAvg
from coterie.methods.parts import personal
from coterie.methods.parts.personal import (
    NUM_MIXES,
    PRIOR_SAMPLES,
    SHARES,
    SHIFTS,
    as_told,
    balance_of,
    choose_mix,
    compare_mixes,
    finish_own,
    label_prior,
    label_shift,
    mixes,
    served,
    train_balanced,
)
from coterie.randomness import Rng
from tests.helpers import ragged_federation, setup_of

CPU = torch.device("cpu")
FIVE = torch.arange(5)
WITHOUT_OWN = len(SHIFTS)  # the first mixes have a = 0


def sent(params):
    """One model per client, as rows of a table."""
    return Models(params, torch.arange(len(params)))


def block_of(federation, clients=FIVE, **changes):
    setup = setup_of(FedAvg(), federation, **changes)
    engine = make_engine(setup.engine, setup.task(), setup.federation(), "cpu", setup.engine_settings)
    return engine.block_of(clients, engine.plan)


def models_of(block, seed=3):
    size = block.task.layout.size
    return torch.stack([Rng.seed(seed).at(i).normal(size) for i in range(len(block))])


def module() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3)).double()


def outputs_by_hand(params, x, made=module):
    network = made()
    nn.utils.vector_to_parameters(params.clone(), network.parameters())
    return network(x.double()).detach()


def losses_by_hand(federation, client, center, own, turn, split):
    """The mean loss of each mix, by the formula of the module, sample after sample."""
    x, y = federation.samples(client, split)
    of_center, of_own = outputs_by_hand(center, x), outputs_by_hand(own, x).softmax(1)
    found = []
    for share in SHARES:
        for turned in SHIFTS:
            turned_center = (of_center + turned * turn).softmax(1)
            wanted = [
                -math.log((1 - share) * float(turned_center[i, label]) + share * float(of_own[i, label]))
                for i, label in enumerate(y.tolist())
            ]
            found.append(sum(wanted) / len(wanted))
    return torch.tensor(found, dtype=torch.float64)


def without_valid(federation, clients):
    """The federation in which these clients hold nothing out."""
    none = torch.empty(0, dtype=torch.int64)
    rows = [none if i in clients else federation.valid.rows(i) for i in range(len(federation))]
    return replace(federation, valid=Split.of(rows))


SHARES_OF_LABELS = torch.tensor([[0.5, 0.3, 0.2], [0.2, 1.6, 0.2], [0.0, 0.0, 0.0], [0.1, 0.1, 0.3], [3.8, 3.8, 1.9]])


# ---- the turn ----


def uneven() -> Federation:
    held = [[0, 1, 2, 0, 1, 2, 0], [0, 2, 2, 2], [1] * 11, [2]]
    x = Rng.seed(4).normal(sum(map(len, held)), 1, 4, 4).float()
    parts = x.split([len(y) for y in held])
    clients = {f"c{i}": (part, torch.tensor(y)) for i, (part, y) in enumerate(zip(parts, held, strict=True))}
    return replace(Federation.from_clients(clients, test=0.0, valid=0.0), num_classes=3)


def test_the_turn_is_the_logarithm_of_proportions():
    """Own counts, and so many samples of the cluster's proportions as these weigh."""
    block = block_of(uneven(), torch.arange(4))
    counts = torch.tensor([[3, 2, 2], [1, 0, 3], [0, 11, 0], [0, 0, 1]])
    assert torch.equal(block.label_counts(), counts)
    shares = torch.tensor([0.5, 0.3, 0.2]).double().expand(4, 3)
    weights = [0.5, 1.0, 2.0, 9.5]
    found = label_shift(block, torch.tensor(weights).double().unsqueeze(1) * shares)
    for client, weight in enumerate(weights):
        for label in range(3):
            own = (counts[client, label] + weight * shares[client, label]) / (counts[client].sum() + weight)
            assert float(found[client, label]) == pytest.approx(math.log(own / shares[client, label]))
    # The cluster's proportions, turned, are the client's own.
    torch.testing.assert_close((shares.log() + found).exp().sum(1), torch.ones(4).double())


def test_a_client_with_its_clusters_proportions_is_not_turned():
    block = block_of(uneven(), torch.tensor([0]))
    for weight in (0.5, 1.0, 9.5):
        shares = weight * torch.tensor([[3.0, 2.0, 2.0]]).double() / 7
        torch.testing.assert_close(label_shift(block, shares), torch.zeros(1, 3).double())


def test_the_heavier_the_proportions_the_less_a_client_is_turned():
    block = block_of(uneven(), torch.tensor([1, 2, 3]))
    shares = torch.tensor([[0.5, 0.3, 0.2]]).double().expand(3, 3)
    light, heavy = (label_shift(block, weight * shares) for weight in (0.5, 9.5))
    assert torch.equal(light.sign(), heavy.sign())
    assert bool((heavy.abs() < light.abs()).all())


def test_unknown_proportions_turn_nothing():
    block = block_of(uneven(), torch.arange(2))
    shares = torch.tensor([[0.0, 0.0, 0.0], [0.6, 0.2, 0.2]]).double()
    found = label_shift(block, shares)
    assert found[0].tolist() == [0.0, 0.0, 0.0]
    assert found[1].abs().min() > 0
    assert label_shift(block, shares[:, :0]).shape == (2, 0)


def test_a_class_that_the_cluster_has_never_seen_is_finite():
    block = block_of(uneven(), torch.tensor([3, 2]))
    found = label_shift(block, torch.tensor([[0.5, 0.5, 0.0]]).double().expand(2, 3))
    assert bool(found.isfinite().all())
    assert found[0, 2] == found[0].max()  # it holds only this class
    assert found[1, 2] == 0  # neither of them holds it


# ---- the weight of proportions ----

BASE = torch.tensor([0.4, 0.3, 0.2, 0.1]).double()


def drawn_counts(concentration, clients=2000, most=30, seed=0):
    """Label counts of clients of 1 to `most` samples, whose proportions are Dirichlet distributed around `BASE`.

    Sample after sample, by an urn: a class is as likely as it is in `BASE` and among the samples before, together.
    """
    rng = Rng.seed(seed)
    sizes = 1 + (most * rng.at("sizes").uniform(clients)).long()
    counts = torch.zeros(clients, len(BASE), dtype=torch.int64)
    for number in range(most):
        likely = (counts + concentration * BASE) / (number + concentration)
        label = (rng.at("label", number).uniform(clients, 1) > likely.cumsum(1)[:, :-1]).sum(1)
        counts += torch.nn.functional.one_hot(label, len(BASE)) * (sizes > number).unsqueeze(1)
    return counts


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("concentration", [0.2, 1.0, 4.0])
def test_the_weight_is_the_concentration_of_proportions(concentration, seed):
    """And half a sample more: nobody's own samples are all that counts."""
    counts = drawn_counts(concentration, seed=seed)
    found = label_prior(counts)
    assert float(found.sum()) == pytest.approx(concentration + 0.5, rel=0.1)
    torch.testing.assert_close(found / found.sum(), counts.sum(0).double() / counts.sum())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("clients", "most"), [(2000, 30), (100, 30), (2000, 1), (50, 400)])
def test_proportions_of_iid_clients_have_the_largest_weight(clients, most, seed):
    """About ten samples, although the counts of two of them are never equal; also if each has one sample."""
    counts = drawn_counts(1e9, clients, most, seed)
    found = label_prior(counts)
    assert float(found.sum()) == pytest.approx(9.5)
    torch.testing.assert_close(found / found.sum(), counts.sum(0).double() / counts.sum())


def test_proportions_of_clients_with_one_class_each_have_the_smallest_weight():
    assert label_prior(torch.tensor([[7, 0, 0], [0, 7, 0], [0, 0, 7]])).tolist() == pytest.approx([0.5 / 3] * 3)


def test_the_weight_by_hand():
    """Of sixteen samples, six more or less than half are of the first class.

    Pearson's statistic is 6^2 / 8 + 6^2 / 8 = 9 for each client, and 1 + 15 / (1 + weight) is to be expected.
    """
    expected = 15 / 8 - 1 + 0.5
    for counts in ([[14, 2], [2, 14]], [[14, 2]] * 5 + [[2, 14]] * 5, [[14, 0, 2], [2, 0, 14], [0, 0, 0]]):
        found = label_prior(torch.tensor(counts))
        assert float(found.sum()) == pytest.approx(expected)
        assert float(found[0]) == float(found[-1]) == pytest.approx(expected / 2)


def test_proportions_of_one_client_are_its_own():
    assert label_prior(torch.tensor([[6, 0, 2]])).tolist() == pytest.approx([9.5 * 0.75, 0, 9.5 * 0.25])
    assert label_prior(torch.tensor([[0, 1, 0]])).tolist() == pytest.approx([0, 9.5, 0])
    assert label_prior(torch.tensor([[5], [3]])).tolist() == pytest.approx([9.5])


def test_nobody_has_told_proportions():
    assert label_prior(torch.zeros(0, 3, dtype=torch.int64)).tolist() == [0.0] * 3
    assert label_prior(torch.zeros(4, 3, dtype=torch.int64)).tolist() == [0.0] * 3


# ---- comparing ----


def test_mixes_without_the_own_model_come_first():
    grid = mixes(CPU)
    assert grid.shape == (NUM_MIXES, 2)
    assert grid[:WITHOUT_OWN].tolist() == [[0.0, turn] for turn in SHIFTS]
    assert bool((grid[WITHOUT_OWN:, 0] > 0).all())
    assert grid[0].tolist() == [0.0, 0.0]  # the center as it is


@pytest.mark.parametrize("at_once", [1, 7, 8192])
def test_losses_are_those_of_the_formula(at_once):
    """Clients of different sizes, one that sees turned inputs, one with exchanged labels; in pieces of any size."""
    federation = replace(
        ragged_federation(5), views=((), (Rotate(90),), (SwapLabels(0, 2),)), view=torch.tensor([0, 1, 0, 2, 0])
    )
    block = block_of(federation, torch.tensor([3, 0, 2, 1, 4]))
    block._at_once = at_once
    center, own = models_of(block), models_of(block, seed=9)
    block.memory.put(OWN_MODEL, own)
    shares = SHARES_OF_LABELS.double()
    turn = label_shift(block, shares)
    losses, samples = compare_mixes(block, sent(center), shares)
    assert losses.shape == (5, NUM_MIXES)
    for place, client in enumerate(block.clients.tolist()):
        expected = losses_by_hand(federation, client, center[place], own[place], turn[place], "valid")
        torch.testing.assert_close(losses[place], expected, rtol=1e-9, atol=1e-12)
        assert int(samples[place]) == len(federation.valid.rows(client)) > 0
    assert len(losses.unique()) == 4 * 13 + 5  # the turn does not matter where a = 1, nor to the third client


def test_without_an_own_model_there_is_only_the_center():
    block = block_of(ragged_federation(5))
    shares = torch.zeros(5, 3).double()
    losses, _ = compare_mixes(block, sent(models_of(block)), shares)
    torch.testing.assert_close(losses, losses[:, :1].expand_as(losses))


def test_numbers_are_mixed_as_numbers():
    rng = Rng.seed(1)
    clients = {f"c{i}": (rng.at("x", i).normal(12, 4).float(), rng.at("y", i).normal(12, 1).float()) for i in range(3)}
    federation = Federation.from_clients(clients, valid=0.25)
    assert federation.num_classes == 0
    block = block_of(federation, torch.arange(3), model=lambda: nn.Linear(4, 1), model_settings={}, loss="mse")
    center, own = models_of(block), models_of(block, seed=9)
    block.memory.put(OWN_MODEL, own)
    losses, _ = compare_mixes(block, sent(center), torch.zeros(3, 0).double())
    for client in range(3):
        x, y = federation.samples(client, "valid")
        one, other = (outputs_by_hand(row[client], x, lambda: nn.Linear(4, 1).double()) for row in (center, own))
        expected = [
            float(((1 - a) * one + a * other - y.double()).square().mean()) for a in SHARES for _ in range(len(SHIFTS))
        ]
        assert losses[client].tolist() == pytest.approx(expected)


def test_a_client_without_held_out_samples_judges_by_training_samples_and_not_its_own_model():
    federation = without_valid(ragged_federation(5), {1, 4})
    block = block_of(federation)
    center, own, shares = models_of(block), models_of(block, seed=9), SHARES_OF_LABELS.double()
    block.memory.put(OWN_MODEL, own)
    losses, samples = compare_mixes(block, sent(center), shares)
    turn = label_shift(block, shares)
    for client in range(5):
        split = "train" if client in (1, 4) else "valid"
        expected = losses_by_hand(federation, client, center[client], own[client], turn[client], split)
        if split == "train":
            expected[WITHOUT_OWN:] = torch.inf
        torch.testing.assert_close(losses[client], expected, rtol=1e-9, atol=1e-12)
        assert int(samples[client]) == len(federation.split(split).rows(client))


def test_where_nobody_holds_anything_out_all_judge_by_training_samples():
    federation = without_valid(ragged_federation(5), set(range(5)))
    block = block_of(federation)
    center, shares = models_of(block), SHARES_OF_LABELS.double()
    losses, samples = compare_mixes(block, sent(center), shares)
    turn = label_shift(block, shares)
    for client in range(5):
        expected = losses_by_hand(federation, client, center[client], center[client], turn[client], "train")
        torch.testing.assert_close(losses[client, :WITHOUT_OWN], expected[:WITHOUT_OWN], rtol=1e-9, atol=1e-12)
    assert bool(losses[:, WITHOUT_OWN:].isinf().all())
    assert torch.equal(samples, block.samples)


def test_a_model_that_has_diverged_spoils_only_mixes_with_it():
    block = block_of(ragged_federation(5))
    center, shares = models_of(block), SHARES_OF_LABELS.double()
    fine, _ = compare_mixes(block, sent(center), shares)
    block.memory.put(OWN_MODEL, torch.full_like(center, torch.nan))
    losses, samples = compare_mixes(block, sent(center), shares)
    torch.testing.assert_close(losses[:, :WITHOUT_OWN], fine[:, :WITHOUT_OWN])
    assert bool(losses[:, WITHOUT_OWN:].isnan().all())
    choose_mix(block, losses, samples, torch.zeros_like(losses))
    mixture = served(block, Models(center, FIVE), block.task.work, shares, torch.zeros_like(losses))
    assert bool((mixture.weights[:, 0] == 1).all())
    chosen = block.memory.get(personal._MIX, FIVE)
    assert chosen.tolist() != [0] * 5
    expected = fine.gather(1, chosen.unsqueeze(1))[:, 0]
    torch.testing.assert_close(block.evaluate_mixture(mixture, "valid")["loss"], expected)


def test_what_a_client_cannot_judge_favours_nothing():
    """The server averages losses over clients: a mix that is missing must be neither good nor bad."""
    losses = torch.full((2, NUM_MIXES), 0.3).double()
    losses[0] = torch.arange(NUM_MIXES).double()
    losses[1, :WITHOUT_OWN] = torch.tensor([0.9, 0.7, 0.8], dtype=torch.float64)
    losses[1, WITHOUT_OWN:] = torch.inf
    told = as_told(losses)
    assert torch.equal(told[0], losses[0])
    assert told[1].tolist() == [0.9, 0.7, 0.8] * len(SHARES)
    assert as_told(torch.full((1, NUM_MIXES), torch.nan)).tolist() == [[0.0] * NUM_MIXES]


# ---- choosing ----


class Remembering:
    """A block that only remembers."""

    def __init__(self):
        self.memory, self.kept = self, {}

    def put(self, name, value):
        self.kept[name] = value.clone()


def chosen_of(losses, samples, curve):
    block = Remembering()
    choose_mix(block, torch.tensor(losses).double(), torch.tensor(samples), torch.tensor(curve).double())
    [found] = block.kept.values()
    return found.tolist()


@pytest.mark.parametrize(("samples", "expected"), [(0, 1), (19, 1), (21, 2), (1000, 2)])
def test_the_cluster_counts_as_so_many_samples(samples, expected):
    """By its own samples a client prefers the third mix by 0.1, by its cluster the second by as much."""
    assert PRIOR_SAMPLES == 20
    assert chosen_of([[0.9, 0.6, 0.5]], [samples], [[0.9, 0.5, 0.6]]) == [expected]


def test_of_equal_mixes_the_first():
    assert chosen_of([[0.5, 0.5, 0.5]], [9], [[0.1, 0.1, 0.1]]) == [0]
    assert chosen_of([[0.5 + 1e-6, 0.5, 0.5 - 1e-6]], [10**6], [[0.0, 0.0, 0.0]]) == [0]  # by rounding
    assert chosen_of([[0.5 + 1e-3, 0.5, 0.5 - 1e-6]], [10**6], [[0.0, 0.0, 0.0]]) == [1]


def test_each_client_chooses_by_itself():
    losses, curve = [[1.0, 2.0, 0.5], [0.1, 2.0, 0.5]], [[0.0, 0.0, 0.0]] * 2
    assert chosen_of(losses, [5, 5], curve) == [2, 0]


def test_what_cannot_be_judged_is_not_chosen():
    """Although the cluster prefers it by far."""
    assert chosen_of([[0.9, 0.8, torch.inf]], [1], [[9.0, 9.0, 0.0]]) == [1]
    assert chosen_of([[0.9, 0.8, torch.nan]], [1], [[9.0, 9.0, 0.0]]) == [1]
    assert chosen_of([[torch.nan] * 3], [1], [[9.0, 9.0, 0.0]]) == [0]


# ---- finishing ----


def test_a_finished_model_is_kept_only_where_it_gains():
    """Two log likelihoods over all held-out samples and those that stand for the cluster; clients 1 and 4 have none."""
    federation = without_valid(ragged_federation(5, samples=80), {1, 4})
    block, work = block_of(federation), SGD(lr=0.1, epochs=3, batch_size=5)
    center, shares = models_of(block), SHARES_OF_LABELS.double()
    trained = models_of(block, seed=9)
    trained[2] = block.train(trained, SGD(lr=0.1, epochs=40, batch_size=5))[2]  # it has learnt all there is
    curve = 0.1 * Rng.seed(6).uniform(5, NUM_MIXES)
    finished = block.train(trained, work, purpose="finish ")
    assert not torch.equal(finished, block.train(trained, work))  # the batches are others than those of the round
    block.memory.put(OWN_MODEL, trained)
    finish_own(block, sent(center), work, shares, curve)
    kept, mix = block.memory.get(OWN_MODEL, center), block.memory.get(personal._MIX, FIVE)
    turn, better = label_shift(block, shares), []
    for client in range(5):
        split = "train" if client in (1, 4) else "valid"
        samples, totals = len(federation.split(split).rows(client)), []
        for own in (trained, finished):
            losses = losses_by_hand(federation, client, center[client], own[client], turn[client], split)
            if split == "train":
                losses[WITHOUT_OWN:] = torch.inf
            totals.append(samples * losses + PRIOR_SAMPLES * curve[client])
        better.append(float(totals[0].min() - totals[1].min()) > 2)
        assert torch.equal(kept[client], (finished if better[-1] else trained)[client])
        assert int(mix[client]) == int(totals[better[-1]].argmin())
    assert better == [True, False, False, True, False]


def test_a_model_that_diverges_when_it_is_finished_is_not_kept():
    block = block_of(ragged_federation(5))
    center, trained, shares = models_of(block), models_of(block, seed=9), SHARES_OF_LABELS.double()
    curve = torch.zeros(5, NUM_MIXES).double()
    work = SGD(lr=1e300, epochs=2)
    assert not bool(block.train(trained, work, purpose="finish ").isfinite().all(1).any())
    block.memory.put(OWN_MODEL, trained)
    finish_own(block, sent(center), work, shares, curve)
    assert torch.equal(block.memory.get(OWN_MODEL, center), trained)
    losses, samples = compare_mixes(block, sent(center), shares)
    chosen = block.memory.get(personal._MIX, FIVE)
    choose_mix(block, losses, samples, curve)
    assert torch.equal(block.memory.get(personal._MIX, FIVE), chosen)


# ---- serving ----


def test_what_is_served_scores_as_the_mix_that_was_chosen():
    block = block_of(ragged_federation(5))
    center, own, shares = models_of(block), models_of(block, seed=9), SHARES_OF_LABELS.double()
    block.memory.put(OWN_MODEL, own)
    losses, _ = compare_mixes(block, sent(center), shares)
    for mix in range(NUM_MIXES):
        block.memory.put(personal._MIX, torch.full((5,), mix))
        mixture = served(block, Models(center, FIVE), block.task.work, shares, torch.zeros_like(losses))
        torch.testing.assert_close(block.evaluate_mixture(mixture, "valid")["loss"], losses[:, mix])


def test_weights_and_bias_of_what_is_served():
    block = block_of(ragged_federation(5))
    center, own, shares = models_of(block), models_of(block, seed=9), SHARES_OF_LABELS.double()
    block.memory.put(OWN_MODEL, own)
    block.memory.put(personal._MIX, torch.tensor([0, 1, 5, 7, 14]))
    mixture = served(block, Models(center, FIVE), block.task.work, shares, torch.zeros(5, NUM_MIXES).double())
    assert mixture.weights.tolist() == [[1, 0], [1, 0], [0.75, 0.25], [0.5, 0.5], [0, 1]]
    assert torch.equal(mixture.params[:, 0], center)
    assert torch.equal(mixture.params[:, 1], own)
    turn = label_shift(block, shares)
    for client, turned in enumerate((0.0, 0.5, 1.0, 0.5, 1.0)):
        torch.testing.assert_close(mixture.bias[client, 0], turned * turn[client])
    assert not mixture.bias[:, 1].any()  # the own model has the client's proportions already


def test_without_classes_there_is_no_bias():
    block = block_of(ragged_federation(5))
    nothing, curve = torch.zeros(5, 0).double(), torch.zeros(5, NUM_MIXES).double()
    assert served(block, Models(models_of(block), FIVE), block.task.work, nothing, curve).bias is None


def test_a_newcomer_takes_the_clusters_best_mix_without_an_own_model():
    """Clients 1 and 3 took part, the others did not; the curve prefers mixes that newcomers do not have."""
    block = block_of(ragged_federation(5))
    center, shares = models_of(block), SHARES_OF_LABELS.double()
    own = models_of(block_of(ragged_federation(5), torch.tensor([1, 3])), seed=9)
    members = block_of(ragged_federation(5), torch.tensor([1, 3]))
    members.memory.put(OWN_MODEL, own)
    members.memory.put(personal._MIX, torch.tensor([14, 3]))
    block.memory = type(block.memory)(members.memory._tensors, block.clients, 5)
    curve = torch.linspace(2, 1, NUM_MIXES).double().repeat(5, 1)
    curve[2, 0] = 0.5
    mixture = served(block, Models(center, FIVE), block.task.work, shares, curve)
    assert mixture.weights.tolist() == [[1, 0], [0, 1], [1, 0], [0.75, 0.25], [1, 0]]
    turn = label_shift(block, shares)
    torch.testing.assert_close(mixture.bias[[0, 4], 0], turn[[0, 4]])  # the third mix: all of the turn
    assert not mixture.bias[2].any()  # the first
    assert torch.equal(mixture.params[0, 1], center[0])
    assert torch.equal(mixture.params[[1, 3], 1], own)


def test_a_network_may_have_more_outputs_than_there_are_classes():
    network = lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 5))  # noqa: E731
    block = block_of(ragged_federation(5), model=network, model_settings={})
    center, shares = models_of(block), SHARES_OF_LABELS.double()
    block.memory.put(OWN_MODEL, models_of(block, seed=9))
    losses, samples = compare_mixes(block, sent(center), shares)
    choose_mix(block, losses, samples, torch.zeros_like(losses))
    mixture = served(block, Models(center, FIVE), block.task.work, shares, losses)
    found = block.evaluate_mixture(mixture, "valid")["loss"]
    torch.testing.assert_close(found, losses.min(1).values, rtol=1e-4, atol=1e-4)


# ---- a model of weight 0 ----


def test_a_model_of_weight_zero_has_no_say():
    outputs = torch.tensor([[[2.0, 0.0]], [[torch.nan, torch.inf]]])
    weights = torch.tensor([[1.0], [0.0]])
    assert torch.equal(mixed_outputs(outputs, weights, num_classes=2), outputs[0].log_softmax(1))
    assert torch.equal(mixed_outputs(outputs, weights, num_classes=0), outputs[0])
    broken = Mixture(Models(torch.zeros(2, 1), torch.tensor([[0, 1]])), weights.T).mixed(outputs, torch.tensor([0]), 2)
    assert bool(broken.isfinite().all())


# ---- balanced training ----


def test_balanced_training_is_training_with_shifted_outputs():
    block = block_of(uneven(), torch.arange(4))
    shares = torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64).expand(4, 3)
    start, work = models_of(block), SGD(lr=0.1, epochs=1, batch_size="full")
    balance = torch.tensor([1.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    centers = train_balanced(block, sent(start), work, shares, balance)
    own, shift = block.memory.get(OWN_MODEL, start), balance.unsqueeze(1) * label_shift(block, shares)
    assert bool((shift.abs() > 0.1).any())
    for i, (x, y) in enumerate(block.shards()):
        params = start[i].clone().requires_grad_()
        named = dict(zip(dict(module().named_parameters()), block.task.layout.unpack(params).values(), strict=True))
        loss = nn.functional.cross_entropy(torch.func.functional_call(module(), named, (x,)) + shift[i], y)
        (gradient,) = torch.autograd.grad(loss, params)
        torch.testing.assert_close(centers[i], start[i] - 0.1 * gradient)
        torch.testing.assert_close(outputs_by_hand(own[i], x), outputs_by_hand(centers[i], x) + shift[i])


def test_label_proportions_count_in_training_as_far_as_a_center_guesses():
    blind = float(torch.tensor(10.0).log())
    losses = torch.tensor([0.0, 2 * blind, blind, blind / 2, blind / 10])  # 0: unknown
    torch.testing.assert_close(balance_of(losses, 10), torch.tensor([1.0, 1.0, 1.0, 0.25, 0.01]))
    assert balance_of(losses, 0).shape == losses.shape  # a regression has no classes


def test_clients_with_the_usual_proportions_train_as_always():
    block = block_of(uneven(), torch.arange(4))
    start, work = models_of(block), SGD(lr=0.1, epochs=2, batch_size=4)
    for shares in (None, torch.zeros(4, 3, dtype=torch.float64)):
        centers = train_balanced(block, sent(start), work, shares)
        assert torch.equal(centers, block.train(start, work))
        assert torch.equal(centers, block.memory.get(OWN_MODEL, start))


def test_a_bias_after_a_norm_is_one_of_the_outputs():
    network = lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.LayerNorm(3))  # noqa: E731
    task = block_of(uneven(), torch.arange(4), model=network, model_settings={}).task
    assert task.output_bias == slice(task.layout.num_parameters - 3, task.layout.num_parameters)


@pytest.mark.parametrize("last", [nn.Linear(6, 3, bias=False), nn.Sequential(nn.Linear(6, 3), nn.Tanh())])
def test_a_network_without_a_bias_of_its_outputs_trains_as_always(last):
    network = lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), last)  # noqa: E731
    block = block_of(uneven(), torch.arange(4), model=network, model_settings={})
    assert block.task.output_bias is None
    start, work = models_of(block), SGD(lr=0.1, epochs=1, batch_size=4)
    shares = torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64).expand(4, 3)
    centers = train_balanced(block, sent(start), work, shares)
    assert torch.equal(centers, block.train(start, work))
    assert torch.equal(centers, block.memory.get(OWN_MODEL, start))
