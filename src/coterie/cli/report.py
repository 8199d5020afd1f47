"""`coterie report`: one page of one run or several, and every picture as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.output import stderr
from coterie.cli.run import JsonFlag, QuietFlag
from coterie.errors import ConfigError, RunError
from coterie.runs.reading import RunData, find_runs, is_run, read_run
from coterie.views.report.page import write_report

RunsArgument = Annotated[
    list[Path], typer.Argument(help="Run folders, or folders of runs such as those that compare makes.")
]
OutFlag = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="The page; by default report.html in the folder of the run or runs."),
]
PngFlag = Annotated[
    Path | None, typer.Option("--png", help="Also draw every picture into this folder, as PNG and as SVG.")
]
OnlyFlag = Annotated[
    list[str] | None, typer.Option("--only", help="Of --png only this picture; give it several times.")
]
TsneFlag = Annotated[bool, typer.Option(help="A map by t-SNE beside the one by PCA; takes seconds for 1,000 clients.")]


def report(
    runs: RunsArgument,
    out: OutFlag = None,
    png: PngFlag = None,
    only: OnlyFlag = None,
    tsne: TsneFlag = True,
    dark: Annotated[bool, typer.Option("--dark", help="Draw the files of --png on a dark ground.")] = False,
    json_: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Make a page of one run or several: one file, no network needed, light and dark."""
    hidden = quiet or json_

    def say(text: str) -> None:
        if not hidden:
            stderr().print(text, soft_wrap=True, markup=False)

    if only and png is None:
        raise ConfigError("--only names pictures for --png; give a folder for them with --png DIR.")
    found = expand(runs)
    data, damaged = [], []
    for path in found:
        try:
            data.append(read_run(path))
        except RunError as error:
            if len(found) == 1:
                raise
            damaged.append({"path": str(path), "reason": str(error)})
            say(f"left out: {error}")
    if not data:
        raise RunError(f"None of the {len(found)} folders could be read; the first: {damaged[0]['reason']}")
    target = _target(out, runs, data)
    write_report(data, target, tsne=tsne, say=say)
    pictures: list[Path] = []
    if png is not None:
        from coterie.views.plots import picture_names, save_all

        wanted = only or [name for name in picture_names() if tsne or "tsne" not in name]

        pictures = save_all(data, png, only=wanted, dark=dark, say=say)
    if json_:
        told: dict[str, Any] = {"page": str(target), "runs": len(data), "damaged": damaged}
        print(json.dumps(told | {"pictures": [str(path) for path in pictures]}))
        return
    size = target.stat().st_size
    more = f" and {len(pictures)} pictures in {png}" if png is not None else ""
    print(f"{target} ({size / 1e6:.1f} MB, {len(data)} run(s)){more}")


def expand(paths: list[Path]) -> list[Path]:
    """Run folders as they are; of other folders the runs inside; each once, in order."""
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise ConfigError(f"There is no folder {path}.")
        if not path.is_dir():
            raise ConfigError(f"{path} is a file; name a run folder.")
        inside = [path] if is_run(path) else [run for _, run in find_runs(path)]
        if not inside:
            raise RunError(f"{path} is not a run folder, and there is none inside.")
        for run in inside:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _target(out: Path | None, asked: list[Path], data: list[RunData]) -> Path:
    """Where the page goes: as told, else beside what it is about."""
    if out is not None:
        return out / "report.html" if out.is_dir() else out
    if len(asked) == 1:
        return asked[0] / "report.html"
    return Path("report.html")
