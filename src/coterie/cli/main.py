"""The command `coterie`: registers the subcommands, prints one sentence per error, sets exit codes.

No module imported here imports torch at module level, so that `--help` and usage errors are instant.
"""

from __future__ import annotations

import sys

import click
import typer.core
from rich.console import Console

from coterie.cli import bench, choose, compare, data, data_show, deploy, lists, onboard, report, run, sweep, ui
from coterie.errors import CoterieError
from coterie.version import VERSION

typer.core.HAS_RICH = False  # plain help: with it, typer writes "\[default: 20]" even where markup is off

app = typer.Typer(
    name="coterie",
    help="Clustered, personalized federated learning: K models for K kinds of client.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (run.run, run.resume, run.show, compare.compare, bench.bench, sweep.sweep):
    app.command()(command)
app.command("choose-k")(choose.choose)
for command in (onboard.onboard, onboard.export, report.report, ui.ui):
    app.command()(command)
app.command("list")(lists.list_things)
data.data_app.command("show")(data_show.show)
app.add_typer(data.data_app, name="data")
app.add_typer(deploy.app, name="deploy")


def _version(wanted: bool) -> None:
    if wanted:
        print(VERSION)
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Clustered, personalized federated learning: K models for K kinds of client."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; expected errors are one sentence, never a traceback."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        code = app(args=arguments, standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except (click.exceptions.Abort, KeyboardInterrupt):
        console.print("stopped")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except (CoterieError, click.ClickException, OSError) as error:  # OSError: of the disk, not handled elsewhere
        said = error.format_message() if isinstance(error, click.ClickException) else str(error)
        if said.startswith("Usage:"):  # without arguments, the message is the help
            print(said)
        else:
            console.print("[bold red]error:[/] " + said.replace("[", r"\["))
        sys.exit(error.exit_code if isinstance(error, CoterieError) else 2)
