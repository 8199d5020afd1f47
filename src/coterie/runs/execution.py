"""Run an experiment to its end, resume it from its folder, or open a finished one."""

from __future__ import annotations

import datetime
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from coterie.data.federation import Federation
from coterie.engines import make_engine
from coterie.engines.base import Engine
from coterie.errors import CheckpointError, Interrupted, RunError, StorageError
from coterie.runs.experiment import Experiment, resolve
from coterie.runs.folder import RunFolder
from coterie.runs.loop import Trainer, attack_of
from coterie.runs.newcomers import Newcomers, split_unseen
from coterie.runs.observers import Listener, RunInfo, Several
from coterie.runs.result import Result
from coterie.settings import check
from coterie.version import VERSION


def execute(
    experiment: Experiment,
    folder: RunFolder | None = None,
    observer: Listener | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Run to the end, from the beginning or from the folder's last whole checkpoint."""
    if folder is None:
        return _train(experiment, None, observer, should_stop)
    with folder.held():
        try:
            return _train(experiment, folder, observer, should_stop)
        except (StorageError, Interrupted):
            raise  # what there is can be resumed
        except Exception:
            folder.discard()  # a run that could not begin leaves nothing behind
            raise


def participants(experiment: Experiment) -> tuple[Federation, Federation | None]:
    """The clients that train, with the data that attackers have changed, and the clients that are held out."""
    schedule = experiment.schedule
    federation, held_out = split_unseen(experiment.federation(), schedule.unseen, schedule.seed)
    return attack_of(federation.keys, schedule).on_data(federation), held_out


def _train(
    experiment: Experiment,
    folder: RunFolder | None,
    observer: Listener | None,
    should_stop: Callable[[], bool],
) -> Result:
    check(experiment.work)
    experiment = experiment.loaded()
    everyone, schedule = experiment.federation(), experiment.schedule
    digest = everyone.digest()
    chosen: dict[str, Any] = {}
    before: dict[str, Any] | None = None
    if folder is not None:
        before = folder.read_object("environment.json")
        if before is not None:
            if before["digest"] != digest:
                raise RunError(f"The data of {folder.path} has changed since the run began; it cannot be resumed.")
            kept = ("chunk", "memory", "precision", "plan", "piece", "workers")
            chosen = {k: v for k, v in before["plan"].items() if k in kept} if experiment.engine == "vectorized" else {}
    federation, held_out = participants(experiment)
    engine_settings = chosen | experiment.engine_settings
    engine = make_engine(experiment.engine, experiment.task(), federation, experiment.device, engine_settings)
    if chosen and before is not None:
        engine.remember(before["plan"])
    told = Several([observer])
    trainer = Trainer(experiment.algorithm, engine, federation, schedule, folder, told, should_stop)
    if folder is not None:
        choice = folder.read_object("artifacts/choose-k.json")
        if choice is not None:
            engine.notes.append(f"--clusters auto chose K = {choice['recommended']}: {choice['reason']}")
        folder.write_json("environment.json", environment(engine, digest))
        unseen = [] if held_out is None else list(held_out.names)
        manifest = {"seed": schedule.seed, "unseen": unseen, **everyone.manifest()}
        folder.write_json("artifacts/manifest.json", manifest)
        checkpoint, problems = folder.load_checkpoint()
        engine.notes += problems
        if checkpoint is not None:
            trainer.restore(checkpoint)
        else:
            folder.cut_rows(0)
    told.begin(
        RunInfo(
            name=experiment.default_name if folder is None else folder.path.name,
            settings=experiment.tables() if folder is None else folder.config(),
            path=None if folder is None else folder.path,
            done=trainer.progress.round,
        )
    )
    try:
        result = _result_of(experiment, trainer, folder, held_out, digest)
    except BaseException:
        told.end(None)
        raise
    told.end(result.summary)
    return result


def _result_of(
    experiment: Experiment,
    trainer: Trainer,
    folder: RunFolder | None,
    held_out: Federation | None,
    digest: str,
) -> Result:
    """Train to the end, meet those who were held out, and write the result."""
    trainer.run()
    told = {
        "algorithm": experiment.algorithm_name,
        "dataset": experiment.dataset,
        "model": experiment.model_name,
    }
    result = Result(trainer, {}, held_out)
    began = time.perf_counter()
    newcomers = result.unseen
    trainer.progress.seconds["evaluate"] += time.perf_counter() - began
    result.summary = finish(trainer, told, folder, experiment.engine, digest, newcomers)
    return result


def finish(
    trainer: Trainer,
    told: Mapping[str, Any],
    folder: RunFolder | None,
    engine_name: str,
    digest: str,
    newcomers: Newcomers | None = None,
) -> dict[str, Any]:
    """The summary of a run that has come to its end, written into its folder if it has one."""
    engine = trainer.engine
    summary = {
        **told,
        **trainer.summary(),
        "unseen": None if newcomers is None else newcomers.summary(),
        "engine": engine_name,
        "device": str(engine.device),
        "plan": engine.describe(),
        "digest": digest,
    }
    if folder is not None:
        summary["path"] = str(folder.path)
        folder.write_json("artifacts/failures.json", [vars(failure) for failure in engine.failures])
        if newcomers is not None:
            folder.write_json("artifacts/unseen.json", newcomers.rows())
        folder.write_json("summary.json", summary)
    return summary


def open_run(path: str | Path) -> Result:
    """A finished run of the command line, from its folder; nothing in it is changed."""
    folder = RunFolder.open(Path(path))
    summary = folder.summary()
    if summary is None:
        raise RunError(f"{path} is not finished; go on with 'coterie resume {path}'.")
    tables = folder.config()
    tables.pop("schema")
    if tables.get("run", {}).get("over_sites"):
        raise RunError(f"{path} is a run over sites, whose data are not here; it cannot be opened from its folder.")
    if tables.get("run", {}).get("from_python"):
        raise RunError(f"{path} was started from Python with objects of its own; it cannot be opened from its folder.")
    experiment = resolve(tables).loaded()
    if experiment.device.startswith("cuda") and not torch.cuda.is_available():
        experiment = replace(experiment, device="cpu")
    before = folder.read_object("environment.json")
    if before is None or before["digest"] != experiment.federation().digest():
        raise RunError(f"The data of {path} has changed since the run was made; it cannot be opened.")
    checkpoint, problems = folder.load_checkpoint()
    if checkpoint is None or checkpoint.round != summary["rounds"]:
        raise CheckpointError(" ".join([f"The last checkpoint of {path} is not there whole.", *problems[:1]]))
    federation, held_out = participants(experiment)
    settings = {"precision": before["plan"]["precision"]} | experiment.engine_settings
    engine = make_engine(experiment.engine, experiment.task(), federation, experiment.device, settings)
    trainer = Trainer(experiment.algorithm, engine, federation, experiment.schedule, folder)
    trainer.load(checkpoint)
    return Result(trainer, summary, held_out)


def environment(engine: Engine, digest: str) -> dict[str, Any]:
    """Where and with what a run was made."""
    return {
        "coterie": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "plan": engine.describe(),
        "notes": list(engine.notes),
        "digest": digest,
    }
