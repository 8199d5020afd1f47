"""`coterie init`: a file with every setting of an experiment, written from the declarations of the settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.flags import takes
from coterie.cli.output import shown, stdout
from coterie.client.settings import WorkSettings
from coterie.errors import ConfigError
from coterie.runs.settings import AUTO, TABLES, ClusterSettings, RunSettings, Schedule, Tables, merge

if TYPE_CHECKING:
    from coterie.runs.experiment import Experiment
    from coterie.settings import Field

_FIRST = ("algorithm", "dataset", "rounds", "seed")  # set in every file: what people change first


@takes(RunSettings, ClusterSettings, Schedule, WorkSettings, config=False)
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")] = Path("experiment.toml"),
    *,
    tables: Tables,
) -> None:
    """Write a commented file of all settings, for 'coterie run --config FILE'. Flags become settings of the file."""
    from coterie.runs.experiment import resolve

    given = merge(tables)
    if tables["algorithm"].get("num_clusters") == AUTO:  # chosen before a run, not here
        given["algorithm"].pop("num_clusters")
    text = commented(resolve(given), tables, file.name)
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{file} exists already; choose another name, or remove it.") from error
    stdout().print(shown(f"created {file}; edit it, then: coterie run --config {file}"))


def commented(experiment: Experiment, given: Tables, name: str = "experiment.toml") -> str:
    """The settings of an experiment as TOML; those that are not in `given` are commented out."""
    known = experiment.tables()
    first: Tables = {"run": {key: known["run"][key] for key in _FIRST}}
    about = f"{experiment.algorithm_name} on {experiment.dataset}"
    lines = [
        f"# Settings of an experiment: coterie run --config {name}",
        "# Remove the # before a setting to change it. What is commented out has the value that it has without this",
        f"# file, for {about}; a setting without a value is off, or follows from the others.",
        "# Flags and --set win over this file.",
    ]
    set_here = merge(first, given)
    for table, fields in _fields(experiment).items():
        lines += ["", f"[{table}]"]
        values = merge(known, given)[table]
        for key in dict.fromkeys([*fields, *values]):
            lines += _one(key, fields.get(key), values.get(key), key in set_here[table])
    return "\n".join(lines) + "\n"


def _one(name: str, field: Field | None, value: Any, is_set: bool) -> Iterator[str]:
    """The lines of one setting: what it does, what it can be, its value."""
    from coterie.runs.folder import to_toml

    if field is not None:
        yield from (f"# {line}" for line in wrap(f"{field.sentence}{_allowed(field)}", 110))
        value = field.default if value is None else value
    if value is None:
        yield f"#{name} ="
    else:
        yield f"{'' if is_set else '#'}{to_toml({name: value}).strip()}"


def _allowed(field: Field) -> str:
    """What the file can say, unless the help says it; None cannot be written in TOML."""
    is_plain = field.kind in (str, str | None, bool) and not field.choices
    if is_plain or ", in (" in field.sentence or ", in [" in field.sentence:
        return ""
    return f" Allowed: {field.expected.removesuffix(' or None')}."


def _fields(experiment: Experiment) -> dict[str, Mapping[str, Field]]:
    """The declared settings by table, in the order of the tables."""
    from coterie.engines.settings import settings_class
    from coterie.settings import fields_of

    engine, scenario = settings_class(experiment.engine), experiment.scenario
    assert scenario is not None
    found: dict[str, Mapping[str, Field]] = {
        "run": fields_of(RunSettings) | fields_of(Schedule),
        "algorithm": fields_of(type(experiment.algorithm)),
        "work": fields_of(WorkSettings),
        "dataset": fields_of(type(experiment.source)),
        "scenario": {k: f for part in (*scenario.parts, scenario.common) for k, f in fields_of(type(part)).items()},
        "engine": {} if engine is None else fields_of(engine),
    }
    return {table: found.get(table, {}) for table in TABLES}
