"""Read the pickles that datasets are published in, without running any of their code.

A pickle is a program for a stack machine that may call any function. Here `pickletools` only parses it; the
machine below supports plain values, containers and the pattern that numpy arrays are written with. All other
instructions and names are rejected, and no name is ever imported.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


class RefusedPickle(ValueError):
    """A pickle that is damaged or contains more than plain values and arrays."""


@dataclass(frozen=True)
class _Name:
    """Placeholder for a function or class that the pickle names."""

    word: str


@dataclass
class _Dtype:
    code: str
    order: str = "|"


@dataclass
class _Array:
    value: np.ndarray[Any, Any] | None = None


_NAMES = {
    "numpy.core.multiarray _reconstruct": _Name("reconstruct"),
    "numpy._core.multiarray _reconstruct": _Name("reconstruct"),  # written by numpy 2
    "numpy ndarray": _Name("ndarray"),
    "numpy dtype": _Name("dtype"),
    "_codecs encode": _Name("encode"),  # bytes written by Python 3 for Python 2
}
_DTYPES = {"u1", "i1", "i2", "i4", "i8"}
_MARK = object()
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "MARK": lambda: _MARK,
}
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "BINBYTES", "SHORT_BINBYTES"}
_BYTES_OF_PYTHON2 = {"BINSTRING", "SHORT_BINSTRING"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def load_plain(data: bytes) -> Any:
    """The value of a pickle; Python 2 strings become bytes.

    >>> import pickle
    >>> load_plain(pickle.dumps({"labels": [1, 2]}, protocol=2))
    {'labels': [1, 2]}
    >>> load_plain(pickle.dumps(print, protocol=2))
    Traceback (most recent call last):
    coterie.data.readers._pickles.RefusedPickle: it names '__builtin__ print', which no dataset needs
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.finish()
            machine.do(opcode.name, argument)
    except RefusedPickle:
        raise
    # Raised by genops for invalid pickles, and by a stack that is empty or has unexpected values.
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise RefusedPickle(str(error) or type(error).__name__) from error
    raise RefusedPickle("it does not end")


class _Machine:
    """The stack and the memo of the pickle machine."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def do(self, name: str, argument: Any) -> None:
        """Run one instruction."""
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _VALUES:
            self.stack.append(argument)
        elif name in _BYTES_OF_PYTHON2:
            self.stack.append(argument.encode("latin-1"))
        elif name in _TUPLES:
            self.stack[-_TUPLES[name] :] = [tuple(self._last(_TUPLES[name]))]
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        elif name != "PROTO":
            self._change(name, argument)

    def _change(self, name: str, argument: Any) -> None:
        if name == "TUPLE":
            self.stack.append(tuple(self._to_mark()))
        elif name in ("APPEND", "APPENDS"):
            items = [self.stack.pop()] if name == "APPEND" else self._to_mark()
            self._top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [self.stack.pop() for _ in range(2)][::-1] if name == "SETITEM" else self._to_mark()
            # Hashing other keys, such as deeply nested tuples, could overflow the stack.
            if any(type(key) not in (str, bytes, int) for key in items[::2]):
                raise RefusedPickle("it has keys that are not strings or integers")
            self._top(dict).update(zip(items[::2], items[1::2], strict=True))
        elif name == "GLOBAL":
            if argument not in _NAMES:
                raise RefusedPickle(f"it names '{argument}', which no dataset needs")
            self.stack.append(_NAMES[argument])
        elif name == "REDUCE":
            arguments, called = self.stack.pop(), self.stack.pop()
            self.stack.append(_make(called, arguments))
        elif name == "BUILD":
            state = self.stack.pop()
            _fill(self.stack[-1], state)
        else:
            raise RefusedPickle(f"it has the instruction {name}, which no dataset needs")

    def finish(self) -> Any:
        """The value left on the stack, with arrays in place of their placeholders."""
        if len(self.stack) != 1:
            raise RefusedPickle("it does not end with one value")
        return _plain(self.stack[0])

    def _top(self, kind: type[Any]) -> Any:
        if type(self.stack[-1]) is not kind:
            raise RefusedPickle(f"it uses a {type(self.stack[-1]).__name__} as a {kind.__name__}")
        return self.stack[-1]

    def _last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise RefusedPickle("its stack is empty")
        return self.stack[-count:]

    def _to_mark(self) -> list[Any]:
        items = []
        while self.stack[-1] is not _MARK:
            items.append(self.stack.pop())
        self.stack.pop()
        return items[::-1]


def _make(called: Any, arguments: Any) -> Any:
    """The result of a call that the pickle makes."""
    if called == _NAMES["numpy ndarray"] or not isinstance(called, _Name):
        raise RefusedPickle(f"it calls {getattr(called, 'word', type(called).__name__)}")
    if called.word == "encode":
        text, codec = arguments
        if codec == "latin1" and type(text) is str:
            return text.encode("latin-1")
    elif called.word == "reconstruct":
        if arguments == (_NAMES["numpy ndarray"], (0,), b"b"):
            return _Array()
    elif called.word == "dtype":
        code = arguments[0].decode() if isinstance(arguments[0], bytes) else arguments[0]
        if code in _DTYPES:
            return _Dtype(code)
    raise RefusedPickle(f"it calls {called.word} in a way that no dataset needs")


def _fill(target: Any, state: Any) -> None:
    """Set the state of an array or of its dtype."""
    if isinstance(target, _Dtype):
        order = state[1].decode() if isinstance(state[1], bytes) else state[1]
        if order not in ("|", "<", ">"):
            raise RefusedPickle(f"it has the byte order {order!r}")
        target.order = order
    elif isinstance(target, _Array):
        _, shape, dtype, by_column, data = state
        kind = np.dtype(dtype.order + dtype.code)
        if len(data) != math.prod(shape) * kind.itemsize or min(shape, default=0) < 0:
            raise RefusedPickle(f"it has {len(data)} bytes for an array of shape {shape}")
        target.value = np.frombuffer(data, kind).reshape(shape, order="F" if by_column else "C")
    else:
        raise RefusedPickle(f"it sets the state of a {type(target).__name__}")


def _plain(value: Any) -> Any:
    """Replace placeholders by arrays, at the top level and in a dict: datasets nest no deeper."""
    if isinstance(value, dict):
        return {key: _unwrap(item) for key, item in value.items()}
    return _unwrap(value)


def _unwrap(value: Any) -> Any:
    if isinstance(value, (_Name, _Dtype)) or value is _MARK:
        raise RefusedPickle("it is not a plain value")
    if isinstance(value, _Array):
        if value.value is None:
            raise RefusedPickle("it has an array without data")
        return value.value
    return value
