"""Models by name; any other nn.Module works as well.

A builder takes the shape of one input, the number of outputs, and its settings by keyword:
`--model mlp --set model.hidden=64`. Use your own model with `--model package.module:callable`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from coterie.errors import ConfigError, CoterieError, ModelError, UnknownName, described
from coterie.randomness import Rng
from coterie.trust import MODELS, import_object, load_plugin, plugins, spec_of

Builder = Callable[..., nn.Module]

_MODELS: dict[str, Builder] = {}


def register_model(name: str) -> Callable[[Builder], Builder]:
    """Decorator: register a builder under a name."""

    def register(builder: Builder) -> Builder:
        _MODELS[name] = builder
        return builder

    return register


def models() -> dict[str, Builder]:
    """All registered models."""
    import coterie.nets.zoo  # noqa: F401  registers its models

    return dict(sorted(_MODELS.items()))


def build_model(
    spec: str | Builder,
    settings: Mapping[str, Any],
    input_shape: tuple[int, ...],
    num_outputs: int,
    rng: Rng,
) -> nn.Module:
    """Build a model from a name, `module:callable` or a callable; `rng` seeds the initial weights.

    A callable takes (input_shape, num_outputs) or nothing.
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
    except Exception as error:  # the user's code may raise anything
        raise ModelError(f"model {name} could not be built: {described(error)}") from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"model {name} must return a torch.nn.Module. Got {type(module).__name__} instead.")
    return module


@dataclass(frozen=True)
class ModelMaker:
    """How the model of a run is built; small enough to send to other processes."""

    model: str | Builder
    settings: Mapping[str, Any]
    input_shape: tuple[int, ...]
    outputs: int
    first: int | None = None  # torch's seed for the first weights of a run; None: they follow from the run's seed

    @property
    def name(self) -> str:
        """The name of the model, or the `module:callable` by which it can be made again, where that is known."""
        if isinstance(self.model, str):
            return self.model
        return spec_of(self.model) or str(getattr(self.model, "__name__", "own model"))

    def __call__(self, rng: Rng) -> nn.Module:
        return build_model(self.model, self.settings, self.input_shape, self.outputs, rng)


def find_model(spec: str) -> Builder:
    """The builder of a registered name, of a plugin or of `module:callable`."""
    if ":" not in spec:
        known = models()
        if spec in known:
            return known[spec]
        found = load_plugin(MODELS, spec, "model")
        if found is None:
            raise UnknownName("model", spec, {*known, *plugins(MODELS)})
    else:
        found = import_object(spec, "model")
    if not callable(found):
        raise ConfigError(f"model {spec} is not callable; name a class or a function.")
    return found  # type: ignore[no-any-return]


def model_settings(builder: Builder) -> dict[str, Any]:
    """The settings of a builder, which are its keyword-only arguments, with their defaults."""
    return {p.name: p.default for p in _parameters(builder) if p.kind is p.KEYWORD_ONLY}


def _parameters(builder: Builder) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(builder).parameters.values())
    except (TypeError, ValueError):
        return []
