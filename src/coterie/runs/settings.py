"""Settings of a run: flags, `[run]` in TOML, `--set run.FIELD=VALUE`. Imports no torch: --help is fast.

A field with `flag=True` here (or in `coterie.client.settings`) is a flag of `run`, `compare` and every other command
that takes the class.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from coterie.engines import ENGINES
from coterie.engines.settings import AttackKind
from coterie.errors import ConfigError, UnknownName
from coterie.settings import build, fields_of, listed, parse_value, setting

TABLES = ("run", "algorithm", "work", "dataset", "scenario", "model", "engine")
Tables = dict[str, dict[str, Any]]
AUTO = "auto"  # number of clusters: chosen before the run
PROBE_CLIENTS, PROBE_ROUNDS, LARGEST_K = 100, 3, 8  # defaults of choose-k; the first two are the paper's
MOST_SEEDS = 10_000  # of one comparison
MOST_CLIENTS = 10_000_000  # their names alone take a gigabyte

_OWN = "the dataset's"
_MOST_BYTES = 1 << 20  # of a config file


@dataclass(frozen=True)
class RunSettings:
    """What to train, on which data, and where."""

    table: ClassVar[str] = "run"

    algorithm: str = setting("coterie", "method; see 'coterie list algorithms'", flag="--algorithm -a")
    dataset: str = setting(
        "rotated-digits",
        "named dataset, or path of your own data: .npz, .npy, .csv, .parquet, or a folder of pictures",
        flag="--dataset -d",
    )
    scenario: str | None = setting(None, "how the data is partitioned", flag=True, default_is=_OWN)
    clients: int | None = setting(None, "number of clients", ge=1, le=MOST_CLIENTS, flag=True, default_is=_OWN)
    model: str | None = setting(None, "named network, or module:callable", flag=True, default_is=_OWN)
    loss: str = setting("cross_entropy", "loss: cross_entropy, mse or module:callable", flag=True)
    engine: str = setting(
        "vectorized",
        "how clients run: loop (reference), vectorized (fast), ray (several GPUs or machines), flower (messages)",
        flag=True,
        choices=ENGINES,
    )
    device: str = setting("auto", "device to train on: auto, cpu or cuda", flag=True)
    data_dir: str | None = setting(
        None, "folder of the stored datasets", flag=True, default_is="COTERIE_DATA, or ~/.cache/coterie"
    )


@dataclass(frozen=True)
class ClusterSettings:
    """The only setting of methods that has a flag."""

    table: ClassVar[str] = "algorithm"

    num_clusters: int | str | None = setting(
        None,
        "number of clusters K; auto: coterie finds it, other methods (only in run) choose it as choose-k does; "
        "a range such as 2-6 bounds it in coterie",
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
    initial: int | None = setting(
        None, "torch's seed for the first weights, whatever the seed of the run; by default they follow from it", ge=0
    )
    evaluate_every: int = setting(1, "evaluate every N rounds, and after the last one", ge=1, flag=True)
    patience: int | None = setting(
        None,
        "stop after N evaluations without a better validation loss, and keep the best round",
        ge=1,
        flag=True,
        default_is="all rounds are run, and the last one is kept",
    )
    checkpoint_every: float = setting(30.0, "seconds between checkpoints; 0 saves every round", ge=0, flag=True)
    unseen: float = setting(0.0, "fraction of the clients held out and evaluated at the end", ge=0, lt=1, flag=True)
    dropout: float = setting(0.0, "simulated fraction of a cohort that fails to answer", ge=0, lt=1, flag=True)
    attack: AttackKind = setting("none", "simulated attack", flag=True)
    attackers: float = setting(0.2, "fraction of the clients that attack", ge=0, lt=1, flag=True)
    corrupt: float = setting(0.0, "simulated fraction of answers that arrive as NaN", ge=0, lt=1, flag=True)
    keep_pictures: bool = setting(
        False,
        "keep a few training images of each cluster in the run folder",
        flag=True,
        default_is="only those of coterie's named datasets",
    )
    keep_models: int = setting(
        64, "megabytes of personal models that the run folder may hold, to export them without the data", ge=0
    )


def build_run(values: Mapping[str, Any]) -> tuple[RunSettings, Schedule]:
    """The settings in the table [run]; an unknown name is an error that suggests the nearest one."""
    named, scheduled = fields_of(RunSettings), fields_of(Schedule)
    for key in values:
        if key not in named and key not in scheduled:
            raise UnknownName("field of run named", key, (*named, *scheduled))
    run, schedule = ({k: v for k, v in values.items() if k in fields} for fields in (named, scheduled))
    return build(RunSettings, run, "run"), build(Schedule, schedule, "run")


def parse_seeds(text: str, usual: Sequence[int] = ()) -> tuple[int, ...]:
    """The seeds of `--seeds`: a count, a range, or a list of numbers and ranges.

    A count takes the first of the usual seeds, and goes on after the last of them.

    >>> parse_seeds("3"), parse_seeds("5-9"), parse_seeds("1,4,7"), parse_seeds("7,0-2")
    ((0, 1, 2), (5, 6, 7, 8, 9), (1, 4, 7), (7, 0, 1, 2))
    >>> parse_seeds("1", (42, 43)), parse_seeds("3", (42, 43))
    ((42,), (42, 43, 44))
    """
    expected = "--seeds must be a count >= 1 (3), a range (5-9) or a list (1,4,7)"
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        numbers = [first, last] if dash else [first]
        if not all(number.isascii() and number.isdigit() for number in numbers):
            raise ConfigError(f"{expected}. Got '{text}' instead.")
        if int(numbers[0]) > int(numbers[-1]) or len(seeds) + int(numbers[-1]) - int(numbers[0]) >= MOST_SEEDS:
            raise ConfigError(f"{expected} of at most {MOST_SEEDS} seeds. Got '{text}' instead.")
        seeds += range(int(numbers[0]), int(numbers[-1]) + 1)
    if "," in text or "-" in text:
        return tuple(dict.fromkeys(seeds))
    if not 1 <= seeds[0] <= MOST_SEEDS:
        raise ConfigError(f"{expected}. Got '{text}' instead.")
    after = max(usual, default=-1) + 1
    return (*usual, *range(after, after + seeds[0]))[: seeds[0]]


def seeds_as_text(seeds: Sequence[int], usual: Sequence[int] = ()) -> str:
    """The shortest text that `parse_seeds` reads as these seeds.

    >>> seeds_as_text([0, 1], [0, 1, 2]), seeds_as_text([1], [0, 1, 2]), seeds_as_text([1, 4, 7])
    ('2', '1-1', '1,4,7')
    """
    if tuple(seeds) == tuple(usual[: len(seeds)]):
        return str(len(seeds))
    return f"{seeds[0]}-{seeds[0]}" if len(seeds) == 1 else ",".join(map(str, seeds))


def read_tables(path: Path) -> Tables:
    """The tables of a config file; an unknown table is an error that suggests the nearest name."""
    if not path.exists():
        raise ConfigError(f"There is no config file {path}. Check the path.")
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            raise OSError("it is not a small regular file")
        values = tomllib.loads(path.read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"The config file {path} cannot be read: {error}.") from error
    values.pop("schema", None)
    for table, content in values.items():
        if table not in TABLES:
            raise UnknownName(f"table of {path} named", table, TABLES)
        if not isinstance(content, dict):
            raise ConfigError(f"{table} in {path} must be a table, [{table}]. Got {content!r} instead.")
    return values


def apply_set(tables: Tables, assignments: Iterable[str], allowed: Sequence[str] = TABLES) -> Tables:
    """Apply `TABLE.FIELD=VALUE` assignments to the tables; `allowed` are the tables that a command takes."""
    merged = merge(tables)
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
    """All tables, field by field; later layers win."""
    return {name: {k: v for layer in layers for k, v in layer.get(name, {}).items()} for name in TABLES}
