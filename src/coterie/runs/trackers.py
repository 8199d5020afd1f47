"""Trackers: observers that log a run to other tools.

    coterie run --track tensorboard          # event files in the run folder: tensorboard --logdir runs
    coterie run --track mlflow               # MLFLOW_TRACKING_URI, by default the folder mlruns beside the runs
    coterie run --track wandb                # W&B's server; WANDB_MODE=offline: the folder wandb beside the runs

They are optional dependencies, imported on request. A failing tracker (a full disk, a server that does not answer) is
reported once, then disabled; the run continues.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from coterie import trust
from coterie.errors import ConfigError, MissingExtra, UnknownName
from coterie.runs.files import Files, reason
from coterie.runs.metrics import metrics
from coterie.runs.observers import Observer, Row, RunInfo
from coterie.trust import load_plugin, plugins, write_whole

_MOST_SIZES = 32  # with more clusters, sizes are not logged


def scalars(row: Row) -> dict[str, float]:
    """The finite numbers of a row by name: accuracy/macro, bytes/up ...

    >>> scalars({"round": 3, "accuracy": {"macro": 0.5}, "loss": None, "cluster_sizes": [2, 1], "repairs": []})
    {'accuracy/macro': 0.5, 'cluster_size/0': 2.0, 'cluster_size/1': 1.0}
    """
    found: dict[str, float] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{name}/{key}", inner)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            found[name] = float(value)

    for name, value in row.items():
        if name == "cluster_sizes":
            add("cluster_size", dict(enumerate(value)) if len(value) <= _MOST_SIZES else {})
        elif name == "spread":
            for score, five in value.items():
                add(score, {"tenth": five[0], "median": five[2]})
        elif name not in ("round", "repairs"):
            add(name, value)
    return found


class TensorBoard(Observer):
    """Event files in the folder `tensorboard` of the run."""

    def __init__(self) -> None:
        self._make = _imported("torch.utils.tensorboard", "SummaryWriter", "tensorboard")
        self._writer: Any = None

    def begin(self, run: RunInfo) -> None:
        if run.path is None:
            raise ConfigError("--track tensorboard writes to the run folder; set out.")
        # Rounds after the checkpoint of a resumed run are repeated: TensorBoard hides the old ones.
        purge = run.done + 1 if run.done else None
        self._writer = self._make(str(Files(run.path).place("tensorboard")), purge_step=purge)
        if not run.done:
            self._writer.add_text("settings", "    " + json.dumps(run.settings, indent=2).replace("\n", "\n    "), 0)
        self._writer.flush()

    def round(self, row: Row) -> None:
        for name, value in scalars(row).items():
            self._writer.add_scalar(name, value, row["round"])
        for repair in row.get("repairs", []):
            self._writer.add_text("repairs", str(repair.get("reason", "")), row["round"])
        self._writer.flush()

    def end(self, summary: dict[str, Any] | None) -> None:
        if self._writer is not None:
            self._writer.close()


class MLflow(Observer):
    """An MLflow run in the experiment of the dataset's name; a resumed run continues it."""

    def __init__(self) -> None:
        self._client_type = _imported("mlflow", "MlflowClient", "mlflow")
        self._client: Any = None
        self._id = ""
        self._id_file: Path | None = None

    def begin(self, run: RunInfo) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            home = (Path.cwd() if run.path is None else run.path.parent) / "mlruns"
            home.mkdir(parents=True, exist_ok=True)
            uri = home.resolve().as_uri()
            # Newer versions write to a plain folder only with this.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._id_file = None if run.path is None else Files(run.path).place("artifacts/mlflow.json")
        with _no_warnings():
            self._client = self._client_type(tracking_uri=uri)
            name = str(run.settings.get("run", {}).get("dataset", "coterie"))
            experiment = self._client.get_experiment_by_name(name)
            number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
            self._id = self._known_id() if run.done else ""
            if self._id:
                self._client.update_run(self._id, status="RUNNING")
                return
            self._id = self._client.create_run(number, run_name=run.name).info.run_id
            _store_id(self._id_file, self._id)
            for table, values in run.settings.items():
                for key, value in values.items() if isinstance(values, dict) else ():
                    self._client.log_param(self._id, f"{table}.{key}", str(value)[:500])

    def _known_id(self) -> str:
        """The id of the run to continue; empty if there is none."""
        try:
            found = _stored_id(self._id_file)
            self._client.get_run(found)
        except Exception:  # missing, or unknown to this server: a new run is created
            return ""
        return found

    def round(self, row: Row) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, row["round"]) for name, value in scalars(row).items()]
        with _no_warnings():
            self._client.log_batch(self._id, metrics=metrics)

    def end(self, summary: dict[str, Any] | None) -> None:
        if self._client is None:
            return
        with _no_warnings():
            for name, value in _final(summary).items():
                self._client.log_metric(self._id, name, value)
            self._client.set_terminated(self._id, "FINISHED" if summary is not None else "KILLED")


class Wandb(Observer):
    """A run of Weights & Biases in the project of the dataset's name; a resumed run continues it."""

    def __init__(self) -> None:
        self._init = _imported("wandb", "init", "wandb")
        self._run: Any = None

    def begin(self, run: RunInfo) -> None:
        from wandb import Settings

        id_file = None if run.path is None else Files(run.path).place("artifacts/wandb.json")
        with _no_warnings():
            self._run = self._init(
                project=str(run.settings.get("run", {}).get("dataset", "coterie")).replace("/", "-")[-128:],
                name=run.name,
                id=(_stored_id(id_file) if run.done else "") or None,
                resume="allow",
                reinit="create_new",  # a run that the user has open stays open
                config=run.settings,
                dir=os.environ.get("WANDB_DIR") or str(Path.cwd() if run.path is None else run.path.parent),
                settings=Settings(console="off", silent=True),
            )
        _store_id(id_file, self._run.id)

    def round(self, row: Row) -> None:
        # Rounds after the checkpoint of a resumed run are repeated: W&B keeps the old ones.
        self._run.log(scalars(row), step=row["round"])

    def end(self, summary: dict[str, Any] | None) -> None:
        if self._run is None:
            return
        with _no_warnings():
            self._run.summary.update(_final(summary))
            self._run.finish(exit_code=0 if summary is not None else 1)


def _final(summary: dict[str, Any] | None) -> dict[str, float]:
    """The numbers of a finished run by name: final/accuracy/macro ..."""
    final = {metric.place[0] for metric in metrics("table")} | {"seconds"}
    found = scalars({key: (summary or {}).get(key) for key in final})
    return {f"final/{name}": value for name, value in found.items()}


def _store_id(file: Path | None, name: str) -> None:
    """Remember by which id a tool knows the run."""
    if file is not None:
        write_whole(file, json.dumps({"run_id": name}).encode())


def _stored_id(file: Path | None) -> str:
    """The id to continue with; empty if there is none that can be read."""
    try:
        return "" if file is None else str(json.loads(file.read_text())["run_id"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _imported(module: str, name: str, extra: str) -> Any:
    try:
        with _no_warnings():
            return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise MissingExtra(f"--track {extra}", extra) from error


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages, about themselves and others
        yield


TRACKERS: dict[str, Callable[[], Observer]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": Wandb}


class Tolerant(Observer):
    """Another observer; when it fails, that is reported once and it is disabled."""

    def __init__(self, name: str, inner: Observer, say: Callable[[str], None]) -> None:
        self._name, self._say = name, say
        self._inner: Observer | None = inner

    def begin(self, run: RunInfo) -> None:
        self._try("begin", run)

    def round(self, row: Row) -> None:
        self._try("round", row)

    def end(self, summary: dict[str, Any] | None) -> None:
        self._try("end", summary)

    def _try(self, event: str, value: Any) -> None:
        try:
            if self._inner is not None:
                getattr(self._inner, event)(value)
        except Exception as error:  # of any kind: it must not stop a run of hours
            self._inner = None
            self._say(f"note: {self._name} is disabled: {reason(error)}.")


def trackers(names: list[str] | None, say: Callable[[str], None] = lambda text: None) -> list[Observer]:
    """The trackers of these names; an unknown or missing one is an error before anything runs."""
    return [Tolerant(name, _made(name), say) for name in dict.fromkeys(names or [])]


def _made(name: str) -> Observer:
    """The tracker of a name, or of a plugin."""
    make = TRACKERS[name] if name in TRACKERS else load_plugin(trust.TRACKERS, name, "tracker")
    if make is None:
        raise UnknownName("tracker", name, {*TRACKERS, *plugins(trust.TRACKERS)})
    made = make()
    if not isinstance(made, Observer):
        raise ConfigError(f"tracker {name} must be an Observer. Got {type(made).__name__} instead.")
    return made
