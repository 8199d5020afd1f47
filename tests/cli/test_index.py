"""The index of `coterie list`: what the registries hold, and no more than a start for who registers more."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from coterie.cli import index
from coterie.methods import base
from coterie.methods.fedavg import FedAvg

from .conftest import Command


def test_the_file_is_what_the_registries_say():
    assert index.FILE.read_text(encoding="utf-8") == index.index(), "run 'make index'"


def test_what_was_registered_here_is_listed_too(command: Command, monkeypatch: pytest.MonkeyPatch):
    @dataclass(frozen=True)
    class Own(FedAvg):
        """A method of a user."""

        key: ClassVar[str] = "own"

    monkeypatch.setattr(base, "_ALGORITHMS", {**base.algorithms(), "own": Own})
    listed = {item["name"]: item["about"] for item in command("list", "algorithms", "--json").json}
    assert listed["own"] == "A method of a user."


@pytest.mark.parametrize("what", sorted(index.INDEXED))
def test_a_new_process_lists_the_same_from_the_file(command: Command, what: str, tmp_path: Path):
    code = f"from coterie.cli.main import main; main(['list', {what!r}, '--json'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == command("list", what, "--json").json
