"""Settings of a run: flags, `[run]` in TOML, `--set run.FIELD=VALUE`. Imports no torch: --help is fast.

A new flag is a new field here (or in `coterie.client.settings`) with `flag=True`: `run`, `compare` and every other
command that takes the class have it then, and so do config files.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from coterie.engines import ENGINES
from coterie.errors import ConfigError, UnknownName
from coterie.settings import build, fields_of, listed, parse_value, setting

TABLES = ("run", "algorithm", "work", "dataset", "scenario", "model", "engine")
Tables = dict[str, dict[str, Any]]
AUTO = "auto"  # number of clusters: choose it before the run
PROBE_CLIENTS, PROBE_ROUNDS, LARGEST_K = 100, 3, 8  # defaults of choose-k; the first two are the paper's

_OWN = "the dataset's"


@dataclass(frozen=True)
class RunSettings:
    """What to train, on which data, and where."""

    table: ClassVar[str] = "run"

    algorithm: str = setting("fesem", "method; see 'coterie list algorithms'", flag="--algorithm -a")
    dataset: str = setting("rotated-digits", "named dataset, or path to your own .npz file", flag="--dataset -d")
    scenario: str | None = setting(None, "how the data is partitioned", flag=True, default_is=_OWN)
    clients: int | None = setting(None, "number of clients", ge=1, flag=True, default_is=_OWN)
    model: str | None = setting(None, "named network, or module:callable", flag=True, default_is=_OWN)
    loss: str = setting("cross_entropy", "loss: cross_entropy, mse or module:callable", flag=True)
    engine: str = setting("vectorized", "how clients are simulated", flag=True, choices=ENGINES)
    device: str = setting("auto", "device to train on: auto, cpu or cuda", flag=True)
    data_dir: str | None = setting(
        None, "folder of the stored datasets", flag=True, default_is="COTERIE_DATA, or ~/.cache/coterie"
    )


@dataclass(frozen=True)
class ClusterSettings:
    """The one setting of a method that has a flag."""

    table: ClassVar[str] = "algorithm"

    num_clusters: int | Literal["auto"] | None = setting(
        None,
        "number of clusters K; auto (only in run) chooses it as choose-k does",
        ge=1,
        flag="--clusters -k",
        default_is="the method's",
    )


@dataclass(frozen=True)
class Schedule:
    """How long to train, with which clients, and how often to evaluate and save."""

    table: ClassVar[str] = "run"

    rounds: int = setting(20, "number of rounds", ge=1, flag=True)
    participation: float = setting(1.0, "fraction of the clients in each round", gt=0, le=1, flag=True)
    seed: int = setting(0, "random seed", ge=0, flag=True)
    evaluate_every: int = setting(1, "evaluate every N rounds, and after the last one", ge=1, flag=True)
    checkpoint_every: float = setting(30.0, "seconds between checkpoints; 0 saves every round", ge=0, flag=True)
    unseen: float = setting(0.0, "fraction of the clients held out and evaluated at the end", ge=0, lt=1, flag=True)
    dropout: float = setting(0.0, "simulated fraction of a cohort that fails to answer", ge=0, lt=1, flag=True)
    attack: Literal["none", "sign_flip", "gaussian", "label_flip"] = setting("none", "simulated attack", flag=True)
    attackers: float = setting(0.2, "fraction of the clients that attack", ge=0, lt=1, flag=True)
    corrupt: float = setting(0.0, "simulated fraction of answers that arrive as NaN", ge=0, lt=1, flag=True)
    keep_pictures: bool = setting(True, "keep a few sample images of each cluster in the run folder", flag=True)


def build_run(values: Mapping[str, Any]) -> tuple[RunSettings, Schedule]:
    """The settings in the table [run]; an unknown name is an error that suggests the nearest one."""
    named, scheduled = fields_of(RunSettings), fields_of(Schedule)
    for key in values:
        if key not in named and key not in scheduled:
            raise UnknownName("field of run named", key, (*named, *scheduled))
    run = build(RunSettings, {key: value for key, value in values.items() if key in named}, "run")
    return run, build(Schedule, {key: value for key, value in values.items() if key in scheduled}, "run")


def read_tables(path: Path) -> Tables:
    """The tables of a config file; an unknown table is an error that suggests the nearest name."""
    if not path.exists():
        raise ConfigError(f"There is no config file {path}.")
    try:
        values = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"The config file {path} cannot be read: {error}.") from error
    values.pop("schema", None)
    for table, content in values.items():
        if table not in TABLES:
            raise UnknownName(f"table of {path} named", table, TABLES)
        if not isinstance(content, dict):
            raise ConfigError(f"{table} in {path} must be a table: [{table}].")
    return values


def apply_set(tables: Tables, assignments: Iterable[str], allowed: Sequence[str] = TABLES) -> Tables:
    """Apply `TABLE.FIELD=VALUE` texts to the tables; a command may allow some of the tables only."""
    merged = {name: dict(tables.get(name, {})) for name in TABLES}
    for text in assignments:
        name, equals, value = text.partition("=")
        table, dot, key = name.strip().partition(".")
        if not equals or not dot or not key:
            raise ConfigError(f"--set takes TABLE.FIELD=VALUE, such as algorithm.prox=0.1. Got '{text}' instead.")
        if table not in TABLES:
            raise UnknownName("--set table", table, TABLES)
        if table not in allowed:
            raise ConfigError(f"--set takes fields of {listed(allowed)} here. Got '{text}' instead.")
        merged[table][key] = parse_value(value.strip())
    return merged


def merge(*layers: Mapping[str, Mapping[str, Any]]) -> Tables:
    """Later layers win, field by field."""
    return {name: {k: v for layer in layers for k, v in layer.get(name, {}).items()} for name in TABLES}
