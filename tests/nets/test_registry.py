"""Named models: published sizes, initial weights from the seed, one-sentence errors."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
from torch import nn

from coterie.errors import ConfigError, ModelError, UnknownName
from coterie.nets.registry import build_model, find_model, model_settings, models
from coterie.randomness import Rng


def build(spec, shape=(1, 28, 28), outputs=10, seed=0, **settings):
    return build_model(spec, settings, shape, outputs, Rng.seed(seed))


def size(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "expected"),
    [
        ("mclr", (1, 28, 28), 10, 7_850),
        ("mclr", (5,), 2, 12),
        ("mlp", (1, 28, 28), 10, 159_010),  # 784 * 200 + 200 + 200 * 10 + 10
        ("lenet", (1, 28, 28), 10, 61_706),  # LeNet-5 as printed everywhere
        ("lenet", (3, 32, 32), 10, 83_126),
        ("leaf-cnn", (1, 28, 28), 62, 6_603_710),  # as in LEAF
    ],
)
def test_sizes(name, shape, outputs, expected):
    assert size(build(name, shape, outputs)) == expected


@pytest.mark.parametrize("name", ["mclr", "mlp", "lenet", "leaf-cnn"])
@pytest.mark.parametrize("side", [12, 13, 15, 28])
def test_images_of_any_size_fit(name, side):
    settings = {"hidden": 8} if name == "leaf-cnn" else {}
    module = build(name, (2, side, side), 3, **settings)
    assert module(torch.zeros(4, 2, side, side)).shape == (4, 3)


def test_oblong_images_fit():
    assert build("lenet", (1, 12, 20), 3)(torch.zeros(2, 1, 12, 20)).shape == (2, 3)


def test_settings_of_a_model():
    assert size(build("mlp", (4,), 2, hidden=3)) == 4 * 3 + 3 + 3 * 2 + 2
    assert model_settings(find_model("mlp")) == {"hidden": 200}
    assert model_settings(find_model("mclr")) == {"std": 0.0}


def test_initial_weights_depend_only_on_the_seed():
    torch.manual_seed(1)
    one = build("mlp", (4,), 2, seed=5)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after)  # torch's own generator was left alone
    again, other = build("mlp", (4,), 2, seed=5), build("mlp", (4,), 2, seed=6)
    assert torch.equal(one[1].weight, again[1].weight)
    assert not torch.equal(one[1].weight, other[1].weight)


@pytest.mark.parametrize(
    ("name", "shape", "sentence"),
    [
        ("lenet", (1, 8, 8), "model lenet takes images of at least 12x12; samples have shape (1, 8, 8)."),
        ("lenet", (784,), "model lenet takes images of at least 12x12; samples have shape (784,)."),
        ("leaf-cnn", (1, 3, 9), "model leaf-cnn takes images of at least 4x4; samples have shape (1, 3, 9)."),
    ],
)
def test_samples_that_do_not_fit(name, shape, sentence):
    with pytest.raises(ModelError) as caught:
        build(name, shape)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("hidden", [0, -1, 2.5, True, "many"])
def test_bad_settings(hidden):
    with pytest.raises(ConfigError, match=r"hidden of the model must be an int >= 1\. Got"):
        build("mlp", hidden=hidden)


def test_unknown_names():
    with pytest.raises(UnknownName, match=r"There is no model 'lenett'\. Did you mean 'lenet'\?"):
        build("lenett")
    with pytest.raises(UnknownName, match=r"There is no field of model mlp named 'hiden'\. Did you mean 'hidden'\?"):
        build("mlp", hiden=3)


def test_all_models_are_listed_with_a_docstring():
    assert list(models()) == sorted(models())
    assert all(builder.__doc__ for builder in models().values())


# ---- networks of the user ----


def test_a_callable_with_shape_and_outputs():
    def own(input_shape, num_outputs, *, bias=True):
        return nn.Linear(input_shape[0], num_outputs, bias=bias)

    assert size(build(own, (4,), 3)) == 15
    assert size(build(own, (4,), 3, bias=False)) == 12
    with pytest.raises(UnknownName, match="There is no field of model own named 'bais'"):
        build(own, (4,), 3, bais=False)


def test_a_callable_without_arguments():
    assert size(build(lambda: nn.Linear(2, 2))) == 6
    assert size(build(functools.partial(nn.Linear, 3, 2))) == 8
    assert size(build(lambda width=5: nn.Linear(width, 1))) == 6


def test_only_modules_are_accepted():
    with pytest.raises(ModelError, match=r"must return a torch\.nn\.Module. Got int instead\."):
        build(lambda: 3)


def test_a_network_in_a_file_of_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "own_network_file.py").write_text(
        "from torch import nn\n\n\ndef make(shape, outputs):\n    return nn.Linear(shape[0], outputs)\n\n\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["elsewhere"])
    monkeypatch.delitem(sys.modules, "own_network_file", raising=False)
    assert size(build("own_network_file:make", (4,), 2)) == 10
    with pytest.raises(ConfigError, match=r"model own_network_file:number is not callable;"):
        find_model("own_network_file:number")
    with pytest.raises(ConfigError, match="model own_network_file:missing cannot be imported"):
        find_model("own_network_file:missing")
