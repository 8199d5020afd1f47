"""Values as users have them, as tensors: inputs and how they are scaled, classes and targets.

Every way in uses these rules: files, `Federation.from_clients`, the data of a site.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.readers._files import indexed
from coterie.errors import DataError

GREY = 127.5  # networks get (x - 127.5) / 127.5 for bytes: -1 ... 1
MOST_CLASSES = 100_000
_SUMS_TO_ONE = 1e-3  # probabilities of float32

Scale = float | tuple[float, ...]  # one number, or one for each feature


class Inputs(NamedTuple):
    """Inputs as they are stored: networks get (x - mean) / std."""

    x: Tensor  # uint8 [S, ...], int64 [S, ...] or float32 [S, ...]
    mean: float
    std: float


class Targets(NamedTuple):
    """Classes, or numbers."""

    y: Tensor  # int64 [S], or float32 [S] or [S, d]
    num_classes: int  # 0: targets are numbers
    class_names: tuple[str, ...] = ()  # where labels were words


def array_of(values: Any) -> NDArray[Any]:
    """Values of numpy, torch, pandas or a list as an array; a list of words becomes an array of words."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        plain: NDArray[Any] = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
        return plain
    found = np.asarray(values)
    if found.dtype.kind == "O":  # words of pandas, or numbers that may be missing
        found = np.array(found.tolist())
    return found


def inputs_of(x: NDArray[Any], where: str) -> Inputs:
    """Inputs [S, ...]: bytes are pixels, with channels first, other integers stay integers, the rest is float32.

    `where` begins the sentence of an error: a file or a client.
    """
    if x.ndim < 2:
        raise DataError(f"{where}: x must have shape [samples, ...] with at least two axes. Got {x.shape} instead.")
    if x.dtype == np.uint8:
        if x.ndim == 3:
            x = x[:, None]
        elif x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
            x = x.transpose(0, 3, 1, 2)
        return Inputs(_tensor(x), GREY, GREY)
    if x.dtype.kind in "iu":
        return Inputs(_tensor(x, np.int64), 0.0, 1.0)
    if x.dtype.kind not in "fb":
        raise DataError(f"{where}: x must contain numbers. Got {x.dtype} instead.")
    return Inputs(_tensor(x, np.float32), 0.0, 1.0)


def targets_of(y: NDArray[Any], where: str) -> Targets:
    """Labels [S]: integers and words are classes, floats are targets; rows [S, L] with a single 1 are classes too.

    Rows of probabilities [S, L] (soft labels) are targets: cross-entropy takes them, and they have no accuracy.
    """
    if not y.ndim:
        raise DataError(f"{where}: y must have one label per sample. Got {y.dtype} without an axis instead.")
    if y.dtype.kind in "US" and y.ndim == 1:
        classes, names = indexed(y)
        return Targets(torch.from_numpy(classes), max(1, len(names)), names)
    if y.dtype.kind not in "iubf":
        raise DataError(f"{where}: y must contain classes (integers or words) or float targets. Got {y.dtype} instead.")
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise DataError(f"{where}: y has NaN or infinite values; remove them before training.")
    if y.ndim == 2 and y.shape[1] > 1 and _is_one_hot(y):
        return Targets(torch.from_numpy(y.argmax(1).astype(np.int64)), y.shape[1])
    if y.dtype.kind == "f":
        return Targets(_tensor(y, np.float32), 0)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise DataError(
            f"{where}: y must have one class per sample. Got shape {y.shape} instead, "
            "whose rows do not have a single 1 each; for several targets use floats and --loss mse."
        )
    count = int(y.max()) + 1 if len(y) else 1
    if count > MOST_CLASSES:  # ids: the network would need that many outputs
        way_out = f"use numbers below {MOST_CLASSES}, or floats and --loss mse"
        raise DataError(f"{where}: y has the class number {count - 1}; {way_out}.")
    return Targets(_tensor(y, np.int64), count)


def check_finite(x: Tensor, where: str) -> None:
    """Raise DataError if inputs are not finite."""
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        raise DataError(f"{where}: x has NaN or infinite values; remove them before training.")


def label_kind(y: NDArray[Any]) -> str:
    """What labels are, in words; labels of two clients must be of one kind."""
    kind = {"f": "floats", "U": "words", "S": "words"}.get(y.dtype.kind, "integers" if y.dtype.kind in "iub" else "")
    return f"{kind or y.dtype} of shape {y.shape[1:]}" if y.ndim > 1 else kind or str(y.dtype)


def are_probabilities(y: Tensor) -> bool:
    """Whether targets are rows of probabilities [S, L]: soft labels."""
    if y.dim() != 2 or y.shape[1] < 2 or not y.is_floating_point():
        return False
    return bool((y >= 0).all()) and bool(((y.double().sum(1) - 1).abs() < _SUMS_TO_ONE).all())


def standard_scale(x: Tensor) -> tuple[Scale, Scale]:
    """Mean and deviation of samples: of each feature [S, F], or one of all numbers for other shapes.

    A feature that does not vary has deviation 1.
    """
    numbers = x.double() if x.dim() == 2 else x.double().reshape(-1, 1)
    mean, std = numbers.mean(0), numbers.std(0, correction=0)
    std = torch.where(std > 0, std, torch.ones_like(std))
    means, stds = ([float(value) for value in values.float()] for values in (mean, std))
    return (tuple(means), tuple(stds)) if x.dim() == 2 else (means[0], stds[0])


def scaling_in_words(dtype: torch.dtype, mean: Scale, std: Scale) -> str:
    """How inputs are scaled before a network gets them.

    >>> scaling_in_words(torch.uint8, 127.5, 127.5), scaling_in_words(torch.float32, 0.0, 1.0)
    ('uint8 pixels: x / 127.5 - 1', 'float32 numbers, not scaled')
    """
    kind = {torch.uint8: "uint8 pixels", torch.int64: "integers"}.get(dtype, "float32 numbers")
    if isinstance(mean, tuple):
        return f"{kind}: (x - mean) / deviation, by feature over the training samples"
    if (mean, std) == (0.0, 1.0):
        return f"{kind}, not scaled"
    if mean == std:
        return f"{kind}: x / {std:g} - 1"
    return f"{kind}: x / {std:g}" if mean == 0.0 else f"{kind}: (x - {mean:g}) / {std:g}"


def _is_one_hot(y: NDArray[Any]) -> bool:
    return bool(((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all())


def _tensor(values: NDArray[Any], dtype: Any = None) -> Tensor:
    """A tensor of its own; torch cannot take arrays that are read-only or run backwards."""
    found = np.ascontiguousarray(values, dtype=dtype)
    return torch.from_numpy(found if found.flags.writeable else found.copy())
