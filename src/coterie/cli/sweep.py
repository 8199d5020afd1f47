"""`coterie sweep`: a grid of fields and seeds, in one table."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli import run as flags_of
from coterie.cli.compare import names_of, seeds_of
from coterie.cli.table import Case, finish, make_root, rows_of, run_cases
from coterie.errors import ConfigError
from coterie.runs.experiment import apply_set, merge, read_tables, resolve_each
from coterie.runs.trackers import trackers


def sweep(
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", "-g", help="A field and its values: algorithm.prox=0,0.1,1; give it several times."),
    ] = None,
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
    """Run every combination of the values of --grid, for each method and seed: one row a combination.

    Fields are those of --set, and of [run]: run.participation=0.1,0.5 or scenario.alpha=1,10 or work.lr=0.05,0.1.
    A method that does not have a field of its own that is swept has one row.
    """
    flags = {key: value for key, value in locals().items() if key not in ("algorithm", "seeds", "grid")}
    trackers(track)  # one that is missing is refused before anything runs
    axes = [parse_axis(text) for text in grid or []]
    if not axes:
        raise ConfigError("sweep needs a --grid, such as --grid algorithm.num_clusters=2,4,8.")
    layers = merge(read_tables(config) if config else {}, flags_of.flags_to_tables(flags))
    names, count = names_of(algorithm or ["fesem"]), seeds_of(seeds)
    cases: list[Case] = []
    seen: set[str] = set()
    for seed in range(count):
        for values in itertools.product(*[choices for _, choices in axes]):
            chosen = list(zip([field for field, _ in axes], values, strict=True))
            tables = apply_set(layers, [*(set_ or []), *(f"{field}={value}" for field, value in chosen)])
            for (key, number), experiment in resolve_each(tables, names, count).items():
                if number != seed or repr(experiment.tables()) in seen:
                    continue
                seen.add(repr(experiment.tables()))
                has = [(f.rpartition(".")[2], v) for f, v in chosen if _used(f, experiment.tables())]
                cases.append(Case((("method", key), *has), experiment))
    data = cases[0].experiment.dataset
    federation = cases[0].experiment.federation()  # others of the grid are read when their turn comes
    root = make_root(out, name, f"sweep-{Path(data).stem}")
    summaries = run_cases(cases, federation, root, quiet or json_, track)
    finish(rows_of(cases, summaries), summaries, root, data, json_)


def parse_axis(text: str) -> tuple[str, list[str]]:
    """`TABLE.FIELD=A,B,C` -> the field and its values."""
    field, equals, values = text.partition("=")
    choices = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or "." not in field or not choices:
        raise ConfigError(f"--grid takes TABLE.FIELD=A,B,C, such as algorithm.prox=0,0.1. Got '{text}' instead.")
    return field.strip(), list(dict.fromkeys(choices))


def _used(field: str, tables: dict[str, dict[str, object]]) -> bool:
    """Whether an experiment has the field: methods need not have each other's."""
    table, _, key = field.partition(".")
    return table != "algorithm" or key in tables["algorithm"]
