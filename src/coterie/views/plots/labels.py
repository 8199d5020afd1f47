"""Classes by client: of a federation before training, or of a run (Fig. 3 of FedDSMIC)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from coterie.data.federation import Federation
from coterie.errors import DataError
from coterie.views.plots.style import (
    DARK,
    LIGHT,
    Theme,
    colour,
    draw_bar,
    of_run,
    panel,
    put_colour_bar,
    put_legend,
    ticks,
)
from coterie.views.report.payload import MOST_BUBBLES, by_main_class, narrowed
from coterie.views.words import safe_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Ints = NDArray[np.int64]

_MOST_NAMES = 40  # clients named on an axis
_MOST_SLICES = 1500  # columns of a heat map: one per pixel
_FILL = 0.94  # diameter of the largest bubble, as a share of its cell


def label_bubbles(federation: Federation, *, dark: bool = False) -> Figure:
    """Samples of each class at each client, by true group: bubbles, or a heat map of more than MOST_BUBBLES clients."""
    if not federation.num_classes:
        raise DataError(f"{federation.name} has no classes, only targets: there are no labels to draw.")
    groups = None if federation.groups is None else np.unique(federation.groups.numpy(), return_inverse=True)[1]
    names, counts = federation.group_names(), federation.label_counts("train", "valid").numpy()
    titles, theme = [names[k] for k in sorted(names)], DARK if dark else LIGHT
    return _draw(counts, groups, titles, federation.names, federation.class_names, theme)


def held_labels(run: Any, *, dark: bool = False) -> Figure:
    """The same for a run: the training samples of its clients."""
    data, theme = of_run(run, dark)
    if data.counts is None or not data.counts.shape[1]:
        raise DataError(f"{data.name} has not recorded the classes of its clients.")
    return _draw(data.counts, data.group_positions(), data.group_names(), data.names, data.class_names, theme)


def classes_that_hold(counts: Ints, percent: int = 80) -> Ints:
    """For each client, the fewest classes that hold this percentage of its samples: [N].

    >>> classes_that_hold(np.array([[8, 1, 1], [4, 3, 3], [0, 5, 0], [0, 0, 0]])).tolist()
    [1, 3, 1, 0]
    """
    held = np.sort(counts, axis=1)[:, ::-1].cumsum(axis=1)  # largest classes first
    wanted = percent * counts.sum(axis=1, keepdims=True)
    fewest: Ints = (100 * held < wanted).sum(axis=1) + 1
    return np.where(wanted[:, 0] > 0, fewest, 0)


def _draw(
    counts: Ints,
    groups: Ints | None,
    titles: Sequence[str],
    names: Sequence[str],
    classes: Sequence[str],
    theme: Theme,
) -> Figure:
    """Counts [N, L]; groups [N] are positions in `titles`; `classes` [L] are the names of the classes, if any."""
    places = np.zeros(len(counts), dtype=np.int64) if groups is None else groups
    above = 0.8 if titles else 0.5
    if len(counts) > MOST_BUBBLES:
        return _heat_map(counts, places, titles, classes, above, theme)
    return _bubbles(counts, places, titles, names, classes, above, theme)


def _room_of(classes: Sequence[str]) -> float:
    """Inches left of the panel for the names of the classes."""
    return 0.7 + 0.065 * max(0, min(14, max(map(len, classes), default=0)) - 3)


def _class_axis(axes: Axes, classes: Sequence[str], count: int, most: int) -> None:
    """Up to `most` ticks with the names of the classes, or their numbers."""
    places = ticks(count, most)
    axes.set_ylabel("class")
    if not classes:
        axes.set_yticks(places)
        return
    axes.set_yticks(places, [_short(classes[place]) for place in places], fontsize=7, parse_math=False)


def _short(name: str) -> str:
    name = safe_text(name)
    return name if len(name) <= 14 else f"{name[:6]}…{name[-7:]}"


def _bubbles(
    counts: Ints,
    groups: Ints,
    titles: Sequence[str],
    names: Sequence[str],
    classes: Sequence[str],
    above: float,
    theme: Theme,
) -> Figure:
    order = np.argsort(groups, kind="stable")
    counts, groups = counts[order], groups[order]
    clients, tall = counts.shape
    wide, high = float(np.clip(9.0 / clients, 0.1, 0.6)), float(np.clip(6.0 / tall, 0.11, 0.34))  # inches of a cell
    named = clients <= _MOST_NAMES
    below = 0.25 + 0.07 * min(14, max(len(name) for name in names)) if named else 0.6
    title = f"{clients:,} clients, {int(counts.sum()):,} samples: classes held by each client"
    room = max(wide * clients, 3.6)
    figure, axes = panel(room, max(high * tall, 1.2), (_room_of(classes), 1.1, above, below), theme, title)

    client, label = np.nonzero(counts)
    largest = max(1, int(counts.max()))
    cells = _widest_bubble(np.sqrt(counts / largest))
    full = _FILL * 72 * min(cells * wide, high)  # points: diameter of the largest bubble
    axes.scatter(
        client,
        label,
        s=full**2 * counts[client, label] / largest,  # s is the diameter squared: the area is the count
        c=[colour(group) for group in groups[client]],
        linewidths=0,
        alpha=0.85 if cells > 1 else 1.0,
        zorder=2,
        gid="bubbles",
    )
    axes.set(xlim=(-0.5, clients - 0.5), ylim=(-0.5, tall - 0.5))
    _class_axis(axes, classes, tall, 30 if high > 0.15 else 12)
    if named:
        axes.set_xticks(range(clients), [_short(names[i]) for i in order], rotation=90, fontsize=7, parse_math=False)
    else:
        axes.set_xticks(ticks(clients, 20))
        axes.set_xlabel("client" + (", by group" if titles else ""))
    axes.grid(color=theme.faint, linewidth=0.4, zorder=0)
    axes.set_axisbelow(True)
    _mark_groups(axes, groups, titles, room, theme)
    for size in _legend_sizes(largest):
        axes.scatter([], [], s=full**2 * size / largest, c=theme.ink, linewidths=0, label=f"{size:,}")
    spacing = max(0.5, full / 8 - 0.6)  # in heights of a letter, 8 points: bubbles must not touch
    put_legend(axes, theme, beside=True, title="samples", title_fontsize=8, labelspacing=spacing, borderpad=0.2)
    return figure


def _widest_bubble(diameters: NDArray[np.float64]) -> float:
    """How many cells wide the largest bubble may be, so that nearly all neighbours [N, L] stay apart.

    A few clients with far more samples than the others would reduce the others to dots. Diameters are relative to the
    largest.

    >>> _widest_bubble(np.ones((9, 3))), _widest_bubble(np.full((9, 3), 0.5)), _widest_bubble(np.ones((1, 3)))
    (1.0, 2.0, 1.0)
    """
    between = (diameters[1:] + diameters[:-1]) / 2
    return float(np.clip(1 / np.quantile(between[between > 0], 0.97), 1.0, 2.2)) if between.any() else 1.0


def _legend_sizes(largest: int) -> list[int]:
    """Up to three round numbers of samples for the legend.

    >>> _legend_sizes(137), _legend_sizes(49), _legend_sizes(5), _legend_sizes(1)
    ([100, 50, 10], [40, 20, 4], [5, 2, 1], [1])
    """
    rounds = [m * 10**e for e in range(12) for m in (1, 2, 3, 4, 5, 6, 8)]
    top = max(size for size in rounds if size <= largest)
    return sorted({top, max(size for size in rounds if size <= max(1, top // 2)), max(1, top // 10)}, reverse=True)


def _heat_map(
    counts: Ints, groups: Ints, titles: Sequence[str], classes: Sequence[str], above: float, theme: Theme
) -> Figure:
    order, shares = by_main_class(counts, groups)
    clients, count = shares.shape
    room, tall = 10.0, float(np.clip(0.3 * count, 2.4, 7.0))
    title = f"{clients:,} clients, {int(counts.sum()):,} samples: share of each class at each client"
    figure, axes = panel(room, tall, (_room_of(classes), 1.25, above, 0.6), theme, title)
    # A few clients with a single class would make all others pale.
    top = max(float(np.quantile(shares[shares > 0], 0.98)) if shares.any() else 1.0, 1.0 / count)
    image = axes.imshow(
        narrowed(shares, _MOST_SLICES)[1].T,
        extent=(-0.5, clients - 0.5, -0.5, count - 0.5),
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        cmap=theme.shades,
        vmin=0.0,
        vmax=top,
        gid="shares",
    )
    axes.set(xlim=(-0.5, clients - 0.5), ylim=(-0.5, count - 0.5))
    axes.set_xlabel("client, by group, then by most frequent class" if titles else "client, by most frequent class")
    _class_axis(axes, classes, count, 20)
    axes.set_xticks(ticks(clients, 10))
    _mark_groups(axes, groups[order], titles, room, theme)
    bar = put_colour_bar(figure, image, theme, right=1.05, below=0.6, tall=tall, more=float(shares.max()) > top)
    bar.set_title("share", fontsize=8)
    bar.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    return figure


def _mark_groups(axes: Axes, groups: Ints, titles: Sequence[str], room: float, theme: Theme) -> None:
    """A coloured band and the name above each group, and a line between groups."""
    edges = np.searchsorted(groups, np.arange(len(titles) + 1)).tolist()
    inches = np.diff(edges) * room / len(groups)  # width of each group
    flat = all(0.085 * len(title) < width for title, width in zip(titles, inches, strict=True))
    reach = axes.get_position().height * cast("Figure", axes.figure).get_size_inches()[1]
    above = axes.get_xaxis_transform()  # x in clients, y in heights of the panel
    for position, title in enumerate(titles):
        start, stop = edges[position : position + 2]
        if position:
            axes.axvline(start - 0.5, color=theme.ink, linewidth=0.8, gid="separator")
        draw_bar(axes, (start - 0.5, 1 + 0.04 / reach, stop - start, 0.09 / reach), colour(position), above)
        if flat or min(inches) > 0.14:  # upright where the names have no room side by side
            axes.text(
                (start + stop - 1) / 2,
                1 + 0.165 / reach,
                safe_text(title if len(title) <= 24 else f"{title[:23]}…"),
                transform=above,
                ha="center",
                va="bottom",
                rotation=0 if flat else 90,
                fontsize=8 if flat else 6,
                color=theme.ink,
                parse_math=False,
            )
