"""Trackers: observers that write a run's numbers where other tools look for them.

    coterie run --track tensorboard          # event files in the run folder: tensorboard --logdir runs
    coterie run --track mlflow               # MLFLOW_TRACKING_URI, by default the folder mlruns beside the runs

Both are optional extras, imported when they are asked for. A tracker that fails (a full disk, a server that does not
answer) is told once and left out; the run goes on.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError, MissingExtra, UnknownName
from coterie.runs.metrics import metrics
from coterie.runs.observers import Observer, Row, RunInfo

_MOST_SIZES = 32  # clusters whose sizes are curves of their own


def scalars(row: Row) -> dict[str, float]:
    """The numbers of a row by name: accuracy/macro, bytes/up ...; what is not a finite number is left out.

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
            for cluster, size in enumerate(value[:_MOST_SIZES] if len(value) <= _MOST_SIZES else []):
                add(f"cluster_size/{cluster}", size)
        elif name == "spread":
            for score, five in value.items():
                add(f"{score}/tenth", five[0])
                add(f"{score}/median", five[2])
        elif name not in ("round", "repairs"):
            add(name, value)
    return found


class TensorBoard(Observer):
    """Event files in the folder `tensorboard` of the run."""

    def __init__(self) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the package, about others
                from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("--track tensorboard", "tensorboard") from error
        self._make = SummaryWriter
        self._writer: Any = None

    def begin(self, run: RunInfo) -> None:
        if run.path is None:
            raise ConfigError("--track tensorboard writes into the run folder; give the run one (out=...).")
        # What was written after the checkpoint of a resumed run is hidden by what comes now.
        purge = run.done + 1 if run.done else None
        self._writer = self._make(str(run.path / "tensorboard"), purge_step=purge)
        if not run.done:
            self._writer.add_text("settings", "    " + json.dumps(run.settings, indent=2).replace("\n", "\n    "), 0)
        self._writer.flush()

    def round(self, row: Row) -> None:
        for name, value in scalars(row).items():
            self._writer.add_scalar(name, value, row["round"])
        for repair in row.get("repairs", []):
            self._writer.add_text("repairs", str(repair.get("reason", "")), row["round"])
        self._writer.flush()  # who looks sees the round

    def end(self, summary: dict[str, Any] | None) -> None:
        if self._writer is not None:
            self._writer.close()


class MLflow(Observer):
    """A run of MLflow's, in the experiment that the dataset names; a resumed run goes on in the same one."""

    def __init__(self) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from mlflow import MlflowClient
        except ImportError as error:
            raise MissingExtra("--track mlflow", "mlflow") from error
        self._client_type: Any = MlflowClient
        self._client: Any = None
        self._id = ""
        self._kept: Path | None = None

    def begin(self, run: RunInfo) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            home = (Path.cwd() if run.path is None else run.path.parent) / "mlruns"
            home.mkdir(parents=True, exist_ok=True)
            uri = home.resolve().as_uri()
            # Newer versions want to be told that a plain folder is meant.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._kept = None if run.path is None else run.path / "artifacts" / "mlflow.json"
        with _quietly():
            self._client = self._client_type(tracking_uri=uri)
            name = str(run.settings.get("run", {}).get("dataset", "coterie"))
            experiment = self._client.get_experiment_by_name(name)
            number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
            before = self._before() if run.done else None
            if before is not None:
                self._id = before
                self._client.update_run(self._id, status="RUNNING")
                return
            self._id = self._client.create_run(number, run_name=run.name).info.run_id
            if self._kept is not None:
                self._kept.write_text(json.dumps({"run_id": self._id}))
            for table, values in run.settings.items():
                for key, value in values.items() if isinstance(values, dict) else ():
                    self._client.log_param(self._id, f"{table}.{key}", str(value)[:500])

    def _before(self) -> str | None:
        """The run that a resumed one goes on with, if it is still there."""
        try:
            assert self._kept is not None
            found = str(json.loads(self._kept.read_text())["run_id"])
            self._client.get_run(found)
        except Exception:  # not there, damaged, or unknown to this server: a new one is made
            return None
        return found

    def round(self, row: Row) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        # Names of MLflow's may hold slashes.
        metrics = [Metric(name, value, now, row["round"]) for name, value in scalars(row).items()]
        with _quietly():
            self._client.log_batch(self._id, metrics=metrics)

    def end(self, summary: dict[str, Any] | None) -> None:
        if self._client is None:
            return
        with _quietly():
            if summary is not None:
                final = {metric.place[0] for metric in metrics("table")} | {"seconds"}
                for name, value in scalars({key: summary.get(key) for key in final}).items():
                    self._client.log_metric(self._id, f"final/{name}", value)
            self._client.set_terminated(self._id, "FINISHED" if summary is not None else "KILLED")


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the folder store warns of itself at every turn
        yield


TRACKERS: dict[str, Callable[[], Observer]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


class Careful(Observer):
    """Another observer that may fail: the first time it is told, and from then on it is left out."""

    def __init__(self, name: str, inner: Observer, say: Callable[[str], None]) -> None:
        self._name, self._inner, self._say = name, inner, say
        self._failed = False

    def begin(self, run: RunInfo) -> None:
        self._try(lambda: self._inner.begin(run))

    def round(self, row: Row) -> None:
        self._try(lambda: self._inner.round(row))

    def end(self, summary: dict[str, Any] | None) -> None:
        self._try(lambda: self._inner.end(summary))

    def _try(self, what: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            what()
        except Exception as error:  # whatever it is, it must not stop a run of hours
            self._failed = True
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self._say(f"note: {self._name} is left out from here on: {reason}")


def trackers(names: list[str] | None, say: Callable[[str], None] = lambda text: None) -> list[Observer]:
    """The trackers of these names; one that is not known or not installed is refused before anything runs."""
    found: list[Observer] = []
    for name in dict.fromkeys(names or []):
        if name not in TRACKERS:
            raise UnknownName("tracker", name, TRACKERS)
        found.append(Careful(name, TRACKERS[name](), say))
    return found
