"""Many runs in one table: shared by `compare` and `sweep`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from coterie.cli.grids import grids_of, markdown_of, print_grids
from coterie.cli.output import RoundProgress, clock, say, score_text, stdout, stop_on_ctrl_c, table_of
from coterie.errors import CoterieError, Interrupted, RunsFailed
from coterie.runs.batch import SITUATION, Case, Clock, Loader, Outcome, check_cases, run_cases
from coterie.runs.comparison import Comparison, Row, record_of, rows_of, standings_of
from coterie.runs.metrics import METRICS, NUMBER, PERCENT, SECONDS, Format, Metric, metrics
from coterie.runs.observers import Listener
from coterie.runs.situations import Situation
from coterie.runs.trackers import trackers
from coterie.settings import counted
from coterie.views.words import size_text


def run_table(
    cases: list[Case],
    verb: str,
    out: Path,
    name: str | None,
    *,
    jobs: int = 1,
    track: list[str] | None = None,
    json_: bool = False,
    quiet: bool = False,
    situations: Sequence[Situation] = (),
) -> None:
    """Run the cases and print their table; everything is checked before the first run."""
    root, outcomes = completed(
        cases, verb, out, name, jobs=jobs, track=track, hidden=quiet or json_, situations=situations
    )
    finish(outcomes, root, cases[0].experiment.dataset, json_)
    check_failures(outcomes)


def completed(
    cases: list[Case],
    verb: str,
    out: Path,
    name: str | None,
    *,
    jobs: int = 1,
    track: list[str] | None = None,
    hidden: bool = False,
    situations: Sequence[Situation] = (),
) -> tuple[Comparison, list[Outcome]]:
    """The folder of the cases and what became of them, at least one of which has not failed."""
    trackers(track)
    loader, data = Loader(), cases[0].experiment.dataset
    check_cases(cases, loader)
    root = Comparison.create(out, name, f"{verb}-{Path(data).stem}", cases, situations)
    if root.is_continued:
        say(f"continuing {root.path}", hidden)
    try:
        with root.held():
            outcomes = _run(cases, root, jobs, track, loader, hidden)
    except CoterieError:
        root.remove_empty()
        raise
    if all(outcome.summary is None for outcome in outcomes):
        root.remove_empty()
        check_failures(outcomes)
    return root, outcomes


def check_failures(outcomes: Sequence[Outcome]) -> None:
    """Raise if a run has failed."""
    failed = [outcome for outcome in outcomes if outcome.summary is None]
    if failed:
        first = failed[0]
        raise RunsFailed(f"{first.case.title} failed: {first.problem}", len(failed), len(outcomes))


def _run(
    cases: list[Case], root: Comparison, jobs: int, track: list[str] | None, loader: Loader, hidden: bool
) -> list[Outcome]:
    """The outcomes in the order of the cases, with a line for each one that is there."""

    @contextlib.contextmanager
    def watch(case: Case) -> Iterator[Listener]:
        rounds = case.experiment.schedule.rounds
        with RoundProgress(rounds, case.title, hidden, lines=0) as progress:
            yield progress

    found: dict[str, Outcome] = {}
    left = Clock(len(cases))
    try:
        with stop_on_ctrl_c(hidden) as pressed:
            every = run_cases(
                cases, root.path, jobs=jobs, track=track or (), say=say, loader=loader, watch=watch, should_stop=pressed
            )
            with contextlib.closing(every):
                for outcome in every:
                    found[outcome.case.title] = outcome
                    say(outcome_line(outcome, len(found), len(cases), left.left(outcome)), hidden)
    except (Interrupted, KeyboardInterrupt):
        there = f"Stopped; {len(found)} of {len(cases)} runs are in {root.path}"
        raise Interrupted(f"{there}; the same command continues.") from None
    return [found[case.title] for case in cases]


def outcome_line(outcome: Outcome, number: int, total: int, left: float | None) -> str:
    """An outcome in one line: "[3/24] drift fesem seed 0: accuracy 95.12, ARI 1.00, 1.2 s; left 0:21"."""
    head = f"[{number}/{total}] {outcome.case.title}:"
    rest = "" if left is None or number == total else f"; left {clock(left)}"
    if outcome.summary is None:
        return f"{head} failed: {outcome.problem}{rest}"
    ari = outcome.summary.get("ari")
    parts = [score_text(outcome.summary)] if outcome.summary.get("loss") or outcome.summary.get("accuracy") else []
    parts += [f"ARI {NUMBER.text(ari)}"] if ari is not None else []
    parts += ["diverged"] if outcome.summary.get("diverged") else []
    spent = "already there" if outcome.was_there else f"{SECONDS.text(outcome.summary['seconds']['total'])} s"
    return f"{head} {', '.join([*parts, spent])}{rest}"


def written(outcomes: Sequence[Outcome], root: Comparison, dataset: str) -> tuple[list[Row], list[Row]]:
    """Write the tables beside the runs; their rows, and those of the single runs."""
    rows, records = rows_of(outcomes), [record_of(outcome) for outcome in outcomes]
    grids = grids_of(rows) if any(SITUATION in row["labels"] for row in rows) else []
    about = (root.read_object("comparison.json") or {}).get("situations", [])
    root.write_tables(rows, records, markdown_of(_title(outcomes, dataset), rows, grids, about))
    return rows, records


def _title(outcomes: Sequence[Outcome], dataset: str) -> str:
    first = next(outcome.summary for outcome in outcomes if outcome.summary is not None)
    return f"{dataset}, {first['clients']} clients"


def finish(outcomes: Sequence[Outcome], root: Comparison, dataset: str, json_: bool) -> None:
    """Write the tables beside the runs, and print them."""
    rows, records = written(outcomes, root, dataset)
    title = _title(outcomes, dataset)
    first = next(outcome.summary for outcome in outcomes if outcome.summary is not None)
    grids = grids_of(rows) if any(SITUATION in row["labels"] for row in rows) else []
    about = (root.read_object("comparison.json") or {}).get("situations", [])
    if json_:
        more = {"situations": about, "methods": standings_of(rows), "runs": records} if grids else {}
        print(json.dumps({"path": str(root.path), "dataset": first["dataset"], "rows": rows, **more}))
        return
    console = stdout()
    if grids:
        print_grids(console, grids, f"{title}, {_over_seeds(rows)}; the best of each situation is bold")
    else:
        console.print(as_table(rows, title, console.width))
    say(f"run folders: {root.path}")
    say(f"report: coterie report {root.path}")


def _over_seeds(rows: Sequence[Row]) -> str:
    """How many seeds the numbers are of, and what is shown of several."""
    seeds = max(row["seeds"] for row in rows)
    return counted(seeds, "seed") + ("; mean ± standard deviation" if seeds > 1 else "")


def as_table(rows: list[Row], title: str, width: int) -> Table:
    """The rows as the terminal shows them, with the best accuracy marked; a narrow terminal omits F1 and K.

    Without classes, loss and R2 take the place of accuracy, and the lowest loss is marked.
    """
    seeds = max(row["seeds"] for row in rows)
    labels = list(dict.fromkeys(key for row in rows for key in row["labels"]))
    is_wide = width >= (140 if seeds > 1 else 110)
    scores = metrics("terminal", "wide") if is_wide else metrics("terminal")
    has_classes = any(row["accuracy"]["macro"] for row in rows)
    first = [metric for metric in scores if metric.place[0] == "accuracy"]
    rest = [metric for metric in scores if metric not in first and (has_classes or metric.place[0] != "f1")]
    first = first if has_classes else [METRICS["loss"], METRICS["r2"]]
    values = [value["mean"] for row in rows if (value := first[0].read(row))]
    best = (max if has_classes else min)(values, default=None)
    unseen = ("unseen", "macro", PERCENT) if has_classes else ("unseen loss", "loss", first[0].format)

    def cell(value: dict[str, float] | None, form: Format) -> str:
        if value is None:
            return "-"
        return form.text(value["mean"]) + (f" ±{form.text(value['std'])}" if seeds > 1 else "")

    def score(row: Row, metric: Metric) -> Text:
        value = metric.read(row)
        is_best = metric is first[0] and value and value["mean"] == best
        return Text(cell(value, metric.format), style="bold green" if is_best else "")

    def cells(row: Row) -> dict[str, str | Text]:
        start = sum(row["start_bytes"][key]["mean"] for key in ("down", "up"))
        found: dict[str, str | Text] = {label: row["labels"].get(label, "") for label in labels}
        found |= {metric.short: score(row, metric) for metric in first}
        if any(other["unseen"][unseen[1]] for other in rows):
            found[unseen[0]] = cell(row["unseen"][unseen[1]], unseen[2])
        found |= {metric.short: score(row, metric) for metric in rest}
        if is_wide:
            found["K"] = f"{row['clusters']['mean']:.3g}" if row["clusters"]["mean"] else "-"
        return found | {
            "gradients": f"{row['gradients']['mean'] / 1e6:.2f}M",
            "down": size_text(row["bytes"]["down"]["mean"]),
            "up": size_text(row["bytes"]["up"]["mean"]),
            "start": size_text(start) if start else "-",
            "seconds": cell(row["seconds"], SECONDS),
        }

    shown = [cells(row) for row in rows]
    return table_of(f"{title}, {_over_seeds(rows)}", list(shown[0]), [list(row.values()) for row in shown], text=labels)
