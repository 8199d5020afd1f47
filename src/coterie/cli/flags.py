"""Flags that commands share: `takes` creates them from the declarations of settings.

A command names its groups of settings and receives the user's choices as tables:

    @takes(RunSettings, Schedule, without=("seed",))
    def compare(*, seeds: SeedsFlag = "1", tables: Tables, quiet: QuietFlag = False) -> None:
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.index import INDEXED, registered
from coterie.runs.settings import TABLES, RunSettings, Tables, apply_set, merge, read_tables
from coterie.settings import Field, fields_of, listed
from coterie.trust import check_trust, run_folder_of

Group = type | tuple[Any, ...]  # a settings class, or the class and the names of some of its fields
Command = Callable[..., None]


def _option(field: Field) -> Any:
    names, more = list(field.flags), dict[str, Any]()

    def parsed(value: Any) -> Any:  # as the field does, so that a bad value is reported in its own sentence
        return field.parse(value) if isinstance(value, str) else value

    def completed(incomplete: str) -> list[str]:
        return [word for word in _known(field) if word.startswith(incomplete)]

    if field.kind is bool:
        names[0] += f"/--no-{names[0].removeprefix('--')}"
    else:
        more = {"metavar": field.metavar, "parser": _typed, "callback": parsed, "autocompletion": completed}
    return typer.Option(*names, help=field.sentence, show_default=not field.default_is, **more)


def _typed(value: Any) -> Any:
    """What was typed, unchanged: errors of a parser would be rewritten by typer, those of a callback are not."""
    return value


def _known(field: Field) -> list[str]:
    """The words that a shell offers for a flag: registered names, or those that the field lists."""
    if f"{field.name}s" not in INDEXED:
        return list(field.words)
    return [str(thing["name"]) for thing in registered(f"{field.name}s")]


def complete_methods(incomplete: str) -> list[str]:
    """The names of methods that a shell offers."""
    return [word for word in _known(fields_of(RunSettings)["algorithm"]) if word.startswith(incomplete)]


def whole(flag: str, help: str, default_is: str = "", **bounds: float) -> Any:
    """An integer option of a single command."""
    return _option(Field(flag, int, None, help, bounds, (flag,), default_is=default_is))


JsonFlag = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]
QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
TrackFlag = Annotated[
    list[str] | None, typer.Option("--track", help="Also log to 'tensorboard', 'mlflow' or 'wandb'; repeatable.")
]
OutFlag = Annotated[Path, typer.Option(help="Folder in which run folders are created.")]
NameFlag = Annotated[str | None, typer.Option(help="Name of the run folder.")]
MethodsFlag = Annotated[
    list[str],
    typer.Option("--algorithm", "-a", help="Method, or 'all'; repeatable.", autocompletion=complete_methods),
]
SeedsFlag = Annotated[
    str,
    typer.Option("--seeds", metavar="SEEDS", help="Seeds: a count (3 is 0, 1, 2), a range (5-9) or a list (1,4,7)."),
]
JobsFlag = Annotated[int, whole("--jobs", "runs at a time, in as many processes, which take the GPUs in turn", ge=1)]
TrustFlag = Annotated[
    bool, typer.Option("--trust", help="Import code, or connect to a cluster, that the settings of a run folder name.")
]
OverrideFlag = Annotated[
    bool, typer.Option("--override", help="Use the settings of the run folder, even if they were changed since.")
]
DataFlag = Annotated[
    Path | None, typer.Option("--data", help="Where the file or folder of the run's data is now, if it was moved.")
]
NetworkFlag = Annotated[
    str | None, typer.Option("--model", help="Network of the run, if it was your own: module:callable.")
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]
_ConfigFlag = Annotated[Path | None, typer.Option(help="TOML file with the same settings; flags override it.")]


def takes(
    *groups: Group, without: Sequence[str] = (), settable: Sequence[str] = TABLES, config: bool = True
) -> Callable[[Command], Command]:
    """Give a command the flags of these settings, `--set` and `--config`.

    They replace the parameter `tables`, which receives the user's choices: the config file, overridden by flags,
    overridden by `--set`. `settable` limits the tables of `--set`.
    """
    taken: dict[str, tuple[str, Field]] = {}
    for group in groups:
        cls, *names = group if isinstance(group, tuple) else (group,)
        for name, field in fields_of(cls).items():
            if field.flags and name not in without and (not names or name in names):
                taken[name] = (cls.table, field)
    which = "any field" if settable is TABLES else f"a field of {listed(settable)}"
    example = "algorithm.prox=0.1" if settable is TABLES else f"{settable[0]}.FIELD=VALUE"
    how = f"Set {which}: {example}, a list as [a, b]; repeatable."
    set_flag = Annotated[list[str] | None, typer.Option("--set", help=how)]

    def decorate(function: Command) -> Command:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters: list[inspect.Parameter] = []

        def add(name: str, kind: Any, default: Any) -> None:
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))

        for name, own in inspect.signature(function).parameters.items():
            if name != "tables":
                add(name, hints[name], own.default)
                continue
            for key, (_, field) in taken.items():
                option, default = _option(field), None if field.default_is else field.default
                add(key, Annotated[bool, option] if field.kind is bool else Annotated[str, option], default)
            add("context", typer.Context, None)
            if config:
                add("config", _ConfigFlag, None)
                add("trust", TrustFlag, False)
            add("set_", set_flag, None)

        @functools.wraps(function)
        def command(**values: Any) -> None:
            context: typer.Context | None = values.pop("context", None)
            flags: Tables = {}
            for key, (table, _) in taken.items():
                value = values.pop(key, None)
                source = None if context is None else context.get_parameter_source(key)
                if value is not None and (source is None or source.name != "DEFAULT"):
                    flags.setdefault(table, {})[key] = value
            assigned = apply_set({}, values.pop("set_", None) or [], settable)
            file, trust = values.pop("config", None), values.pop("trust", False) if config else False
            stored = read_tables(file) if file else {}
            if file and run_folder_of(file) is not None:  # perhaps somebody else's
                given = {(table, key) for layer in (flags, assigned) for table in layer for key in layer[table]}
                check_trust(stored, file, trust, given)
            function(tables=merge(stored, flags, assigned), **values)

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate
