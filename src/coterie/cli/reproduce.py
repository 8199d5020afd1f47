"""`coterie reproduce`: published tables, run again and put beside the published numbers."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.data import FolderFlag
from coterie.cli.flags import JobsFlag, JsonFlag, QuietFlag
from coterie.cli.output import RoundProgress, say, stdout, stop_on_ctrl_c, table_of
from coterie.data.home import data_folder
from coterie.errors import ConfigError, DataError, Interrupted, MissingExtra, RunError, RunsFailed
from coterie.reproduce.borrow import PLACE, borrow
from coterie.reproduce.needs import missing_data, sentence
from coterie.reproduce.outcome import (
    Found,
    Written,
    draw,
    read_result,
    read_runs,
    read_written,
    result_of,
    runs_in,
    write,
)
from coterie.reproduce.page import Result, tables_of
from coterie.reproduce.suite import ALL, Column, Row, Suite, find_suites, suite_names
from coterie.runs.processes import start_server
from coterie.runs.settings import parse_seeds, seeds_as_text

if TYPE_CHECKING:
    from coterie.runs.batch import Case, Loader
    from coterie.runs.observers import Listener

OUT, RESULTS = Path("runs/reproduce"), Path("docs/results")
_SAVED_EVERY = 10.0  # seconds, at least, between two writings of a result


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Suites, such as md_icfl/table4; feddsmic/table2 or fesem for all of its parts; a TOML file; or 'all'."
            " Without a GPU, suites that would take days are run only if they are named themselves."
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the suites: state, date, what is missing.")] = False,
    seeds: Annotated[
        str | None,
        typer.Option(
            "--seeds",
            metavar="SEEDS",
            help="Seeds: a count of the suite's (1 is the first), a range (5-9) or a list (1,4,7); by default the "
            "suite's.",
            show_default=False,
        ),
    ] = None,
    rows: Annotated[list[str] | None, typer.Option("--rows", "-r", help="Only this row; repeatable.")] = None,
    columns: Annotated[list[str] | None, typer.Option("--columns", "-c", help="Only this column; repeatable.")] = None,
    scale: Annotated[
        float, typer.Option(help="A quick look: rounds (or what the suite names) times this, in a folder of its own.")
    ] = 1.0,
    jobs: JobsFlag = 1,
    device: Annotated[str, typer.Option(help="Device to train on: auto, cpu or cuda.")] = "auto",
    data_dir: FolderFlag = None,
    limit_seconds: Annotated[
        float | None,
        typer.Option(help="Stop after so many seconds. Runs in progress are saved; the same command continues them."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = OUT,
    write_: Annotated[
        Path | None,
        typer.Option(
            "--write",
            help="Also write tables, results and figures to SUITE inside this folder. Runs that a result there "
            "already has are kept and not run again.",
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Run also what the written result has, to replace its numbers.")
    ] = False,
    leaderboard: Annotated[
        bool, typer.Option("--leaderboard", help="Write one page of all results in the folder of --results.")
    ] = False,
    results: Annotated[Path, typer.Option(help="Folder of written results, for --list and --leaderboard.")] = RESULTS,
    json_: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Run the tables of papers again, and print them beside the published numbers.

    A suite is a table: its rows and columns, seeds, settings and published numbers. Finished runs are kept in OUT, and
    interrupted ones are resumed, so the same command continues what was stopped. A run that another suite has finished
    in OUT is not run again.
    """
    if not 0 < scale <= 1:
        raise ConfigError(f"--scale must be a float > 0 and <= 1. Got {scale:g} instead.")
    if leaderboard:
        _write_board(results, json_)
        return
    root = out if scale == 1 else out / f"scale-{scale:g}"
    target = write_ if write_ is None or scale == 1 else write_ / f"scale-{scale:g}"
    suites = find_suites(names or ([ALL] if list_ else []))
    if list_:
        _list(suites, root, results, data_folder(data_dir), json_)
        return
    if not suites:
        raise ConfigError("Name a suite, or 'all'; 'coterie reproduce --list' lists them.")
    suites = _affordable(suites, names or [], device, quiet or json_)
    start_server(jobs)
    run = _Run(root, target, seeds, rows or [], columns or [], scale, jobs, device, data_dir, quiet or json_)
    run.again = again
    run.until = float("inf") if limit_seconds is None else monotonic() + limit_seconds
    found, absent = [], []
    for suite in suites:  # before the first run: a bad name costs nothing
        run.cells(suite)
        run.numbers(suite)
    for suite in suites:
        folder = data_folder(data_dir)
        if lacking := missing_data(suite, folder):
            absent.append(sentence(suite, lacking, folder))
            continue
        found.append(run.finish(suite))
        if not json_:
            _print(found[-1])
            say(f"result: {root / suite.name / 'table.md'}", quiet)
    if json_:
        print(json.dumps(found))
    if absent:
        raise DataError(" ".join(absent))
    problems = [
        f"{one['row']}, {one['column']}, seed {one['seed']} failed: {one['problem']}"
        for result in found
        for one in result["missing"]
        if "problem" in one
    ]
    if problems:
        raise RunsFailed(problems[0], len(problems), run.total)


def _affordable(suites: Sequence[Suite], names: Sequence[str], device: str, hidden: bool) -> list[Suite]:
    """The suites without those that need a GPU that is not there; what is named itself stays."""
    own = {Path(name).stem if name.endswith(".toml") else name for name in names}
    doubtful = [suite for suite in suites if suite.gpu and suite.name not in own]
    if not doubtful:
        return list(suites)
    from coterie.engines.base import resolve_device

    if resolve_device(device).type != "cpu":
        return list(suites)
    left_out = ", ".join(suite.name for suite in doubtful)
    say(f"left out, as one run takes a day or more without a GPU: {left_out}; name a suite to run it here", hidden)
    return [suite for suite in suites if suite not in doubtful]


class _Run:
    """The options of a call, and the running of suites with them."""

    def __init__(
        self,
        root: Path,
        target: Path | None,
        seeds: str | None,
        rows: Sequence[str],
        columns: Sequence[str],
        scale: float,
        jobs: int,
        device: str,
        data_dir: Path | None,
        hidden: bool,
    ) -> None:
        self.root, self.target, self.seeds, self.scale = root, target, seeds, scale
        self.rows, self.columns, self.jobs, self.device = rows, columns, jobs, device
        self.data_dir, self.hidden, self.until, self.again = data_dir, hidden, float("inf"), False
        self.total = 0  # runs that were asked for

    def cells(self, suite: Suite) -> list[tuple[Row, Column]]:
        return suite.chosen(self.rows, self.columns)

    def numbers(self, suite: Suite) -> Sequence[int]:
        return suite.seeds if self.seeds is None else parse_seeds(self.seeds, suite.seeds)

    def finish(self, suite: Suite) -> Result:
        """Run what is missing and there is time for, and write the result."""
        from coterie.reproduce.suite import cases_of, settings_of
        from coterie.runs.batch import Loader

        cells, seeds, home = self.cells(suite), self.numbers(suite), self.root / suite.name
        spots = suite.spots(cells, seeds)
        self.total += len(spots)
        where = None if self.data_dir is None else str(self.data_dir)
        loader = Loader()

        def count(case: Case) -> int:
            groups = loader.federation(case).groups
            return 1 if groups is None else len(groups.unique())

        def settings(row: Row, column: Column) -> dict[str, Any]:
            tables = settings_of(suite, row, column)
            return {f"{table}.{key}": value for table, values in tables.items() for key, value in values.items()}

        there = None if self.target is None else self.target / suite.name
        written = Written() if there is None else read_written(there, suite, settings)
        cases = cases_of(suite, spots, count, scale=self.scale, device=self.device, data_dir=where)

        def so_far(
            problems: Mapping[str, str], cells: Sequence[tuple[Row, Column]], seeds: Sequence[int]
        ) -> tuple[Result, Found]:
            found = read_runs(home, suite.spots(cells, seeds), problems, written)
            command = self._command(suite, cells, seeds)
            result = result_of(suite, cells, seeds, found, command=command, scale=self.scale, settings=settings)
            return result, found

        whole = written.extended(suite, cells, seeds)

        def save() -> None:
            if there is not None:
                write(there, so_far({}, *whole)[0])

        problems = self._run(suite, cases, home, loader, () if self.again else written.places, save)
        result, _ = so_far(problems, cells, seeds)
        write(home, result)
        if there is not None:
            self._draw(suite, *so_far(problems, *whole), there)
        return result

    def _draw(self, suite: Suite, result: Result, found: Found, there: Path) -> None:
        """Write a result, and draw its figures: those that show runs only if all of them are here."""
        write(there, result)
        runs: Path | None = self.root / suite.name
        used = {place for cell in result["cells"] for place in cell["runs"]}
        if suite.figures and (elsewhere := len(used - found.summaries.keys())):
            say(f"figures of {suite.name} that show runs stay: {elsewhere} of its runs are not here", self.hidden)
            runs = None
        try:
            drawn = [path.name for path in draw(suite, result, runs, there)]
        except (DataError, MissingExtra, RunError) as error:
            say(f"no figures of {suite.name}: {error}")
        else:
            result["figures"] = list(dict.fromkeys([*(result["figures"] if runs is None else ()), *drawn]))
            write(there, result)

    def _run(
        self,
        suite: Suite,
        cases: list[Case],
        home: Path,
        loader: Loader,
        written: Collection[str],
        save: Callable[[], None],
    ) -> dict[str, str]:
        """Run the cases that are neither finished nor written, until the time is over; why some failed, by place.

        `save` is called now and then: a table of many runs takes hours, and may be killed.
        """
        from coterie.cli.table import outcome_line
        from coterie.runs.batch import Clock, check_cases, check_folders, run_cases
        from coterie.runs.folder import RunFolder

        check_folders(cases, home, ignored=PLACE, option="--out")
        waiting = [case for case in cases if not (home / case.place / "summary.json").exists()]
        known = [case for case in waiting if case.place in written]
        if known:
            say(f"{suite.name}: {len(known)} runs are in the written result", self.hidden)
            waiting = [case for case in waiting if case not in known]
        if waiting and not suite.keep_models:
            found = [case.place for case in borrow(waiting, home, self.root)]
            if found:
                say(f"{suite.name}: {len(found)} runs are those of other suites", self.hidden)
            waiting = [case for case in waiting if case.place not in found]
        if not waiting or monotonic() > self.until:
            return {}
        problems = dict[str, str]()
        check_cases(waiting[:1], loader)
        home.mkdir(parents=True, exist_ok=True)

        @contextlib.contextmanager
        def watch(case: Case) -> Iterator[Listener]:
            with RoundProgress(case.experiment.schedule.rounds, case.title, self.hidden, lines=0) as progress:
                yield progress

        left, number, saved = Clock(len(waiting)), 0, float("-inf")
        with RunFolder(home).held(), stop_on_ctrl_c(self.hidden) as pressed:

            def is_over() -> bool:
                return pressed() or monotonic() > self.until

            every = run_cases(waiting, home, jobs=self.jobs, say=say, loader=loader, watch=watch, should_stop=is_over)
            try:
                with contextlib.closing(every):
                    for number, outcome in enumerate(every, 1):
                        say(outcome_line(outcome, number, len(waiting), left.left(outcome)), self.hidden)
                        if outcome.problem is not None:
                            problems[outcome.case.place] = outcome.problem
                        elif not suite.keep_models:
                            RunFolder(home / outcome.case.place).drop_checkpoints()
                        if monotonic() - saved > _SAVED_EVERY:
                            save()
                            saved = monotonic()
            except (Interrupted, KeyboardInterrupt):
                if pressed():
                    raise Interrupted(
                        f"Stopped; {number} runs of {suite.name} were finished; the same command continues."
                    ) from None
                say(f"{suite.name}: the time is over", self.hidden)
        return problems

    def _command(self, suite: Suite, cells: Sequence[tuple[Row, Column]], seeds: Sequence[int]) -> str:
        """The command of these cells and seeds, without the options that do not change the result."""
        words = ["coterie", "reproduce", suite.name if suite.name in suite_names() else f"{suite.name}.toml"]
        words += [] if tuple(seeds) == suite.seeds else ["--seeds", seeds_as_text(seeds, suite.seeds)]
        rows, columns = {row.label for row, _ in cells}, {column.name for _, column in cells}
        if len(rows) < len(suite.rows):
            words += [word for row in suite.rows if row.label in rows for word in ("--rows", row.label)]
        if len(columns) < len(suite.columns):
            words += [word for one in suite.columns if one.name in columns for word in ("--columns", one.name)]
        words += [] if self.scale == 1 else ["--scale", f"{self.scale:g}"]
        words += [] if self.device == "auto" else ["--device", self.device]
        return shlex.join(words)


def _print(result: Result) -> None:
    """The tables of a result: one for each metric."""
    from coterie.cli.grids import Cell, Grid, print_grids

    grids = [
        Grid(table.title, table.rows, table.columns, {key: Cell(text) for key, text in table.texts.items()}, head="")
        for table in tables_of(result)
    ]
    title = f"{result['paper']}. {result['title']}: published → ours ± standard deviation over seeds (difference)"
    print_grids(stdout(), grids, title)
    for note in result["notes"]:
        stdout().print(f"- {note}", markup=False)
    if result["missing"]:
        stdout().print(f"{len(result['missing'])} runs are missing; the same command continues.", markup=False)


def _write_board(results: Path, json_: bool) -> None:
    from coterie.reproduce.leaderboard import write_board

    files, problem = write_board(results)
    if problem:
        say(f"no figure: {problem}")
    print(json.dumps([str(path) for path in files]) if json_ else f"written: {', '.join(map(str, files))}")


# ---- the list ----


def _list(suites: Sequence[Suite], root: Path, results: Path, folder: Path, json_: bool) -> None:
    listed = [_state(suite, root, results, folder) for suite in suites]
    if json_:
        print(json.dumps(listed))
        return
    heads = ("suite", "title", "GPU", "runs", "state", "newest result", "missing data")
    cells = [
        (
            one["name"],
            one["title"],
            "needed" if one["gpu"] else "",
            f"{one['done']}/{one['total']}",
            one["state"],
            (one["date"] or "")[:10],
            ", ".join(one["missing"]),
        )
        for one in listed
    ]
    stdout().print(table_of("suites", heads, cells, text=heads))


def _state(suite: Suite, root: Path, results: Path, folder: Path) -> dict[str, Any]:
    """A suite of the list, as --json prints it."""
    spots = suite.spots(suite.chosen(), suite.seeds)
    done = sum((root / suite.name / spot.place / "summary.json").exists() for spot in spots)
    here, written = read_result(root / suite.name), read_result(results / suite.name)
    found = [result for result in (here, written) if result is not None]
    most = min(len(spots), max(done, 0 if written is None else runs_in(written)))
    return {
        "name": suite.name,
        "paper": suite.paper,
        "title": suite.title,
        "priority": suite.priority,
        "gpu": suite.gpu,
        "done": most,
        "total": len(spots),
        "state": "done" if most == len(spots) else "part" if most else "not started",
        "date": max((result["date"] for result in found), default=None),
        "result": str(results / suite.name) if written is not None else None,
        "missing": missing_data(suite, folder),
    }
