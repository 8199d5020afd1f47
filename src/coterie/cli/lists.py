"""`coterie list algorithms|datasets|models|...|runs`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.flags import JsonFlag
from coterie.cli.index import INDEXED, Things, registered
from coterie.cli.output import clock, stdout, table_of
from coterie.client.settings import WorkSettings
from coterie.engines.settings import EngineSettings, RaySettings
from coterie.errors import ConfigError, RunError, UnknownName
from coterie.runs.settings import ClusterSettings, RunSettings, Schedule
from coterie.settings import fields_of


def _metrics() -> Things:
    from coterie.runs.metrics import METRICS

    found = METRICS.values()
    return [{"name": m.key, "about": f"{m.label}: {m.about}", "path": m.path, "better": m.better} for m in found]


def _settings() -> Things:
    return [
        {
            "name": f"{group.table}.{field.name}",
            "about": field.sentence,
            "flag": " ".join(field.flags) or None,
            "default": field.default_is or field.default,
            "allowed": field.expected,
        }
        for group in (RunSettings, ClusterSettings, Schedule, WorkSettings, EngineSettings, RaySettings)
        for field in fields_of(group).values()
        if group is not RaySettings or field not in fields_of(EngineSettings).values()
    ]


_THINGS: dict[str, Callable[[], Things]] = {
    **{name: partial(registered, name) for name in INDEXED},
    "metrics": _metrics,
    "settings": _settings,
}
_NAMES = sorted(_THINGS)


def list_things(
    what: Annotated[str, typer.Argument(metavar="WHAT", help=f"{', '.join(_NAMES)} or runs.")],
    folder: Annotated[Path | None, typer.Argument(help="With 'runs': their folder; by default 'runs'.")] = None,
    json_: JsonFlag = False,
) -> None:
    """List algorithms, datasets, metrics, models, scenarios, settings, situations or runs."""
    if what == "runs":
        list_runs(Path("runs") if folder is None else folder, json_)
        return
    if what not in _THINGS:
        raise UnknownName("list", what, (*_NAMES, "runs"))
    if folder is not None:
        raise ConfigError(f"'coterie list {what}' takes no folder. Got '{folder}'.")
    found = _THINGS[what]()
    if json_:
        print(json.dumps(found))
        return
    rows = []
    for item in found:
        about = str(item["about"]).splitlines()[0] + (f" ({item['paper']})" if item.get("paper") else "")
        names = [f["name"] for f in item.get("fields", [])] or list(item.get("settings", {}))
        if "allowed" in item:
            names = [*filter(None, [item["flag"]]), item["allowed"]]
        if "changes" in item:
            names = [item["changes"]]
        if item.get("scenario"):
            names = [f"scenario {item['scenario']}", f"model {item['model']}"]
        rows.append([item["name"], about, ", ".join(names)])
    stdout().print(table_of(what, ("name", "about", "settings"), rows, text=("name", "about", "settings")))


def list_runs(folder: Path, json_: bool) -> None:
    """Print the runs in a folder with state and progress; damaged ones with the reason."""
    from coterie.runs.reading import find_runs

    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}." if not folder.exists() else f"{folder} is a file.")
    rows = [run_row(name, path) for name, path in find_runs(folder)]
    if json_:
        print(json.dumps(rows))
        return
    from coterie.runs.metrics import metrics

    scores = metrics("terminal")
    heads = ["run", "state", "rounds", "method", "data", "seed", *(metric.short for metric in scores), "left"]
    cells = []
    for row in rows:
        if row["state"] == "damaged":
            cells.append([row["name"], "damaged", "", row["reason"]])
            continue
        cells.append([row["name"], row["state"], f"{row['rounds_done']}/{row['rounds']}", row["algorithm"]])
        cells[-1] += [row["dataset"], str(row["seed"]), *(m.format.text(row[m.key]) for m in scores)]
        cells[-1].append("" if row["seconds_left"] is None else clock(row["seconds_left"]))
    title = f"{len(rows)} runs in {folder}"
    stdout().print(table_of(title, heads, cells, text=("run", "state", "method", "data")))


def run_row(name: str, path: Path) -> dict[str, Any]:
    """A run of the list, as --json prints it."""
    from coterie.runs.metrics import metrics
    from coterie.runs.reading import read_run

    try:
        run = read_run(path, whole=False)
    except RunError as error:
        return {"name": name, "path": str(path), "state": "damaged", "reason": str(error)}
    return {
        "name": name,
        "path": str(path),
        **{fact: getattr(run, fact) for fact in ("state", "algorithm", "dataset", "seed")},
        "rounds_done": run.done,
        "rounds": run.planned,
        **{metric.key: run.last(metric.key) for metric in metrics("headline", "terminal")},
        "seconds_left": run.seconds_left,
    }
