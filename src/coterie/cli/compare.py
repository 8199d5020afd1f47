"""`coterie compare`: several methods on the same federations, over situations and seeds, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.flags import JobsFlag, JsonFlag, MethodsFlag, NameFlag, OutFlag, QuietFlag, SeedsFlag, TrackFlag, takes
from coterie.client.settings import WorkSettings
from coterie.runs.processes import start_server
from coterie.runs.settings import ClusterSettings, RunSettings, Schedule, Tables, parse_seeds

if TYPE_CHECKING:
    from coterie.runs.batch import Case
    from coterie.runs.situations import Situation

DEFAULT = ["local", "fedavg", "ifca", "fesem", "coterie"]
ALL = "all"


@takes(RunSettings, ClusterSettings, Schedule, WorkSettings, without=("algorithm", "seed"))
def compare(
    *,
    algorithm: MethodsFlag = DEFAULT,
    scenarios: Annotated[
        str | None,
        typer.Option(
            "--scenarios",
            metavar="default|kind|FILE",
            help="Compare in several situations: the built-in list (see 'coterie list situations'), the same with "
            "tests on all data of a client's kind, or a TOML file.",
        ),
    ] = None,
    seeds: SeedsFlag = "1",
    jobs: JobsFlag = 1,
    tables: Tables,
    out: OutFlag = Path("runs"),
    name: NameFlag = None,
    track: TrackFlag = None,
    json_: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Compare methods on the same data.

    All start from the same weights and train the same cohorts with the same local work; scores are mean and standard
    deviation over the seeds. The table also shows what each method costs: per-sample gradients computed by clients (in
    millions, including start and repairs), bytes down and up, bytes of the start, seconds.

    With --scenarios, every method is run in every situation, and there is one table per number. The same command
    continues a comparison that was stopped: finished runs are kept, interrupted ones are resumed. With the --name of a
    finished one it adds methods, seeds and situations.
    """
    start_server(jobs)
    from coterie.cli.table import run_table

    cases, situations = cases_of(tables, names_of(algorithm), parse_seeds(seeds), scenarios)
    run_table(cases, "compare", out, name, jobs=jobs, track=track, json_=json_, quiet=quiet, situations=situations)


def cases_of(
    tables: Tables, names: list[str], seeds: Sequence[int], scenarios: str | None = None
) -> tuple[list[Case], list[Situation]]:
    """The runs of a comparison, and its situations.

    Everything is resolved before the first run, so that a bad name or number costs nothing.
    """
    from coterie.runs.batch import SITUATION, Case
    from coterie.runs.experiment import resolve_each
    from coterie.runs.situations import find_situations, resolve_situations

    if scenarios is None:
        found = resolve_each(tables, names, seeds)
        return [Case((("method", key),), experiment) for (key, _), experiment in found.items()], []
    situations = find_situations(scenarios, tables)
    every = resolve_situations(situations, tables, names, seeds)
    labelled = ((((SITUATION, s), ("method", key)), experiment) for (_, s, key), experiment in every.items())
    return [Case(labels, experiment) for labels, experiment in labelled], situations


def names_of(algorithm: list[str]) -> list[str]:
    """The requested methods; 'all' is every registered one."""
    from coterie.methods.base import algorithms

    return list(dict.fromkeys(name for item in algorithm for name in (algorithms() if item == ALL else [item])))
