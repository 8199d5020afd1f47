"""Samples as tiles: what groups and cluster members see, and MD-ICFL's pseudo samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.data.federation import Federation
from coterie.data.pictures import black_and_white, is_picture, spread_evenly
from coterie.errors import DataError
from coterie.views.plots.style import (
    DARK,
    LIGHT,
    Theme,
    cluster_colour,
    cluster_name,
    colour,
    draw_bar,
    of_run,
    panel,
    panels,
    put_colour_bar,
)
from coterie.views.report.payload import mosaic_of, tile_gap
from coterie.views.words import safe_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_ROWS, _MOST_COLUMNS = 12, 20
_MOST_MEMBERS = 200  # clients of a group that its pictures are chosen from


def group_samples(federation: Federation, *, dark: bool = False) -> Figure:
    """What the true groups see: a row per group, a column per class, through the clients' own views.

    Without true groups the rows are clients. Many groups or classes are thinned out evenly; with few classes there are
    several pictures of each.
    """
    if not is_picture(federation.input_shape):
        raise DataError(f"Samples of {federation.name} are {federation.input_shape}: only pictures can be shown.")
    theme, groups, names = DARK if dark else LIGHT, federation.groups, federation.group_names()
    if groups is None:
        rows = [(federation.names[i], [i]) for i in spread_evenly(len(federation), 6)]
        fills, what = [], "what each client sees, by class"
    else:
        some = spread_evenly(len(names), _MOST_ROWS)
        numbers = [sorted(names)[i] for i in some]
        rows = [(names[k], torch.nonzero(groups == k)[:, 0].tolist()) for k in numbers]
        fills, what = [colour(i) for i in some], "what each group sees, by class"
    classes = spread_evenly(max(1, federation.num_classes), _MOST_COLUMNS)
    each = max(1, min(5, 10 // len(classes)))
    tiles = np.stack([_pictures(federation, members, classes, each) for _, members in rows])
    low, high = black_and_white(federation, tiles[~np.isnan(tiles).any(axis=(2, 3, 4))])
    tiles = np.clip((tiles - low) / (high - low), 0, 1)
    if len(classes) < federation.num_classes:
        what += f" ({len(classes)} of {federation.num_classes} classes)"
    figure, axes = _draw_tiles(tiles, [title for title, _ in rows], fills, what, theme)
    wide = federation.input_shape[2] + tile_gap(federation.input_shape[2])
    middle = [wide * each * (column + 0.5) - 0.5 for column in range(len(classes))]
    axes.set_xticks(middle, [str(label) for label in classes] if federation.num_classes else ["any"])
    axes.xaxis.tick_top()
    for column in range(1, len(classes) if each > 1 else 1):
        axes.axvline(wide * each * column - 0.5, color=theme.ink, linewidth=1.0)
    return figure


def _pictures(federation: Federation, members: Sequence[int], classes: Sequence[int], each: int) -> NDArray[np.float64]:
    """Pictures of one row in the units of the data [columns, H, W, 3]; NaN where no member holds the class."""
    channels, high, wide = federation.input_shape
    found: list[list[tuple[int, int, Any]]] = [[] for _ in classes]
    for client in (members[i] for i in spread_evenly(len(members), _MOST_MEMBERS)):
        x, y = federation.samples(client)
        for column, label in enumerate(classes):
            own = torch.nonzero(y == label)[:each, 0] if federation.num_classes else torch.arange(min(each, len(y)))
            found[column] += [(number, client, x[row]) for number, row in enumerate(own.tolist())]
    tiles = np.full((len(classes), each, high, wide, channels), np.nan)
    for column, held in enumerate(found):
        # The first of every client, then the second: pictures of many clients.
        for place, (_, _, x) in enumerate(sorted(held, key=lambda item: item[:2])[:each]):
            tiles[column, place] = np.moveaxis(federation.unscaled(x).double().numpy(), 0, -1)
    return np.broadcast_to(tiles.reshape(-1, high, wide, channels), (len(classes) * each, high, wide, 3))


def member_samples(run: Any, *, dark: bool = False) -> Figure:
    """Samples of some members of each cluster, as they see them (FeSEM's Fig. 5)."""
    data, theme = of_run(run, dark)
    if not data.members:
        raise DataError(f"{data.name} has stored no pictures of cluster members.")
    pictures, client, cluster = (data.members[name] for name in ("picture", "client", "cluster"))
    rows = [(int(k), int(i)) for k in np.unique(cluster) for i in dict.fromkeys(client[cluster == k].tolist())]
    own = [pictures[(client == i) & (cluster == k)] for k, i in rows]
    tiles = np.full((len(rows), max(map(len, own)), *pictures.shape[1:]), np.nan)
    for row, mine in enumerate(own):
        tiles[row, : len(mine)] = mine
    names, clusters = [data.names[i][:18] for _, i in rows], [k for k, _ in rows]
    return _draw_clusters(tiles, names, clusters, f"{data.title}: samples of cluster members", theme)


def pseudo_samples(run: Any, *, dark: bool = False) -> Figure:
    """Pseudo samples of each center by class (MD-ICFL's Fig. 7)."""
    data, theme = of_run(run, dark)
    if "pseudo" not in data.method:
        raise DataError(f"{data.name} has no pseudo samples; only md_icfl on pictures has them.")
    pseudo = data.method["pseudo"]  # [K, L, m, H, W, C]
    keep, classes = spread_evenly(len(pseudo), 8), spread_evenly(pseudo.shape[1], _MOST_COLUMNS)
    tiles = np.concatenate([np.moveaxis(pseudo[k][classes], 1, 0) for k in keep])
    clusters = np.repeat(keep, pseudo.shape[2]).tolist()
    title = f"{data.title}: pseudo samples, one column per class"
    return _draw_clusters(tiles, [""] * len(tiles), clusters, title, theme)


def pseudo_confusion(run: Any, *, dark: bool = False) -> Figure:
    """How pseudo samples of each center are classified (MD-ICFL's Figs. 5 and 6): intended class by predicted class."""
    data, theme = of_run(run, dark)
    if "told" not in data.method:
        raise DataError(f"{data.name} has no pseudo samples; only md_icfl has them.")
    predicted, witness = data.method["told"], data.method.get("witness")
    keep = spread_evenly(len(predicted), 6)
    maps = [predicted[k, k] if witness is None else witness[k] for k in keep]
    judge = "the center itself" if witness is None else "a model trained from scratch"
    title = f"{data.title}: pseudo samples as classified by {judge}"
    return draw_maps(maps, [cluster_name(k) for k in keep], title, theme)


def draw_maps(maps: Sequence[NDArray[Any]], names: Sequence[str], title: str, theme: Theme) -> Figure:
    """Maps [L, L] of mean predictions side by side: intended class by predicted class."""
    figure, found = panels(len(maps), 2.0, 2.0, (0.6, 0.9, 0.85, 0.55), 0.5, theme, title)
    for axes, name, values in zip(found, names, maps, strict=True):
        image = axes.imshow(values, cmap=theme.shades, vmin=0, vmax=1, gid="told")
        axes.set_title(name, fontsize=9)
        places = spread_evenly(len(values), 10)
        axes.set(xlabel="predicted", ylabel="intended class" if axes is found[0] else "", xticks=places, yticks=places)
    put_colour_bar(figure, image, theme, right=0.7, below=0.55, tall=2.0)
    return figure


# ---- tiles ----


def _draw_clusters(
    tiles: NDArray[Any], names: Sequence[str], clusters: Sequence[int], title: str, theme: Theme
) -> Figure:
    """Tiles [rows, columns, H, W, 1 or 3] from 0 to 255; the first row of each cluster has the cluster's name."""
    named = [
        name if row and clusters[row - 1] == k else f"{cluster_name(k)}   {name}".rstrip()
        for row, (k, name) in enumerate(zip(clusters, names, strict=True))
    ]
    tiles = np.broadcast_to(tiles / 255, (*tiles.shape[:-1], 3))
    return _draw_tiles(tiles, named, [cluster_colour(k) for k in clusters], title, theme)[0]


def _draw_tiles(
    tiles: NDArray[np.float64], names: Sequence[str], fills: Sequence[str], title: str, theme: Theme
) -> tuple[Figure, Axes]:
    """Tiles [rows, columns, H, W, 3] from 0 to 1, NaN: an even tint; each row with a name and a coloured strip."""
    from matplotlib.colors import to_rgb

    tiles = np.where(np.isnan(tiles), to_rgb(theme.faint), tiles)
    rows, columns, high, wide = tiles.shape[:4]
    size = float(np.clip(9.0 / columns, 0.4, 0.75))  # inches of a tile
    shown = [name if len(name) <= 32 else f"{name[:31]}…" for name in map(safe_text, names)]
    margins = (0.35 + 0.085 * max(map(len, shown)), 0.2, 0.7, 0.15)
    figure, axes = panel(size * columns, size * rows, margins, theme, title)
    axes.imshow(mosaic_of(tiles, to_rgb(theme.paper)), gid="pictures", aspect="auto")
    tall = high + tile_gap(wide)
    axes.set_yticks([tall * row + high / 2 - 0.5 for row in range(rows)], shown, parse_math=False)
    axes.set_xticks([])
    axes.tick_params(length=0, pad=3)
    axes.tick_params(axis="y", pad=10 if fills else 3)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for row, fill in enumerate(fills):
        strip = (-0.07 / (size * columns), 1 - (row + 0.96) / rows, 0.045 / (size * columns), 0.92 / rows)
        draw_bar(axes, strip, fill, axes.transAxes)
    return figure, axes
