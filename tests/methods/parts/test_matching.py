"""Neuron alignment: the plan of a network, permutations that keep its outputs, matched means that undo them."""

from __future__ import annotations

import itertools

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812

from coterie.errors import ModelError
from coterie.methods.parts.matching import Plan, matched_mean
from coterie.nets.flat import flatten
from coterie.nets.registry import models

PICTURE = (1, 14, 14)


class Written(nn.Module):
    """A forward of one's own: functions, a view with the batch's size, channels last, an activation used twice."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 7, 3)
        self.norm = nn.GroupNorm(1, 7)
        self.dense1, self.dense2 = nn.Linear(7 * 9, 11), nn.Linear(11, 5)

    def forward(self, x):
        x = (x - 0.5) / 2
        x = F.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = self.norm(self.conv2(x))
        x = x * torch.sigmoid(x)
        x = F.adaptive_avg_pool2d(x, 3)
        x = x.permute(0, 2, 3, 1).contiguous().view(x.size(0), -1)
        x = F.dropout(self.dense1(x), 0.5, self.training).relu()
        return torch.log_softmax(self.dense2(x), 1)


class SpatialMean(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


def conv_net_with_norms():
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12), nn.PReLU(12), nn.Dropout2d(0.3)),
        nn.Flatten(),
        nn.BatchNorm1d(12 * 25),
        nn.Linear(12 * 25, 20),
        nn.LayerNorm(20),
        nn.GELU(),
        nn.Linear(20, 5),
    )


NETWORKS = {
    "mlp": lambda: models()["mlp"](PICTURE, 5, hidden=40),
    "lenet": lambda: models()["lenet"](PICTURE, 5),
    "leaf-cnn": lambda: models()["leaf-cnn"](PICTURE, 5, hidden=48),
    "norms": conv_net_with_norms,
    "written": Written,
    "softmax": lambda: nn.Sequential(nn.Flatten(), nn.Linear(196, 8), nn.Softmax(1), nn.Linear(8, 5)),
    "spatial-mean": lambda: nn.Sequential(nn.Conv2d(1, 9, 3), nn.ReLU(), SpatialMean(), nn.Linear(9, 5)),
}


def made(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """A network whose norms have learnt something."""
    torch.manual_seed(seed)
    module = NETWORKS[name]()
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm | nn.GroupNorm | nn.LayerNorm | nn.PReLU):
                for tensor in (*layer.parameters(), *layer.buffers()):
                    if tensor.is_floating_point():
                        tensor.uniform_(0.5, 2)
    return module.to(dtype).eval()


def outputs(module: nn.Module, plan: Plan, flat: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        return functional_call(module, plan.layout.unpack(flat), (x,))


def shuffled(plan: Plan, flat: Tensor, copies: int, seed: int = 1) -> Tensor:
    """Copies of one network, the units of each in an order of its own."""
    torch.manual_seed(seed)
    orders = [[torch.randperm(layer.units) for layer in plan.layers] for _ in range(copies)]
    return torch.stack([plan.permute(flat, order) for order in orders])


def planned(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Plan, Tensor, Tensor]:
    module = made(name, dtype)
    x = torch.randn(6, *PICTURE, dtype=dtype)
    return module, Plan.of(module, PICTURE), flatten(module), x


# ---- the plan ----


def test_the_plan_names_hidden_layers_and_their_units():
    plan = Plan.of(models()["lenet"]((1, 28, 28), 10), (1, 28, 28))
    assert [(layer.name, layer.units) for layer in plan.layers] == [("0", 6), ("3", 16), ("7", 120), ("9", 84)]
    reads = {place.slot.name: place.columns for place in plan.layers[1].places}
    assert list(reads) == ["3.weight", "3.bias", "7.weight"]
    assert reads["7.weight"][2].tolist() == list(range(50, 75))  # channel 2 of 5x5 pictures


def test_a_network_without_hidden_layers_has_an_empty_plan():
    module = models()["mclr"](PICTURE, 5)
    plan = Plan.of(module, PICTURE)
    two = torch.randn(2, plan.layout.size)
    assert plan.layers == ()
    torch.testing.assert_close(matched_mean(two, plan, two[0])[0], two.mean(0))


def test_a_plan_leaves_the_network_and_the_generator_alone():
    module = made("norms").train()
    before, state = flatten(module), torch.get_rng_state()
    Plan.of(module, PICTURE)
    assert module.training
    assert torch.equal(flatten(module), before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", NETWORKS)
def test_permuting_keeps_the_outputs(name):
    module, plan, flat, x = planned(name)
    other = shuffled(plan, flat, 1)[0]
    assert not torch.allclose(other, flat)
    torch.testing.assert_close(outputs(module, plan, other, x), module(x).detach(), atol=1e-12, rtol=1e-12)


def test_a_permutation_is_read_as_new_from_old():
    module = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1))
    plan = Plan.of(module, (1,))
    flat = torch.tensor([1.0, 2.0, 3.0, 10.0, 20.0, 30.0, 4.0, 5.0, 6.0, 7.0])
    permuted = plan.permute(flat, [torch.tensor([2, 0, 1])])
    assert permuted.tolist() == [3.0, 1.0, 2.0, 30.0, 10.0, 20.0, 6.0, 4.0, 5.0, 7.0]


# ---- networks that cannot be matched ----


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(torch.cat([self.left(x), self.right(x)], dim=1))


class Loose(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.scale = nn.Linear(4, 2), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.dense(x * self.scale)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.other = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.dense(x)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.first(x).relu()
        return self.third(hidden + self.second(hidden).relu())


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.first(x)
        return self.second(hidden), hidden


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def twice():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


REFUSED = {
    "resnet18": (lambda: models()["resnet18"]((3, 32, 32), 5, width=8), (3, 32, 32), r"'0' \(Conv2d\): .*combined"),
    "residual": (Residual, (4,), r"'first' \(Linear\): on the way to layer 'second' its units are .*combined"),
    "mobilenetv2": (
        lambda: models()["mobilenetv2"]((3, 32, 32), 5),
        (3, 32, 32),
        r"'3.residual.0' \(Conv2d\): .*groups=32",
    ),
    "branches": (Branches, (4,), r"'left' \(Linear\): .*combined with those of another layer"),
    "group-norm": (
        lambda: models()["celeba-cnn"]((3, 16, 16), 2, norm="group"),
        (3, 16, 16),
        r"'0' \(Conv2d\): .*grouped",
    ),
    "recurrent": (lambda: nn.Sequential(nn.GRU(4, 3)), (5, 4), r"'0' \(GRU\): "),
    "unknown": (
        lambda: nn.Sequential(nn.ConvTranspose2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 36, 2)),
        (1, 4, 4),
        r"'0' \(ConvTranspose2d\): its parameter 'weight' is not part of a supported layer",
    ),
    "mixed": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Unflatten(1, (8, 8)), nn.Linear(8, 2)),
        (1, 6, 6),
        r"'0' \(Conv2d\): on the way to layer '3' its units are mixed",
    ),
    "pooled": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.AvgPool1d(3, stride=1), nn.Linear(4, 2)),
        (4,),
        r"'0' \(Linear\): on the way to layer '2' its units are mixed",
    ),
    "loose": (Loose, (4,), r"network \(Loose\): its parameter 'scale'"),
    "unused": (Unused, (4,), r"'other' \(Linear\): it is not used"),
    "two-outputs": (TwoOutputs, (4,), r"network \(TwoOutputs\): it must return one tensor"),
    "used-twice": (twice, (4,), r"'0' \(Linear\): it is used more than once"),
    "tied": (Tied, (4,), r"'second' \(Linear\): its parameters are shared"),
    "misfit": (lambda: nn.Sequential(nn.Linear(4, 3)), (5,), r"'0' \(Linear\): it cannot take inputs of shape \(5,\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_matched_is_refused_by_the_layers_name(name):
    build, shape, message = REFUSED[name]
    with pytest.raises(ModelError, match=f"FeSEM-MA cannot match .*{message}"):
        Plan.of(build(), shape)


# ---- matched means ----


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("name", NETWORKS)
def test_permuted_copies_average_back_to_the_network(name, dtype, tolerance):
    module, plan, flat, x = planned(name, dtype)
    copies = shuffled(plan, flat, 5)
    wanted = module(x).detach()
    mean, aligned = matched_mean(copies, plan, copies[0])
    assert mean.dtype == dtype
    torch.testing.assert_close(outputs(module, plan, mean, x), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(aligned, mean.expand_as(aligned), atol=tolerance, rtol=tolerance)
    by_index = outputs(module, plan, copies.mean(0), x)
    assert float((by_index - wanted).abs().max()) > 1e-2 * float(wanted.abs().max())


def test_with_a_start_the_mean_has_its_order():
    _, plan, flat, _ = planned("lenet")
    mean, aligned = matched_mean(shuffled(plan, flat, 3), plan, flat)
    torch.testing.assert_close(mean, flat)
    assert torch.equal(aligned, flat.expand_as(aligned))
    assert torch.equal(plan.align(shuffled(plan, flat, 3), flat), aligned)


def test_aligning_keeps_the_function_and_comes_nearer():
    module, plan, flat, x = planned("norms")
    other = flatten(made("norms", seed=7))
    aligned = plan.align(other.unsqueeze(0), flat)[0]
    torch.testing.assert_close(outputs(module, plan, aligned, x), outputs(module, plan, other, x))
    parameters = slice(0, plan.layout.num_parameters)
    assert (aligned - flat)[parameters].norm() < (other - flat)[parameters].norm()


def test_running_statistics_move_with_their_units_but_do_not_decide():
    _, plan, flat, _ = planned("norms")
    assert {"0.1.running_mean", "0.1.running_var"} <= set(plan.layers[0].names)
    other = flat.clone()
    other[plan.layout.num_parameters :] = torch.rand_like(other[plan.layout.num_parameters :])
    assert torch.equal(plan.align(other.unsqueeze(0), flat)[0], other)


@pytest.mark.parametrize("name", NETWORKS)
def test_identical_models_stay_as_they_are(name):
    _, plan, flat, _ = planned(name, torch.float32)
    mean, aligned = matched_mean(flat.expand(3, -1), plan, flat)
    assert torch.equal(aligned, flat.expand(3, -1))
    torch.testing.assert_close(mean, flat, atol=1e-6, rtol=1e-6)


def test_units_that_are_alike_stay_where_they_are():
    _, plan, flat, _ = planned("mlp", torch.float32)
    dead = flat.clone()
    for place in plan.layers[0].places:
        plan.layout.unpack(dead)[place.slot.name].select(place.axis, 0).zero_()
        plan.layout.unpack(dead)[place.slot.name].select(place.axis, 1).zero_()
    near = dead + 1e-4 * torch.randn(4, len(dead))
    assert torch.equal(plan.align(dead.unsqueeze(0), dead)[0], dead)
    assert matched_mean(near, plan, dead)[0].isfinite().all()


def test_one_model_is_its_own_mean():
    _, plan, flat, _ = planned("lenet")
    mean, _ = matched_mean(flat.unsqueeze(0), plan, flat)
    assert torch.equal(mean, flat)


def test_weights_are_respected():
    _, plan, flat, _ = planned("mlp")
    first, second = flat, flat + 1e-3 * torch.randn_like(flat)
    copies = torch.cat([shuffled(plan, first, 1, seed=2), shuffled(plan, second, 1, seed=3)])
    mean, _ = matched_mean(copies, plan, flat, torch.tensor([1, 3]))
    torch.testing.assert_close(mean, 0.25 * first + 0.75 * second)
    alone, _ = matched_mean(copies, plan, flat, torch.tensor([0.0, 2.0]))
    torch.testing.assert_close(alone, second)


def test_the_order_of_models_makes_no_difference():
    plan = Plan.of(made("lenet"), PICTURE)
    several = torch.stack([flatten(made("lenet", seed=seed)) for seed in range(6)])
    mean, aligned = matched_mean(several, plan, several[0])
    order = torch.tensor([4, 2, 5, 0, 1, 3])
    other_mean, other_aligned = matched_mean(several[order], plan, several[0])
    torch.testing.assert_close(other_mean, mean)
    assert torch.equal(other_aligned, aligned[order])


def test_a_model_that_is_not_finite_does_not_stop_the_others():
    _, plan, flat, _ = planned("mlp")
    several = torch.cat([shuffled(plan, flat, 2), torch.full((1, len(flat)), float("nan"), dtype=flat.dtype)])
    assert torch.equal(plan.align(several, flat)[:2], flat.expand(2, -1))


def test_a_wide_layer_is_matched_with_and_without_the_short_cut():
    """From 256 units on, models near the reference are recognised without a product of their own."""
    torch.manual_seed(0)
    plan = Plan.of(nn.Sequential(nn.Linear(30, 300), nn.ReLU(), nn.Linear(300, 5)), (30,))
    flat = torch.randn(plan.layout.size)
    near = flat + 1e-2 * torch.randn(3, len(flat))
    far = shuffled(plan, flat, 2)
    aligned = plan.align(torch.cat([near[:2], far, near[2:]]), flat)
    assert torch.equal(aligned, torch.cat([near[:2], flat.expand(2, -1), near[2:]]))


def test_threads_are_as_before():
    _, plan, flat, _ = planned("mlp")
    before = torch.get_num_threads()
    plan.align(flat.unsqueeze(0), flat)
    assert torch.get_num_threads() == before


# ---- independent starts ----


def trained(build, x: Tensor, y: Tensor, seed: int, lr: float) -> Tensor:
    torch.manual_seed(seed)
    module = build()
    optimizer = torch.optim.SGD(module.parameters(), lr, momentum=0.9, weight_decay=1e-3)
    for _ in range(30):
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(module(x[batch]), y[batch]).backward()
            optimizer.step()
    return flatten(module)


@pytest.mark.parametrize(("hidden", "lr"), [([64], 0.3), ([64, 64], 0.1)])
def test_from_independent_starts_the_matched_mean_is_better_by_15_points(hidden, lr):
    pixels, digits = load_digits(return_X_y=True)
    mixed = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    x, y = torch.from_numpy(pixels).float()[mixed] / 16, torch.from_numpy(digits)[mixed]

    def build():
        widths = [64, *hidden]
        layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in itertools.pairwise(widths)]
        return nn.Sequential(*[layer for pair in layers for layer in pair], nn.Linear(64, 10))

    module = build()
    plan = Plan.of(module, (64,))
    clients = torch.stack([trained(build, x[:1297], y[:1297], 100 + seed, lr) for seed in range(4)])

    def accuracy(flat):
        return float((outputs(module, plan, flat, x[1297:]).argmax(1) == y[1297:]).float().mean())

    matched = accuracy(matched_mean(clients, plan, clients[0])[0])
    assert matched >= accuracy(clients.mean(0)) + 0.15
    assert matched >= 0.9


@pytest.mark.gpu
def test_on_a_gpu_as_on_the_cpu():
    _, plan, flat, _ = planned("norms")
    copies = shuffled(plan, flat, 4)
    mean, aligned = matched_mean(copies.cuda(), plan, flat.cuda(), torch.ones(4).cuda())
    assert mean.is_cuda
    torch.testing.assert_close(mean.cpu(), flat)
    assert torch.equal(aligned.cpu(), flat.expand_as(aligned))
    several = torch.stack([flatten(made("lenet", seed=seed)) for seed in range(5)])
    plan = Plan.of(made("lenet").cuda(), PICTURE)
    on_gpu, _ = matched_mean(several.cuda(), plan, several[0].cuda())
    torch.testing.assert_close(on_gpu.cpu(), matched_mean(several, plan, several[0])[0])
