"""Many runs, one table: what `compare` and `sweep` share."""

from __future__ import annotations

import contextlib
import csv
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from coterie.cli.output import RoundProgress, megabytes, stderr, stdout, stop_on_ctrl_c
from coterie.data.federation import Federation
from coterie.errors import CoterieError, Interrupted
from coterie.runs.execution import execute
from coterie.runs.experiment import Experiment
from coterie.runs.folder import RunFolder
from coterie.runs.metrics import PERCENT, SECONDS, Format, Metric, metrics, nested
from coterie.runs.observers import Several
from coterie.runs.trackers import trackers

Summary = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One run of a table: what it is called there, and all of its settings."""

    labels: tuple[tuple[str, str], ...]  # column, value: runs with the same labels differ only in their seed
    experiment: Experiment

    @property
    def name(self) -> str:
        """The name of its run folder."""
        words = [value if key == "method" else f"{key}={value}" for key, value in self.labels]
        plain = "-".join(words).replace(":", "-").replace("/", "-")
        return f"{plain}-s{self.experiment.schedule.seed}"

    @property
    def data_key(self) -> str:
        """The same for cases that have the same federation."""
        tables, schedule = self.experiment.tables(), self.experiment.schedule
        run = {key: tables["run"].get(key) for key in ("dataset", "scenario", "clients", "data_dir")}
        return repr((run, tables["dataset"], tables["scenario"], schedule.seed))


def run_cases(
    cases: list[Case], first: Federation, root: Path, hidden: bool, track: list[str] | None = None
) -> list[Summary]:
    """Run one after the other, on shared federations; their summaries. `root` gets a run folder of each.

    `first` is the federation of the first case: it is read before `root` is made, so that bad data leave nothing.
    """
    summaries: list[Summary] = []
    shared = {cases[0].data_key: first}
    folder: RunFolder | None = None
    try:
        with stop_on_ctrl_c(hidden) as pressed:
            for case in cases:
                if case.data_key not in shared:
                    shared = {case.data_key: case.experiment.federation()}
                experiment = replace(case.experiment, data=shared[case.data_key])
                folder = RunFolder.create(root, case.name, "", case.experiment.tables())
                what = " ".join(value if key == "method" else f"{key}={value}" for key, value in case.labels)
                label = f"{what} seed {experiment.schedule.seed}"
                with RoundProgress(experiment.schedule.rounds, label, hidden, lines=1) as progress:
                    summaries.append(
                        execute(experiment, folder, Several([progress, *trackers(track, _say)]), pressed).summary
                    )
    except (Interrupted, KeyboardInterrupt):
        going = f"; resume the interrupted one with 'coterie resume {folder.path}'" if folder else ""
        raise Interrupted(f"Stopped; finished runs are in {root}{going}.") from None
    except CoterieError:
        with contextlib.suppress(OSError):
            root.rmdir()  # goes only if no run is in it
        raise
    return summaries


def _say(text: str) -> None:
    stderr().print(text, soft_wrap=True, markup=False)


def make_root(out: Path, name: str | None, default: str) -> Path:
    """A folder of its own for the runs of a table."""
    folder = RunFolder.create(out, name, default, {"table": {"name": default}})
    folder.unlock()
    for item in ("config.toml", ".lock"):
        (folder.path / item).unlink()
    (folder.path / "artifacts").rmdir()
    return folder.path


def rows_of(cases: list[Case], summaries: list[Summary]) -> list[Row]:
    """One row for each set of labels, over its seeds."""
    found: dict[tuple[tuple[str, str], ...], list[Summary]] = {}
    for case, summary in zip(cases, summaries, strict=True):
        found.setdefault(case.labels, []).append(summary)
    return [
        {"algorithm": runs[0]["algorithm"], "labels": dict(labels), **_over_seeds(runs)}
        for labels, runs in found.items()
    ]


def _over_seeds(summaries: list[Summary]) -> Row:
    def over(read: Callable[[Summary], Any]) -> dict[str, float] | None:
        values = [read(summary) for summary in summaries]
        if any(value is None for value in values):
            return None
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return {"mean": statistics.fmean(values), "std": spread}

    def unseen(summary: Summary) -> Any:
        return ((summary["unseen"] or {}).get("accuracy") or {}).get("macro")

    def work(summary: Summary) -> int:
        spent = summary["bytes"]["gradients"]
        return int(spent["start"] + spent["round"] + spent["repair"])

    return {
        "seeds": len(summaries),
        **nested((metric, over(metric.read)) for metric in metrics("table")),
        "clusters": over(lambda summary: summary["clusters"]),
        "unseen": {"macro": over(unseen), "ari": over(lambda summary: (summary["unseen"] or {}).get("ari"))},
        "gradients": over(work),
        "bytes": {
            "down": over(lambda summary: summary["bytes"]["down"]),
            "up": over(lambda summary: summary["bytes"]["up"]),
        },
        "start_bytes": {
            "down": over(lambda summary: summary["bytes"]["start"]["down"]),
            "up": over(lambda summary: summary["bytes"]["start"]["up"]),
        },
        "failures": over(lambda summary: summary["failures"]),
        "seconds": over(lambda summary: summary["seconds"]["total"]),
    }


def finish(rows: list[Row], summaries: list[Summary], root: Path, title: str, json_: bool) -> None:
    """Write table.json and table.csv beside the runs, and print the table."""
    (root / "table.json").write_text(json.dumps(rows, indent=2) + "\n")
    with (root / "table.csv").open("w", newline="") as file:
        flat = [_flat(row) for row in rows]
        writer = csv.DictWriter(file, fieldnames=list(flat[0]))
        writer.writeheader()
        writer.writerows(flat)
    first = summaries[0]
    if json_:
        print(json.dumps({"path": str(root), "dataset": first["dataset"], "rows": rows}))
        return
    console = stdout()
    console.print(as_table(rows, f"{title}, {first['clients']} clients", console.width))
    stderr().print(f"run folders: {root}", soft_wrap=True)
    stderr().print(f"report: coterie report {root}", soft_wrap=True)


def _flat(row: Row, prefix: str = "") -> dict[str, Any]:
    """Nested values as columns: accuracy.macro.mean."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        name = key if key == "labels" else f"{prefix}{key}"
        if isinstance(value, dict):
            found |= _flat(value, "" if key == "labels" else f"{name}.")
        else:
            found[name] = value
    return found


def as_table(rows: list[Row], title: str, width: int) -> Table:
    """The rows as a terminal shows them; the best accuracy is marked. A narrow one does without F1 and K."""
    seeds = max(row["seeds"] for row in rows)
    table = Table(title=f"{title}, {seeds} seed(s); mean ± standard deviation", title_justify="left")
    labels = list(dict.fromkeys(key for row in rows for key in row["labels"]))
    for label in labels:
        table.add_column(label, style="bold", no_wrap=True)
    has_unseen = any(row["unseen"]["macro"] for row in rows)
    is_wide = width >= (140 if seeds > 1 else 110)
    scores = metrics("terminal", "wide") if is_wide else metrics("terminal")
    first = [metric for metric in scores if metric.place[0] == "accuracy"]
    rest = [metric for metric in scores if metric not in first]
    columns = [*(m.short for m in first), *(["unseen"] if has_unseen else []), *(m.short for m in rest)]
    for column in (*columns, *(["K"] if is_wide else []), "gradients", "down", "up", "start", "seconds"):
        table.add_column(column, justify="right")

    def cell(value: dict[str, float] | None, form: Format) -> str:
        if value is None:
            return "-"
        return form.text(value["mean"]) + (f" ±{form.text(value['std'])}" if seeds > 1 else "")

    best = max((row["accuracy"]["macro"]["mean"] for row in rows if row["accuracy"]["macro"]), default=None)

    def score(row: Row, metric: Metric) -> str:
        value = metric.read(row)
        text = cell(value, metric.format)
        return f"[bold green]{text}[/]" if metric.key == "accuracy" and value and value["mean"] == best else text

    for row in rows:
        start = sum(row["start_bytes"][key]["mean"] for key in ("down", "up"))
        clusters = row["clusters"]["mean"]
        table.add_row(
            *[row["labels"].get(label, "") for label in labels],
            *[score(row, metric) for metric in first],
            *([cell(row["unseen"]["macro"], PERCENT)] if has_unseen else []),
            *[score(row, metric) for metric in rest],
            *([f"{clusters:.3g}" if clusters else "-"] if is_wide else []),
            f"{row['gradients']['mean'] / 1e6:.2f}M",
            megabytes(int(row["bytes"]["down"]["mean"])),
            megabytes(int(row["bytes"]["up"]["mean"])),
            megabytes(int(start)) if start else "-",
            cell(row["seconds"], SECONDS),
        )
    return table
