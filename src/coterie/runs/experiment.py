"""An experiment is one run with every setting resolved; `resolve` makes it from tables of settings."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coterie.client.schedules import depends_on_rounds
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.data.dataset import Dataset, find_preset, source_class
from coterie.data.federation import Federation
from coterie.data.scenario import Common, Scenario
from coterie.errors import ConfigError, UnknownName
from coterie.methods.base import Algorithm, find_algorithm, is_registered
from coterie.nets.flat import LOSSES, Loss
from coterie.nets.registry import Builder, ModelMaker, find_model, model_settings
from coterie.randomness import Rng
from coterie.runs.settings import RunSettings, Schedule, Tables, build_run, merge
from coterie.settings import build, fields_of, values_of
from coterie.trust import import_object, spec_of

log = logging.getLogger("coterie.data")


@dataclass(frozen=True)
class Experiment:
    """One run with every setting resolved. Its `tables`, as in config.toml, resolve to the same experiment."""

    algorithm: Algorithm[Any]
    algorithm_name: str
    dataset: str
    model: str | Builder
    work: SGD
    schedule: Schedule
    model_settings: Mapping[str, Any] = field(default_factory=dict)
    loss: str | Loss = RunSettings.loss
    engine: str = RunSettings.engine
    device: str = RunSettings.device
    engine_settings: dict[str, Any] = field(default_factory=dict)
    clients: int | None = None
    source: Any = None  # None: `data` is given
    scenario: Scenario | None = None
    data_dir: str | None = None
    data: Federation | None = None  # given by the user, or already loaded
    notes: list[str] = field(default_factory=list)

    def samples(self) -> Dataset:
        """The samples before they belong to clients."""
        folder = None if self.data_dir is None else Path(self.data_dir)
        found: Dataset = self.source.load(self.clients, self._data_rng, folder)
        log.info(
            "%s: %d samples of shape %s, %d classes", self.dataset, len(found), found.input_shape, found.num_classes
        )
        return found

    @property
    def _data_rng(self) -> Rng:
        return Rng.seed(self.schedule.seed).at("data")

    def federation(self, samples: Dataset | None = None) -> Federation:
        """The clients and their data, partitioned unless given; `samples` if they are already loaded."""
        if self.data is not None:
            return self.data
        assert self.scenario is not None
        dataset = self.samples() if samples is None else samples
        federation = self.scenario.partition(dataset, self.clients, self._data_rng, self.schedule.seed)
        self.algorithm.check(len(federation))
        return federation

    def loaded(self) -> Experiment:
        """The same experiment with its data in memory."""
        return self if self.data is not None else replace(self, data=self.federation())

    def task(self) -> Task:
        """The network with its first weights, the loss and the local work."""
        data = self.federation()
        outputs = data.num_classes or (1 if data.y.dim() == 1 else int(data.y[0].numel()))
        make = ModelMaker(self.model, self.model_settings, data.input_shape, outputs, self.schedule.initial)
        seed, loss = self.schedule.seed, find_loss(self.loss)
        return Task.made(make, seed, loss, data.num_classes, data.input_shape, self.work_of_run, data.has_integers)

    @property
    def work_of_run(self) -> SGD:
        """The local work, which depends on the number of rounds."""
        return self.work.for_run(self.schedule.rounds)

    @property
    def model_name(self) -> str:
        return self.model if isinstance(self.model, str) else getattr(self.model, "__name__", "own model")

    @property
    def default_name(self) -> str:
        """The name of the run folder if the user chooses none."""
        return f"{Path(self.dataset).stem}-{self.algorithm_name.replace(':', '-')}-s{self.schedule.seed}"

    @property
    def ending(self) -> tuple[int, str] | None:
        """The first round that depends on the number of rounds, and why; None if none does."""
        if depends_on_rounds(self.work):
            return 1, f"its learning rates follow the schedule {self.work.schedule} over all rounds"
        return self.algorithm.ending(self.schedule.rounds, self.schedule.participation)

    @property
    def _names(self) -> dict[str, str | None]:
        """The names of what may be a Python object, by which it is found again; None if it cannot be."""
        method = type(self.algorithm)
        known = is_registered(self.algorithm_name, method) or ":" in self.algorithm_name
        return {
            "data": None if self.source is None else self.dataset,
            "algorithm": self.algorithm_name if known else spec_of(method),
            "model": self.model if isinstance(self.model, str) else spec_of(self.model),
            "loss": self.loss if isinstance(self.loss, str) else spec_of(self.loss),
            "work": "sgd" if type(self.work) is SGD else None,
        }

    @property
    def objects(self) -> list[str]:
        """The Python objects of this run that its folder cannot name: they must be given again to open it."""
        return [part for part, name in self._names.items() if name is None]

    def _source_values(self) -> dict[str, Any]:
        """The settings of the source; a path is whole, so that the run can be opened from any folder."""
        values = {} if self.source is None else values_of(self.source)
        return values | ({"path": os.path.abspath(values["path"])} if "path" in values else {})

    @property
    def place_of_data(self) -> str | None:
        """The whole path of the user's file; None for other data."""
        found = self._source_values().get("path")
        return None if found is None else str(found)

    def defaults(self) -> Tables:
        """The defaults of what `tables` holds, where there are any."""
        classes: dict[str, type] = {"run": Schedule, "scenario": Common}
        classes |= {"algorithm": type(self.algorithm), "work": type(self.work)}
        return {name: {key: field.default for key, field in fields_of(cls).items()} for name, cls in classes.items()}

    def tables(self) -> Tables:
        """The settings as config.toml holds them."""
        run: dict[str, Any] = {
            "algorithm": self._names["algorithm"] or self.algorithm_name,
            "dataset": self.dataset,
            "scenario": None if self.scenario is None else self.scenario.name,
            "model": self._names["model"] or self.model_name,
            "clients": self.clients,
            "loss": self._names["loss"] or getattr(self.loss, "__name__", "own loss"),
            "engine": self.engine,
            "device": self.device,
            "data_dir": None if self.data_dir is None else os.path.abspath(self.data_dir),
            **values_of(self.schedule),
            "from_python": self.objects or None,
        }
        return {
            "run": {key: value for key, value in run.items() if value is not None},
            "algorithm": values_of(self.algorithm),
            "work": values_of(self.work),
            "dataset": self._source_values(),
            "scenario": {} if self.scenario is None else self.scenario.values,
            "model": dict(self.model_settings),
            "engine": dict(self.engine_settings),
        }


def find_loss(loss: str | Loss) -> Loss:
    """The loss of a name or of `module:callable`, or the callable itself."""
    if callable(loss):
        return loss
    if loss not in LOSSES and ":" not in loss:
        raise UnknownName("loss", loss, LOSSES)
    found: Loss = LOSSES[loss] if loss in LOSSES else import_object(loss, "loss")
    return found


def resolve(tables: Tables) -> Experiment:
    """Fill in the dataset's defaults, check every value, and make the objects."""
    tables = merge(tables)
    run, _ = build_run(tables["run"])
    notes: list[str] = []
    name = run.algorithm
    algorithm_class = find_algorithm(name)
    preset = find_preset(run.dataset, tables["dataset"])
    source = source_class(preset.source)
    _, schedule = build_run({"keep_pictures": source.is_public, **preset.run, **tables["run"]})
    model = preset.model if run.model is None else run.model
    if run.loss not in LOSSES and ":" not in run.loss:
        raise UnknownName("loss", run.loss, LOSSES)

    algorithm_values = tables["algorithm"]
    if "num_clusters" in algorithm_values and "num_clusters" not in fields_of(algorithm_class):
        algorithm_values.pop("num_clusters")
        notes.append(f"{name} has no clusters; --clusters is ignored")
    known_settings = model_settings(find_model(model))
    settings = (dict(preset.model_settings) if model == preset.model else {}) | tables["model"]
    for key in settings:
        if key not in known_settings:
            raise UnknownName(f"field of model {model} named", key, known_settings)
    scenario_name = preset.scenario if run.scenario is None else run.scenario
    scenario_values = (dict(preset.scenario_settings) if scenario_name == preset.scenario else {}) | tables["scenario"]
    algorithm = build(algorithm_class, algorithm_values, "algorithm")
    # Indicator samples are held out before any client gets data.
    scenario_values.setdefault("reserve", getattr(algorithm, "indicators", 0))
    return Experiment(
        algorithm=algorithm,
        algorithm_name=name,
        dataset=preset.name,
        clients=preset.clients if run.clients is None else run.clients,
        scenario=Scenario.named(scenario_name, scenario_values),
        source=build(source, {**preset.source_settings, **tables["dataset"]}, "dataset"),
        model=model,
        model_settings=settings,
        loss=run.loss,
        work=build(SGD, {**preset.work, **tables["work"]}, "work"),
        schedule=schedule,
        engine=run.engine,
        device=run.device,
        data_dir=run.data_dir or None,
        engine_settings=tables["engine"],
        notes=notes,
    )


def resolve_own(tables: Tables, data: Federation) -> Experiment:
    """The experiment of settings over a federation: it has a partition, and no defaults of its own."""
    tables = merge(tables)
    run, schedule = build_run(tables["run"])
    for name, given in {"clients": run.clients, "scenario": run.scenario, "data_dir": run.data_dir}.items():
        if given is not None:
            raise ConfigError(f"{name} is for named datasets and files; the federation {data.name} has its clients.")
    algorithm_class, notes = find_algorithm(run.algorithm), list[str]()
    if "num_clusters" in tables["algorithm"] and "num_clusters" not in fields_of(algorithm_class):
        tables["algorithm"].pop("num_clusters")
        notes.append(f"{run.algorithm} has no clusters; clusters is ignored")
    return Experiment(
        algorithm=build(algorithm_class, tables["algorithm"], "algorithm"),
        algorithm_name=run.algorithm,
        dataset=data.name,
        model=run.model or "mlp",
        model_settings=tables["model"],
        work=build(SGD, tables["work"], "work"),
        schedule=schedule,
        loss=run.loss,
        engine=run.engine,
        device=run.device,
        engine_settings=tables["engine"],
        data=data,
        notes=notes,
    )


def resolve_each(
    tables: Tables, names: list[str], seeds: Sequence[int], more: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[tuple[str, int], Experiment]:
    """The same settings for several methods and seeds; a method gets the fields of [algorithm] that it has.

    `more` holds, by method, fields of [algorithm] that win over these.
    """
    wanted = tables.get("algorithm", {})
    known = {name: set(fields_of(find_algorithm(name))) for name in names}
    every = set().union(*known.values())
    for key in wanted:
        if key not in every and key != "num_clusters":
            raise UnknownName(f"field of algorithm ({', '.join(names)}) named", key, every)

    def one(name: str, seed: int, reserve: int | None = None) -> Experiment:
        own = {key: value for key, value in wanted.items() if key in known[name]} | dict((more or {}).get(name, {}))
        held = {} if reserve is None else {"reserve": reserve}
        layer: Tables = {"run": {"algorithm": name, "seed": seed}, "scenario": held}
        return resolve(merge(tables, layer) | {"algorithm": own})

    # A fair comparison: if one method needs indicator samples, they are held out for all.
    reserve = max(_reserve(one(name, seeds[0])) for name in names)
    return {(name, seed): one(name, seed, reserve) for seed in seeds for name in names}


def _reserve(experiment: Experiment) -> int:
    assert experiment.scenario is not None
    return experiment.scenario.common.reserve
