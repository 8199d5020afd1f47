"""The larger models: published sizes, and equal results for stacked and single models."""

import math
from functools import partial

import pytest
import torch

import coterie
from coterie.errors import ConfigError, ModelError
from coterie.nets.registry import find_model, models
from coterie.nets.zoo import celeba_cnn, lenet, linear, mclr, mobilenetv2, resnet18


@pytest.fixture(autouse=True)
def one_thread():
    """Layers this small are slower on several threads than on one, especially on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def size(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("module", "published"),
    [
        (partial(linear, (1, 28, 28), 10), 159_010),
        (partial(celeba_cnn, (3, 84, 84), 2), 31_202),
        (partial(resnet18, (3, 32, 32), 10), 11_173_962),
        (partial(resnet18, (3, 224, 224), 1000, stem="imagenet"), 11_689_512),
        (partial(mobilenetv2, (3, 32, 32), 10), 2_236_682),
        (partial(mobilenetv2, (3, 224, 224), 1000, stem="imagenet"), 3_504_872),
        (partial(mobilenetv2, (3, 224, 224), 1000, stem="imagenet", width=1.4), 6_108_776),
    ],
)
def test_published_sizes(module, published):
    assert size(module()) == published


@pytest.mark.parametrize("name", ["celeba-cnn", "resnet18", "mobilenetv2"])
def test_group_norm_has_as_many_parameters_and_no_buffers(name):
    batch, group = (find_model(name)((3, 32, 32), 10, norm=norm) for norm in ("batch", "group"))
    assert size(batch) == size(group)
    assert not list(group.buffers())


@pytest.mark.parametrize(
    ("name", "shape", "settings"),
    [
        ("celeba-cnn", (3, 84, 84), {}),
        ("celeba-cnn", (3, 32, 32), {"norm": "group"}),
        ("celeba-cnn", (1, 28, 28), {}),
        ("resnet18", (3, 32, 32), {"width": 8}),
        ("resnet18", (1, 28, 28), {"width": 8, "norm": "group"}),
        ("resnet18", (3, 64, 48), {"width": 8, "stem": "imagenet"}),
        ("mobilenetv2", (3, 32, 32), {"width": 0.25}),
        ("mobilenetv2", (1, 28, 28), {"width": 0.25, "norm": "group"}),
        ("mobilenetv2", (3, 64, 48), {"width": 0.25, "stem": "imagenet"}),
    ],
)
def test_outputs(name, shape, settings):
    module = models()[name](shape, 7, **settings)
    outputs = module(torch.randn(2, *shape))
    assert outputs.shape == (2, 7)
    assert outputs.isfinite().all()


def test_two_linear_layers_are_linear():
    module, (one, other) = linear((4,), 3, hidden=5), torch.randn(2, 6, 4)
    middle = (module(one) + module(other)) / 2
    torch.testing.assert_close(module((one + other) / 2), middle)


@pytest.mark.parametrize(("std", "expected"), [(0.0, 1 / math.sqrt(3 * 784)), (0.2, 0.2)])
def test_first_weights_of_logistic_regression_are_as_large_as_told(std, expected):
    layer = mclr((1, 28, 28), 10, std=std)[1]
    assert layer.weight.std().item() == pytest.approx(expected, rel=0.05)
    assert bool(layer.bias.any()) == (std == 0)


@pytest.mark.parametrize(("pool", "layer"), [("max", torch.nn.MaxPool2d), ("avg", torch.nn.AvgPool2d)])
def test_lenet_pools_as_told(pool, layer):
    module = lenet((3, 32, 32), 10, pool=pool)
    assert sum(isinstance(part, layer) for part in module) == 2
    assert module[7].in_features == 576
    assert module(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("build", [resnet18, mobilenetv2])
def test_the_small_stem_keeps_a_4x4_map_of_32x32_images(build):
    seen = []
    module = build((3, 32, 32), 10, width=8 if build is resnet18 else 0.25)
    module[-2].register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].shape[2:]))
    module(torch.zeros(2, 3, 32, 32))
    assert seen == [(4, 4)]


def federation():
    generator = torch.Generator().manual_seed(0)
    clients = {}
    for number, rows in enumerate((4, 6, 7)):  # ragged: the last batch is partial, and differs
        x = torch.randn(rows, 3, 8, 8, generator=generator)
        clients[f"c{number}"] = x, torch.arange(rows) % 3
    return coterie.Federation.from_clients(clients, num_classes=3)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (celeba_cnn, {}),
        (resnet18, {"width": 8}),
        (resnet18, {"width": 8, "stem": "imagenet"}),
        (mobilenetv2, {"width": 0.25}),
    ],
)
def test_stacked_is_the_same_as_one_at_a_time(build, settings, norm):
    results = [
        coterie.run(
            coterie.FedAvg(),
            federation(),
            partial(build, norm=norm, **settings),
            rounds=1,
            work=coterie.SGD(lr=0.01, steps=1, batch_size=4),
            engine=engine,
            device="cpu",
            engine_settings={"precision": "float64", "plan": "stacked"},
        )
        for engine in ("loop", "vectorized")
    ]
    assert results[1].summary["plan"]["plan"] == "stacked"
    assert [result.summary["failures"] for result in results] == [0, 0]
    one, other = (result.centers for result in results)
    assert one.dtype == torch.float64
    assert float((one - other).norm() / one.norm()) < 1e-8
    start = build((3, 8, 8), 3, norm=norm, **settings)
    assert one.shape[1] == size(start) + sum(b.numel() for b in start.buffers() if b.is_floating_point())


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (celeba_cnn, {"norm": "layer"}, "norm of the model must be one of batch, group. Got 'layer'"),
        (lenet, {"pool": "min"}, "pool of the model must be one of max, avg. Got 'min'"),
        (mclr, {"std": -0.1}, "std of the model must be a float >= 0. Got -0.1"),
        (linear, {"hidden": 0}, "hidden of the model must be an int >= 1. Got 0"),
        (resnet18, {"stem": "large"}, "stem of the model must be one of small, imagenet. Got 'large'"),
        (resnet18, {"width": 0}, "width of the model must be an int >= 1. Got 0"),
        (mobilenetv2, {"width": 0}, "width of the model must be a number > 0. Got 0"),
        (mobilenetv2, {"width": True}, "Got True"),
    ],
)
def test_wrong_settings_are_refused(build, settings, message):
    with pytest.raises(ConfigError, match=message):
        build((3, 32, 32), 10, **settings)


@pytest.mark.parametrize("build", [celeba_cnn, resnet18, mobilenetv2])
def test_only_images_are_accepted(build):
    with pytest.raises(ModelError, match="takes images of at least 8x8"):
        build((64,), 10)
