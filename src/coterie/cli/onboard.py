"""`coterie onboard`, `export`: new clients for a finished run, and its models for use elsewhere."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from coterie.cli.flags import JsonFlag, OverrideFlag, RunArgument, TrustFlag, takes, whole
from coterie.cli.output import say, score_text, stdout, table_of
from coterie.errors import ConfigError, RunError, StorageError
from coterie.runs.metrics import METRICS, NUMBER, PERCENT
from coterie.runs.settings import RunSettings, Tables, merge
from coterie.trust import write_whole
from coterie.views.words import safe_text

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from coterie.runs.newcomers import Newcomers
    from coterie.runs.result import Result

_SHOWN = 40


@takes((RunSettings, "scenario", "clients", "data_dir"), settable=("dataset", "scenario"), config=False)
def onboard(
    *,
    path: RunArgument,
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", "-d", help="Data of the new clients: named dataset, or path of your own data."),
    ] = None,
    tables: Tables,
    seed: Annotated[int | None, whole("--seed", "seed of the new clients", "the run's seed + 1", ge=0)] = None,
    name: Annotated[
        str | None, typer.Option(help="Write to onboard-NAME beside the run; by default the run's name.")
    ] = None,
    trust: TrustFlag = False,
    override: OverrideFlag = False,
    json_: JsonFlag = False,
) -> None:
    """Add new clients to a finished run. Each is assigned by the run's own rule, adapted and evaluated."""
    if dataset is None:
        raise ConfigError("onboard needs the data of the new clients: --dataset NAME, or a path of your own data.")
    from coterie.runs.execution import open_run
    from coterie.runs.experiment import resolve
    from coterie.runs.newcomers import like_the_run

    result = open_run(path, trust=trust, override=override)
    run = result.settings["run"]
    # Only the data is needed: FedAvg accepts any number of clients.
    own = {"algorithm": "fedavg", "dataset": dataset, "seed": run["seed"] + 1 if seed is None else seed}
    given = {"data_dir": run["data_dir"]} if "data_dir" in run else {}
    experiment = resolve(merge({"run": given}, tables, {"run": own}))
    newcomers = result.onboard(like_the_run(experiment.federation(), result.federation))
    folder = _make_folder(path, name)
    try:
        report = _write(folder, result, newcomers)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)  # all or nothing
        if isinstance(error, OSError):
            raise StorageError(f"{folder} cannot be written: {error.strerror or error}.") from error
        raise
    if json_:
        print(json.dumps({"path": str(folder), **report}))
        return
    stdout().print(_table(report, path))
    say(f"written: {folder}")


def _make_folder(path: Path, name: str | None) -> Path:
    """A new folder beside the run; an existing name is an error, the default name gets a free number."""
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
            raise StorageError(f"The folder {folder} cannot be created: {error.strerror}.") from error
    raise AssertionError


def _write(folder: Path, result: Result, newcomers: Newcomers) -> dict[str, Any]:
    """Write the personal models and `clients.json`; its content."""
    rows, task = newcomers.rows(), newcomers.engine.task
    (folder / "models").mkdir()
    for client, served in newcomers.models():
        file = f"models/{quote(rows[client]['name'], safe=' ')}.safetensors"
        weights = served.module(task.module, task.num_classes, task.input_shape).state_dict()
        save_weights(weights, folder / file, newcomers.federation.input_facts())
        rows[client]["model"] = file
    report = {
        "run": str(result.path),
        "algorithm": result.summary["algorithm"],
        "dataset": newcomers.federation.name,
        **newcomers.summary(),
        "clients": rows,
    }
    write_whole(folder / "clients.json", (json.dumps(report, indent=2) + "\n").encode())
    return report


def _table(report: dict[str, Any], path: Path) -> Table:
    clients = report["clients"]
    key, form = ("r2", METRICS["r2"].format) if "r2" in clients[0] else ("accuracy", PERCENT)
    kind = (
        "" if report["right_kind"] is None else f", in a cluster of their kind {PERCENT.text(report['right_kind'])} %"
    )
    score = f"{score_text(report)}, ARI with members {NUMBER.text(report['ari'])}{kind}"
    title = f"{len(clients)} new clients in {path} ({report['algorithm']}): {score}"
    rows = []
    for row in clients[:_SHOWN]:
        cells = ["-" if row[key] is None else str(row[key]) for key in ("cluster", "group")]
        rows.append([row["name"], *cells, form.text(row[key])])
    if len(clients) > _SHOWN:
        rows.append([f"... and {len(clients) - _SHOWN} more in clients.json"])
    return table_of(title, ("client", "cluster", "true group", "R2" if key == "r2" else key), rows, ["client"])


def export(
    path: RunArgument,
    client: Annotated[str | None, typer.Option(help="Export the model of this client.")] = None,
    cluster: Annotated[int | None, whole("--cluster", "export the model of this cluster: 0, 1, ..., K-1")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; by default RUN-WHICH.safetensors.")
    ] = None,
    trust: TrustFlag = False,
    override: OverrideFlag = False,
    json_: JsonFlag = False,
) -> None:
    """Export one model of a finished run. It is a state_dict (safetensors), to load into your own module.

    The metadata of the file say how inputs are scaled, their shape, and the classes.

    A client that is served with a mixture of models gets the state_dict of a `coterie.MixtureModel`.
    """
    if (client is None) == (cluster is None):
        raise ConfigError("export needs one of --client NAME and --cluster K.")
    from coterie.runs.execution import open_run

    result = open_run(path, trust=trust, override=override)
    if client is not None:
        weights, which = result.client_state_dict(client), client
    else:
        assert cluster is not None
        weights, which = result.cluster_state_dict(cluster), f"cluster-{cluster}"
    facts = result.federation.input_facts()
    run_name = Path(os.path.abspath(path)).name
    file = Path(f"{run_name}-{quote(which, safe=' ')}.safetensors") if out is None else out
    try:
        save_weights(weights, file, facts)
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error.strerror or error}.") from error
    if json_:
        shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
        print(json.dumps({"file": str(file), "tensors": shapes, "metadata": facts}))
    else:
        load = f"safetensors.torch.load_file('{file}')"
        is_mixture = "models.0" in ".".join(weights) and "weights" in weights
        how = (
            f"coterie.MixtureModel.from_state_dict(module, {load})" if is_mixture else f"module.load_state_dict({load})"
        )
        print(safe_text(f"{file}: {len(weights)} tensors; {how}"))
        print(safe_text(f"inputs: {facts['inputs']}"))


def save_weights(weights: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    """Write a state_dict completely, or leave the old file as it was."""
    import safetensors.torch

    content = safetensors.torch.save({name: tensor.contiguous() for name, tensor in weights.items()}, metadata)
    write_whole(file, content)
