"""`Dataset`, the contract of a source, and the registry of named datasets.

A source only loads samples; the scenario partitions them. A preset names a source, a scenario and matching
defaults (`rotated-digits`). The sources are in `sources/`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.values import MOST_CLASSES, check_finite
from coterie.errors import ConfigError, DataError, UnknownName
from coterie.randomness import Rng
from coterie.trust import DATASETS, load_plugin, plugins


@dataclass(frozen=True)
class Dataset:
    """Samples with their labels, and where they come from, if known."""

    name: str
    x: Tensor  # uint8 images [S, C, H, W], int64 (token ids) or float32 [S, ...]
    y: Tensor  # int64 [S] classes, or float32 [S] or [S, d] targets
    num_classes: int  # 0 for regression
    is_train: NDArray[np.bool_] | None = None  # [S]; None: no official split
    user: NDArray[np.int64] | None = None  # [S] index into user_names
    user_names: tuple[str, ...] = ()
    group: NDArray[np.int64] | None = None  # [S] the true group of the sample's user, or its domain
    group_names: tuple[str, ...] = ()  # [G] where groups have names
    mean: float = 0.0  # networks get (x - mean) / std
    std: float = 1.0
    class_names: tuple[str, ...] = ()  # [L] where labels were words
    is_valid: NDArray[np.bool_] | None = None  # [S] training samples for validation; None: a share of each client's
    standardize: bool = False  # networks get features scaled by mean and deviation of the training samples

    def __len__(self) -> int:
        return len(self.y)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.x.shape[1:])

    def validate(self) -> Dataset:
        """Raise DataError if the samples are unusable; return self."""
        if len(self.x) != len(self.y):
            raise DataError(f"{self.name}: {len(self.x)} samples but {len(self.y)} labels.")
        if len(self.x) and not (self.x[0].numel() and self.y[0].numel()):
            shapes = f"{self.input_shape} and targets of shape {tuple(self.y.shape[1:])}"
            raise DataError(f"{self.name}: samples of shape {shapes} have no values.")
        if not len(self.x):
            raise DataError(f"{self.name} has no samples.")
        for column in ("is_train", "is_valid", "user", "group"):
            values = getattr(self, column)
            if values is not None and len(values) != len(self.x):
                raise DataError(f"{self.name}: {len(self.x)} samples but {len(values)} entries in '{column}'.")
        check_finite(self.x, self.name)
        if self.num_classes and int(self.y.min()) < 0:
            raise DataError(f"{self.name}: labels must be 0 or larger. Got {int(self.y.min())} instead.")
        if self.num_classes > MOST_CLASSES:
            raise DataError(
                f"{self.name}: class numbers must be below {MOST_CLASSES:,}, as the network has an output for each. "
                f"Got {self.num_classes - 1:,} instead."
            )
        if self.num_classes and int(self.y.max()) >= self.num_classes:
            raise DataError(
                f"{self.name}: labels must be less than the number of classes, {self.num_classes}. "
                f"Got {int(self.y.max())} instead."
            )
        return self


@dataclass(frozen=True)
class Source:
    """Contract of a source: a frozen settings class that loads a `Dataset`."""

    key: ClassVar[str]
    summary: ClassVar[str]
    is_public: ClassVar[bool] = False  # a run folder may hold some of its samples without being asked to
    is_fixed: ClassVar[bool] = False  # `load` gives the same samples for all numbers of clients and seeds

    def load(self, clients: int | None, rng: Rng, data_dir: Path | None) -> Dataset:
        """Load the samples; only sources that generate data use `clients` and `rng`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Preset:
    """A named dataset: source, scenario and matching defaults."""

    name: str
    summary: str
    source: str
    scenario: str
    clients: int | None = None
    source_settings: Mapping[str, Any] = field(default_factory=dict)
    scenario_settings: Mapping[str, Any] = field(default_factory=dict)
    model: str = "mlp"
    model_settings: Mapping[str, Any] = field(default_factory=dict)
    work: Mapping[str, Any] = field(default_factory=dict)  # lr, epochs, batch_size ...
    run: Mapping[str, Any] = field(default_factory=dict)  # rounds, initial


S = TypeVar("S", bound=Source)

_SOURCES: dict[str, type[Source]] = {}
_PRESETS: dict[str, Preset] = {}


def register_source(cls: type[S]) -> type[S]:
    """Class decorator: register a source under its `key`."""
    _SOURCES[cls.key] = cls
    return cls


def register_preset(preset: Preset) -> Preset:
    """Register a named dataset."""
    _PRESETS[preset.name] = preset
    return preset


def import_all(package: str) -> None:
    """Import all modules of a package, which register what they define."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")


def presets() -> dict[str, Preset]:
    """All named datasets."""
    import_all("coterie.data.sources")
    return dict(sorted(_PRESETS.items()))


def source_class(key: str) -> type[Source]:
    """The source registered under `key`."""
    import_all("coterie.data.sources")
    if key not in _SOURCES:
        raise UnknownName("source", key, _SOURCES)
    return _SOURCES[key]


def find_preset(name: str, settings: Mapping[str, Any] | None = None) -> Preset:
    """The preset of a registered name or of a plugin, or of a path, read by the source with these settings."""
    known = presets()
    if name in known:
        return known[name]
    found = load_plugin(DATASETS, name, "dataset")
    if isinstance(found, Preset):
        return register_preset(replace(found, name=name))
    if isinstance(found, type) and issubclass(found, Source):
        return register_preset(Preset(name, found.summary, register_source(found).key, "iid", clients=10))
    if found is not None:
        raise ConfigError(f"dataset {name}, a plugin, must be a Preset or a Source class. Got {found!r} instead.")
    from coterie.data.sources.files import is_path, preset_of_file

    if is_path(name) or "path" in (settings or {}):
        return preset_of_file(Path(name), settings)
    raise UnknownName("dataset", name, {*known, *plugins(DATASETS)})


def positive_clients(clients: int | None, default: int) -> int:
    """The number of clients to generate: `clients`, or `default` if it is None."""
    number = default if clients is None else clients
    if number < 1:
        raise ConfigError(f"clients must be an int >= 1. Got {number} instead.")
    return number
