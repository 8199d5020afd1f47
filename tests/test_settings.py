"""Hyperparameters: one sentence for every bad value, and values that survive a file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import pytest

from coterie.errors import ConfigError, UnknownName
from coterie.settings import build, check, fields_of, parse_value, setting, values_of


@dataclass(frozen=True)
class Sample:
    """One field of each kind."""

    count: int = setting(3, "how many", ge=1)
    share: float = setting(0.5, "how much", gt=0, le=1)
    below: float = setting(0.0, "under one", ge=0, lt=1)
    steps: int | None = setting(None, "or nothing", ge=1)
    batch: int | Literal["full"] = setting(20, "number or word", ge=1)
    way: Literal["cold", "warm"] = setting("cold", "one of two")
    flag: bool = setting(False, "yes or no")
    word: str = setting("", "text")
    shape: tuple[int, ...] = setting((1, 2), "numbers", ge=1)
    hidden: int = 7  # not a hyperparameter: no help line


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("count", 0, "an int >= 1"),
        ("count", 1.0, "an int >= 1"),
        ("count", True, "an int >= 1"),
        ("count", "3", "an int >= 1"),
        ("count", None, "an int >= 1"),
        ("share", 0, "a number > 0 and <= 1"),
        ("share", 1.5, "a number > 0 and <= 1"),
        ("share", float("nan"), "a number > 0 and <= 1"),
        ("share", float("inf"), "a number > 0 and <= 1"),
        ("share", True, "a number > 0 and <= 1"),
        ("below", 1, "a number >= 0 and < 1"),
        ("below", -0.001, "a number >= 0 and < 1"),
        ("steps", 0, "an int >= 1 or None"),
        ("batch", "half", "an int >= 1 or 'full'"),
        ("batch", 0, "an int >= 1 or 'full'"),
        ("way", "hot", "'cold' or 'warm'"),
        ("flag", 1, "true or false"),
        ("flag", "true", "true or false"),
        ("word", 3, "a string"),
        ("shape", (1, 0), "a list, each entry an int >= 1"),
        ("shape", (1, 2.5), "a list, each entry an int >= 1"),
        ("shape", 4, "a list, each entry an int >= 1"),
    ],
)
def test_a_bad_value_gives_one_sentence(name, value, expected):
    with pytest.raises(ConfigError) as caught:
        check(dataclasses.replace(Sample(), **{name: value}))
    assert str(caught.value) == f"{name} of Sample must be {expected}. Got {value!r} instead."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", 1),
        ("share", 1),
        ("share", 1e-9),
        ("below", 0),
        ("below", 0.999),
        ("steps", None),
        ("steps", 5),
        ("batch", "full"),
        ("way", "warm"),
        ("flag", True),
        ("shape", (4,)),
    ],
)
def test_a_value_within_bounds_is_taken(name, value):
    check(dataclasses.replace(Sample(), **{name: value}))


def test_the_first_bad_field_is_named():
    with pytest.raises(ConfigError, match=r"^share of Sample"):
        check(dataclasses.replace(Sample(), way="hot", share=-1.0))


def test_constructors_only_store():
    assert Sample(count=-5).count == -5


def test_fields_come_in_order_with_help_and_bounds():
    fields = fields_of(Sample)
    assert list(fields) == ["count", "share", "below", "steps", "batch", "way", "flag", "word", "shape"]
    share = fields["share"]
    assert (share.kind, share.default, share.help, dict(share.bounds)) == (float, 0.5, "how much", {"gt": 0, "le": 1})


def test_build_takes_what_a_file_or_flag_can_hold():
    made = build(Sample, {"share": 1, "shape": [3, 4], "batch": "full", "steps": 2}, "algorithm")
    assert made == Sample(share=1.0, shape=(3, 4), batch="full", steps=2)
    assert isinstance(made.share, float)
    assert isinstance(made.steps, int)


def test_build_does_not_turn_truth_into_a_number():
    with pytest.raises(ConfigError, match=r"share of Sample must be a number > 0 and <= 1\. Got True instead"):
        build(Sample, {"share": True}, "algorithm")


def test_build_refuses_unknown_names_with_the_nearest():
    with pytest.raises(UnknownName) as caught:
        build(Sample, {"cuont": 3}, "algorithm")
    assert caught.value.nearest == "count"
    assert str(caught.value).startswith("There is no field of algorithm (Sample) named 'cuont'. Did you mean 'count'?")


def test_build_refuses_what_is_no_hyperparameter():
    with pytest.raises(UnknownName):
        build(Sample, {"hidden": 3}, "algorithm")


def test_values_leave_none_out_and_lists_are_plain():
    assert values_of(Sample()) == {
        "count": 3,
        "share": 0.5,
        "below": 0.0,
        "batch": 20,
        "way": "cold",
        "flag": False,
        "word": "",
        "shape": [1, 2],
    }


def test_values_make_the_same_object_again():
    made = Sample(count=9, steps=4, shape=(5,), flag=True)
    assert build(Sample, values_of(made), "x") == made


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-2", -2),
        ("0.25", 0.25),
        ("1e-3", 0.001),
        ("true", True),
        ("True", True),
        ("FALSE", False),
        ("full", "full"),
        ("'3'", "3"),
        ('"a b"', "a b"),
        ("[1, 2]", [1, 2]),
        ("[hour, the weight]", ["hour", "the weight"]),
        ("[hour]", ["hour"]),
        ("[1, b,]", [1, "b"]),
        ("[a, [b]]", "[a, [b]]"),
        ("a,b", "a,b"),
        ("", ""),
        ("3x", "3x"),
        ("a = b", "a = b"),
        ("data/file.npz", "data/file.npz"),
    ],
)
def test_parse_value(text, value):
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


def test_a_single_entry_of_a_list_becomes_a_list_of_one():
    assert build(Sample, {"shape": 10}, "algorithm").shape == (10,)
    assert build(Sample, {"shape": [3, 4]}, "algorithm").shape == (3, 4)
    assert build(Sample, {"count": 10}, "algorithm").count == 10
    for wrong in (0, "10", 1.5, True):  # bounds and kinds of entries still hold
        with pytest.raises(ConfigError, match="shape of Sample must be a list, each entry"):
            build(Sample, {"shape": wrong}, "algorithm")
