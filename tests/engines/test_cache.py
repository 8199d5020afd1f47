"""The cache: only this user's folder is used, and what is in it is checked before it is believed."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.engines import make_engine, plans
from coterie.engines.cache import alone, private_folder
from coterie.engines.kernels import native
from coterie.engines.kernels.native import NotNative
from coterie.methods.fedavg import FedAvg
from tests.helpers import setup_of

has_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of somebody else")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(plans, "_known", {})
    return tmp_path


def test_the_folder_is_this_users_own(cache: Path):
    found = private_folder()
    assert found.parent == cache
    assert (found.stat().st_uid, found.stat().st_mode & 0o777) == (os.geteuid(), 0o700)
    assert private_folder() == found


def test_a_folder_that_others_can_write_is_not_used(cache: Path):
    private_folder().chmod(0o777)
    with pytest.raises(OSError, match="others can write"):
        private_folder()
    with pytest.raises(NotNative, match="others can write"):
        native.library(torch.float32)


def test_a_link_in_place_of_the_folder_is_not_followed(cache: Path, tmp_path: Path):
    home = private_folder()
    home.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    home.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is not a folder of this user"):
        private_folder()


@is_root
def test_the_folder_of_another_user_is_not_used(cache: Path):
    os.chown(private_folder(), 65534, 65534)
    with pytest.raises(OSError, match="is not a folder of this user"):
        private_folder()


# ---- the compiled program ----


@pytest.fixture(autouse=True)
def small_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is compiled in no time."""
    recipe = ('extern "C" int answer() { return 42; }', ["c++", "-shared", "-fPIC"], "0123")
    monkeypatch.setattr(native, "_recipe", lambda dtype: recipe)


def built(cache: Path) -> Path:
    native.library(torch.float32)
    native._loaded.clear()
    (program,) = private_folder().glob("*.so")
    return program


@has_compiler
@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "no digest", "link", "foreign"])
def test_a_program_that_is_not_the_one_that_was_built_is_built_anew(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
):
    program = built(cache)
    whole = program.read_bytes()
    if damage in ("cut", "empty", "changed"):
        wrong = {"cut": whole[:-500], "empty": b"", "changed": whole[:-1] + b"x"}[damage]
        program.unlink()
        program.write_bytes(wrong)
    elif damage == "no digest":
        program.with_suffix(".sha256").unlink()
    elif damage == "link":
        shutil.move(program, tmp_path / "evil.so")
        program.symlink_to(tmp_path / "evil.so")
    elif os.geteuid():
        pytest.skip("only root can make files of somebody else")
    else:
        os.chown(program, 65534, 65534)
    loads: list[bytes] = []
    real = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (loads.append(Path(name).read_bytes()), real(name))[1])
    native.library(torch.float32)
    assert not program.is_symlink()
    assert program.stat().st_uid == os.geteuid()
    assert loads == [program.read_bytes()]
    assert native.library(torch.float32).answer() == 42


@has_compiler
def test_an_old_name_in_a_shared_folder_is_not_loaded(cache: Path):
    """The name is predictable: anybody could have put a program there."""
    program = built(cache)
    (cache / "native").mkdir()
    (cache / "native" / program.name).write_bytes(b"evil")
    shutil.rmtree(private_folder())
    native.library(torch.float32)
    assert (cache / "native" / program.name).read_bytes() == b"evil"


@has_compiler
def test_it_is_on_the_disk_before_it_has_its_name(cache: Path, monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("sync"), sync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda *names: (order.append("rename"), replace(*names))[1])
    native.library(torch.float32)
    assert order == ["sync", "rename"] * 2


# ---- measurements ----


def test_a_lock_that_is_a_link_empties_nothing(cache: Path, tmp_path: Path):
    (tmp_path / "precious").write_text("text")
    (tmp_path / "plans.lock").symlink_to(tmp_path / "precious")
    with alone(tmp_path / "plans.json"):
        pass
    assert (tmp_path / "precious").read_text() == "text"


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[" * 100_000,
        "[]",
        '{"KEY": {"bogus": 1.0}}',
        '{"KEY": {"loop": -1}}',
        '{"KEY": {"loop": NaN}}',
        '{"KEY": {"loop": true}}',
        '{"KEY": {"loop": "fast"}}',
        '{"KEY": {}}',
        '{"KEY": []}',
    ],
)
def test_bad_measurements_are_ignored_with_a_word(cache: Path, content: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native.NativeKernel, "of", lambda *_: None)  # the small program trains nothing
    setup = setup_of(FedAvg())

    def made() -> Any:
        return make_engine("vectorized", setup.task(), setup.federation(), "cpu", {"precision": "float32"})

    monkeypatch.setattr(plans, "_time", lambda engine, candidate: 1.0 + len(candidate.name))
    assert "ignored" not in " ".join(made().notes)
    (key,) = json.loads((private_folder() / "plans.json").read_text())
    monkeypatch.setattr(plans, "_known", {})
    (private_folder() / "plans.json").write_text(content.replace("KEY", key))
    engine = made()
    assert any("plans.json is ignored" in note for note in engine.notes)
    assert json.loads((private_folder() / "plans.json").read_text())[key]["loop"] == 5.0


def test_measurements_are_not_written_through_a_link(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plans, "_time", lambda engine, candidate: 1.0)
    (tmp_path / "precious").write_text("text")
    for name in ("plans.json", f"plans.{os.getpid()}", ".plans.json.tmp"):
        (private_folder() / name).symlink_to(tmp_path / "precious")
    monkeypatch.setattr(native.NativeKernel, "of", lambda *_: None)  # the small program trains nothing
    setup = setup_of(FedAvg())
    make_engine("vectorized", setup.task(), setup.federation(), "cpu", {"precision": "float32"})
    assert (tmp_path / "precious").read_text() == "text"
    assert not (private_folder() / "plans.json").is_symlink()
