"""Pictures of a federation, before anything is trained, and of the choice of K."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.federation import Federation, Split
from coterie.data.pictures import black_and_white, is_picture, picture, spread_evenly
from coterie.data.transforms import View
from coterie.errors import DataError
from coterie.views.plots.style import (
    DARK,
    LIGHT,
    Theme,
    colour,
    draw_bar,
    ink_axes,
    ink_legend,
    panel,
    panels,
    round_sizes,
    ticks,
    write_title,
)
from coterie.views.report.payload import by_main_class, narrowed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from coterie.runs.choose_k import Choice

Counts = NDArray[np.int64]

MOST_BUBBLES = 120  # clients; more are drawn as a heat map
_MOST_ROWS, _MOST_COLUMNS = 12, 20  # of sample pictures
_MOST_MEMBERS = 200  # clients of a group that its pictures are chosen from
_MOST_NAMES = 40  # clients that are named on an axis
_MOST_SLICES = 1500  # columns of a heat map: as many as it has pixels
_FILL = 0.94  # of a cell: the diameter of the largest bubble


# ---- what is counted ----


def classes_that_hold(counts: Counts, percent: int = 80) -> NDArray[np.int64]:
    """For each client, the fewest classes that hold this percentage of its samples: int64 [N].

    >>> classes_that_hold(np.array([[8, 1, 1], [4, 3, 3], [0, 5, 0], [0, 0, 0]])).tolist()
    [1, 3, 1, 0]
    """
    held = np.sort(counts, axis=1)[:, ::-1].cumsum(axis=1)  # largest classes first
    wanted = percent * counts.sum(axis=1, keepdims=True)
    fewest: NDArray[np.int64] = (100 * held < wanted).sum(axis=1) + 1
    return np.where(wanted[:, 0] > 0, fewest, 0)


def _rows_of(split: Split, shards: NDArray[np.int64]) -> tuple[Tensor, NDArray[np.int64]]:
    """The rows of these shards one after the other [r], and the position of the shard each is of [r]."""
    offsets = split.offsets.numpy()
    starts, sizes = offsets[shards], offsets[shards + 1] - offsets[shards]
    owner = np.repeat(np.arange(len(shards)), sizes)
    within = np.arange(len(owner)) - np.repeat(sizes.cumsum() - sizes, sizes)
    return split.index[torch.from_numpy(starts[owner] + within)], owner


def _seen_labels(view: View, y: Tensor) -> Tensor:
    for transform in view:
        y = transform.labels(y)
    return y


# ---- labels by client ----


def label_bubbles(federation: Federation, *, dark: bool = False) -> Figure:
    """Who holds what: a bubble for each class of each client, its area the number of samples.

    Clients stand side by side by true group, in the group's colour (Fig. 3 of FedDSMIC). More than
    MOST_BUBBLES clients are drawn as a heat map of the share that each class has at a client.
    """
    if not federation.num_classes:
        raise DataError(f"{federation.name} has no classes, only targets: there are no labels to draw.")
    counts, names = federation.label_counts("train", "valid").numpy(), federation.group_names()
    member = np.zeros(len(counts), dtype=np.int64) if federation.groups is None else federation.groups.numpy()
    groups = np.searchsorted(sorted(names) or [0], member)  # [N] positions in `titles`
    titles = [names[group] for group in sorted(names)]
    theme = DARK if dark else LIGHT
    if len(counts) > MOST_BUBBLES:
        return draw_heat_map(counts, groups, titles, theme)
    return draw_bubbles(counts, groups, titles, federation.names, theme)


def draw_bubbles(
    counts: Counts, groups: NDArray[np.int64], titles: Sequence[str], names: Sequence[str], theme: Theme
) -> Figure:
    """A bubble for each class [L] of each client [N]; groups are positions in `titles`."""
    order = np.argsort(groups, kind="stable")
    counts, groups = counts[order], groups[order]
    clients, classes = counts.shape
    wide = float(np.clip(9.0 / clients, 0.1, 0.6))  # inches of a cell
    high = float(np.clip(6.0 / classes, 0.11, 0.34))
    room = max(wide * clients, 3.6)
    named = clients <= _MOST_NAMES
    below = 0.25 + 0.07 * min(14, max(len(name) for name in names)) if named else 0.6
    figure, axes = panel(room, max(high * classes, 1.2), (0.7, 1.1, _above(titles), below), theme)

    client, label = np.nonzero(counts)
    largest = max(1, int(counts.max()))
    roomy = _roomy(np.sqrt(counts / largest))
    full = _FILL * 72 * min(roomy * wide, high)  # points: diameter of the largest bubble
    axes.scatter(
        client,
        label,
        s=full**2 * counts[client, label] / largest,  # s is the diameter squared, so the area goes with the count
        c=[colour(group) for group in groups[client]],
        linewidths=0,
        alpha=0.85 if roomy > 1 else 1.0,
        zorder=2,
        gid="bubbles",
    )
    axes.set(xlim=(-0.5, clients - 0.5), ylim=(-0.5, classes - 0.5), ylabel="class")
    axes.set_yticks(ticks(classes, 30 if high > 0.15 else 12))
    if named:
        short = [name if len(name) <= 14 else f"{name[:6]}…{name[-7:]}" for name in (names[i] for i in order)]
        axes.set_xticks(range(clients), short, rotation=90, fontsize=7, parse_math=False)
    else:
        axes.set_xticks(ticks(clients, 20))
        axes.set_xlabel("client" + (", by group" if titles else ""), color=theme.ink)
    axes.grid(color=theme.faint, linewidth=0.4, zorder=0)
    axes.set_axisbelow(True)
    _mark_groups(axes, groups, titles, room, theme)
    for size in round_sizes(largest):
        axes.scatter([], [], s=full**2 * size / largest, c=theme.ink, linewidths=0, label=f"{size:,}")
    legend = axes.legend(
        title="samples",
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
        fontsize=8,
        title_fontsize=8,
        labelspacing=max(0.5, full / 8 - 0.6),  # in heights of a letter, 8 points: bubbles must not touch
        borderpad=0.2,
    )
    ink_legend(legend, theme)
    what = f"{clients:,} clients, {int(counts.sum()):,} samples: who holds which classes"
    write_title(figure, what, theme)
    return figure


def _roomy(diameters: NDArray[np.float64]) -> float:
    """How many cells wide the largest bubble may be: as wide as leaves nearly all neighbours [N, L] apart.

    A few clients with far more samples than the others would make dots of these. Diameters are
    relative to the largest.

    >>> _roomy(np.ones((9, 3))), _roomy(np.full((9, 3), 0.5)), _roomy(np.ones((1, 3)))
    (1.0, 2.0, 1.0)
    """
    between = (diameters[1:] + diameters[:-1]) / 2
    if not between.any():
        return 1.0
    return float(np.clip(1 / np.quantile(between[between > 0], 0.97), 1.0, 2.2))


def draw_heat_map(counts: Counts, groups: NDArray[np.int64], titles: Sequence[str], theme: Theme) -> Figure:
    """The share of each class at each client, narrowed to as many columns as there are pixels."""
    order, shares = by_main_class(counts, groups)
    groups = groups[order]
    clients, classes = shares.shape
    room, tall = 10.0, float(np.clip(0.3 * classes, 2.4, 7.0))
    figure, axes = panel(room, tall, (0.7, 1.25, _above(titles), 0.6), theme)
    # A few clients with a single class would leave all others pale.
    top = max(float(np.quantile(shares[shares > 0], 0.98)) if shares.any() else 1.0, 1.0 / classes)
    image = axes.imshow(
        narrowed(shares, _MOST_SLICES)[1].T,
        extent=(-0.5, clients - 0.5, -0.5, classes - 0.5),
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        cmap=theme.shades,
        vmin=0.0,
        vmax=top,
        gid="shares",
    )
    axes.set(xlim=(-0.5, clients - 0.5), ylim=(-0.5, classes - 0.5), ylabel="class")
    axes.set_xlabel("client, by group, then by most frequent class" if titles else "client, by most frequent class")
    axes.set_yticks(ticks(classes, 20))
    axes.set_xticks(ticks(clients, 10))
    _mark_groups(axes, groups, titles, room, theme)
    width, height = figure.get_size_inches()
    beside = figure.add_axes((1 - 1.05 / width, 0.6 / height, 0.14 / width, tall / height))
    bar = figure.colorbar(image, cax=beside, extend="max" if float(shares.max()) > top else "neither")
    bar.ax.set_title("share", fontsize=8, color=theme.ink)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    ink_axes(bar.ax, theme)
    write_title(
        figure, f"{clients:,} clients, {int(counts.sum()):,} samples: share of each class at each client", theme
    )
    return figure


def _above(titles: Sequence[str]) -> float:
    """Inches above the panel: the title, and the names of the groups where there are any."""
    return 0.8 if titles else 0.5


def _mark_groups(axes: Axes, groups: NDArray[np.int64], titles: Sequence[str], room: float, theme: Theme) -> None:
    """A coloured band and the name above each group, and a line between groups."""
    if not titles:
        return
    edges = np.searchsorted(groups, np.arange(len(titles) + 1))
    upper = axes.get_ylim()[1]
    inch = room / len(groups)  # inches of one client
    flat = all(0.085 * len(title) < inch * size for title, size in zip(titles, np.diff(edges), strict=True))
    steep = not flat and min(np.diff(edges)) * inch > 0.14
    reach = axes.get_position().height * axes.figure.get_figure(root=True).get_size_inches()[1]
    for position, title in enumerate(titles):
        start, stop = int(edges[position]), int(edges[position + 1])
        if position:
            axes.axvline(start - 0.5, color=theme.ink, linewidth=0.8, gid="separator")
        box = (start - 0.5, 1 + 0.04 / reach, stop - start, 0.09 / reach)
        draw_bar(axes, box, colour(position), axes.get_xaxis_transform())  # x in clients, y in heights of the panel
        if flat or steep:
            axes.annotate(
                title if len(title) <= 24 else f"{title[:23]}…",
                ((start + stop - 1) / 2, upper),
                xytext=(0, 12),
                textcoords="offset points",
                ha="center",
                va="bottom",
                rotation=0 if flat else 90,
                fontsize=8 if flat else 6,
                color=theme.ink,
                parse_math=False,
                annotation_clip=False,
            )


# ---- sample pictures ----


def group_samples(federation: Federation, *, dark: bool = False) -> Figure:
    """What the groups see: a row a group, a column a class, pictures through the clients' own views.

    Without true groups the rows are some of the clients. Of many groups or classes some are shown,
    spread evenly; with few classes there are several pictures of each.
    """
    if not is_picture(federation.input_shape):
        raise DataError(f"Samples of {federation.name} are {federation.input_shape}: only pictures can be shown.")
    theme = DARK if dark else LIGHT
    rows = _picture_rows(federation)
    classes = spread_evenly(max(1, federation.num_classes), _MOST_COLUMNS)
    each = max(1, min(5, 10 // len(classes)))
    tiles: dict[tuple[int, int], NDArray[np.float64]] = {}  # (row, column) -> [H, W, 3]
    for row, (_, members) in enumerate(rows):
        for column, tile in _row_of_pictures(federation, members, classes, each).items():
            tiles[row, column] = tile
    low, high = black_and_white(federation, tiles.values())
    tiles = {cell: np.clip((tile - low) / (high - low), 0, 1) for cell, tile in tiles.items()}

    size = float(np.clip(9.0 / (each * len(classes)), 0.45, 0.75))  # inches of a picture
    left = 0.35 + 0.085 * min(24, max(len(title) for title, _ in rows))
    columns = each * len(classes)
    figure, axes = panel(size * columns, size * len(rows), (left, 0.2, 0.7, 0.15), theme)
    axes.imshow(_mosaic(tiles, len(rows), columns, federation.input_shape, theme), gid="pictures")
    high_px, wide_px = (extent + _gap(extent) for extent in federation.input_shape[1:])
    axes.set_yticks(
        [high_px * (row + 0.5) - 0.5 for row in range(len(rows))],
        [title if len(title) <= 24 else f"{title[:23]}…" for title, _ in rows],
        parse_math=False,
    )
    middle = [wide_px * each * (column + 0.5) - 0.5 for column in range(len(classes))]
    axes.set_xticks(middle, [str(label) for label in classes] if federation.num_classes else ["any"])
    axes.xaxis.tick_top()
    axes.tick_params(length=0, colors=theme.ink, pad=3)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if each > 1:
        for column in range(1, len(classes)):
            axes.axvline(wide_px * each * column - 0.5, color=theme.ink, linewidth=1.0)
    if federation.groups is not None:
        for row, title in enumerate(axes.get_yticklabels()):
            title.set_fontweight("bold")
            bottom = 1 - (row + 0.96) / len(rows)
            strip = (-0.07 / (size * columns), bottom, 0.045 / (size * columns), 0.92 / len(rows))
            draw_bar(axes, strip, colour(_group_position(federation, rows[row][1])), axes.transAxes)
        axes.tick_params(axis="y", pad=10)
    shown = "" if len(classes) >= federation.num_classes else f" ({len(classes)} of {federation.num_classes} classes)"
    who = "group" if federation.groups is not None else "client"
    write_title(figure, f"what each {who} sees, by class{shown}", theme)
    return figure


def _picture_rows(federation: Federation) -> list[tuple[str, NDArray[np.int64]]]:
    """What each row is called, and the clients its pictures come from."""
    if federation.groups is None:
        return [(federation.names[i], np.array([i])) for i in spread_evenly(len(federation), 6)]
    names, groups = federation.group_names(), federation.groups.numpy()
    some = [sorted(names)[i] for i in spread_evenly(len(names), _MOST_ROWS)]
    return [(names[group], np.flatnonzero(groups == group)) for group in some]


def _group_position(federation: Federation, members: NDArray[np.int64]) -> int:
    assert federation.groups is not None
    return int(np.searchsorted(np.unique(federation.groups.numpy()), int(federation.groups[int(members[0])])))


def _row_of_pictures(
    federation: Federation, members: NDArray[np.int64], classes: Sequence[int], each: int
) -> dict[int, NDArray[np.float64]]:
    """Pictures of one row by column; classes that nobody there holds are left out."""
    members = members[spread_evenly(len(members), _MOST_MEMBERS)]
    split, views = federation.train, federation.view_of(torch.from_numpy(members)).numpy()
    rows, owner = _rows_of(split, split.shard.numpy()[members])
    labels = np.zeros(len(rows), dtype=np.int64)
    if federation.num_classes:
        for view in np.unique(views).tolist():
            own = views[owner] == view
            labels[own] = _seen_labels(federation.views[view], federation.y[rows[torch.from_numpy(own)]]).numpy()
    within = np.arange(len(owner)) - np.searchsorted(owner, owner)
    order = np.lexsort((owner, within))  # the first of every client, then the second: pictures of many hands
    found = {}
    for column, label in enumerate(classes):
        picked = order[labels[order] == label][:each]
        for number, position in enumerate(picked.tolist()):
            client = int(members[owner[position]])
            found[column * each + number] = picture(federation, client, rows[position : position + 1])
    return found


def _mosaic(
    tiles: dict[tuple[int, int], NDArray[np.float64]], rows: int, columns: int, shape: Sequence[int], theme: Theme
) -> NDArray[np.float64]:
    """All pictures in one, with gaps: [h, w, 3]. One image is drawn many times faster than hundreds."""
    from matplotlib.colors import to_rgb

    high, wide = shape[1], shape[2]
    gap_y, gap_x = _gap(high), _gap(wide)
    canvas = np.empty((rows * (high + gap_y), columns * (wide + gap_x), 3))
    canvas[:] = to_rgb(theme.paper)
    for row in range(rows):
        for column in range(columns):
            top, left = row * (high + gap_y) + gap_y // 2, column * (wide + gap_x) + gap_x // 2
            # Nobody in this group holds the class: an even tint.
            tile = tiles.get((row, column), np.broadcast_to(to_rgb(theme.faint), (high, wide, 3)))
            canvas[top : top + high, left : left + wide] = tile
    return canvas


def _gap(extent: int) -> int:
    return max(1, round(extent / 12))


# ---- choice of K ----


def k_curves(choice: Choice, *, dark: bool = False) -> Figure:
    """What each number of clusters gave: four curves over K, with the recommended K marked."""
    theme = DARK if dark else LIGHT
    rows = choice.rows
    curves: list[tuple[str, list[float | None], list[float | None] | None]] = [
        ("intra-cluster distance", [row.intra_distance for row in rows], None),
        ("silhouette", [row.silhouette for row in rows], None),
        ("gap statistic", [row.gap for row in rows], [row.gap_error for row in rows]),
    ]
    if any(row.valid_accuracy is not None for row in rows):
        curves.append(("validation accuracy", [row.valid_accuracy for row in rows], None))
    else:
        curves.append(("validation loss", [row.valid_loss for row in rows], None))
    figure, found = panels(len(curves), 2.3, 1.9, (0.6, 0.25, 0.85, 0.55), 0.85, theme)
    numbers = [row.clusters for row in rows]
    for axes, (title, values, errors) in zip(found, curves, strict=True):
        axes.axvline(choice.recommended, color=colour(3), linewidth=1.0, linestyle="--", gid="recommended")
        axes.errorbar(
            numbers,
            [np.nan if value is None else value for value in values],
            yerr=None if errors is None else [error or 0.0 for error in errors],
            color=colour(0),
            marker="o",
            markersize=4,
            linewidth=1.4,
            capsize=2,
        )
        axes.set_title(title, fontsize=9, color=theme.ink)
        axes.set_xlabel("K", color=theme.ink)
        axes.set_xticks([numbers[i] for i in spread_evenly(len(numbers), 10)])
        axes.set_xlim(numbers[0] - 0.5, numbers[-1] + 0.5)
        axes.grid(color=theme.faint, linewidth=0.4)
        axes.set_axisbelow(True)
    how = f"{choice.clients:,} clients, {choice.rounds} round(s) each"
    write_title(figure, f"number of clusters: K = {choice.recommended} is recommended ({how})", theme)
    return figure
