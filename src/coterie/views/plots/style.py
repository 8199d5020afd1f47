"""What all pictures share: colours, panels, ticks. Figures are made without pyplot: nothing global is touched.

Colours are Okabe and Ito's, which colour-blind people can tell apart (Wong, "Points of view: Color blindness",
Nature Methods 2011).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coterie.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Yellow and grey come last: they stand out least. The grey is dark enough not to be taken for the pink.
OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#666666")


@dataclass(frozen=True)
class Theme:
    """Colours of what is not data."""

    paper: str
    ink: str
    faint: str
    shades: str  # colour map whose low end is near the paper


LIGHT = Theme(paper="#ffffff", ink="#222222", faint="#d8d8d8", shades="Blues")
DARK = Theme(paper="#17191c", ink="#e4e4e4", faint="#44484d", shades="cividis")


def colour(position: int) -> str:
    """The colour of the group at this position; beyond eight they come again."""
    return OKABE_ITO[position % len(OKABE_ITO)]


def panel(width: float, height: float, margins: tuple[float, float, float, float], theme: Theme) -> tuple[Figure, Axes]:
    """A figure with one panel of exactly this size in inches; margins: left, right, above, below."""
    figure, axes = panels(1, width, height, margins, 0.0, theme)
    return figure, axes[0]


def panels(
    count: int, width: float, height: float, margins: tuple[float, float, float, float], gap: float, theme: Theme
) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side, this many inches apart."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("Drawing a picture", "report") from error
    left, right, above, below = margins
    full_width, full_height = left + count * (width + gap) - gap + right, above + height + below
    figure = Figure(figsize=(full_width, full_height), dpi=150, facecolor=theme.paper)
    found = []
    for position in range(count):
        start = left + position * (width + gap)
        box = (start / full_width, below / full_height, width / full_width, height / full_height)
        found.append(figure.add_axes(box, facecolor=theme.paper))
        ink_axes(found[-1], theme)
    return figure, found


def ink_axes(axes: Axes, theme: Theme) -> None:
    """Ticks, labels and frame in the colours of the theme."""
    axes.tick_params(colors=theme.ink, labelsize=8)
    axes.xaxis.label.set_color(theme.ink)
    axes.yaxis.label.set_color(theme.ink)
    for spine in axes.spines.values():
        spine.set_color(theme.faint)


def ink_legend(legend: Any, theme: Theme) -> None:
    """The texts of a legend in the colour of the theme."""
    legend.get_title().set_color(theme.ink)
    for text in legend.get_texts():
        text.set_color(theme.ink)


def draw_bar(axes: Axes, box: tuple[float, float, float, float], fill: str, transform: Any) -> None:
    """A coloured bar (left, bottom, width, height) that may stand outside the panel."""
    from matplotlib.patches import Rectangle

    left, bottom, width, height = box
    bar = Rectangle((left, bottom), width, height, color=fill, linewidth=0, transform=transform, clip_on=False)
    axes.add_patch(bar)


def write_title(figure: Figure, text: str, theme: Theme) -> None:
    """A title at the upper left."""
    height = figure.get_size_inches()[1]
    figure.text(0.12 / figure.get_size_inches()[0], 1 - 0.12 / height, text, va="top", color=theme.ink, fontsize=10)


def ticks(total: int, most: int) -> list[int]:
    """Round numbers below `total`, at most about `most` of them.

    >>> ticks(10, 30), ticks(62, 12)
    ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 10, 20, 30, 40, 50, 60])
    """
    steps = (m * 10**e for e in range(9) for m in (1, 2, 5))
    step = next(step for step in steps if total <= most * step)
    return list(range(0, total, step))


def round_sizes(largest: int) -> list[int]:
    """Up to three sizes for the legend: the largest round number within the data, and smaller ones.

    >>> round_sizes(137), round_sizes(5), round_sizes(1)
    ([100, 50, 10], [5, 2, 1], [1])
    """
    rounds = [m * 10**e for e in range(12) for m in (1, 2, 5)]
    top = max(size for size in rounds if size <= largest)
    return sorted({top, max(size for size in rounds if size <= max(1, top // 2)), max(1, top // 10)}, reverse=True)
