"""Colours, panels, axes and legends that all plots share. Figures are made without pyplot, so no global state changes.

The colours are Okabe and Ito's, which colour-blind readers can distinguish (Wong, "Points of view: Color blindness",
Nature Methods 2011).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import MissingExtra
from coterie.runs.metrics import METRICS
from coterie.runs.reading import RunData, as_run
from coterie.views.report.flow import NOT_SEEN, OTHERS
from coterie.views.words import safe_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Yellow and grey come last: they stand out least. The grey is dark enough not to be mistaken for the pink.
OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#666666")


@dataclass(frozen=True)
class Theme:
    """Colours of everything but the data."""

    paper: str
    ink: str
    faint: str
    shades: str  # colour map whose low end is close to the paper


LIGHT = Theme(paper="#ffffff", ink="#222222", faint="#d8d8d8", shades="Blues")
DARK = Theme(paper="#17191c", ink="#e4e4e4", faint="#44484d", shades="cividis")


def of_run(run: Any, dark: bool) -> tuple[RunData, Theme]:
    """The data of a run (a path or a Result), and the theme."""
    return as_run(run), DARK if dark else LIGHT


# ---- colours and names ----


def colour(position: int) -> str:
    """The colour of a position; they repeat after eight."""
    return OKABE_ITO[position % len(OKABE_ITO)]


def cluster_colour(number: int) -> str:
    """The colour of a cluster; grey for clients without one."""
    return OKABE_ITO[-1] if number < 0 else colour(number)


def cluster_name(number: int) -> str:
    """What a cluster is called."""
    return {NOT_SEEN: "not seen", OTHERS: "other clusters"}.get(number, f"cluster {number}")


# ---- panels ----


def frame(title: str, theme: Theme, width: float = 6.2, height: float = 3.1, right: float = 0.2) -> tuple[Figure, Axes]:
    """A figure with one panel, a grid and a title."""
    figure, axes = panel(width, height, (0.75, right, 0.75, 0.55), theme, title)
    axes.grid(color=theme.faint, linewidth=0.4)
    axes.set_axisbelow(True)
    return figure, axes


def panel(
    width: float, height: float, margins: tuple[float, float, float, float], theme: Theme, title: str
) -> tuple[Figure, Axes]:
    """A figure with one panel of exactly this size in inches; margins: left, right, above, below."""
    figure, axes = panels(1, width, height, margins, 0.0, theme, title)
    return figure, axes[0]


def panels(
    count: int,
    width: float,
    height: float,
    margins: tuple[float, float, float, float],
    gap: float,
    theme: Theme,
    title: str,
) -> tuple[Figure, list[Axes]]:
    """A figure with a title and panels side by side, `gap` inches apart."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("Drawing a picture", "report") from error
    left, right, above, below = margins
    full_width, full_height = left + count * (width + gap) - gap + right, above + height + below
    figure = Figure(figsize=(full_width, full_height), dpi=150, facecolor=theme.paper)
    shown: dict[str, Any] = {"va": "top", "color": theme.ink, "fontsize": 10, "parse_math": False}
    figure.text(0.12 / full_width, 1 - 0.12 / full_height, safe_text(title), **shown)
    found = []
    for start in left + np.arange(count) * (width + gap):
        box = (start / full_width, below / full_height, width / full_width, height / full_height)
        found.append(figure.add_axes(box, facecolor=theme.paper))
        ink_axes(found[-1], theme)
    return figure, found


def ink_axes(axes: Axes, theme: Theme) -> None:
    """Apply the theme to ticks, labels, title and frame."""
    axes.tick_params(colors=theme.ink, labelsize=8)
    for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
        text.set_color(theme.ink)
    for spine in axes.spines.values():
        spine.set_color(theme.faint)


def put_legend(axes: Axes, theme: Theme, *, beside: bool = False, **more: Any) -> None:
    """A legend above the panel, or beside it."""
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0), "ncol": 4}
    if beside:
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.02)}
    options: dict[str, Any] = {"frameon": False, "fontsize": 8, "columnspacing": 1.2, "handlelength": 1.6}
    legend = axes.legend(labelcolor=theme.ink, **place | options | more)
    legend.get_title().set_color(theme.ink)
    for text in legend.get_texts():  # of others: no formulas, no control characters
        text.set(text=safe_text(text.get_text()), parse_math=False)


def put_colour_bar(
    figure: Figure, image: Any, theme: Theme, right: float, below: float, tall: float, more: bool = False
) -> Axes:
    """A colour bar this many inches from the right and the lower edge; `more`: some values are beyond its end."""
    width, height = figure.get_size_inches()
    beside = figure.add_axes((1 - right / width, below / height, 0.13 / width, tall / height))
    figure.colorbar(image, cax=beside, extend="max" if more else "neither")
    ink_axes(beside, theme)
    return beside


def draw_bar(axes: Axes, box: tuple[float, float, float, float], fill: str, transform: Any) -> None:
    """A coloured bar (left, bottom, width, height), also outside the panel."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(box[:2], *box[2:], color=fill, linewidth=0, transform=transform, clip_on=False))


def draw_line(
    axes: Axes, x: NDArray[Any], y: NDArray[np.float64], fill: str, label: str, style: Any = "-", width: float = 1.4
) -> None:
    """A line through the known values; one or two of them are drawn as dots."""
    known = np.isfinite(y)
    marker = "o" if known.sum() < 3 else ""
    axes.plot(
        x[known], y[known], color=fill, label=label, linestyle=style, linewidth=width, marker=marker, markersize=3
    )


# ---- axes ----


def score_axis(axes: Axes, score: str) -> None:
    """Write the values of a score with its unit: shares in percent."""
    form = METRICS[score].format
    if form.unit:
        axes.yaxis.set_major_formatter(lambda value, _: f"{form.factor * value:g} {form.unit}")


def round_axis(axes: Axes) -> None:
    """Rounds are whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round")


def ticks(total: int, most: int) -> list[int]:
    """Round numbers below `total`, at most about `most` of them.

    >>> ticks(10, 30), ticks(62, 12)
    ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 10, 20, 30, 40, 50, 60])
    """
    steps = (m * 10**e for e in range(9) for m in (1, 2, 5))
    return list(range(0, total, next(step for step in steps if total <= most * step)))
