"""Many runs in one table: shared by `compare` and `sweep`."""

from __future__ import annotations

import contextlib
import csv
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from coterie.cli.output import RoundProgress, say, stdout, stop_on_ctrl_c, table_of
from coterie.data.federation import Federation
from coterie.errors import CoterieError, Interrupted
from coterie.runs.execution import execute
from coterie.runs.experiment import Experiment
from coterie.runs.folder import RunFolder
from coterie.runs.metrics import PERCENT, SECONDS, Format, Metric, metrics, nested
from coterie.runs.observers import Several
from coterie.runs.trackers import trackers
from coterie.views.words import size_text

Summary = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One run of a table: its labels and its settings."""

    labels: tuple[tuple[str, str], ...]  # column, value: runs with the same labels differ only in their seed
    experiment: Experiment

    @property
    def name(self) -> str:
        """The name of the run folder."""
        plain = "-".join(self.words).replace(":", "-").replace("/", "-")
        return f"{plain}-s{self.experiment.schedule.seed}"

    @property
    def words(self) -> list[str]:
        """The labels in words."""
        return [value if key == "method" else f"{key}={value}" for key, value in self.labels]

    @property
    def data_key(self) -> str:
        """Equal for cases with the same federation."""
        tables, schedule = self.experiment.tables(), self.experiment.schedule
        run = {key: tables["run"].get(key) for key in ("dataset", "scenario", "clients", "data_dir")}
        return repr((run, tables["dataset"], tables["scenario"], schedule.seed))


def run_cases(
    cases: list[Case], first: Federation, root: Path, hidden: bool, track: list[str] | None = None
) -> list[Summary]:
    """Run the cases one after the other, each in a folder inside `root`; their summaries.

    `first` is the federation of the first case, loaded before `root` is created, so that bad data leaves no folder.
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
                label = f"{' '.join(case.words)} seed {experiment.schedule.seed}"
                with RoundProgress(experiment.schedule.rounds, label, hidden, lines=1) as progress:
                    observer = Several([progress, *trackers(track, say)])
                    summaries.append(execute(experiment, folder, observer, pressed).summary)
    except (Interrupted, KeyboardInterrupt):
        last = f"; resume the interrupted one with 'coterie resume {folder.path}'" if folder else ""
        raise Interrupted(f"Stopped; finished runs are in {root}{last}.") from None
    except CoterieError:
        with contextlib.suppress(OSError):
            root.rmdir()  # succeeds only if it is empty
        raise
    return summaries


def make_root(out: Path, name: str | None, default: str) -> Path:
    """A new folder for the runs of a table."""
    folder = RunFolder.create(out, name, default, {"table": {"name": default}})
    folder.unlock()
    for item in ("config.toml", ".lock"):
        (folder.path / item).unlink()
    (folder.path / "artifacts").rmdir()
    return folder.path


def rows_of(cases: list[Case], summaries: list[Summary]) -> list[Row]:
    """One row per set of labels, over its seeds."""
    found: dict[tuple[tuple[str, str], ...], list[Summary]] = {}
    for case, summary in zip(cases, summaries, strict=True):
        found.setdefault(case.labels, []).append(summary)
    return [
        {"algorithm": runs[0]["algorithm"], "labels": dict(labels), **_over_seeds(runs)}
        for labels, runs in found.items()
    ]


def _over_seeds(summaries: list[Summary]) -> Row:
    def over(*path: str) -> dict[str, float] | None:
        return _spread([_at(summary, path) for summary in summaries])

    gradients = [summary["bytes"]["gradients"] for summary in summaries]
    return {
        "seeds": len(summaries),
        **nested((metric, over(*metric.place)) for metric in metrics("table")),
        "clusters": over("clusters"),
        "unseen": {"macro": over("unseen", "accuracy", "macro"), "ari": over("unseen", "ari")},
        "gradients": _spread([spent["start"] + spent["round"] + spent["repair"] for spent in gradients]),
        "bytes": {"down": over("bytes", "down"), "up": over("bytes", "up")},
        "start_bytes": {"down": over("bytes", "start", "down"), "up": over("bytes", "start", "up")},
        "failures": over("failures"),
        "seconds": over("seconds", "total"),
    }


def _spread(values: Sequence[Any]) -> dict[str, float] | None:
    if any(value is None for value in values):
        return None
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0}


def _at(record: Any, path: Sequence[str]) -> Any:
    for key in path:
        record = record.get(key) if isinstance(record, dict) else None
    return record


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
    say(f"run folders: {root}")
    say(f"report: coterie report {root}")


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
    """The rows as the terminal shows them, with the best accuracy marked; a narrow terminal omits F1 and K."""
    seeds = max(row["seeds"] for row in rows)
    labels = list(dict.fromkeys(key for row in rows for key in row["labels"]))
    has_unseen = any(row["unseen"]["macro"] for row in rows)
    is_wide = width >= (140 if seeds > 1 else 110)
    scores = metrics("terminal", "wide") if is_wide else metrics("terminal")
    first = [metric for metric in scores if metric.place[0] == "accuracy"]
    rest = [metric for metric in scores if metric not in first]
    best = max((row["accuracy"]["macro"]["mean"] for row in rows if row["accuracy"]["macro"]), default=None)

    def cell(value: dict[str, float] | None, form: Format) -> str:
        if value is None:
            return "-"
        return form.text(value["mean"]) + (f" ±{form.text(value['std'])}" if seeds > 1 else "")

    def score(row: Row, metric: Metric) -> Text:
        value = metric.read(row)
        is_best = metric.key == "accuracy" and value and value["mean"] == best
        return Text(cell(value, metric.format), style="bold green" if is_best else "")

    def cells(row: Row) -> dict[str, str | Text]:
        start = sum(row["start_bytes"][key]["mean"] for key in ("down", "up"))
        found: dict[str, str | Text] = {label: row["labels"].get(label, "") for label in labels}
        found |= {metric.short: score(row, metric) for metric in first}
        if has_unseen:
            found["unseen"] = cell(row["unseen"]["macro"], PERCENT)
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
    title = f"{title}, {seeds} seed(s); mean ± standard deviation"
    return table_of(title, list(shown[0]), [list(row.values()) for row in shown], text=labels)
