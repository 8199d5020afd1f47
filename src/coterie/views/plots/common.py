"""What pictures of runs share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import DataError
from coterie.runs.metrics import METRICS, Metric, metrics
from coterie.runs.reading import RunData, as_run
from coterie.views.plots.style import DARK, LIGHT, OKABE_ITO, Theme, colour, ink_legend, panel, write_title
from coterie.views.report.flow import NOT_MET, OTHERS, is_alone

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

MARKERS = "os^D"  # beyond eight groups the colours come again with another shape
_GREY = OKABE_ITO[-1]


def of_run(run: Any, dark: bool) -> tuple[RunData, Theme]:
    """A run however it is named, and the theme."""
    return as_run(run), DARK if dark else LIGHT


def frame(title: str, theme: Theme, width: float = 6.2, height: float = 3.1, right: float = 0.2) -> tuple[Figure, Axes]:
    """A figure with one panel, a grid and a title."""
    figure, axes = panel(width, height, (0.75, right, 0.75, 0.55), theme)
    axes.grid(color=theme.faint, linewidth=0.4)
    axes.set_axisbelow(True)
    write_title(figure, title, theme)
    return figure, axes


def put_legend(axes: Axes, theme: Theme, *, beside: bool = False, columns: int = 4, **more: Any) -> None:
    """A legend above the panel, or beside it."""
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0), "ncol": columns}
    if beside:
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.02)}
    options: dict[str, Any] = {"frameon": False, "fontsize": 8, "columnspacing": 1.2, "handlelength": 1.6}
    ink_legend(axes.legend(**place | options | more), theme)


def scores() -> dict[str, str]:
    """The metrics that can be drawn by round, and their labels."""
    return {metric.key: metric.label for metric in metrics("curves")}


def drawn_in(panel: str) -> list[Metric]:
    """The metrics that are drawn beside the main one of a picture."""
    return [metric for metric in METRICS.values() if metric.panel == panel]


def score_axis(axes: Axes, score: str) -> None:
    """Shares are shown in percent."""
    form = METRICS[score].format
    if form.unit:
        axes.yaxis.set_major_formatter(lambda value, _: f"{form.factor * value:g} {form.unit}")


def round_axis(axes: Axes) -> None:
    """Rounds are whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round")


def cluster_name(number: int) -> str:
    """A cluster in words."""
    return {NOT_MET: "not met", OTHERS: "other clusters"}.get(number, f"cluster {number}")


def cluster_colour(number: int) -> str:
    """The colour of a cluster; grey for those that are none."""
    return _GREY if number < 0 else colour(number)


def refuse_lone(run: RunData) -> None:
    """Where every client is a cluster of its own there is nothing to see."""
    if is_alone(run.sizes):
        raise DataError(f"{run.name}: every client is a cluster of its own; there are no clusters to draw.")


def draw_line(axes: Axes, x: NDArray[Any], y: Floats, fill: str, label: str, **more: Any) -> None:
    """A line through the points that are told; few points are dots, too."""
    told = np.isfinite(y)
    marker = {"marker": "o", "markersize": 3} if told.sum() < 3 else {}
    axes.plot(x[told], y[told], color=fill, label=label, **{"linewidth": 1.4, **marker, **more})


def megabytes_sent(data: RunData) -> Floats:
    """What was sent so far, both ways, with the start and repairs: [T]."""
    parts = [np.nan_to_num(data.curves[name]) for name in ("down", "up", "start_bytes", "repair_bytes")]
    total: Floats = np.sum(parts, axis=0) / 1e6
    return total
