"""Many runs: one after the other, or several at a time in processes of their own.

Each run has its folder inside one root. A finished run is read from it, an interrupted one is resumed, and the others
are started; so the same call continues what was stopped. A run that fails is reported, and the others go on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from coterie.data.dataset import Dataset
from coterie.data.federation import Federation
from coterie.data.shared import map_samples, save_samples
from coterie.engines.base import resolve_device
from coterie.engines.cache import alone
from coterie.engines.settings import settings_class
from coterie.errors import CoterieError, Interrupted, RunError
from coterie.runs.checks import check_same
from coterie.runs.execution import execute
from coterie.runs.experiment import Experiment, resolve
from coterie.runs.files import Files
from coterie.runs.folder import RunFolder, to_toml
from coterie.runs.observers import Listener, Several
from coterie.runs.processes import context, start_server, usable_cores, without_ctrl_c
from coterie.runs.settings import Tables
from coterie.runs.trackers import trackers
from coterie.settings import build

Summary = dict[str, Any]
SITUATION = "situation"  # the label that is also a folder
_PATIENCE = 0.2  # seconds between looks at Ctrl-C


@dataclass(frozen=True)
class Case:
    """One run of many: its labels and its settings."""

    labels: tuple[tuple[str, str], ...]  # column, value: runs with the same labels differ only in their seed
    experiment: Experiment

    @property
    def place(self) -> str:
        """The run folder inside the root: `fesem-s0`, or `drift/fesem-s0` in a situation."""
        own = [word for (key, _), word in zip(self.labels, self.words, strict=True) if key != SITUATION]
        plain = "-".join(own).replace(":", "-").replace("/", "-")
        name = f"{plain}-s{self.seed}"
        situation = dict(self.labels).get(SITUATION)
        return name if situation is None else f"{situation}/{name}"

    @property
    def words(self) -> list[str]:
        """The labels in words."""
        return [value if key in ("method", SITUATION) else f"{key}={value}" for key, value in self.labels]

    @property
    def title(self) -> str:
        """The run in words: "drift fesem seed 0"."""
        return f"{' '.join(self.words)} seed {self.seed}"

    @property
    def seed(self) -> int:
        return self.experiment.schedule.seed

    @cached_property
    def tables(self) -> Tables:
        """The settings as config.toml holds them."""
        return self.experiment.tables()

    @property
    def samples_key(self) -> str:
        """Equal for cases with the same samples, however partitioned."""
        experiment = self.experiment
        drawn = None if getattr(experiment.source, "is_fixed", False) else (experiment.clients, self.seed)
        # Paths are whole in the tables, which other processes get.
        source = type(experiment.source).__name__
        return repr((source, self.tables["dataset"], self.tables["run"].get("data_dir"), drawn))

    @property
    def data_key(self) -> str:
        """Equal for cases with the same federation."""
        run = (self.experiment.clients, self.seed, self.tables["run"].get("scenario"))
        return repr((self.samples_key, run, self.tables["scenario"]))


@dataclass(frozen=True)
class Outcome:
    """What became of a case: a summary, or the reason why there is none."""

    case: Case
    summary: Summary | None = None
    problem: str | None = None
    was_there: bool = False  # finished before this call


class Loader:
    """Federations of cases. The last one and its samples are kept: neighbouring cases share them.

    With a folder, samples lie in it, and all processes that load from it hold one copy.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._samples: tuple[str, Dataset] | None = None
        self._federation: tuple[str, Federation] | None = None

    def share(self, folder: Path) -> None:
        """Move the samples that are held into this folder."""
        held, self._samples, self._federation, self._folder = self._samples, None, None, folder
        if held is not None:
            with contextlib.suppress(OSError, SafetensorError):  # no space: each process loads its own
                save_samples(_file(folder, held[0]), held[1])

    def federation(self, case: Case) -> Federation:
        """The clients of a case and their data."""
        if case.experiment.source is None:
            return case.experiment.federation()
        if self._federation is None or self._federation[0] != case.data_key:
            if self._samples is None or self._samples[0] != case.samples_key:
                self._samples = case.samples_key, self._load(case)
            self._federation = case.data_key, case.experiment.federation(self._samples[1])
        return self._federation[1]

    def _load(self, case: Case) -> Dataset:
        if self._folder is None:
            return case.experiment.samples()
        path = _file(self._folder, case.samples_key)
        with alone(path):  # of several processes one reads the source
            if not path.exists():
                samples = case.experiment.samples()
                try:
                    save_samples(path, samples)
                except (OSError, SafetensorError):
                    return samples
            return map_samples(path)


def _file(folder: Path, key: str) -> Path:
    return folder / f"samples-{hashlib.sha256(key.encode()).hexdigest()[:24]}.safetensors"


def check_cases(cases: Sequence[Case], loader: Loader) -> None:
    """Find what cannot work before the first run; of several seeds, only the first is partitioned."""
    seen: set[str] = set()
    for case in cases:
        if case.seed != cases[0].seed:
            continue
        try:
            federation = loader.federation(case)
            case.experiment.algorithm.check(len(federation))
            if case.data_key not in seen:
                seen.add(case.data_key)
                resolve_device(case.experiment.device)
                known = settings_class(case.experiment.engine)
                if known is not None:
                    build(known, case.experiment.engine_settings, "engine")
                replace(case.experiment, data=federation).task()
        except CoterieError as error:
            if SITUATION not in dict(case.labels):
                raise
            raise RunError(f"Situation '{dict(case.labels)[SITUATION]}': {error}") from error


def check_folders(cases: Sequence[Case], root: Path, ignored: Sequence[str] = (), option: str = "--name") -> None:
    """Refuse a root whose runs have other settings than the cases; `ignored` are fields of [run] that may differ."""
    for case in cases:
        path = root / case.place
        if not (path / "config.toml").exists():
            continue
        here = tomllib.loads(to_toml(case.tables))
        check_same(path, RunFolder(path).config(), here, case.experiment.defaults(), ignored, option)


Watch = Callable[[Case], AbstractContextManager[Listener | None]]
Say = Callable[[str], None]


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def run_cases(
    cases: Sequence[Case],
    root: Path,
    *,
    jobs: int = 1,
    track: Sequence[str] = (),
    say: Say = _to_stderr,
    loader: Loader | None = None,
    watch: Watch = lambda case: nullcontext(),
    should_stop: Callable[[], bool] = lambda: False,
) -> Generator[Outcome, None, None]:
    """Run the cases in folders inside `root`, and yield each outcome when it is there.

    Cases with the same settings are run once. `watch` gives an observer of the rounds of a case; in several processes
    there is none. When `should_stop` becomes true, the rounds in progress are finished, and Interrupted is raised.
    """
    alike: dict[str, list[Case]] = {}
    for case in cases:
        alike.setdefault(repr(case.tables), []).append(case)
    waiting: list[Case] = []
    for same in alike.values():
        summary = RunFolder(Files(root).place(same[0].place)).summary()
        if summary is None:
            waiting.append(same[0])
        else:
            yield from (Outcome(case, summary, was_there=True) for case in same)
    runs = (
        _in_turn(waiting, root, partial(trackers, list(track), say), loader or Loader(), watch, should_stop)
        if min(jobs, len(waiting)) <= 1
        else _at_once(waiting, root, list(track), loader or Loader(), min(jobs, len(waiting)), should_stop)
    )
    with contextlib.closing(runs):
        for outcome in runs:
            yield from (replace(outcome, case=case) for case in alike[repr(outcome.case.tables)])


def _in_turn(
    cases: Sequence[Case],
    root: Path,
    more: Callable[[], Sequence[Listener]],
    loader: Loader,
    watch: Watch,
    should_stop: Callable[[], bool],
) -> Generator[Outcome, None, None]:
    for case in cases:
        if should_stop():
            raise Interrupted("Stopped.")
        with watch(case) as observer:
            outcome = _outcome(case, root, lambda: [observer, *more()], loader, should_stop)
        yield outcome


def _outcome(
    case: Case,
    root: Path,
    observers: Callable[[], Sequence[Listener | None]],
    loader: Loader,
    should_stop: Callable[[], bool],
) -> Outcome:
    """Run one case; its error becomes its outcome."""
    try:
        experiment = replace(case.experiment, data=loader.federation(case))
        listeners = Several(observers())
        folder = _folder(Files(root).place(case.place), case.tables)
        return Outcome(case, execute(experiment, folder, listeners, should_stop).summary)
    except Interrupted:
        raise
    except CoterieError as error:
        return Outcome(case, problem=str(error))
    except Exception as error:  # one bad run must not end the others
        return Outcome(case, problem=f"{type(error).__name__}: {error}")


def _folder(path: Path, tables: Tables) -> RunFolder:
    """The folder of a run: a new one, or that of an interrupted run."""
    if (path / "config.toml").exists():
        return RunFolder.open(path)
    if path.is_dir() and not (path / "rounds.jsonl").exists():  # its process ended before it was complete
        shutil.rmtree(path)
    return RunFolder.create(path.parent, path.name, path.name, tables)


# ---- several at a time ----


class _Worker:
    """A process that runs one case after the other. It loads torch once, and has at most one GPU."""

    def __init__(self, root: Path, track: list[str], data: Path, threads: int, gpu: str | None, stop: Any) -> None:
        self.case: Case | None = None
        self.gpu = gpu
        self.pipe, theirs = context().Pipe()
        self.process: Any = context().Process(  # type: ignore[attr-defined]
            target=_work, args=(theirs, root, track, data, threads, gpu, stop), daemon=False
        )
        with without_ctrl_c():
            self.process.start()
        theirs.close()

    def give(self, case: Case) -> None:
        self.pipe.send((case.labels, case.tables))
        self.case = case

    def take(self) -> Outcome | None:
        """The outcome of its case; None: the run was stopped."""
        case, self.case = self.case, None
        assert case is not None
        try:
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return Outcome(case, problem=f"its process ended with code {self.process.exitcode}.")
        if kind == "stopped":
            return None
        return Outcome(case, summary=value) if kind == "summary" else Outcome(case, problem=value)

    def end(self, now: bool) -> None:
        """Let the process end, or stop it now."""
        with contextlib.suppress(OSError, ValueError):
            self.pipe.close()  # a process that waits for a case ends
        if now:
            self.process.terminate()
        self.process.join()


def gpus_of(cases: Sequence[Case]) -> list[str | None]:
    """The GPUs that processes take in turn, as CUDA_VISIBLE_DEVICES names them; [None]: all see what is there."""
    count = torch.cuda.device_count()
    if count < 2 or any(case.experiment.device not in ("auto", "cuda") for case in cases):
        return [None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(count)] if visible is None else visible.split(",")
    return [name.strip() for name in names[:count]]


def _at_once(
    cases: Sequence[Case],
    root: Path,
    track: list[str],
    loader: Loader,
    jobs: int,
    should_stop: Callable[[], bool],
) -> Generator[Outcome, None, None]:
    """The outcomes of cases that run in `jobs` processes, in the order in which they end."""
    with tempfile.TemporaryDirectory(prefix="coterie-") as folder:
        loader.share(Path(folder))
        yield from _in_processes(cases, root, track, Path(folder), jobs, should_stop)


def _in_processes(
    cases: Sequence[Case], root: Path, track: list[str], data: Path, jobs: int, should_stop: Callable[[], bool]
) -> Generator[Outcome, None, None]:
    waiting, gpus = list(reversed(cases)), gpus_of(cases)
    start_server(jobs)
    stop = context().Event()
    threads = max(1, usable_cores() // jobs)
    workers: list[_Worker] = []
    stopped = is_over = False
    try:
        while not is_over:
            if should_stop():
                stop.set()
            workers = [worker for worker in workers if worker.case is not None or worker.process.is_alive()]
            idle = [worker for worker in workers if worker.case is None]
            while waiting and not stop.is_set() and (idle or len(workers) < jobs):
                if not idle:
                    gpu = min(gpus, key=[worker.gpu for worker in workers].count)  # the one with the fewest processes
                    workers.append(_Worker(root, track, data, threads, gpu, stop))
                    idle.append(workers[-1])
                with contextlib.suppress(OSError):
                    idle.pop().give(waiting[-1])
                    waiting.pop()
            busy = {worker.pipe: worker for worker in workers if worker.case is not None}
            for pipe in wait(list(busy), timeout=_PATIENCE):
                assert isinstance(pipe, Connection)
                outcome = busy[pipe].take()
                if outcome is None:
                    stopped = True
                else:
                    yield outcome
            is_over = not any(worker.case for worker in workers) and (not waiting or stop.is_set())
        if stopped or waiting:
            raise Interrupted("Stopped.")
    finally:
        for worker in workers:
            worker.end(now=worker.case is not None)


def _work(pipe: Connection, root: Path, track: list[str], data: Path, threads: int, gpu: str | None, stop: Any) -> None:
    """The work of a process: run the cases that come, until the pipe is closed."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # no GPU is open yet
    torch.set_num_threads(threads)
    loader = Loader(data)
    with contextlib.suppress(EOFError, OSError):
        while True:
            labels, tables = pipe.recv()
            try:
                try:
                    case = Case(labels, resolve(tables))
                except CoterieError as error:
                    pipe.send(("problem", str(error)))
                    continue
                outcome = _outcome(case, root, partial(trackers, track, _to_stderr), loader, stop.is_set)
                pipe.send(("problem", outcome.problem) if outcome.summary is None else ("summary", outcome.summary))
            except Interrupted:
                pipe.send(("stopped", None))


class Clock:
    """Estimates the remaining time of many runs from those that were run here."""

    def __init__(self, total: int) -> None:
        self._left, self._ran, self._began = total, 0, 0.0

    def left(self, outcome: Outcome) -> float | None:
        """Count an outcome; the seconds that the rest will take, from the second one on."""
        self._left -= 1
        if outcome.was_there:
            return None
        self._ran += 1
        if self._ran == 1:  # it also waited for processes to start
            self._began = time.monotonic()
            return None
        return (time.monotonic() - self._began) / (self._ran - 1) * self._left
