"""Checks of what was read from a run folder.

An array or a list of the wrong type or shape is left out. A wrong row of rounds.jsonl is an error: readers would
believe a curve with a gap in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import CheckpointError, RunError
from coterie.runs.files import Files, reason
from coterie.runs.metrics import METRICS, QUANTILES, SCORES

if TYPE_CHECKING:  # readers of folders do not wait for torch
    from coterie.data.federation import Federation

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Arrays = Mapping[str, NDArray[Any]]

# Where the numbers of a round are in its row, besides its metrics.
FACTS: dict[str, tuple[str, ...]] = {
    "cohort": ("cohort",),
    "met": ("clients_met",),
    "failures": ("failures",),
    "down": ("bytes", "down"),
    "up": ("bytes", "up"),
    **{f"{phase}_bytes": ("bytes", phase) for phase in ("start", "repair")},
    **{f"{phase}_seconds": ("seconds", phase) for phase in ("train", "server", "evaluate")},
}


# ---- settings ----


def check_settings(stored: Any, now: Mapping[str, Any], where: object, override: bool) -> None:
    """Raise if settings are not those of a checkpoint; each difference is named."""
    if override or not isinstance(stored, dict):
        return
    before, after = (
        {(name, key): value for name, table in found.items() for key, value in _items(table)}
        for found in (stored, plain_settings(now))
    )
    told = [
        f"{table}.{key} was {_shown(before, (table, key))} and is {_shown(after, (table, key))}"
        for table, key in sorted({*before, *after})
        if before.get((table, key), ...) != after.get((table, key), ...)
    ]
    if told:
        raise RunError(
            f"The settings of {where} were changed since its last checkpoint: {'; '.join(told)}. Restore them, or say "
            "--override (in Python override=True) to use the new ones."
        )


def check_same(
    path: Path,
    there: Mapping[str, Any],
    here: Mapping[str, Any],
    defaults: Mapping[str, Mapping[str, Any]],
    ignored: Collection[str],
    option: str,
) -> None:
    """Raise if the settings in a folder are not those asked for; `ignored` are fields of [run] that may differ.

    A field that an earlier version did not write has its default there (`defaults`, by table).
    """
    for table in here:
        own, other, usual = here[table], there.get(table, {}), defaults.get(table, {})
        for key in sorted({*own, *other} - ({*ignored} if table == "run" else set())):
            before = other.get(key, usual.get(key))
            if own.get(key) != before:
                raise RunError(
                    f"{path} has other settings: {table}.{key} is {before!r} there and {own.get(key)!r} here. "
                    f"Choose another {option}, or give the settings of the first command."
                )


def plain_settings(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a checkpoint stores them, in JSON."""
    found: dict[str, Any] = json.loads(json.dumps(tables, default=str))
    return found


def _items(table: Any) -> Iterable[tuple[str, Any]]:
    return table.items() if isinstance(table, dict) else ()  # the schema is no table


def _shown(values: Mapping[tuple[str, str], Any], place: tuple[str, str]) -> str:
    return repr(values[place])[:80] if place in values else "missing"


# ---- data ----


def check_data(folder: Files, federation: Federation, digest: str, place: str | None) -> None:
    """Raise if the data is not that of the run in a folder; says what differs. `place` is the user's file."""
    before = folder.read_object("environment.json") or {}
    if before.get("digest") == digest:
        return
    now = federation.manifest()
    stored = folder.read_object("artifacts/manifest.json") or {}
    which = place if place is not None else f"The data of {folder.path}"
    raise RunError(
        f"{which} has changed since the run in {folder.path} began: {difference(stored, now)}. Restore it, or name the "
        "right file with --data PATH."
    )


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between the data of two manifests, in words.

    >>> difference({"clients": ["a", "b"]}, {"clients": ["a"]})
    "client 'b' is missing"
    """
    try:
        old, new = list(before.get("clients", [])), list(now["clients"])
        for words, names in (("is missing", set(old) - set(new)), ("is new", set(new) - set(old))):
            if names:
                more = f", and {len(names) - 1} more" if len(names) > 1 else ""
                return f"client '{min(names)}' {words}{more}"
        if old != new:
            return "the clients are in another order"
        told = []
        for split in ("train", "valid", "test"):
            told += [
                f"client '{name}' has {b} {split} samples, not {a}"
                for name, a, b in zip(old, before[split], now[split], strict=True)
                if a != b
            ]
        classes = [len((found["label_counts"] or [[]])[0]) for found in (before, now)]
        if classes[0] != classes[1]:
            told.insert(0, f"it has {classes[1]} classes, not {classes[0]}")
        if not told and classes[0]:
            told = [
                f"client '{name}' has {b} training samples of class {place}, not {a}"
                for name, x, y in zip(old, before["label_counts"], now["label_counts"], strict=True)
                for place, (a, b) in enumerate(zip(x, y, strict=True))
                if a != b
            ]
        if told:
            return told[0] + (f", and {len(told) - 1} more such differences" if len(told) > 1 else "")
        for key in ("groups", "views", "moves", "reserved"):
            if before.get(key) != now[key]:
                return f"its {key} are others"
    except (KeyError, TypeError, ValueError, AttributeError):
        return "it cannot be compared"
    return "sizes and labels are the same, but values of samples differ"


# ---- checkpoints ----


def unfit(where: object, round: int, why: object) -> CheckpointError:
    """The error of a checkpoint that is intact, but not one of this run."""
    return CheckpointError(
        f"The checkpoint of round {round} in {where} does not fit the run ({str(why)[:200]}). Remove its folder to go "
        "back to the one before."
    )


def check_checkpoint(
    tensors: Mapping[str, Any], plain: Mapping[str, Any], round: int, clients: int, where: object
) -> None:
    """Raise unless a checkpoint has all parts of a run with this many clients, in their types and shapes."""
    try:
        _is(plain, state=dict, ledger=dict, failures=list, score_rounds=list, seconds=dict, notes=list, rows_bytes=int)
        _is(plain["state"], repairs=list, decisions=list)
        if not all(isinstance(entry, dict) for entry in (*plain["state"]["repairs"], *plain["state"]["decisions"])):
            raise ValueError("a repair or decision is not one")
        if plain.get("round") != round or not 0 <= plain["rows_bytes"] < 1 << 53:
            raise ValueError("it is of another round")
        _is(plain["seconds"], start=_NUMBER, train=_NUMBER, server=_NUMBER, evaluate=_NUMBER)
        for entry in plain["ledger"].values():
            if not isinstance(entry, dict) or not all(type(count) is int for count in entry.values()):
                raise ValueError("the ledger is not of numbers")
        if (released := plain.get("released")) is not None:
            _is(released, counts=list, noised=list, exact=list)
            if len(released["counts"]) > clients or not all(map(_is_count, released["counts"])):
                raise ValueError("released.counts are not those of clients")
            if not all(isinstance(name, str) for name in released["noised"] + released["exact"]):
                raise ValueError("released names are not texts")
        for failure in plain["failures"]:
            if not isinstance(failure, dict) or set(failure) != {"round", "client", "step", "reason"}:
                raise ValueError("a failure is not one")
        if not all(isinstance(note, str) for note in plain["notes"]):
            raise ValueError("a note is not a text")
        if not all(_is_count(number) for number in plain["score_rounds"]):
            raise ValueError("score_rounds are not numbers")
        if (other := plain.get("other")) is not None:
            _is(other, round=int, state=dict)
            if not 1 <= other["round"] <= round:
                raise ValueError("it holds a later round")
        if plain.get("pending") is not None:
            _is(plain["pending"], round=int, cohort=int, failures=int, seconds=dict)
        labels = tensors.get("history.labels")
        if labels is None or labels.dim() != 2 or str(labels.dtype) != "torch.int64":
            raise ValueError("history.labels is not a table of labels")
        if labels.shape[0] != round + 1 or labels.shape[1] > clients:
            raise ValueError(f"history.labels has shape {tuple(labels.shape)}")
        if labels.numel() and not -1 <= int(labels.min()) <= int(labels.max()) < clients:
            raise ValueError("history.labels are out of range")
        if tuple(getattr(tensors.get("state.labels"), "shape", ())) != (labels.shape[1],):
            raise ValueError("state.labels has another number of clients")
        for name, table in tensors.items():
            if name.startswith("history.scores.") and (
                table.dim() != 2 or table.shape[0] != len(plain["score_rounds"]) or table.shape[1] != labels.shape[1]
            ):
                raise ValueError(f"{name} has shape {tuple(table.shape)}")
            if name.startswith(("memory.", "other.memory.")) and (not table.dim() or len(table) > clients):
                raise ValueError(f"{name} has shape {tuple(table.shape)}")
        if plain["score_rounds"] and "history.scores.samples" not in tensors:
            raise ValueError("history.scores.samples is missing")
    except (ValueError, TypeError) as error:
        raise unfit(where, round, error) from error


_NUMBER = (int, float)


def _is(values: Any, **kinds: Any) -> None:
    """Raise ValueError unless these entries have these types."""
    for name, kind in kinds.items():
        if not isinstance(values, Mapping) or not isinstance(values.get(name), kind) or values[name] is True:
            raise ValueError(f"{name} is missing or of another type")


# ---- rows of rounds ----


def columns_of(rows: list[Any], where: str) -> dict[str, Any]:
    """The rows as columns, by their names in `RunData`."""
    places = {metric.key: metric.place for metric in METRICS.values() if not metric.of_run} | FACTS
    rounds: list[int] = []
    curves: dict[str, list[float]] = {name: [] for name in places}
    spread: dict[str, list[list[float]]] = {name: [] for name in SCORES}
    sizes: list[list[int]] = []
    repairs: list[dict[str, Any]] = []
    decisions: list[dict[str, Any]] = []
    for line, row in enumerate(rows, 1):
        try:
            if not isinstance(row, dict) or not _is_count(row.get("round")) or row["round"] < 1:
                raise ValueError("it has no round number")
            if rounds and row["round"] <= rounds[-1]:
                raise ValueError(f"round {row['round']} comes after round {rounds[-1]}")
            rounds.append(row["round"])
            for name, keys in places.items():
                curves[name].append(_number(row, keys))
            for name, values in spread.items():
                values.append(_quantiles(row.get("spread", {}).get(name)))
            sizes.append(_counts(row, "cluster_sizes"))
            for repair in records(row.get("repairs")):
                repairs.append({"round": row["round"], "reason": str(repair.get("reason", ""))})
            decisions += [_decision(found, row["round"]) for found in records(row.get("decisions"))]
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise RunError(f"{where} is damaged in line {line}: {reason(error)}.") from error
    return {
        "rounds": np.array(rounds, dtype=np.int64),
        "curves": {name: np.array(values, dtype=np.float64) for name, values in curves.items()},
        "spread": {name: np.array(values).reshape(-1, len(QUANTILES)) for name, values in spread.items()},
        "sizes": sizes,
        "repairs": repairs,
        "decisions": decisions,
    }


def _number(row: Any, keys: tuple[str, ...]) -> float:
    """The number under these keys; NaN where it is missing or not finite."""
    found = row
    for key in keys:
        if found is not None and not isinstance(found, dict):
            raise _wrong(".".join(keys), found)
        found = (found or {}).get(key)
    if found is not None and (isinstance(found, bool) or not isinstance(found, (int, float))):
        raise _wrong(".".join(keys), found)
    return float(found) if found is not None and math.isfinite(found) else math.nan


def _quantiles(found: Any) -> list[float]:
    values = [None] * len(QUANTILES) if found is None else found
    if not isinstance(values, list) or len(values) != len(QUANTILES):
        raise _wrong("spread", values)
    return [_number({"spread": value}, ("spread",)) for value in values]


def _decision(found: dict[str, Any], number: int) -> dict[str, Any]:
    """A decision of that round, with values of the declared types."""
    evidence = {name: _number(found, (name,)) for name in ("z", "q", "t")}
    ends = ("from_cluster", "to_cluster")
    moves = [
        {"client": str(move.get("client", "?")), **{end: _count(move, end) for end in ends}}
        for move in records(found.get("moves"))
    ]
    if found.get("what") == "move" and not moves:
        raise _wrong("moves", found.get("moves"))
    return {
        "round": number,
        "what": str(found.get("what", "?")),
        "clusters": _counts(found, "clusters"),
        "sizes": _counts(found, "sizes"),
        **{name: value for name, value in evidence.items() if math.isfinite(value)},
        **({"moves": moves, "loss_rose": _count(found, "loss_rose")} if moves else {}),
    }


def _counts(row: dict[str, Any], name: str) -> list[int]:
    counts = row.get(name) or []
    if not isinstance(counts, list) or not all(_is_count(count) for count in counts):
        raise _wrong(name, counts)
    return counts


def _count(row: dict[str, Any], name: str) -> int:
    count = row.get(name, 0)
    if not _is_count(count):
        raise _wrong(name, count)
    return int(count)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _wrong(name: str, found: Any) -> ValueError:
    return ValueError(f"{name} is {str(found)[:40]!r}")


# ---- arrays and lists ----


def finite(found: Any) -> float | None:
    """A finite number; None if it is not one."""
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool) and math.isfinite(found)
    return float(found) if is_number else None


def shaped(found: Any, shape: tuple[int | None, ...], kinds: str) -> NDArray[Any] | None:
    """An array of this shape (None: any length) and of one of these kinds of numpy's; None if it is not one."""
    if not isinstance(found, np.ndarray) or found.dtype.kind not in kinds or found.ndim != len(shape):
        return None
    return found if all(size in (None, length) for size, length in zip(shape, found.shape, strict=True)) else None


def integers(found: Any, shape: tuple[int | None, ...]) -> Ints | None:
    """An array of integers of this shape; None if it is not one."""
    array = shaped(found, shape, "iu")
    return None if array is None else array.astype(np.int64)


def floats(found: Any, shape: tuple[int | None, ...]) -> Floats | None:
    """An array of floats of this shape, with 0 for NaN; None if it is not one."""
    array = shaped(found, shape, "f")
    return None if array is None else np.nan_to_num(array.astype(np.float64))


def records(found: Any) -> list[dict[str, Any]]:
    """The objects in a list; none if it is not a list."""
    return [item for item in found if isinstance(item, dict)] if isinstance(found, Iterable) else []


def texts(found: Any) -> list[str]:
    """The texts of a list; none if it is not a list of texts."""
    return found if isinstance(found, list) and all(isinstance(item, str) for item in found) else []


def class_names(manifest: Mapping[str, Any], counts: Ints | None) -> list[str]:
    """The names of the classes that are counted; none if they have no names."""
    found = texts(manifest.get("class_names"))
    return found if counts is not None and len(found) == counts.shape[1] else []


def client_names(clients: Arrays, manifest: Mapping[str, Any]) -> list[str]:
    """The clients that take part; from the manifest if the run has not written its clients yet."""
    names = shaped(clients.get("name"), (None,), "U")
    if names is not None:
        return [str(name) for name in names]
    everyone, unseen = manifest.get("clients"), manifest.get("unseen")
    held_out = set(map(str, unseen)) if isinstance(unseen, list) else set()
    return [str(name) for name in everyone if str(name) not in held_out] if isinstance(everyone, list) else []


def last_scores(clients: Arrays, count: int) -> dict[str, Floats]:
    """Scores of the last evaluation [N]; NaN for clients without a score."""
    found: dict[str, Floats] = {}
    for name in SCORES:
        values = shaped(clients.get(name), (None, count), "iuf")
        if values is None or not len(values):
            continue
        scores = values[-1].astype(np.float64)
        samples = shaped(clients.get("samples"), values.shape, "iuf")
        has_score = np.isfinite(scores) & (True if samples is None else samples[-1] > 0)
        found[name] = np.where(has_score, scores, np.nan)
    return found


def class_counts(manifest: Mapping[str, Any], names: list[str]) -> Ints | None:
    """Training samples of each class at each of these clients, [N, L]."""
    counts, everyone = manifest.get("label_counts"), manifest.get("clients")
    if not isinstance(counts, list) or not isinstance(everyone, list) or len(counts) != len(everyone) or not names:
        return None
    row_of = {str(name): row for row, name in enumerate(everyone)}
    try:
        table = np.array(counts, dtype=np.int64)[[row_of[name] for name in names]]
    except (ValueError, TypeError, KeyError, IndexError, OverflowError):
        return None
    return table if table.ndim == 2 else None


def member_pictures(arrays: Arrays, count: int) -> dict[str, NDArray[Any]]:
    """Pictures of the clusters' members, with client, cluster and label of each; empty unless all fit together."""
    pictures = _pictures(arrays.get("picture"), (None,))
    if pictures is None:
        return {}
    found = {name: integers(arrays.get(name), (len(pictures),)) for name in ("client", "cluster", "label")}
    given = {name: values for name, values in found.items() if values is not None}
    if len(given) < len(found) or given["client"].min() < 0 or given["client"].max() >= count:
        return {}
    return {"picture": pictures, **given}


def method_arrays(arrays: Arrays) -> dict[str, NDArray[Any]]:
    """Arrays of the method itself, as far as they fit together: MD-ICFL's maps and pseudo samples."""
    maps = floats(arrays.get("told"), (None,) * 4)  # [K, K, L, L]
    if maps is None or not maps.size or maps.shape[0] != maps.shape[1] or maps.shape[2] != maps.shape[3]:
        return {}
    clusters, classes = maps.shape[1:3]
    found = {
        "told": maps,
        "witness": floats(arrays.get("witness"), (clusters, classes, classes)),
        "pseudo": _pictures(arrays.get("pseudo"), (clusters, classes, None)),
    }
    return {name: array for name, array in found.items() if array is not None}


def _pictures(found: Any, shape: tuple[int | None, ...]) -> NDArray[np.uint8] | None:
    """Pictures [*shape, H, W, 1 or 3] of bytes."""
    pictures = shaped(found, (*shape, None, None, None), "u")
    is_right = pictures is not None and pictures.dtype == np.uint8 and pictures.size and pictures.shape[-1] in (1, 3)
    return pictures if is_right else None
