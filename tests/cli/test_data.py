"""`coterie data list` and `fetch`."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.data.fetch import RECIPES
from tests.data.sources.conftest import hub  # noqa: F401
from tests.data.sources.originals import CASES

from .conftest import Command


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "data"
    found.mkdir()
    monkeypatch.setenv("COTERIE_DATA", str(found))
    return found


def test_list_says_what_is_there_and_how(command: Command, folder: Path):
    CASES["usps"].write(folder)
    packed = CASES["mnist"].write_npz(folder)
    CASES["emnist-digits"].write(folder)
    rows = {row["name"]: row for row in command("data", "list", "--json").json}
    assert sorted(rows) == sorted(CASES)
    assert rows["mnist"]["form"] == "npz"
    assert rows["mnist"]["path"] == str(packed)
    assert rows["mnist"]["bytes"] == packed.stat().st_size
    assert rows["usps"]["form"] == "original"
    assert rows["usps"]["bytes"] == sum((folder / name).stat().st_size for name in ("usps.bz2", "usps.t.bz2"))
    assert rows["emnist-digits"]["form"] == "original"
    assert rows["emnist-letters"]["form"] is None
    assert {name for name, row in rows.items() if row["fetch"]} == set(RECIPES)


def test_list_for_people(command: Command, folder: Path, tmp_path: Path):
    CASES["femnist"].write(folder)
    done = command("data", "list")
    assert done.code == 0
    assert f"data in {folder}" in done.out
    assert all(f" {name} " in done.out for name in CASES)
    femnist = next(line for line in done.out.splitlines() if " femnist " in line)
    assert "original" in femnist
    assert "kB" in femnist
    assert "original" not in command("data", "list", "--data-dir", tmp_path / "other").out


@pytest.mark.usefixtures("hub")
def test_fetch(command: Command, folder: Path):
    done = command("data", "fetch", "usps", "--json")
    assert done.err == ""
    assert done.json["path"] == str(folder / "usps.npz")
    assert done.json["samples"] == 17
    assert not done.json["already"]
    again = command("data", "fetch", "usps")
    assert again.code == 0
    assert "is already stored, checksum correct." in again.out
    assert command("data", "fetch", "usps", "--force", "--json").json == done.json


@pytest.mark.usefixtures("hub")
def test_fetch_into_another_folder(command: Command, tmp_path: Path):
    done = command("data", "fetch", "mnist", "--data-dir", tmp_path / "other")
    assert "fetched, sha256 " in done.out
    assert (tmp_path / "other" / "mnist.npz").is_file()


@pytest.mark.usefixtures("hub")
def test_a_bar_on_a_terminal(command: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = command("data", "fetch", "usps")
    assert "17/17" in done.err


@pytest.mark.usefixtures("hub")
def test_errors_are_one_sentence(command: Command, folder: Path):
    assert "git clone" in command("data", "fetch", "sign").error
    assert "Did you mean 'usps'?" in command("data", "fetch", "uspss").error
    command("data", "fetch", "usps")
    (folder / "usps.npz.sha256").write_text("0000")
    assert "does not match the checksum" in command("data", "fetch", "usps", "--json").error


def test_without_the_extra(command: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    assert "coterie[data]" in command("data", "fetch", "mnist").error
