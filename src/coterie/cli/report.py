"""`coterie report`: an HTML page of one or more runs, and every figure as a file."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli import output
from coterie.cli.flags import JsonFlag, QuietFlag
from coterie.errors import ConfigError, RunError
from coterie.settings import counted
from coterie.views.words import safe_text

if TYPE_CHECKING:
    from coterie.runs.reading import RunData


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs such as compare creates.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Page to write; by default report.html in the folder of the runs."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", help="Also save every figure to this folder, PNG and SVG.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="Save only this figure; repeatable.")] = None,
    tsne: Annotated[bool, typer.Option(help="Add a t-SNE map; takes seconds for 1,000 clients.")] = True,
    dark: Annotated[bool, typer.Option("--dark", help="Save the figures of --png in dark mode.")] = False,
    json_: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Write an HTML report of one or more runs. It is a single file and needs no network."""
    from coterie.runs.comparison import read_comparison
    from coterie.runs.reading import read_run
    from coterie.views.report.page import write_report

    say = partial(output.say, hidden=quiet or json_)
    if only and png is None:
        raise ConfigError("--only selects figures of --png; give a folder for them with --png DIR.")
    found, skipped = expand(runs)
    for note in skipped:
        say(f"skipped: {note}")
    comparisons = [read_comparison(path) for path in runs if path.is_dir()]
    situations = comparisons[0].situations if len(runs) == 1 else []
    data, damaged = [], []
    for path in found:
        try:
            one = read_run(path)
            if situations:
                own = comparisons[0].runs.get(path.resolve(), [])
                one = replace(one, name=path.relative_to(runs[0]).as_posix(), situations=tuple(own))
            data.append(one)
        except RunError as error:
            if len(found) == 1:
                raise
            damaged.append({"path": str(path), "reason": str(error)})
            say(f"skipped: {error}")
    if not data:
        raise RunError(f"None of the {len(found)} folders could be read; the first: {damaged[0]['reason']}")
    target = _target(out, runs, data)
    write_report(data, target, tsne=tsne, say=say, situations=situations)
    pictures: list[Path] = []
    if png is not None:
        from coterie.views.plots import picture_names, save_all

        wanted = only or [name for name in picture_names() if tsne or "tsne" not in name]
        pictures = save_all(data, png, only=wanted, dark=dark, say=say)
    if json_:
        written = {"page": str(target), "pictures": [str(path) for path in pictures]}
        print(json.dumps({**written, "runs": len(data), "damaged": damaged, "skipped": skipped}))
        return
    size = target.stat().st_size
    drawn = counted(len({path.with_suffix("") for path in pictures}), "picture")
    more = f" and {drawn} (PNG and SVG) in {png}" if png is not None else ""
    print(safe_text(f"{target} ({size / 1e6:.1f} MB, {counted(len(data), 'run')}){more}"))


def expand(paths: list[Path]) -> tuple[list[Path], list[str]]:
    """The run folders among the paths and inside the other folders, each once; a comparison's in its own order.

    Of several paths (RUNS/*), those that are no runs are left out, with a sentence about each; one alone is an error.
    """
    from coterie.runs.comparison import read_comparison
    from coterie.runs.reading import find_runs, is_run

    found: dict[Path, Path] = {}
    skipped: list[str] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"There is no folder {path}.")
        inside = [path] if is_run(path) else [run for _, run in find_runs(path)]
        if not inside:
            is_folder = path.is_dir()
            skipped.append(f"{path} is {'not a run folder and contains none' if is_folder else 'a file'}.")
            if len(paths) == 1:
                raise RunError(skipped[0]) if is_folder else ConfigError(f"{path} is a file; name a run folder.")
            continue
        order = {run: place for place, run in enumerate(read_comparison(path).runs)}
        for run in sorted(inside, key=lambda run: order.get(run.resolve(), len(order))):
            found.setdefault(run.resolve(), run)
    if not found:
        raise RunError(f"None of the {len(paths)} paths is a run folder; the first: {skipped[0]}")
    return list(found.values()), skipped


def _target(out: Path | None, asked: list[Path], data: list[RunData]) -> Path:
    """The path of the page: the user's, or report.html in the folder of the runs."""
    if out is not None:
        return out / "report.html" if out.is_dir() else out
    if len(asked) == 1:
        return asked[0] / "report.html"
    return Path("report.html")
