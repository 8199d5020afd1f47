"""`coterie deploy`: a Flower app for real sites, and keys for a trial."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.flags import whole
from coterie.cli.output import stdout
from coterie.errors import ConfigError, MissingExtra

app = typer.Typer(no_args_is_help=True, help="Run the same methods on real sites, with Flower.")


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty folder.")],
    name: Annotated[str | None, typer.Option(help="Name of the app; by default the folder's.")] = None,
    nodes: Annotated[int, whole("--nodes", "number of sites", ge=1)] = 4,
) -> None:
    """Create a Flower app. Fill in sites/task.py (the network and a site's data) to run it."""
    from coterie.deploy.init import write_app

    made = write_app(folder, name, nodes)
    stdout().print(f"created {len(made)} files in {folder}; edit {folder / 'sites' / 'task.py'}")
    stdout().print(f"next: cd {folder} && coterie deploy keys . --nodes {nodes}   (then see README.md there)")


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the app.")] = Path(),
    nodes: Annotated[int, whole("--nodes", "number of site keys; 0 creates only the CA and the certificate", ge=0)] = 4,
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address by which sites reach the server; repeatable.")
    ] = None,
    days: Annotated[int, whole("--days", "days until the certificates expire", ge=1)] = 90,
) -> None:
    """Create keys and certificates for a trial.

    Makes a CA, a server certificate and a key for each site; existing keys are kept.
    """
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise MissingExtra("coterie deploy keys", "flower") from error
    from coterie.deploy.init import write_keys

    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}; create one with 'coterie deploy init {folder}'.")
    made = write_keys(folder, nodes, host or ["127.0.0.1", "localhost"], days)
    stdout().print(f"created {len(made)} files in {folder / 'keys'}" if made else "all keys exist already")
