"""Figures of the papers, drawn from the finished runs of a suite.

Every public function has the form that `outcome.draw` calls: the content of result.json, the folder of the runs, the
folder to draw into. It returns the files that it wrote; where no run has what it shows, none. A figure shows the cells
of the result, so with `--rows` or `--columns` it shows fewer.

Colours tell methods apart, and `coterie` is black. Of a method with two rows, the one as published is dashed.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.reproduce.outcome import of_result
from coterie.reproduce.suite import key_of
from coterie.runs.reading import RunData, read_run
from coterie.views import plots
from coterie.views.plots.samples import draw_maps
from coterie.views.plots.several import save
from coterie.views.plots.style import LIGHT, OKABE_ITO, colour, draw_line, panels, put_legend, round_axis, score_axis
from coterie.views.report.compare import megabytes_sent
from coterie.views.report.map import neighbours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor, nn

Result = dict[str, Any]
Cell = Mapping[str, Any]

SCORE = "accuracy_micro"  # both papers weigh clients by their samples
FIG5_ROUNDS = 300
BELOW = (5.0, 2.0, 0.0)  # points below FedAvg's accuracy that `rounds_to_reach` looks for
_PALE = ("local", "fedprox")  # of many methods, they get the colours that stand out least
_MARKERS = "osD"
_DASHES: Any = (0, (4, 1.6))
_FEWEST_SAMPLES, _MOST_SAMPLES = 60, 600  # of a client whose features are shown


# ---- the runs of a result ----


def _read(cell: Cell, runs: Path, *, whole: bool = False) -> list[RunData]:
    """The finished runs of a cell, one for each seed."""
    return [read_run(runs / place, whole=whole) for place in cell["runs"]]


def _names(cells: Iterable[Cell], key: str) -> list[str]:
    """The rows or columns that have a run, in order."""
    return list(dict.fromkeys(cell[key] for cell in cells if cell["runs"]))


def _of(result: Result, method: str, clusters: int) -> list[Cell]:
    """The cells of a method with this number of clusters that have a run."""
    return [
        cell
        for cell in result["cells"]
        if cell["runs"] and cell["method"] == method and cell["settings"].get("algorithm.num_clusters") == clusters
    ]


class Look(NamedTuple):
    """How a row is drawn."""

    colour: str
    dashes: Any


def _variant(cell: Cell) -> str:
    """The row without its start: "MD-ICFL-1, our start" is MD-ICFL-1."""
    label: str = cell["row"].partition(",")[0]
    return label


def _looks(cells: Iterable[Cell], kind: Callable[[Cell], Any] = _variant) -> dict[str, Look]:
    """The look of each row: a colour for each kind of row, dashes for the published one of two."""
    rows = {cell["row"]: cell for cell in cells if cell["runs"]}
    kinds = list(dict.fromkeys(kind(cell) for cell in rows.values() if cell["method"] != "coterie"))
    pale = {kind(cell) for cell in rows.values() if cell["method"] in _PALE}
    kinds.sort(key=lambda one: one in pale)
    ours = {kind(cell) for cell in rows.values() if cell["mode"] == "ours"}
    return {
        row: Look(
            LIGHT.ink if cell["method"] == "coterie" else colour(kinds.index(kind(cell))),
            _DASHES if cell["mode"] == "paper" and kind(cell) in ours else "-",
        )
        for row, cell in rows.items()
    }


def _save(figure: Figure, folder: Path, *words: str) -> list[Path]:
    """Write a PNG of 256 colours, a third of the size: figures of results are kept in the repository."""
    paths = save(figure, folder / "-".join(key_of(word) for word in words), kinds=("png",))
    from PIL import Image  # matplotlib needs it, too

    for path in paths:
        with Image.open(path) as image:
            small = image.convert("RGB").quantize(256, kmeans=1)
        small.save(path, optimize=True)
    return paths


def _titled(figure: Figure, title: str) -> Figure:
    """The same figure under another title."""
    figure.texts[0].set_text(title)
    return figure


def _side_by_side(count: int, title: str, right: float, *, width: float = 3.3, height: float = 2.9) -> Any:
    """A figure with panels that have a grid; `right` inches are left for a legend. A long title has several lines."""
    figure, found = panels(count, width, height, (0.75, right, 0.8, 0.55), 0.65, LIGHT, title)
    _titled(figure, textwrap.fill(title, int(figure.get_size_inches()[0] / 0.08)))
    for axes in found:
        axes.grid(color=LIGHT.faint, linewidth=0.4)
        axes.set_axisbelow(True)
    return figure, found


def _room(names: Iterable[str]) -> float:
    """Inches for a legend with these names."""
    return 0.65 + 0.075 * max(len(name) for name in names)


# ---- scores by round ----


def accuracy_by_round(result: Result, runs: Path, folder: Path) -> list[Path]:
    """Accuracy by round of every row, a panel for each column (FedDSMIC's Figs. 4 and 8)."""
    cells = [cell for cell in result["cells"] if cell["runs"]]
    return _save_curves(cells, runs, folder, _looks(cells), result["title"])


def accuracy_by_clusters(result: Result, runs: Path, folder: Path) -> list[Path]:
    """Accuracy by round of FeSEM for each number of clusters (FeSEM's Fig. 3)."""
    cells = [cell for cell in result["cells"] if cell["runs"] and cell["method"] == "fesem"]
    looks = _looks(cells, lambda cell: cell["settings"].get("algorithm.num_clusters"))
    return _save_curves(cells, runs, folder, looks, "FeSEM")


def _save_curves(cells: Sequence[Cell], runs: Path, folder: Path, looks: Mapping[str, Look], title: str) -> list[Path]:
    if not cells:
        return []
    columns = _names(cells, "column")
    what = f"{title}: accuracy by round, mean over seeds"
    figure, found = _side_by_side(len(columns), what, _room(looks))
    for axes, column in zip(found, columns, strict=True):
        for row, look in looks.items():  # all rows are in the legend, whichever panel has them
            axes.plot([], [], color=look.colour, linestyle=look.dashes, linewidth=1.4, label=row)
        lowest = []
        for cell in (cell for cell in cells if cell["column"] == column):
            rounds, values = _curve(_read(cell, runs))
            look = looks[cell["row"]]
            draw_line(axes, rounds, values, look.colour, "_" + cell["row"], style=look.dashes)
            lowest.append(float(values[len(values) // 10 :].min()))
        # What a method does in its first rounds would make the rest flat.
        axes.set_ylim(bottom=max(0.0, min(lowest) - 0.02), top=min(1.005, axes.get_ylim()[1]))
        axes.set_title(column, fontsize=9)
        score_axis(axes, SCORE)
        round_axis(axes)
    found[0].set_ylabel("accuracy, clients weighted by samples")
    put_legend(found[-1], LIGHT, beside=True, handlelength=2.6)
    return _save(figure, folder, "accuracy by round")


def _curve(data: Sequence[RunData]) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """The rounds that were evaluated in all runs, and the mean accuracy."""
    known = [one.rounds[np.isfinite(one.curves[SCORE])] for one in data]
    rounds = sorted(set.intersection(*(set(one.tolist()) for one in known)))
    values = np.stack([one.curves[SCORE][np.isin(one.rounds, rounds)] for one in data])
    return np.array(rounds), values.mean(0)


def rounds_to_reach(result: Result, runs: Path, folder: Path) -> list[Path]:
    """Rounds until a row is as accurate as FedAvg in its five best rounds, or some points below it."""
    cells = [cell for cell in result["cells"] if cell["runs"]]
    with_goal = {cell["column"]: _best(_curve(_read(cell, runs))[1]) for cell in cells if cell["method"] == "fedavg"}
    if not with_goal:
        return []
    rows = _names(cells, "row")[::-1]
    title = "rounds until the accuracy of FedAvg's five best rounds is reached, or some points less"
    figure, found = _side_by_side(len(with_goal), f"{result['title']}: {title}", 1.6, height=0.24 * len(rows) + 0.4)
    for axes, (column, goal) in zip(found, with_goal.items(), strict=True):
        mine = [cell for cell in cells if cell["column"] == column]
        last = max(cell["rounds"] for cell in mine)
        for place, below in enumerate(BELOW):
            reached = {cell["row"]: _first_round(cell, runs, goal - below / 100) for cell in mine}
            there = [(value, rows.index(row)) for row, value in reached.items() if value is not None]
            style = {"color": colour(place), "s": 34, "linewidths": 0, "zorder": 3 + place}
            name = "as accurate" if not below else f"{below:g} points less"
            axes.scatter(*np.array(there, dtype=float).reshape(-1, 2).T, marker=_MARKERS[place], label=name, **style)
        never = [rows.index(row) for row, value in reached.items() if value is None]  # the highest goal comes last
        axes.scatter([1.06 * last] * len(never), never, marker="x", s=26, color=LIGHT.ink, label="not as accurate")
        axes.set(xlim=(0, 1.1 * last), ylim=(-0.6, len(rows) - 0.4), xlabel=f"rounds, of {last}")
        axes.set_yticks(range(len(rows)), rows if axes is found[0] else [])
        axes.set_title(f"{column}: FedAvg {100 * goal:.1f} %", fontsize=9)
    put_legend(found[-1], LIGHT, beside=True)
    _widen_left(figure, rows)
    return _save(figure, folder, "rounds to reach")


def _best(values: NDArray[np.float64]) -> float:
    """The mean of the five best rounds."""
    return float(np.sort(values)[-5:].mean())


def _first_round(cell: Cell, runs: Path, goal: float) -> int | None:
    """The first round of the mean curve that reaches the goal."""
    rounds, values = _curve(_read(cell, runs))
    reached = np.flatnonzero(values >= goal)
    return int(rounds[reached[0]]) if len(reached) else None


def _widen_left(figure: Figure, names: Iterable[str]) -> None:
    """Make room on the left for the names of rows."""
    more = max(0.0, 0.075 * max(len(name) for name in names) - 0.5)
    wide, high = figure.get_size_inches()
    for axes in figure.axes:
        box = axes.get_position()
        axes.set_position(
            ((box.x0 * wide + more) / (wide + more), box.y0, box.width * wide / (wide + more), box.height)
        )
    figure.texts[0].set_x(figure.texts[0].get_position()[0] * wide / (wide + more))
    figure.set_size_inches(wide + more, high)


# ---- scores by column ----


@of_result
def accuracy_by_column(result: Result, runs: Path, folder: Path) -> list[Path]:
    """The metrics of a table whose columns are numbers, as lines (FedDSMIC's Figs. 6 and 7, MD-ICFL's table 6).

    Hollow marks are published numbers.
    """
    cells = [cell for cell in result["cells"] if cell["ours"]]
    looks = _looks(cells)
    shown = [name for name in result["metrics"] if any(name in cell["ours"] for cell in cells)]
    if not shown:
        return []
    places = {cell["column"]: float(cell["column"].rpartition("=")[2]) for cell in cells}
    what = next(iter(places)).rpartition("=")[0].strip()
    figure, found = _side_by_side(len(shown), f"{result['title']}: mean ± standard deviation over seeds", _room(looks))
    for axes, name in zip(found, shown, strict=True):
        for row, look in looks.items():
            mine = [cell for cell in cells if cell["row"] == row and name in cell["ours"]]
            x, y = [places[cell["column"]] for cell in mine], [cell["ours"][name]["mean"] for cell in mine]
            std = [cell["ours"][name]["std"] for cell in mine]
            style = {"linestyle": look.dashes, "linewidth": 1.4, "marker": "o", "markersize": 3.5, "capsize": 2}
            axes.errorbar(x, y, yerr=std, color=look.colour, elinewidth=0.8, label=row, **style)
            known = [(places[cell["column"]], cell["published"][name]) for cell in mine if name in cell["published"]]
            if known:
                hollow = {"marker": "D", "s": 30, "facecolors": "none", "edgecolors": look.colour, "gid": "published"}
                axes.scatter(*np.array(known).T, zorder=4, **hollow)
        _number_axis(axes, sorted(set(places.values())))
        axes.set(xlabel=what, ylabel=result["metrics"][name]["label"])
    if any(axes.findobj(lambda one: one.get_gid() == "published") for axes in found):
        found[-1].scatter([], [], marker="D", s=30, facecolors="none", edgecolors=LIGHT.ink, label="published")
    put_legend(found[-1], LIGHT, beside=True, handlelength=2.6)
    return _save(figure, folder, f"accuracy by {what}")


def _number_axis(axes: Axes, values: Sequence[float]) -> None:
    """Ticks at these values; a logarithmic axis if they are far apart."""
    if values[0] > 0 and values[-1] > 20 * values[0]:
        axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set_xticks([], minor=True)


# ---- bytes ----


def bytes_by_network(result: Result, runs: Path, folder: Path) -> list[Path]:
    """What each method sends in 300 rounds, a panel for each network (FedDSMIC's Fig. 5)."""
    cells = [cell for cell in result["cells"] if cell["runs"]]
    if not cells:
        return []
    columns, rows = _names(cells, "column"), _names(cells, "row")[::-1]
    title = f"{result['title']}: sent in {FIG5_ROUNDS} rounds, in both directions"
    figure, found = _side_by_side(len(columns), title, 0.6, width=2.9, height=0.28 * len(rows) + 0.3)
    for axes, column in zip(found, columns, strict=True):
        sent = {cell["row"]: _gigabytes(cell, runs, FIG5_ROUNDS) for cell in cells if cell["column"] == column}
        base = next((sent[cell["row"]] for cell in cells if cell["method"] == "fedavg" and cell["row"] in sent), None)
        axes.barh([rows.index(row) for row in sent], list(sent.values()), 0.62, color=colour(0), zorder=2)
        for row, value in sent.items():
            text = f" {float(f'{value:.3g}'):,g}" + (f" ({value / base:.2g} x)" if base else "")
            axes.text(value, rows.index(row), text, va="center", fontsize=7, color=LIGHT.ink)
        axes.set_xlim(0, 1.42 * max(sent.values()))
        axes.set_yticks(range(len(rows)), rows if axes is found[0] else [])
        axes.set_title(column, fontsize=9)
        axes.set_xlabel("GB (times FedAvg)")
    _widen_left(figure, rows)
    return _save(figure, folder, "bytes by network")


def _gigabytes(cell: Cell, runs: Path, rounds: int) -> float:
    """Gigabytes sent in this many rounds, mean over seeds. Rounds that were not run count as the last one that was."""
    totals = []
    for one in _read(cell, runs):
        sent = megabytes_sent(one)
        last = sent[-1] - (sent[-2] if len(sent) > 1 else 0.0)
        totals.append(sent[-1] + (rounds - one.done) * last)
    return statistics.fmean(totals) / 1e3


# ---- data, models, pictures ----


def held_labels(result: Result, runs: Path, folder: Path) -> list[Path]:
    """Samples of each class at each client, a file for each column (FedDSMIC's Fig. 3)."""
    first = {cell["column"]: cell for cell in reversed(result["cells"]) if cell["runs"]}
    files = []
    for column, cell in reversed(first.items()):
        figure = plots.held_labels(_read(cell, runs, whole=True)[0])
        files += _save(_titled(figure, f"{column}: {figure.texts[0].get_text()}"), folder, "labels", column)
    return files


def local_models(result: Result, runs: Path, folder: Path) -> list[Path]:
    """The clients' last models of FeSEM(4), coloured by cluster: PCA (FeSEM's Fig. 4)."""
    return list(_of_first_seed(result, runs, folder, 4, plots.model_map, "local models of", "map"))


def member_samples(result: Result, runs: Path, folder: Path) -> list[Path]:
    """Samples of some members of each cluster of FeSEM(2) (FeSEM's Fig. 5)."""
    return list(_of_first_seed(result, runs, folder, 2, plots.member_samples, "samples of members of", "members"))


def _of_first_seed(
    result: Result, runs: Path, folder: Path, clusters: int, make: Callable[[Any], Figure], what: str, name: str
) -> Iterator[Path]:
    """A plot of the first run of each FeSEM cell with so many clusters."""
    for cell in _of(result, "fesem", clusters):
        run = _read(cell, runs, whole=True)[0]
        title = f"{cell['column']}: {what} {cell['row']}, seed {run.seed}"
        yield from _save(_titled(make(run), title), folder, name, cell["row"])


def pseudo_confusion(result: Result, runs: Path, folder: Path) -> list[Path]:
    """How new models classify the pseudo samples, a panel for each true group (MD-ICFL's Figs. 5 and 6)."""
    files = []
    for cell in result["cells"]:
        maps: dict[str, list[NDArray[Any]]] = {}  # true group -> a map for each seed
        for run in _read(cell, runs, whole=True):
            for group, one in _witnesses(run):
                maps.setdefault(group, []).append(one)
        if maps:
            means = {group: np.mean(maps[group], axis=0) for group in sorted(maps)}
            titles = [f"{group}: diagonal {np.diag(one).mean():.2f}" for group, one in means.items()]
            seeds = [place.rpartition("-s")[2] for place in cell["runs"]]
            named = f"seed{'s'[: len(seeds) > 1]} {', '.join(seeds)}"
            title = f"{cell['row']}: pseudo samples as classified by new models, {named}"
            files += _save(draw_maps(list(means.values()), titles, title, LIGHT), folder, "confusion", cell["row"])
    return files


def _witnesses(run: RunData) -> Iterator[tuple[str, NDArray[Any]]]:
    """The map [L, L] of each cluster, with the group that most of its members have."""
    found, groups, names = run.method.get("witness"), run.group_positions(), run.group_names()
    if found is None or groups is None or run.clusters is None:
        return
    for cluster, one in enumerate(found):
        members = groups[run.clusters == cluster]
        if len(members):
            yield names[int(np.bincount(members).argmax())], one


def pseudo_samples(result: Result, runs: Path, folder: Path) -> list[Path]:
    """Pictures of pseudo samples of the first run of each row (MD-ICFL's Fig. 7)."""
    files = []
    for cell in result["cells"]:
        run = next((run for run in _read(cell, runs, whole=True) if "pseudo" in run.method), None)
        if run is not None:
            title = f"{cell['row']}, seed {run.seed}: pseudo samples, a column for each class"
            files += _save(_titled(plots.pseudo_samples(run), title), folder, "pseudo samples", cell["row"])
    return files


# ---- features ----


def features(result: Result, runs: Path, folder: Path) -> list[Path]:
    """Features of two clients' training samples, by their own model of each row: t-SNE (FedDSMIC's Figs. 9 and 10).

    Features are what the last layer gets. The clients are the one with most samples, and one with few. The runs must
    have kept their models.
    """
    from coterie.runs.opening import open_run

    places = {cell["row"]: runs / cell["runs"][0] for cell in result["cells"] if cell["runs"]}
    if not places:
        return []
    opened = {row: open_run(place) for row, place in places.items()}
    scores = {row: read_run(place).scores["accuracy"] for row, place in places.items()}
    data = next(iter(opened.values())).federation
    sizes = data.train.sizes.numpy()
    enough = np.flatnonzero(sizes >= min(_FEWEST_SAMPLES, sizes.max()))
    files = []
    for word, client in (("most", int(sizes.argmax())), ("few", int(enough[sizes[enough].argmin()]))):
        x, y = data.samples(client)
        shown, classes = x[:_MOST_SAMPLES], y[:_MOST_SAMPLES].numpy()
        part = "" if len(shown) == len(x) else f"{len(shown)} of "
        title = f"features of {part}the {len(x):,} training samples of {data.names[client]} (t-SNE)"
        figure, found = _side_by_side(len(opened), title, 0.7, width=2.5, height=2.5)
        for axes, (row, one) in zip(found, opened.items(), strict=True):
            points = neighbours(_inner(one.personal_model(client), shown))
            if points is None:
                return []
            for label in np.unique(classes).tolist():
                again = label // len(OKABE_ITO)  # colours repeat as crosses
                own, style = points[classes == label].T, {"marker": "ox+"[again % 3], "linewidths": 0.9 * (again > 0)}
                axes.scatter(*own, color=colour(label), s=11, label=str(label), **style)
            axes.set(xticks=[], yticks=[])
            axes.set_title(f"{row}: accuracy {100 * scores[row][client]:.0f} %", fontsize=9)
        put_legend(found[-1], LIGHT, beside=True, title="class", title_fontsize=8, handlelength=0.8, markerscale=1.6)
        files += _save(figure, folder, "features", word)
    return files


def _inner(model: nn.Module, x: Tensor) -> NDArray[np.float64]:
    """What the last dense layer gets for inputs x: [n, D]."""
    import torch

    seen: list[Tensor] = []
    last = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)][-1]
    hook = last.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model.eval()(x)
    hook.remove()
    return torch.cat(seen).double().numpy()
