"""`coterie data fetch`, `list`, `show`, `check`: the stored datasets, and how to get them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.data_show import check, show
from coterie.cli.flags import JsonFlag
from coterie.cli.output import stderr, stdout, table_of
from coterie.runs.settings import RunSettings
from coterie.settings import fields_of
from coterie.views.words import size_text

if TYPE_CHECKING:
    from coterie.data.fetch import Progress as Fetched
    from coterie.data.sources.stored import StoredSource

app = typer.Typer(help="List, fetch, check and show datasets.", no_args_is_help=True)

FolderFlag = Annotated[Path | None, typer.Option("--data-dir", help=fields_of(RunSettings)["data_dir"].sentence)]


@app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Dataset; see 'coterie data list'.")],
    data_dir: FolderFlag = None,
    force: Annotated[bool, typer.Option("--force", help="Fetch again even if it is stored already.")] = False,
    json_: JsonFlag = False,
) -> None:
    """Fetch a dataset from Hugging Face into the data folder. The only command that uses the network."""
    from coterie.data.fetch import fetch as fetch_data

    with _bar(name, json_) as progress:
        found = fetch_data(name, data_dir, force=force, progress=progress)
    if json_:
        print(json.dumps({**found._asdict(), "path": str(found.path)}))
        return
    what = f"{found.path} ({found.samples:,} pictures, {size_text(found.size)})"
    state = "checksum correct" if found.sha256 else "without a checksum"
    print(f"{what} is already stored, {state}." if found.already else f"{what} fetched, sha256 {found.sha256}.")


@app.command("list")
def list_data(data_dir: FolderFlag = None, json_: JsonFlag = False) -> None:
    """List the stored datasets, and those that can be fetched."""
    from coterie.data.fetch import stored_sources
    from coterie.data.home import data_folder

    folder = data_folder(data_dir)
    rows = [_row(source, folder) for source in stored_sources()]
    if json_:
        print(json.dumps(rows))
        return
    heads = ("name", "form", "size", "about")
    cells = [
        (
            row["name"],
            row["form"] or "not stored",
            "" if row["bytes"] is None else size_text(row["bytes"]),
            row["about"],
        )
        for row in rows
    ]
    stdout().print(table_of(f"data in {folder}", heads, cells, text=heads))


app.command("show")(show)
app.command("check")(check)


def _row(source: StoredSource, folder: Path) -> dict[str, Any]:
    from coterie.data.fetch import RECIPES

    found = source.find(folder)
    return {
        "name": source.stem,
        "form": found.form if found else None,
        "path": str(found.path) if found else None,
        "bytes": found.size if found else None,
        "fetch": source.stem in RECIPES,
        "about": source.summary,
    }


@contextmanager
def _bar(name: str, quiet: bool) -> Iterator[Fetched]:
    """A progress bar if stderr is a terminal; during downloads the hub shows its own."""
    console = stderr()
    if quiet or not console.is_terminal:
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=console)
    task = bar.add_task(name, total=None)

    def advance(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        bar.stop()
