"""`coterie compare`: several methods on the same federation, over several seeds, in one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli import run as flags_of
from coterie.cli.table import Case, finish, make_root, rows_of, run_cases
from coterie.errors import ConfigError
from coterie.methods.base import algorithms
from coterie.runs.experiment import apply_set, merge, read_tables, resolve_each
from coterie.runs.trackers import trackers

DEFAULT = ("local", "fedavg", "ifca", "fesem")
ALL = "all"


def compare(
    algorithm: Annotated[
        list[str] | None, typer.Option("--algorithm", "-a", help="A method; give it several times, or 'all'.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many seeds: 0 ... N-1.")] = "1",
    dataset: flags_of.DatasetFlag = None,
    scenario: flags_of.ScenarioFlag = None,
    model: flags_of.ModelFlag = None,
    clients: flags_of.ClientsFlag = None,
    clusters: flags_of.ClustersFlag = None,
    rounds: flags_of.RoundsFlag = None,
    epochs: flags_of.EpochsFlag = None,
    steps: flags_of.StepsFlag = None,
    batch_size: flags_of.BatchFlag = None,
    lr: flags_of.LrFlag = None,
    momentum: flags_of.MomentumFlag = None,
    participation: flags_of.ParticipationFlag = None,
    unseen: flags_of.UnseenFlag = None,
    dropout: flags_of.DropoutFlag = None,
    attack: flags_of.AttackFlag = None,
    attackers: flags_of.AttackersFlag = None,
    corrupt: flags_of.CorruptFlag = None,
    engine: flags_of.EngineFlag = None,
    device: flags_of.DeviceFlag = None,
    data_dir: flags_of.DataFlag = None,
    out: flags_of.OutFlag = Path("runs"),
    name: flags_of.NameFlag = None,
    config: flags_of.ConfigFlag = None,
    set_: flags_of.SetFlag = None,
    evaluate_every: flags_of.EvaluateFlag = None,
    checkpoint_every: flags_of.CheckpointFlag = None,
    track: flags_of.TrackFlag = None,
    json_: flags_of.JsonFlag = False,
    quiet: flags_of.QuietFlag = False,
) -> None:
    """Compare methods on the same data, first weights, cohorts and local work; mean and deviation over seeds.

    What a method spends beyond that is in the table: gradients of single samples that clients computed (in millions,
    start and repairs included), bytes down and up, bytes of the start, seconds.
    """
    flags = {key: value for key, value in locals().items() if key not in ("algorithm", "seeds")}
    trackers(track)  # one that is missing is refused before anything runs
    layers = merge(read_tables(config) if config else {}, flags_of.flags_to_tables(flags))
    tables = apply_set(layers, set_ or [])
    # Everything is resolved and checked before anything runs: a bad name or number costs nothing.
    plans = resolve_each(tables, names_of(algorithm), seeds_of(seeds))
    cases = [Case((("method", key),), experiment) for (key, _), experiment in plans.items()]
    federation = cases[0].experiment.federation()
    for case in cases:
        case.experiment.algorithm.check(len(federation))
    data = cases[0].experiment.dataset
    root = make_root(out, name, f"compare-{Path(data).stem}")
    summaries = run_cases(cases, federation, root, quiet or json_, track)
    finish(rows_of(cases, summaries), summaries, root, data, json_)


def names_of(algorithm: list[str] | None) -> list[str]:
    """The methods that were asked for; 'all' is every registered one."""
    wanted = algorithm or list(DEFAULT)
    return list(dict.fromkeys(name for item in wanted for name in (algorithms() if item == ALL else [item])))


def seeds_of(text: str) -> int:
    """How many seeds."""
    count = flags_of.parse_int("seeds", text) or 0
    if count < 1:
        raise ConfigError(f"--seeds must be an int >= 1. Got '{text}' instead.")
    return count
