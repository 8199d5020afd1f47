"""`coterie data fetch`, `list`: what is in the data folder, and getting what is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from coterie.cli.output import megabytes, stderr, stdout
from coterie.data import fetch as fetching
from coterie.data.dataset import source_class
from coterie.data.fetch import RECIPES, IdxRecipe, Recipe
from coterie.data.sources.sign import Sign
from coterie.data.sources.stored import StoredSource, data_folder

data_app = typer.Typer(help="The data folder: what is there, and getting what is not.", no_args_is_help=True)

FolderFlag = Annotated[
    Path | None, typer.Option("--data-dir", help="The data folder; by default COTERIE_DATA, else ~/.cache/coterie.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]


@data_app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="Which dataset; 'coterie data list' has the names.")],
    data_dir: FolderFlag = None,
    force: Annotated[bool, typer.Option("--force", help="Fetch again what is there already.")] = False,
    json_: JsonFlag = False,
) -> None:
    """Fetch a dataset from Hugging Face into the data folder. The only command that uses the network."""
    with _bar(name, json_) as progress:
        found = fetching.fetch(name, data_dir, force=force, progress=progress)
    if json_:
        print(json.dumps({**found._asdict(), "path": str(found.path)}))
        return
    what = f"{found.path} ({found.samples:,} pictures, {megabytes(found.size)})"
    state = "checksum right" if found.sha256 else "no checksum beside it"
    print(f"{what} is already there, {state}." if found.already else f"{what} is fetched, sha256 {found.sha256}.")


@data_app.command("list")
def list_data(data_dir: FolderFlag = None, json_: JsonFlag = False) -> None:
    """List the stored sources: which are there, in which form, how large."""
    folder = data_folder(data_dir)
    rows = [_row(source, folder) for source in stored_sources()]
    if json_:
        print(json.dumps(rows))
        return
    table = Table(title=f"data in {folder}", title_justify="left")
    table.add_column("name", style="bold", no_wrap=True)
    for column in ("form", "size", "about"):
        table.add_column(column)
    for row in rows:
        size = "" if row["bytes"] is None else megabytes(row["bytes"])
        table.add_row(row["name"], row["form"] or "not there", size, row["about"])
    stdout().print(table)


def stored_sources() -> list[StoredSource]:
    """Every stored source, EMNIST once for each of its divisions."""
    plain = [source_class(name)() for name, recipe in RECIPES.items() if isinstance(recipe, Recipe)]
    emnist = [recipe.source for recipe in RECIPES.values() if isinstance(recipe, IdxRecipe)]
    found = [source for source in (*plain, *emnist, Sign()) if isinstance(source, StoredSource)]
    return sorted(found, key=lambda source: source.stem)


def _row(source: StoredSource, folder: Path) -> dict[str, Any]:
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
def _bar(name: str, quiet: bool) -> Iterator[fetching.Progress]:
    """A bar on stderr where it is a terminal; before it, the hub shows bars of its own while it downloads."""
    console = stderr()
    if quiet or not console.is_terminal:
        yield lambda done, total: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Bar(*columns, console=console)
    task = bar.add_task(name, total=None)

    def show(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        bar.stop()
