"""Tables in files: csv by Python's own reader, parquet by pyarrow (the optional extra `data`)."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.readers._files import damaged, invalid, must_exist
from coterie.errors import MissingExtra

SUFFIXES = (".csv", ".tsv", ".parquet")
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}


def read_table(path: Path) -> dict[str, NDArray[Any]]:
    """The columns of a file by name; those of a csv are words."""
    must_exist(path, "table")
    return _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)


def column_names(path: Path) -> list[str]:
    """The names of the columns, without reading them."""
    must_exist(path, "table")
    if path.suffix != ".parquet":
        return _csv_rows(path, only_names=True)[0]
    try:
        names: list[str] = _parquet().read_schema(path).names
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error
    return names


def _read_csv(path: Path) -> dict[str, NDArray[Any]]:
    names, *rows = _csv_rows(path)
    if not rows:
        raise invalid(path, "has no rows", "add one line per sample")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(names):
            raise invalid(path, f"has {len(row)} cells in row {number} but {len(names)} columns", "repair the row")
    columns = zip(*rows, strict=True)
    return {name: np.array([cell.strip() for cell in cells]) for name, cells in zip(names, columns, strict=True)}


def _csv_rows(path: Path, only_names: bool = False) -> list[list[str]]:
    """The names of the columns, then the rows."""
    try:
        # utf-8-sig: spreadsheets write a byte order mark before the first column's name.
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, delimiter="\t" if path.suffix == ".tsv" else ",")
            names = [name.strip() for name in next(reader, [])]
            rows = [] if only_names else [row for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise invalid(path, f"is not a readable csv file: {error}", "save it as csv in UTF-8") from error
    if len(names) == 1 and (other := next((sign for sign in _OTHER_SEPARATORS if sign in names[0]), None)):
        how = "save it with commas" + (", or call it .tsv" if other == "\t" else "")
        raise invalid(path, f"separates its columns by {_OTHER_SEPARATORS[other]}", how)
    if not all(names) or not names:
        raise invalid(path, "has a column without a name", "its first line must name the columns")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise invalid(path, f"has two columns named '{twice[0]}'", "its first line must name each column once")
    return [names, *rows]


def _read_parquet(path: Path) -> dict[str, NDArray[Any]]:
    module = _parquet()
    try:
        table = module.read_table(path)
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error
    found = {}
    for name in table.column_names:
        values = table.column(name).to_numpy(zero_copy_only=False)
        try:
            found[name] = np.array(values.tolist()) if values.dtype.kind == "O" else values
        except ValueError as error:
            raise invalid(path, f"has rows of different lengths in column '{name}'", "pad them") from error
    return found


def _parquet() -> Any:
    """The module pyarrow.parquet."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("Reading .parquet files", "data") from error
    return pyarrow.parquet
