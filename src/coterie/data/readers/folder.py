"""Image folders with a csv: columns `file` and `label`, and optionally `user`, `group`, `is_train`.

File names are relative to the csv's folder. Labels are numbers or words.
"""

from __future__ import annotations

import csv
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.data.readers._files import indexed, invalid, must_exist
from coterie.data.readers._images import Size, pillow, read_image
from coterie.errors import ConfigError, DataError

_FLAGS = {**dict.fromkeys(("1", "true", "yes", "train"), True), **dict.fromkeys(("0", "false", "no", "test"), False)}
_MOST_CLASSES = 100_000  # larger numbers are ids: the network would need that many outputs
_COLUMNS = ("file", "label", "user", "group", "is_train")


class Images(NamedTuple):
    """Images and the columns of the csv; None for a missing column."""

    x: NDArray[np.uint8]  # [S, C, H, W]
    y: NDArray[np.int64]  # [S]
    class_names: tuple[str, ...]
    user: NDArray[np.int64] | None  # [S] index into user_names
    user_names: tuple[str, ...]
    group: NDArray[np.int64] | None  # [S] index into group_names
    group_names: tuple[str, ...]
    is_train: NDArray[np.bool_] | None  # [S]


def read_folder(path: Path, *, size: Size | None = None, channels: int | None = None) -> Images:
    """The images of a csv, or of the only csv in a folder.

    `size` (height, width) resizes all images; without it they must have the same size. `channels` is 1 (grey) or
    3 (colour), by default as in the first image.
    """
    if channels not in (None, 1, 3):
        raise ConfigError(f"channels must be 1 (grey) or 3 (colour). Got {channels!r} instead.")
    table = _only_csv(path)
    rows = _rows(table)
    x = _load(table, [row["file"] for row in rows], size, channels)
    y, class_names = _classes([row["label"] for row in rows], table)
    user, user_names = _optional(rows, "user")
    group, group_names = _optional(rows, "group")
    is_train = _flags(rows, table) if "is_train" in rows[0] else None
    return Images(x, y, class_names, user, user_names, group, group_names, is_train)


def _only_csv(path: Path) -> Path:
    if not path.is_dir():
        return must_exist(path, "csv file")
    found = sorted(path.glob("*.csv"))
    if len(found) != 1:
        raise DataError(f"{path} has {len(found)} csv files; give the path of one with the columns file and label.")
    return found[0]


def _rows(table: Path) -> list[dict[str, str]]:
    """Rows with the known columns; no cell is empty."""
    try:
        # utf-8-sig: spreadsheets write a byte order mark before the first column's name.
        with table.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream)
            names = [name for name in _COLUMNS if name in (reader.fieldnames or ())]
            rows = [{name: (row[name] or "").strip() for name in names} for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise invalid(table, f"is not a readable csv file: {error}", "save it as csv in UTF-8") from error
    for needed in ("file", "label"):
        if needed not in names:
            raise invalid(table, f"has no column '{needed}'", "its first line must name the columns file and label")
    if not rows:
        raise invalid(table, "lists no images", "add one line per image")
    for number, row in enumerate(rows, start=2):
        empty = [name for name in names if not row[name]]
        if empty:
            raise invalid(table, f"has an empty column '{empty[0]}' in row {number}", "fill it in or remove the row")
    return rows


def _load(table: Path, files: list[str], size: Size | None, channels: int | None) -> NDArray[np.uint8]:
    pillow()
    x: NDArray[np.uint8] | None = None
    for row, name in enumerate(files):
        # A csv must not read files outside its own folder.
        inside = PurePosixPath(name.replace("\\", "/"))
        if inside.is_absolute() or ".." in inside.parts:
            raise invalid(table, f"names the file '{name}'", "use files in the csv's folder")
        image = read_image(table.parent / inside, size=size, channels=channels if x is None else x.shape[1])
        if x is None:
            x = np.empty((len(files), *image.shape), np.uint8)
        if image.shape != x.shape[1:]:
            raise invalid(
                table.parent / inside,
                f"has {_shape(image.shape)} pixels but the images before it {_shape(x.shape[1:])}",
                "resize all with size=(height, width)",
            )
        x[row] = image
    assert x is not None  # `_rows` rejects empty lists
    return x


def _shape(shape: tuple[int, ...]) -> str:
    return f"{shape[1]}x{shape[2]}"


def _classes(labels: list[str], table: Path) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Class numbers are kept; words are numbered."""
    if not all(label.isascii() and label.isdigit() for label in labels):
        return indexed(np.array(labels))
    numbers = [int(label) for label in labels]
    if max(numbers) >= _MOST_CLASSES:
        raise invalid(table, f"has the class number {max(numbers)}", f"use numbers below {_MOST_CLASSES} or words")
    return np.array(numbers, dtype=np.int64), tuple(str(number) for number in range(max(numbers) + 1))


def _optional(rows: list[dict[str, str]], column: str) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    if column not in rows[0]:
        return None, ()
    return indexed(np.array([row[column] for row in rows]))


def _flags(rows: list[dict[str, str]], table: Path) -> NDArray[np.bool_]:
    odd = [row["is_train"] for row in rows if row["is_train"].lower() not in _FLAGS]
    if odd:
        raise invalid(table, f"has '{odd[0]}' in column 'is_train'", "write true or false")
    return np.array([_FLAGS[row["is_train"].lower()] for row in rows])
