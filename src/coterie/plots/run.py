"""Pictures of a run, one function each: `accuracy(run).savefig("accuracy.png")`.

A run is a path to its folder, or the `Result` that `coterie.run` gave back. A picture that a run has nothing for
(a map of a method that sends no models, a confusion without true groups) raises a DataError that says so.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, DataError, StorageError, UnknownName
from coterie.pictures import spread_evenly
from coterie.plots.federation import MOST_BUBBLES, _bubbles, _heat_map
from coterie.plots.style import DARK, LIGHT, OKABE_ITO, Theme, colour, ink_axes, ink_legend, panel, write_title
from coterie.report import compare
from coterie.report.data import RunData, as_run
from coterie.report.flow import NOT_MET, OTHERS, flow_of, is_alone, shown_clusters
from coterie.report.map import mapped_clients, neighbours, principal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

_MARKERS = "os^D"  # beyond eight groups the colours come again with another shape
_GREY = OKABE_ITO[-1]
_DASHES = ("-", (0, (6, 2)), (0, (2.5, 1.5)), (0, (7, 1.5, 1.5, 1.5)), "-.")
_SCORES = {
    "accuracy": "accuracy",
    "f1": "F1",
    "loss": "loss",
    "bottom5": "accuracy of the 5 worst clients",
    "ari": "ARI",
    "churn": "churn",
}
_SHARES = ("accuracy", "f1", "bottom5")  # shown in percent


def _of(run: Any, dark: bool) -> tuple[RunData, Theme]:
    return as_run(run), DARK if dark else LIGHT


def _frame(
    title: str, theme: Theme, width: float = 6.2, height: float = 3.1, right: float = 0.2
) -> tuple[Figure, Axes]:
    figure, axes = panel(width, height, (0.75, right, 0.75, 0.55), theme)
    axes.grid(color=theme.faint, linewidth=0.4)
    axes.set_axisbelow(True)
    write_title(figure, title, theme)
    return figure, axes


def _legend(axes: Axes, theme: Theme, *, beside: bool = False, columns: int = 4, **more: Any) -> None:
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0), "ncol": columns}
    if beside:
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.02)}
    options: dict[str, Any] = {"frameon": False, "fontsize": 8, "columnspacing": 1.2, "handlelength": 1.6}
    ink_legend(axes.legend(**place | options | more), theme)


def _percent(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")


def _rounds(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round")


def _cluster_name(number: int) -> str:
    return {NOT_MET: "not met", OTHERS: "other clusters"}.get(number, f"cluster {number}")


def _cluster_colour(number: int) -> str:
    return _GREY if number < 0 else colour(number)


def _lone(run: RunData) -> None:
    if is_alone(run.sizes):
        raise DataError(f"{run.name}: every client is a cluster of its own; there are no clusters to draw.")


# ---- scores by round ----


def accuracy(run: Any, *, dark: bool = False) -> Figure:
    """Accuracy by round: mean, the five worst, and the spread over clients."""
    data, theme = _of(run, dark)
    figure, axes = _score(data, "accuracy", theme)
    if np.isfinite(data.curves["bottom5"]).any():
        _line(axes, data.rounds, data.curves["bottom5"], colour(3), "5 worst clients", linestyle=":")
    for repair in data.repairs:
        axes.plot(
            [repair["round"]], [1.01], marker="v", color=colour(3), transform=axes.get_xaxis_transform(), clip_on=False
        )
    _legend(axes, theme)
    return figure


def f1(run: Any, *, dark: bool = False) -> Figure:
    """F1 by round with the spread over clients."""
    data, theme = _of(run, dark)
    figure, axes = _score(data, "f1", theme)
    _legend(axes, theme)
    return figure


def loss(run: Any, *, dark: bool = False) -> Figure:
    """Loss by round with the spread over clients."""
    data, theme = _of(run, dark)
    figure, axes = _score(data, "loss", theme)
    _legend(axes, theme)
    return figure


def _score(data: RunData, name: str, theme: Theme) -> tuple[Figure, Axes]:
    values = data.curves.get(name)
    if values is None or not np.isfinite(values).any():
        raise DataError(f"{data.name} has no {_SCORES[name]} yet.")
    figure, axes = _frame(f"{data.title}: {_SCORES[name]} by round", theme)
    told = np.isfinite(data.spread[name]).all(1)
    for low, high, opacity in ((0, 4, 0.15), (1, 3, 0.2)):
        five = data.spread[name][told]
        label = "middle 8 tenths of the clients" if low == 0 else "middle half"
        axes.fill_between(
            data.rounds[told], five[:, low], five[:, high], color=colour(0), alpha=opacity, linewidth=0, label=label
        )
    _line(axes, data.rounds, values, colour(0), "mean over clients", linewidth=1.8)
    if name in _SHARES:
        _percent(axes)
    _rounds(axes)
    return figure, axes


def _line(axes: Axes, x: NDArray[Any], y: Floats, fill: str, label: str, **more: Any) -> None:
    told = np.isfinite(y)
    marker = {"marker": "o", "markersize": 3} if told.sum() < 3 else {}
    axes.plot(x[told], y[told], color=fill, label=label, **{"linewidth": 1.4, **marker, **more})


# ---- clusters ----


def cluster_sizes(run: Any, *, dark: bool = False) -> Figure:
    """Clients in each cluster by round, one above the other."""
    data, theme = _of(run, dark)
    _lone(data)
    if not data.sizes:
        raise DataError(f"{data.name} has no rounds yet.")
    shown = shown_clusters(data.sizes)
    table = np.zeros((len(data.sizes), max(len(row) for row in data.sizes)))
    for i, row in enumerate(data.sizes):
        table[i, : len(row)] = row
    rest = [k for k in range(table.shape[1]) if k not in shown]
    columns = [*(table[:, k] for k in shown), *([table[:, rest].sum(1)] if rest else [])]
    names = [*shown, *([OTHERS] if rest else [])]
    figure, axes = _frame(f"{data.title}: cluster sizes by round", theme, right=1.3)
    x = data.rounds if len(data.rounds) > 1 else np.array([data.rounds[0] - 0.5, data.rounds[0] + 0.5])
    stacks = columns if len(data.rounds) > 1 else [np.repeat(column, 2) for column in columns]
    axes.stackplot(
        x, stacks, colors=[_cluster_colour(k) for k in names], labels=[_cluster_name(k) for k in names], alpha=0.9
    )
    axes.set_ylabel("clients")
    axes.set_xlim(x[0], x[-1])
    _rounds(axes)
    _legend(axes, theme, beside=True, reverse=True)
    return figure


def churn(run: Any, *, dark: bool = False) -> Figure:
    """Share of the clients that changed cluster by round, and agreement with the true groups."""
    data, theme = _of(run, dark)
    _lone(data)
    if not len(data.rounds):
        raise DataError(f"{data.name} has no rounds yet.")
    figure, axes = _frame(f"{data.title}: churn and agreement by round", theme)
    parts = (
        ("churn", "changed cluster", 3, "-"),
        ("ari", "ARI", 0, "-"),
        ("nmi", "NMI", 2, "--"),
        ("purity", "purity", 4, ":"),
    )
    for name, label, place, style in parts:
        if np.isfinite(data.curves[name]).any():
            _line(axes, data.rounds, data.curves[name], colour(place), label, linestyle=style)
    axes.set_ylim(min(-0.02, axes.get_ylim()[0]), 1.03)
    _rounds(axes)
    _legend(axes, theme)
    return figure


def flow(run: Any, *, dark: bool = False) -> Figure:
    """Who moved where: clients between clusters, from round to round (alluvial)."""
    data, theme = _of(run, dark)
    _lone(data)
    if data.labels is None or len(data.labels) < 2:
        raise DataError(f"{data.name} has no labels of two rounds yet.")
    found = flow_of(data.labels, shown_clusters([np.bincount(row[row >= 0]).tolist() for row in data.labels]))
    figure, axes = _frame(f"{data.title}: who moved where", theme, width=8.0, height=3.4, right=1.3)
    names = sorted({k for column in found.nodes for k, _ in column}, key=lambda k: (k < 0, abs(k)))
    clients = data.labels.shape[1]
    gap, wide = 0.025 * clients, 0.09
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
                axes, c + wide / 2, c + 1 - wide / 2, out[a], into[b], n, _cluster_colour(a), 0.35 if a == b else 0.65
            )
            out[a] += n
            into[b] += n
    for c, column in enumerate(found.nodes):
        for k, n in column:
            label = _cluster_name(k) if all(k not in dict(before) for before in found.nodes[:c]) else None
            axes.bar(c, n, wide, tops[c][k], color=_cluster_colour(k), label=label, gid="node")
    axes.set_xticks(range(len(found.rounds)), ["start" if r == 0 else str(r) for r in found.rounds])
    axes.set_xlabel("round")
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.grid(False)
    _legend(axes, theme, beside=True)
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
    run: Any,
    *,
    by: Literal["cluster", "group"] = "cluster",
    method: Literal["pca", "tsne"] = "pca",
    dark: bool = False,
) -> Figure:
    """A map of the models that clients sent last, coloured by cluster or by true group."""
    if by not in ("cluster", "group"):
        raise UnknownName("colouring of a map", by, ("cluster", "group"))
    if method not in ("pca", "tsne"):
        raise UnknownName("kind of map", method, ("pca", "tsne"))
    data, theme = _of(run, dark)
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
    figure, axes = _frame(
        f"{data.title}: models of the clients, by {'cluster' if by == 'cluster' else 'true group'}",
        theme,
        5.0,
        4.0,
        1.4,
    )
    for number in np.unique(labels[who]).tolist():
        mine = labels[who] == number
        label = _cluster_name(number) if by == "cluster" else names[number]
        marker = "s" if number < 0 else _MARKERS[number // len(OKABE_ITO) % len(_MARKERS)]
        axes.scatter(
            points[mine, 0],
            points[mine, 1],
            s=26 if len(who) < 200 else 12,
            color=_cluster_colour(number),
            marker=marker,
            edgecolors=theme.paper,
            linewidths=0.3,
            label=label,
        )
    axes.set(xlabel=axis_names[0], ylabel=axis_names[1])
    ink_axes(axes, theme)
    if len(np.unique(labels[who])) <= 16:
        _legend(axes, theme, beside=True)
    return figure


def confusion(run: Any, *, dark: bool = False) -> Figure:
    """Clients of each true group in each cluster."""
    data, theme = _of(run, dark)
    _lone(data)
    clusters, groups = data.clusters, data.group_positions()
    if clusters is None or groups is None or not (clusters >= 0).any():
        raise DataError(f"{data.name} has no true groups." if groups is None else f"{data.name} has no clusters yet.")
    met = clusters >= 0
    numbers, rows = np.unique(clusters[met], return_inverse=True)
    table = np.zeros((len(numbers), len(data.group_names())))
    np.add.at(table, (rows, groups[met]), 1)
    return _shades(
        table,
        [_cluster_name(k) for k in numbers.tolist()],
        data.group_names(),
        f"{data.title}: clusters and true groups",
        "true group",
        "{:.0f}",
        theme,
    )


def _shades(
    table: Floats, rows: Sequence[str], columns: Sequence[str], title: str, xlabel: str, show: str, theme: Theme
) -> Figure:
    wide, high = table.shape[1], table.shape[0]
    figure, axes = panel(
        float(np.clip(0.75 * wide, 2.6, 8)), float(np.clip(0.42 * high, 1.2, 8)), (1.1, 1.2, 0.6, 0.6), theme
    )
    write_title(figure, title, theme)
    image = axes.imshow(table, cmap=theme.shades, vmin=0, aspect="auto", gid="table")
    axes.set_xticks(spread_evenly(wide, 14), [columns[i][:12] for i in spread_evenly(wide, 14)], parse_math=False)
    axes.set_yticks(spread_evenly(high, 20), [rows[i][:14] for i in spread_evenly(high, 20)], parse_math=False)
    axes.set_xlabel(xlabel)
    if wide * high <= 160:
        _write_numbers(axes, image, table, show)
    return figure


def _write_numbers(axes: Axes, image: Any, table: Floats, show: str) -> None:
    for (row, column), value in np.ndenumerate(table):
        if value > 0:
            red, green, blue, _ = image.cmap(image.norm(value))
            is_light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
            ink = "#222222" if is_light else "#ffffff"
            axes.text(column, row, show.format(value), ha="center", va="center", fontsize=8, color=ink)


# ---- clients ----


def client_accuracy(run: Any, *, dark: bool = False) -> Figure:
    """The accuracy of every client, sorted within its cluster, with the mean of each cluster."""
    data, theme = _of(run, dark)
    scores = data.scores.get("accuracy")
    if scores is None or not np.isfinite(scores).any():
        raise DataError(f"{data.name} has no accuracy of its clients yet.")
    clusters = data.clusters
    alone = clusters is None or is_alone(data.sizes)
    lots = np.zeros(len(scores), dtype=np.int64) if alone or clusters is None else clusters
    order = np.lexsort((scores, lots))
    order = order[np.isfinite(scores[order])]
    figure, axes = _frame(f"{data.title}: accuracy of each client", theme, width=8.0, right=1.3)
    for number in np.unique(lots[order]).tolist():
        place = np.flatnonzero(lots[order] == number)
        values = scores[order[place]]
        label = "clients" if alone else _cluster_name(number)
        axes.scatter(
            place, values, s=18 if len(order) < 200 else 7, color=_cluster_colour(number), label=label, linewidths=0
        )
        axes.hlines(
            values.mean(), place[0] - 0.5, place[-1] + 0.5, color=_cluster_colour(number), linestyle="--", linewidth=1
        )
    axes.set_xlabel("clients, sorted" + ("" if alone else " within each cluster"))
    axes.set_xticks([])
    _percent(axes)
    if len(np.unique(lots[order])) <= 14:
        _legend(axes, theme, beside=True)
    return figure


def held_labels(run: Any, *, dark: bool = False) -> Figure:
    """Who holds which classes: bubbles, or a heat map of more than MOST_BUBBLES clients."""
    data, theme = _of(run, dark)
    if data.counts is None or not data.counts.shape[1]:
        raise DataError(f"{data.name} does not say which classes its clients hold.")
    groups = data.group_positions()
    places = np.zeros(len(data.counts), dtype=np.int64) if groups is None else groups
    if len(data.counts) > MOST_BUBBLES:
        return _heat_map(data.counts, places, data.group_names(), theme)
    return _bubbles(data.counts, places, data.group_names(), data.names, theme)


def member_samples(run: Any, *, dark: bool = False) -> Figure:
    """Samples of some members of each cluster, as they see them (FeSEM's Fig. 5)."""
    data, theme = _of(run, dark)
    if not data.members:
        raise DataError(f"{data.name} has kept no pictures of its clusters' members.")
    pictures, client, cluster = (data.members[name] for name in ("picture", "client", "cluster"))
    rows = [(int(k), int(i)) for k in np.unique(cluster) for i in dict.fromkeys(client[cluster == k].tolist())]
    most = max(int(((client == i) & (cluster == k)).sum()) for k, i in rows)
    tiles = np.full((len(rows), most, *pictures.shape[1:]), 200, dtype=np.uint8)
    for place, (k, i) in enumerate(rows):
        mine = pictures[(client == i) & (cluster == k)]
        tiles[place, : len(mine)] = mine
    names = [data.names[i][:18] for _, i in rows]
    figure, axes = _tiles(tiles, names, f"{data.title}: what members of each cluster see", theme, left=2.2)
    _mark_rows(axes, [k for k, _ in rows], theme)
    return figure


def pseudo_samples(run: Any, *, dark: bool = False) -> Figure:
    """Pseudo samples of each center by class (MD-ICFL's Fig. 7)."""
    data, theme = _of(run, dark)
    if "pseudo" not in data.method:
        raise DataError(f"{data.name} has no pseudo samples; md_icfl on pictures has.")
    pseudo = data.method["pseudo"]  # [K, L, m, H, W, C]
    keep, classes = spread_evenly(len(pseudo), 8), spread_evenly(pseudo.shape[1], 20)
    tiles = np.concatenate([np.moveaxis(pseudo[k][classes], 1, 0) for k in keep])
    labels = [k for k in keep for _ in range(pseudo.shape[2])]
    figure, axes = _tiles(tiles, [""] * len(tiles), f"{data.title}: pseudo samples, a column a class", theme, left=1.0)
    _mark_rows(axes, labels, theme)
    return figure


def _tiles(
    tiles: NDArray[np.uint8], names: Sequence[str], title: str, theme: Theme, left: float
) -> tuple[Figure, Axes]:
    from coterie.report.payload import mosaic_of

    rows, columns = tiles.shape[:2]
    size = float(np.clip(8.0 / columns, 0.3, 0.6))
    figure, axes = panel(size * columns, size * rows, (left, 0.2, 0.5, 0.2), theme)
    write_title(figure, title, theme)
    mosaic = mosaic_of(tiles)
    axes.imshow(np.repeat(mosaic, 3, axis=2) if mosaic.shape[2] == 1 else mosaic, gid="pictures", aspect="auto")
    tall = (mosaic.shape[0] + 1) / rows
    axes.set_yticks([tall * (row + 0.5) for row in range(rows)], names, fontsize=7, parse_math=False)
    axes.set_xticks([])
    axes.tick_params(length=0, pad=8)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure, axes


def _mark_rows(axes: Axes, clusters: Sequence[int], theme: Theme) -> None:
    """A strip in the colour of its cluster beside each row, and the cluster's name once."""
    from matplotlib.patches import Rectangle

    width = axes.get_position().width * axes.figure.get_figure(root=True).get_size_inches()[0]
    rows = len(clusters)
    for row, number in enumerate(clusters):
        box = (-0.09 / width, 1 - (row + 0.98) / rows)
        axes.add_patch(
            Rectangle(
                box, 0.05 / width, 0.96 / rows, color=_cluster_colour(number), transform=axes.transAxes, clip_on=False
            )
        )
        if row == 0 or clusters[row - 1] != number:
            size = sum(other == number for other in clusters)
            axes.text(
                -(axes.get_position().x0 / axes.get_position().width) * 0.97,
                1 - (row + size / 2) / rows,
                _cluster_name(number),
                transform=axes.transAxes,
                va="center",
                fontsize=8,
                color=theme.ink,
            )


def pseudo_confusion(run: Any, *, dark: bool = False) -> Figure:
    """What pseudo samples of each center are called (MD-ICFL's Figs. 5 and 6): made for (row), called (column)."""
    data, theme = _of(run, dark)
    if "told" not in data.method:
        raise DataError(f"{data.name} has no pseudo samples; md_icfl has.")
    told, witness = data.method["told"], data.method.get("witness")
    keep = spread_evenly(len(told), 6)
    maps = [told[k, k] if witness is None else witness[k] for k in keep]
    judge = "the center itself" if witness is None else "a model trained anew"
    side, gap = 2.0, 0.5
    rest = (len(keep) - 1) * (side + gap) + 0.9
    figure, axes = panel(side, side, (0.6, rest, 0.85, 0.55), theme)
    write_title(figure, f"{data.title}: what pseudo samples are called by {judge}", theme)
    width, height = figure.get_size_inches()
    image = None
    for position, (k, values) in enumerate(zip(keep, maps, strict=True)):
        if position:
            box = ((0.6 + position * (side + gap)) / width, 0.55 / height, side / width, side / height)
            axes = figure.add_axes(box)
            ink_axes(axes, theme)
        image = axes.imshow(values, cmap=theme.shades, vmin=0, vmax=1, gid="told")
        axes.set_title(_cluster_name(k), fontsize=9, color=theme.ink)
        axes.set_xlabel("called", color=theme.ink)
        axes.set_ylabel("" if position else "made for class", color=theme.ink)
        axes.set_xticks(spread_evenly(len(values), 10))
        axes.set_yticks(spread_evenly(len(values), 10))
    assert image is not None
    bar = figure.colorbar(image, cax=figure.add_axes((1 - 0.7 / width, 0.55 / height, 0.12 / width, side / height)))
    ink_axes(bar.ax, theme)
    return figure


# ---- costs ----


def bytes_sent(run: Any, *, dark: bool = False) -> Figure:
    """Bytes sent so far by round, both ways, with the start and repairs."""
    data, theme = _of(run, dark)
    parts = [
        ("down", "to the clients", 0),
        ("up", "from the clients", 1),
        ("start_bytes", "start", 2),
        ("repair_bytes", "repairs", 3),
    ]
    told = [(np.nan_to_num(data.curves[key]) / 1e6, name, place) for key, name, place in parts if data.curves]
    told = [part for part in told if part[0].any()]
    if not told:
        raise DataError(f"{data.name} has sent nothing yet.")
    figure, axes = _frame(f"{data.title}: bytes sent so far", theme)
    _stack(axes, data, told)
    axes.set_ylabel("MB")
    _legend(axes, theme)
    return figure


def seconds(run: Any, *, dark: bool = False) -> Figure:
    """Seconds of each round: clients, server, evaluation."""
    data, theme = _of(run, dark)
    if not len(data.rounds):
        raise DataError(f"{data.name} has no rounds yet.")
    figure, axes = _frame(f"{data.title}: seconds by round", theme)
    parts = [("train", "clients", 0), ("server", "server", 1), ("evaluate", "evaluation", 2)]
    _stack(axes, data, [(np.nan_to_num(data.curves[f"{key}_seconds"]), name, place) for key, name, place in parts])
    axes.set_ylabel("seconds")
    _legend(axes, theme)
    return figure


def _stack(axes: Axes, data: RunData, parts: Sequence[tuple[Floats, str, int]]) -> None:
    x: NDArray[Any] = data.rounds
    columns = [values for values, _, _ in parts]
    if len(x) == 1:
        x, columns = np.array([x[0] - 0.5, x[0] + 0.5]), [np.repeat(values, 2) for values in columns]
    axes.stackplot(x, columns, colors=[colour(place) for _, _, place in parts], labels=[name for _, name, _ in parts])
    axes.set_xlim(x[0], x[-1])
    _rounds(axes)


def accuracy_by_bytes(run: Any, *, dark: bool = False) -> Figure:
    """The accuracy reached with so many bytes, both ways and with the start."""
    data, theme = _of(run, dark)
    if not len(data.rounds) or not np.isfinite(data.curves["accuracy"]).any():
        raise DataError(f"{data.name} has no accuracy yet.")
    figure, axes = _frame(f"{data.title}: accuracy against bytes", theme)
    _line(axes, _sent(data), data.curves["accuracy"], colour(0), "accuracy", linewidth=1.8)
    axes.set_xlabel("MB sent")
    axes.set_xlim(left=0)
    _percent(axes)
    return figure


def _sent(data: RunData) -> Floats:
    parts = [np.nan_to_num(data.curves[name]) for name in ("down", "up", "start_bytes", "repair_bytes")]
    total: Floats = np.sum(parts, axis=0) / 1e6
    return total


# ---- several runs ----


def curves(
    runs: Sequence[Any], score: str = "accuracy", *, against: Literal["round", "bytes"] = "round", dark: bool = False
) -> Figure:
    """A score of several runs over each other; runs that differ only in their seed are a mean with a band."""
    if score not in _SCORES:
        raise UnknownName("score of a run", score, _SCORES)
    if against not in ("round", "bytes"):
        raise UnknownName("axis of curves", against, ("round", "bytes"))
    data, theme = [as_run(run) for run in runs], DARK if dark else LIGHT
    if not data:
        raise ConfigError("curves needs at least one run.")
    rows = compare.rows_of(data)
    several = len({row.dataset for row in rows}) > 1
    figure, axes = _frame(f"{_SCORES[score]} of {len(data)} runs", theme, width=6.6, height=3.6, right=1.9)
    drawn = False
    for place, row in enumerate(rows):
        members = [data[i] for i in row.runs if np.isfinite(data[i].curves[score]).any()]
        if not members:
            continue
        drawn = True
        common = set.intersection(*(set(run.rounds[np.isfinite(run.curves[score])].tolist()) for run in members))
        where = [np.isin(run.rounds, sorted(common)) for run in members]
        values = np.stack([run.curves[score][mask] for run, mask in zip(members, where, strict=True)])
        sent = [_sent(run)[mask] for run, mask in zip(members, where, strict=True)]
        x = np.mean(sent, axis=0) if against == "bytes" else np.array(sorted(common), dtype=np.float64)
        name = f"{row.label} on {row.dataset}" if several else row.label
        style: Any = _DASHES[place % len(_DASHES)]  # two that lie over each other are both seen
        _line(axes, x, values.mean(0), colour(place), name[:34], linestyle=style, linewidth=1.6)
        if len(members) > 1:
            mean, spread = values.mean(0), values.std(0, ddof=1)
            axes.fill_between(x, mean - spread, mean + spread, color=colour(place), alpha=0.18, linewidth=0)
    if not drawn:
        raise DataError(f"None of the runs has {_SCORES[score]} yet.")
    if score in _SHARES:
        _percent(axes)
    if against == "bytes":
        axes.set_xlabel("MB sent")
    else:
        _rounds(axes)
    _legend(axes, theme, beside=True)
    return figure


# ---- all of them, as files ----


def _map_by_group(run: Any, *, dark: bool = False) -> Figure:
    return model_map(run, by="group", dark=dark)


def _tsne(run: Any, *, dark: bool = False) -> Figure:
    return model_map(run, method="tsne", dark=dark)


def _tsne_by_group(run: Any, *, dark: bool = False) -> Figure:
    return model_map(run, by="group", method="tsne", dark=dark)


PICTURES: Mapping[str, Callable[..., Any]] = {
    "accuracy": accuracy,
    "f1": f1,
    "loss": loss,
    "cluster-sizes": cluster_sizes,
    "churn": churn,
    "flow": flow,
    "map": model_map,
    "map-by-group": _map_by_group,
    "map-tsne": _tsne,
    "map-tsne-by-group": _tsne_by_group,
    "confusion": confusion,
    "client-accuracy": client_accuracy,
    "labels": held_labels,
    "member-samples": member_samples,
    "pseudo-samples": pseudo_samples,
    "pseudo-confusion": pseudo_confusion,
    "bytes": bytes_sent,
    "accuracy-by-bytes": accuracy_by_bytes,
    "seconds": seconds,
}
"""Every picture of a single run, by the name of its file."""


def picture_names() -> list[str]:
    """The names of all pictures that `save_all` draws."""
    return [*PICTURES, *(f"compare-{score}" for score in _SCORES), "compare-accuracy-by-bytes"]


def save_all(
    runs: Sequence[Any],
    folder: Path,
    *,
    only: Sequence[str] = (),
    dark: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """Draw every picture that there is, or `only` some, into `folder` as PNG and SVG.

    Of several runs, each has a folder of its own, and there are curves over each other beside them.
    """
    for name in only:
        if name not in picture_names():
            raise UnknownName("picture", name, picture_names())
    data = [as_run(run) for run in runs]
    written: list[Path] = []
    names = _folder_names(data)
    wanted = {name: make for name, make in PICTURES.items() if not only or name in only}
    for run, name in zip(data, names, strict=True):
        home = folder if len(data) == 1 else folder / name
        if wanted:
            say(f"drawing the pictures of {run.name}")
        for picture, make in wanted.items():
            with contextlib.suppress(DataError):  # this run has nothing for it
                written += _save(make(run, dark=dark), home / picture)
    if len(data) > 1:
        over: dict[str, Callable[[], Figure]] = {
            f"compare-{score}": functools.partial(curves, data, score, dark=dark) for score in _SCORES
        }
        over["compare-accuracy-by-bytes"] = functools.partial(curves, data, "accuracy", against="bytes", dark=dark)
        for name, draw in over.items():
            if not only or name in only:
                with contextlib.suppress(DataError):
                    written += _save(draw(), folder / name)
    return written


def _folder_names(runs: Sequence[RunData]) -> list[str]:
    """The names of the runs, told apart by a number where they are the same."""
    found: list[str] = []
    for run in runs:
        name, number = run.name, 2
        while name in found:
            name, number = f"{run.name}-{number}", number + 1
        found.append(name)
    return found


def _save(figure: Figure, stem: Path) -> list[Path]:
    from matplotlib import rc_context

    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        # Nothing about the program or the time inside: the same run gives the same bytes.
        figure.savefig(paths[0], format="png", metadata={"Software": None})
        with rc_context({"svg.hashsalt": "coterie"}):
            figure.savefig(paths[1], format="svg", metadata={"Date": None, "Creator": None})
    except OSError as error:
        raise StorageError(f"{stem.parent} cannot be written: {error.strerror}.") from error
    return paths
