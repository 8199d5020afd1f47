"""The examples run as they stand, as a user would run them."""

from __future__ import annotations

import runpy
from inspect import ismodule
from pathlib import Path
from unittest.mock import patch

import pytest

from coterie.runs.metrics import METRICS

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path, capsys):
    with patch.dict(METRICS):  # an example registers one of its own
        runpy.run_path(str(path), run_name="__main__")
    assert "accuracy 0." in capsys.readouterr().out


def test_own_algorithm_is_short_and_the_same_on_both_engines(capsys):
    path = next(p for p in EXAMPLES if p.name == "own_algorithm.py")
    runpy.run_path(str(path), run_name="__main__")
    loop, vectorized = capsys.readouterr().out.splitlines()
    assert loop.removeprefix("loop: ") == vectorized.removeprefix("vectorized: ")
    text = path.read_text()
    body = text[text.index("@client_step") : text.index("if __name__")]
    assert len([line for line in body.splitlines() if line.strip()]) < 40


def test_public_names_are_what_can_be_imported():
    import coterie

    assert all(getattr(coterie, name) is not None for name in coterie.__all__)
    public = {name for name, value in vars(coterie).items() if not name.startswith("_") and not ismodule(value)}
    assert public - {"TYPE_CHECKING", "Any", "VERSION", "annotations", "import_module"} == set(coterie.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = coterie.nothing
