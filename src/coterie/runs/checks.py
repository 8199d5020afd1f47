"""What was read is checked number by number: either it has the type and shape that it should, or it is left out.

Rows of rounds are the exception: a wrong one is an error, since curves with a hole in them would be believed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import RunError
from coterie.runs.files import first_line
from coterie.runs.metrics import METRICS, QUANTILES, SCORES

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Where the numbers of a round are in its row, beside its metrics.
FACTS: dict[str, tuple[str, ...]] = {
    "cohort": ("cohort",),
    "met": ("clients_met",),
    "failures": ("failures",),
    "down": ("bytes", "down"),
    "up": ("bytes", "up"),
    "start_bytes": ("bytes", "start"),
    "repair_bytes": ("bytes", "repair"),
    "train_seconds": ("seconds", "train"),
    "server_seconds": ("seconds", "server"),
    "evaluate_seconds": ("seconds", "evaluate"),
}


def columns_of(
    rows: list[Any], where: str
) -> tuple[Ints, dict[str, Floats], dict[str, Floats], list[list[int]], list[dict[str, Any]]]:
    """The rows as columns, every number checked."""
    rounds: list[int] = []
    places = {metric.key: metric.place for metric in METRICS.values() if not metric.of_run} | FACTS
    columns: dict[str, list[float]] = {name: [] for name in places}
    spread: dict[str, list[list[float]]] = {name: [] for name in SCORES}
    sizes: list[list[int]] = []
    repairs: list[dict[str, Any]] = []
    for number, row in enumerate(rows, 1):
        try:
            if not isinstance(row, dict) or not _is_int(row.get("round")) or row["round"] < 1:
                raise ValueError("it does not say its round")
            if rounds and row["round"] <= rounds[-1]:
                raise ValueError(f"round {row['round']} comes after round {rounds[-1]}")
            rounds.append(row["round"])
            for name, keys in places.items():
                columns[name].append(_number(row, keys))
            for name, values in spread.items():
                found = row.get("spread", {}).get(name)
                values.append(_five(found) if found is not None else [math.nan] * len(QUANTILES))
            found = row.get("cluster_sizes") or []
            if not isinstance(found, list) or not all(_is_int(size) and size >= 0 for size in found):
                raise ValueError(f"cluster_sizes is {str(found)[:40]!r}")
            sizes.append(found)
            for repair in records(row.get("repairs")):
                repairs.append({"round": row["round"], "reason": str(repair.get("reason", ""))})
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise RunError(f"{where} is damaged in line {number}: {first_line(error)}.") from error
    shape = (len(rows), len(QUANTILES))
    return (
        np.array(rounds, dtype=np.int64),
        {name: np.array(values, dtype=np.float64) for name, values in columns.items()},
        {name: np.array(values, dtype=np.float64).reshape(shape) for name, values in spread.items()},
        sizes,
        repairs,
    )


def _number(row: Mapping[str, Any], keys: tuple[str, ...]) -> float:
    """The number under these keys; NaN where it is not told or not finite."""
    found: Any = row
    for key in keys:
        if found is None:
            return math.nan
        if not isinstance(found, dict):
            raise ValueError(f"{'.'.join(keys)} is {str(found)[:40]!r}")
        found = found.get(key)
    if found is None:
        return math.nan
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise ValueError(f"{'.'.join(keys)} is {str(found)[:40]!r}")
    return float(found) if math.isfinite(found) else math.nan


def finite(found: Any) -> float | None:
    """A finite number; None if it is not one."""
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool) and math.isfinite(found)
    return float(found) if is_number else None


def _five(found: Any) -> list[float]:
    if not isinstance(found, list) or len(found) != len(QUANTILES):
        raise ValueError(f"spread is {str(found)[:40]!r}")
    return [_number({"spread": value}, ("spread",)) for value in found]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53


def is_flat(array: Any) -> bool:
    """Whether it is an array [n]."""
    return isinstance(array, np.ndarray) and array.ndim == 1


def is_table(array: Any, count: int) -> bool:
    """Whether it is an array of floats [count, ...] of two dimensions."""
    return (
        isinstance(array, np.ndarray)
        and array.ndim == 2
        and len(array) == count
        and np.issubdtype(array.dtype, np.floating)
    )


def is_whole(array: NDArray[Any]) -> bool:
    """Whether its numbers are whole."""
    return bool(np.issubdtype(array.dtype, np.integer))


def whole_numbers(array: Any, shape: tuple[int, ...]) -> Ints | None:
    """An array of whole numbers of this shape; None if it is not one."""
    if isinstance(array, np.ndarray) and array.shape == shape and is_whole(array):
        return array.astype(np.int64)
    return None


def client_names(manifest: Mapping[str, Any]) -> list[str]:
    """The names of a run that has not written its clients yet."""
    found, unseen = manifest.get("clients"), manifest.get("unseen")
    held_out = set(map(str, unseen)) if isinstance(unseen, list) else set()
    return [str(name) for name in found if str(name) not in held_out] if isinstance(found, list) else []


def scores_of(clients: Mapping[str, NDArray[Any]], count: int) -> dict[str, Floats]:
    """Scores of the last evaluation [N]; NaN for clients that were not scored."""
    samples = clients.get("samples")
    last: dict[str, Floats] = {}
    for name in SCORES:
        values = clients.get(name)
        if not isinstance(values, np.ndarray) or values.ndim != 2 or values.shape[1] != count or not len(values):
            continue
        if not np.issubdtype(values.dtype, np.number):
            continue
        scored = values[-1].astype(np.float64)
        if isinstance(samples, np.ndarray) and samples.shape == values.shape:
            scored = np.where(samples[-1] > 0, scored, np.nan)
        last[name] = np.where(np.isfinite(scored), scored, np.nan)
    return last


def held_counts(manifest: Mapping[str, Any], names: list[str]) -> Ints | None:
    """Training samples of each class at each client; clients that were held out are left out."""
    counts, everyone = manifest.get("label_counts"), manifest.get("clients")
    if not isinstance(counts, list) or not isinstance(everyone, list) or len(counts) != len(everyone):
        return None
    place = {str(name): i for i, name in enumerate(everyone)}
    try:
        table = np.array(counts, dtype=np.int64)
        rows = [place[name] for name in names]
    except (ValueError, TypeError, KeyError, OverflowError):
        return None
    return table[rows] if table.ndim == 2 and len(rows) else None


def member_pictures(arrays: Mapping[str, NDArray[Any]], count: int) -> dict[str, NDArray[Any]]:
    """Pictures of members, if all of it fits together."""
    pictures = arrays.get("picture")
    rest = {name: arrays.get(name) for name in ("client", "cluster", "label")}
    if not isinstance(pictures, np.ndarray) or pictures.ndim != 4 or pictures.dtype != np.uint8:
        return {}
    if pictures.shape[3] not in (1, 3) or not len(pictures):
        return {}
    found = {name: whole_numbers(values, (len(pictures),)) for name, values in rest.items()}
    client = found["client"]
    if client is None or any(values is None for values in found.values()) or client.min() < 0 or client.max() >= count:
        return {}
    return {"picture": pictures, **{name: values for name, values in found.items() if values is not None}}


def method_arrays(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """What the method shows, if its shapes fit together: MD-ICFL's maps and pseudo samples."""
    told = arrays.get("told")
    if not isinstance(told, np.ndarray) or told.ndim != 4 or told.dtype.kind != "f" or not told.size:
        return {}
    clusters, others, classes, again = told.shape
    if clusters != others or classes != again:
        return {}
    found = {"told": np.nan_to_num(told.astype(np.float64))}
    witness, pseudo = arrays.get("witness"), arrays.get("pseudo")
    if isinstance(witness, np.ndarray) and witness.shape == (clusters, classes, classes) and witness.dtype.kind == "f":
        found["witness"] = np.nan_to_num(witness.astype(np.float64))
    if (
        isinstance(pseudo, np.ndarray)
        and pseudo.dtype == np.uint8
        and pseudo.ndim == 6
        and pseudo.shape[:2] == (clusters, classes)
        and pseudo.shape[5] in (1, 3)
        and pseudo.size
    ):
        found["pseudo"] = pseudo
    return found


def records(found: Any) -> list[dict[str, Any]]:
    """The objects of a list; none if it is no list."""
    return [item for item in found if isinstance(item, dict)] if isinstance(found, Iterable) else []
