"""Run an experiment to its end, or resume it from its folder."""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from coterie.data.federation import Federation
from coterie.engines import make_engine
from coterie.engines.base import Engine
from coterie.errors import CoterieError, Interrupted, StorageError
from coterie.runs.backdoor import backdoor_success
from coterie.runs.checks import check_data, unfit
from coterie.runs.divergence import large_features
from coterie.runs.experiment import Experiment
from coterie.runs.extension import check_unchanged, notes_of
from coterie.runs.folder import RunFolder
from coterie.runs.kept import keep_personal, write_network
from coterie.runs.loop import Trainer, attack_of
from coterie.runs.newcomers import Newcomers, split_unseen
from coterie.runs.observers import Listener, RunInfo, Several
from coterie.runs.result import Result
from coterie.settings import check
from coterie.version import VERSION

log = logging.getLogger("coterie.runs")

_KEPT = ("chunk", "memory", "precision", "plan", "piece", "workers", "cpus")  # of the plan, by a resumed run


def execute(
    experiment: Experiment,
    folder: RunFolder | None = None,
    observer: Listener | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    override: bool = False,
) -> Result:
    """Run to the end, from the start or from the last intact checkpoint in the folder.

    `override`: the settings may differ from those of the checkpoint.
    """
    if folder is None:
        return _train(experiment, None, observer, should_stop, override)
    with folder.held():
        try:
            return _train(experiment, folder, observer, should_stop, override)
        except (StorageError, Interrupted):
            raise  # it can be resumed
        except Exception:
            folder.discard()  # a run that could not start leaves nothing behind
            raise


def participants(experiment: Experiment) -> tuple[Federation, Federation | None]:
    """The clients that train, with the data of attackers changed, and the clients that are held out."""
    schedule = experiment.schedule
    federation, held_out = split_unseen(experiment.federation(), schedule.unseen, schedule.seed)
    return attack_of(federation.keys, schedule).on_data(federation), held_out


def _train(
    experiment: Experiment,
    folder: RunFolder | None,
    observer: Listener | None,
    should_stop: Callable[[], bool],
    override: bool,
) -> Result:
    check(experiment.work)
    checkpoint, problems = (None, []) if folder is None else folder.load_checkpoint()
    if folder is not None and checkpoint is not None:
        check_unchanged(folder, checkpoint, override)
    experiment = experiment.loaded()
    everyone, schedule = experiment.federation(), experiment.schedule
    digest, place = everyone.digest(), experiment.place_of_data
    before = None if folder is None else folder.read_object("environment.json")
    if before is not None and folder is not None:
        check_data(folder, everyone, digest, place)
    # A resumed run takes the plan it began with, so that sums are taken in the same order.
    plan = plan_of(before) if experiment.engine in ("vectorized", "ray") else {}
    chosen = {key: plan[key] for key in _KEPT if key in plan}
    federation, held_out = participants(experiment)
    engine_settings = chosen | experiment.engine_settings
    engine = make_engine(experiment.engine, experiment.task(), federation, experiment.device, engine_settings)
    if chosen:
        engine.remember(plan)
    if (note := large_features(federation)) is not None:
        engine.notes.append(note)
    observers = Several([observer])
    trainer = Trainer(experiment.algorithm, engine, federation, schedule, folder, observers, should_stop)
    if folder is not None:
        choice = folder.read_object("artifacts/choose-k.json")
        if choice is not None:
            engine.notes.append(f"--clusters auto chose K = {choice.get('recommended')}: {choice.get('reason')}")
        engine.notes += notes_of(folder)
        folder.write_json("environment.json", environment(engine, digest, data_facts(folder, place)))
        write_network(folder, engine.task, everyone)
        unseen = [] if held_out is None else list(held_out.names)
        folder.write_json("artifacts/manifest.json", {"seed": schedule.seed, "unseen": unseen, **everyone.manifest()})
        engine.notes += problems
        if checkpoint is not None:
            trainer.restore(checkpoint)
        else:
            folder.cut_rows(0)
    name, path = (experiment.default_name, None) if folder is None else (folder.path.name, folder.path)
    settings = experiment.tables() if folder is None else folder.config()
    title = f"{name}: {experiment.algorithm_name} on {experiment.dataset}, {len(federation)} clients"
    planned = f"seed {schedule.seed}, round {trainer.progress.round} of {schedule.rounds}"
    log.info("%s, %s, %s", title, experiment.model_name, planned)
    for note in engine.notes:
        log.info("%s: %s", name, note)
    observers.begin(RunInfo(name, settings, path, trainer.progress.round))
    result = Result(trainer, {}, held_out)
    try:
        trainer.run()
        with trainer.timed("evaluate"):
            newcomers = result.unseen
        head = {
            "algorithm": experiment.algorithm_name,
            "dataset": experiment.dataset,
            "model": experiment.model_name,
            "inputs": everyone.scaling,
        }
        result.summary = finish(trainer, head, folder, experiment.engine, digest, newcomers)
        if folder is not None:
            keep_personal(folder, trainer, newcomers)  # after the summary: it is no part of the run's traffic
    except BaseException as error:
        observers.end(None)
        is_first = checkpoint is not None and trainer.progress.round <= checkpoint.round + 1
        if is_first and isinstance(error, Exception) and not isinstance(error, (CoterieError, OSError, MemoryError)):
            assert folder is not None
            assert checkpoint is not None
            raise unfit(folder.path, checkpoint.round, error) from error  # the first use of what was stored
        raise
    score = result.summary["accuracy"] or result.summary["loss"] or {}
    log.info("%s: finished after %d rounds, %s", name, result.summary["rounds"], score.get("macro"))
    observers.end(result.summary)
    return result


def finish(
    trainer: Trainer,
    head: Mapping[str, Any],
    folder: RunFolder | None,
    engine_name: str,
    digest: str,
    newcomers: Newcomers | None = None,
) -> dict[str, Any]:
    """The summary of a finished run, written to its folder if it has one."""
    engine = trainer.engine
    summary = {
        **head,
        **trainer.summary(),
        "unseen": None if newcomers is None else newcomers.summary(),
        "engine": engine_name,
        "device": str(engine.device),
        "plan": engine.describe(),
        "digest": digest,
    }
    if (success := backdoor_success(trainer)) is not None:
        summary["attack"]["success"] = success
    if folder is not None:
        summary["path"] = str(folder.path)
        folder.write_json("artifacts/failures.json", [vars(failure) for failure in engine.failures])
        if newcomers is not None:
            folder.write_json("artifacts/unseen.json", newcomers.rows())
        folder.write_json("summary.json", summary)
    return summary


def plan_of(environment: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the engine chose when the run began."""
    plan = (environment or {}).get("plan")
    return plan if isinstance(plan, dict) else {}


def data_facts(folder: RunFolder, place: str | None) -> dict[str, str] | None:
    """Where the user's file is, also as seen from the run folder: both may be moved together."""
    if place is None:
        return None
    facts = {"path": place}
    with contextlib.suppress(ValueError):  # on another drive
        facts["relative"] = os.path.relpath(place, os.path.abspath(folder.path))
    return facts


def environment(engine: Engine, digest: str, data: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The machine and the versions of a run."""
    return {
        "coterie": VERSION,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "plan": engine.describe(),
        "notes": list(engine.notes),
        "digest": digest,
        **({} if data is None else {"data": dict(data)}),
    }


@functools.cache
def commit() -> str | None:
    """The commit of the source, marked if files were changed; None outside a git repository."""

    def git(*arguments: str) -> str:
        here = Path(__file__)
        done = subprocess.run(["git", "-C", here.parent, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)  # an installed copy may lie inside another repository
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None
