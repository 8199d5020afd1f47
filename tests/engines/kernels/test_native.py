"""The compiled program gives what the loop gives, for any vector width, and is not used where it is not available."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

from coterie.client.batches import Batch
from coterie.client.work import SGD, Corrected
from coterie.engines import make_engine
from coterie.engines.cache import private_folder
from coterie.engines.kernels import native
from coterie.engines.kernels.native import NativeKernel, NativePlan, NotNative
from coterie.nets.flat import Network, cross_entropy, mse
from tests.engines.kernels.test_plans import WORKS, deep_cnn, loop, mean_cnn, odd_cnn, small_cnn, trained
from tests.helpers import ragged_federation, setup_of

has_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="no C++ compiler here"
)


def mclr(input_shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, outputs))


def wide_cnn(input_shape, outputs, pool=nn.MaxPool2d):
    """Rows of more than one vector, kernels and pools of several sizes, channels that fill no block."""
    return nn.Sequential(
        nn.Conv2d(1, 5, 5, padding=1),
        nn.ReLU(),
        pool(2),
        nn.Conv2d(5, 9, (3, 2), stride=(1, 1), padding=(2, 1)),
        pool(3),
        nn.ReLU(),
        nn.Conv2d(9, 3, 3, stride=(2, 1), padding=1),
        nn.Flatten(),
        nn.Linear(3 * 4 * 7, 19),
        nn.ReLU(),
        nn.Linear(19, outputs, bias=False),
    )


def wide_mean_cnn(input_shape, outputs):
    return wide_cnn(input_shape, outputs, nn.AvgPool2d)


def threads(count):
    return lambda e: NativePlan(NativeKernel.of(e.network, e.task.loss, e.task.input_shape, count), 4, count)


@has_compiler
@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("model", [mclr, small_cnn, odd_cnn, deep_cnn, mean_cnn])
def test_it_trains_as_the_loop_does(model, work):
    expected = trained(loop, model, WORKS[work])
    assert torch.allclose(trained(threads(1), model, WORKS[work]), expected, rtol=1e-9, atol=1e-12)


@has_compiler
@pytest.mark.parametrize("march", ["native", "x86-64-v3", "x86-64"])
@pytest.mark.parametrize("work", ["momentum", "maml"])
@pytest.mark.parametrize("model", [wide_cnn, wide_mean_cnn])
def test_every_width_of_vectors_and_rows_longer_than_one(model, march, work, monkeypatch):
    import platform

    if march != "native" and platform.machine() != "x86_64":
        pytest.skip("another processor")
    monkeypatch.setattr(native, "_FLAGS", tuple(f.replace("native", march) for f in native._FLAGS))
    monkeypatch.setattr(native, "_loaded", {})
    federation = ragged_federation(shape=(1, 42, 43), clients=3)
    expected = trained(loop, model, WORKS[work], federation)
    found = trained(threads(1), model, WORKS[work], federation)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


@has_compiler
def test_the_number_of_threads_changes_nothing():
    assert torch.equal(
        trained(threads(1), small_cnn, WORKS["momentum"]), trained(threads(3), small_cnn, WORKS["momentum"])
    )


@has_compiler
def test_a_correction_and_a_pull_of_each_client():
    work = Corrected(lr=0.1, prox=0.1, batch_size=5, momentum=0.3)
    size = 16 * 3 + 3
    extra = torch.randn(9, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    each = {"correction": extra, "prox": torch.linspace(0, 0.4, 9, dtype=torch.float64)}
    expected = trained(loop, mclr, work, **each)
    assert torch.allclose(trained(threads(2), mclr, work, **each), expected, rtol=1e-9, atol=1e-12)


@has_compiler
@pytest.mark.parametrize("work", ["momentum", "full", "maml", "hf"])
@pytest.mark.parametrize("room", [1 << 20, 4096])
def test_samples_that_do_not_lie_ready_are_put_in_order_for_some_clients_at_a_time(work, room, monkeypatch):
    monkeypatch.setattr(native, "_SAMPLE_BYTES", room)

    def scarce(engine):
        engine.data._may_render = 0
        kernel = NativeKernel.of(engine.network, engine.task.loss, engine.task.input_shape, 2)
        return NativePlan(kernel, 4, 2, scattered=True)

    expected = trained(loop, small_cnn, WORKS[work])
    assert torch.allclose(trained(scarce, small_cnn, WORKS[work]), expected, rtol=1e-9, atol=1e-12)


@has_compiler
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_of_samples_that_do_not_lie_ready_only_those_of_the_steps_are_read(momentum, monkeypatch):
    """A plan is measured by a few steps: its time must not be that of preparing all samples."""
    seen = []

    def scarce(engine):
        engine.data._may_render = 0
        gather = engine.data.gather
        monkeypatch.setattr(engine.data, "gather", lambda rows, view: seen.append(rows.numel()) or gather(rows, view))
        kernel = NativeKernel.of(engine.network, engine.task.loss, engine.task.input_shape, 2)
        return NativePlan(kernel, 4, 2, scattered=True)

    work = SGD(lr=0.1, momentum=momentum, batch_size=3, steps=2)
    expected = trained(loop, small_cnn, work)
    assert torch.allclose(trained(scarce, small_cnn, work), expected, rtol=1e-9, atol=1e-12)
    assert sum(seen) <= 9 * 3 * 2


# ---- pseudo data: many samples, one model ----


def relu_first(input_shape, outputs):
    """Layers without weights before the first convolution, and a kernel smaller than its border."""
    layers = [
        nn.ReLU(),
        nn.Conv2d(1, 2, 2, padding=2),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(18, outputs),
    ]
    return nn.Sequential(*layers)


def pool_first(input_shape, outputs):
    """A border wider than the kernel just before ReLU and pooling; rows and columns that no pool sees."""
    first = [nn.MaxPool2d(2), nn.Conv2d(1, 3, 1, padding=1), nn.ReLU(), nn.MaxPool2d(3)]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(3, outputs))


def mean_first(input_shape, outputs):
    """As `pool_first`, with means."""
    first = [nn.AvgPool2d(2), nn.Conv2d(1, 3, 1, padding=1), nn.ReLU(), nn.AvgPool2d(3)]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(3, outputs))


def dense_only(input_shape, outputs):
    """More outputs than a tile has, none of them a multiple of it."""
    layers = [nn.Linear(16, 19), nn.ReLU(), nn.Linear(19, 7, bias=False), nn.ReLU(), nn.Linear(7, outputs)]
    return nn.Sequential(nn.Flatten(), *layers)


NETWORKS = [mclr, dense_only, small_cnn, odd_cnn, deep_cnn, mean_cnn, relu_first, pool_first, mean_first]


def many(build, shape=(1, 4, 4), models=3, dtype=torch.float64, threads=2):
    """A kernel, models [c, P] and their network."""
    torch.manual_seed(0)
    network = Network(build(shape, 3), dtype, torch.device("cpu"))
    kernel = NativeKernel.of(network, cross_entropy, shape, threads)
    size = network.layout.size
    return kernel, network.initial.to(dtype) + 0.2 * torch.randn(models, size, dtype=dtype), network


@has_compiler
@pytest.mark.parametrize("model", NETWORKS)
@pytest.mark.parametrize("samples", [1, 5, 31, 300])  # some fill no vector, some more than a piece of work
def test_outputs_of_models_on_their_own_and_on_the_same_inputs(model, samples):
    kernel, models, network = many(model)
    own = torch.randn(3, samples, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for x in (own, own[0].expand(3, *own[0].shape)):
        expected = torch.stack([network(network.layout.unpack(m), inputs) for m, inputs in zip(models, x, strict=True)])
        assert torch.allclose(kernel.outputs(models, x), expected, rtol=1e-9, atol=1e-12)


RATES = (torch.linspace(2, 5, 6, dtype=torch.float64), torch.linspace(1e-3, 1e-2, 6, dtype=torch.float64))


def searched(network, models, x, y, mean, pull):
    """The same with autograd, one model at a time."""
    found = []
    for model, own in zip(models, x, strict=True):
        now, m, v = own.clone(), torch.zeros_like(own), torch.zeros_like(own)
        for slope, floor in zip(*RATES, strict=True):
            leaf = now.clone().requires_grad_()
            loss = nn.functional.cross_entropy(network(network.layout.unpack(model), leaf), y, reduction="sum")
            loss = loss + pull * (leaf - mean).flatten(1).norm(dim=1).sum()
            (g,) = torch.autograd.grad(loss, [leaf])
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            now = now - m / (v.sqrt() * slope + floor)
        found.append(now)
    return torch.stack(found)


@has_compiler
@pytest.mark.parametrize("samples", [1, 20])
@pytest.mark.parametrize("build", NETWORKS)
def test_a_search_follows_the_gradients_of_autograd(build, samples):
    kernel, models, network = many(build)
    x = torch.randn(3, samples, 1, 4, 4, dtype=torch.float64)
    y, mean = torch.arange(samples) % 3, torch.randn(1, 4, 4, dtype=torch.float64)
    expected = searched(network, models, x, y, mean, 0.3)
    found = x.clone()
    kernel.search(models, found, y, mean, 0.3, RATES)
    assert (found - x).abs().max() > 0.1
    assert torch.allclose(found, expected, rtol=0, atol=1e-9)


@has_compiler
@pytest.mark.parametrize("march", ["native", "x86-64-v3", "x86-64"])
@pytest.mark.parametrize("model", [wide_cnn, wide_mean_cnn])
def test_a_search_with_every_width_of_vectors(model, march, monkeypatch):
    import platform

    if march != "native" and platform.machine() != "x86_64":
        pytest.skip("another processor")
    monkeypatch.setattr(native, "_FLAGS", tuple(f.replace("native", march) for f in native._FLAGS))
    monkeypatch.setattr(native, "_loaded", {})
    kernel, models, network = many(model, (1, 42, 43), models=2)
    x, y = torch.randn(2, 5, 1, 42, 43, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    mean = torch.zeros(1, 42, 43, dtype=torch.float64)
    expected = searched(network, models, x, y, mean, 0.1)
    kernel.search(models, x, y, mean, 0.1, RATES)
    assert torch.allclose(x, expected, rtol=0, atol=1e-9)


@has_compiler
@pytest.mark.parametrize("samples", [1, 20, 70])
@pytest.mark.parametrize("build", NETWORKS)
def test_gradients_of_samples_are_those_of_autograd(build, samples):
    kernel, models, network = many(build)
    x = torch.randn(3, samples, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    y, mean = torch.arange(samples) % 3, torch.randn(1, 4, 4, dtype=torch.float64)
    outputs = torch.cat([network(network.layout.unpack(m), own) for m, own in zip(models, x, strict=True)])
    losses = nn.functional.cross_entropy(outputs, y.repeat(3), reduction="sum")
    (expected,) = torch.autograd.grad(losses + 0.3 * (x - mean).flatten(2).norm(dim=2).sum(), [x])
    assert torch.allclose(kernel.input_gradients(models, x.detach(), y, mean, 0.3), expected, rtol=0, atol=1e-12)


@has_compiler
def test_a_sample_is_searched_as_if_alone_and_threads_change_nothing():
    kernel, models, network = many(small_cnn, dtype=torch.float32)
    x, y, mean = torch.randn(3, 40, 1, 4, 4), torch.arange(40) % 3, torch.zeros(1, 4, 4)
    whole = x.clone()
    kernel.search(models, whole, y, mean, 0.1, RATES)
    alone = x[1:2, 17:18].clone()
    kernel.search(models[1:2], alone, y[17:18], mean, 0.1, RATES)
    assert torch.equal(alone[0, 0], whole[1, 17])
    one = NativeKernel.of(network, cross_entropy, (1, 4, 4), 1)
    one.search(models, x, y, mean, 0.1, RATES)
    assert torch.equal(x, whole)


@has_compiler
def test_a_sample_at_the_prior_mean_is_not_pulled():
    kernel, models, network = many(mclr)
    x, y = torch.zeros(3, 4, 1, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    mean = torch.zeros(1, 4, 4, dtype=torch.float64)
    expected = searched(network, models, x, y, mean, 0.3)
    kernel.search(models, x, y, mean, 0.3, RATES)
    assert torch.isfinite(x).all()
    assert torch.allclose(x, expected, rtol=0, atol=1e-9)


def apart(network, models, x, expected):
    """Mean L1 distances of softmax outputs, with plain torch: [c, K, L]."""
    outputs = torch.stack([network(network.layout.unpack(model), x.flatten(0, 2)) for model in models]).detach()
    outputs = outputs.softmax(-1).reshape(len(models), *expected.shape)
    return (outputs - expected).abs().sum(-1).mean(-1)


@has_compiler
@pytest.mark.parametrize("build", NETWORKS)
def test_distances_of_softmax_outputs(build):
    kernel, models, network = many(build, models=5)
    x = torch.randn(2, 3, 7, 1, 4, 4, dtype=torch.float64)  # two centers, three classes, seven samples
    expected = torch.randn(2, 3, 7, 3, dtype=torch.float64).softmax(-1)
    found = kernel.distances(models, x, expected)
    assert torch.allclose(found, apart(network, models, x, expected), rtol=0, atol=1e-12)


@has_compiler
def test_with_label_counts_the_nearest_center_is_exact_and_the_others_are_not_nearer():
    kernel, models, network = many(small_cnn, models=40)
    centers = models[:4]
    x = 3 * torch.randn(4, 3, 20, 1, 4, 4, dtype=torch.float64)
    expected = torch.stack(
        [network(network.layout.unpack(c), own.flatten(0, 1)) for c, own in zip(centers, x, strict=True)]
    )
    expected = expected.detach().softmax(-1).reshape(4, 3, 20, 3)
    counts = torch.randint(0, 4, (40, 3), generator=torch.Generator().manual_seed(0))
    counts[:, 0] += 1
    whole = apart(network, models, x, expected)
    weighted = (whole * counts.unsqueeze(1)).sum(2)
    best = weighted.argmin(1)
    for first in (best, (best + 1) % 4, torch.zeros(40, dtype=torch.int64), None):
        found = kernel.distances(models, x, expected, counts, first)
        mine = (found * counts.unsqueeze(1)).sum(2)
        assert torch.equal(mine.argmin(1), best)
        assert torch.allclose(mine.gather(1, best[:, None]), weighted.gather(1, best[:, None]), rtol=1e-9, atol=1e-12)
        assert (mine <= weighted + 1e-9).all()
        assert ((found == 0) | (counts > 0).unsqueeze(1)).all()  # classes that a client does not have
        skipped = (mine < weighted - 1e-9).any()
        assert skipped


# ---- gradients of weights ----


@has_compiler
@pytest.mark.parametrize("weights", [None, 0.1, 3.0])
def test_samples_that_are_weighed_in_any_order(weights):
    network = Network(small_cnn((1, 4, 4), 3), torch.float64, torch.device("cpu"))
    from coterie.engines.kernels.plain import PlainKernel

    kernel = NativeKernel.of(network, cross_entropy, (1, 4, 4), 1)
    stack = [p.detach().repeat(2, *[1] * p.dim()) for _, p in network.module.named_parameters()]
    x, y = torch.randn(2, 4, 1, 4, 4, dtype=torch.float64), torch.tensor([[0, 1, 2, 0], [2, 2, 1, 0]])
    factors = None if weights is None else weights * torch.rand(2, 4, dtype=torch.float64)
    for mask in (None, torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.float64)):
        batch = Batch(x, y, mask, torch.zeros(2, dtype=torch.int64), factors)
        expected = PlainKernel(network, cross_entropy).gradients(stack, [], batch)
        for one, other in zip(kernel.gradients(stack, [], batch), expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


@has_compiler
def test_a_diverging_client_is_told_by_numbers_that_are_not_finite():
    work = SGD(lr=1e200, momentum=0.9, batch_size=5, epochs=3)
    found, expected = trained(threads(1), small_cnn, work), trained(loop, small_cnn, work)
    assert not torch.isfinite(expected).all(1).any()
    assert not torch.isfinite(found).all(1).any()


def test_what_it_cannot_do_is_left_to_others():
    def kernel(module, shape, loss=cross_entropy):
        return NativeKernel.of(Network(module, torch.float32, torch.device("cpu")), loss, shape, 1)

    assert kernel(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), (1, 2, 2), mse) is None
    assert kernel(nn.Sequential(nn.Linear(4, 2), nn.Tanh()), (4,)) is None
    assert kernel(nn.Sequential(nn.Linear(4, 2)), (3, 4)) is None  # a dense layer over the last dimension only
    assert kernel(nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU()), (1, 2, 2)) is None


@pytest.mark.parametrize(
    ("compiler", "reason"), [("no-such-compiler", "cannot be run"), ("false", "failed: no message")]
)
def test_without_a_compiler_the_engine_has_its_other_plans(compiler, reason, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_loaded", {})
    setup = setup_of(__import__("coterie").FedAvg())
    engine = make_engine("vectorized", setup.task(), setup.federation(), "cpu", {"precision": "float64"})
    found = engine.describe()
    assert found["plan"] != "native"
    assert reason in found["not_native"]
    with pytest.raises(NotNative, match=reason):  # the reason is remembered, the compiler is not tried again
        native.library(torch.float64)


def test_no_compiler_at_all(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NotNative, match="there is no C\\+\\+ compiler"):
        native._compiler()


@has_compiler
def test_a_program_that_computes_something_else_is_not_used(monkeypatch):
    right = NativeKernel.gradients
    monkeypatch.setattr(NativeKernel, "gradients", lambda *a: [g * 1.1 for g in right(*a)])
    setup = setup_of(__import__("coterie").FedAvg())
    engine = make_engine("vectorized", setup.task(), setup.federation(), "cpu", {"precision": "float64"})
    assert engine.describe()["plan"] != "native"
    assert any("the compiled program is not used" in note for note in engine.notes)


@has_compiler
def test_it_is_compiled_once_for_a_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_loaded", {})
    native.library(torch.float32)
    made = sorted(private_folder().glob("*.so"))
    assert len(made) == 1
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native.subprocess, "run", _only_versions(native.subprocess.run))
    native.library(torch.float32)
    assert sorted(private_folder().glob("*.so")) == made


def _only_versions(run):
    def only_versions(command, **options):
        assert "--version" in command, "compiled again"
        return run(command, **options)

    return only_versions


@has_compiler
def test_random_orders_are_those_of_the_loop():
    """Many sizes: the order of samples is drawn inside the program, as `permutations` draws it."""
    federation = ragged_federation(clients=6, samples=90, spread=0.9, seed=4)
    work = SGD(lr=0.3, batch_size=7, steps=31)
    assert torch.allclose(
        trained(threads(2), mclr, work, federation), trained(loop, mclr, work, federation), rtol=1e-9, atol=1e-12
    )
