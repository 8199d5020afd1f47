"""What a run records of the machine and the source."""

import subprocess
from pathlib import Path

import pytest

from coterie.runs import execution


def test_the_commit_is_that_of_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    source = tmp_path / "execution.py"
    source.write_text("")
    monkeypatch.setattr(execution, "__file__", str(source))
    assert execution.commit.__wrapped__() is None  # not a file of that repository
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "a"], check=True)
    clean = execution.commit.__wrapped__()
    assert clean is not None
    assert len(clean) == 40
    source.write_text("changed")
    assert execution.commit.__wrapped__() == f"{clean}-dirty"
