"""Named columns as inputs and labels: of a pandas table, a Hugging Face dataset, a csv or parquet file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import DataError

_SPLITS = {
    **dict.fromkeys(("train", "training", "true", "yes", "1"), "train"),
    **dict.fromkeys(("valid", "validation", "val"), "valid"),
    **dict.fromkeys(("test", "testing", "false", "no", "0"), "test"),
}

Columns = Mapping[str, NDArray[Any]]  # [S, ...] each
LABEL = "label"  # the name of the label column, unless another is given


def label_column(columns: Columns, label: str, where: str, how: str) -> NDArray[Any]:
    """The column of labels; `how` says how another one is named."""
    if label in columns:
        return columns[label]
    raise DataError(f"{where} has no column '{label}' (it has {_listed(list(columns))}); name the labels with {how}.")


def as_numbers(values: NDArray[Any]) -> NDArray[Any]:
    """A column of words as integers or floats, if all of its cells are numbers; an empty cell is NaN."""
    if values.dtype.kind != "U":
        return values
    filled = np.where(values == "", "nan", values)
    for kind in (np.int64, np.float64):
        try:
            return filled.astype(kind)
        except (ValueError, OverflowError):
            continue
    return values


def as_labels(values: NDArray[Any], kind: str, where: str) -> NDArray[Any]:
    """A column of labels: "classes" are words, "numbers" are floats, "auto" keeps integers, floats and words."""
    if values.dtype.kind == "U" and (values == "").any():
        row = int(np.flatnonzero(values == "")[0]) + 1
        raise DataError(f"{where}: the label of sample {row} is empty; fill it in or remove the sample.")
    if kind == "classes":
        return values.astype(np.str_)
    numbers = as_numbers(values)
    if kind == "auto":
        is_signed = numbers.dtype.kind == "i" and bool((numbers < 0).any())
        return values.astype(np.str_) if is_signed else numbers  # -1 and 1 are names of two classes
    if numbers.dtype.kind not in "fiub":
        raise DataError(f"{where}: labels must be numbers. Got words ('{values[0]}' ...) instead.")
    return numbers.astype(np.float32)


def as_splits(values: NDArray[Any], where: str) -> tuple[NDArray[np.bool_], NDArray[np.bool_] | None]:
    """Which samples are not for testing, and which of those are for validation; None if none are."""
    words = [_SPLITS.get(str(value).strip().lower()) for value in values.tolist()]
    if None in words:
        odd = values[words.index(None)]
        raise DataError(f"{where} has '{odd}' in its column of splits; write train, valid or test.")
    found = np.array(words)
    is_valid = found == "valid"
    return found != "test", is_valid if is_valid.any() else None


def features_of(columns: Columns, where: str, way_out: str = "leave it out") -> NDArray[Any]:
    """All columns side by side [S, F]; a single column may have more axes, such as pictures or token ids.

    `way_out` says how a column that holds no numbers is left out; NAME in it is that column.
    """
    if not columns:
        raise DataError(f"{where} has no columns besides the labels; add the features as columns of numbers.")
    if len(columns) == 1:
        only = next(iter(columns.values()))
        if only.ndim > 1 and only.dtype.kind in "fiub":
            return only
    for name, values in columns.items():
        if values.ndim != 1 or values.dtype.kind not in "fiub":
            what = (
                f"words ('{values[0]}' ...)" if values.dtype.kind in "US" else f"{values.dtype} of shape {values.shape}"
            )
            how = way_out.replace("NAME", name)
            raise DataError(f"{where}: column '{name}' holds {what}; write it as numbers, or {how}.")
        missing = np.flatnonzero(~np.isfinite(values.astype(np.float64)))
        if len(missing):
            raise DataError(
                f"{where}: column '{name}' is empty or not finite in sample {missing[0] + 1}; fill it in or remove it."
            )
    integers = all(values.dtype.kind in "iu" for values in columns.values())
    return np.column_stack([values.astype(np.int64 if integers else np.float32) for values in columns.values()])


def _listed(names: list[str]) -> str:
    return ", ".join(names[:12]) + (" ..." if len(names) > 12 else "")
