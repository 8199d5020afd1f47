"""Image folders: with a csv, or with a folder for each class.

A csv has the columns `file` and `label`, and optionally `user`, `group` and `is_train` or `split`; file names are
relative to its folder. Without a csv, the folders are class/, user/class/, or train/class/ beside test/class/. Labels
are numbers or words.
"""

from __future__ import annotations

import csv
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.data.columns import as_splits
from coterie.data.readers._files import indexed, invalid, must_exist
from coterie.data.readers._images import Size, pillow, read_image
from coterie.data.values import MOST_CLASSES
from coterie.errors import ConfigError, DataError

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm")
_SPLITS = ("train", "valid", "validation", "val", "test")
_COLUMNS = ("file", "label", "user", "group", "is_train", "split")


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
    is_valid: NDArray[np.bool_] | None = None  # [S]


def read_folder(path: Path, *, size: Size | None = None, channels: int | None = None) -> Images:
    """The images of a csv, or of a folder.

    `size` (height, width) resizes all images; without it they must have the same size. `channels` is 1 (grey) or
    3 (colour), by default as in the first image.
    """
    if channels not in (None, 1, 3):
        raise ConfigError(f"channels must be 1 (grey) or 3 (colour). Got {channels!r} instead.")
    rows = image_list(path)
    x = _load(path, [row["file"] for row in rows], size, channels)
    y, class_names = _classes([row["label"] for row in rows], path)
    user, user_names = _optional(rows, "user")
    group, group_names = _optional(rows, "group")
    column = next((name for name in ("split", "is_train") if name in rows[0]), None)
    flags = (None, None) if column is None else as_splits(np.array([row[column] for row in rows]), str(path))
    return Images(x, y, class_names, user, user_names, group, group_names, *flags)


def image_list(path: Path) -> list[dict[str, str]]:
    """The images of a csv or a folder: file (relative to the folder), label, and the other columns. None is opened."""
    if not path.is_dir():
        return _rows(must_exist(path, "csv file"))
    found = sorted(path.glob("*.csv"))
    if not found:
        return _in_folders(path)
    if len(found) > 1:
        raise DataError(f"{path} has {len(found)} csv files; give the path of one with the columns file and label.")
    return _rows(found[0])


def _in_folders(root: Path) -> list[dict[str, str]]:
    """The images below a folder, in order of their names: class/, user/class/ or split/class/."""
    files = sorted(path.relative_to(root) for path in root.rglob("*") if path.suffix.lower() in _SUFFIXES)
    files = [file for file in files if not any(part.startswith(".") for part in file.parts)]
    depths = {len(file.parts) for file in files}
    if depths not in ({2}, {3}):
        why = f"has images in folders of different depths, such as {files[0]}" if files else "has no images"
        raise invalid(root, why, "put them into class/ or user/class/ folders, or add a csv with file and label")
    if depths == {2}:
        return [{"file": file.as_posix(), "label": file.parts[0]} for file in files]
    first = "split" if all(file.parts[0] in _SPLITS for file in files) else "user"
    return [{"file": file.as_posix(), "label": file.parts[1], first: file.parts[0]} for file in files]


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


def _load(path: Path, files: list[str], size: Size | None, channels: int | None) -> NDArray[np.uint8]:
    pillow()
    folder = path if path.is_dir() else path.parent
    x: NDArray[np.uint8] | None = None
    for row, name in enumerate(files):
        # A csv must not read files outside its own folder.
        inside = PurePosixPath(name.replace("\\", "/"))
        if inside.is_absolute() or ".." in inside.parts:
            raise invalid(path, f"names the file '{name}'", "use files in the csv's folder")
        image = read_image(folder / inside, size=size, channels=channels if x is None else x.shape[1])
        if x is None:
            x = np.empty((len(files), *image.shape), np.uint8)
        if image.shape != x.shape[1:]:
            raise invalid(
                folder / inside,
                f"has {_shape(image.shape)} pixels but the images before it {_shape(x.shape[1:])}",
                "resize all with --set dataset.size=[HEIGHT,WIDTH]",
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
    if max(numbers) >= MOST_CLASSES:
        raise invalid(table, f"has the class number {max(numbers)}", f"use numbers below {MOST_CLASSES} or words")
    return np.array(numbers, dtype=np.int64), tuple(str(number) for number in range(max(numbers) + 1))


def _optional(rows: list[dict[str, str]], column: str) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    if column not in rows[0]:
        return None, ()
    return indexed(np.array([row[column] for row in rows]))
