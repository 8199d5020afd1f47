"""`coterie onboard`, `export`: new clients for a finished run, and its models for use elsewhere."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import safetensors.torch
import typer
from rich.table import Table
from torch import Tensor

from coterie.cli import run as flags_of
from coterie.cli.output import number, percent, stderr, stdout
from coterie.data.federation import Federation
from coterie.errors import ConfigError, RunError, StorageError
from coterie.nets.flat import state_dict
from coterie.runs.execution import open_run
from coterie.runs.experiment import apply_set, resolve
from coterie.runs.newcomers import Newcomers, like_the_run
from coterie.runs.result import Result

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")]
_SETTABLE = ("dataset", "scenario")
_SHOWN = 40


def onboard(
    path: RunArgument,
    dataset: flags_of.DatasetFlag = None,
    scenario: flags_of.ScenarioFlag = None,
    clients: flags_of.ClientsFlag = None,
    seed: Annotated[str | None, typer.Option(help="Who the new clients are; by default the run's seed + 1.")] = None,
    data_dir: flags_of.DataFlag = None,
    name: Annotated[str | None, typer.Option(help="Writes onboard-NAME beside the run; by default its name.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Fields of the new data: scenario.groups=2, dataset.samples=50 ..."),
    ] = None,
    json_: flags_of.JsonFlag = False,
) -> None:
    """Bring new clients into a finished run: each is assigned by the run's own rule, adapted and evaluated."""
    if dataset is None:
        raise ConfigError("--dataset says whose data the new clients have: a named dataset, or your own .npz.")
    wanted = {"dataset": dataset, "scenario": scenario, "data_dir": data_dir}
    numbers = {"clients": flags_of.parse_int("clients", clients), "seed": flags_of.parse_int("seed", seed)}
    result = open_run(path)
    federation = _new_clients(result, wanted | numbers, set_ or [])
    newcomers = result.onboard(federation)
    folder = _make_folder(path, name)
    try:
        report = _write(folder, result, newcomers)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)  # all of it or nothing
        if isinstance(error, OSError):
            raise StorageError(f"{folder} cannot be written: {error.strerror or error}.") from error
        raise
    if json_:
        print(json.dumps({"path": str(folder), **report}))
        return
    stdout().print(_table(report, path))
    stderr().print(f"written: {folder}", soft_wrap=True)


def _new_clients(result: Result, wanted: dict[str, Any], assignments: list[str]) -> Federation:
    """The federation that the flags make; as the run's network takes it."""
    for text in assignments:
        table = text.partition(".")[0].strip()
        if table not in _SETTABLE:
            raise ConfigError(
                f"onboard takes --set dataset.FIELD and scenario.FIELD; the rest is the run's. Got '{text}'."
            )
    run = result.settings["run"]
    defaults = {"seed": run["seed"] + 1, "data_dir": run.get("data_dir")}
    values = {k: v for k, v in (defaults | {k: v for k, v in wanted.items() if v is not None}).items() if v is not None}
    # The data alone: FedAvg asks nothing of them, neither a number of clients nor samples for the server.
    tables = apply_set({"run": {"algorithm": "fedavg", **values}}, assignments)
    return like_the_run(resolve(tables).federation(), result.federation)


def _make_folder(path: Path, name: str | None) -> Path:
    """A new folder beside the run; a name that is taken is refused, a default name gets the next free number."""
    home = Path(os.path.abspath(path))
    parent = path.parent if path.name == home.name else home.parent
    for count in range(1, 1_000_000):
        folder = parent / f"onboard-{name or (home.name if count == 1 else f'{home.name}-{count}')}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError as error:
            if name is not None:
                raise RunError(f"{folder} exists; choose another --name.") from error
        except OSError as error:
            raise StorageError(f"The folder {folder} cannot be made: {error.strerror}.") from error
    raise AssertionError


def _write(folder: Path, result: Result, newcomers: Newcomers) -> dict[str, Any]:
    """The personal models, and `clients.json` last; what it says."""
    rows = newcomers.rows()
    (folder / "models").mkdir()
    for client, vector in newcomers.models():
        file = f"models/{quote(rows[client]['name'], safe=' ')}.safetensors"
        save_weights(state_dict(newcomers.engine.task.module, vector), folder / file)
        rows[client]["model"] = file
    report = {
        "run": str(result.path),
        "algorithm": result.summary["algorithm"],
        "dataset": newcomers.federation.name,
        **newcomers.summary(),
        "clients": rows,
    }
    temporary = folder / ".clients.json.tmp"
    temporary.write_text(json.dumps(report, indent=2) + "\n")
    temporary.replace(folder / "clients.json")
    return report


def _table(report: dict[str, Any], path: Path) -> Table:
    accuracy = report["accuracy"] or {}
    score = f"accuracy {percent(accuracy.get('macro'))}, ARI {number(report['ari'])}"
    title = f"{len(report['clients'])} new clients in {path} ({report['algorithm']}): {score}"
    table = Table(title=title, title_justify="left")
    for column in ("client", "cluster", "true group", "accuracy"):
        table.add_column(column, justify="left" if column == "client" else "right")
    for row in report["clients"][:_SHOWN]:
        cells = ("-" if row[key] is None else str(row[key]) for key in ("cluster", "group"))
        table.add_row(row["name"], *cells, percent(row["accuracy"]))
    left = len(report["clients"]) - _SHOWN
    if left > 0:
        table.add_row(f"... and {left} more in clients.json", "", "", "")
    return table


def export(
    path: RunArgument,
    client: Annotated[str | None, typer.Option(help="The model that this client is served with.")] = None,
    cluster: Annotated[str | None, typer.Option(help="The model of this cluster, 0 ... K-1.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; by default RUN-WHICH.safetensors here.")
    ] = None,
    json_: flags_of.JsonFlag = False,
) -> None:
    """Write one model of a finished run as a plain state_dict (safetensors), to load into your own module."""
    if (client is None) == (cluster is None):
        raise ConfigError("Say which model: either --client NAME or --cluster K.")
    number_of_cluster = flags_of.parse_int("cluster", cluster)
    result = open_run(path)
    if client is not None:
        weights, which = result.client_state_dict(client), client
    else:
        assert number_of_cluster is not None
        weights, which = result.cluster_state_dict(number_of_cluster), f"cluster-{number_of_cluster}"
    run_name = Path(os.path.abspath(path)).name
    file = Path(f"{run_name}-{quote(which, safe=' ')}.safetensors") if out is None else out
    try:
        save_weights(weights, file)
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error.strerror or error}.") from error
    if json_:
        shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
        print(json.dumps({"file": str(file), "tensors": shapes}))
    else:
        print(f"{file}: {len(weights)} tensors; module.load_state_dict(safetensors.torch.load_file('{file}'))")


def save_weights(weights: dict[str, Tensor], file: Path) -> None:
    """Write a state_dict whole, or leave the old file as it was."""
    content = safetensors.torch.save({name: tensor.contiguous() for name, tensor in weights.items()})
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
