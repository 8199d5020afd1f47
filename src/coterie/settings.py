"""Settings: one declaration gives a field its default, its help, its bounds and its command-line flag.

A settings class is a frozen dataclass whose fields are made with `setting(...)`. Constructors only store;
`check(obj)` is called once before the work starts and raises one sentence about the first bad value. A field can
always be set with `--set TABLE.FIELD=VALUE` and in a TOML file; with `flag`, every command that takes its class has
the flag as well (see `coterie.cli.flags`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, TypeVar

from coterie.errors import ConfigError, UnknownName, nearest_name

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
    flag: bool | str = False,
    choices: Collection[str] = (),
    default_is: str = "",
) -> Any:
    """A dataclass field with a help line and, for numbers, bounds (which do not apply to words).

    `flag=True` gives it a flag of its own name, `flag="--clusters -k"` flags of other names. `choices` are the names a
    word can be, where its type does not list them; a registry given here may grow later. `default_is` describes a
    default that is not a fixed value.
    """
    limits = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    more = {"flag": flag, "choices": choices, "default_is": default_is}
    return dataclasses.field(default=default, metadata={"help": help, **limits, **more})


def _plain(limit: float) -> str:
    """A limit as people write it.

    >>> _plain(0.5), _plain(65535), _plain(10_000_000)
    ('0.5', '65535', '10,000,000')
    """
    return f"{limit:,}" if isinstance(limit, int) and limit >= 1_000_000 else f"{limit:g}"


@dataclasses.dataclass(frozen=True)
class Field:
    """One setting as it is shown, read and checked."""

    name: str
    kind: Any
    default: Any
    help: str
    bounds: Mapping[str, float]
    flags: tuple[str, ...] = ()  # such as ("--clusters", "-k"); empty: no flag
    choices: tuple[str, ...] = ()
    default_is: str = ""

    @property
    def expected(self) -> str:
        """The allowed values in words: "an int >= 1"."""
        return self._in_words(_members(self.kind))

    @property
    def metavar(self) -> str:
        """The type as `--help` shows it: INTEGER, FLOAT, TEXT or [one|other]."""
        kinds, words = _members(self.kind), self.words
        names = [{int: "INTEGER", float: "FLOAT"}[kind] for kind in kinds if kind in (int, float)]
        return "|".join([*names, *words]) if names else f"[{'|'.join(words)}]" if words else "TEXT"

    @property
    def words(self) -> list[str]:
        """The words that the value can be, where they are listed."""
        return [word for kind in _members(self.kind) for word in _words(kind)] + list(self.choices)

    @property
    def sentence(self) -> str:
        """The help line as `--help` shows it."""
        low = [("[" if sign == "ge" else "(", self.bounds[sign]) for sign in ("ge", "gt") if sign in self.bounds]
        high = [("]" if sign == "le" else ")", self.bounds[sign]) for sign in ("le", "lt") if sign in self.bounds]
        inside = (
            f", in {low[0][0]}{_plain(low[0][1])}, {_plain(high[0][1])}{high[0][0]}"
            if low and high and float in _members(self.kind)
            else ""
        )
        default = f"; by default {self.default_is}" if self.default_is else ""
        return f"{self.help[:1].upper()}{self.help[1:]}{inside}{default}."

    def parse(self, text: str) -> Any:
        """The value of a flag, or one sentence about what was typed instead."""
        members = [kind for kind in _members(self.kind) if kind is not type(None)]
        for kind in members:
            value = _read(kind, text)
            if value is not None and _within(self.bounds, value) and (not self.choices or value in self.choices):
                return value
        nearest = nearest_name(text, self.words)
        hint = f" Did you mean '{nearest}'?" if nearest else ""
        raise ConfigError(f"{self.flags[0]} must be {self._in_words(members)}. Got '{text}' instead.{hint}")

    def _in_words(self, kinds: Iterable[Any]) -> str:
        if self.choices:
            return listed([f"'{choice}'" for choice in self.choices])
        limits = " and ".join(f"{_COMPARE[sign][1]} {_plain(limit)}" for sign, limit in self.bounds.items())
        return listed([part for kind in kinds for part in _kind_in_words(kind, f" {limits}" if limits else "")])


_hints = functools.cache(typing.get_type_hints)  # slow; a comparison reads the fields of hundreds of runs


def fields_of(cls: type) -> dict[str, Field]:
    """The settings of a class, in order."""
    hints = _hints(cls)
    found = {}
    for item in dataclasses.fields(cls):
        if "help" not in item.metadata:
            continue
        told = item.metadata
        bounds = {sign: told[sign] for sign in _COMPARE if told[sign] is not None}
        flags = f"--{item.name.replace('_', '-')}" if told["flag"] is True else told["flag"] or ""
        more = (tuple(flags.split()), tuple(told["choices"]), told["default_is"])
        found[item.name] = Field(item.name, hints[item.name], item.default, told["help"], bounds, *more)
    return found


def check(obj: Any) -> None:
    """Raise a ConfigError about the first field of `obj` whose value is not allowed."""
    owner = type(obj).__name__
    for field in fields_of(type(obj)).values():
        value = getattr(obj, field.name)
        is_listed = not field.choices or value in field.choices
        if not (_is_of(field.kind, value) and _within(field.bounds, value) and is_listed):
            raise ConfigError(f"{field.name} of {owner} must be {field.expected}. Got {value!r} instead.")


def build(cls: type[S], values: Mapping[str, Any], prefix: str) -> S:
    """Make a settings object from named values; an unknown name is an error that suggests the nearest one.

    `prefix` is the table that the user writes before the field (`algorithm`, `scenario`, `engine`, `model`).
    """
    fields = fields_of(cls)
    for name in values:
        if name not in fields:
            raise UnknownName(f"field of {prefix} ({cls.__name__}) named", name, fields)
    made = cls(**{name: _coerce(fields[name].kind, value) for name, value in values.items()})
    check(made)
    return made


def values_of(obj: Any) -> dict[str, Any]:
    """The settings of `obj` as plain values, without those that are None (TOML has no null)."""
    pairs = ((name, getattr(obj, name)) for name in fields_of(type(obj)))
    return {name: list(v) if isinstance(v, tuple) else v for name, v in pairs if v is not None}


def parse_value(text: str) -> Any:
    """The value that a user typed after `=`: a TOML value, a list of words without quotes, or the text itself.

    >>> parse_value("3"), parse_value("0.5"), parse_value("true"), parse_value("head"), parse_value("[1, 2]")
    (3, 0.5, True, 'head', [1, 2])
    >>> parse_value("[hour, 'the weight', 3]")
    ['hour', 'the weight', 3]
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if text.startswith("[") and text.endswith("]") and not any(sign in text[1:-1] for sign in "[]"):
            return [parse_value(part.strip()) for part in text[1:-1].split(",") if part.strip()]
        lowered = text.strip().lower()
        return lowered == "true" if lowered in ("true", "false") else text


def _coerce(kind: Any, value: Any) -> Any:
    """Integers become floats where a float is expected; lists become tuples, and so does a single entry of one."""
    if isinstance(value, list):
        return tuple(value)
    members = _members(kind)
    entries = [typing.get_args(member)[0] for member in members if typing.get_origin(member) is tuple]
    if any(_is_one(entry, value) for entry in entries) and not _is_of(kind, value):
        return (value,)
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


def _words(kind: Any) -> tuple[str, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def _read(kind: Any, text: str) -> Any:
    """The text as a value of that kind; None if it is not one."""
    if kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            return None
        return value if math.isfinite(value) else None
    value = text if kind is str or _words(kind) else _coerce(kind, parse_value(text))
    return value if _is_one(kind, value) else None


def _kind_in_words(kind: Any, limits: str) -> list[str]:
    numbers = {int: f"an int{limits}", float: f"a number{limits}"}
    words = {**numbers, bool: "true or false", str: "a string", type(None): "None"}
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        return [f"a list, each entry {words.get(inner, inner)}"]
    return [f"'{word}'" for word in _words(kind)] or [words.get(kind) or str(getattr(kind, "__name__", kind))]


def counted(count: int, word: str) -> str:
    """A number of things, each of which is called `word`.

    >>> counted(1, "seed"), counted(3_000, "seed")
    ('1 seed', '3,000 seeds')
    """
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def listed(parts: Iterable[str]) -> str:
    """The parts as an enumeration: "a, b or c"."""
    *first, last = dict.fromkeys(parts)
    return f"{', '.join(first)} or {last}" if first else last
