"""The contract of a method, and the registry of methods.

A method is a frozen dataclass of hyperparameters with four functions over explicit state, as in fedjax and optax.
The shortest FedAvg:

>>> from dataclasses import dataclass, replace
>>> from typing import ClassVar
>>> import coterie, torch
>>> from coterie import Algorithm, CenterSums, ClusterState, train
>>> @dataclass(frozen=True)
... class Toy(Algorithm):
...     key: ClassVar[str] = "toy"
...
...     def start(self, task, engine, rng):
...         return ClusterState.common_start(engine, num_clusters=1)
...
...     def round(self, state, engine, cohort, rng):
...         sums, labels = CenterSums(1, like=state.centers), state.labels.clone()
...         rows = torch.zeros_like(cohort)
...         for chunk in engine.call(train, cohort, models=state.centers, refs=rows, rng=rng):
...             sums.add(chunk.answer.params, torch.zeros_like(chunk.clients), chunk.answer.samples)
...             labels[chunk.clients] = 0
...         return replace(state, centers=sums.means(keep=state.centers), labels=labels)
>>> result = coterie.run(Toy(), "rotated-digits", rounds=20)
>>> result.summary["accuracy"]["macro"] > 0.8
True

State flows through arguments. What a checkpoint needs is a field of the state, and a state is never changed in place.
"""

from __future__ import annotations

import abc
import importlib
import importlib.util
import inspect
import os
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from typing import Any, ClassVar, Generic, Self, TypedDict, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.client.serving import Serving
from coterie.client.steps import is_step
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.engines.base import Engine
from coterie.errors import ConfigError, UnknownName
from coterie.randomness import Rng
from coterie.settings import setting
from coterie.trust import METHODS, import_object, load_plugin, plugins


class Repair(TypedDict):
    """What the guard repaired, or a split of CFL."""

    round: int
    cluster: int | None
    reason: str


class Move(TypedDict):
    """A client that moved to another cluster."""

    client: str
    from_cluster: int
    to_cluster: int


class Decision(TypedDict, total=False):
    """What a method decided about its clusters, and why."""

    round: int
    what: str  # cut, proposed (it is tried in the next round), refused, merged, apart (not merged after a trial),
    # move, or removed because it was empty
    clusters: list[int]  # the parts of a cut, of which the first had the number before; the cluster looked at; or two
    # that were compared, of which the first has the members of both if they were merged
    sizes: list[int]  # clients in each part, as far as they gave evidence
    z: float  # evidence; see parts/kinds.py
    q: float  # benefit
    t: float  # gain of the members that tried a cut, or from staying apart, in standard errors
    signed_at: str  # the model at which clients signed
    moves: list[Move]
    loss_rose: int  # how many of those who moved had reported that their loss rose


@dataclass(frozen=True)
class ClusterState:
    """The state of a clustered method after a round. Subclasses add fields; all are saved."""

    common: Tensor  # [P] the common model, for clients not seen yet
    centers: Tensor  # [K, P] on the engine's device
    labels: Tensor  # int64 [N] on the CPU; -1: not seen yet
    stable_rounds: int = 0  # consecutive rounds in which no label and no center changed
    repairs: list[Repair] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    of_clients: ClassVar[tuple[str, ...]] = ()  # fields with a row per client, besides labels
    stored_as: ClassVar[dict[str, str]] = {"stable_rounds": "calm_rounds"}  # names in checkpoints, where they differ

    @classmethod
    def common_start(cls, engine: Engine, num_clusters: int, **more: Any) -> Self:
        """K copies of the common model; no client seen yet."""
        common = engine.initial()
        labels = torch.full((engine.num_clients,), -1, dtype=torch.int64)
        return cls(common=common, centers=common.repeat(num_clusters, 1), labels=labels, **more)

    def with_more_clients(self, count: int) -> Self:
        """The state with `count` more clients at the end, not seen yet."""
        labels = torch.cat([self.labels, torch.full((count,), -1, dtype=torch.int64)])
        more: dict[str, Any] = {}
        for name in self.of_clients:
            rows = getattr(self, name)
            if len(rows) == len(self.labels):
                more[name] = torch.cat([rows, rows.new_zeros(count, *rows.shape[1:])])
        return replace(self, labels=labels, **more)

    @property
    def num_clusters(self) -> int:
        """The present K; it grows in some methods."""
        return len(self.centers)

    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields, by their stored names."""
        return {name: value for name, value in self._stored().items() if isinstance(value, Tensor)}

    def plain(self) -> dict[str, Any]:
        """The other fields: plain JSON values."""
        return {name: value for name, value in self._stored().items() if not isinstance(value, Tensor)}

    def _stored(self) -> dict[str, Any]:
        return {self.stored_as.get(item.name, item.name): getattr(self, item.name) for item in fields(self)}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], plain: dict[str, Any], device: torch.device) -> Self:
        """The inverse of `tensors` and `plain`; integers such as labels stay on the CPU."""
        integers = (torch.int64, torch.int32, torch.bool)
        values: dict[str, Any] = {n: t if t.dtype in integers else t.to(device) for n, t in tensors.items()} | plain
        names = {cls.stored_as.get(item.name, item.name): item.name for item in fields(cls)}
        return cls(**{names[stored]: value for stored, value in values.items() if stored in names})


@dataclass(frozen=True)
class Personal:
    """The personal models: rows of a table, or without one the model that a client remembers (`OWN_MODEL`).

    With `serve`, the client makes its model of what it remembers and what it was sent; it may be a mixture.
    """

    models: Tensor | None = None  # [M, P]
    refs: Tensor | None = None  # int64 [n], or [n, m] for `serve`
    serve: Serving | None = None
    each: Mapping[str, Tensor] = field(default_factory=dict)  # more rows [n, ...] that `serve` takes
    adapt: Callable[[SGD], SGD] | None = None  # adaptation before use, given the local work
    private: bool = False  # only scores may leave the client: no losses, no counts


PartOf = Callable[[Task], Tensor]
"""Some entries of a model, bool [P]."""

S = TypeVar("S", bound=ClusterState)


@dataclass(frozen=True)
class Algorithm(abc.ABC, Generic[S]):
    """A method: hyperparameters, and functions over its state."""

    key: ClassVar[str]
    paper: ClassVar[str] = ""
    state_type: ClassVar[type[ClusterState]] = ClusterState
    finds_clusters: ClassVar[bool] = False  # whether the number of clusters is a result
    needs_validation: ClassVar[bool] = False  # whether clients compare models on validation samples
    needs_classes: ClassVar[bool] = False  # whether it works by classes, and so not for regression
    keeps: ClassVar[PartOf | None] = None  # the entries of a model that stay with the clients; None: all travel

    @abc.abstractmethod
    def start(self, task: Task, engine: Engine, rng: Rng) -> S:
        """The state before the first round; may call clients, which the ledger records as the start."""

    @abc.abstractmethod
    def round(self, state: S, engine: Engine, cohort: Tensor, rng: Rng) -> S:
        """The state after one round with the clients of `cohort` (ids [C])."""

    def personal(self, state: S, clients: Tensor) -> Personal:
        """The personal model of each of these clients: its center, or the common model if it was not seen yet."""
        labels = state.labels[clients]
        if bool((labels >= 0).all()):
            return Personal(state.centers, labels)
        table = torch.cat([state.centers, state.common.unsqueeze(0)])
        return Personal(table, torch.where(labels < 0, len(state.centers), labels))

    def assign(self, state: S, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """Labels [n] of clients that never took part; by default all belong to the one center."""
        return torch.zeros(len(newcomers), dtype=torch.int64)

    def exhibits(self, state: S, engine: Engine, rng: Rng) -> dict[str, NDArray[Any]]:
        """Arrays of this method for the report, computed once at the end of a run."""
        return {}

    def travels(self, task: Task) -> Tensor:
        """The entries of a model that are sent, averaged and saved, bool [P]; states hold these only.

        Frozen parameters (requires_grad=False) are never part of a model: see `coterie.nets.flat`.
        """
        mine = type(self).keeps
        return torch.ones(task.layout.size, dtype=torch.bool) if mine is None else ~mine(task)

    def whole(self, task: Task, models: Tensor) -> Tensor:
        """Models [K, what travels] as models [K, P]; what stays with the clients is as in the initial weights."""
        found = task.initial.to(models).repeat(len(models), 1)
        found[:, self.travels(task).to(models.device)] = models
        return found

    def should_stop(self, state: S) -> bool:
        """Whether further rounds would change nothing."""
        return False

    def ending(self, rounds: int, participation: float) -> tuple[int, str] | None:
        """The first round that depends on the number of rounds of a run, and what is done there.

        None if no round does: a run that is extended then equals one that was longer from the start.
        """
        return None

    def check(self, num_clients: int) -> None:
        """Refuse settings that cannot work with this number of clients."""
        clusters = getattr(self, "num_clusters", 1)
        if clusters > num_clients:
            raise ConfigError(
                f"num_clusters of {type(self).__name__} must be at most the number of clients, {num_clients}. "
                f"Got {clusters} instead."
            )


_ALGORITHMS: dict[str, type[Algorithm[Any]]] = {}


def register(cls: type[Algorithm[Any]]) -> type[Algorithm[Any]]:
    """Class decorator: register a method by its `key`, which no other method may have."""
    package = __name__.rpartition(".")[0]
    known = _ALGORITHMS if cls.__module__.startswith(f"{package}.") else algorithms()
    other = known.get(cls.key)
    if other is not None and _origin(other) != _origin(cls):
        raise ConfigError(
            f"The key '{cls.key}' of {cls.__name__} is that of {other.__module__}:{other.__qualname__}; choose another."
        )
    _ALGORITHMS[cls.key] = cls
    return cls


def _origin(cls: type) -> tuple[str, str]:
    """The file and the name of a class: the same if its module is imported again, or runs as `__main__`."""
    files = [function.__code__.co_filename for function in vars(cls).values() if inspect.isfunction(function)]
    written = [os.path.realpath(file) for file in files if os.path.isfile(file)]  # a dataclass adds others
    return written[0] if written else cls.__module__, cls.__qualname__


def algorithms() -> dict[str, type[Algorithm[Any]]]:
    """All methods, by key."""
    import coterie.methods as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(sorted(_ALGORITHMS.items()))


def is_registered(key: str, cls: type) -> bool:
    """Whether this class is the method of that key."""
    return _ALGORITHMS.get(key) is cls


def load_method_of(step: str) -> None:
    """Import the module that defines a client step, or every method if the step's name does not tell which.

    Nothing but `coterie.methods` is imported: a message must not choose what a site runs.
    """
    name = step.partition(":")[0].rpartition(".")[2]  # "coterie.fedper:train_together" -> "fedper"
    for package in ("coterie.methods", "coterie.methods.parts"):
        if name.isidentifier() and importlib.util.find_spec(f"{package}.{name}") is not None:
            importlib.import_module(f"{package}.{name}")
    if not is_step(step):
        algorithms()


def find_algorithm(name: str) -> type[Algorithm[Any]]:
    """The method with this name: a registered key, the name of a plugin, or `module:Class`."""
    if ":" in name:
        return _method_class(import_object(name, "algorithm"), name)
    if name not in _ALGORITHMS and name.isidentifier() and find_spec(f"coterie.methods.{name}") is not None:
        importlib.import_module(f"coterie.methods.{name}")  # most methods are in a file of their name
    if name in _ALGORITHMS:
        return _ALGORITHMS[name]
    known = algorithms()
    if name in known:
        return known[name]
    found = load_plugin(METHODS, name, "algorithm")
    if found is None:
        raise UnknownName("algorithm", name, {*known, *plugins(METHODS)})
    return _method_class(found, name)


def _method_class(found: Any, name: str) -> type[Algorithm[Any]]:
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ConfigError(f"algorithm {name} is not a subclass of coterie.Algorithm.")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(f"algorithm {name} has no {missing[0]}; write that function.")
    return found


def num_clusters_setting(default: int = 4) -> Any:
    """The field `num_clusters` of clustered methods (`--clusters`)."""
    return setting(default, "number of clusters K", ge=1)
