"""The examples run as they stand, as a user would run them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path, capsys):
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

    public = {name for name in vars(coterie) if not name.startswith("_")}
    modules = {name for name in public if type(getattr(coterie, name)).__name__ == "module"}
    assert set(coterie.__all__) == (public - modules) | (set(coterie.__all__) & modules)
    assert all(hasattr(coterie, name) for name in coterie.__all__)
