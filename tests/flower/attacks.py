"""What a hostile site sends: each attack changes the records of an honest answer.

Imports nothing of the tests, because it is also copied into the app of real sites.
"""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

PARTS = ("", "first.")  # of the two calls in a message


def arrays_in(content: RecordDict, part: str) -> dict[str, Any]:
    record = content.get(f"{part}answer")
    return {} if record is None else {name: array.numpy() for name, array in record.items()}


def put(content: RecordDict, part: str, arrays: dict[str, Any]) -> None:
    made = {name: array if isinstance(array, Array) else Array(np.asarray(array)) for name, array in arrays.items()}
    content[f"{part}answer"] = ArrayRecord(OrderedDict(made))


def on_every_array(change):
    def attack(content, memory):
        for part in PARTS:
            if f"{part}answer" in content:
                put(content, part, {name: change(name, array) for name, array in arrays_in(content, part).items()})
        return content

    return attack


def with_values(**values):
    """Replace arrays of these names; an answer without any of them becomes a failure, so that it does not count."""

    def attack(content, memory):
        for part in PARTS:
            found = arrays_in(content, part)
            new = {name: np.full_like(found[name], value) for name, value in values.items() if name in found}
            if new:
                put(content, part, found | new)
            elif f"{part}told" in content:
                told(content, part, error="hostile")
        return content

    return attack


def told(content, part, **values):
    content[f"{part}told"] = ConfigRecord({**dict(content[f"{part}told"].items()), **values})


def with_told(**values):
    def attack(content, memory):
        for part in PARTS:
            if f"{part}told" in content:
                told(content, part, **values)
        return content

    return attack


def with_more(content, memory):
    for part in PARTS:
        if f"{part}answer" in content:
            put(content, part, arrays_in(content, part) | {"more": np.zeros((1, 250_000))})
    return content


def replayed(content: RecordDict, memory: Path) -> RecordDict:
    """Fail at first, and keep the answer; then send it again and again."""
    kept = memory / "replayed.pickle"
    if not kept.exists():
        memory.mkdir(parents=True, exist_ok=True)
        found = {part: (arrays_in(content, part), dict(content[f"{part}told"].items())) for part in PARTS[:1]}
        kept.write_bytes(pickle.dumps(found))
        return with_told(error="hostile")(content, memory)
    old = pickle.loads(kept.read_bytes())[""]
    for part in PARTS:
        if f"{part}told" in content:
            put(content, part, old[0])
            content[f"{part}told"] = ConfigRecord(old[1])
    return content


def forged(request: RecordDict, sizes: dict[str, int]) -> RecordDict:
    """An answer to a request that looks honest, without any work: the model that was sent, and plausible scores."""
    content = RecordDict()
    for part in PARTS:
        if f"{part}call" not in request:
            continue
        call = json.loads(request[f"{part}call"]["json"])
        if ":choose_and_train" in call["step"]:
            params = next(iter(request[call["models"][0]].values())).numpy()
            found = {"params": params[None], "choice": np.array([0]), "samples": np.array([sizes["train"]])}
        else:
            found = {"samples": np.array([sizes["test"]])} | {
                key: np.array([0.5]) for key in ("loss", "accuracy", "f1")
            }
        put(content, part, found)
        content[f"{part}told"] = ConfigRecord({"gradients": 1, "round": call["round"], "nonce": call["nonce"]})
    return content


ATTACKS = {
    "big_endian": on_every_array(lambda name, array: array.astype(array.dtype.newbyteorder(">"))),
    "another_form": on_every_array(lambda name, array: array[..., None]),
    "half_precision": on_every_array(lambda name, array: array.astype(np.float16)),
    "choice_above": with_values(choice=2**40),
    "choice_just_above": with_values(choice=2),
    "choice_below": with_values(choice=-1),
    "samples_negative": with_values(samples=-1_000_000),
    "samples_huge": with_values(samples=2**62),
    "accuracy": with_values(accuracy=1e9),
    "negative_loss": with_values(loss=-1e9),
    "no_number": with_values(f1=np.nan),
    "extra_arrays": with_more,
    "long_error": with_told(error="\x1b[2J" + "x" * 20_000_000),
    "gradients": with_told(gradients=-5),
    "another_round": with_told(round=7_000),
    "another_nonce": with_told(nonce="0" * 32),
    "replay": replayed,
}

HELLOS = {
    "infinite": '{"name": "NAME", "train": 1e400, "valid": 0, "test": 2}',
    "endless": '{"name": "NAME", "train": 1180591620717411303424, "valid": 0, "test": 2}',
    "long_number": '{"name": "NAME", "train": ' + "9" * 1500 + ', "valid": 0, "test": 2}',
    "brackets": "[" * 100_000,
    "negative_test": '{"name": "NAME", "train": 3, "valid": 0, "test": -2}',
    "fraction": '{"name": "NAME", "train": 3.5, "valid": 0, "test": 2}',
    "truth": '{"name": "NAME", "train": true, "valid": 0, "test": 2}',
    "no_text": '{"name": ["NAME"], "train": 3, "valid": 0, "test": 2}',
    "long": '{"name": "NAME", "train": 3, "valid": 0, "test": 2, "more": "' + "x" * 20_000_000 + '"}',
}
