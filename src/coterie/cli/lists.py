"""`coterie list algorithms|datasets|models|...`."""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any

import typer
from rich.table import Table

from coterie.algorithm import algorithms
from coterie.cli.output import stdout
from coterie.dataset import presets
from coterie.errors import UnknownName
from coterie.models import model_settings, models
from coterie.scenario import parts
from coterie.settings import fields_of


def _fields(cls: type) -> list[dict[str, Any]]:
    return [
        {"name": f.name, "default": f.default, "help": f.help, "allowed": f.expected} for f in fields_of(cls).values()
    ]


def _algorithms() -> list[dict[str, Any]]:
    found = algorithms().items()
    return [
        {"name": key, "about": inspect.getdoc(cls), "paper": cls.paper, "fields": _fields(cls)} for key, cls in found
    ]


def _datasets() -> list[dict[str, Any]]:
    return [
        {"name": name, "about": preset.summary, "scenario": preset.scenario, "model": preset.model}
        for name, preset in presets().items()
    ]


def _models() -> list[dict[str, Any]]:
    return [
        {"name": name, "about": (inspect.getdoc(builder) or "").splitlines()[0], "settings": model_settings(builder)}
        for name, builder in models().items()
    ]


def _scenarios() -> list[dict[str, Any]]:
    return [{"name": key, "about": cls.summary, "fields": _fields(cls)} for key, cls in parts().items()]


_THINGS = {"algorithms": _algorithms, "datasets": _datasets, "models": _models, "scenarios": _scenarios}


def list_things(
    what: Annotated[str, typer.Argument(help="algorithms, datasets, models or scenarios.")],
    json_: Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")] = False,
) -> None:
    """List what there is."""
    if what not in _THINGS:
        raise UnknownName("list", what, _THINGS)
    found = _THINGS[what]()
    if json_:
        print(json.dumps(found))
        return
    table = Table(title=what, title_justify="left")
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("about")
    table.add_column("settings")
    for item in found:
        names = [f["name"] for f in item.get("fields", [])] or list(item.get("settings", {}))
        about = str(item["about"]).splitlines()[0]
        if item.get("paper"):
            about += f" ({item['paper']})"
        if item.get("scenario"):
            names = [f"scenario {item['scenario']}", f"model {item['model']}"]
        table.add_row(item["name"], about, ", ".join(names))
    stdout().print(table)
