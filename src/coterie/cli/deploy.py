"""`coterie deploy`: a Flower app for real sites, and keys to try it with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.output import stdout
from coterie.errors import ConfigError, MissingExtra

app = typer.Typer(no_args_is_help=True, help="Run the same methods at real sites, over Flower.")

NodesFlag = Annotated[int, typer.Option("--nodes", min=1, help="How many sites there are to be.")]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is not there yet, or empty.")],
    name: Annotated[str | None, typer.Option(help="Name of the app; by default that of the folder.")] = None,
    nodes: NodesFlag = 4,
) -> None:
    """Write a Flower app: fill in sites/task.py (the network and a site's data), and it runs."""
    from coterie.deploy.init import write_app

    made = write_app(folder, name, nodes)
    stdout().print(f"wrote {len(made)} files into {folder}; yours is {folder / 'sites' / 'task.py'}")
    stdout().print(f"next: cd {folder} && coterie deploy keys . --nodes {nodes}   (README.md there goes on)")


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the app.")] = Path(),
    nodes: Annotated[int, typer.Option(min=0, help="Keys of sites to make; 0: only the CA and the certificate.")] = 4,
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address that sites reach the server by; may be repeated.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long certificates are good for.")] = 90,
) -> None:
    """Make a CA, a server certificate and a key for each site, for trying; keys that are there are kept."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise MissingExtra("coterie deploy keys", "flower") from error
    from coterie.deploy.init import write_keys

    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}; make one with 'coterie deploy init {folder}'.")
    made = write_keys(folder, nodes, host or ["127.0.0.1", "localhost"], days)
    stdout().print(f"made {len(made)} files in {folder / 'keys'}" if made else "all keys are there already")
