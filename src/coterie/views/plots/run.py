"""Pictures of a run by round, of its clusters and of its costs: `accuracy(run).savefig("accuracy.png")`.

A run is a path to its folder, or the `Result` that `coterie.run` gave back. A picture that a run has nothing for
(a map of a method that sends no models, a confusion without true groups) raises a DataError that says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from coterie.data.pictures import spread_evenly
from coterie.errors import DataError, UnknownName
from coterie.runs.reading import RunData
from coterie.views.plots.common import (
    MARKERS,
    cluster_colour,
    cluster_name,
    draw_line,
    drawn_in,
    frame,
    megabytes_sent,
    of_run,
    put_legend,
    refuse_lone,
    round_axis,
    score_axis,
    scores,
)
from coterie.views.plots.style import OKABE_ITO, Theme, colour, ink_axes, panel, write_title
from coterie.views.report.flow import confusion_of, flow_of_run, sizes_of
from coterie.views.report.map import mapped_clients, neighbours, principal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    values = data.curves.get(name)
    if values is None or not np.isfinite(values).any():
        raise DataError(f"{data.name} has no {scores()[name]} yet.")
    figure, axes = frame(f"{data.title}: {scores()[name]} by round", theme)
    told = np.isfinite(data.spread[name]).all(1)
    for low, high, opacity in ((0, 4, 0.15), (1, 3, 0.2)):
        five = data.spread[name][told]
        label = "middle 8 tenths of the clients" if low == 0 else "middle half"
        axes.fill_between(
            data.rounds[told], five[:, low], five[:, high], color=colour(0), alpha=opacity, linewidth=0, label=label
        )
    draw_line(axes, data.rounds, values, colour(0), "mean over clients", linewidth=1.8)
    score_axis(axes, name)
    round_axis(axes)
    for place, metric in enumerate(drawn_in(name)):
        if np.isfinite(data.curves[metric.key]).any():
            draw_line(axes, data.rounds, data.curves[metric.key], colour(3 + place), metric.label, linestyle=":")
    above: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
    for repair in data.repairs if name == "accuracy" else []:
        axes.plot([repair["round"]], [1.01], marker="v", color=colour(3), **above)
    put_legend(axes, theme)
    return figure


# ---- clusters ----


def cluster_sizes(run: Any, *, dark: bool = False) -> Figure:
    """Clients in each cluster by round, one above the other."""
    data, theme = of_run(run, dark)
    refuse_lone(data)
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
    data, theme = of_run(run, dark)
    refuse_lone(data)
    if not len(data.rounds):
        raise DataError(f"{data.name} has no rounds yet.")
    figure, axes = frame(f"{data.title}: churn and agreement by round", theme)
    lines = [("churn", "changed cluster"), *((metric.key, metric.label) for metric in drawn_in("churn"))]
    styles = ((3, "-"), (0, "-"), (2, "--"), (4, ":"), (5, "-."), (6, "--"), (7, ":"))  # colour, dashes
    for (name, label), (place, style) in zip(lines, styles, strict=False):
        if np.isfinite(data.curves[name]).any():
            draw_line(axes, data.rounds, data.curves[name], colour(place), label, linestyle=style)
    axes.set_ylim(min(-0.02, axes.get_ylim()[0]), 1.03)
    round_axis(axes)
    put_legend(axes, theme)
    return figure


def flow(run: Any, *, dark: bool = False) -> Figure:
    """Who moved where: clients between clusters, from round to round (alluvial)."""
    data, theme = of_run(run, dark)
    refuse_lone(data)
    found = flow_of_run(data)
    if found is None:
        raise DataError(f"{data.name} has no labels of two rounds yet.")
    figure, axes = frame(f"{data.title}: who moved where", theme, width=8.0, height=3.4, right=1.3)
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
    """A map of the models that clients sent last, coloured by cluster or by true group."""
    if by not in ("cluster", "group"):
        raise UnknownName("colouring of a map", by, ("cluster", "group"))
    if method not in ("pca", "tsne"):
        raise UnknownName("kind of map", method, ("pca", "tsne"))
    data, theme = of_run(run, dark)
    who = mapped_clients(data)
    if data.sketches is None or len(who) < 3:
        raise DataError(f"{data.name} has no models of three clients to draw a map of.")
    labels = data.clusters if by == "cluster" else data.group_positions()
    if labels is None:
        raise DataError(f"{data.name} has no true groups." if by == "group" else f"{data.name} has no clusters yet.")
    points, share = principal(data.sketches[who])
    axis_names = [f"component {i + 1} ({100 * value:.0f} % of the variance)" for i, value in enumerate(share)]
    if method == "tsne":
        found = neighbours(data.sketches[who])
        if found is None:
            raise DataError(f"{data.name} has too few clients for t-SNE.")
        points, axis_names = found, ["t-SNE 1 (only neighbourhoods mean something)", "t-SNE 2"]
    names = data.group_names()
    figure, axes = frame(
        f"{data.title}: models of the clients, by {'cluster' if by == 'cluster' else 'true group'}",
        theme,
        5.0,
        4.0,
        1.4,
    )
    for number in np.unique(labels[who]).tolist():
        mine = labels[who] == number
        label = cluster_name(number) if by == "cluster" else names[number]
        marker = "s" if number < 0 else MARKERS[number // len(OKABE_ITO) % len(MARKERS)]
        axes.scatter(
            points[mine, 0],
            points[mine, 1],
            s=26 if len(who) < 200 else 12,
            color=cluster_colour(number),
            marker=marker,
            edgecolors=theme.paper,
            linewidths=0.3,
            label=label,
        )
    axes.set(xlabel=axis_names[0], ylabel=axis_names[1])
    ink_axes(axes, theme)
    if len(np.unique(labels[who])) <= 16:
        put_legend(axes, theme, beside=True)
    return figure


def confusion(run: Any, *, dark: bool = False) -> Figure:
    """Clients of each true group in each cluster."""
    data, theme = of_run(run, dark)
    refuse_lone(data)
    found = confusion_of(data)
    if found is None:
        missing = "true groups" if data.groups is None else "clusters yet"
        raise DataError(f"{data.name} has no {missing}.")
    names = [cluster_name(k) for k in found[0]]
    return _shades(found[1], names, data.group_names(), f"{data.title}: clusters and true groups", theme)


def _shades(table: NDArray[Any], rows: Sequence[str], columns: Sequence[str], title: str, theme: Theme) -> Figure:
    wide, high = table.shape[1], table.shape[0]
    figure, axes = panel(
        float(np.clip(0.75 * wide, 2.6, 8)), float(np.clip(0.42 * high, 1.2, 8)), (1.1, 1.2, 0.6, 0.6), theme
    )
    write_title(figure, title, theme)
    image = axes.imshow(table, cmap=theme.shades, vmin=0, aspect="auto", gid="table")
    axes.set_xticks(spread_evenly(wide, 14), [columns[i][:12] for i in spread_evenly(wide, 14)], parse_math=False)
    axes.set_yticks(spread_evenly(high, 20), [rows[i][:14] for i in spread_evenly(high, 20)], parse_math=False)
    axes.set_xlabel("true group")
    for (row, column), value in np.ndenumerate(table):
        if value > 0 and wide * high <= 160:
            red, green, blue, _ = image.cmap(image.norm(value))
            ink = "#222222" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#ffffff"
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color=ink)
    return figure


# ---- costs ----


def bytes_sent(run: Any, *, dark: bool = False) -> Figure:
    """Bytes sent so far by round, both ways, with the start and repairs."""
    data, theme = of_run(run, dark)
    parts = [
        ("down", "to the clients", colour(0)),
        ("up", "from the clients", colour(1)),
        ("start_bytes", "start", colour(2)),
        ("repair_bytes", "repairs", colour(3)),
    ]
    told = [(np.nan_to_num(data.curves[key]) / 1e6, name, fill) for key, name, fill in parts if data.curves]
    told = [part for part in told if part[0].any()]
    if not told:
        raise DataError(f"{data.name} has sent nothing yet.")
    figure, axes = frame(f"{data.title}: bytes sent so far", theme)
    _stack(axes, data, told)
    axes.set_ylabel("MB")
    put_legend(axes, theme)
    return figure


def seconds(run: Any, *, dark: bool = False) -> Figure:
    """Seconds of each round: clients, server, evaluation."""
    data, theme = of_run(run, dark)
    if not len(data.rounds):
        raise DataError(f"{data.name} has no rounds yet.")
    figure, axes = frame(f"{data.title}: seconds by round", theme)
    parts = [("train", "clients", 0), ("server", "server", 1), ("evaluate", "evaluation", 2)]
    spent = [(np.nan_to_num(data.curves[f"{key}_seconds"]), name, colour(place)) for key, name, place in parts]
    _stack(axes, data, spent)
    axes.set_ylabel("seconds")
    put_legend(axes, theme)
    return figure


def _stack(axes: Axes, data: RunData, parts: Sequence[tuple[NDArray[Any], str, str]], **more: Any) -> None:
    """Values by round [T] one above the other: values, name, colour."""
    x: NDArray[Any] = data.rounds
    columns, names, fills = zip(*parts, strict=True)
    if len(x) == 1:
        x, columns = np.array([x[0] - 0.5, x[0] + 0.5]), tuple(np.repeat(values, 2) for values in columns)
    axes.stackplot(x, columns, colors=fills, labels=names, **more)
    axes.set_xlim(x[0], x[-1])
    round_axis(axes)


def accuracy_by_bytes(run: Any, *, dark: bool = False) -> Figure:
    """The accuracy reached with so many bytes, both ways and with the start."""
    data, theme = of_run(run, dark)
    if not len(data.rounds) or not np.isfinite(data.curves["accuracy"]).any():
        raise DataError(f"{data.name} has no accuracy yet.")
    figure, axes = frame(f"{data.title}: accuracy against bytes", theme)
    draw_line(axes, megabytes_sent(data), data.curves["accuracy"], colour(0), "accuracy", linewidth=1.8)
    axes.set_xlabel("MB sent")
    axes.set_xlim(left=0)
    score_axis(axes, "accuracy")
    return figure
