"""The command `coterie`: finds the subcommands, prints one sentence per error, sets exit codes.

The module of a subcommand is imported when it is used, and none imports torch at module level, so that `--help`,
`--version` and usage errors are instant.
"""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from typing import Any, cast

import typer.core

from coterie.errors import CoterieError
from coterie.version import VERSION

typer.core.HAS_RICH = False  # plain help: with it, typer writes "\[default: 20]" even where markup is off

# Newer versions of typer bring their own copy of click, so its exceptions are found through typer.
_UsageError = cast(type[Exception], typer.BadParameter.__base__)

_HOMES = {  # where the subcommands are, in the order of `--help`
    **{name: f"run:{name}" for name in ("run", "resume", "show")},
    **{name: f"{name}:{name}" for name in ("compare", "bench", "sweep", "reproduce")},
    "choose-k": "choose:choose",
    **{name: f"{name}:{name}" for name in ("onboard", "export", "report", "ui", "init")},
    "list": "lists:list_things",
    "data": "data:app",
    "deploy": "deploy:app",
}


class _Commands(typer.core.TyperGroup):
    """Imports a subcommand when it is used."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = dict.fromkeys(_HOMES, cast(Any, None))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _HOMES and self.commands[cmd_name] is None:
            self.commands[cmd_name] = _imported(cmd_name)
        return super().get_command(ctx, cmd_name)


def _imported(name: str) -> Any:
    module, _, attribute = _HOMES[name].partition(":")
    found = getattr(import_module(f"coterie.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        made: Any = typer.main.get_group(found)
    else:
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command()(found)
        made = typer.main.get_command(alone)
    made.name = name
    return made


app = typer.Typer(
    name="coterie",
    cls=_Commands,
    help="Clustered, personalized federated learning: K models for K kinds of client.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(VERSION)
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error; also after a command."),
) -> None:
    """Clustered, personalized federated learning: K models for K kinds of client."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; expected errors are one sentence, and a traceback only with `--debug`."""
    given = sys.argv[1:] if arguments is None else arguments
    words = [word for word in given if word != "--debug"]
    try:
        code = app(args=words, standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except (typer.Abort, KeyboardInterrupt):
        _print("stopped")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except (CoterieError, _UsageError, OSError, MemoryError) as error:  # not handled elsewhere
        if len(words) < len(given):
            traceback.print_exc()
        said = _sentence(error)
        if said.startswith("Usage:"):  # without arguments, the message is the help
            print(said)
        else:
            _print(said, "error: ")
        sys.exit(error.exit_code if isinstance(error, CoterieError) else 2)


def _sentence(error: Exception) -> str:
    if isinstance(error, _UsageError):
        return str(cast(Any, error).format_message())
    if isinstance(error, MemoryError):
        return "There is not enough memory for this; use fewer clients or a smaller model."
    if isinstance(error, OSError) and not isinstance(error, CoterieError):
        where = f"{error.filename} cannot be used" if error.filename is not None else "A file cannot be used"
        return f"{where}: {error.strerror or error}. Check the path, its permissions and the space on the disk."
    return str(error)


def _print(text: str, head: str = "") -> None:
    from rich.console import Console
    from rich.text import Text

    from coterie.views.words import safe_text

    line = Text(head, "bold red") + Text(" ".join(safe_text(part) for part in text.splitlines()))
    Console(stderr=True, highlight=False, soft_wrap=True).print(line)
