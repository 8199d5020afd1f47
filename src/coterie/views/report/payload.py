"""The data of a page as one JSON value: thinned out, rounded, plain values only."""

from __future__ import annotations

import base64
import math
import shlex
import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.pictures import spread_evenly
from coterie.runs.metrics import METRICS, metrics
from coterie.runs.reading import RunData
from coterie.views.decisions import kinds_found, legend, listed, sentences, without_repeats
from coterie.views.report import compare
from coterie.views.report.flow import confusion_of, flow_of_run, is_alone, sizes_of
from coterie.views.report.map import mapped_clients, neighbours, principal
from coterie.views.report.situations import heat_map
from coterie.views.report.tree import tree_of
from coterie.views.words import size_text

Payload = dict[str, Any]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_ROUNDS = 400  # points of a curve
MOST_BUBBLES = 120  # clients; the labels of more are shown as a heat map
MOST_SLICES = 240  # columns of a heat map
MOST_FAILURES = 200  # listed one by one
MOST_DECISIONS = 500  # in the table; of more, refused cuts and mergers are left out
MOST_MOVES = 12  # sentences
MOST_CLASSES = 62
_ENVIRONMENT = ("coterie", "python", "torch", "platform", "threads", "gpu", "date", "digest")


def page_payload(
    runs: Sequence[RunData], *, tsne: bool = True, situations: Sequence[Mapping[str, Any]] = ()
) -> Payload:
    """The data of a page of these runs; `situations` are those of their comparison."""
    table = compare_payload(runs, situations) if len(runs) > 1 else None
    return {"runs": [run_payload(run, tsne=tsne) for run in runs], "compare": table}


def run_payload(run: RunData, *, tsne: bool = True) -> Payload:
    """The data of one run; without `tsne`, which takes seconds, its map is by PCA only."""
    rounds = spread_evenly(len(run.rounds), MOST_ROUNDS)
    clustered = not is_alone(run.sizes)
    names = ("name", "title", "state", "algorithm", "dataset", "seed", "planned", "done", "repairs", "problems")
    shown = ("key", "label", "about", "better", "panel", "shown")
    notes, choice = (run.summary or run.environment).get("notes"), None
    if run.choice is not None:
        choice = {"recommended": run.choice.get("recommended"), "reason": str(run.choice.get("reason", ""))}
    return {name: getattr(run, name) for name in names} | {
        "left": _rounded(run.seconds_left, 1),
        "headline": run_headline(run),
        "metrics": [
            {name: getattr(metric, name) for name in shown} | {"unit": metric.format.unit}
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
        "sizes": _sizes(run, rounds) if clustered else None,
        "flow": _flow(run) if clustered else None,
        "map": _map(run, tsne),
        "clients": _clients(run),
        "groups": run.group_names(),
        "confusion": _confusion(run) if clustered else None,
        "fairness": _fairness(run),
        "labels": _labels(run),
        "members": _members(run),
        "pseudo": _pseudo(run),
        "decisions": _decisions(run),
        "failures": _failures(run),
        "unseen": _unseen((run.summary or {}).get("unseen")),
        "movement": _movement(run.summary or {}) if clustered else None,
        "choice": choice,
        "settings": [[table, key, str(value)] for table, values in run.config.items() for key, value in values.items()],
        "command": repeat_command(run),
        "environment": [
            [key, str(run.environment[key])] for key in _ENVIRONMENT if run.environment.get(key) is not None
        ],
        "notes": [str(note) for note in notes] if isinstance(notes, list) else [],
    }


def _movement(summary: Mapping[str, Any]) -> Payload | None:
    """What the start found and what the rounds changed; None if there is nothing to show.

    Methods without a start have no `start` and no `moved`.
    """
    changes = summary.get("label_changes")
    if not isinstance(changes, list) or not all(isinstance(count, int) for count in changes):
        return None
    if summary.get("moved_since_start") is None and not any(changes):
        return None
    found = {"start": summary.get("start_ari"), "end": summary.get("ari"), "moved": summary.get("moved_since_start")}
    numbers = {key: _rounded(float(v), 4) if isinstance(v, (int, float)) else None for key, v in found.items()}
    return numbers | {"changes": [[number, count] for number, count in enumerate(changes, 1) if count]}


def tsne_payload(run: RunData) -> list[list[float | None]] | None:
    """The t-SNE coordinates of the clients of `map`."""
    who = mapped_clients(run)
    found = None if run.sketches is None else neighbours(run.sketches[who])
    return None if found is None else [_numbers(column, 3) for column in found.T]


def compare_payload(runs: Sequence[RunData], situations: Sequence[Mapping[str, Any]] = ()) -> Payload:
    """The table of several runs, and the heat map of a comparison over situations."""
    rows = compare.rows_of(runs, [str(item["name"]) for item in situations])
    columns = [c for c in compare.columns() if any(row.known(c.key) for row in rows)]
    best = {column.key: compare.best_of(rows, column) for column in columns}

    def cell(position: int, row: compare.Row, column: compare.Column) -> list[Any]:
        pair = (row.mean(column.key), row.deviation(column.key))
        scaled = [None if value is None else _rounded(column.format.factor * value, 6) for value in pair]
        return [*scaled, position in best[column.key]]

    return {
        "columns": [[c.key, c.title, min(3, c.format.digits), c.format.unit] for c in columns],
        "rows": [
            {
                "label": row.label,
                "dataset": row.data,
                "situation": row.situation,
                "runs": row.runs,
                "seeds": [runs[i].seed for i in row.runs],
                "cells": [cell(i, row, column) for column in columns],
                "best": test.best,
                "p": _rounded(test.p, 6),
                "pairs": test.seeds,
            }
            for i, (row, test) in enumerate(zip(rows, compare.compared_to_best(runs, rows), strict=True))
        ],
        "datasets": len({row.data for row in rows}),
        "heat": heat_map(rows, situations),
    }


def repeat_command(run: RunData) -> str:
    """The command that repeats a run."""
    if run.settings.get("over_sites"):
        return "./run.sh (in the folder of the app)"
    if run.settings.get("from_python"):
        return "# started from Python with its own objects: run the program again"
    if run.path is None:
        return "# not stored in a folder: run the program again"
    return shlex.join(["coterie", "run", "--config", str(run.path / "config.toml"), "--name", f"{run.name}-again"])


# ---- parts ----


def run_headline(run: RunData) -> list[list[Any]]:
    """Name, value and meaning of the main numbers."""
    found: list[list[Any]] = []
    for metric in metrics("headline"):
        value = run.last(metric.key)
        if value is None or (metric.key == "loss" and run.last("accuracy") is not None):
            continue  # the loss only where there is no accuracy
        found.append([metric.label, f"{metric.format.text(value)} {metric.format.unit}".strip(), metric.about])
    if run.sizes:
        last = run.sizes[-1]
        sizes = " ".join(str(size) for size in last[:8]) + (" …" if len(last) > 8 else "")
        meaning = "one per client" if is_alone(run.sizes) else sizes
        found.append(["clusters", str(sum(size > 0 for size in last)), meaning])
    found.append(["rounds", f"{run.done} of {run.planned}" if run.done < run.planned else str(run.done), run.state])
    sent, seconds = compare.value_of(run, "megabytes"), compare.value_of(run, "seconds")
    if sent is not None:
        found.append(["sent", size_text(1e6 * sent), "models and arrays, down and up, including the start"])
    if seconds is not None:
        found.append(["seconds", f"{seconds:.1f} s", "start, training, server, evaluation"])
    failures = (run.summary or {}).get("failures", len(run.failures))
    if isinstance(failures, int) and failures:
        found.append(["failed answers", f"{failures:,}", "missing, late or refused"])
    return found


def _sizes(run: RunData, rounds: list[int]) -> Payload | None:
    if not run.sizes:
        return None
    clusters, table = sizes_of(run)
    return {"clusters": clusters, "values": table[rounds].T.tolist()}


def _flow(run: RunData) -> Payload | None:
    flow = flow_of_run(run)
    if flow is None or run.labels is None:
        return None
    moves = int(((run.labels[1:] != run.labels[:-1]) & (run.labels[:-1] >= 0)).sum())
    return {"rounds": flow.rounds, "nodes": flow.nodes, "links": flow.links, "moves": moves}


def _map(run: RunData, tsne: bool) -> Payload | None:
    who = mapped_clients(run)
    if run.sketches is None or run.sketched is None or len(who) < 3:
        return None
    points, share = principal(run.sketches[who])
    scale = float(np.abs(points).max()) or 1.0
    return {
        "clients": who.tolist(),
        "pca": [_numbers(column / scale) for column in points.T],
        "share": [_rounded(value, 4) for value in share],
        "tsne": tsne_payload(run) if tsne else None,
        "of": int((run.sketched > 0).sum()),
    }


def _clients(run: RunData) -> Payload | None:
    columns = {"cluster": run.clusters, "group": run.group_positions(), "samples": run.samples}
    found = {name: None if values is None else values.tolist() for name, values in columns.items()}
    scores = {name: _numbers(values) for name, values in run.scores.items()}
    return {"name": run.names, **found, **scores} if run.names else None


def _confusion(run: RunData) -> Payload | None:
    found = confusion_of(run)
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
    parts = [metric for metric in metrics("summary") if metric.line == "fairness"]
    return {
        "parts": [[metric.label, _rounded(metric.value({"accuracy": values}), 5)] for metric in parts],
        "mean": _rounded(float(values.mean()), 5),
        "deviation": _rounded(float(values.std()), 5),
        # Jain, Chiu and Hawe (1984): 1 if all are equal, 1/n if one client has everything.
        "jain": _rounded(float(values.sum()) ** 2 / (len(values) * square) if square else 1.0, 5),
        "worst": worst.tolist(),
    }


def _labels(run: RunData) -> Payload | None:
    counts, groups = run.counts, run.group_positions()
    if counts is None or not counts.size:
        return None
    places = np.zeros(len(counts), dtype=np.int64) if groups is None else groups
    classes = spread_evenly(counts.shape[1], MOST_CLASSES)
    called = [run.class_names[k] for k in classes] if run.class_names else classes
    if len(counts) <= MOST_BUBBLES:
        order = np.argsort(places, kind="stable")
        shown = counts[order][:, classes]
        return {"kind": "bubbles", "clients": order.tolist(), "classes": called, "counts": shown.tolist()}
    order, shares = by_main_class(counts, places)
    starts, means = narrowed(shares, MOST_SLICES)
    return {
        "kind": "heat",
        "classes": called,
        "group": places[order[starts]].tolist(),
        "shares": [_numbers(column, 3) for column in means[:, classes].T],
        "of": len(counts),
    }


def by_main_class(counts: Ints, groups: Ints) -> tuple[Ints, Floats]:
    """The order of clients by group, then by most frequent class, and their class shares in that order [N, L].

    Without an order, a heat map of thousands of columns would be noise.
    """
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1), groups))
    return order, shares[order]


def narrowed(shares: Floats, most: int) -> tuple[Ints, Floats]:
    """At most this many rows: where each starts, and the means of neighbours."""
    rows = min(most, len(shares))
    starts = np.arange(rows) * len(shares) // rows
    return starts, np.add.reduceat(shares, starts, axis=0) / np.diff([*starts, len(shares)])[:, None]


def _members(run: RunData) -> list[Payload] | None:
    """For each cluster some members, each with a strip of pictures."""
    if not run.members:
        return None
    pictures, client, cluster, label = (run.members[name] for name in ("picture", "client", "cluster", "label"))
    found = []
    for number in np.unique(cluster).tolist():
        members = []
        for who in dict.fromkeys(client[cluster == number].tolist()):
            mine = np.flatnonzero((cluster == number) & (client == who))
            strip = png_uri(mosaic_of(pictures[mine][None]))
            members.append({"client": who, "labels": label[mine].tolist(), "strip": strip})
        found.append({"cluster": number, "members": members})
    return found


def _pseudo(run: RunData) -> Payload | None:
    if not run.method:
        return None
    told, pseudo, witness = (run.method.get(name) for name in ("told", "pseudo", "witness"))
    assert told is not None
    keep = spread_evenly(len(told), 8)
    strips = None
    if pseudo is not None:  # one column per class
        classes = spread_evenly(pseudo.shape[1], 20)
        strips = [png_uri(mosaic_of(np.moveaxis(pseudo[k][classes], 1, 0))) for k in keep]
    return {
        "clusters": keep,
        "told": np.round(told[np.ix_(keep, keep)], 3).tolist(),
        "witness": None if witness is None else np.round(witness[keep], 3).tolist(),
        "strips": strips,
    }


def _decisions(run: RunData) -> Payload | None:
    """What the method decided about its clusters: in words, as a tree and as a table."""
    if not run.decisions or not run.sizes:
        return None
    shown = without_repeats(run.decisions)
    if len(shown) > MOST_DECISIONS:
        shown = [decision for decision in shown if decision["what"] not in ("refused", "apart")][:MOST_DECISIONS]
    return {
        "kinds": kinds_found(len(run.sizes[-1])),
        "about": " ".join(legend(run.decisions)),
        "tree": tree_of(run.decisions, run.sizes[-1]),
        "moves": sentences([one for one in run.decisions if one["what"] in ("move", "removed", "merged")], MOST_MOVES),
        "rows": [
            [
                *(decision["round"], decision["what"]),
                *(listed(decision[name]) or None for name in ("clusters", "sizes")),
                *(_rounded(decision.get(name), 2) for name in ("z", "q", "t")),
                listed([_move(move) for move in decision.get("moves", [])]) or None,
            ]
            for decision in shown
        ],
        "hidden": len(run.decisions) - len(shown),
    }


def _move(move: Mapping[str, Any]) -> str:
    return f"{move['client']} ({move['from_cluster']} → {move['to_cluster']})"


def _failures(run: RunData) -> Payload | None:
    def text(failure: Mapping[str, Any], key: str) -> str:
        return str(failure.get(key, "?")).rpartition(":" if key == "step" else "\0")[2]

    reasons = Counter(text(failure, "reason") for failure in run.failures)
    rows = [
        [failure.get("round"), *(text(failure, key) for key in ("client", "step", "reason"))]
        for failure in run.failures[:MOST_FAILURES]
    ]
    return {"total": len(run.failures), "reasons": reasons.most_common(20), "rows": rows} if rows else None


def _unseen(found: Any) -> Payload | None:
    if not isinstance(found, Mapping):
        return None
    tables = {score: found.get(score) for score in ("accuracy", "loss")}
    scores = {score: table.get("macro") if isinstance(table, Mapping) else None for score, table in tables.items()}
    return {"clients": found.get("clients"), **scores, "ari": found.get("ari")}


# ---- numbers and pictures ----


def _rounded(value: float | None, digits: int) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    found = round(float(value), digits)
    return int(found) if found == int(found) and abs(found) < 1 << 53 else found


def _numbers(values: NDArray[Any], digits: int = 4) -> list[float | None]:
    """Rounded after the decimal point, to save space; None where there is no number."""
    return [_rounded(value, digits) for value in values.tolist()]


def tile_gap(wide: int) -> int:
    """Pixels between tiles of this width."""
    return max(1, round(wide / 14))


def mosaic_of(tiles: NDArray[Any], light: Any = 200) -> NDArray[Any]:
    """Pictures [rows, columns, H, W, C] as one picture, with light gaps."""
    rows, columns, high, wide, channels = tiles.shape
    gap = tile_gap(wide)
    canvas = np.empty((rows, high + gap, columns, wide + gap, channels), dtype=tiles.dtype)
    canvas[...] = light
    canvas[:, :high, :, :wide] = tiles.transpose(0, 2, 1, 3, 4)
    return canvas.reshape(rows * (high + gap), columns * (wide + gap), channels)[:-gap, :-gap]


def png_uri(image: NDArray[np.uint8]) -> str:
    """A picture [H, W, 1 or 3] as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png_bytes(image)).decode()


def png_bytes(image: NDArray[np.uint8]) -> bytes:
    """A picture [H, W, 1 or 3] as a PNG file (ISO/IEC 15948), so that pages need no imaging library.

    >>> png_bytes(np.zeros((2, 3, 1), dtype=np.uint8))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    high, wide, channels = image.shape
    lines = np.zeros((high, 1 + wide * channels), dtype=np.uint8)  # each line begins with its filter type, 0
    lines[:, 1:] = image.reshape(high, -1)

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", wide, high, 8, 0 if channels == 1 else 2, 0, 0, 0)
    packed = zlib.compress(lines.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
