"""LEAF's json files (Caldas et al., 2018): FEMNIST by writer, CelebA by person.

A file has `users`, `num_samples` and `user_data` {user: {x, y}}. A path is a folder of such files, or one with
`train` and `test` (or `all_data`) in it, as written by LEAF's preprocessing. Files are read one at a time, and
each user's floats are converted to bytes as soon as they are parsed: FEMNIST takes its 630 MB plus one file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.data.readers._files import check_classes, damaged, invalid, join, must_exist
from coterie.data.readers._images import pillow, read_image
from coterie.errors import DataError

_CLASSES = {"femnist": 62, "celeba": 2}


class Leaf(NamedTuple):
    """Samples by user, with the official split if there is one."""

    x: NDArray[np.uint8]  # [S, 28, 28] or [S, 3, H, W]
    y: NDArray[np.int64]  # [S]
    user: NDArray[np.int64]  # [S] index into user_names
    user_names: tuple[str, ...]
    is_train: NDArray[np.bool_] | None  # [S]; None: no split


class _User(NamedTuple):
    """The samples of one user in one file."""

    x: Any
    y: NDArray[np.int64]


class _BadUser(ValueError):
    """A user's samples are invalid; the text says why."""


Convert = Callable[[list[Any]], Any]


def read_femnist(path: Path) -> Leaf:
    """FEMNIST, 62 classes: images as uint8 [S, 28, 28], dark on white (255) as in LEAF's files."""
    parts, found = _collect(path, _pixels, _CLASSES["femnist"])
    return found._replace(x=join(parts, (28, 28), np.uint8))


def read_celeba(path: Path, images: Path, *, size: int = 84) -> Leaf:
    """CelebA, smiling or not: the images in the folder `images` as uint8 [S, 3, size, size].

    LEAF's network takes 84x84, which is 4.2 GB for all 200,288 images; 32x32 takes 0.6 GB.
    """
    pillow()  # fail now if it is missing: parsing the json takes minutes
    if not images.is_dir():
        raise DataError(f"There is no folder {images}; give the folder of CelebA's images (img_align_celeba).")
    parts, found = _collect(path, _file_names, _CLASSES["celeba"])
    files = [name for part in parts for name in part]
    x = np.empty((len(files), 3, size, size), np.uint8)
    for row, name in enumerate(files):
        x[row] = read_image(images / name, size=(size, size), channels=3)
    return found._replace(x=x)


def _collect(path: Path, convert: Convert, num_classes: int) -> tuple[list[Any], Leaf]:
    """Samples of all files in order: a list of x by user and file, and the other columns, concatenated."""
    number_of: dict[str, int] = {}
    parts: list[Any] = []
    labels, counts, owners, flags = [], [], [], []
    split, files = _find(path)
    for file, in_train in files:
        for name, samples in _read_file(file, convert):
            check_classes(samples.y, num_classes, file)
            parts.append(samples.x)
            labels.append(samples.y)
            counts.append(len(samples.y))
            owners.append(number_of.setdefault(name, len(number_of)))
            flags.append(in_train)
    if not sum(counts):
        raise DataError(f"{path} has no samples; run LEAF's preprocess.sh again.")
    user = np.repeat(np.array(owners, np.int64), counts)
    is_train = np.repeat(np.array(flags, bool), counts) if split else None
    return parts, Leaf(np.empty(0, np.uint8), np.concatenate(labels), user, tuple(number_of), is_train)


def _find(path: Path) -> tuple[bool, list[tuple[Path, bool]]]:
    """Whether there is a split, and the files, each with whether it is training data."""
    for folder in (path, path / "data"):
        if folder.is_file():
            return False, [(folder, True)]
        both = [_json_files(folder / "train"), _json_files(folder / "test")]
        if all(both):
            return True, [(file, part == 0) for part in range(2) for file in both[part]]
        for place in (folder, folder / "all_data"):
            if files := _json_files(place):
                return False, [(file, True) for file in files]
        if any(both):
            lost = "test" if both[0] else "train"
            raise DataError(f"{folder} has no json files in '{lost}'; run LEAF's preprocess.sh again.")
    raise DataError(
        f"There are no LEAF json files in {path}; give the folder written by LEAF's preprocess.sh, "
        "with *.json or with train/*.json and test/*.json."
    )


def _json_files(folder: Path) -> list[Path]:
    """Json files in natural order: all_data_10 comes after all_data_9."""

    def order(file: Path) -> list[int | str]:
        return [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", file.name)]

    return sorted(folder.glob("*.json"), key=order)


def _read_file(file: Path, convert: Convert) -> Iterator[tuple[str, _User]]:
    content = _parse(file, convert)
    missing = [key for key in ("users", "user_data") if key not in content]
    if missing or not isinstance(content["users"], list) or not isinstance(content["user_data"], dict):
        raise invalid(file, "is not a LEAF file: it needs 'users' and 'user_data'", "give LEAF's own json files")
    counts = content.get("num_samples")
    for position, name in enumerate(content["users"]):
        samples = content["user_data"].pop(str(name), None)
        if not isinstance(samples, _User):
            raise invalid(file, f"has no samples (x and y) of user '{name}'", "run LEAF's preprocess.sh again")
        if isinstance(counts, list) and (position >= len(counts) or counts[position] != len(samples.y)):
            raise invalid(file, f"has {len(samples.y)} samples of user '{name}' but num_samples says otherwise")
        yield str(name), samples


def _parse(file: Path, convert: Convert) -> dict[str, Any]:
    def shrink(pairs: list[tuple[str, Any]]) -> Any:
        """Called for each parsed object: frees a user's millions of floats at once."""
        found = dict(pairs)
        if isinstance(found.get("x"), list) and isinstance(found.get("y"), list):
            return _user(found["x"], found["y"], convert)
        return found

    try:
        content = json.loads(must_exist(file, "LEAF file").read_text(encoding="utf-8"), object_pairs_hook=shrink)
    except _BadUser as error:
        raise invalid(file, error) from error
    except (ValueError, RecursionError) as error:  # not json or not text
        raise damaged(file, error) from error
    return content if isinstance(content, dict) else {}


def _user(x: list[Any], y: list[Any], convert: Convert) -> _User:
    if len(x) != len(y):
        raise _BadUser(f"has a user with {len(x)} samples but {len(y)} labels")
    if not all(type(label) is int and abs(label) < 1 << 62 for label in y):
        raise _BadUser("has labels that are not integers")
    return _User(convert(x), np.array(y, dtype=np.int64))


def _pixels(x: list[Any]) -> NDArray[np.uint8]:
    """Rows of 784 floats in 0 ... 1 -> uint8 [n, 28, 28]."""
    try:
        values = np.array(x, dtype=np.float32).reshape(len(x), 784)
    except (ValueError, TypeError, OverflowError) as error:
        raise _BadUser("has samples that are not 784 numbers each") from error
    if not (np.isfinite(values).all() and values.min(initial=0) >= 0 and values.max(initial=0) <= 1):
        raise _BadUser("has pixels outside 0 ... 1")
    return np.rint(values * 255).astype(np.uint8).reshape(-1, 28, 28)


def _file_names(x: list[Any]) -> list[str]:
    """Image names, which must not lead out of the image folder."""
    for name in x:
        if not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise _BadUser(f"has {str(name)[:80]!r} instead of an image name")
    return x
