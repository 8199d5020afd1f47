"""`coterie sweep`: a grid of fields and seeds, in one table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.compare import names_of
from coterie.cli.flags import JobsFlag, JsonFlag, MethodsFlag, NameFlag, OutFlag, QuietFlag, SeedsFlag, TrackFlag, takes
from coterie.client.settings import WorkSettings
from coterie.errors import ConfigError
from coterie.runs.processes import start_server
from coterie.runs.settings import ClusterSettings, RunSettings, Schedule, Tables, apply_set, parse_seeds

if TYPE_CHECKING:
    from coterie.runs.batch import Case
    from coterie.runs.experiment import Experiment

DEFAULT = ["coterie"]


@takes(RunSettings, ClusterSettings, Schedule, WorkSettings, without=("algorithm", "seed"))
def sweep(
    *,
    grid: Annotated[
        list[str] | None, typer.Option("--grid", "-g", help="Field and values: algorithm.prox=0,0.1,1; repeatable.")
    ] = None,
    algorithm: MethodsFlag = DEFAULT,
    seeds: SeedsFlag = "1",
    jobs: JobsFlag = 1,
    tables: Tables,
    out: OutFlag = Path("runs"),
    name: NameFlag = None,
    track: TrackFlag = None,
    json_: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Run every combination of the --grid values.

    Each combination is run with every method and seed, and is one row of the table. The fields are those of --set:
    work.lr=0.05,0.1 or run.participation=0.1,0.5 or scenario.alpha=1,10. A method without the field has one row.
    The same command continues a sweep that was stopped.
    """
    start_server(jobs)
    from coterie.cli.table import run_table
    from coterie.runs.experiment import resolve_each

    axes = [parse_axis(text) for text in grid or []]
    if not axes:
        raise ConfigError("sweep needs a --grid, such as --grid algorithm.num_clusters=2,4,8.")
    names = names_of(algorithm)

    def each(point: Tables, seed: int) -> Iterator[tuple[str, Experiment]]:
        yield from ((key, experiment) for (key, _), experiment in resolve_each(point, names, [seed]).items())

    cases = cases_of(tables, parse_seeds(seeds), axes, each)
    run_table(cases, "sweep", out, name, jobs=jobs, track=track, json_=json_, quiet=quiet)


def cases_of(
    tables: Tables,
    seeds: Sequence[int],
    axes: Sequence[tuple[str, Sequence[object]]],
    each: Callable[[Tables, int], Iterable[tuple[str, Experiment]]],
) -> list[Case]:
    """The runs of a sweep: every combination of the values of the axes with every seed.

    `each` gives the methods and experiments of some settings and a seed; those that are alike are run once.
    """
    from coterie.runs.batch import Case

    cases: list[Case] = []
    seen: set[str] = set()
    for seed in seeds:
        for values in itertools.product(*[choices for _, choices in axes]):
            chosen = list(zip([field for field, _ in axes], values, strict=True))
            point = apply_set(tables, [f"{field}={value}" for field, value in chosen])
            for key, experiment in each(point, seed):
                if repr(experiment.tables()) in seen:
                    continue
                seen.add(repr(experiment.tables()))
                has = [(f.rpartition(".")[2], str(v)) for f, v in chosen if _used(f, experiment.tables())]
                cases.append(Case((("method", key), *has), experiment))
    return cases


def parse_axis(text: str) -> tuple[str, list[str]]:
    """The field and the values of `TABLE.FIELD=A,B,C`."""
    field, equals, values = text.partition("=")
    choices = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or "." not in field or not choices:
        raise ConfigError(f"--grid takes TABLE.FIELD=A,B,C, such as algorithm.prox=0,0.1. Got '{text}' instead.")
    return field.strip(), list(dict.fromkeys(choices))


def _used(field: str, tables: dict[str, dict[str, object]]) -> bool:
    """Whether an experiment has the field: methods have different fields."""
    table, _, key = field.partition(".")
    return table != "algorithm" or key in tables["algorithm"]
