"""`coterie export`: the models of a finished run, for use elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from coterie.cli.flags import DataFlag, JsonFlag, NetworkFlag, OverrideFlag, RunArgument, TrustFlag, whole
from coterie.errors import ConfigError, StorageError
from coterie.trust import write_whole
from coterie.views.words import safe_text

if TYPE_CHECKING:
    from coterie.runs.result import Result

INDEX = "models.json"


def export(
    path: RunArgument,
    client: Annotated[str | None, typer.Option(help="Export the model of this client.")] = None,
    cluster: Annotated[int | None, whole("--cluster", "export the model of this cluster: 0, 1, ..., K-1")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Export the models of all clusters and clients.")] = False,
    format: Annotated[
        str, typer.Option("--format", metavar="safetensors|torch.export|onnx", help="Weights, or a whole program.")
    ] = "safetensors",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write, with --all a folder; by default RUN-WHICH here."),
    ] = None,
    data: DataFlag = None,
    model: NetworkFlag = None,
    trust: TrustFlag = False,
    override: OverrideFlag = False,
    json_: JsonFlag = False,
) -> None:
    """Export models of a finished run, for use without coterie. The data of the run is not needed.

    A safetensors file is a state_dict, to load into your own module; the other formats are programs. Their metadata
    say how inputs are scaled, their shape, the classes, the network and where the model comes from.

    A client that is served with a mixture of models gets the state_dict of a `coterie.MixtureModel`.
    """
    if sum([client is not None, cluster is not None, all_]) != 1:
        raise ConfigError("export needs one of --client NAME, --cluster K and --all.")
    from coterie.runs.opening import Given, open_models, open_run
    from coterie.runs.result import NotKept
    from coterie.runs.saving import FORMATS, needs_network

    given, with_network = Given(data, model), needs_network(format)
    run_name = Path(os.path.abspath(path)).name
    which = "models" if all_ else f"cluster-{cluster}" if client is None else quote(client, safe=" ")
    place = Path(f"{run_name}-{which}{'' if all_ else FORMATS[format]}") if out is None else out
    if data is None:
        allowed = {"trust": trust, "override": override}
        result = open_models(path, given, with_network=with_network, centers_only=cluster is not None, **allowed)
    else:
        result = open_run(path, given, trust=trust, override=override)

    def write() -> dict[str, Any]:
        if all_:
            return _all(result, place, format)
        result.export(place, client=client, cluster=cluster, format=format)
        return {"file": str(place), "metadata": result.facts(client=client, cluster=cluster)}

    try:
        told = write()
    except NotKept:
        if result.is_deployed:
            raise
        result = open_run(path, given, trust=trust, override=override)  # where the data is at hand, it is made again
        told = write()
    if json_:
        print(json.dumps(told | ({} if all_ else _contents(place, format))))
    elif all_:
        print(
            safe_text(f"{place}: {told['files']} models of {len(told['clients'])} clients; {INDEX} says which is whose")
        )
    else:
        print(safe_text(f"{place}: {_how_to_load(place, format)}"))
        print(safe_text(f"inputs: {told['metadata']['inputs']}"))


def _all(result: Result, folder: Path, format: str) -> dict[str, Any]:
    """Write every center, and the model of every client that is not a center; and the list of them."""
    from coterie.runs.saving import FORMATS

    ending = FORMATS[format]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be created: {error.strerror or error}.") from error
    clusters = [f"cluster-{k}{ending}" for k in range(len(result.centers))]
    for cluster, file in enumerate(clusters):
        result.export(folder / file, cluster=cluster, format=format)
    clients: dict[str, str] = {}
    for name, label in result.clusters.items():
        if result.is_center(name):
            clients[name] = clusters[label]
            continue
        clients[name] = f"client-{quote(name, safe=' ')}{ending}"
        result.export(folder / clients[name], client=name, format=format)
    told = {"format": format, "clusters": clusters, "clients": clients}
    try:
        write_whole(folder / INDEX, (json.dumps(told, indent=2) + "\n").encode())
    except OSError as error:
        raise StorageError(f"{folder / INDEX} cannot be written: {error.strerror or error}.") from error
    return {"folder": str(folder), "files": len({*clusters, *clients.values()}), **told}


def _contents(file: Path, format: str) -> dict[str, Any]:
    """The tensors and the metadata of a file of weights."""
    if format != "safetensors":
        return {}
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
        return {"tensors": shapes, "metadata": opened.metadata()}


def _how_to_load(file: Path, format: str) -> str:
    """A line of Python that loads the file."""
    if format == "onnx":
        return f"onnxruntime.InferenceSession('{file}')"
    if format == "torch.export":
        return f"torch.export.load('{file}').module()"
    load = f"safetensors.torch.load_file('{file}')"
    names = _contents(file, format)["tensors"]
    if "weights" in names and any(name.startswith("models.0.") for name in names):
        return f"{len(names)} tensors; coterie.MixtureModel.from_state_dict(module, {load})"
    return f"{len(names)} tensors; module.load_state_dict({load})"
