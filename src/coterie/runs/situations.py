"""Situations: named settings under which methods are compared, such as skewed sizes or a wrong number of clusters.

A situation is written relative to a base, which is everything else that the command says: `--dataset`, `--rounds`,
`--set` ... It only holds what it changes, so one list serves digits on a CPU and MNIST on a GPU. In a file:

    [drift]                              # the name
    about = "30 % of the clients change their kind"
    run.scenario = "rotated+drift"       # the tables and fields are those of --config and --set
    scenario.at = [10]
    algorithm.num_clusters = 4
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.data.dataset import find_preset
from coterie.data.scenario import scenario_fields
from coterie.errors import ConfigError, UnknownName
from coterie.runs.experiment import Experiment, resolve_each
from coterie.runs.settings import TABLES, RunSettings, Schedule, Tables, merge

DEFAULT = "default"
_KINDS = 4  # true groups of the built-in situations
_NOT_HERE = {"algorithm": "--algorithm", "seed": "--seeds"}  # fields of [run] that the command chooses


@dataclass(frozen=True)
class Situation:
    """A name and the settings that differ from the base."""

    name: str
    about: str = ""
    tables: Tables = field(default_factory=dict)

    @property
    def settings(self) -> str:
        """The settings as `--set` takes them.

        >>> Situation("drift", tables={"run": {"participation": 0.2}, "scenario": {"at": [5]}}).settings
        'run.participation=0.2 scenario.at=[5]'
        """
        found = ((table, key, value) for table, values in self.tables.items() for key, value in values.items())
        return " ".join(f"{table}.{key}={value}" for table, key, value in found)

    def over(self, base: Tables) -> Tables:
        """The base with these settings. Fields of [scenario] that this scenario does not have are left out."""
        merged = merge(base, self.tables)
        preset = find_preset(merged["run"].get("dataset", RunSettings.dataset))
        known = self.scenario_fields(base)
        # The dataset's own samples per client, for example, stay where another scenario is chosen.
        common = {**preset.scenario_settings, **base.get("scenario", {})}
        kept = {key: value for key, value in common.items() if key in known}
        return {**merged, "scenario": kept | self.tables.get("scenario", {})}

    def scenario_fields(self, base: Tables) -> set[str]:
        """The fields of the scenario under this situation."""
        run = merge(base, self.tables)["run"]
        preset = find_preset(run.get("dataset", RunSettings.dataset))
        return scenario_fields(run.get("scenario") or preset.scenario)


def default_situations(rounds: int) -> list[Situation]:
    """The built-in list: four kinds of clients and one difficulty at a time."""

    def one(name: str, about: str, scenario: str = "rotated", clusters: int = _KINDS, **fields: Any) -> Situation:
        kinds = {} if scenario == "iid" else {"groups": _KINDS}
        run = {"scenario": scenario, **fields.pop("run", {})}
        return Situation(
            name, about, {"run": run, "scenario": {**kinds, **fields}, "algorithm": {"num_clusters": clusters}}
        )

    middle = max(1, rounds // 2)
    swap = "label_swapped"
    return [
        one("equal", "four rotations, equal sizes, K = 4: nothing is difficult"),
        one("quantity", "client sizes from Dir(0.5)", quantity=0.5),
        one("alpha", "label skew: label vectors from Dir(3 p)", alpha=3.0),
        one("both", "sizes from Dir(0.5) and label vectors from Dir(3 p)", quantity=0.5, alpha=3.0),
        one("swap", "kinds differ in two swapped labels, not in their images", swap),
        one("swap-alpha", "swapped labels and label vectors from Dir(3 p)", swap, alpha=3.0),
        one("iid", "one kind only, K = 4 all the same", "iid"),
        one("part-20", "20 % of the clients in each round", run={"participation": 0.2}),
        one("drift", "30 % of the clients change their kind in the middle", "rotated+drift", at=[middle], share=0.3),
        one("k-small", "K = 2 for four kinds", clusters=2),
        one("k-large", "K = 6 for four kinds", clusters=6),
    ]


def find_situations(text: str, base: Tables) -> list[Situation]:
    """The situations of `--scenarios`: 'default', or a file."""
    if text == DEFAULT:
        return default_situations(base.get("run", {}).get("rounds", Schedule.rounds))
    return read_situations(Path(text))


def read_situations(path: Path) -> list[Situation]:
    """The situations of a TOML file; a wrong table or field is an error that names it."""
    if not path.is_file():
        raise ConfigError(f"There is no file {path}; --scenarios takes 'default' or a TOML file of situations.")
    try:
        content = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"The file of situations {path} cannot be read: {error}.") from error
    if not content:
        raise ConfigError(f"{path} has no situation; write one as [NAME] with fields such as scenario.alpha = 3.")
    return [_situation(path, name, values) for name, values in content.items()]


def _situation(path: Path, name: str, values: Any) -> Situation:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=+-]*", name):
        raise ConfigError(
            f"A situation needs a name of letters, digits and '._=+-', which names a folder. {path} has '{name}'."
        )
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} in {path} must be a table, [{name}]. Got {values!r} instead.")
    about = values.get("about", "")
    if not isinstance(about, str):
        raise ConfigError(f"about of [{name}] in {path} must be a string. Got {about!r} instead.")
    tables: Tables = {table: content for table, content in values.items() if table != "about"}
    for table, content in tables.items():
        if table not in TABLES:
            raise UnknownName(f"table of situation [{name}] in {path} named", table, TABLES)
        if not isinstance(content, Mapping):
            raise ConfigError(
                f"{table} of [{name}] in {path} must be a table: {table}.FIELD = VALUE. Got {content!r} instead."
            )
    for key, flag in _NOT_HERE.items():
        if key in tables.get("run", {}):
            raise ConfigError(f"run.{key} of [{name}] in {path} is for the whole comparison; choose it with {flag}.")
    return Situation(name, about, tables)


def resolve_situations(
    situations: Sequence[Situation], base: Tables, names: list[str], seeds: Sequence[int]
) -> dict[tuple[int, str, str], Experiment]:
    """Every method in every situation with every seed, by (seed, situation, method); seed by seed.

    All methods see the same federation in a situation.
    """
    fields = set().union(*(situation.scenario_fields(base) for situation in situations))
    for key in base.get("scenario", {}):
        if key not in fields:
            raise UnknownName("field of these scenarios named", key, fields)
    found: dict[tuple[int, str, str], Experiment] = {}
    for situation in situations:
        try:
            every = resolve_each(situation.over(base), names, seeds)
        except ConfigError as error:
            raise ConfigError(f"Situation '{situation.name}': {error}") from error
        found |= {(seed, situation.name, name): experiment for (name, seed), experiment in every.items()}
    order = {situation.name: place for place, situation in enumerate(situations)}
    places = {seed: place for place, seed in enumerate(seeds)}
    return dict(sorted(found.items(), key=lambda item: (places[item[0][0]], order[item[0][1]])))  # sorting is stable
