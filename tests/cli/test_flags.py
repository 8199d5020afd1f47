"""One declaration per setting: a field is a flag of every command that takes its class, and a key of the files."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import typer

from coterie.cli.compare import compare
from coterie.cli.flags import takes
from coterie.cli.run import run
from coterie.cli.sweep import sweep
from coterie.client.settings import WorkSettings
from coterie.client.work import SGD
from coterie.engines import ENGINES
from coterie.errors import ConfigError
from coterie.runs.settings import ClusterSettings, RunSettings, Schedule, Tables
from coterie.settings import fields_of, setting


@dataclass(frozen=True)
class Sample:
    """Fields as a settings class declares them."""

    table: ClassVar[str] = "work"

    lr: float = setting(0.1, "learning rate", gt=0, flag=True)
    batch_size: int | Literal["full"] = setting(20, "batch size", ge=1, flag="--batch-size -b")
    way: str = setting("cold", "how", flag=True, choices=("cold", "warm"))
    deep: bool = setting(True, "whether", flag=True)
    shape: tuple[int, ...] = setting((1,), "sizes", ge=1, flag=True)
    secret: int = setting(1, "has no flag")


def call(*arguments: object, **options: Any) -> Tables:
    """What a command gets that takes `Sample`."""
    found: list[Tables] = []

    @takes(Sample, **options)
    def command(*, tables: Tables) -> None:
        found.append(tables)

    app = typer.Typer()
    app.command()(command)
    app(args=[str(argument) for argument in arguments], standalone_mode=False)
    return found[0]


def test_only_what_was_typed_arrives():
    assert call()["work"] == {}
    assert call("--lr", "0.1")["work"] == {"lr": 0.1}  # typed, though it is the default
    assert call("-b", "full", "--way=warm")["work"] == {"batch_size": "full", "way": "warm"}
    assert call("--no-deep", "--shape", "[2, 3]")["work"] == {"deep": False, "shape": (2, 3)}


def test_set_is_over_flags_and_flags_are_over_the_file(tmp_path: Path):
    file = tmp_path / "e.toml"
    file.write_text("[work]\nlr = 0.3\nbatch_size = 5\nsecret = 7\n")
    typed = ("--config", file, "--lr", 2, "--batch-size", 6, "--set", "work.lr=3")
    assert call(*typed)["work"] == {"lr": 3, "batch_size": 6, "secret": 7}


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("--lr", "0"), "--lr must be a number > 0. Got '0' instead."),
        (("-b", "half"), "--batch-size must be an int >= 1 or 'full'. Got 'half' instead."),
        (("--way", "wram"), "--way must be 'cold' or 'warm'. Got 'wram' instead. Did you mean 'warm'?"),
        (("--shape", "[2, 0]"), "--shape must be a list, each entry an int >= 1. Got '[2, 0]' instead."),
        (("--set", "run.seed=1"), "--set takes fields of work here. Got 'run.seed=1' instead."),
    ],
)
def test_a_bad_value_is_one_sentence(typed: tuple[str, ...], said: str):
    with pytest.raises(ConfigError) as caught:
        call(*typed, settable=("work",))
    assert str(caught.value) == said


def test_groups_can_be_cut():
    @takes((Sample, "lr", "way"), without=("way",), config=False)
    def command(*, first: int = 1, tables: Tables, last: int = 2) -> None: ...

    assert list(inspect.signature(command).parameters) == ["first", "lr", "context", "set_", "last"]


@pytest.mark.parametrize("group", [RunSettings, ClusterSettings, Schedule, WorkSettings])
def test_every_flag_is_in_run_compare_and_sweep(group: type):
    flags = {name for name, field in fields_of(group).items() if field.flags}
    assert flags <= set(inspect.signature(run).parameters)
    for command in (compare, sweep):
        assert flags - {"seed"} <= set(inspect.signature(command).parameters)


def test_no_two_fields_share_a_flag():
    groups = (RunSettings, ClusterSettings, Schedule, WorkSettings)
    flags = [flag for group in groups for field in fields_of(group).values() for flag in field.flags]
    assert len(flags) == len(set(flags))


def test_declarations_and_what_they_declare_agree():
    assert set(fields_of(WorkSettings)) <= set(fields_of(SGD))
    assert fields_of(RunSettings)["engine"].choices == tuple(ENGINES)
