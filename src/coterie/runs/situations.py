"""Situations: named settings under which methods are compared, such as skewed sizes or a wrong number of clusters.

A situation is written relative to a base, which is everything else that the command says: `--dataset`, `--rounds`,
`--set` ... It only holds what it changes, so one list serves digits on a CPU and MNIST on a GPU. In a file:

    [drift]                              # the name
    about = "30 % of the clients change their kind"
    run.scenario = "rotated+drift"       # the tables and fields are those of --config and --set
    scenario.at = [10]
    algorithm.num_clusters = 4           # for the methods that have this field and do not find K themselves
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.data.dataset import Preset, find_preset
from coterie.data.scenario import scenario_fields
from coterie.errors import ConfigError, UnknownName
from coterie.methods.base import algorithms, find_algorithm
from coterie.runs.experiment import Experiment, resolve_each
from coterie.runs.settings import AUTO, TABLES, RunSettings, Schedule, Tables, merge
from coterie.settings import fields_of
from coterie.trust import check_trust, run_folder_of

DEFAULT, KIND = "default", "kind"  # the built-in lists
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
        """The base with these settings, except those of [algorithm].

        Fields of [scenario] that this scenario does not have are left out.
        """
        merged = merge(base, {**self.tables, "algorithm": {}})
        preset = _preset(merged)
        known = self.scenario_fields(base)
        # The dataset's own samples per client, for example, stay where another scenario is chosen.
        common = {**preset.scenario_settings, **base.get("scenario", {})}
        kept = {key: value for key, value in common.items() if key in known}
        return {**merged, "scenario": kept | self.tables.get("scenario", {})}

    def scenario_fields(self, base: Tables) -> set[str]:
        """The fields of the scenario under this situation."""
        merged = merge(base, self.tables)
        return scenario_fields(merged["run"].get("scenario") or _preset(merged).scenario)

    def algorithm_fields(self, method: str) -> dict[str, Any]:
        """The settings of [algorithm] for a method: those that it has. A method that finds K itself is not told K."""
        known = fields_of(find_algorithm(method))
        found = {key: value for key, value in self.tables.get("algorithm", {}).items() if key in known}
        if "num_clusters" in found and known["num_clusters"].default == AUTO:
            found.pop("num_clusters")
        return found


def _preset(tables: Tables) -> Preset:
    """The dataset of these settings."""
    return find_preset(tables.get("run", {}).get("dataset", RunSettings.dataset), tables.get("dataset"))


def default_situations(rounds: int, tests: str = "like") -> list[Situation]:
    """The built-in list: from IID clients to kinds, skewed labels and sizes, few clients in a round, drift, a wrong K.

    With tests="kind", clients are tested on all data of their kind, and methods serve models for it.
    """
    serving = {"serve": "kind"} if tests == "kind" else {}

    def one(name: str, about: str, scenario: str, groups: int = 0, clusters: int = 4, **fields: Any) -> Situation:
        run = {"scenario": scenario, **fields.pop("run", {})}
        return Situation(
            name,
            about,
            {
                "run": run,
                "scenario": {**({"groups": groups} if groups else {}), "tests": tests, **fields},
                "algorithm": {"num_clusters": clusters, **serving},
            },
        )

    def labels(alpha: float) -> dict[str, Any]:
        return {"alpha": alpha, "sense": "per_class"}

    rotated, swapped, middle = "rotated", "label_swapped", max(1, rounds // 2)
    few = {"participation": 0.1, "rounds": 3 * rounds}
    return [
        one("iid", "one kind only, K = 4 all the same", "iid"),
        one("rotation", "four rotations, K = 4: nothing is difficult", rotated, 4),
        one("swap", "four kinds differ in two swapped labels, not in their images", swapped, 4),
        one("dirichlet-0.1", "one kind, label vectors from Dir(0.1)", "dirichlet", **labels(0.1)),
        one("dirichlet-0.5", "one kind, label vectors from Dir(0.5)", "dirichlet", **labels(0.5)),
        one("rotation-dirichlet", "four rotations and label vectors from Dir(0.3)", rotated, 4, **labels(0.3)),
        one("swap-dirichlet", "four swaps and label vectors from Dir(0.3)", swapped, 4, **labels(0.3)),
        one("quantity", "one kind, client sizes from Dir(0.5)", "iid", quantity=0.5),
        one("rotation-quantity", "four rotations and client sizes from Dir(0.5)", rotated, 4, quantity=0.5),
        one("part-10", "four rotations, 10 % of the clients in each of three times the rounds", rotated, 4, run=few),
        one("drift", "30 % change their rotation in the middle", "rotated+drift", 4, at=[middle], share=0.3),
        one("kinds-2", "two rotations, K = 2", rotated, 2, 2),
        one("kinds-8", "eight rotations, K = 8", rotated, 8, 8),
        one("kind-5", "two rotations, one with 5 % of the clients, K = 2", rotated, 2, 2, kinds=[0.95, 0.05]),
        one("k-small", "K = 2 for four rotations", rotated, 4, 2),
        one("k-large", "K = 6 for four rotations", rotated, 4, 6),
    ]


def find_situations(text: str, base: Tables) -> list[Situation]:
    """The situations of `--scenarios`: 'default', 'kind', or a file."""
    if text not in (DEFAULT, KIND):
        return read_situations(Path(text))
    run = base.get("run", {})
    rounds = {"rounds": Schedule.rounds, **_preset(base).run, **run}["rounds"]
    return default_situations(rounds, "like" if text == DEFAULT else "kind")


def read_situations(path: Path) -> list[Situation]:
    """The situations of a TOML file; a wrong table or field is an error that names it."""
    if not path.is_file():
        raise ConfigError(f"There is no file {path}; --scenarios takes 'default', 'kind' or a TOML file.")
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
    if run_folder_of(path) is not None:
        check_trust(tables, path, trust=False, way_out="Copy the file out of the run folder if you know who wrote it")
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
    methods = [*algorithms(), *names]
    known = {key for method in methods for key in fields_of(find_algorithm(method))}
    found: dict[tuple[int, str, str], Experiment] = {}
    for situation in situations:
        try:
            for key in situation.tables.get("algorithm", {}):
                if key not in known:
                    raise UnknownName("field of algorithm named", key, known)
            own = {name: situation.algorithm_fields(name) for name in names}
            every = resolve_each(situation.over(base), names, seeds, own)
        except ConfigError as error:
            raise ConfigError(f"Situation '{situation.name}': {error}") from error
        found |= {(seed, situation.name, name): experiment for (name, seed), experiment in every.items()}
    order = {situation.name: place for place, situation in enumerate(situations)}
    places = {seed: place for place, seed in enumerate(seeds)}
    return dict(sorted(found.items(), key=lambda item: (places[item[0][0]], order[item[0][1]])))  # sorting is stable
