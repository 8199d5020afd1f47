"""Tables of methods and situations: one per number, rows are methods, columns are situations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from coterie.cli.output import shown, table_of
from coterie.runs.batch import SITUATION
from coterie.runs.comparison import Row, main_metric, standings_of, total_bytes
from coterie.runs.metrics import METRICS, Format, Metric
from coterie.settings import counted
from coterie.views.words import markdown_table, size_text

_POINTS = Format(100, 1)
_REGRET = "regret: points behind the best accuracy"


@dataclass(frozen=True)
class Cell:
    """A mean over seeds as it is shown."""

    text: str = "-"
    is_best: bool = False


@dataclass(frozen=True)
class Grid:
    """One number of every method in every situation."""

    title: str
    methods: list[str]
    situations: list[str]
    cells: dict[tuple[str, str], Cell]  # method, situation
    head: str = SITUATION  # above the situations, where they are rows

    def cell(self, method: str, situation: str) -> Cell:
        """An empty one if no run finished."""
        return self.cells.get((method, situation), Cell())


def shown_metrics(rows: Sequence[Row]) -> list[Metric]:
    """Accuracy, worst clients and agreement with the true groups; loss and R2 where there is no accuracy."""
    main = main_metric(rows)
    lacks = any(METRICS["accuracy"].read(row) is None for row in rows)
    keys = [*(["accuracy", "bottom5"] if main.key == "accuracy" else []), *(["loss", "r2"] if lacks else []), "ari"]
    return [METRICS[key] for key in keys if key == main.key or any(METRICS[key].read(row) for row in rows)]


def grids_of(rows: Sequence[Row]) -> list[Grid]:
    """The scores, regret, clusters that were found, and bytes sent."""
    several = any(row["seeds"] > 1 for row in rows)

    def score(metric: Metric) -> Grid:
        is_share = metric.format.factor == 100
        form = Format(100, 1) if is_share else metric.format
        title = f"{metric.label}{', %' if is_share else ''}"
        choose = max if metric.better == "high" else min
        return _grid(title, rows, lambda row: _text(metric.read(row), form, several), choose)

    main, *others = map(score, shown_metrics(rows))
    standings = standings_of(rows)
    finders = {standing["method"] for standing in standings if standing["finds_clusters"]}
    found = [row for row in rows if row["labels"]["method"] in finders]
    return [
        main,
        _regret(rows, standings),
        *others,
        *([_grid("clusters found", found, lambda row: _text(row["clusters"], Format(1, 1), several))] if found else []),
        _grid("bytes sent per run", rows, lambda row: _text(total_bytes(row), None, several)),
    ]


def _regret(rows: Sequence[Row], standings: Sequence[Row]) -> Grid:
    """How far behind the best in each situation; then the worst of them, and bytes as a multiple of FedAvg's."""
    main = main_metric(rows)
    is_loss = main.better == "low"
    title, points = ("regret: loss above the lowest", main.format) if is_loss else (_REGRET, _POINTS)
    found = _grid(title, rows, lambda row: points.text(row["regret"]), min)
    heads = {"worst regret": ("worst_regret", points)}
    if any(standing["bytes_to_fedavg"] is not None for standing in standings):
        heads["bytes / fedavg"] = ("bytes_to_fedavg", Format())
    for head, (key, form) in heads.items():
        texts = {standing["method"]: form.text(standing[key]) for standing in standings}
        best = _best(texts.values(), min) if key == "worst_regret" else ""
        found.cells.update({(m, head): Cell(text, text == best) for m, text in texts.items()})
    return replace(found, situations=[*found.situations, *heads])


def _grid(
    title: str, rows: Sequence[Row], show: Callable[[Row], str], choose: Callable[..., str] | None = None
) -> Grid:
    """A cell for each row; `choose` says whether the largest or the smallest of a situation is the best."""
    place = {(row["labels"]["method"], row["labels"][SITUATION]): show(row) for row in rows}
    methods, situations = (list(dict.fromkeys(key[i] for key in place)) for i in (0, 1))
    cells: dict[tuple[str, str], Cell] = {}
    for situation in situations:
        texts = {method: place[method, situation] for method in methods if (method, situation) in place}
        best = _best(texts.values(), choose) if choose else ""
        for method, text in texts.items():
            cells[method, situation] = Cell(text, bool(best) and text.partition("±")[0] == best)
    return Grid(title, methods, situations, cells)


def _best(texts: Iterable[str], choose: Callable[..., str]) -> str:
    return choose((text.partition("±")[0] for text in texts if text != "-"), key=float, default="")


def _text(value: Any, form: Format | None, several: bool) -> str:
    if value is None:
        return "-"
    if form is None:
        return size_text(value["mean"])
    return form.text(value["mean"]) + (f"±{form.text(value['std'])}" if several else "")


def print_grids(console: Console, grids: Sequence[Grid], title: str) -> None:
    """Print the grids; if the situations do not fit beside each other, they are the rows."""
    console.print(shown(title), soft_wrap=True)
    for grid in grids:
        wide = _lines(grid, is_turned=False)
        needed = sum(max(len(row[i].text) for row in wide) + 3 for i in range(len(wide[0]))) + 1
        lines = wide if needed <= console.width else _lines(grid, is_turned=True)
        heads = [cell.text for cell in lines[0]]
        cells = [[shown(c.text, "bold green" if c.is_best else "") for c in row] for row in lines[1:]]
        console.print(table_of(grid.title, heads, cells, text=heads[:1]))


def _lines(grid: Grid, is_turned: bool) -> list[list[Cell]]:
    """The cells of a table with its heads."""
    if is_turned:
        head = [Cell(grid.head), *(Cell(method) for method in grid.methods)]
        rows = [[Cell(s), *(grid.cell(m, s) for m in grid.methods)] for s in grid.situations]
        return [head, *rows]
    head = [Cell("method"), *(Cell(situation) for situation in grid.situations)]
    return [head, *([Cell(m), *(grid.cell(m, s) for s in grid.situations)] for m in grid.methods)]


# ---- Markdown ----


def markdown_of(title: str, rows: Sequence[Row], grids: Sequence[Grid], situations: Sequence[Mapping[str, Any]]) -> str:
    """The comparison as a page of tables; the best of each situation is bold."""
    seeds = max(row["seeds"] for row in rows)
    parts = [f"# {title}, {counted(seeds, 'seed')}", *["Mean ± standard deviation over the seeds."][: seeds - 1]]
    if not grids:
        return "\n\n".join([*parts, _plain_markdown(rows)]) + "\n"
    for grid in grids:
        lines = _lines(grid, is_turned=False)
        cells = [[f"**{cell.text}**" if cell.is_best else cell.text for cell in row] for row in lines]
        parts += [f"## {grid.title}", markdown_table(cells)]
    if situations:
        told = [[str(s["name"]), str(s["about"]), f"`{s['settings']}`"] for s in situations]
        parts += ["## Situations", markdown_table([["situation", "what", "settings"], *told])]
    return "\n\n".join(parts) + "\n"


def _plain_markdown(rows: Sequence[Row]) -> str:
    """A comparison or sweep without situations: one line per set of labels."""
    labels = list(dict.fromkeys(key for row in rows for key in row["labels"]))
    shown, several = shown_metrics(rows), any(row["seeds"] > 1 for row in rows)
    lines = [[*labels, *(f"{m.label}{', %' if m.format.unit == '%' else ''}" for m in shown), "bytes sent", "seconds"]]
    for row in rows:
        scores = [_text(metric.read(row), metric.format, several) for metric in shown]
        costs = [_text(total_bytes(row), None, several), _text(row["seconds"], Format(1, 1), several)]
        lines.append([*(str(row["labels"].get(label, "")) for label in labels), *scores, *costs])
    return markdown_table(lines)
