"""`coterie compare`: several methods on the same federation, over several seeds, in one table."""

from __future__ import annotations

import contextlib
import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from coterie.api import Setup, execute
from coterie.cli import run as flags_of
from coterie.cli.output import RoundProgress, megabytes, stderr, stdout, stop_on_ctrl_c
from coterie.config import apply_set, merge, read_tables, resolve_each
from coterie.errors import ConfigError, CoterieError, Interrupted
from coterie.runs import RunFolder

DEFAULT = ("local", "fedavg", "ifca", "fesem")


def compare(
    algorithm: Annotated[
        list[str] | None, typer.Option("--algorithm", "-a", help="A method; give it several times.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many seeds: 0 ... N-1.")] = "1",
    dataset: flags_of.DatasetFlag = None,
    scenario: flags_of.ScenarioFlag = None,
    model: flags_of.ModelFlag = None,
    clients: flags_of.ClientsFlag = None,
    clusters: flags_of.ClustersFlag = None,
    rounds: flags_of.RoundsFlag = None,
    epochs: flags_of.EpochsFlag = None,
    steps: flags_of.StepsFlag = None,
    batch_size: flags_of.BatchFlag = None,
    lr: flags_of.LrFlag = None,
    momentum: flags_of.MomentumFlag = None,
    participation: flags_of.ParticipationFlag = None,
    unseen: flags_of.UnseenFlag = None,
    dropout: flags_of.DropoutFlag = None,
    engine: flags_of.EngineFlag = None,
    device: flags_of.DeviceFlag = None,
    data_dir: flags_of.DataFlag = None,
    out: flags_of.OutFlag = Path("runs"),
    name: flags_of.NameFlag = None,
    config: flags_of.ConfigFlag = None,
    set_: flags_of.SetFlag = None,
    evaluate_every: flags_of.EvaluateFlag = None,
    checkpoint_every: flags_of.CheckpointFlag = None,
    json_: flags_of.JsonFlag = False,
    quiet: flags_of.QuietFlag = False,
) -> None:
    """Compare methods on the same data, first weights and cohorts; mean and standard deviation over seeds."""
    flags = {key: value for key, value in locals().items() if key not in ("algorithm", "seeds")}
    count = flags_of.parse_int("seeds", seeds) or 0
    if count < 1:
        raise ConfigError(f"--seeds must be an int >= 1. Got '{seeds}' instead.")
    names = list(dict.fromkeys(algorithm or DEFAULT))
    layers = merge(read_tables(config) if config else {}, flags_of.flags_to_tables(flags))
    tables = apply_set(layers, set_ or [])
    # Everything is resolved and checked before anything runs: a bad name or number costs nothing.
    plans = resolve_each(tables, names, count)
    federation = plans[names[0], 0].federation()
    for key in names:
        plans[key, 0].algorithm.check(len(federation))
    root = _make_root(out, name, next(iter(plans.values())).dataset)
    hidden = quiet or json_
    summaries: dict[str, list[dict[str, Any]]] = {key: [] for key in names}
    folder: RunFolder | None = None
    try:
        with stop_on_ctrl_c(hidden) as pressed:
            for (key, seed), experiment in plans.items():
                if key == names[0] and seed:
                    federation = experiment.federation()  # of this seed, the same for every method
                setup = Setup.of(experiment, federation)
                folder = RunFolder.create(root, f"{_file_name(key)}-s{seed}", "", experiment.tables())
                with RoundProgress(setup.schedule.rounds, f"{key} seed {seed}", hidden, lines=1) as progress:
                    summaries[key].append(execute(setup, folder, progress, pressed).summary)
    except (Interrupted, KeyboardInterrupt):
        going = f"; the one that was running goes on with 'coterie resume {folder.path}'" if folder else ""
        raise Interrupted(f"Stopped; finished runs are in {root}{going}.") from None
    except CoterieError:
        with contextlib.suppress(OSError):
            root.rmdir()  # goes only if no run is in it
        raise
    rows = [_row(key, found) for key, found in summaries.items()]
    (root / "comparison.json").write_text(json.dumps(rows, indent=2) + "\n")
    if json_:
        print(json.dumps({"path": str(root), "dataset": summaries[names[0]][0]["dataset"], "rows": rows}))
        return
    first = summaries[names[0]][0]
    stdout().print(_table(rows, f"{first['dataset']}, {first['clients']} clients", count))
    stderr().print(f"run folders: {root}", soft_wrap=True)


def _file_name(key: str) -> str:
    return key.replace(":", "-").replace("/", "-")


def _make_root(out: Path, name: str | None, dataset: str) -> Path:
    """A folder of its own for the comparison's runs."""
    folder = RunFolder.create(out, name, f"compare-{Path(dataset).stem}", {"comparison": {"dataset": dataset}})
    folder.unlock()
    for item in ("config.toml", ".lock"):
        (folder.path / item).unlink()
    (folder.path / "artifacts").rmdir()
    return folder.path


def _mean_and_spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0}


def _row(key: str, summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """One method over all seeds."""

    def over(*path: str) -> dict[str, float] | None:
        values = []
        for summary in summaries:
            value: Any = summary
            for part in path:
                value = None if value is None else value[part]
            if value is None:
                return None
            values.append(float(value))
        return _mean_and_spread(values)

    return {
        "algorithm": key,
        "seeds": len(summaries),
        "accuracy": {part: over("accuracy", part) for part in ("macro", "micro", "bottom5")},
        "f1": {"macro": over("f1", "macro")},
        "loss": {"macro": over("loss", "macro")},
        "ari": over("ari"),
        "unseen": {"macro": over("unseen", "accuracy", "macro"), "ari": over("unseen", "ari")},
        "bytes": {part: over("bytes", part) for part in ("down", "up")},
        "start_bytes": {part: over("bytes", "start", part) for part in ("down", "up")},
        "seconds": over("seconds", "total"),
    }


def _table(rows: list[dict[str, Any]], title: str, seeds: int) -> Table:
    table = Table(title=f"{title}, {seeds} seed(s); mean ± standard deviation", title_justify="left")
    table.add_column("method", style="bold", no_wrap=True)
    for column in ("accuracy", "5 worst", "F1", "ARI", "down", "up", "start", "seconds"):
        table.add_column(column, justify="right")

    def cell(value: dict[str, float] | None, factor: float, digits: int) -> str:
        if value is None:
            return "-"
        text = f"{factor * value['mean']:.{digits}f}"
        return f"{text} ±{factor * value['std']:.{digits}f}" if seeds > 1 else text

    scored = [row["accuracy"]["macro"]["mean"] for row in rows if row["accuracy"]["macro"]]
    for row in rows:
        macro = row["accuracy"]["macro"]
        shown = cell(macro, 100, 2)
        if macro and macro["mean"] == max(scored):
            shown = f"[bold green]{shown}[/]"
        start = row["start_bytes"]["down"]["mean"] + row["start_bytes"]["up"]["mean"]
        table.add_row(
            row["algorithm"],
            shown,
            cell(row["accuracy"]["bottom5"], 100, 2),
            cell(row["f1"]["macro"], 100, 2),
            cell(row["ari"], 1, 2),
            megabytes(int(row["bytes"]["down"]["mean"])),
            megabytes(int(row["bytes"]["up"]["mean"])),
            megabytes(int(start)) if start else "-",
            cell(row["seconds"], 1, 1),
        )
    return table
