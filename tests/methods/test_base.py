"""The registry of methods."""

from __future__ import annotations

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
