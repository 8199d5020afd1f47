"""Pictures of the clients of a run: their scores, what they hold, what they see; MD-ICFL's pseudo samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.pictures import spread_evenly
from coterie.errors import DataError
from coterie.views.plots.common import cluster_colour, cluster_name, frame, of_run, put_legend, score_axis
from coterie.views.plots.federation import MOST_BUBBLES, draw_bubbles, draw_heat_map
from coterie.views.plots.style import Theme, draw_bar, ink_axes, panel, panels, write_title
from coterie.views.report.flow import is_alone

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def client_accuracy(run: Any, *, dark: bool = False) -> Figure:
    """The accuracy of every client, sorted within its cluster, with the mean of each cluster."""
    data, theme = of_run(run, dark)
    scores = data.scores.get("accuracy")
    if scores is None or not np.isfinite(scores).any():
        raise DataError(f"{data.name} has no accuracy of its clients yet.")
    clusters = data.clusters
    alone = clusters is None or is_alone(data.sizes)
    lots = np.zeros(len(scores), dtype=np.int64) if alone or clusters is None else clusters
    order = np.lexsort((scores, lots))
    order = order[np.isfinite(scores[order])]
    figure, axes = frame(f"{data.title}: accuracy of each client", theme, width=8.0, right=1.3)
    for number in np.unique(lots[order]).tolist():
        place = np.flatnonzero(lots[order] == number)
        values = scores[order[place]]
        label = "clients" if alone else cluster_name(number)
        axes.scatter(
            place, values, s=18 if len(order) < 200 else 7, color=cluster_colour(number), label=label, linewidths=0
        )
        axes.hlines(
            values.mean(), place[0] - 0.5, place[-1] + 0.5, color=cluster_colour(number), linestyle="--", linewidth=1
        )
    axes.set_xlabel("clients, sorted" + ("" if alone else " within each cluster"))
    axes.set_xticks([])
    score_axis(axes, "accuracy")
    if len(np.unique(lots[order])) <= 14:
        put_legend(axes, theme, beside=True)
    return figure


def held_labels(run: Any, *, dark: bool = False) -> Figure:
    """Who holds which classes: bubbles, or a heat map of more than MOST_BUBBLES clients."""
    data, theme = of_run(run, dark)
    if data.counts is None or not data.counts.shape[1]:
        raise DataError(f"{data.name} does not say which classes its clients hold.")
    groups = data.group_positions()
    places = np.zeros(len(data.counts), dtype=np.int64) if groups is None else groups
    if len(data.counts) > MOST_BUBBLES:
        return draw_heat_map(data.counts, places, data.group_names(), theme)
    return draw_bubbles(data.counts, places, data.group_names(), data.names, theme)


def member_samples(run: Any, *, dark: bool = False) -> Figure:
    """Samples of some members of each cluster, as they see them (FeSEM's Fig. 5)."""
    data, theme = of_run(run, dark)
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
    data, theme = of_run(run, dark)
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
    from coterie.views.report.payload import mosaic_of

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
    width = axes.get_position().width * axes.figure.get_figure(root=True).get_size_inches()[0]
    rows = len(clusters)
    for row, number in enumerate(clusters):
        box = (-0.09 / width, 1 - (row + 0.98) / rows, 0.05 / width, 0.96 / rows)
        draw_bar(axes, box, cluster_colour(number), axes.transAxes)
        if row == 0 or clusters[row - 1] != number:
            size = sum(other == number for other in clusters)
            axes.text(
                -(axes.get_position().x0 / axes.get_position().width) * 0.97,
                1 - (row + size / 2) / rows,
                cluster_name(number),
                transform=axes.transAxes,
                va="center",
                fontsize=8,
                color=theme.ink,
            )


def pseudo_confusion(run: Any, *, dark: bool = False) -> Figure:
    """What pseudo samples of each center are called (MD-ICFL's Figs. 5 and 6): made for (row), called (column)."""
    data, theme = of_run(run, dark)
    if "told" not in data.method:
        raise DataError(f"{data.name} has no pseudo samples; md_icfl has.")
    told, witness = data.method["told"], data.method.get("witness")
    keep = spread_evenly(len(told), 6)
    maps = [told[k, k] if witness is None else witness[k] for k in keep]
    judge = "the center itself" if witness is None else "a model trained anew"
    figure, found = panels(len(keep), 2.0, 2.0, (0.6, 0.9, 0.85, 0.55), 0.5, theme)
    write_title(figure, f"{data.title}: what pseudo samples are called by {judge}", theme)
    image = None
    for axes, k, values in zip(found, keep, maps, strict=True):
        image = axes.imshow(values, cmap=theme.shades, vmin=0, vmax=1, gid="told")
        axes.set_title(cluster_name(k), fontsize=9, color=theme.ink)
        axes.set_xlabel("called", color=theme.ink)
        axes.set_ylabel("made for class" if axes is found[0] else "", color=theme.ink)
        axes.set_xticks(spread_evenly(len(values), 10))
        axes.set_yticks(spread_evenly(len(values), 10))
    assert image is not None
    width, height = figure.get_size_inches()
    bar = figure.colorbar(image, cax=figure.add_axes((1 - 0.7 / width, 0.55 / height, 0.12 / width, 2.0 / height)))
    ink_axes(bar.ax, theme)
    return figure
