"""Any module as a function of one flat vector: layouts, BatchNorm without padding, keyed dropout, losses."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from coterie.errors import ModelError
from coterie.nets.flat import LOSSES, Layout, Network, cross_entropy, flatten, mse, state_dict

CPU = torch.device("cpu")


def double(module):
    return Network(module, torch.float64, CPU)


def values(network):
    """The first weights of a network as fresh named tensors."""
    return network.layout.unpack(network.initial.to(network.dtype).clone())


def seeded(make):
    torch.manual_seed(0)
    return make().double()


class Mixed(nn.Module):
    """A frozen layer, BatchNorm between, a float buffer and an integer one."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(3, 4)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("count", torch.tensor([7]))

    def forward(self, x):
        return self.head(self.norm(self.frozen(x))) * self.scale


# ---- layout ----


def test_layout_names_trained_parameters_first_then_float_buffers():
    layout = Layout.of(Mixed())
    assert [(s.name, s.shape, s.start, s.stop) for s in layout.parameters] == [
        ("norm.weight", (4,), 0, 4),
        ("norm.bias", (4,), 4, 8),
        ("head.weight", (2, 4), 8, 16),
        ("head.bias", (2,), 16, 18),
    ]
    assert [(s.name, s.start, s.size) for s in layout.buffers] == [
        ("scale", 18, 1),
        ("norm.running_mean", 19, 4),
        ("norm.running_var", 23, 4),
    ]
    assert layout.num_parameters == 18
    assert layout.size == 27  # frozen parameters do not travel
    assert layout.head == slice(8, 18)


def test_layout_without_buffers():
    layout = Layout.of(nn.Linear(2, 1))
    assert (layout.num_parameters, layout.size, layout.buffers) == (3, 3, ())
    assert layout.head == slice(0, 3)


def test_a_network_with_nothing_to_train_is_refused():
    with pytest.raises(ModelError, match=r"^ReLU has no parameters to train\.$"):
        Layout.of(nn.ReLU())
    with pytest.raises(ModelError, match=r"^Linear has no parameters to train\.$"):
        Layout.of(nn.Linear(2, 2).requires_grad_(False))


def test_flatten_is_in_the_order_of_the_layout():
    module = seeded(Mixed)
    named = module.state_dict()
    expected = [named[s.name].flatten() for s in (*Layout.of(module).parameters, *Layout.of(module).buffers)]
    assert torch.equal(flatten(module), torch.cat(expected))
    assert len(flatten(module)) == 27


@given(st.integers(1, 4), st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_copies_of_the_slots_give_the_vector_again(clients, seed):
    layout = Layout.of(Mixed())
    flat = torch.from_numpy(np.random.default_rng(seed).normal(size=(clients, layout.size)))
    named = layout.unpack(flat)
    assert named["head.weight"].shape == (clients, 2, 4)
    assert named["head.weight"][-1, 1, 2] == flat[-1, 8 + 4 + 2]
    tensors = [torch.empty(clients, *slot.shape, dtype=flat.dtype) for slot in layout.slots]
    layout.copy_from(flat, tensors)
    assert all(torch.equal(named[slot.name], tensor) for slot, tensor in zip(layout.slots, tensors, strict=True))
    again = torch.empty_like(flat)
    layout.copy_to(again, tensors)
    assert torch.equal(again, flat)


def test_unpack_gives_views_and_takes_any_leading_axes():
    layout = Layout.of(Mixed())
    flat = torch.zeros(layout.size)
    layout.unpack(flat)["head.bias"][1] = 5.0
    assert flat[17] == 5.0
    assert layout.unpack(torch.zeros(2, 3, layout.size))["norm.weight"].shape == (2, 3, 4)


# ---- running a module ----


@pytest.mark.parametrize("given_in_train_mode", [True, False])
def test_a_network_equals_its_module(given_in_train_mode):
    module = seeded(Mixed).train(given_in_train_mode)
    module.norm.running_mean += 1.0
    x = torch.randn(5, 3, dtype=torch.float64)
    network = double(module)
    module.eval()
    torch.testing.assert_close(network(values(network), x), module(x), rtol=0, atol=1e-12)
    other = values(network)
    other["head.bias"] += 1.0
    torch.testing.assert_close(network(other, x), module(x) + 2.0, rtol=0, atol=1e-12)  # 1 * scale


def test_the_users_module_is_left_alone():
    module = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)))
    before = copy.deepcopy(module.state_dict())
    network = double(module)
    network(values(network), torch.randn(4, 3).double(), train=True, key=torch.tensor(1))
    assert type(module[1]) is nn.BatchNorm1d
    assert type(module[2]) is nn.Dropout
    assert all(p.requires_grad for p in module.parameters())
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_the_initial_vector_is_the_modules_own():
    module = seeded(Mixed)
    assert torch.equal(double(module).initial, flatten(module))


def test_a_network_must_return_one_tensor():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            return self.inner(x), x

    network = double(Pair())
    with pytest.raises(ModelError, match=r"The network must return one tensor\. Got tuple instead\."):
        network(values(network), torch.ones(1, 2).double())


def test_gradients_reach_parameters_and_not_frozen_ones():
    network = double(seeded(Mixed))
    named = values(network)
    leaves = {s.name: named[s.name].detach().clone().requires_grad_() for s in network.layout.parameters}
    named |= leaves
    network(named, torch.randn(4, 3).double(), train=True).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves.values())
    assert "frozen.weight" not in named
    assert all(p.grad is None for p in network.module.parameters())


def test_tied_parameters_are_one():
    module = seeded(TiedWeights)
    layout = Layout.of(module)
    assert [s.name for s in layout.parameters] == ["encode.weight"]
    network = double(module)
    x = torch.randn(3, 4).double()
    moved = {"encode.weight": values(network)["encode.weight"] + 1.0}
    weight = moved["encode.weight"]
    torch.testing.assert_close(network(moved, x), x @ weight.T @ weight.T)


class TiedWeights(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(4, 4, bias=False)
        self.decode = nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(self.encode(x))


# ---- BatchNorm ----


def norms():
    return {
        "1d": (nn.BatchNorm1d(3), (3,)),
        "1d with length": (nn.BatchNorm1d(3), (3, 5)),
        "2d": (nn.BatchNorm2d(3), (3, 4, 2)),
        "3d": (nn.BatchNorm3d(3), (3, 2, 2, 2)),
        "other momentum": (nn.BatchNorm2d(3, momentum=0.3, eps=1e-3), (3, 4, 2)),
        "not affine": (nn.BatchNorm2d(3, affine=False), (3, 4, 2)),
    }


def around(norm):
    """A norm with a parameter behind it, so that there is always something to train; odd weights and statistics."""
    torch.manual_seed(0)
    module = nn.Sequential(norm, nn.Flatten(), nn.LazyLinear(2)).double()
    with torch.no_grad():
        for tensor in (*norm.parameters(), *norm.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5)
    return module


@pytest.mark.parametrize("kind", norms())
@pytest.mark.parametrize("real", [2, 5, 8])
def test_masked_batchnorm_equals_torchs_on_the_rows_that_are_real(kind, real):
    norm, shape = norms()[kind]
    module = around(norm)
    x = torch.randn(8, *shape, dtype=torch.float64) * 3 + 2
    module.eval()(x[:1]) if norm.track_running_stats else module.train()(x[:2])  # lets the lazy layer know its size
    network = double(module)
    mask = (torch.arange(8) < real).double()
    padded = torch.where(mask.reshape(-1, *[1] * len(shape)) > 0, x, torch.full_like(x, 1e3))

    for _ in range(3):  # statistics that run on from round to round
        reference = copy.deepcopy(module).train()
        named = values(network)
        weights = {s.name: named[s.name].detach().clone().requires_grad_() for s in network.layout.parameters}
        found = network(named | weights, padded, train=True, mask=None if real == 8 else mask)[:real]
        expected = reference(x[:real])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        for name, buffer in reference.named_buffers():
            if buffer.is_floating_point():
                torch.testing.assert_close(named[name], buffer, rtol=0, atol=1e-9)
        found.square().sum().backward()
        expected.square().sum().backward()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(weights[name].grad, parameter.grad, rtol=1e-9, atol=1e-9)
        module, x = reference, x + 1
        network = double(module)
        padded = torch.where(mask.reshape(-1, *[1] * len(shape)) > 0, x, torch.full_like(x, -1e3))


def test_batchnorm_in_eval_mode_uses_the_statistics_and_keeps_them():
    module = around(nn.BatchNorm2d(3))
    x = torch.randn(6, 3, 4, 2, dtype=torch.float64)
    module.eval()(x)
    network = double(module)
    named = values(network)
    before = {name: tensor.clone() for name, tensor in named.items()}
    torch.testing.assert_close(network(named, x), module(x), rtol=0, atol=1e-9)
    assert all(torch.equal(named[name], before[name]) for name in named)


def test_batchnorm_of_a_single_row_uses_the_statistics_and_keeps_them():
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).double()
    module[0].running_mean.copy_(torch.tensor([1.0, 2.0]))
    module[0].running_var.copy_(torch.tensor([4.0, 9.0]))
    network = double(module)
    x = torch.tensor([[3.0, 5.0], [100.0, 100.0]], dtype=torch.float64)
    named = values(network)
    found = network(named, x, train=True, mask=torch.tensor([1.0, 0.0], dtype=torch.float64))[0]
    torch.testing.assert_close(found, module.eval()(x)[0], rtol=0, atol=1e-9)
    assert named["0.running_mean"].tolist() == [1.0, 2.0]
    assert named["0.running_var"].tolist() == [4.0, 9.0]


def test_batchnorm_under_vmap_is_that_of_each_client():
    module = around(nn.BatchNorm2d(3))
    x = torch.randn(3, 6, 3, 2, 2, dtype=torch.float64)
    module.eval()(x[0])
    network = double(module)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0]], dtype=torch.float64)

    def one(named, x, mask):
        named = {name: tensor.clone() for name, tensor in named.items()}
        return network(named, x, train=True, mask=mask), named

    stacked = {name: tensor.expand(3, *tensor.shape) for name, tensor in values(network).items()}
    outputs, changed = torch.func.vmap(one)(stacked, x, mask)
    for client in range(3):
        alone, named = one(values(network), x[client], mask[client])
        torch.testing.assert_close(outputs[client], alone, rtol=0, atol=1e-9)
        for name, tensor in named.items():
            torch.testing.assert_close(changed[name][client], tensor, rtol=0, atol=1e-9)


def test_a_batchnorm_used_under_two_names_is_masked_at_both():
    norm = nn.BatchNorm1d(3)
    module = nn.Sequential(norm, nn.Linear(3, 3), norm, nn.Linear(3, 1)).double()
    network = double(module)
    x = torch.randn(6, 3, dtype=torch.float64)
    padded = torch.cat([x, torch.full((2, 3), 1e3, dtype=torch.float64)])
    mask = (torch.arange(8) < 6).double()
    found = network(values(network), padded, train=True, mask=mask)[:6]
    torch.testing.assert_close(found, module.train()(x), rtol=0, atol=1e-9)


def test_a_cumulative_batchnorm_is_refused_by_its_place():
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2, momentum=None)))
    with pytest.raises(ModelError) as caught:
        double(module)
    assert str(caught.value) == (
        "Sequential.1.0: BatchNorm with momentum=None (a cumulative mean) cannot be averaged; set a momentum."
    )


# ---- dropout ----


class Bare(nn.Module):
    """Dropout alone, with a parameter so that there is something to train."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.weight


def dropped(module, x, key, **more):
    network = double(module)
    return network(values(network), x, train=True, key=torch.tensor(key), **more)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_a_share_and_scales_the_rest(p):
    found = dropped(Bare(nn.Dropout(p)), torch.ones(100, 200).double(), 5)
    torch.testing.assert_close(found.unique(), torch.tensor([0.0, 1 / (1 - p)]).double())
    share = float((found == 0).double().mean())
    assert abs(share - p) < 5 * (p * (1 - p) / 20_000) ** 0.5


def test_dropout_of_nothing_and_of_everything():
    x = torch.ones(3, 4).double()
    assert torch.equal(dropped(Bare(nn.Dropout(0.0)), x, 5), x)
    assert torch.equal(dropped(Bare(nn.Dropout(1.0)), x, 5), torch.zeros_like(x))


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Dropout1d, (6, 30, 7)), (nn.Dropout2d, (6, 30, 3, 4)), (nn.Dropout3d, (6, 30, 2, 2, 2))]
)
def test_channel_dropout_drops_whole_channels(layer, shape):
    found = dropped(Bare(layer(0.5)), torch.ones(shape).double(), 5).flatten(2)
    assert bool(((found == 0).all(2) | (found == 2).all(2)).all())
    assert 0.3 < float((found[..., 0] == 0).double().mean()) < 0.7


def test_dropout_depends_only_on_the_key():
    x = torch.ones(5, 40).double()
    torch.manual_seed(1)
    one = dropped(Bare(nn.Dropout(0.5)), x, 5)
    torch.manual_seed(2)
    assert torch.equal(dropped(Bare(nn.Dropout(0.5)), x, 5), one)
    assert not torch.equal(dropped(Bare(nn.Dropout(0.5)), x, 6), one)
    single = Network(Bare(nn.Dropout(0.5)), torch.float32, CPU)
    assert torch.equal(single(values(single), x.float(), train=True, key=torch.tensor(5)).double(), one)


def test_rows_are_dropped_differently_and_layers_too():
    x = torch.ones(2, 200).double()
    found = dropped(Bare(nn.Dropout(0.5)), x, 5)
    assert not torch.equal(found[0], found[1])
    twice = dropped(Bare(nn.Dropout(0.5), nn.Dropout(0.5)), x, 5)
    assert 0.15 < float((twice > 0).double().mean()) < 0.35  # independent: one quarter is left


class Twice(nn.Module):
    """One dropout layer, called twice."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.drop(self.drop(x)) * self.weight


@pytest.mark.parametrize("under_two_names", [True, False])
def test_one_dropout_layer_used_twice_draws_twice(under_two_names):
    layer = nn.Dropout(0.5)
    found = dropped(Bare(layer, layer) if under_two_names else Twice(), torch.ones(2, 200).double(), 5)
    assert 0.15 < float((found > 0).double().mean()) < 0.35


def test_a_dropout_layer_under_two_names_is_keyed_at_both():
    layer = nn.Dropout(0.5)
    network = double(nn.Sequential(nn.Linear(4, 50), layer, nn.Linear(50, 50), layer))
    network.detect_keyed(torch.randn(2, 4))
    assert network.keyed


def test_each_call_of_the_network_draws_the_same_for_the_same_key():
    network = double(Bare(nn.Dropout(0.5)))
    x = torch.ones(3, 20).double()
    passes = [network(values(network), x, train=True, key=torch.tensor(3)) for _ in range(2)]
    assert torch.equal(*passes)


def test_dropout_in_eval_mode_does_nothing():
    network = double(Bare(nn.Dropout(0.5)))
    x = torch.randn(3, 4).double()
    assert torch.equal(network(values(network), x, key=torch.tensor(5)), x)


def test_dropout_is_the_same_stacked_and_alone_and_with_padding():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.5), nn.ReLU(), nn.Linear(9, 6), nn.Dropout(0.2)).double()
    network = double(module)
    x, keys = torch.randn(3, 5, 4).double(), torch.tensor([11, -12, 2**62])

    def one(named, x, key):
        return network(named, x, train=True, key=key)

    stacked = torch.func.vmap(one, in_dims=(None, 0, 0))(values(network), x, keys)
    for client in range(3):
        torch.testing.assert_close(stacked[client], one(values(network), x[client], keys[client]), rtol=0, atol=1e-12)
    # Padded rows come last and do not change what the others draw.
    torch.testing.assert_close(stacked[0][:3], one(values(network), x[0, :3], keys[0]), rtol=0, atol=1e-12)
    assert not torch.equal(stacked[0] == 0, stacked[1] == 0)


# ---- randomness of its own ----


class Functional(nn.Module):
    """Dropout by function call, which no exchange of layers can find."""

    def __init__(self, p):
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.p = p

    def forward(self, x):
        return functional.dropout(self.inner(x), self.p, self.training)


@pytest.mark.parametrize(
    ("module", "keyed"),
    [
        (nn.Linear(3, 2), True),
        (nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)), True),
        (Functional(0.5), False),
        (Functional(0.01), False),  # so seldom that two passes are mostly equal
        (nn.Sequential(nn.Linear(3, 200), nn.AlphaDropout(0.5)), False),
    ],
    ids=["plain", "exchanged", "functional", "seldom", "alpha"],
)
def test_a_network_that_draws_on_its_own_is_noticed(module, keyed):
    network = double(module)
    assert network.keyed
    before = torch.get_rng_state()
    network.detect_keyed(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    assert network.keyed is keyed
    assert torch.equal(torch.get_rng_state(), before)


# ---- memory ----


def test_activation_size_counts_what_one_sample_leaves_behind():
    network = double(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    # input 4, flattened 4, hidden 3, after ReLU 3, outputs 2
    assert network.activation_size(torch.zeros(7, 1, 2, 2).double()) == 16
    convolution = double(nn.Sequential(nn.Conv2d(1, 5, 3), nn.MaxPool2d(2)))
    assert convolution.activation_size(torch.zeros(2, 1, 6, 6).double()) == 36 + 5 * 16 + 5 * 4


def test_largest_output_is_that_of_one_sample_in_one_layer():
    convolution = double(nn.Sequential(nn.Conv2d(1, 5, 3), nn.MaxPool2d(2)))
    assert convolution.largest_output(torch.zeros(2, 1, 6, 6).double()) == 5 * 16
    assert double(nn.Linear(4, 3)).largest_output(torch.zeros(2, 4).double()) == 4  # the input


def test_activation_size_leaves_no_hooks_behind():
    network = double(nn.Linear(4, 3))
    assert [network.activation_size(torch.zeros(1, 4).double()) for _ in range(3)] == [7, 7, 7]


def test_multiplications_are_those_of_weights():
    network = double(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    assert network.multiplications(torch.zeros(7, 1, 2, 2).double()) == 4 * 3 + 3 * 2
    convolution = double(nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5)))
    assert convolution.multiplications(torch.zeros(1, 2, 6, 6).double()) == 4 * 4 * 5 * 2 * 3 * 3


def test_multiplications_of_unknown_layers_are_unknown():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(4, 2))

        def forward(self, x):
            return x @ self.table

    assert double(nn.Sequential(Own())).multiplications(torch.zeros(1, 4).double()) is None


# ---- state_dict ----


def test_a_state_dict_loads_into_a_fresh_module():
    module = seeded(Mixed)
    module.norm.num_batches_tracked += 5
    flat = torch.from_numpy(np.random.default_rng(0).random(27))
    made = state_dict(module, flat)
    fresh = Mixed().double()
    fresh.load_state_dict(made)  # strict: every name is there
    assert torch.equal(flatten(fresh), flat)
    assert torch.equal(fresh.frozen.weight, module.frozen.weight)
    assert int(made["norm.num_batches_tracked"]) == 5
    assert int(made["count"]) == 7


def test_a_state_dict_has_the_modules_dtypes_and_its_own_memory():
    module = nn.Linear(2, 2)
    flat = torch.ones(6, dtype=torch.float64)
    made = state_dict(module, flat)
    assert {t.dtype for t in made.values()} == {torch.float32}
    flat += 1
    made["bias"] += 1
    assert made["weight"].tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_the_state_dict_of_tied_parameters_has_the_new_values_under_both_names():
    module = seeded(TiedWeights)
    flat = torch.arange(16.0).double()
    fresh = TiedWeights().double()
    fresh.load_state_dict(state_dict(module, flat))
    assert torch.equal(flatten(fresh), flat)


# ---- losses ----


def test_cross_entropy_of_each_sample():
    outputs = torch.tensor([[0.0, 0.0], [np.log(3.0), 0.0]], dtype=torch.float32)
    found = cross_entropy(outputs, torch.tensor([1, 0]))
    torch.testing.assert_close(found, torch.tensor([np.log(2.0), np.log(4 / 3)], dtype=torch.float32))


def test_mse_of_targets_and_of_classes():
    outputs = torch.tensor([[1.0, 2.0], [0.0, -1.0]])
    assert mse(outputs, torch.tensor([[0.0, 0.0], [1.0, 1.0]])).tolist() == [2.5, 2.5]
    assert mse(outputs, torch.tensor([1, 0])).tolist() == [1.0, 1.0]  # to (0, 1) and (1, 0)
    assert mse(torch.tensor([[3.0], [1.0]]), torch.tensor([1.0, 1.0])).tolist() == [4.0, 0.0]


def test_mse_of_a_network_with_one_number_a_sample():
    assert mse(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0])).tolist() == [4.0, 0.0]


def test_losses_by_name():
    assert (LOSSES["cross_entropy"], LOSSES["mse"]) == (cross_entropy, mse)


def test_batchnorm_without_running_statistics_is_refused():
    module = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2))
    with pytest.raises(ModelError, match=r"Sequential\.0: BatchNorm with track_running_stats=False"):
        Network(module, torch.float64, torch.device("cpu"))
