"""The leaderboard: all results of a folder as one page, and the accuracy of every method against its bytes.

    results/md_icfl/table4/result.json ...   ->   results/leaderboard.html, leaderboard.png, tables.md

A *cell* is a suite and a column, and its score is the first metric of the suite. A *line* is a method in a mode; where
a table has several rows of the same method and mode (FeSEM with 2, 3 and 4 clusters), each is a line of its own, named
by the settings in which they differ. In a cell the *regret* of a line is how many points it is below the best line, its
*rank* is 1 for the best, and its *share* is what it sent divided by what FedAvg sent. Means are over the cells that a
line has.

Not on the board: rows that are only published, suites of figures, which repeat cells of tables, and cells without
FedAvg, which compare a method with itself (MD-ICFL's table of K).
"""

from __future__ import annotations

import base64
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from coterie.errors import MissingExtra, RunError, StorageError
from coterie.reproduce.outcome import RESULT, TABLE, read_result, runs_in
from coterie.reproduce.page import Result
from coterie.reproduce.suite import AS_PUBLISHED, find_suites, suite_names
from coterie.settings import counted
from coterie.views.report.page import shell, source_hash, static
from coterie.views.words import markdown_table, size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE, INDEX, PICTURE = "leaderboard.html", "tables.md", "leaderboard"
MODES = {"paper": "as published", "ours": "ours"}


class Place(NamedTuple):
    """A cell: a suite and one of its columns."""

    suite: str
    column: str


@dataclass(frozen=True)
class Entry:
    """What a line has in a cell."""

    row: str  # its label in the table
    ours: float
    std: float
    seeds: int
    published: float | None
    difference: float | None
    bytes: float | None
    regret: float
    rank: float
    share: float | None  # of FedAvg's bytes; None: unknown


@dataclass
class Line:
    """A method in a mode, and its entries."""

    method: str
    mode: str
    variant: str = ""
    entries: dict[Place, Entry] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.method} ({self.variant})" if self.variant else self.method

    @property
    def short(self) -> str:
        """The method, or the label of a variant in its table: "FeSEM(4)"."""
        labels = [entry.row.removesuffix(", our start") for entry in self.entries.values()]
        return labels[0] if self.variant else self.method

    @property
    def regret(self) -> float:
        return statistics.fmean(entry.regret for entry in self.entries.values())

    @property
    def rank(self) -> float:
        return statistics.fmean(entry.rank for entry in self.entries.values())

    @property
    def share(self) -> float | None:
        known = [entry.share for entry in self.entries.values() if entry.share is not None]
        return statistics.fmean(known) if known else None


# ---- reading ----


def read_results(folder: Path) -> list[Result]:
    """The results in a folder, by name of the suite. One of another schema is an error."""
    found = [read_result(path.parent) for path in sorted(folder.glob(f"*/*/{RESULT}"))]
    results = [result for result in found if result is not None]
    if not results:
        raise RunError(f"{folder} has no results. 'coterie reproduce SUITE --write {folder}' writes some.")
    return sorted(results, key=lambda result: str(result["suite"]))


def score_of(result: Result) -> str | None:
    """The metric that counts: the first one of a suite; None for a suite without metrics."""
    return next((name for name, metric in result["metrics"].items() if metric["better"] == "high"), None)


def _cells_of(result: Result) -> Iterator[tuple[Place, list[Mapping[str, Any]]]]:
    """The cells of the board, with the rows that have a score."""
    score = score_of(result)
    if score is None or str(result["suite"]).partition("/")[2].startswith("figures"):
        return
    for column in dict.fromkeys(cell["column"] for cell in result["cells"]):
        cells = [cell for cell in result["cells"] if cell["column"] == column and score in cell["ours"]]
        methods = {cell["method"] for cell in cells}
        if "fedavg" in methods and len(methods) > 1:  # one method alone would be the best of its cell
            yield Place(result["suite"], column), cells


def lines_of(results: Iterable[Result]) -> list[Line]:
    """All lines, the smallest mean regret first."""
    found: dict[tuple[str, str, str], Line] = {}
    for result in results:
        for place, cells in _cells_of(result):
            for cell, entry in _entries(cells, str(score_of(result))):
                key = (cell["method"], cell["mode"], _variant(cell, cells))
                line = found.setdefault(key, Line(*key))
                line.entries[place] = entry
    return sorted(found.values(), key=lambda line: (line.regret, line.name, line.mode))


def _entries(cells: Sequence[Mapping[str, Any]], score: str) -> Iterator[tuple[Mapping[str, Any], Entry]]:
    """The entries of one cell of the board."""
    every = [cell["ours"][score]["mean"] for cell in cells]
    bases = [cell["bytes"]["mean"] for cell in cells if cell["method"] == "fedavg" and cell["bytes"]]
    for cell, mean in zip(cells, every, strict=True):
        sent = cell["bytes"]["mean"] if cell["bytes"] else None
        yield (
            cell,
            Entry(
                cell["row"],
                mean,
                cell["ours"][score]["std"],
                cell["ours"][score]["n"],
                cell["published"].get(score),
                cell["difference"].get(score),
                sent,
                regret=max(every) - mean,
                rank=1 + sum(other > mean for other in every) + (every.count(mean) - 1) / 2,  # ties share their ranks
                share=sent / bases[0] if sent is not None and bases and bases[0] else None,
            ),
        )


def _variant(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    """The settings in which a row differs from others of the same method and mode; "" if it sets none of them."""
    alike = [one["settings"] for one in cells if (one["method"], one["mode"]) == (cell["method"], cell["mode"])]
    own = {key: value for key, value in cell["settings"].items() if key.partition(".")[2] not in AS_PUBLISHED}
    differ = [key for key in own if any(one.get(key) != own[key] for one in alike)]
    return ", ".join(f"{key.partition('.')[2]}={own[key]}" for key in differ)


# ---- writing ----


def write_board(folder: Path) -> tuple[list[Path], str]:
    """Write the page, its figure and the list of suites beside the results; the files, and why there is no figure."""
    results = read_results(folder)
    lines = lines_of(results)
    problem, picture = "", None
    try:
        drawn = _draw(lines, folder)
        picture = next((path for path in drawn if path.suffix == ".png"), None)
    except MissingExtra as error:
        drawn, problem = [], str(error)
    try:
        (folder / PAGE).write_text(board_html(results, lines, picture), encoding="utf-8")
        (folder / INDEX).write_text(index_text(results), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror}.") from error
    return [folder / PAGE, *drawn, folder / INDEX], problem


def _facts(result: Result) -> dict[str, str]:
    """What the list of suites says about a result."""
    machine, score = result["machine"], score_of(result)
    differences = [
        (cell["difference"][score], f"{cell['row']}, {cell['column']}")
        for cell in result["cells"]
        if score in cell["difference"]
    ]
    value, where = max(differences, key=lambda one: abs(one[0]), default=(None, ""))
    threads = counted(machine.get("threads") or 1, "thread")
    done, total = runs_in(result), _runs_of_suite(result)
    state = f"all {counted(total, 'run')}" if done >= total else f"{done} of {counted(total, 'run')}"
    return {
        "state": state if result["scale"] == 1 else f"{state}, quick look (scale {result['scale']:g})",
        "seeds": ", ".join(map(str, result["seeds"])),
        "date": str(result["date"])[:10],
        "machine": str(machine.get("gpu") or f"{machine.get('processor')}, {threads} a run"),
        "worst difference": "-" if value is None else f"{value:+.2f} ({where})",
    }


def _runs_of_suite(result: Result) -> int:
    """The runs of the whole suite; of one that is not shipped, those that the result was made for."""
    if result["suite"] not in suite_names():
        return runs_in(result) + len(result["missing"])
    (suite,) = find_suites([result["suite"]])
    return len(suite.spots(suite.chosen(), suite.seeds))


def index_text(results: Sequence[Result]) -> str:
    """The list of suites in Markdown."""
    lines = [
        [
            f"[{result['suite']}]({quote(result['suite'])}/{TABLE})",
            f"{result['paper']}. {result['title']}",
            *_facts(result).values(),
        ]
        for result in results
    ]
    heads = ["suite", "what", *_facts(results[0])]
    return (
        "# Results\n\n"
        f"All methods over all tables: [{PAGE}]({PAGE}). The worst difference is ours less the published number, of "
        "the first metric of a suite.\n\n" + markdown_table([heads, *lines]) + "\n"
    )


# ---- the page ----


def board_html(results: Sequence[Result], lines: Sequence[Line], picture: Path | None) -> str:
    """The page: one file that needs no network. Texts are escaped, and only its own script may run."""
    script = static("leaderboard.js")
    papers = list(dict.fromkeys(result["paper"] for result in results if any(_cells_of(result))))
    options = "".join(f"<option>{escape(paper)}</option>" for paper in papers)
    image = ""
    if picture is not None:
        content = base64.b64encode(picture.read_bytes()).decode()
        image = (
            "<h2>Accuracy against bytes</h2><p>Each method over all its cells: mean regret, and bytes sent relative to "
            'FedAvg. Small dots are cells.</p><div class="scroll"><picture>'
            f'<img alt="mean regret against bytes sent" src="data:image/png;base64,{content}"></picture></div>'
        )
    body = (
        '<header class="top"><h1>Leaderboard</h1></header><main>'
        "<p>Rows are methods, as published or with our start and defaults; <b>coterie</b> is not told the number of "
        "clusters. A cell has our accuracy in percent (mean over seeds), below it the published number and our "
        "difference from it. Regret: points below the best row of the cell. Means are over the cells that a row has, "
        "so rows with few cells compare badly. Cells without FedAvg, and figures, are not here. Click on a heading to "
        "sort.</p>"
        f'<div class="controls"><label>paper <select id="paper"><option value="">all</option>{options}</select></label>'
        f'<span id="count" class="dim"></span></div>{_table(results, lines)}{image}'
        f"<h2>Suites</h2>{_suites(results)}</main>"
        "<footer>Made by <code>coterie reproduce --leaderboard</code> from the result.json files beside it. This file "
        f"needs no network.</footer><script>{script}</script>"
    )
    return shell("Coterie leaderboard", body, f"script-src {source_hash(script)}; ")


def _table(results: Sequence[Result], lines: Sequence[Line]) -> str:
    places = [
        (place, result["paper"], f"{result['title']}. {place.column}")
        for result in results
        for place, _ in _cells_of(result)
    ]
    heads = "".join(
        f'<th class="number"{more}><button type="button">{text}</button></th>'
        for text, more in (
            ("cells", ""),
            ("mean regret", ' aria-sort="ascending"'),
            ("mean rank", ""),
            ("bytes, x FedAvg", ""),
        )
    )
    heads += "".join(
        f'<th class="number" data-paper="{escape(paper)}" title="{escape(title)}">'
        f'<button type="button">{escape(place.suite)}<br>{escape(place.column)}</button></th>'
        for place, paper, title in places
    )
    rows = ""
    for line in lines:
        name = f'{escape(line.method)} <span class="dim">{escape(MODES.get(line.mode, line.mode))}</span>'
        name += f"<small>{escape(line.variant)}</small>" if line.variant else ""
        sums = (len(line.entries), line.regret, line.rank, line.share)
        cells = "".join(
            f'<td class="number" data-value="{"" if value is None else value}">{_number(value, digits)}</td>'
            for value, digits in zip(sums, (0, 2, 1, 2), strict=True)
        )
        cells += "".join(_cell(line.entries.get(place)) for place, _, _ in places)
        rows += f"<tr><td>{name}</td>{cells}</tr>\n"
    first = '<th><button type="button">method</button></th>'
    head = f"<thead><tr>{first}{heads}</tr></thead>"
    return f'<div class="scroll"><table class="board">{head}<tbody>{rows}</tbody></table></div>'


def _cell(entry: Entry | None) -> str:
    if entry is None:
        return '<td class="number" data-value=""></td>'
    numbers = {"value": entry.ours, "regret": entry.regret, "rank": entry.rank, "share": entry.share}
    data = "".join(f' data-{key}="{value:.6g}"' for key, value in numbers.items() if value is not None)
    sent = "" if entry.bytes is None else f", {size_text(entry.bytes)} sent"
    over = f"over {counted(entry.seeds, 'seed')}, rank {entry.rank:g}"
    title = f"{entry.row}: {entry.ours:.2f} ± {entry.std:.2f} {over}{sent}"
    published = "" if entry.published is None else f"{entry.published:.2f}"
    published += "" if entry.difference is None else f" {entry.difference:+.2f}"
    more = f"<small>{published}</small>" if published else ""
    best = " best" if entry.regret == 0 else ""
    return f'<td class="number{best}"{data} title="{escape(title)}">{entry.ours:.2f}{more}</td>'


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _suites(results: Sequence[Result]) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in ("suite", "what", *_facts(results[0])))
    rows = ""
    for result in results:
        link = f'<a href="{quote(result["suite"])}/{TABLE}">{escape(result["suite"])}</a>'
        texts = (f"{result['paper']}. {result['title']}", *_facts(result).values())
        rows += f"<tr><td>{link}</td>" + "".join(f"<td>{escape(text)}</td>" for text in texts) + "</tr>\n"
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


# ---- the figure ----


def _draw(lines: Sequence[Line], folder: Path) -> list[Path]:
    """Mean regret against bytes, as PNG and SVG; nothing if no line has bytes."""
    from coterie.views.plots.several import save

    shown = [line for line in lines if line.share is not None]
    return save(board_figure(shown), folder / PICTURE) if shown else []


_LOOKS = {  # marker, position of the colour
    "paper": ("o", 1),
    "ours": ("s", 0),
}


def board_figure(lines: Sequence[Line]) -> Figure:
    """Mean regret against bytes relative to FedAvg; small dots are cells. Methods that send nothing are on the left."""
    from coterie.views.plots.style import LIGHT, colour, frame, put_legend

    title = "all methods over all tables: accuracy against bytes"
    figure, axes = frame(title, LIGHT, width=8.6, height=6.0)
    known = [entry.share for line in lines for entry in line.entries.values() if entry.share]
    least, most = min(known, default=1.0), max(known, default=1.0)
    nothing = 0.6 * least  # a logarithmic axis has no zero
    points = []
    lines = sorted(lines, key=lambda line: (line.method != "coterie", -len(line.entries)))  # these are named first
    for line in lines:
        marker, position = _LOOKS.get(line.mode, _LOOKS["ours"])
        fill = LIGHT.ink if line.method == "coterie" else colour(position)
        cells = [(entry.share or nothing, entry.regret) for entry in line.entries.values() if entry.share is not None]
        shares, regrets = zip(*cells, strict=True)
        axes.scatter(shares, regrets, s=5, color=fill, alpha=0.25, linewidths=0, gid="cells")
        points.append((line.share or nothing, line.regret))
        x, y = points[-1]
        axes.scatter(x, y, s=42, color=fill, marker=marker, edgecolors=LIGHT.paper, linewidths=0.6, zorder=3)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=2.0, linscale=0.8)
    lowest = 1.1 * max(entry.regret for line in lines for entry in line.entries.values()) + 1
    marks = [mark for mark in (0.1, 0.2, 0.5, 1, 1.5, 2, 3, 5, 10, 20, 50) if 0.95 * least <= mark <= 1.2 * most]
    silent = [nothing] if any(not line.share for line in lines) else []
    axes.set_xticks([*silent, *marks], [*("nothing" for _ in silent), *(f"{mark:g}" for mark in marks)])
    axes.set_xticks([], minor=True)
    axes.set_xlim(0.8 * (nothing if silent else least), 1.35 * most)
    falls = [fall for fall in (0, 0.5, 1, 2, 5, 10, 20, 50) if fall <= lowest]
    axes.set_yticks(falls, [f"{fall:g}" for fall in falls])
    axes.set_yticks([], minor=True)
    axes.set_ylim(lowest, -0.15)  # after the ticks, which would widen it
    axes.set(xlabel="bytes sent, relative to FedAvg", ylabel="points below the best of its cell (up is better)")
    for mode, (marker, position) in _LOOKS.items():
        axes.scatter([], [], s=42, marker=marker, color=colour(position), label=f"{MODES[mode]}, mean over its cells")
    axes.scatter([], [], s=42, marker="s", color=LIGHT.ink, label="coterie")
    axes.scatter([], [], s=5, color=LIGHT.ink, alpha=0.4, label="one cell")
    put_legend(axes, LIGHT)
    _name_points(axes, points, [line.short for line in lines])
    return figure


def _name_points(axes: Axes, points: Sequence[tuple[float, float]], names: Sequence[str]) -> None:
    """Write each name beside its point, where it covers no other name or point; if there is no room, farther away."""
    figure = axes.figure
    scale = 72 / figure.dpi  # pixels to points
    at = [tuple(scale * axes.transData.transform(point)) for point in points]
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in at]
    for (x, y), point, name in zip(at, points, names, strict=True):
        wide, high = 4.0 * len(name), 7.0
        for far in range(5, 90, 6):
            sides = [
                (far, 0),
                (-far - wide, 0),
                (0, far),
                (-wide, far),
                (0, -far),
                (-wide, -far),
                (far, far),
                (far, -far),
            ]
            boxes = [(x + dx, y + dy - high / 2, x + dx + wide, y + dy + high / 2) for dx, dy in sides]
            free = [i for i, box in enumerate(boxes) if not any(_overlap(box, other) for other in taken)]
            if free:
                break
        dx, dy = sides[free[0] if free else 0]
        taken.append(boxes[free[0] if free else 0])
        line = {"arrowstyle": "-", "linewidth": 0.4, "color": "#888888", "shrinkB": 3}
        axes.annotate(
            name,
            point,
            (dx, dy),
            textcoords="offset points",
            va="center",
            fontsize=6.5,
            color="#222222",
            arrowprops=line if far > 5 else None,
            parse_math=False,
        )


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether two boxes (left, bottom, right, top) have a common point."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
