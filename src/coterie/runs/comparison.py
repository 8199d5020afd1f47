"""A comparison: a folder of runs with one table.

    runs/<name>/ comparison.json · table.csv · table.json · table.md · runs.csv · runs.json
                 fesem-s0/ fesem-s1/ ...                  one folder per run
                 equal/fesem-s0/ drift/fesem-s0/ ...      or per situation and run

comparison.json says which runs belong to it; the same command with the same --name continues it.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import io
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.errors import RunError
from coterie.methods.base import find_algorithm
from coterie.runs.batch import SITUATION, Case, Outcome, check_folders
from coterie.runs.files import SCHEMA, Files
from coterie.runs.folder import RunFolder, check_name
from coterie.runs.metrics import METRICS, Metric, metrics, nested
from coterie.runs.situations import Situation

Row = dict[str, Any]
FILE = "comparison.json"
_FEDAVG = "fedavg"


class Comparison(Files):
    """The folder of a comparison."""

    is_continued = False  # whether it was there before

    @classmethod
    def create(
        cls, out: Path, name: str | None, default: str, cases: Sequence[Case], situations: Sequence[Situation] = ()
    ) -> Comparison:
        """A new folder, or the one of that name if its runs are among the cases and have the same settings.

        Without a name, an unfinished comparison of the same cases goes on: the same command continues what was stopped.
        """
        check_name(name)
        stopped = None if name is not None else cls._stopped(out, default, cases)
        if name is not None and (out / name / FILE).exists():
            found = cls(out / name)
            found._check(cases)
        elif stopped is not None:
            found, stopped.is_continued = stopped, True
        else:
            folder = RunFolder.create(out, name, default, {"table": {"name": default}})
            folder.unlock()
            (folder.path / "config.toml").unlink()
            (folder.path / "artifacts").rmdir()
            found = cls(folder.path)
        found._write(FILE, found._described(cases, situations))
        return found

    @classmethod
    def _stopped(cls, out: Path, default: str, cases: Sequence[Case]) -> Comparison | None:
        """The unfinished comparison of just these cases under a default name, if there is one."""
        for path in sorted(out.glob(f"{glob.escape(default)}*")):
            is_default = path.name == default or path.name.removeprefix(f"{default}-").isdigit()
            found = cls(path)
            if not is_default or not (path / FILE).is_file() or (path / "table.json").exists() or found.is_held():
                continue
            with contextlib.suppress(RunError, KeyError, TypeError, AttributeError):
                content = found.read_object(FILE) or {}
                if {run["title"] for run in content["runs"]} == {case.title for case in cases}:
                    check_folders(cases, path)
                    return found
        return None

    def _check(self, cases: Sequence[Case]) -> None:
        content = self.read_object(FILE) or {}
        there, here = content.get("runs", []), {case.title for case in cases}
        for run in there:
            if run["title"] not in here:
                raise RunError(
                    f"{self.path} also has {run['title']}, which this command does not ask for. Choose another --name, "
                    "or give the settings of the first command."
                )
        check_folders(cases, self.path)

    def _described(self, cases: Sequence[Case], situations: Sequence[Situation]) -> dict[str, Any]:
        first: dict[str, str] = {}  # cases with the same settings share a folder
        runs = []
        for case in cases:
            place = first.setdefault(repr(case.tables), case.place)
            runs.append({"title": case.title, **dict(case.labels), "seed": case.seed, "folder": place})
        told = [{"name": s.name, "about": s.about, "settings": s.settings} for s in situations]
        return {"schema": SCHEMA, "situations": told, "runs": runs}

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Only one process at a time may add runs."""
        with RunFolder(self.path).held():
            yield

    def _write(self, name: str, value: Any) -> None:
        RunFolder(self.path).write_json(name, value)

    def remove_empty(self) -> None:
        """Remove folders without a run, and the comparison itself if it has none."""
        folders = [path for path in self.path.iterdir() if path.is_dir()]
        for path in folders:
            with contextlib.suppress(OSError):
                path.rmdir()  # succeeds only if it is empty
        if not any(path.is_dir() for path in self.path.iterdir()):
            for name in (FILE, ".lock"):
                (self.path / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def write_tables(self, rows: Sequence[Row], records: Sequence[Row], markdown: str) -> None:
        """Write the table and the list of single runs."""
        folder = RunFolder(self.path)
        for name, found in (("table", rows), ("runs", records)):
            folder.write_json(f"{name}.json", found)
            folder.write_text(f"{name}.csv", _csv([flat(row) for row in found]))
        folder.write_text("table.md", markdown)


def _csv(rows: Sequence[Row]) -> str:
    writer = csv.DictWriter(out := io.StringIO(), list(dict.fromkeys(key for row in rows for key in row)))
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def record_of(outcome: Outcome) -> Row:
    """One run as a flat row: what was run, how good it was, what it cost, or why it failed."""
    case, summary = outcome.case, outcome.summary
    labels = dict(case.labels)
    head = {SITUATION: labels.pop(SITUATION, None), "method": labels.pop("method"), **labels, "seed": case.seed}
    if summary is None:
        return {**head, "problem": outcome.problem}

    def at(*path: str) -> Any:
        return _at(summary, path)

    sent = {way: at("bytes", way) for way in ("down", "up")}
    start = {way: at("bytes", "start", way) for way in ("down", "up")}
    return {
        **head,
        **{f"accuracy_{part}": at("accuracy", part) for part in ("macro", "micro", "bottom5", "worst_decile")},
        **{score: at(score, "macro") for score in ("loss", "r2")},
        "ari": at("ari"),
        "start_ari": at("start_ari"),
        "clusters": at("clusters"),
        "bytes": _sum(sent.values()),
        **{f"bytes_{way}": value for way, value in sent.items()},
        "start_bytes": _sum(start.values()),
        "gradients": _gradients(summary),
        "seconds": at("seconds", "total"),
        "failures": at("failures"),
        "digest": at("digest"),
        "path": at("path"),
        "problem": None,
    }


def rows_of(outcomes: Sequence[Outcome]) -> list[Row]:
    """One row per set of labels, over the seeds that finished; in situations, with the regret.

    The regret of a method is how far its mean accuracy is below the best one in that situation; without classes, how
    far its loss is above.
    """
    found: dict[tuple[tuple[str, str], ...], list[dict[str, Any]]] = {}
    for outcome in outcomes:
        if outcome.summary is not None:
            found.setdefault(outcome.case.labels, []).append(outcome.summary)
    rows = [
        {"algorithm": runs[0]["algorithm"], "labels": dict(labels), **_over_seeds(runs)}
        for labels, runs in found.items()
    ]
    main = main_metric(rows)
    choose, best = max if main.better == "high" else min, dict[str, float]()
    for row in rows:
        if SITUATION in row["labels"] and (score := main.read(row)) is not None:
            best[row["labels"][SITUATION]] = choose(score["mean"], best.get(row["labels"][SITUATION], score["mean"]))
    for row in rows:
        if SITUATION in row["labels"]:
            score = main.read(row)
            row["regret"] = None if score is None else abs(best[row["labels"][SITUATION]] - score["mean"])
    return rows


def main_metric(rows: Sequence[Row]) -> Metric:
    """What methods are judged by: accuracy, or loss if no row has an accuracy."""
    return METRICS["accuracy" if any(METRICS["accuracy"].read(row) for row in rows) else "loss"]


def standings_of(rows: Sequence[Row]) -> list[Row]:
    """Each method over all situations: worst and mean regret, bytes relative to FedAvg, and whether it finds K.

    A regret is None if the method lacks a score in some situation. The bytes are a mean of the ratios in the situations
    that FedAvg has, too.
    """
    place = {(row["labels"]["method"], row["labels"][SITUATION]): row for row in rows}
    methods, situations = (list(dict.fromkeys(key[i] for key in place)) for i in (0, 1))
    found = []
    for method in methods:
        own = {situation: place[method, situation] for situation in situations if (method, situation) in place}
        regrets = {s: float(row["regret"]) for s, row in own.items() if row["regret"] is not None}
        worst = max(regrets, key=regrets.__getitem__) if len(regrets) == len(situations) else None
        sent = [(total_bytes(row), total_bytes(place[_FEDAVG, s])) for s, row in own.items() if (_FEDAVG, s) in place]
        ratios = [mine["mean"] / usual["mean"] for mine, usual in sent if mine and usual]
        found.append(
            {
                "method": method,
                "worst_regret": None if worst is None else regrets[worst],
                "worst_situation": worst,
                "mean_regret": None if worst is None else statistics.fmean(regrets.values()),
                "bytes_to_fedavg": statistics.fmean(ratios) if ratios else None,
                "finds_clusters": find_algorithm(method).finds_clusters,
            }
        )
    return found


def total_bytes(row: Row) -> dict[str, float] | None:
    """The mean of all bytes that were sent in a run."""
    parts = [row["bytes"][way] for way in ("down", "up")]
    return None if None in parts else {"mean": sum(part["mean"] for part in parts)}


def _over_seeds(summaries: list[dict[str, Any]]) -> Row:
    def over(*path: str) -> dict[str, float] | None:
        return _spread([_at(summary, path) for summary in summaries])

    return {
        "seeds": len(summaries),
        **nested((metric, over(*metric.place)) for metric in metrics("table")),
        "start_ari": over("start_ari"),
        "clusters": over("clusters"),
        "unseen": {
            "macro": over("unseen", "accuracy", "macro"),
            "loss": over("unseen", "loss", "macro"),
            "ari": over("unseen", "ari"),
        },
        "gradients": _spread([_gradients(summary) for summary in summaries]),
        "bytes": {"down": over("bytes", "down"), "up": over("bytes", "up")},
        "start_bytes": {"down": over("bytes", "start", "down"), "up": over("bytes", "start", "up")},
        "failures": over("failures"),
        "seconds": over("seconds", "total"),
    }


def _gradients(summary: Mapping[str, Any]) -> int:
    spent = summary["bytes"]["gradients"]
    return int(spent["start"] + spent["round"] + spent["repair"])


def _spread(values: Sequence[Any]) -> dict[str, float] | None:
    if any(value is None for value in values):
        return None
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0}


def _sum(values: Any) -> Any:
    found = list(values)
    return None if any(value is None for value in found) else sum(found)


def _at(record: Any, path: Sequence[str]) -> Any:
    for key in path:
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def flat(row: Row, prefix: str = "") -> dict[str, Any]:
    """Nested values as columns: accuracy.macro.mean."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        name = key if key == "labels" else f"{prefix}{key}"
        if isinstance(value, dict):
            found |= flat(value, "" if key == "labels" else f"{name}.")
        else:
            found[name] = value
    return found


@dataclass(frozen=True)
class Contents:
    """What comparison.json says: situations (name, about, settings), and the situations of each run folder."""

    situations: list[dict[str, Any]]
    runs: dict[Path, list[str]]  # resolved folder -> situations, in the order of the comparison


def read_comparison(path: Path) -> Contents:
    """What a comparison holds; nothing if the folder is no comparison."""
    found = Files(path).read_object(FILE) or {}
    runs: dict[Path, list[str]] = {}
    try:
        for run in found.get("runs", []):
            here = runs.setdefault((path / run["folder"]).resolve(), [])
            here += [str(run[SITUATION])] if SITUATION in run and run[SITUATION] not in here else []
        situations = [
            {key: str(item[key]) for key in ("name", "about", "settings")} for item in found.get("situations", [])
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path / FILE} is damaged: {error}.") from error
    return Contents(situations, runs)
