"""Resuming a run whose settings were changed by hand: every difference is named, and accepted only when asked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from coterie.runs.folder import RunFolder
from tests.cli.conftest import Command


@pytest.fixture
def stopped(command: Command, tmp_path: Path, small_run: Path) -> Path:
    """A run after its second round of three."""
    path = tmp_path / "runs" / "x"
    shutil.copytree(small_run, path)
    (path / "summary.json").unlink()
    return path


def change(path: Path, *pairs: tuple[str, str]) -> None:
    text = (path / "config.toml").read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    (path / "config.toml").write_text(text)


def test_changed_settings_are_named_field_by_field(command: Command, stopped: Path):
    change(stopped, ("rounds = 2", "rounds = 3"), ("\nepochs = 1", "\nepochs = 2\nclip_norm = 2"), ("seed = 0\n", ""))
    said = command("resume", stopped).error
    assert "run.rounds was 2 and is 3" in said
    assert "work.epochs was 1 and is 2" in said
    assert "run.seed was 0 and is missing" in said
    assert "work.clip_norm was missing and is 2" in said
    assert "--override" in said
    assert not (stopped / "summary.json").exists()


def test_override_accepts_them_and_the_next_checkpoint_holds_them(command: Command, stopped: Path):
    change(stopped, ("rounds = 2", "rounds = 3"))
    assert command("resume", stopped, "--override", "--quiet").code == 0
    assert RunFolder(stopped).summary()["rounds"] == 3
    assert command("export", stopped, "--cluster", "0").code == 0


@pytest.mark.parametrize("asked", [("export", "--cluster", "0"), ("onboard", "--dataset", "rotated-digits")])
def test_finished_runs_are_not_opened_with_other_settings(
    command: Command, tmp_path: Path, small_run: Path, asked: tuple[str, ...]
):
    path = tmp_path / "x"
    shutil.copytree(small_run, path)
    change(path, ("evaluate_every = 1", "evaluate_every = 2"))
    assert "run.evaluate_every was 1 and is 2" in command(asked[0], path, *asked[1:]).error
    assert command(asked[0], path, *asked[1:], "--override").code == 0


def test_settings_as_they_were_need_nothing(command: Command, stopped: Path):
    change(stopped, ("rounds = 2", "rounds   =    2  # two"))
    assert command("resume", stopped, "--quiet").code == 0
