"""Pseudo data and the distances measured on it: by hand, against plain torch, and on models that learned something."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from coterie.errors import ConfigError, ModelError
from coterie.methods.parts import pseudo
from coterie.methods.parts.pseudo import Forward, class_distances, generate, probabilities, search
from coterie.nets.flat import Network, flatten
from coterie.nets.zoo import lenet, mlp
from coterie.randomness import Rng

CPU = torch.device("cpu")
RNG = Rng.seed(0)
SHAPE = (1, 4, 4)
SAMPLERS = {"search": search, "generate": generate}
SHORT = {"search": {"samples": 3, "iterations": 25}, "generate": {"samples": 3, "iterations": 25, "batch": 12}}
both_samplers = pytest.mark.parametrize("sampler", SAMPLERS)


def make(kind, seed=0):
    """A small network with weights of its own."""
    torch.manual_seed(seed)
    if kind == "mlp":
        return mlp(SHAPE, 3, hidden=8)
    if kind == "conv":
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))
    layers = [nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)]
    module = nn.Sequential(*layers)
    module(3 * torch.randn(50, *SHAPE) + 1)  # statistics that are not 0 and 1
    return module


class Stubborn(nn.Module):
    """Looks at values on its way, which a stacked program cannot."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) if float(x.detach().sum()) < 1e9 else self.inner(-x)


def centers_of(kind, count=3, dtype=torch.float64):
    return torch.stack([flatten(make(kind, seed)) for seed in range(count)]).to(dtype)


def forward_of(module, dtype=torch.float64, device=CPU, shape=SHAPE, **how):
    return Forward(Network(module, dtype, device), shape, **how)


def made(sampler, forward, centers, rng=RNG, **changes):
    return SAMPLERS[sampler](forward, centers, 3, SHAPE, rng, **SHORT[sampler] | changes)


# ---- distances ----


def two_class_toy():
    """One input, two outputs, no bias: outputs of weights (a, b) are (a x, b x).

    With log 3 as the weight, softmax gives 1/2, 3/4, 9/10 at x = 0, 1, 2 and the rest to the other class.
    """
    first = [math.log(3), 0.0]
    second = [0.0, math.log(3)]
    centers = torch.tensor([first, second], dtype=torch.float64)
    x = torch.tensor([[[1, 2], [-1, -1]], [[-1, 0], [1, 2]]], dtype=torch.float64).unsqueeze(-1)  # [K, L, M, 1]
    return forward_of(nn.Linear(1, 2, bias=False), shape=(1,)), centers, x


def test_centers_say_what_was_worked_out_by_hand():
    forward, centers, x = two_class_toy()
    predictions = probabilities(forward, centers, x)
    of_class_0 = [[[3 / 4, 9 / 10], [1 / 4, 1 / 4]], [[3 / 4, 1 / 2], [1 / 4, 1 / 10]]]
    np.testing.assert_allclose(predictions[..., 0], of_class_0, atol=1e-12)
    np.testing.assert_allclose(predictions.sum(-1), 1, atol=1e-12)
    np.testing.assert_array_equal(predictions, probabilities(forward, centers, x, at_once=3))


@pytest.mark.parametrize("at_once", [1, 3, 9, 2048])
@pytest.mark.parametrize("stacked", [None, True, False])
def test_class_distances_are_those_worked_out_by_hand(at_once, stacked):
    _, centers, x = two_class_toy()
    forward = forward_of(nn.Linear(1, 2, bias=False), shape=(1,), stacked=stacked)
    undecided = torch.zeros(1, 2, dtype=torch.float64)  # (1/2, 1/2) everywhere
    models = torch.cat([undecided, centers[:1]])
    expected = [
        # |3/4 - 1/2| + |1/4 - 1/2| = 0.5 at x = 1 and 0.8 at x = 2; 0.5 at -1, twice; then 0.5 and 0; 0.5 and 0.8.
        [[0.65, 0.5], [0.25, 0.65]],
        # The first center itself: nothing on its own samples; on the other's 1 and 0; 1 and 1.6.
        [[0.0, 0.0], [0.5, 1.3]],
    ]
    found = class_distances(forward, models, probabilities(forward, centers, x), x, at_once=at_once)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_distances_never_take_more_pairs_at_once_than_allowed():
    forward, centers, x = two_class_toy()
    predictions = probabilities(forward, centers, x)
    taken = []

    def outputs(models, inputs):
        taken.append(len(models) * len(inputs))
        return forward(models, inputs)

    for at_once, calls in [(1, 40), (3, 15), (8, 5), (16, 3), (100, 1)]:
        taken.clear()
        class_distances(outputs, centers[[0, 1, 0, 1, 0]], predictions, x, at_once=at_once)
        assert max(taken) <= at_once
        assert len(taken) == calls
        assert sum(taken) == 5 * 8


@pytest.mark.parametrize("stacked", [None, True])
def test_label_counts_change_no_nearest_center(stacked):
    forward, centers = forward_of(make("conv"), stacked=stacked), centers_of("conv")
    x = made("search", forward, centers)
    models = centers.repeat(4, 1) + 0.3 * RNG.at("models").normal(12, centers.shape[1])
    counts = torch.tensor([[1, 2, 3], [0, 5, 1], [4, 0, 0]]).repeat(4, 1)
    predictions = probabilities(forward, centers, x)
    hints = {"counts": counts, "likely": torch.tensor([-1, 0, 1, 2]).repeat(3)}
    one, other = (class_distances(forward, models, predictions, x, **more) for more in ({}, hints))
    nearest = [(distances * counts.unsqueeze(1)).sum(2).argmin(1) for distances in (one, other)]
    assert torch.equal(*nearest)
    assert len(nearest[0].unique()) == 3


def test_no_models_have_no_distances():
    forward, centers, x = two_class_toy()
    assert class_distances(forward, centers[:0], probabilities(forward, centers, x), x).shape == (0, 2, 2)


# ---- against plain torch ----


# None: the compiled program where it can compute the network; True: autograd over stacked models.
both_paths = pytest.mark.parametrize("stacked", [None, True])


@both_paths
@pytest.mark.parametrize("kind", ["mlp", "conv", "norm"])
def test_search_is_plain_torch_on_each_center_in_eval_mode(kind, stacked):
    centers = centers_of(kind)
    forward = forward_of(make(kind), stacked=stacked)
    assert stacked is None or forward.compiled is None
    found = made("search", forward, centers, prior_weight=0.3, prior_mean=0.2)
    noise = made("search", forward_of(make(kind)), centers, iterations=0)
    assert found.shape == (3, 3, 3, *SHAPE)
    for j in range(3):
        module = make(kind, seed=j).double().eval()
        x = noise[j].flatten(0, 1).clone().requires_grad_()
        y = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
        adam = torch.optim.Adam([x], lr=0.1)
        for _ in range(25):
            adam.zero_grad()
            surprise = functional.cross_entropy(module(x), y, reduction="sum")
            (surprise + 0.15 * (x - 0.2).flatten(1).norm(dim=1).sum()).backward()
            adam.step()
        np.testing.assert_allclose(found[j].flatten(0, 1), x.detach(), atol=1e-9)


def test_generators_are_plain_torch_modules():
    like = torch.zeros(0, dtype=torch.float64)
    generators = pseudo._Generators(2, 5, 7, 6, RNG, like)
    with torch.no_grad():  # two that differ
        generators.flat.add_(0.1 * RNG.normal(len(generators.flat)))
    first, scale, shift, second, bias = (w.detach() for w in generators.weights)
    modules = []
    for j in range(2):
        mine = slice(7 * j, 7 * j + 7)
        module = nn.Sequential(nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 6)).double()
        for parameter, value in zip(
            module.parameters(), [first[:, mine].T, scale[mine], shift[mine], second[j].T, bias[j, 0]], strict=True
        ):
            parameter.data.copy_(value)
        modules.append(module)
    for turn in range(3):
        z = RNG.at(turn).normal(9, 5)
        for train in (True, False):
            expected = torch.stack([module.train(train)(z) for module in modules])
            np.testing.assert_allclose(generators(z, train=train).detach(), expected.detach(), atol=1e-12)


def test_adam_is_torchs():
    ours, theirs = RNG.normal(6), RNG.normal(6).requires_grad_()
    adam, torchs = pseudo._Adam(ours, 0.05, 20), torch.optim.Adam([theirs], lr=0.05)
    for turn in range(20):
        gradient = RNG.at("gradient", turn).normal(6) * 10.0 ** (turn % 5 - 4)
        adam.update(gradient[:2].reshape(2, 1), gradient[2:])
        theirs.grad = gradient
        torchs.step()
        np.testing.assert_allclose(ours, theirs.detach(), atol=1e-12)


def test_at_the_prior_mean_the_norm_pulls_nowhere():
    centers = centers_of("mlp", 1)
    x = torch.zeros(1, 2, *SHAPE, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 1])
    slopes = []
    for weight in (0.0, 5.0):
        losses = pseudo._losses(forward_of(make("mlp")), centers, x, y, weight, 0.0)
        slopes.append(torch.autograd.grad(losses.sum(), [x])[0])
    assert torch.isfinite(slopes[1]).all()
    assert torch.equal(*slopes)


# ---- what the samples depend on ----


@both_samplers
@pytest.mark.parametrize("kind", ["mlp", "conv", "norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_center_alone_gives_the_samples_it_gives_among_others(sampler, kind, dtype):
    forward, centers = forward_of(make(kind), dtype), centers_of(kind, dtype=dtype)
    together = made(sampler, forward, centers)
    assert together.dtype == dtype
    assert not together.requires_grad
    assert forward.stacked
    for j in range(3):
        np.testing.assert_allclose(made(sampler, forward, centers[j : j + 1])[0], together[j], atol=1e-5)
    np.testing.assert_allclose(made(sampler, forward, centers[[2, 0, 1]]), together[[2, 0, 1]], atol=1e-5)


@both_samplers
def test_the_same_rng_gives_the_same_samples_and_another_gives_others(sampler):
    forward, centers = forward_of(make("mlp")), centers_of("mlp")
    torch.manual_seed(1)
    once = made(sampler, forward, centers)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(once, made(sampler, forward, centers))
    assert torch.equal(state, torch.get_rng_state())
    other = made(sampler, forward, centers, Rng.seed(1))
    assert (once - other).abs().flatten(3).amax(-1).min() > 1e-3  # every sample is another


@both_samplers
def test_samples_of_a_class_differ_and_those_of_other_classes_too(sampler):
    x = made(sampler, forward_of(make("mlp")), centers_of("mlp")).flatten(3)  # [K, L, M, D]
    apart = torch.cdist(x.flatten(1, 2), x.flatten(1, 2)) + torch.eye(9)
    assert apart.min() > 1e-3


@both_paths
def test_search_in_pieces_is_search_at_once(stacked):
    forward, centers = forward_of(make("conv"), stacked=stacked), centers_of("conv")
    whole = made("search", forward, centers, at_once=10**6)
    for at_once in (1, 7, 12):
        np.testing.assert_allclose(made("search", forward, centers, at_once=at_once), whole, atol=1e-9)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_compiled_program_gives_the_samples_of_autograd(sampler, dtype):
    centers = centers_of("conv", dtype=dtype)
    fast, slow = (made(sampler, forward_of(make("conv"), dtype, stacked=how), centers) for how in (None, True))
    # In float32 a gradient that is nearly 0 may round to another sign, and Adam steps by signs at first.
    apart = (fast - slow).abs().flatten()
    assert apart.quantile(0.95) < (1e-3 if dtype == torch.float32 else 1e-9)


@both_paths
def test_a_search_goes_on_from_where_it_starts(stacked):
    forward, centers = forward_of(make("conv"), stacked=stacked), centers_of("conv")
    first = made("search", forward, centers)
    kept = first.clone()
    assert torch.equal(made("search", forward, centers, start=first, iterations=0), first)
    on = made("search", forward, centers, start=first, iterations=10)
    assert torch.equal(first, kept)  # not changed in place
    assert torch.equal(on, made("search", forward, centers, Rng.seed(9), start=first, iterations=10))  # no noise

    def loss(x):
        return float(
            pseudo._losses(forward, centers, x.flatten(1, 2), torch.arange(3).repeat_interleave(3), 0.1, 0.0).mean()
        )

    more = made("search", forward, centers, start=first, iterations=200)
    assert loss(more) < loss(first)


@both_samplers
def test_the_prior_pulls_samples_to_its_mean(sampler):
    forward, centers = forward_of(make("mlp")), centers_of("mlp")

    def distance(mean, **changes):
        x = made(sampler, forward, centers, iterations=80, prior_mean=mean, **changes)
        return float((x - mean).flatten(3).norm(dim=-1).mean())

    assert distance(0.0, prior_weight=5.0) < distance(0.0, prior_weight=0.5) < distance(0.0, prior_weight=0.01)
    assert distance(2.0, prior_weight=10.0, lr=0.1) < 0.5 < distance(2.0, prior_weight=0.01, lr=0.1)
    per_pixel = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(SHAPE)
    assert distance(per_pixel, prior_weight=10.0, lr=0.1) < 0.5


@both_samplers
def test_eval_mode_and_nothing_of_the_network_is_changed(sampler):
    module = make("norm").double().train()
    network, centers = Network(module, torch.float64, CPU), centers_of("norm")
    before = {name: value.clone() for name, value in network.module.state_dict().items()}
    sent = centers.clone()
    forward = Forward(network, SHAPE)
    x = made(sampler, forward, centers)
    predictions = probabilities(forward, centers, x)
    class_distances(forward, centers, predictions, x)
    assert not network.module.training
    assert torch.equal(sent, centers)
    after = network.module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    plain = make("norm", seed=1).double().eval()(x[1].flatten(0, 1)).softmax(-1)
    np.testing.assert_allclose(predictions[1].flatten(0, 1), plain.detach(), atol=1e-12)


# ---- one at a time ----


@both_samplers
@pytest.mark.parametrize("kind", ["mlp", "conv", "norm"])
def test_a_network_that_cannot_be_stacked_gives_the_same(sampler, kind):
    centers = centers_of(kind)
    stacked, plain = forward_of(make(kind)), forward_of(Stubborn(make(kind)))
    assert (stacked.stacked, stacked.reason) == (True, None)
    assert not plain.stacked
    assert plain.reason
    x = made(sampler, stacked, centers)
    np.testing.assert_allclose(made(sampler, plain, centers), x, atol=1e-9)
    predictions = probabilities(stacked, centers, x)
    np.testing.assert_allclose(probabilities(plain, centers, x), predictions, atol=1e-12)
    one, other = (class_distances(f, centers, predictions, x) for f in (stacked, plain))
    np.testing.assert_allclose(one, other, atol=1e-12)


def test_a_network_that_stacks_to_something_else_goes_one_at_a_time():
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(16, 3)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.dense(x.flatten(1)) * (2 if self.calls > 4 else 1)

    forward = forward_of(Moody())
    assert forward.reason == "stacked outputs differ from plain ones"
    assert not forward.stacked


def test_a_network_that_works_on_its_input_in_place_is_no_problem():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make("mlp")

        def forward(self, x):
            return self.inner(x.mul_(0.5).add_(1.0))

    class Plain(InPlace):
        def forward(self, x):
            return self.inner(x * 0.5 + 1.0)

    centers = centers_of("mlp")
    found = []
    for module in (InPlace(), Stubborn(InPlace()), Plain()):
        forward = forward_of(module)
        x = made("search", forward, centers)
        before = x.clone()
        found.append((x, class_distances(forward, centers, probabilities(forward, centers, x), x, at_once=27)))
        assert torch.equal(x, before)
    for x, distances in found[:2]:
        np.testing.assert_allclose(x, found[2][0], atol=1e-9)
        np.testing.assert_allclose(distances, found[2][1], atol=1e-9)


# ---- what it refuses ----


@both_samplers
def test_regression_is_refused(sampler):
    with pytest.raises(ConfigError, match="generated for classes, and this task has none"):
        SAMPLERS[sampler](forward_of(make("mlp")), centers_of("mlp"), 0, SHAPE, RNG)


@both_samplers
def test_a_network_of_whole_numbers_is_refused(sampler):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(100, 3)

        def forward(self, x):
            return self.table(x.abs().long().flatten(1)).mean(1)

    forward = forward_of(Reads())
    centers = forward.network.initial.double().unsqueeze(0)
    with pytest.raises(ModelError, match="no gradient with respect to its inputs"):
        made(sampler, forward, centers)


# ---- models that learned something ----


def digits(turn, size):
    x, y = load_digits(return_X_y=True)
    x = torch.from_numpy(x / 8 - 1).float().reshape(-1, 1, 8, 8)
    x = functional.interpolate(x, size=(size, size), mode="nearest")
    return torch.rot90(x, turn, (2, 3)), torch.from_numpy(y)


def learned(builder, size, epochs, count):
    """Models that each learned digits turned another way, by plain SGD."""
    models = []
    for turn in range(count):
        x, y = digits(turn, size)
        torch.manual_seed(turn)
        module = builder((1, size, size), 10)
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(epochs):
            for rows in torch.randperm(len(x)).split(20):
                sgd.zero_grad()
                functional.cross_entropy(module(x[rows]), y[rows]).backward()
                sgd.step()
        assert (module(x).argmax(1) == y).float().mean() > 0.9
        models.append(module)
    return models


@pytest.fixture(scope="module")
def trained():
    """Both networks with what some models of it learned: forward, centers [K, P], shape."""
    found = {}
    for name, builder, size, epochs, count in [("mlp", mlp, 8, 4, 4), ("lenet", lenet, 12, 8, 2)]:
        models = learned(builder, size, epochs, count)
        shape = (1, size, size)
        forward = forward_of(models[0], torch.float32, shape=shape)
        found[name] = (forward, torch.stack([flatten(module) for module in models]), shape)
    return found


@both_samplers
@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_samples_of_a_class_are_called_so_by_their_own_center(trained, sampler, name):
    forward, centers, shape = trained[name]
    changes = {"iterations": 200} if sampler == "generate" else {}
    x = SAMPLERS[sampler](forward, centers, 10, shape, RNG, **changes)
    assert x.shape == (len(centers), 10, 30, *shape)
    predictions = probabilities(forward, centers, x)
    right = (predictions.argmax(-1) == torch.arange(10).unsqueeze(1)).float().mean((1, 2))  # of each center
    assert right.min() >= 0.95
    distances = class_distances(forward, centers, predictions, x).mean(-1)  # [K, K]
    assert distances.diagonal().max() < 1e-3
    assert distances[~torch.eye(len(centers), dtype=torch.bool)].min() > 0.5


@both_samplers
def test_models_that_fill_a_gpu_are_differentiated_one_at_a_time(sampler, monkeypatch):
    centers = centers_of("norm")
    expected = made(sampler, forward_of(make("norm")), centers)
    forward = forward_of(make("norm"))
    forward._per_sample = 10**12  # as of a large network on a GPU
    monkeypatch.setattr(forward, "_own", None)
    np.testing.assert_allclose(made(sampler, forward, centers), expected, atol=1e-9)


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@both_samplers
@pytest.mark.parametrize("kind", ["mlp", "conv", "norm"])
def test_a_gpu_gives_the_same(sampler, kind):
    centers = centers_of(kind)
    cuda = torch.device("cuda")
    expected = made(sampler, forward_of(make(kind)), centers)
    # Recorded and replayed; step by step; models one at a time.
    for module, per_sample in ((make(kind), 0), (Stubborn(make(kind)), 0), (make(kind), 10**12)):
        forward = forward_of(module, device=cuda)
        forward._per_sample = per_sample
        found = made(sampler, forward, centers.to(cuda))
        np.testing.assert_allclose(found.cpu(), expected, atol=1e-6)
    predictions = probabilities(forward, centers.to(cuda), found)
    distances = class_distances(forward, centers.to(cuda), predictions, found)
    own = forward_of(make(kind))
    plain = class_distances(own, centers, probabilities(own, centers, expected), expected)
    np.testing.assert_allclose(distances.cpu(), plain, atol=1e-6)
