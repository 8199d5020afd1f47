"""The index: what is registered, in a file, so that `coterie list` need not import torch and every method.

index.json is derived from the registries. `make index` (`python -m coterie.cli.index`) writes it anew after a method,
dataset, model, scenario or situation has changed; a test compares the two.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie.runs.settings import Schedule
from coterie.settings import fields_of
from coterie.trust import DATASETS, METHODS, MODELS, plugins

_PLUGINS = {"algorithms": METHODS, "datasets": DATASETS, "models": MODELS}
FILE = Path(__file__).with_name("index.json")
Things = list[dict[str, Any]]


def registered(what: str) -> Things:
    """The registered things of a kind, as `list --json` prints them.

    Whoever registers more has imported torch. Then the registry is asked, otherwise the index.
    """
    if "torch" in sys.modules:
        found = INDEXED[what]()
    else:
        found = json.loads(FILE.read_text(encoding="utf-8"))[what]
    known = {thing["name"] for thing in found}
    others = plugins(_PLUGINS[what]).items() if what in _PLUGINS else ()
    return found + [{"name": name, "about": f"plugin: {spec}"} for name, spec in others if name not in known]


def index() -> str:
    """The content of the file, from the registries."""
    found = {name: things() for name, things in INDEXED.items()}
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _fields(cls: type) -> Things:
    return [
        {"name": f.name, "default": f.default, "help": f.help, "allowed": f.expected} for f in fields_of(cls).values()
    ]


def _algorithms() -> Things:
    from coterie.methods.base import algorithms

    found = algorithms().items()
    return [
        {"name": key, "about": inspect.getdoc(cls), "paper": cls.paper, "fields": _fields(cls)} for key, cls in found
    ]


def _datasets() -> Things:
    from coterie.data.dataset import presets

    return [
        {"name": name, "about": preset.summary, "scenario": preset.scenario, "model": preset.model}
        for name, preset in presets().items()
    ]


def _models() -> Things:
    from coterie.nets.registry import model_settings, models

    return [
        {"name": name, "about": (inspect.getdoc(builder) or "").splitlines()[0], "settings": model_settings(builder)}
        for name, builder in models().items()
    ]


def _scenarios() -> Things:
    from coterie.data.scenario import parts

    return [{"name": key, "about": cls.summary, "fields": _fields(cls)} for key, cls in parts().items()]


def _situations() -> Things:
    from coterie.runs.situations import default_situations

    found = default_situations(Schedule.rounds)
    return [{"name": s.name, "about": s.about, "changes": s.settings} for s in found]


INDEXED: dict[str, Callable[[], Things]] = {
    "algorithms": _algorithms,
    "datasets": _datasets,
    "models": _models,
    "scenarios": _scenarios,
    "situations": _situations,
}


if __name__ == "__main__":
    FILE.write_text(index(), encoding="utf-8")
