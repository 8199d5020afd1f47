"""Requests to clients and their answers, as Flower records. Only arrays and JSON, no pickles.

A message may hold a second call, which the client does first; its records have names of their own (`first.call`).

What a site sends is read in this order: the call it answers, the names of its arrays, the header of each array, and
only then its numbers. So nothing is unpacked that was not asked for.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from coterie.client.forms import Form, Forms
from coterie.data.federation import SplitName
from coterie.errors import CoterieError
from coterie.trust import safe_text

CALL, MODEL, PAYLOAD, EACH, ANSWER, INFO = "call", "model", "payload", "each", "answer", "told"
_FIRST = "first."
_DTYPES = ("float16", "float32", "float64", "int64", "int32", "int8", "uint8", "bool")
_LIFE = re.compile(r"[0-9a-f]{0,64}")
_HEADER = 4096  # bytes allowed for an array's header
MOST_TEXT = 300  # characters of a site's text that are kept


class Refused(CoterieError):
    """A message with invalid content; the text says what is wrong."""


@dataclass(frozen=True)
class Call:
    """A request to a client, without its arrays."""

    step: str  # module:function; only registered steps are called
    client: str  # name of the client
    round: int
    phase: str
    key: int  # random key of the call
    seed: int  # for the initial weights of the run
    work: dict[str, Any]
    models: list[str] | None  # names of the records of its models; None: the step does not take models
    several: bool = False  # whether the step takes a list of models, even if there is one
    run: str = ""  # name of the run, under which the client stores its memory
    life: str = ""  # id of the server process
    past: dict[str, int] = field(default_factory=dict)  # earlier server processes, and the last valid round of each
    precision: str = "float32"
    nonce: str = ""  # of this call; an answer repeats it, with the round
    extra: dict[str, Any] = field(default_factory=dict)


def record_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Named tensors as one record."""
    arrays = {name: np.ascontiguousarray(tensor.detach().cpu().numpy()) for name, tensor in tensors.items()}
    return ArrayRecord(OrderedDict((name, Array(array)) for name, array in arrays.items()))


def tensor_of(array: Any, form: Form | None = None) -> Tensor:
    """The tensor of a Flower array. Invalid arrays, and those that are not one row of `form`, are rejected unread."""
    data = getattr(array, "data", None)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise Refused("sent something that is not an array")
    if form is not None and len(data) > form.num_bytes + _HEADER:
        raise Refused(f"sent an array of {len(data)} bytes, more than the {form.num_bytes} expected")
    stype = getattr(array, "stype", "")
    if stype != "numpy.ndarray":
        raise Refused(f"sent an array of kind '{safe_text(stype, 40)}'")
    head = io.BytesIO(bytes(data[:_HEADER]))
    try:
        version = np.lib.format.read_magic(head)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, by_columns, dtype = read(head)
    except Exception as error:  # invalid data raises many types
        raise Refused(f"sent an unreadable array ({type(error).__name__})") from error
    if min(shape, default=0) < 0:
        raise Refused("sent an unreadable array (of a negative size)")
    if dtype.name not in _DTYPES or not dtype.isnative:
        raise Refused("sent an array of an unsupported type")
    if form is not None and shape != (1, *form.shape):
        rows = "instead of one row " if shape[:1] != (1,) else "instead of "
        raise Refused(f"sent an array of shape {safe_text(shape, 80)} {rows}{(1, *form.shape)}")
    if len(data) - head.tell() != math.prod(shape) * dtype.itemsize:
        raise Refused("sent an unreadable array (its length is not that of its header)")
    found = np.frombuffer(data, dtype, offset=head.tell()).reshape(shape, order="F" if by_columns else "C")
    return torch.from_numpy(found.copy(order="C"))  # a copy that owns its memory


def tensors_of(record: Any) -> dict[str, Tensor]:
    """The tensors of a record."""
    if not isinstance(record, ArrayRecord):
        raise Refused("sent no arrays")
    return {name: tensor_of(array) for name, array in record.items()}


def size_of(content: RecordDict) -> int:
    """Bytes of a message's arrays and texts, as sent by Flower."""
    total = 0
    for record in content.values():
        if isinstance(record, ArrayRecord):
            total += sum(len(array.data) for array in record.values())
        elif isinstance(record, ConfigRecord):
            total += sum(len(str(value)) for value in record.values())
    return total


# ---- requests ----


def model_record(params: Tensor) -> tuple[str, ArrayRecord]:
    """A model as a record, and its name, which depends on the content: a message holds equal models once."""
    record = record_of({"params": params})
    return f"{MODEL}.{hashlib.sha256(record['params'].data).hexdigest()[:32]}", record


def request(
    call: Call, models: Mapping[str, ArrayRecord], payload: ArrayRecord | None, each: Mapping[str, Tensor]
) -> RecordDict:
    """The content of a request. Messages share model records, which Flower stores once."""
    content = RecordDict()
    content[CALL] = ConfigRecord({"json": json.dumps(asdict(call))})
    for name, model in models.items():
        content[name] = model
    if payload is not None:
        content[PAYLOAD] = payload
    if each:
        content[EACH] = record_of(each)
    return content


def read_call(content: RecordDict) -> Call:
    """The call of a request, without its arrays."""
    try:
        call = Call(**json.loads(str(content[CALL]["json"])))
        is_valid = type(call.round) is int and _LIFE.fullmatch(call.life) is not None  # both are in names of files
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise Refused(f"received an invalid request ({type(error).__name__})") from error
    if not is_valid:
        raise Refused("received an invalid request")
    return call


def read_request(content: RecordDict) -> tuple[Call, list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The call, its models, the common payload and the payload of this client."""
    call = read_call(content)
    try:
        models = [tensors_of(content[name])["params"] for name in call.models or ()]
    except (KeyError, TypeError) as error:
        raise Refused("received a request without its models") from error
    payload = tensors_of(content[PAYLOAD]) if PAYLOAD in content else {}
    each = tensors_of(content[EACH]) if EACH in content else {}
    return call, models, payload, each


# ---- two calls in one message ----


def joined(content: RecordDict, first: RecordDict | None) -> RecordDict:
    """A request, or an answer, together with that of a call that the client does first."""
    both = RecordDict()
    for name, record in content.items():
        both[name] = record
    for name, record in () if first is None else first.items():
        both[name if name.startswith(f"{MODEL}.") else f"{_FIRST}{name}"] = record
    return both


def parted(content: RecordDict) -> tuple[RecordDict, RecordDict | None]:
    """What `joined` was given; both parts of a request have all models."""
    parts = RecordDict(), RecordDict()
    for name, record in content.items():
        is_first = name.startswith(_FIRST)
        parts[is_first][name.removeprefix(_FIRST)] = record
        if name.startswith(f"{MODEL}."):
            parts[True][name] = record
    return parts[False], parts[True] if any(name.startswith(_FIRST) for name in content) else None


# ---- answers ----


def answer(call: Call, tensors: Mapping[str, Tensor], gradients: int) -> RecordDict:
    """A client's answer to a call: tensors [1, ...] and the number of per-sample gradients computed."""
    content = RecordDict()
    content[ANSWER] = record_of(tensors)
    content[INFO] = ConfigRecord({"gradients": gradients, "round": call.round, "nonce": call.nonce})
    return content


def failure(call: Call, reason: str) -> RecordDict:
    """The answer of a client whose step failed."""
    content = RecordDict()
    content[INFO] = ConfigRecord({"error": reason[:MOST_TEXT], "round": call.round, "nonce": call.nonce})
    return content


def read_answer(
    content: RecordDict | None, call: Call, forms: Forms, sizes: Mapping[SplitName, int]
) -> tuple[dict[str, Tensor], int]:
    """The tensors of an answer to this call, and its number of gradients.

    `forms` is the form that the step declares, `sizes` the samples that the client has declared. Raises Refused if the
    answer is of another form, or with the client's reason if its step failed. Other records are ignored.
    """
    info = None if content is None else content.get(INFO)
    if content is None or not isinstance(info, ConfigRecord):
        raise Refused("sent no answer")
    if (info.get("round"), info.get("nonce")) != (call.round, call.nonce):
        raise Refused("answered another call than this one")
    if info.get("error") is not None:
        raise Refused(safe_text(info["error"], MOST_TEXT))
    gradients = info.get("gradients", 0)
    if not isinstance(gradients, int) or gradients < 0:
        raise Refused("sent an invalid number of gradients")
    arrays = content.get(ANSWER)
    if not isinstance(arrays, ArrayRecord):
        raise Refused("sent no arrays")
    for name in arrays:
        if name not in forms:
            raise Refused(f"sent '{safe_text(name, 40)}', which was not asked for")
    tensors = {}
    for name, form in forms.items():
        if name in arrays:
            tensors[name] = _row_of(name, arrays[name], form, sizes)
        elif not form.optional:
            raise Refused(f"sent no '{name}'")
    return tensors, gradients


def _row_of(name: str, array: Any, form: Form, sizes: Mapping[SplitName, int]) -> Tensor:
    """The tensor [1, ...] of an answer."""
    try:
        tensor = tensor_of(array, form)
    except Refused as error:
        raise Refused(f"{error} as '{name}'") from error
    problem = form.problem(tensor[0], sizes)
    if problem is not None:
        raise Refused(f"sent '{name}' {problem}")
    return tensor
