"""Plots of one run: scores by round, clusters, clients and costs.

    plots.accuracy("runs/a").savefig("accuracy.png")     # a path, or the Result of coterie.run

If a run has no data for a plot (a confusion without true groups), the function raises a DataError that says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from coterie.data.pictures import spread_evenly
from coterie.errors import DataError, UnknownName
from coterie.runs.metrics import METRICS
from coterie.runs.reading import RunData
from coterie.views.plots.style import (
    OKABE_ITO,
    Theme,
    cluster_colour,
    cluster_name,
    colour,
    draw_line,
    frame,
    of_run,
    panel,
    put_legend,
    round_axis,
    score_axis,
)
from coterie.views.report.compare import megabytes_sent
from coterie.views.report.flow import confusion_of, flow_of_run, is_alone, sizes_of
from coterie.views.report.map import mapped_clients, neighbours, principal
from coterie.views.words import safe_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "os^D"  # after eight groups the colours repeat with another shape


# ---- scores by round ----


def accuracy(run: Any, *, dark: bool = False) -> Figure:
    """Accuracy by round: mean, the five worst, and the spread over clients."""
    return _score(run, "accuracy", dark)


def f1(run: Any, *, dark: bool = False) -> Figure:
    """F1 by round with the spread over clients."""
    return _score(run, "f1", dark)


def loss(run: Any, *, dark: bool = False) -> Figure:
    """Loss by round with the spread over clients."""
    return _score(run, "loss", dark)


def _score(run: Any, name: str, dark: bool) -> Figure:
    data, theme = of_run(run, dark)
    values, label = data.curves.get(name), METRICS[name].label
    if values is None or not np.isfinite(values).any():
        raise DataError(f"{data.name} has no {label} yet.")
    figure, axes = frame(f"{data.title}: {label} by round", theme)
    known = np.isfinite(data.spread[name]).all(1)
    five, rounds = data.spread[name][known].T, data.rounds[known]
    for low, high, opacity, what in ((0, 4, 0.15, "middle 80 % of clients"), (1, 3, 0.2, "middle 50 %")):
        axes.fill_between(rounds, five[low], five[high], color=colour(0), alpha=opacity, linewidth=0, label=what)
    draw_line(axes, data.rounds, values, colour(0), "mean over clients", width=1.8)
    score_axis(axes, name)
    round_axis(axes)
    for place, metric in enumerate(metric for metric in METRICS.values() if metric.panel == name):
        if np.isfinite(data.curves[metric.key]).any():
            draw_line(axes, data.rounds, data.curves[metric.key], colour(3 + place), metric.label, style=":")
    for repair in data.repairs if name == "accuracy" else []:
        above = axes.get_xaxis_transform()
        axes.plot([repair["round"]], [1.01], marker="v", color=colour(3), transform=above, clip_on=False)
    put_legend(axes, theme)
    return figure


# ---- clusters ----


def _clustered(run: Any, dark: bool) -> tuple[RunData, Theme]:
    """The run and the theme; a run in which every client is its own cluster has no clusters to draw."""
    data, theme = of_run(run, dark)
    if is_alone(data.sizes):
        raise DataError(f"{data.name}: every client is a cluster of its own; there are no clusters to draw.")
    return data, theme


def cluster_sizes(run: Any, *, dark: bool = False) -> Figure:
    """Clients in each cluster by round, stacked."""
    data, theme = _clustered(run, dark)
    if not data.sizes:
        raise DataError(f"{data.name} has no rounds yet.")
    clusters, table = sizes_of(data)
    figure, axes = frame(f"{data.title}: cluster sizes by round", theme, right=1.3)
    parts = [(values, cluster_name(k), cluster_colour(k)) for k, values in zip(clusters, table.T, strict=True)]
    _stack(axes, data, parts, alpha=0.9)
    axes.set_ylabel("clients")
    put_legend(axes, theme, beside=True, reverse=True)
    return figure


def churn(run: Any, *, dark: bool = False) -> Figure:
    """Share of the clients that changed cluster by round, and agreement with the true groups."""
    data, theme = _clustered(run, dark)
    if not len(data.rounds):
        raise DataError(f"{data.name} has no rounds yet.")
    figure, axes = frame(f"{data.title}: churn and agreement by round", theme)
    lines = [("churn", "clients that changed cluster")]
    lines += [(metric.key, metric.label) for metric in METRICS.values() if metric.panel == "churn"]
    styles = ((3, "-"), (0, "-"), (2, "--"), (4, ":"), (5, "-."), (6, "--"), (7, ":"))  # colour, dashes
    for (name, label), (place, style) in zip(lines, styles, strict=False):
        if np.isfinite(data.curves[name]).any():
            draw_line(axes, data.rounds, data.curves[name], colour(place), label, style=style)
    axes.set_ylim(min(-0.02, axes.get_ylim()[0]), 1.03)
    round_axis(axes)
    put_legend(axes, theme)
    return figure


def flow(run: Any, *, dark: bool = False) -> Figure:
    """Moves of clients between clusters, from round to round (alluvial)."""
    data, theme = _clustered(run, dark)
    found = flow_of_run(data)
    if found is None:
        raise DataError(f"{data.name} has no labels from two rounds yet.")
    figure, axes = frame(f"{data.title}: moves between clusters", theme, width=8.0, height=3.4, right=1.3)
    names = sorted({k for column in found.nodes for k, _ in column}, key=lambda k: (k < 0, abs(k)))
    gap, wide = 0.025 * sum(size for _, size in found.nodes[0]), 0.09
    tops: list[dict[int, float]] = []
    for column in found.nodes:
        sizes, place, total = dict(column), {}, 0.0
        for k in names:
            if k in sizes:
                place[k] = total
                total += sizes[k] + gap
        tops.append(place)
    for c, links in enumerate(found.links):
        out, into = dict(tops[c]), dict(tops[c + 1])
        for a, b, n in sorted(links, key=lambda link: (names.index(link[0]), names.index(link[1]))):
            _ribbon(
                axes, c + wide / 2, c + 1 - wide / 2, out[a], into[b], n, cluster_colour(a), 0.35 if a == b else 0.65
            )
            out[a] += n
            into[b] += n
    for c, column in enumerate(found.nodes):
        for k, n in column:
            label = cluster_name(k) if all(k not in dict(before) for before in found.nodes[:c]) else None
            axes.bar(c, n, wide, tops[c][k], color=cluster_colour(k), label=label, gid="node")
    axes.set_xticks(range(len(found.rounds)), ["start" if r == 0 else str(r) for r in found.rounds])
    axes.set_xlabel("round")
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.grid(False)
    put_legend(axes, theme, beside=True)
    return figure


def _ribbon(
    axes: Axes, left: float, right: float, start: float, stop: float, width: float, fill: str, opacity: float
) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    middle = (left + right) / 2
    points = [
        *((left, start), (middle, start), (middle, stop), (right, stop)),
        *((right, stop + width), (middle, stop + width), (middle, start + width), (left, start + width), (left, start)),
    ]
    curve = [Outline.MOVETO, *[Outline.CURVE4] * 3, Outline.LINETO, *[Outline.CURVE4] * 3, Outline.CLOSEPOLY]
    axes.add_patch(PathPatch(Outline(points, curve), facecolor=fill, alpha=opacity, linewidth=0, gid="ribbon"))


def model_map(
    run: Any, *, by: Literal["cluster", "group"] = "cluster", method: Literal["pca", "tsne"] = "pca", dark: bool = False
) -> Figure:
    """A map of the last models that clients sent, coloured by cluster or by true group."""
    if by not in ("cluster", "group"):
        raise UnknownName("colouring of a map", by, ("cluster", "group"))
    if method not in ("pca", "tsne"):
        raise UnknownName("kind of map", method, ("pca", "tsne"))
    data, theme = of_run(run, dark)
    who = mapped_clients(data)
    if data.sketches is None or len(who) < 3:
        raise DataError(f"{data.name} has models of fewer than three clients: too few for a map.")
    labels = data.clusters if by == "cluster" else data.group_positions()
    if labels is None:
        raise DataError(f"{data.name} has no true groups." if by == "group" else f"{data.name} has no clusters yet.")
    if method == "tsne":
        found, axis_names = neighbours(data.sketches[who]), ["t-SNE 1 (only neighbourhoods are meaningful)", "t-SNE 2"]
        if found is None:
            raise DataError(f"{data.name} has too few clients for t-SNE.")
    else:
        found, share = principal(data.sketches[who])
        axis_names = [f"component {i + 1} ({100 * value:.0f} % of the variance)" for i, value in enumerate(share)]
    names, what = data.group_names(), "cluster" if by == "cluster" else "true group"
    figure, axes = frame(f"{data.title}: client models by {what}", theme, 5.0, 4.0, 1.4)
    numbers = np.unique(labels[who]).tolist()
    for number in numbers:
        x, y = found[labels[who] == number].T
        axes.scatter(
            x,
            y,
            s=26 if len(who) < 200 else 12,
            color=cluster_colour(number),
            marker="s" if number < 0 else _MARKERS[number // len(OKABE_ITO) % len(_MARKERS)],
            edgecolors=theme.paper,
            linewidths=0.3,
            label=cluster_name(number) if by == "cluster" else names[number],
        )
    axes.set(xlabel=axis_names[0], ylabel=axis_names[1])
    if len(numbers) <= 16:
        put_legend(axes, theme, beside=True)
    return figure


def confusion(run: Any, *, dark: bool = False) -> Figure:
    """Clients of each true group in each cluster."""
    data, theme = _clustered(run, dark)
    found = confusion_of(data)
    if found is None:
        missing = "true groups" if data.groups is None else "clusters yet"
        raise DataError(f"{data.name} has no {missing}.")
    clusters, table = found
    high, wide = table.shape
    size = float(np.clip(0.75 * wide, 2.6, 8)), float(np.clip(0.42 * high, 1.2, 8))
    figure, axes = panel(*size, (1.1, 1.2, 0.6, 0.6), theme, f"{data.title}: clusters and true groups")
    image = axes.imshow(table, cmap=theme.shades, vmin=0, aspect="auto", gid="table")
    columns, rows, names = spread_evenly(wide, 14), spread_evenly(high, 20), data.group_names()
    axes.set_xticks(columns, [safe_text(names[i])[:12] for i in columns], parse_math=False)
    axes.set_yticks(rows, [cluster_name(clusters[i])[:14] for i in rows], parse_math=False)
    axes.set_xlabel("true group")
    light = image.to_rgba(table)[..., :3] @ [0.299, 0.587, 0.114]  # [K, G]
    for (row, column), value in np.ndenumerate(table):
        if value > 0 and table.size <= 160:
            ink = "#222222" if light[row, column] > 0.5 else "#ffffff"
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color=ink)
    return figure


# ---- clients ----


def client_accuracy(run: Any, *, dark: bool = False) -> Figure:
    """The accuracy of every client, sorted within its cluster, with the mean of each cluster."""
    data, theme = of_run(run, dark)
    scores = data.scores.get("accuracy")
    if scores is None or not np.isfinite(scores).any():
        raise DataError(f"{data.name} has no accuracy of its clients yet.")
    alone = data.clusters is None or is_alone(data.sizes)
    clusters = np.zeros(len(scores), dtype=np.int64) if alone or data.clusters is None else data.clusters
    order = np.lexsort((scores, clusters))
    order = order[np.isfinite(scores[order])]
    figure, axes = frame(f"{data.title}: accuracy of each client", theme, width=8.0, right=1.3)
    numbers, size = np.unique(clusters[order]).tolist(), 18 if len(order) < 200 else 7
    for number in numbers:
        place = np.flatnonzero(clusters[order] == number)
        values, fill = scores[order[place]], cluster_colour(number)
        axes.scatter(
            place, values, s=size, color=fill, label="clients" if alone else cluster_name(number), linewidths=0
        )
        axes.hlines(values.mean(), place[0] - 0.5, place[-1] + 0.5, color=fill, linestyle="--", linewidth=1)
    axes.set_xlabel("clients, sorted" + ("" if alone else " within each cluster"))
    axes.set_xticks([])
    score_axis(axes, "accuracy")
    if len(numbers) <= 14:
        put_legend(axes, theme, beside=True)
    return figure


# ---- costs ----


def bytes_sent(run: Any, *, dark: bool = False) -> Figure:
    """Bytes sent so far by round, in both directions, including the start and repairs."""
    data, theme = of_run(run, dark)
    parts = {"down": "to clients", "up": "from clients", "start_bytes": "start", "repair_bytes": "repairs"}
    sent = [
        (np.nan_to_num(data.curves[key]) / 1e6, name, colour(place))
        for place, (key, name) in enumerate(parts.items())
        if data.curves and np.nansum(data.curves[key]) > 0
    ]
    if not sent:
        raise DataError(f"{data.name} has sent nothing yet.")
    figure, axes = frame(f"{data.title}: bytes sent so far", theme)
    _stack(axes, data, sent)
    axes.set_ylabel("MB")
    put_legend(axes, theme)
    return figure


def seconds(run: Any, *, dark: bool = False) -> Figure:
    """Seconds per round: clients, server, evaluation."""
    data, theme = of_run(run, dark)
    if not len(data.rounds):
        raise DataError(f"{data.name} has no rounds yet.")
    figure, axes = frame(f"{data.title}: seconds per round", theme)
    parts = [("train", "clients", 0), ("server", "server", 1), ("evaluate", "evaluation", 2)]
    spent = [(np.nan_to_num(data.curves[f"{key}_seconds"]), name, colour(place)) for key, name, place in parts]
    _stack(axes, data, spent)
    axes.set_ylabel("seconds")
    put_legend(axes, theme)
    return figure


def _stack(axes: Axes, data: RunData, parts: Sequence[tuple[NDArray[Any], str, str]], **more: Any) -> None:
    """Stacked areas by round: values [T], name, colour."""
    x: NDArray[Any] = data.rounds
    columns, names, fills = zip(*parts, strict=True)
    if len(x) == 1:
        x, columns = np.array([x[0] - 0.5, x[0] + 0.5]), tuple(np.repeat(values, 2) for values in columns)
    axes.stackplot(x, columns, colors=fills, labels=names, **more)
    axes.set_xlim(x[0], x[-1])
    round_axis(axes)


def accuracy_by_bytes(run: Any, *, dark: bool = False) -> Figure:
    """Accuracy against the bytes sent so far."""
    data, theme = of_run(run, dark)
    if not len(data.rounds) or not np.isfinite(data.curves["accuracy"]).any():
        raise DataError(f"{data.name} has no accuracy yet.")
    figure, axes = frame(f"{data.title}: accuracy against bytes", theme)
    draw_line(axes, megabytes_sent(data), data.curves["accuracy"], colour(0), "accuracy", width=1.8)
    axes.set_xlabel("MB sent")
    axes.set_xlim(left=0)
    score_axis(axes, "accuracy")
    return figure
