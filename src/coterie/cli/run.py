"""`coterie run`, `resume`, `show`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.output import RoundProgress, clock, stderr, stdout, stop_on_ctrl_c, summary_table
from coterie.errors import ConfigError, Interrupted, RunError
from coterie.runs.choose_k import Choice, choose_k
from coterie.runs.execution import execute
from coterie.runs.experiment import Experiment, Tables, apply_set, merge, read_tables, resolve
from coterie.runs.folder import RunFolder
from coterie.runs.observers import Observer, Several
from coterie.runs.reading import read_run
from coterie.runs.trackers import trackers

AUTO = "auto"  # number of clusters: choose it before the run

Text = str | None
AlgorithmFlag = Annotated[Text, typer.Option("--algorithm", "-a", help="Method; see 'coterie list algorithms'.")]
DatasetFlag = Annotated[Text, typer.Option("--dataset", "-d", help="Named dataset, or a path to your own .npz.")]
ScenarioFlag = Annotated[Text, typer.Option(help="Who holds which samples; by default the dataset's own.")]
ModelFlag = Annotated[Text, typer.Option(help="Named network, or module:callable.")]
ClientsFlag = Annotated[Text, typer.Option(help="Number of clients.")]
ClustersFlag = Annotated[
    Text, typer.Option("--clusters", "-k", help="Number of clusters K; 'auto' in run: chosen as by choose-k.")
]
RoundsFlag = Annotated[Text, typer.Option(help="Number of rounds.")]
EpochsFlag = Annotated[Text, typer.Option(help="Passes over a client's samples in a round.")]
StepsFlag = Annotated[Text, typer.Option(help="Steps of a client in a round, instead of epochs.")]
BatchFlag = Annotated[Text, typer.Option("--batch-size", help="Samples of a step, or 'full'.")]
LrFlag = Annotated[Text, typer.Option(help="Step size.")]
MomentumFlag = Annotated[Text, typer.Option(help="Momentum of the clients' SGD.")]
ParticipationFlag = Annotated[Text, typer.Option(help="Share of the clients in a round, in (0, 1].")]
UnseenFlag = Annotated[Text, typer.Option(help="Share of the clients that is held out and met at the end, in [0, 1).")]
DropoutFlag = Annotated[Text, typer.Option(help="Share of a cohort that fails to answer, in [0, 1).")]
AttackFlag = Annotated[Text, typer.Option(help="Simulated harm: 'sign_flip', 'gaussian' or 'label_flip'.")]
AttackersFlag = Annotated[Text, typer.Option(help="Share of the clients that attack; 0.2 if there is an attack.")]
CorruptFlag = Annotated[Text, typer.Option(help="Share of the answers that arrive as NaN (simulated).")]
SeedFlag = Annotated[Text, typer.Option(help="What all randomness hangs on.")]
EngineFlag = Annotated[Text, typer.Option(help="'vectorized' (fast) or 'loop' (reference).")]
DeviceFlag = Annotated[Text, typer.Option(help="'auto', 'cpu' or 'cuda'.")]
DataFlag = Annotated[Text, typer.Option("--data-dir", help="Folder of stored data; by default COTERIE_DATA.")]
OutFlag = Annotated[Path, typer.Option(help="Folder that run folders are made in.")]
NameFlag = Annotated[Text, typer.Option(help="Name of the run folder.")]
ConfigFlag = Annotated[Path | None, typer.Option(help="TOML file with the same settings; flags override it.")]
SetFlag = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any field: algorithm.prox=0.1, scenario.groups=2, work.weight_decay=1e-4 ..."),
]
EvaluateFlag = Annotated[Text, typer.Option("--evaluate-every", help="Evaluate every so many rounds.")]
CheckpointFlag = Annotated[Text, typer.Option("--checkpoint-every", help="Seconds between checkpoints; 0: each round.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]
TrackFlag = Annotated[
    list[str] | None, typer.Option("--track", help="Also write to 'tensorboard' or 'mlflow'; give it several times.")
]
QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


def parse_int(name: str, text: Text) -> int | None:
    """A whole number, or one sentence about what was typed instead."""
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--{name} must be an int. Got '{text}' instead.") from None


def parse_float(name: str, text: Text) -> float | None:
    """A finite number, or one sentence about what was typed instead."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"--{name} must be a number. Got '{text}' instead.")
    return value


def flags_to_tables(flags: dict[str, Any]) -> Tables:
    """The flags of `run` and `compare` as tables; those not given are left out."""
    batch, clusters = flags["batch_size"], flags["clusters"]
    tables = {
        "run": {
            "algorithm": flags.get("algorithm"),
            "dataset": flags["dataset"],
            "scenario": flags["scenario"],
            "model": flags["model"],
            "clients": parse_int("clients", flags["clients"]),
            "rounds": parse_int("rounds", flags["rounds"]),
            "participation": parse_float("participation", flags["participation"]),
            "unseen": parse_float("unseen", flags.get("unseen")),
            "dropout": parse_float("dropout", flags.get("dropout")),
            "attack": flags.get("attack"),
            "attackers": parse_float("attackers", flags.get("attackers")),
            "corrupt": parse_float("corrupt", flags.get("corrupt")),
            "seed": parse_int("seed", flags.get("seed")),
            "engine": flags["engine"],
            "device": flags["device"],
            "data_dir": flags["data_dir"],
            "evaluate_every": parse_int("evaluate-every", flags["evaluate_every"]),
            "checkpoint_every": parse_float("checkpoint-every", flags["checkpoint_every"]),
        },
        "algorithm": {"num_clusters": AUTO if clusters == AUTO else parse_int("clusters", clusters)},
        "work": {
            "epochs": parse_int("epochs", flags["epochs"]),
            "steps": parse_int("steps", flags["steps"]),
            "batch_size": batch if batch == "full" else parse_int("batch-size", batch),
            "lr": parse_float("lr", flags["lr"]),
            "momentum": parse_float("momentum", flags["momentum"]),
        },
    }
    return {name: {k: v for k, v in table.items() if v is not None} for name, table in tables.items()}


def tables_of(flags: dict[str, Any], config: Path | None, assignments: list[str] | None) -> Tables:
    """Config file, flags and --set, one over the other."""
    layers = merge(read_tables(config) if config else {}, flags_to_tables(flags))
    return apply_set(layers, assignments or [])


def with_chosen_k(tables: Tables, hidden: bool) -> tuple[Experiment, Choice | None]:
    """The experiment; where its number of clusters is 'auto', a number is chosen first."""
    if tables["algorithm"].get("num_clusters") != AUTO:
        return resolve(tables).loaded(), None
    trial = resolve(merge(tables, {"algorithm": {"num_clusters": 1}})).loaded()
    if not hasattr(trial.algorithm, "num_clusters"):
        return trial, None  # its note says that clusters are not used
    _say(f"choosing the number of clusters of {trial.dataset}", hidden)
    choice = choose_k(trial, last=None)
    experiment = resolve(merge(tables, {"algorithm": {"num_clusters": choice.recommended}}))
    _say(f"chosen: {choice.recommended} clusters, because {choice.reason}", hidden)
    return replace(experiment, data=trial.data), choice


def run(
    algorithm: AlgorithmFlag = None,
    dataset: DatasetFlag = None,
    scenario: ScenarioFlag = None,
    model: ModelFlag = None,
    clients: ClientsFlag = None,
    clusters: ClustersFlag = None,
    rounds: RoundsFlag = None,
    epochs: EpochsFlag = None,
    steps: StepsFlag = None,
    batch_size: BatchFlag = None,
    lr: LrFlag = None,
    momentum: MomentumFlag = None,
    participation: ParticipationFlag = None,
    unseen: UnseenFlag = None,
    dropout: DropoutFlag = None,
    attack: AttackFlag = None,
    attackers: AttackersFlag = None,
    corrupt: CorruptFlag = None,
    seed: SeedFlag = None,
    engine: EngineFlag = None,
    device: DeviceFlag = None,
    data_dir: DataFlag = None,
    out: OutFlag = Path("runs"),
    name: NameFlag = None,
    config: ConfigFlag = None,
    set_: SetFlag = None,
    evaluate_every: EvaluateFlag = None,
    checkpoint_every: CheckpointFlag = None,
    track: TrackFlag = None,
    json_: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Train one method on one dataset. Defaults need no network: fesem on rotated-digits."""
    flags = dict(locals())
    also = trackers(track, _say_always)
    experiment, choice = with_chosen_k(tables_of(flags, config, set_), quiet or json_)
    folder = RunFolder.create(out, name, experiment.default_name, experiment.tables())
    if choice is not None:
        folder.write_json("artifacts/choose-k.json", choice.to_dict())
    _say(_opening(experiment), quiet or json_)
    carry_through(experiment, folder, json_, quiet, also)


def resume(
    path: Annotated[Path, typer.Argument(help="The run folder.")],
    track: TrackFlag = None,
    json_: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Go on with a run that was stopped; a finished one says so."""
    also = trackers(track, _say_always)
    folder = RunFolder.open(path)
    summary = folder.summary()
    if summary is not None:
        _say(f"{path} already has its result: {summary['rounds']} rounds; nothing to do.", quiet or json_)
        _print_summary(summary, json_)
        return
    tables = folder.config()
    tables.pop("schema")
    if tables.get("run", {}).get("over_sites"):
        raise RunError(f"{path} is a run over sites; go on with the run.sh of its app, under the same name.")
    if tables.get("run", {}).get("from_python"):
        raise RunError(f"{path} was started from Python with objects of its own; resume it from there.")
    with folder.held():
        carry_through(resolve(tables), folder, json_, quiet, also)


def carry_through(
    experiment: Experiment, folder: RunFolder, json_: bool, quiet: bool, also: Sequence[Observer] = ()
) -> None:
    """Run or go on to the end, with progress, Ctrl-C, and the result printed."""
    hidden = quiet or json_
    for note in experiment.notes:
        _say(f"note: {note}", hidden)
    try:
        with (
            RoundProgress(experiment.schedule.rounds, experiment.algorithm_name, hidden) as progress,
            stop_on_ctrl_c(hidden) as pressed,
        ):
            result = execute(experiment, folder, Several([progress, *also]), pressed)
    except (Interrupted, KeyboardInterrupt) as error:
        said = str(error) or "Stopped at once; rounds since the last checkpoint will be done again."
        raise Interrupted(f"{said} Go on with 'coterie resume {folder.path}'.") from None
    _print_summary(result.summary, json_)


def show(path: Annotated[Path, typer.Argument(help="The run folder.")], json_: JsonFlag = False) -> None:
    """Show the result of a run, or how far it is."""
    folder = RunFolder.open(path)
    summary = folder.summary()
    if summary is not None:
        _print_summary(summary, json_)
        return
    rows, settings = folder.rows(), folder.config()["run"]
    run = read_run(path, whole=False)
    if json_:
        last = rows[-1] if rows else None
        told = {"path": str(path), "finished": False, "state": run.state, "seconds_left": run.seconds_left}
        print(json.dumps({**told, "rounds_done": len(rows), "last": last}))
        return
    what = f"{settings['algorithm']} on {settings['dataset']}"
    print(f"{path}: {what}, not finished: round {len(rows)} of {settings['rounds']}.")
    if rows:
        print(RoundProgress._numbers(rows[-1]))
    if run.state == "running":
        left = "" if run.seconds_left is None else f", about {clock(run.seconds_left)} left"
        print(f"It is running{left}.")
    else:
        print(f"Go on with 'coterie resume {path}'.")


def _opening(experiment: Experiment) -> str:
    """What is about to run, with the defaults that the dataset brought."""
    work = experiment.work
    length = f"{work.steps} steps" if work.steps is not None else f"{work.epochs} epochs"
    parts = [
        f"{experiment.algorithm_name} on {experiment.dataset}",
        f"{len(experiment.federation())} clients",
        f"model {experiment.model}{_settings(experiment.model_settings)}",
        f"lr {work.lr:g}, {length}, batch {work.batch_size}, momentum {work.momentum:g}",
        f"seed {experiment.schedule.seed}",
    ]
    return " · ".join(parts)


def _settings(values: Mapping[str, Any]) -> str:
    return "" if not values else "(" + ", ".join(f"{k}={v}" for k, v in values.items()) + ")"


def _say_always(text: str) -> None:
    """What must be known even of a quiet run."""
    stderr().print(text, soft_wrap=True, markup=False)


def _say(text: str, hidden: bool) -> None:
    if not hidden:
        stderr().print(text, soft_wrap=True)


def _print_summary(summary: dict[str, Any], json_: bool) -> None:
    if json_:
        print(json.dumps(summary))
    else:
        stdout().print(summary_table(summary))
