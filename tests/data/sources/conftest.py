"""The hub that stands in for the network."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from .originals import fake_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Install the fake modules; returns the list of requests they get."""
    asked: list[Any] = []
    modules = fake_hub(asked)
    modules["huggingface_hub"].fill(tmp_path_factory.mktemp("hub"))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return asked
