"""Curves of several runs, curves over K, and every plot as a file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from coterie.data.pictures import spread_evenly
from coterie.errors import ConfigError, DataError, StorageError, UnknownName
from coterie.runs.metrics import metrics
from coterie.runs.reading import as_run
from coterie.settings import counted
from coterie.views.plots import labels, run, samples
from coterie.views.plots.style import DARK, LIGHT, colour, draw_line, frame, panels, put_legend, round_axis, score_axis
from coterie.views.report import compare

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from coterie.runs.choose_k import Choice

_DASHES = ("-", (0, (6, 2)), (0, (2.5, 1.5)), (0, (7, 1.5, 1.5, 1.5)), "-.")


def scores() -> dict[str, str]:
    """The metrics that can be drawn by round, and their labels."""
    return {metric.key: metric.label for metric in metrics("curves")}


def curves(
    runs: Sequence[Any], score: str = "accuracy", *, against: Literal["round", "bytes"] = "round", dark: bool = False
) -> Figure:
    """A score of several runs; runs that differ only in their seed are drawn as a mean with a band."""
    if score not in scores():
        raise UnknownName("score of a run", score, scores())
    if against not in ("round", "bytes"):
        raise UnknownName("axis of curves", against, ("round", "bytes"))
    data, theme = [as_run(one) for one in runs], DARK if dark else LIGHT
    if not data:
        raise ConfigError("curves needs at least one run.")
    rows = compare.rows_of(data)
    several = len({row.dataset for row in rows}) > 1
    figure, axes = frame(f"{scores()[score]} of {len(data)} runs", theme, width=6.6, height=3.6, right=1.9)
    for place, row in enumerate(rows):
        members = [data[i] for i in row.runs if np.isfinite(data[i].curves[score]).any()]
        if not members:
            continue
        common = sorted(set.intersection(*(set(one.rounds[np.isfinite(one.curves[score])]) for one in members)))
        where = [np.isin(one.rounds, common) for one in members]
        values = np.stack([one.curves[score][mask] for one, mask in zip(members, where, strict=True)])
        sent = [compare.megabytes_sent(one)[mask] for one, mask in zip(members, where, strict=True)]
        x = np.mean(sent, axis=0) if against == "bytes" else np.array(common, dtype=np.float64)
        name = f"{row.label} on {row.dataset}" if several else row.label
        style: Any = _DASHES[place % len(_DASHES)]  # of two lines that coincide, both are visible
        mean = values.mean(0)
        draw_line(axes, x, mean, colour(place), name[:34], style=style, width=1.6)
        if len(members) > 1:
            spread = values.std(0, ddof=1)
            axes.fill_between(x, mean - spread, mean + spread, color=colour(place), alpha=0.18, linewidth=0)
    if not axes.lines:
        raise DataError(f"None of the runs has {scores()[score]} yet.")
    score_axis(axes, score)
    if against == "bytes":
        axes.set_xlabel("MB sent")
    else:
        round_axis(axes)
    put_legend(axes, theme, beside=True)
    return figure


def k_curves(choice: Choice, *, dark: bool = False) -> Figure:
    """What `choose-k` measured for each K: the curve that decides, then the others; the recommended K is marked."""
    theme, rows = DARK if dark else LIGHT, choice.rows
    has_accuracy = any(row.accuracy is not None for row in rows)
    measured: dict[str, Sequence[float | None]] = {
        "held-out accuracy" if has_accuracy else "held-out loss": [
            row.accuracy if has_accuracy else row.loss for row in rows
        ],
        "intra-cluster distance": [row.intra_distance for row in rows],
        "silhouette": [row.silhouette for row in rows],
        "gap statistic": [row.gap for row in rows],
    }
    errors = {
        "held-out accuracy": [row.accuracy_error or 0.0 for row in rows],
        "gap statistic": [row.gap_error or 0.0 for row in rows],
    }
    how = f"{choice.clients:,} clients, {counted(choice.rounds, 'round')} each"
    title = f"number of clusters: K = {choice.recommended} is recommended ({how})"
    figure, found = panels(len(measured), 2.3, 1.9, (0.6, 0.25, 0.85, 0.55), 0.85, theme, title)
    numbers = [row.clusters for row in rows]
    for axes, (name, values) in zip(found, measured.items(), strict=True):
        axes.axvline(choice.recommended, color=colour(3), linewidth=1.0, linestyle="--", gid="recommended")
        axes.errorbar(
            numbers,
            [np.nan if value is None else value for value in values],
            yerr=errors.get(name),
            color=colour(0),
            marker="o",
            markersize=4,
            linewidth=1.4,
            capsize=2,
        )
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("K")
        axes.set_xticks([numbers[i] for i in spread_evenly(len(numbers), 10)])
        axes.set_xlim(numbers[0] - 0.5, numbers[-1] + 0.5)
        axes.grid(color=theme.faint, linewidth=0.4)
        axes.set_axisbelow(True)
    return figure


# ---- all of them, as files ----


_MAP = run.model_map
PICTURES: Mapping[str, Callable[..., Any]] = {
    "accuracy": run.accuracy,
    "f1": run.f1,
    "loss": run.loss,
    "cluster-sizes": run.cluster_sizes,
    "churn": run.churn,
    "flow": run.flow,
    "map": _MAP,
    "map-by-group": functools.partial(_MAP, by="group"),
    "map-tsne": functools.partial(_MAP, method="tsne"),
    "map-tsne-by-group": functools.partial(_MAP, by="group", method="tsne"),
    "confusion": run.confusion,
    "client-accuracy": run.client_accuracy,
    "labels": labels.held_labels,
    "member-samples": samples.member_samples,
    "pseudo-samples": samples.pseudo_samples,
    "pseudo-confusion": samples.pseudo_confusion,
    "bytes": run.bytes_sent,
    "accuracy-by-bytes": run.accuracy_by_bytes,
    "seconds": run.seconds,
}
"""Every plot of a single run, by the name of its file."""
_FUNCTIONS = {draw.__name__: name for name, draw in PICTURES.items() if not isinstance(draw, functools.partial)}


def picture_names() -> list[str]:
    """The names of all plots that `save_all` can draw."""
    return [*PICTURES, *(f"compare-{score}" for score in scores()), "compare-accuracy-by-bytes"]


def save_all(
    runs: Sequence[Any],
    folder: Path,
    *,
    only: Sequence[str] = (),
    dark: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """Draw every plot that the runs have data for, or `only` some, into `folder` as PNG and SVG.

    `only` are names of files or of functions. Each of several runs has its own folder, beside the curves of all of
    them.
    """
    only = [_FUNCTIONS.get(name, name) for name in only]
    for name in only:
        if name not in picture_names():
            raise UnknownName("picture", name, picture_names())
    data = [as_run(one) for one in runs]
    jobs: list[tuple[Path, Callable[[], Figure]]] = []
    homes: set[Path] = set()
    for one in data:
        home, number = folder / (one.name if len(data) > 1 else ""), 2
        while home in homes:  # runs of the same name in different folders
            home, number = folder / f"{one.name}-{number}", number + 1
        homes.add(home)
        jobs += [(home / name, functools.partial(draw, one, dark=dark)) for name, draw in PICTURES.items()]
    if len(data) > 1:
        jobs += [(folder / f"compare-{score}", functools.partial(curves, data, score, dark=dark)) for score in scores()]
        by_bytes = functools.partial(curves, data, "accuracy", against="bytes", dark=dark)
        jobs.append((folder / "compare-accuracy-by-bytes", by_bytes))
    jobs = [(stem, draw) for stem, draw in jobs if not only or stem.name in only]
    say(f"drawing {counted(len(jobs), 'plot')}")
    written: list[Path] = []
    missing: list[str] = []
    for stem, draw in jobs:
        try:
            figure = draw()
        except DataError:
            missing.append(stem.relative_to(folder).as_posix())
            continue
        written += save(figure, stem)
    if missing:
        say(f"not drawn, as the data is not there: {', '.join(missing)}")
    return written


_NO_METADATA: Mapping[str, Mapping[str, None]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}


def save(figure: Figure, stem: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write a figure as files of these kinds, without program or time: the same run gives the same bytes."""
    from matplotlib import rc_context

    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        with rc_context({"svg.hashsalt": "coterie"}):
            for path, kind in zip(paths, kinds, strict=True):
                figure.savefig(path, format=kind, metadata=_NO_METADATA[kind])
    except OSError as error:
        raise StorageError(f"{stem.parent} cannot be written: {error.strerror}.") from error
    return paths
