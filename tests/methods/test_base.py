"""The registry of methods."""

from __future__ import annotations

import importlib
import runpy
from dataclasses import dataclass
from typing import Any

import pytest

from coterie.errors import ConfigError
from coterie.methods import base
from coterie.methods.base import find_algorithm, register
from coterie.methods.fedavg import FedAvg


def own(key: str, name: str = "Own") -> Any:
    @dataclass(frozen=True)
    class Own(FedAvg):
        """A method of a user."""

    Own.key, Own.__qualname__ = key, name
    return Own


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch):
    base.algorithms()
    monkeypatch.setattr(base, "_ALGORITHMS", dict(base._ALGORITHMS))


@pytest.mark.parametrize("key", ["fedavg", "feddsmic"])
def test_a_key_of_ours_is_refused(key: str):
    with pytest.raises(
        ConfigError, match=rf"The key '{key}' of Own is that of coterie\.methods\.\w+:\w+; choose another"
    ):
        register(own(key))
    assert find_algorithm(key).__module__.startswith("coterie.")


def test_a_key_of_another_class_is_refused_and_a_class_that_is_written_again_is_not():
    register(own("mine"))
    again = own("mine")
    assert register(again) is find_algorithm("mine") is again
    with pytest.raises(ConfigError, match="The key 'mine' of Own is that of tests.methods.test_base:Own"):
        register(own("mine", "Other"))


def test_a_class_that_ran_as_a_script_may_be_imported(tmp_path, monkeypatch):
    (tmp_path / "scripted.py").write_text(
        "from dataclasses import dataclass\n"
        "import coterie\n\n\n"
        "@coterie.register\n"
        "@dataclass(frozen=True)\n"
        "class Scripted(coterie.Algorithm):\n"
        '    """For a test."""\n\n'
        '    key = "scripted"\n'
        '    paper = "none"\n\n'
        "    def start(self, task, engine, rng): ...\n"
        "    def round(self, state, engine, cohort, rng): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    runpy.run_path(str(tmp_path / "scripted.py"), run_name="__main__")
    assert importlib.import_module("scripted").Scripted is find_algorithm("scripted")
