"""`coterie choose-k`: how many clusters, before a long run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from coterie.cli import run as flags_of
from coterie.cli.output import number, percent, stderr, stdout
from coterie.errors import ConfigError, MissingExtra
from coterie.runs.choose_k import LARGEST, ROUNDS, SAMPLE, Choice, Row, choose_k
from coterie.runs.experiment import TABLES, apply_set, merge, read_tables, resolve
from coterie.views import plots

_SETTABLE = tuple(table for table in TABLES if table not in ("run", "algorithm"))


def choose(
    dataset: flags_of.DatasetFlag = None,
    first: Annotated[str, typer.Option("--from", help="Smallest K to try.")] = "1",
    last: Annotated[flags_of.Text, typer.Option("--to", help=f"Largest K to try; by default {LARGEST}.")] = None,
    sample: Annotated[str, typer.Option(help="Clients that take part, at most.")] = str(SAMPLE),
    rounds: Annotated[str, typer.Option(help="Rounds of FeSEM for each K.")] = str(ROUNDS),
    scenario: flags_of.ScenarioFlag = None,
    model: flags_of.ModelFlag = None,
    clients: flags_of.ClientsFlag = None,
    epochs: flags_of.EpochsFlag = None,
    steps: flags_of.StepsFlag = None,
    batch_size: flags_of.BatchFlag = None,
    lr: flags_of.LrFlag = None,
    momentum: flags_of.MomentumFlag = None,
    seed: flags_of.SeedFlag = None,
    engine: flags_of.EngineFlag = None,
    device: flags_of.DeviceFlag = None,
    data_dir: flags_of.DataFlag = None,
    config: flags_of.ConfigFlag = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A field of the data, model or work: scenario.groups=2, work.weight_decay=1e-4 ..."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the plot, choose-k-NAME.png.")] = Path(),
    json_: flags_of.JsonFlag = False,
    quiet: flags_of.QuietFlag = False,
) -> None:
    """Try several numbers of clusters on some clients for a few rounds, and recommend one, with the reason."""
    unused = ("rounds", "clusters", "participation", "evaluate_every", "checkpoint_every")  # of a long run
    flags = dict(locals()) | dict.fromkeys(unused)
    smallest, largest = _whole("from", first), None if last is None else _whole("to", last)
    size, few = _whole("sample", sample), _whole("rounds", rounds)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; name a folder to write to with -o.")
    layers = merge(read_tables(config) if config else {}, flags_of.flags_to_tables(flags))
    # The method plays no part, and neither do its settings; one cluster suits any number of clients.
    layers["run"]["algorithm"], layers["algorithm"] = "fesem", {"num_clusters": 1}
    experiment = resolve(apply_set(layers, _checked(set_ or [])))
    hidden = quiet or json_
    choice = choose_k(
        experiment,
        smallest,
        largest,
        size,
        few,
        observer=lambda row: _say(f"K = {row.clusters} done", hidden),
    )
    plot, problem = _draw(choice, out, experiment.dataset)
    if json_:
        print(json.dumps({"dataset": experiment.dataset, **choice.to_dict(), "plot": plot}))
        return
    stdout().print(_table(choice, experiment.dataset))
    stdout().print(f"recommended: [bold]K = {choice.recommended}[/], because {choice.reason}.", soft_wrap=True)
    _say(problem if plot is None else f"plot: {plot}", quiet)


def _whole(name: str, text: str) -> int:
    found = flags_of.parse_int(name, text)
    if found is None or found < 1:
        raise ConfigError(f"--{name} must be an int >= 1. Got '{text}' instead.")
    return found


def _checked(assignments: list[str]) -> list[str]:
    """Settings of a method or of a long run would be taken and change nothing."""
    for text in assignments:
        table = text.partition("=")[0].partition(".")[0].strip()
        if table in ("run", "algorithm"):
            raise ConfigError(f"--set takes fields of {', '.join(_SETTABLE)} here. Got '{text}' instead.")
    return assignments


def _draw(choice: Choice, out: Path, dataset: str) -> tuple[str | None, str]:
    """Write the plot; its path, or None and why there is none."""
    stem = Path(dataset).stem if dataset.endswith(".npz") else dataset
    path = out / f"choose-k-{re.sub(r'[^a-zA-Z0-9_.-]+', '-', stem).strip('-.') or 'own'}.png"
    try:
        figure = plots.k_curves(choice)
    except MissingExtra as error:
        return None, f"no plot: {error}"
    out.mkdir(parents=True, exist_ok=True)
    # Nothing about the program inside: the same numbers give the same bytes.
    figure.savefig(path, format="png", metadata={"Software": None})
    return str(path), ""


def _table(choice: Choice, dataset: str) -> Table:
    title = f"{escape(dataset)}: {choice.clients} clients, {choice.rounds} round(s) of FeSEM for each K"
    table = Table(title=title, title_justify="left")
    for column in ("K", "intra-cluster distance", "silhouette", "gap statistic", "validation accuracy", "loss"):
        table.add_column(column, justify="right")
    for row in choice.rows:
        style = "bold green" if row.clusters == choice.recommended else None
        table.add_row(*_cells(row), style=style)
    return table


def _cells(row: Row) -> tuple[str, ...]:
    gap = "-" if row.gap is None else f"{row.gap:.3f} ±{row.gap_error:.3f}"
    silhouette, accuracy = number(row.silhouette), percent(row.valid_accuracy)
    loss = "-" if row.valid_loss is None else f"{row.valid_loss:.4f}"
    return (str(row.clusters), f"{row.intra_distance:.4g}", silhouette, gap, accuracy, loss)


def _say(text: str, hidden: bool) -> None:
    if not hidden:
        stderr().print(text, soft_wrap=True, markup=False)  # 'coterie[report]' is no markup
