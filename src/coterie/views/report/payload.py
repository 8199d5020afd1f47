"""All that the page draws of a run, as one small JSON value: thinned out, rounded, and nothing but plain values."""

from __future__ import annotations

import base64
import math
import shlex
import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.pictures import spread_evenly
from coterie.runs.metrics import METRICS, metrics
from coterie.runs.reading import RunData
from coterie.views.report import compare
from coterie.views.report.flow import confusion_of, flow_of_run, is_alone, sizes_of
from coterie.views.report.map import mapped_clients, neighbours, principal

Payload = dict[str, Any]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_ROUNDS = 400  # points of a curve
MOST_BUBBLES = 120  # clients whose labels are bubbles; of more a heat map
MOST_SLICES = 240  # columns of a heat map
MOST_FAILURES = 200  # that are listed one by one
MOST_CLASSES = 62


def page_payload(runs: Sequence[RunData], *, tsne: bool = True) -> Payload:
    """What a page of these runs needs."""
    return {
        "runs": [run_payload(run, tsne=tsne) for run in runs],
        "compare": compare_payload(runs) if len(runs) > 1 else None,
    }


def run_payload(run: RunData, *, tsne: bool = True) -> Payload:
    """What a page needs of one run; without `tsne`, which takes seconds, there is a map by PCA only."""
    rounds = spread_evenly(len(run.rounds), MOST_ROUNDS)
    return {
        "name": run.name,
        "title": run.title,
        "state": run.state,
        "algorithm": run.algorithm,
        "dataset": run.dataset,
        "seed": run.seed,
        "planned": run.planned,
        "done": run.done,
        "left": _rounded(run.seconds_left, 1),
        "headline": run_headline(run),
        "metrics": [
            {name: getattr(metric, name) for name in ("key", "label", "about", "better", "panel", "shown")}
            | {"unit": metric.format.unit}
            for metric in METRICS.values()
        ],
        "curves": {
            "round": run.rounds[rounds].tolist(),
            **{name: _numbers(values[rounds]) for name, values in run.curves.items() if np.isfinite(values).any()},
        },
        "spread": {
            name: [_numbers(column) for column in values[rounds].T]
            for name, values in run.spread.items()
            if np.isfinite(values).any()
        },
        "sizes": _sizes(run, rounds),
        "flow": _flow(run),
        "map": _map(run, tsne),
        "clients": _clients(run),
        "groups": run.group_names(),
        "confusion": _confusion(run),
        "fairness": _fairness(run),
        "labels": _labels(run),
        "members": _members(run),
        "pseudo": _pseudo(run),
        "repairs": run.repairs,
        "failures": _failures(run),
        "unseen": _unseen(run),
        "choice": _choice(run),
        "settings": [
            [table, key, _text(value)] for table, values in run.config.items() for key, value in values.items()
        ],
        "command": repeat_command(run),
        "environment": [
            [key, _text(run.environment[key])]
            for key in ("coterie", "python", "torch", "platform", "threads", "gpu", "date", "digest")
            if run.environment.get(key) is not None
        ],
        "notes": [str(note) for note in _list((run.summary or run.environment).get("notes"))],
        "problems": run.problems,
    }


def tsne_payload(run: RunData) -> list[list[float | None]] | None:
    """The places of the clients of `map` by t-SNE."""
    who = mapped_clients(run)
    if run.sketches is None or not len(who):
        return None
    found = neighbours(run.sketches[who])
    return None if found is None else [_numbers(column, 3) for column in found.T]


def compare_payload(runs: Sequence[RunData]) -> Payload:
    """The table of several runs."""
    rows = compare.rows_of(runs)
    tests = compare.compared_to_best(runs, rows)
    columns = [c for c in compare.columns() if any(row.mean(c.key) is not None for row in rows)]
    best = {column.key: compare.best_of(rows, column) for column in columns}

    def cell(position: int, row: compare.Row, column: compare.Column) -> list[Any]:
        mean, deviation = row.mean(column.key), row.deviation(column.key)
        scaled = [None if value is None else _rounded(column.factor * value, 6) for value in (mean, deviation)]
        return [*scaled, position in best[column.key]]

    return {
        "columns": [[c.key, c.title, c.digits, c.unit] for c in columns],
        "rows": [
            {
                "label": row.label,
                "dataset": row.dataset,
                "runs": row.runs,
                "seeds": [runs[i].seed for i in row.runs],
                "cells": [cell(i, row, column) for column in columns],
                "best": test.best,
                "p": _rounded(test.p, 6),
                "pairs": test.seeds,
            }
            for i, (row, test) in enumerate(zip(rows, tests, strict=True))
        ],
        "datasets": len({row.dataset for row in rows}),
    }


def repeat_command(run: RunData) -> str:
    """The command that repeats a run."""
    if run.settings.get("over_sites"):
        return "./run.sh (in the folder of the app)"
    if run.settings.get("from_python"):
        return "# started from Python with objects of its own: run the program again"
    if run.path is None:
        return "# not kept in a folder: run the program again"
    return shlex.join(["coterie", "run", "--config", str(run.path / "config.toml"), "--name", f"{run.name}-again"])


# ---- parts ----


def run_headline(run: RunData) -> list[list[Any]]:
    """Name, value, what it means."""
    summary = run.summary or {}
    found: list[list[Any]] = []

    for metric in metrics("headline"):
        value = run.last(metric.key)
        if value is None or (metric.key == "loss" and run.last("accuracy") is not None):
            continue  # the loss is told where there is nothing better
        found.append([metric.label, f"{metric.format.text(value)} {metric.format.unit}".strip(), metric.about])
    if run.sizes:
        filled = sum(size > 0 for size in run.sizes[-1])
        alone = is_alone(run.sizes)
        meaning = (
            "every client is one"
            if alone
            else " ".join(str(s) for s in run.sizes[-1][:8]) + (" …" if len(run.sizes[-1]) > 8 else "")
        )
        found.append(["clusters", str(filled), meaning])
    found.append(["rounds", f"{run.done} of {run.planned}" if run.done < run.planned else str(run.done), run.state])
    sent = compare.value_of(run, "megabytes")
    if sent is not None:
        told = (
            f"{sent / 1000:.2f} GB"
            if sent >= 1000
            else f"{sent:.1f} MB"
            if sent >= 1
            else f"{1000 * sent:.1f} kB"
            if sent
            else "nothing"
        )
        found.append(["sent", told, "models and arrays, down and up, start included"])
    seconds = compare.value_of(run, "seconds")
    if seconds is not None:
        found.append(["seconds", f"{seconds:.1f} s", "start, training, server, evaluation"])
    failures = summary.get("failures", len(run.failures))
    if isinstance(failures, int) and failures:
        found.append(["failed answers", f"{failures:,}", "late, broken or refused"])
    return found


def _sizes(run: RunData, rounds: list[int]) -> Payload | None:
    if not run.sizes or is_alone(run.sizes):
        return None
    clusters, table = sizes_of(run)
    return {"clusters": clusters, "values": table[rounds].T.tolist()}


def _flow(run: RunData) -> Payload | None:
    flow = None if is_alone(run.sizes) else flow_of_run(run)
    if flow is None or run.labels is None:
        return None
    moves = int(((run.labels[1:] != run.labels[:-1]) & (run.labels[:-1] >= 0)).sum())
    return {"rounds": flow.rounds, "nodes": flow.nodes, "links": flow.links, "moves": moves}


def _map(run: RunData, tsne: bool) -> Payload | None:
    who = mapped_clients(run)
    if run.sketches is None or len(who) < 3:
        return None
    points, share = principal(run.sketches[who])
    scale = float(np.abs(points).max()) or 1.0
    return {
        "clients": who.tolist(),
        "pca": [_numbers(column / scale) for column in points.T],
        "share": [_rounded(value, 4) for value in share],
        "tsne": tsne_payload(run) if tsne else None,
        "of": int((run.sketched > 0).sum()) if run.sketched is not None else 0,
    }


def _clients(run: RunData) -> Payload | None:
    if not run.names:
        return None
    clusters, groups = run.clusters, run.group_positions()
    return {
        "name": run.names,
        "cluster": None if clusters is None else clusters.tolist(),
        "group": None if groups is None else groups.tolist(),
        "samples": None if run.samples is None else run.samples.tolist(),
        **{name: _numbers(values) for name, values in run.scores.items()},
    }


def _confusion(run: RunData) -> Payload | None:
    found = None if is_alone(run.sizes) else confusion_of(run)
    if found is None:
        return None
    clusters, table = found
    keep = spread_evenly(len(clusters), 40)
    return {"clusters": [clusters[i] for i in keep], "counts": table[keep].tolist()}


def _fairness(run: RunData) -> Payload | None:
    accuracy = run.scores.get("accuracy")
    if accuracy is None or not np.isfinite(accuracy).any():
        return None
    scored = np.flatnonzero(np.isfinite(accuracy))
    values = accuracy[scored]
    worst = scored[np.argsort(values, kind="stable")[:5]]
    square = float((values**2).sum())
    return {
        "parts": [
            [m.label, _rounded(m.value({"accuracy": values}), 5)] for m in metrics("summary") if m.line == "fairness"
        ],
        "mean": _rounded(float(values.mean()), 5),
        "deviation": _rounded(float(values.std()), 5),
        # Jain, Chiu and Hawe (1984): 1 if all are alike, 1/n if one client has everything.
        "jain": _rounded(float(values.sum()) ** 2 / (len(values) * square) if square else 1.0, 5),
        "worst": worst.tolist(),
    }


def _labels(run: RunData) -> Payload | None:
    counts = run.counts
    if counts is None or not counts.shape[1] or not len(counts):
        return None
    groups = run.group_positions()
    places = np.zeros(len(counts), dtype=np.int64) if groups is None else groups
    classes = spread_evenly(counts.shape[1], MOST_CLASSES)
    if len(counts) <= MOST_BUBBLES:
        order = np.argsort(places, kind="stable")
        shown = counts[order][:, classes]
        return {"kind": "bubbles", "clients": order.tolist(), "classes": classes, "counts": shown.tolist()}
    order, shares = by_main_class(counts, places)
    starts, means = narrowed(shares, MOST_SLICES)
    return {
        "kind": "heat",
        "classes": classes,
        "group": places[order[starts]].tolist(),
        "shares": [_numbers(column, 3) for column in means[:, classes].T],
        "of": len(counts),
    }


def by_main_class(counts: Ints, groups: Ints) -> tuple[Ints, Floats]:
    """Clients by group, then by the class they have most of, and the shares of their classes in that order [N, L].

    Unordered, thousands of columns of a heat map would be noise.
    """
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1), groups))
    return order, shares[order]


def narrowed(shares: Floats, most: int) -> tuple[Ints, Floats]:
    """At most this many rows: their starts, and means of neighbours, so that none is lost between two pixels."""
    rows = min(most, len(shares))
    starts = np.arange(rows) * len(shares) // rows
    return starts, np.add.reduceat(shares, starts, axis=0) / np.diff([*starts, len(shares)])[:, None]


def _members(run: RunData) -> list[Payload] | None:
    """Of each cluster some members, of each a strip of pictures."""
    if not run.members:
        return None
    pictures, client, cluster, label = (run.members[name] for name in ("picture", "client", "cluster", "label"))
    found = []
    for number in np.unique(cluster).tolist():
        members = []
        for who in dict.fromkeys(client[cluster == number].tolist()):
            mine = np.flatnonzero((cluster == number) & (client == who))
            members.append({"client": who, "labels": label[mine].tolist(), "strip": png_uri(_strip(pictures[mine]))})
        found.append({"cluster": number, "members": members})
    return found


def _pseudo(run: RunData) -> Payload | None:
    if not run.method:
        return None
    told, pseudo = run.method["told"], run.method.get("pseudo")
    keep = spread_evenly(len(told), 8)
    told = told[np.ix_(keep, keep)]
    strips = None
    if pseudo is not None:  # a row for each picture of a class, a column for each class
        classes = spread_evenly(pseudo.shape[1], 20)
        strips = [png_uri(mosaic_of(np.moveaxis(pseudo[k][classes], 1, 0))) for k in keep]
    witness = run.method.get("witness")
    return {
        "clusters": keep,
        "told": np.round(told, 3).tolist(),
        "witness": None if witness is None else np.round(witness[keep], 3).tolist(),
        "strips": strips,
    }


def _failures(run: RunData) -> Payload | None:
    if not run.failures:
        return None
    reasons = Counter(str(failure.get("reason", "?")) for failure in run.failures)
    return {
        "total": len(run.failures),
        "reasons": reasons.most_common(20),
        "rows": [
            [failure.get("round"), str(failure.get("client", "?")), _step(failure), str(failure.get("reason", "?"))]
            for failure in run.failures[:MOST_FAILURES]
        ],
    }


def _step(failure: dict[str, Any]) -> str:
    return str(failure.get("step", "?")).rpartition(":")[2]


def _unseen(run: RunData) -> Payload | None:
    found = (run.summary or {}).get("unseen")
    if not isinstance(found, dict):
        return None
    accuracy = found.get("accuracy")
    return {
        "clients": found.get("clients"),
        "accuracy": accuracy.get("macro") if isinstance(accuracy, dict) else None,
        "ari": found.get("ari"),
    }


def _choice(run: RunData) -> Payload | None:
    if run.choice is None:
        return None
    return {"recommended": run.choice.get("recommended"), "reason": _text(run.choice.get("reason", ""))}


# ---- numbers and pictures, small ----


def _rounded(value: float | None, digits: int) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    found = round(float(value), digits)
    return int(found) if found == int(found) and abs(found) < 1 << 53 else found


def _numbers(values: NDArray[Any], digits: int = 4) -> list[float | None]:
    """Rounded, so that they take little room; None where there is no number. Large ones keep all their places."""
    return [_rounded(value, digits) for value in values.tolist()]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _strip(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pictures [n, H, W, C] side by side with gaps."""
    return mosaic_of(pictures[None])


def mosaic_of(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pictures [rows, columns, H, W, C] as one, with light gaps."""
    rows, columns, high, wide, channels = pictures.shape
    gap = max(1, round(wide / 14))
    canvas = np.full((rows * (high + gap) - gap, columns * (wide + gap) - gap, channels), 200, dtype=np.uint8)
    for r in range(rows):
        for c in range(columns):
            top, left = r * (high + gap), c * (wide + gap)
            canvas[top : top + high, left : left + wide] = pictures[r, c]
    return canvas


def png_uri(image: NDArray[np.uint8]) -> str:
    """A picture [H, W, 1 or 3] as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png_bytes(image)).decode()


def png_bytes(image: NDArray[np.uint8]) -> bytes:
    """A picture [H, W, 1 or 3] as a PNG file (ISO/IEC 15948), so that pages need no drawing library.

    >>> png_bytes(np.zeros((2, 3, 1), dtype=np.uint8))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    high, wide, channels = image.shape
    lines = np.zeros((high, 1 + wide * channels), dtype=np.uint8)  # each line begins with its filter: none
    lines[:, 1:] = image.reshape(high, -1)

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", wide, high, 8, 0 if channels == 1 else 2, 0, 0, 0)
    packed = zlib.compress(lines.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
