"""`coterie run`, `resume`, `show`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from coterie.cli.flags import (
    DataFlag,
    JsonFlag,
    NameFlag,
    NetworkFlag,
    OutFlag,
    OverrideFlag,
    QuietFlag,
    RunArgument,
    TrackFlag,
    TrustFlag,
    takes,
    whole,
)
from coterie.cli.output import RoundProgress, clock, decision_lines, say, stdout, stop_on_ctrl_c, summary_table
from coterie.client.settings import WorkSettings
from coterie.errors import Interrupted
from coterie.runs.accounting import with_epsilon
from coterie.runs.settings import ClusterSettings, RunSettings, Schedule, Tables
from coterie.settings import counted
from coterie.views.words import safe_text

if TYPE_CHECKING:
    from coterie.runs.experiment import Experiment
    from coterie.runs.folder import RunFolder
    from coterie.runs.observers import Observer


@takes(RunSettings, ClusterSettings, Schedule, WorkSettings)
def run(
    *,
    tables: Tables,
    out: OutFlag = Path("runs"),
    name: NameFlag = None,
    track: TrackFlag = None,
    json_: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Train one method on one dataset. The defaults need no download: coterie on rotated-digits."""
    from coterie.runs.choose_k import with_chosen_k
    from coterie.runs.folder import RunFolder
    from coterie.runs.trackers import trackers

    also = trackers(track, say)
    experiment, choice = with_chosen_k(tables, lambda text: say(text, quiet or json_))
    folder = RunFolder.create(out, name, experiment.default_name, experiment.tables())
    if choice is not None:
        folder.write_json("artifacts/choose-k.json", choice.to_dict())
    say(_opening(experiment), quiet or json_)
    run_to_end(experiment, folder, json_, quiet, also)


def resume(
    path: RunArgument,
    rounds: Annotated[
        int | None, whole("--rounds", "extend the run, finished or not, to this many rounds in all", ge=1)
    ] = None,
    data: DataFlag = None,
    model: NetworkFlag = None,
    track: TrackFlag = None,
    trust: TrustFlag = False,
    override: OverrideFlag = False,
    json_: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Resume a stopped run, or extend a finished one."""
    from coterie.runs.extension import extended
    from coterie.runs.folder import RunFolder
    from coterie.runs.opening import Given, stored_experiment
    from coterie.runs.trackers import trackers

    also = trackers(track, say)
    folder = RunFolder.open(path)
    summary = folder.summary()
    if summary is not None and rounds in (None, summary["rounds"]):
        say(f"{path} is already finished: {summary['rounds']} rounds; nothing to do.", quiet or json_)
        _print_summary(summary, json_)
        return
    experiment = stored_experiment(folder, Given(data, model), trust=trust)
    with folder.held():
        if rounds is not None:
            experiment = extended(folder, experiment, rounds, override)
        run_to_end(experiment, folder, json_, quiet, also, override)


def run_to_end(
    experiment: Experiment,
    folder: RunFolder,
    json_: bool,
    quiet: bool,
    also: Sequence[Observer] = (),
    override: bool = False,
) -> None:
    """Run or resume with progress and Ctrl-C, and print the result."""
    from coterie.runs.execution import execute
    from coterie.runs.observers import Several

    hidden = quiet or json_
    for note in experiment.notes:
        say(f"note: {note}", hidden)
    try:
        with (
            RoundProgress(experiment.schedule.rounds, experiment.algorithm_name, hidden) as progress,
            stop_on_ctrl_c(hidden) as pressed,
        ):
            result = execute(experiment, folder, Several([progress, *also]), pressed, override=override)
    except (Interrupted, KeyboardInterrupt) as error:
        said = str(error) or "Stopped at once; rounds since the last checkpoint will be repeated."
        raise Interrupted(f"{said} Resume with 'coterie resume {folder.path}'.") from None
    _print_summary(result.summary, json_)


def show(path: RunArgument, json_: JsonFlag = False) -> None:
    """Show the result of a run, or its progress."""
    from coterie.runs.files import Files

    files = Files(path)
    files.config()
    summary = files.summary()
    if summary is not None:
        _print_summary(summary, json_)
        return
    from coterie.runs.reading import read_run

    rows = files.rows()
    run = read_run(path, whole=False)
    if json_:
        last = rows[-1] if rows else None
        progress = {"state": run.state, "seconds_left": run.seconds_left, "rounds_done": len(rows), "last": last}
        print(json.dumps({"path": str(path), "finished": False, **progress}))
        return
    what = f"{run.algorithm} on {run.dataset}"
    print(safe_text(f"{path}: {what}, not finished: round {len(rows)} of {run.planned}."))
    if rows:
        print(safe_text(RoundProgress.numbers(rows[-1])))
        for line in decision_lines(run.decisions, len(run.sizes[-1])):
            print(safe_text(line))
    if run.state == "running":
        left = "" if run.seconds_left is None else f", about {clock(run.seconds_left)} left"
        print(f"It is running{left}.")
    else:
        print(safe_text(f"Resume with 'coterie resume {path}'."))


def _opening(experiment: Experiment) -> str:
    """The run in one line, with the defaults of the dataset."""
    work, settings = experiment.work, experiment.model_settings
    length = counted(work.epochs, "epoch") if work.steps is None else counted(work.steps, "step")
    chosen = f"({', '.join(f'{key}={value}' for key, value in settings.items())})" if settings else ""
    parts = [
        f"{experiment.algorithm_name} on {experiment.dataset}",
        counted(len(experiment.federation()), "client"),
        f"model {experiment.model}{chosen}",
        f"{_optimizer(work)}lr {work.lr:g}, {length}, batch {work.batch_size}, momentum {work.momentum:g}",
        f"inputs {experiment.federation().scaling}",
        f"seed {experiment.schedule.seed}",
    ]
    return " · ".join(parts)


def _optimizer(work: WorkSettings) -> str:
    """The optimizer and the schedule, where they are not the defaults."""
    chosen = [name for name in (work.optimizer, work.schedule) if name not in ("sgd", "constant")]
    return "".join(f"{name}, " for name in chosen)


def _print_summary(summary: dict[str, Any], json_: bool) -> None:
    if json_:
        print(json.dumps(with_epsilon(summary)))
    else:
        stdout().print(summary_table(summary))
