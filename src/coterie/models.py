"""Small named networks of the papers; any other nn.Module works as well.

A builder gets the shape of one input and the number of outputs, and its own settings by keyword:
`--model mlp --set model.hidden=64`. A user's network is `--model package.module:callable`.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from coterie.errors import ConfigError, CoterieError, ModelError, UnknownName
from coterie.randomness import Rng

Builder = Callable[..., nn.Module]

_MODELS: dict[str, Builder] = {}


def register_model(name: str) -> Callable[[Builder], Builder]:
    """Decorator: make a builder known by a name."""

    def register(builder: Builder) -> Builder:
        _MODELS[name] = builder
        return builder

    return register


def models() -> dict[str, Builder]:
    """All named networks."""
    return dict(sorted(_MODELS.items()))


@register_model("mclr")
def mclr(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """Multinomial logistic regression: one linear layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_outputs))


@register_model("mlp")
def mlp(input_shape: tuple[int, ...], num_outputs: int, *, hidden: int = 200) -> nn.Module:
    """One hidden layer with ReLU (784-200-10 in the IFCA paper)."""
    _at_least_one("hidden", hidden)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(input_shape), hidden), nn.ReLU(), nn.Linear(hidden, num_outputs)
    )


@register_model("lenet")
def lenet(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """LeNet-5 with ReLU and max pooling: two convolutions, three dense layers."""
    channels, height, width = _image(input_shape, "lenet", smallest=12)
    left = ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * left, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_outputs),
    )


@register_model("leaf-cnn")
def leaf_cnn(input_shape: tuple[int, ...], num_outputs: int, *, hidden: int = 2048) -> nn.Module:
    """LEAF's network for FEMNIST: conv 32, conv 64, dense 2048."""
    channels, height, width = _image(input_shape, "leaf-cnn", smallest=4)
    _at_least_one("hidden", hidden)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), hidden),
        nn.ReLU(),
        nn.Linear(hidden, num_outputs),
    )


def build_model(
    spec: str | Builder,
    settings: Mapping[str, Any],
    input_shape: tuple[int, ...],
    num_outputs: int,
    rng: Rng,
) -> nn.Module:
    """Make a network, its first weights drawn from `rng`: a name, `module:callable`, or a callable.

    A callable may take (input_shape, num_outputs), or nothing.
    """
    name = spec if isinstance(spec, str) else getattr(spec, "__name__", type(spec).__name__)
    builder = find_model(spec) if isinstance(spec, str) else spec
    known = model_settings(builder)
    for key in settings:
        if key not in known:
            raise UnknownName(f"field of model {name} named", key, known)
    positional = [p for p in _parameters(builder) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    args = (input_shape, num_outputs) if len([p for p in positional if p.default is p.empty]) >= 2 else ()
    try:
        with rng.torch_seed():
            module = builder(*args, **settings)
    except CoterieError:
        raise
    except Exception as error:  # a user's own code may raise anything
        raise ModelError(f"model {name} could not be made: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"model {name} must give a torch.nn.Module. Got {type(module).__name__} instead.")
    return module


@dataclass(frozen=True)
class ModelMaker:
    """How the network of a run is made: small, so that it can be told to other processes."""

    model: str | Builder
    settings: Mapping[str, Any]
    input_shape: tuple[int, ...]
    outputs: int

    def __call__(self, rng: Rng) -> nn.Module:
        return build_model(self.model, self.settings, self.input_shape, self.outputs, rng)


def find_model(spec: str) -> Builder:
    """The builder of a name or of `module:callable`."""
    if ":" not in spec:
        if spec not in _MODELS:
            raise UnknownName("model", spec, _MODELS)
        return _MODELS[spec]
    found = import_object(spec, "model")
    if not callable(found):
        raise ConfigError(f"model {spec} is not callable.")
    return found  # type: ignore[no-any-return]


def import_object(spec: str, what: str) -> Any:
    """The object that `module:name` names; the current folder is searched too."""
    module_name, _, attribute = spec.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # importing runs the user's own code, which may raise anything
        raise ConfigError(f"{what} {spec} cannot be imported: {type(error).__name__}: {error}.") from error


def model_settings(builder: Builder) -> dict[str, Any]:
    """The settings of a builder (its keyword-only arguments) with their defaults."""
    return {p.name: p.default for p in _parameters(builder) if p.kind is p.KEYWORD_ONLY}


def _parameters(builder: Builder) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(builder).parameters.values())
    except (TypeError, ValueError):
        return []


def _image(shape: tuple[int, ...], name: str, smallest: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise ModelError(f"model {name} takes pictures of at least {smallest}x{smallest}; these samples are {shape}.")
    return shape[0], shape[1], shape[2]


def _at_least_one(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} of the model must be an int >= 1. Got {value!r} instead.")


import coterie.networks  # noqa: E402, F401  last, because it registers its networks with the names above
