"""`coterie onboard`: new clients for a finished run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from coterie.cli.flags import JsonFlag, NetworkFlag, OverrideFlag, RunArgument, TrustFlag, takes, whole
from coterie.cli.output import say, score_text, stdout, table_of
from coterie.errors import ConfigError, RunError, StorageError
from coterie.runs.metrics import METRICS, NUMBER, PERCENT
from coterie.runs.settings import RunSettings, Tables, merge
from coterie.trust import write_whole

if TYPE_CHECKING:
    from rich.table import Table

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
    model: NetworkFlag = None,
    trust: TrustFlag = False,
    override: OverrideFlag = False,
    json_: JsonFlag = False,
) -> None:
    """Add new clients to a finished run. Each is assigned by the run's own rule, adapted and evaluated.

    The data of the run is not needed. So a new site of a deployed run gets its model where its data is, from a copy of
    the run folder; the network of the sites is --model sites.task:model, in the folder of the app.
    """
    if dataset is None:
        raise ConfigError("onboard needs the data of the new clients: --dataset NAME, or a path of your own data.")
    from coterie.runs.experiment import resolve
    from coterie.runs.newcomers import like_the_run
    from coterie.runs.opening import Given, open_models

    result = open_models(path, Given(model=model), trust=trust, override=override)
    run = result.settings["run"]
    # Only the data is needed: FedAvg accepts any number of clients.
    own = {"algorithm": "fedavg", "dataset": dataset, "seed": run.get("seed", 0) + 1 if seed is None else seed}
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
    from coterie.runs.folder import check_name

    check_name(name)
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
    from coterie.runs.saving import save_model

    rows, task = newcomers.rows(), newcomers.engine.task
    (folder / "models").mkdir()
    for client, served in newcomers.models():
        name, label = rows[client]["name"], rows[client]["cluster"]
        file = f"models/{quote(name, safe=' ')}.safetensors"
        module = served.module(task.module, task.num_classes, task.input_shape)
        facts = result.facts(cluster=label) | newcomers.federation.input_facts() | {"client": name}
        save_model(module, folder / file, "safetensors", facts, task.input_shape, task.integers)
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
        cells = ["-" if row[key] is None else str(row[key]) for key in ("cluster", "group_name")]
        rows.append([row["name"], *cells, form.text(row[key])])
    if len(clients) > _SHOWN:
        rows.append([f"... and {len(clients) - _SHOWN} more in clients.json"])
    return table_of(title, ("client", "cluster", "true group", "R2" if key == "r2" else key), rows, ["client"])
