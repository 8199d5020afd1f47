"""Several runs over each other, and every picture as a file."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from coterie.errors import ConfigError, DataError, StorageError, UnknownName
from coterie.runs.reading import RunData, as_run
from coterie.views.plots import clients, run
from coterie.views.plots.common import (
    draw_line,
    frame,
    megabytes_sent,
    put_legend,
    round_axis,
    score_axis,
    scores,
)
from coterie.views.plots.style import DARK, LIGHT, colour
from coterie.views.report import compare

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DASHES = ("-", (0, (6, 2)), (0, (2.5, 1.5)), (0, (7, 1.5, 1.5, 1.5)), "-.")


def curves(
    runs: Sequence[Any], score: str = "accuracy", *, against: Literal["round", "bytes"] = "round", dark: bool = False
) -> Figure:
    """A score of several runs over each other; runs that differ only in their seed are a mean with a band."""
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
    drawn = False
    for place, row in enumerate(rows):
        members = [data[i] for i in row.runs if np.isfinite(data[i].curves[score]).any()]
        if not members:
            continue
        drawn = True
        common = set.intersection(*(set(one.rounds[np.isfinite(one.curves[score])].tolist()) for one in members))
        where = [np.isin(one.rounds, sorted(common)) for one in members]
        values = np.stack([one.curves[score][mask] for one, mask in zip(members, where, strict=True)])
        sent = [megabytes_sent(one)[mask] for one, mask in zip(members, where, strict=True)]
        x = np.mean(sent, axis=0) if against == "bytes" else np.array(sorted(common), dtype=np.float64)
        name = f"{row.label} on {row.dataset}" if several else row.label
        style: Any = _DASHES[place % len(_DASHES)]  # two that lie over each other are both seen
        draw_line(axes, x, values.mean(0), colour(place), name[:34], linestyle=style, linewidth=1.6)
        if len(members) > 1:
            mean, spread = values.mean(0), values.std(0, ddof=1)
            axes.fill_between(x, mean - spread, mean + spread, color=colour(place), alpha=0.18, linewidth=0)
    if not drawn:
        raise DataError(f"None of the runs has {scores()[score]} yet.")
    score_axis(axes, score)
    if against == "bytes":
        axes.set_xlabel("MB sent")
    else:
        round_axis(axes)
    put_legend(axes, theme, beside=True)
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
    "client-accuracy": clients.client_accuracy,
    "labels": clients.held_labels,
    "member-samples": clients.member_samples,
    "pseudo-samples": clients.pseudo_samples,
    "pseudo-confusion": clients.pseudo_confusion,
    "bytes": run.bytes_sent,
    "accuracy-by-bytes": run.accuracy_by_bytes,
    "seconds": run.seconds,
}
"""Every picture of a single run, by the name of its file."""


def picture_names() -> list[str]:
    """The names of all pictures that `save_all` draws."""
    return [*PICTURES, *(f"compare-{score}" for score in scores()), "compare-accuracy-by-bytes"]


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
    data = [as_run(one) for one in runs]
    written: list[Path] = []
    names = _folder_names(data)
    wanted = {name: make for name, make in PICTURES.items() if not only or name in only}
    for one, name in zip(data, names, strict=True):
        home = folder if len(data) == 1 else folder / name
        if wanted:
            say(f"drawing the pictures of {one.name}")
        for picture, make in wanted.items():
            with contextlib.suppress(DataError):  # this run has nothing for it
                written += _save(make(one, dark=dark), home / picture)
    if len(data) > 1:
        over: dict[str, Callable[[], Figure]] = {
            f"compare-{score}": functools.partial(curves, data, score, dark=dark) for score in scores()
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
    for one in runs:
        name, number = one.name, 2
        while name in found:
            name, number = f"{one.name}-{number}", number + 1
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
