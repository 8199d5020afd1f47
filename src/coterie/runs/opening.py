"""Opening a run folder: its settings with the data and the code that they name, and the models of a finished run.

The data of a run may be elsewhere by now, or not there at all. A run can be opened from any folder, with data at
another place, with the Python objects it was started with, or without its data.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from coterie.client.work import SGD
from coterie.data.federation import Federation
from coterie.engines import make_engine
from coterie.engines.absent import AbsentEngine
from coterie.engines.base import resolve_device
from coterie.errors import CheckpointError, ConfigError, DataError, RunError
from coterie.methods.base import Algorithm, find_algorithm
from coterie.methods.fedavg import FedAvg
from coterie.nets.flat import Loss, cross_entropy
from coterie.nets.registry import Builder, ModelMaker, models
from coterie.runs.checks import check_data
from coterie.runs.execution import participants, plan_of
from coterie.runs.experiment import Experiment, find_loss, resolve, resolve_own
from coterie.runs.extension import check_unchanged
from coterie.runs.folder import Checkpoint, RunFolder
from coterie.runs.kept import Network
from coterie.runs.loop import Trainer
from coterie.runs.result import Result
from coterie.runs.settings import Tables, build_run, merge
from coterie.settings import build
from coterie.trust import METHODS, MODELS, check_trust, plugins

_OF_NETWORK = (("run", "model"), ("run", "loss"), ("work", "optimizer"))
_TRUST = "Say --trust (in Python trust=True) if you know who wrote them"
_NETWORK_AGAIN = f"{_TRUST}, or give your own network again (--model module:callable, in Python model=...)"
_METHOD_AGAIN = f"{_TRUST}, or give your own method again (in Python algorithm=...)"


@dataclass(frozen=True)
class Given:
    """What is given again to open a run: where its data is now, and the objects that its folder cannot hold."""

    data: Federation | str | Path | None = None
    model: str | Builder | None = None
    algorithm: Algorithm[Any] | None = None
    loss: str | Loss | None = None
    work: SGD | None = None

    @property
    def fields(self) -> set[tuple[str, str]]:
        """The fields of the settings that are given: what they name is trusted."""
        return {("run", key) for key in ("model", "loss", "algorithm") if getattr(self, key) is not None}


def tables_of(folder: RunFolder) -> tuple[Tables, list[str], bool]:
    """The settings of a folder, the Python objects that it lacks, and whether it is a run over sites."""
    tables = folder.config()
    tables.pop("schema")
    run = tables["run"] = dict(tables["run"])
    lacking, is_deployed = run.pop("from_python", []), bool(run.pop("over_sites", False))
    lacking = [str(part) for part in lacking] if isinstance(lacking, list) else ["data", "model"]
    return merge(tables), lacking, is_deployed


def stored_experiment(folder: RunFolder, given: Given | None = None, *, trust: bool = False) -> Experiment:
    """The experiment of a run folder, with what is given in place of what it names; see `check_trust` for `trust`."""
    given = given or Given()
    tables, lacking, is_deployed = tables_of(folder)
    if is_deployed:
        raise RunError(f"{folder.path} is a deployed run, and its data is at the sites; resume it with its run.sh.")
    missing = [part for part in lacking if getattr(given, part, None) is None]
    if missing:
        again = ", ".join(f"{part}=..." for part in missing)
        raise RunError(
            f"{folder.path} was started from Python with its own {' and '.join(missing)}; "
            f"give it again there: coterie.run(..., {again}, resume=True) or coterie.open_run(path, {again})."
        )
    if not isinstance(given.data, Federation):
        _find_data(folder, tables, given.data)
    check_trust(tables, folder.path, trust, given.fields)
    for key in ("model", "loss"):
        if isinstance(named := getattr(given, key), str):
            tables["run"][key] = named
    objects = {
        key: value
        for key in ("algorithm", "model", "loss", "work", "data")
        if (value := getattr(given, key)) is not None and not isinstance(value, str | Path)
    }
    if isinstance(given.data, Federation):
        return with_objects(resolve_own(_named(tables, objects), given.data), tables, objects)
    return with_objects(resolve(_named(tables, objects)), tables, objects)


def _named(tables: Tables, objects: Mapping[str, Any]) -> Tables:
    """The settings without the names of objects that are given, which may not be known here."""
    run = {key: value for key, value in tables["run"].items() if key not in objects or key == "algorithm"}
    empty = [table for table in ("algorithm", "model", "work") if table in objects]
    found = tables | {table: {} for table in empty} | {"run": run}
    return merge(found, {"run": {"algorithm": "fedavg"}}) if "algorithm" in objects else found


def with_objects(experiment: Experiment, tables: Tables, objects: Mapping[str, Any]) -> Experiment:
    """The experiment with objects in place of what settings name."""
    more: dict[str, Any] = dict(objects)
    if "algorithm" in more:
        more["algorithm_name"] = more["algorithm"].key
    if "model" in more:
        more["model_settings"] = tables.get("model", {})
    return replace(experiment, **more)


def _find_data(folder: RunFolder, tables: Tables, data: str | Path | Federation | None) -> None:
    """Set the path of a user's file to where it is now."""
    stored = tables["dataset"].get("path")
    if stored is None:
        if data is not None:
            named = tables["run"].get("dataset")
            raise ConfigError(f"{folder.path} was trained on the dataset {named}, not on a file; leave --data out.")
        return
    known = (folder.read_object("environment.json") or {}).get("data")
    known = known if isinstance(known, dict) else {}
    beside = folder.path / str(known["relative"]) if "relative" in known else None
    places = [data] if data is not None else [known.get("path"), stored, beside]
    found = next((place for place in places if place and os.path.exists(str(place))), None)
    if found is None:
        where = data if data is not None else stored
        raise DataError(
            f"The data of {folder.path} is not at {where}; say where it is now with --data PATH (in Python data=...)."
        )
    tables["dataset"]["path"] = str(found)


def open_run(
    path: str | Path,
    given: Given | None = None,
    *,
    with_data: bool = True,
    with_network: bool | None = True,
    trust: bool = False,
    override: bool = False,
) -> Result:
    """A finished run, from its folder, which is not changed.

    Without data there are its numbers, labels, centers and the personal models that the folder keeps, and it can take
    in new clients. Without its network, models have weights, but cannot compute; no code of the user is imported. With
    None, the network is there if coterie has it or it is given.
    `trust`: see `check_trust`. `override`: the settings may differ from those of the checkpoint.
    """
    folder, given = RunFolder.open(Path(path)), given or Given()
    summary = folder.summary()
    if summary is None:
        raise RunError(f"{path} is not finished. Resume it with 'coterie resume {path}'.")
    tables, _, is_deployed = tables_of(folder)
    with_data = with_data and not is_deployed
    if with_network is None:
        network = Network(folder)
        with_network = with_data or trust or given.model is not None or network.name in models()
    # Settings of somebody else: first of all, what they would import.
    unused = given.fields if with_data or with_network else {*given.fields, *_OF_NETWORK}
    unused = unused if with_data else {*unused, ("engine", "address")}
    way_out = _METHOD_AGAIN if given.algorithm is None and _has_own_method(tables) else _NETWORK_AGAIN
    check_trust(tables, folder.path, trust, unused, way_out)
    found, _ = folder.load_checkpoint()
    if found is not None:
        check_unchanged(folder, found, override)
    if with_data:
        return opened(folder, stored_experiment(folder, given, trust=trust))
    return _without(folder, given, summary, _last_checkpoint(folder, summary), with_network, trust)


def _has_own_method(tables: Tables) -> bool:
    name = str(tables["run"].get("algorithm"))
    return ":" in name or name in plugins(METHODS)


def _last_checkpoint(folder: RunFolder, summary: Mapping[str, Any]) -> Checkpoint:
    found, problems = folder.load_checkpoint()
    if found is None or found.round != summary["rounds"]:
        raise CheckpointError(" ".join([f"The last checkpoint of {folder.path} is missing or damaged.", *problems[:1]]))
    return found


def opened(folder: RunFolder, experiment: Experiment) -> Result:
    """The finished run of this experiment, with its data."""
    experiment, summary = experiment.loaded(), folder.summary() or {}
    data = experiment.federation()
    check_data(folder, data, data.digest(), experiment.place_of_data)
    checkpoint = _last_checkpoint(folder, summary)
    if experiment.device.startswith("cuda") and not torch.cuda.is_available():
        experiment = replace(experiment, device="cpu")
    federation, held_out = participants(experiment)
    settings = {"precision": plan_of(folder.read_object("environment.json")).get("precision", "auto")}
    is_here = experiment.engine != "ray"  # to look at a finished run, no workers are started
    name, settings = (experiment.engine, settings | experiment.engine_settings) if is_here else ("vectorized", settings)
    engine = make_engine(name, experiment.task(), federation, experiment.device, settings)
    trainer = Trainer(experiment.algorithm, engine, federation, experiment.schedule, folder)
    trainer.load(checkpoint)
    return Result(trainer, summary, held_out)


def _without(
    folder: RunFolder,
    given: Given,
    summary: dict[str, Any],
    checkpoint: Checkpoint,
    with_network: bool,
    trust: bool,
) -> Result:
    tables, _, _ = tables_of(folder)
    network = Network(folder)
    if not network.is_there:
        raise RunError(
            f"{folder.path} does not say what its network is: an earlier version wrote it. Open it with data."
        )
    if not with_network:  # nothing of it is imported
        tables["run"].pop("loss", None)
    if with_network and given.model is None:  # of a deployed run, whose settings do not name it
        check_trust({"run": {"model": network.name}}, folder.path, trust, (), _NETWORK_AGAIN)
    run, schedule = build_run(tables["run"])
    algorithm = given.algorithm
    if algorithm is None:
        algorithm = build(find_algorithm(run.algorithm), tables["algorithm"], "algorithm")
    work = (build(SGD, tables["work"], "work") if given.work is None else given.work).for_run(schedule.rounds)
    loss = cross_entropy if not with_network else find_loss(run.loss if given.loss is None else given.loss)
    model = None if not with_network else network.name if given.model is None else given.model
    if isinstance(model, str) and ":" not in model and model not in models() and model not in plugins(MODELS):
        raise RunError(f"{folder.path} was trained with {model}, which is not a named network; give it with --model.")
    federation = network.federation()
    task = network.task(work, loss, schedule.seed, schedule.initial, model)
    is_double = plan_of(folder.read_object("environment.json")).get("precision") == "float64"
    dtype = torch.float64 if is_double else torch.float32
    engine = AbsentEngine(task, federation.names, federation.keys, resolve_device("cpu"), dtype)
    trainer = Trainer(algorithm, engine, federation, schedule, folder)
    try:
        trainer.load(checkpoint)
    except CheckpointError as error:
        used = task.make.name if isinstance(task.make, ModelMaker) else network.name
        if used != network.name:
            raise network.not_this(used) from error
        raise
    return Result(trainer, summary)


def open_models(
    path: str | Path,
    given: Given | None = None,
    *,
    with_network: bool = True,
    trust: bool = False,
    override: bool = False,
    centers_only: bool = False,
) -> Result:
    """A finished run for its models: without its data, unless an earlier version wrote the folder.

    With `centers_only`, the code of a user's own method is not needed, unless its clients keep a part of the model.
    """
    folder, given = RunFolder.open(Path(path)), given or Given()
    with_data = not Network(folder).is_there
    if centers_only and not (with_data or trust) and given.algorithm is None and _has_own_method(tables_of(folder)[0]):
        with contextlib.suppress(CheckpointError):
            known = replace(given, algorithm=FedAvg())  # any method: centers are read alike
            return open_run(path, known, with_data=False, with_network=with_network, override=override)
    return open_run(path, given, with_data=with_data, with_network=with_network, trust=trust, override=override)
