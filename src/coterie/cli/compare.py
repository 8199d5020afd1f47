"""`coterie compare`: several methods on the same federation, over several seeds, in one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from coterie.cli.flags import JsonFlag, MethodsFlag, NameFlag, OutFlag, QuietFlag, SeedsFlag, TrackFlag, takes
from coterie.client.settings import WorkSettings
from coterie.runs.settings import ClusterSettings, RunSettings, Schedule, Tables

if TYPE_CHECKING:
    from coterie.cli.table import Case

DEFAULT = ["local", "fedavg", "ifca", "fesem"]
ALL = "all"


@takes(RunSettings, ClusterSettings, Schedule, WorkSettings, without=("algorithm", "seed"))
def compare(
    *,
    algorithm: MethodsFlag = DEFAULT,
    seeds: SeedsFlag = 1,
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
    """
    from coterie.cli.table import Case
    from coterie.runs.experiment import resolve_each

    # Everything is resolved before the first run, so that a bad name or number costs nothing.
    found = resolve_each(tables, names_of(algorithm), seeds)
    cases = [Case((("method", key),), experiment) for (key, _), experiment in found.items()]
    run_table(cases, "compare", out, name, track, json_, quiet)


def names_of(algorithm: list[str]) -> list[str]:
    """The requested methods; 'all' is every registered one."""
    from coterie.methods.base import algorithms

    return list(dict.fromkeys(name for item in algorithm for name in (algorithms() if item == ALL else [item])))


def run_table(
    cases: list[Case], verb: str, out: Path, name: str | None, track: list[str] | None, json_: bool, quiet: bool
) -> None:
    """Run the cases and print their table; everything is checked before the first run."""
    from coterie.cli.table import finish, make_root, rows_of, run_cases
    from coterie.runs.trackers import trackers

    trackers(track)
    first = cases[0]
    federation = first.experiment.federation()  # those of other cases are loaded when needed
    for case in cases:
        if case.data_key == first.data_key:
            case.experiment.algorithm.check(len(federation))
    data = first.experiment.dataset
    root = make_root(out, name, f"{verb}-{Path(data).stem}")
    summaries = run_cases(cases, federation, root, quiet or json_, track)
    finish(rows_of(cases, summaries), summaries, root, data, json_)
