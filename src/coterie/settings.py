"""Hyperparameters: every field has a default, a help line and a bound; one place checks them all.

A settings class is a frozen dataclass whose fields are made with `setting(...)`. Constructors only store;
`check(obj)` is called once before the work starts and says one sentence about the first bad value.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from coterie.errors import ConfigError, UnknownName

S = TypeVar("S")

_COMPARE: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "ge": (operator.ge, ">="),
    "gt": (operator.gt, ">"),
    "le": (operator.le, "<="),
    "lt": (operator.lt, "<"),
}


def setting(
    default: Any,
    help: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """A dataclass field with a help line and, for numbers, bounds (which do not apply to words)."""
    metadata = {"help": help, "ge": ge, "gt": gt, "le": le, "lt": lt}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Field:
    """One hyperparameter as it is shown and checked."""

    name: str
    kind: Any
    default: Any
    help: str
    bounds: Mapping[str, float]

    @property
    def expected(self) -> str:
        """The allowed values in words: "an int >= 1"."""
        limits = " and ".join(f"{_COMPARE[sign][1]} {limit:g}" for sign, limit in self.bounds.items())
        return _kind_in_words(self.kind, f" {limits}" if limits else "")


def fields_of(cls: type) -> dict[str, Field]:
    """The hyperparameters of a settings class, in order."""
    hints = typing.get_type_hints(cls)
    found = {}
    for item in dataclasses.fields(cls):
        if "help" not in item.metadata:
            continue
        bounds = {sign: item.metadata[sign] for sign in _COMPARE if item.metadata[sign] is not None}
        found[item.name] = Field(item.name, hints[item.name], item.default, item.metadata["help"], bounds)
    return found


def check(obj: Any) -> None:
    """Raise a ConfigError about the first field of `obj` that has a value it cannot have."""
    owner = type(obj).__name__
    for field in fields_of(type(obj)).values():
        value = getattr(obj, field.name)
        if not _is_of(field.kind, value) or not _within(field.bounds, value):
            raise ConfigError(f"{field.name} of {owner} must be {field.expected}. Got {value!r} instead.")


def build(cls: type[S], values: Mapping[str, Any], prefix: str) -> S:
    """Make a settings object from named values; unknown names are refused with the nearest one.

    `prefix` is how the user writes the fields (`algorithm`, `scenario`, `engine`, `model`).
    """
    fields = fields_of(cls)
    for name in values:
        if name not in fields:
            raise UnknownName(f"field of {prefix} ({cls.__name__}) named", name, fields)
    made = cls(**{name: _coerce(fields[name].kind, value) for name, value in values.items()})
    check(made)
    return made


def values_of(obj: Any) -> dict[str, Any]:
    """The hyperparameters of `obj` as plain values, None left out (TOML has no null)."""
    pairs = ((name, getattr(obj, name)) for name in fields_of(type(obj)))
    return {name: list(v) if isinstance(v, tuple) else v for name, v in pairs if v is not None}


def parse_value(text: str) -> Any:
    """The value a user typed after `=`: a TOML value if it is one, else the text itself.

    >>> parse_value("3"), parse_value("0.5"), parse_value("true"), parse_value("head"), parse_value("[1, 2]")
    (3, 0.5, True, 'head', [1, 2])
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        lowered = text.strip().lower()
        return lowered == "true" if lowered in ("true", "false") else text


def _coerce(kind: Any, value: Any) -> Any:
    """Numbers typed without a point become floats where floats are meant; lists become tuples."""
    if isinstance(value, list):
        return tuple(value)
    members = _members(kind)
    if isinstance(value, int) and not isinstance(value, bool) and float in members and int not in members:
        return float(value)
    return value


def _members(kind: Any) -> tuple[Any, ...]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return typing.get_args(kind)
    return (kind,)


def _is_of(kind: Any, value: Any) -> bool:
    return any(_is_one(member, value) for member in _members(kind))


def _is_one(kind: Any, value: Any) -> bool:
    if kind is type(None):
        return value is None
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        return isinstance(value, tuple) and all(_is_one(inner, item) for item in value)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind in (bool, str):
        return isinstance(value, kind)
    return True


def _within(bounds: Mapping[str, float], value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_within(bounds, item) for item in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    return all(bool(_COMPARE[sign][0](value, limit)) for sign, limit in bounds.items())


def _kind_in_words(kind: Any, limits: str) -> str:
    words = {bool: "true or false", str: "a word", type(None): "nothing"}
    numbers = {int: f"an int{limits}", float: f"a number{limits}"}
    parts: list[str] = []
    for member in _members(kind):
        if typing.get_origin(member) is Literal:
            parts.extend(f"'{choice}'" for choice in typing.get_args(member))
        elif typing.get_origin(member) is tuple:
            inner = typing.get_args(member)[0]
            parts.append(f"a list, each entry {numbers.get(inner) or words.get(inner, inner)}")
        else:
            parts.append(numbers.get(member) or words.get(member) or str(getattr(member, "__name__", member)))
    return " or ".join(dict.fromkeys(parts))
