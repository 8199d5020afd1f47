"""`coterie choose-k`: how many clusters, before a long run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.flags import JsonFlag, QuietFlag, takes, whole
from coterie.cli.output import file_stem, new_folder, say, stdout, table_of
from coterie.client.settings import WorkSettings
from coterie.errors import MissingExtra
from coterie.runs.metrics import NUMBER
from coterie.runs.settings import LARGEST_K, PROBE_CLIENTS, PROBE_ROUNDS, TABLES, RunSettings, Schedule, Tables
from coterie.settings import counted

if TYPE_CHECKING:
    from rich.table import Table

    from coterie.runs.choose_k import Choice


@takes(RunSettings, WorkSettings, (Schedule, "seed"), without=("algorithm",), settable=TABLES[2:])
def choose(
    *,
    first: Annotated[int, whole("--from", "smallest K to try", ge=1)] = 1,
    last: Annotated[int | None, whole("--to", "largest K to try", f"{LARGEST_K}", ge=1)] = None,
    sample: Annotated[int, whole("--sample", "number of clients to use, at most", ge=1)] = PROBE_CLIENTS,
    rounds: Annotated[int, whole("--rounds", "rounds for each K", ge=1)] = PROBE_ROUNDS,
    tables: Tables,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the plot, choose-k-NAME.png.")] = Path(),
    json_: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Recommend a number of clusters and explain the choice.

    Trains some of the clients for a few rounds with each number and compares their accuracy on held-out samples, or
    their loss where targets are numbers (--loss mse).
    """
    from coterie.runs.choose_k import choose_k
    from coterie.runs.experiment import resolve

    new_folder(out)
    # The method is irrelevant; one cluster is valid for any number of clients.
    tables["run"]["algorithm"], tables["algorithm"] = "fesem", {"num_clusters": 1}
    experiment, hidden = resolve(tables), quiet or json_
    choice = choose_k(
        experiment, first, last, sample, rounds, observer=lambda row: say(f"K = {row.clusters} done", hidden)
    )
    plot, problem = _draw(choice, out, experiment.dataset)
    if json_:
        print(json.dumps({"dataset": experiment.dataset, **choice.to_dict(), "plot": plot}))
        return
    stdout().print(_table(choice, experiment.dataset))
    stdout().print(f"recommended: [bold]K = {choice.recommended}[/], because {choice.reason}.", soft_wrap=True)
    say(problem if plot is None else f"plot: {plot}", quiet)


def _draw(choice: Choice, out: Path, dataset: str) -> tuple[str | None, str]:
    """Write the plot; its path, or None and the reason."""
    from coterie.views import plots

    path = out / f"choose-k-{file_stem(dataset)}.png"
    try:
        figure = plots.k_curves(choice)
    except MissingExtra as error:
        return None, f"no plot: {error}"
    out.mkdir(parents=True, exist_ok=True)
    # No metadata about the program: the same numbers give the same bytes.
    figure.savefig(path, format="png", metadata={"Software": None})
    return str(path), ""


def _table(choice: Choice, dataset: str) -> Table:
    from rich.text import Text

    scores = ["held-out accuracy", f"gain over K = {choice.recommended}", "held-out loss"]
    has_classes = any(row.accuracy is not None for row in choice.rows)
    if not has_classes:
        scores = ["held-out loss", f"loss saved over K = {choice.recommended}", "held-out R2"]
    heads = ["K", *scores, "intra-cluster distance", "silhouette", "gap statistic"]
    rows = []
    for row in choice.rows:
        loss = _number(row.loss, None, ".4f")
        by_accuracy = (_percent(row.accuracy, row.accuracy_error), _percent(row.gain, row.gain_error, "+"), loss)
        by_loss = (loss, _number(row.gain, row.gain_error, "+.4f"), _number(row.r2, None, ".4f"))
        cells = (
            str(row.clusters),
            *(by_accuracy if has_classes else by_loss),
            f"{row.intra_distance:.4g}",
            NUMBER.text(row.silhouette),
            _number(row.gap, row.gap_error, ".3f"),
        )
        style = "bold green" if row.clusters == choice.recommended else ""
        rows.append([Text(cell, style) for cell in cells])
    title = f"{dataset}: {choice.clients} clients, {counted(choice.rounds, 'round')} for each K"
    return table_of(title, heads, rows)


def _percent(value: float | None, error: float | None, sign: str = "") -> str:
    """A share in percent, with its standard error if there is one."""
    return _number(value and 100 * value, error and 100 * error, f"{sign}.2f")


def _number(value: float | None, error: float | None, form: str) -> str:
    if value is None:
        return "-"
    return f"{value:{form}}" + ("" if error is None else f" ±{error:{form.lstrip('+')}}")
