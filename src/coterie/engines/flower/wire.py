"""What travels: requests to clients and their answers, as Flower's records. Only arrays and JSON, nothing pickled."""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from coterie.errors import CoterieError

CALL, MODEL, PAYLOAD, EACH, ANSWER = "call", "model", "payload", "each", "answer"
_KINDS = ("float32", "float64", "int64", "int32", "uint8", "bool")
_HEADER = 4096  # bytes that an array may take beside its numbers


class Refused(CoterieError):
    """Something that came over the wire and cannot be used; the text says what it was."""


@dataclass(frozen=True)
class Call:
    """What a client is asked to do, arrays aside."""

    step: str  # module:function; only registered steps are ever called
    client: str  # who is meant
    round: int
    phase: str
    key: int  # of the call's randomness
    seed: int  # of the first weights of the run
    work: dict[str, Any]
    models: int | None  # how many were sent; None: none, and the step gets its own
    several: bool = False  # whether the step gets a choice of them, even of one
    run: str = ""  # the name of the run: what the client remembers is kept under it
    life: str = ""  # of the server: another one after each start
    past: dict[str, int] = field(default_factory=dict)  # earlier lives, and the last round of each that still counts
    precision: str = "float32"
    extra: dict[str, Any] = field(default_factory=dict)


def array_of(tensor: Tensor) -> Array:
    """A tensor as an array that can travel."""
    return Array(np.ascontiguousarray(tensor.detach().cpu().numpy()))


def record_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Named tensors as one record."""
    return ArrayRecord(OrderedDict((name, array_of(tensor)) for name, tensor in tensors.items()))


def tensor_of(array: Any, most: int | None = None) -> Tensor:
    """The tensor in an array; what is not one, or larger than `most` bytes, is refused before it is unpacked."""
    data = getattr(array, "data", None)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise Refused("sent something that is no array")
    if most is not None and len(data) > most + _HEADER:
        raise Refused(f"sent an array of {len(data)} bytes where {most} are the most")
    if getattr(array, "stype", "") != "numpy.ndarray":
        raise Refused(f"sent an array of kind '{getattr(array, 'stype', '')}'")
    try:
        found = np.load(io.BytesIO(bytes(data)), allow_pickle=False)
    except Exception as error:  # garbage raises many kinds
        raise Refused(f"sent garbage ({type(error).__name__})") from error
    if not isinstance(found, np.ndarray) or found.dtype.name not in _KINDS:
        raise Refused("sent an array of a type that is not used")
    return torch.from_numpy(np.array(found))  # a copy that owns its memory


def tensors_of(record: Any, most: int | None = None) -> dict[str, Tensor]:
    """The tensors of a record."""
    if not isinstance(record, ArrayRecord):
        raise Refused("sent no record of arrays")
    return {name: tensor_of(array, most) for name, array in record.items()}


def size_of(content: RecordDict) -> int:
    """Bytes of a message's arrays and texts, as Flower carries them."""
    total = 0
    for record in content.values():
        if isinstance(record, ArrayRecord):
            total += sum(len(array.data) for array in record.values())
        elif isinstance(record, ConfigRecord):
            total += sum(len(str(value)) for value in record.values())
    return total


# ---- requests ----


def request(
    call: Call, models: list[ArrayRecord], payload: ArrayRecord | None, each: Mapping[str, Tensor]
) -> RecordDict:
    """A message's content. Records of models are shared between messages: Flower stores equal ones once."""
    content = RecordDict()
    content[CALL] = ConfigRecord({"json": json.dumps(asdict(call))})
    for number, model in enumerate(models):
        content[f"{MODEL}.{number}"] = model
    if payload is not None:
        content[PAYLOAD] = payload
    if each:
        content[EACH] = record_of(each)
    return content


def read_request(content: RecordDict) -> tuple[Call, list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The call, the models that were sent, the payload for all, and the payload for this client."""
    try:
        call = Call(**json.loads(str(content[CALL]["json"])))
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"this is no request of coterie ({type(error).__name__})") from error
    models = [tensors_of(content[f"{MODEL}.{number}"])["params"] for number in range(call.models or 0)]
    payload = tensors_of(content[PAYLOAD]) if PAYLOAD in content else {}
    each = tensors_of(content[EACH]) if EACH in content else {}
    return call, models, payload, each


# ---- answers ----


def answer(tensors: Mapping[str, Tensor], gradients: int) -> RecordDict:
    """A client's answer: tensors [1, ...], and how many gradients of single samples it took."""
    content = RecordDict()
    content[ANSWER] = record_of(tensors)
    content["told"] = ConfigRecord({"gradients": gradients})
    return content


def failure(reason: str) -> RecordDict:
    """A client's answer when its step raised."""
    content = RecordDict()
    content["told"] = ConfigRecord({"error": reason[:2000]})
    return content


def read_answer(content: Any, most: int) -> tuple[dict[str, Tensor], int]:
    """The tensors of an answer and its number of gradients. Raises Refused, with the client's own text if it has one.

    `most` is how many bytes one array may have: what is larger is not even looked at.
    """
    if not isinstance(content, RecordDict) or "told" not in content:
        raise Refused("sent no answer of coterie")
    told = content["told"]
    error = told.get("error") if isinstance(told, ConfigRecord) else None
    if error is not None:
        raise Refused(str(error))
    gradients = told.get("gradients", 0) if isinstance(told, ConfigRecord) else 0
    if not isinstance(gradients, int) or gradients < 0:
        raise Refused("sent no answer of coterie")
    tensors = tensors_of(content.get(ANSWER), most)
    for name, tensor in tensors.items():
        if tensor.shape[:1] != (1,):
            raise Refused(f"sent '{name}' of shape {tuple(tensor.shape)} instead of one row")
    return tensors, gradients
