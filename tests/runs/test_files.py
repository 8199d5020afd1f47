"""The files of a run folder from somebody else: no links, only regular files, nothing larger than it may be."""

from __future__ import annotations

import io
import os
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie.errors import CoterieError, RunError
from coterie.runs.files import Files
from coterie.runs.folder import Checkpoint, RunFolder
from coterie.trust import write_whole

CONFIG = {"run": {"algorithm": "fesem", "rounds": 3}}


@pytest.fixture
def folder(tmp_path: Path):
    made = RunFolder.create(tmp_path / "runs", "a", "unused", CONFIG)
    made.append({"round": 1})
    made.save_checkpoint(Checkpoint(1, {"centers": torch.ones(2)}, {"rows_bytes": made.rows_bytes()}))
    made.unlock()
    yield made
    made.unlock()


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that must stay as it is."""
    path = tmp_path / "outside"
    (path / "round-000001").mkdir(parents=True)
    (path / "file").write_text("precious")
    (path / "round-000001" / "file").write_text("precious")
    return path


def contents(path: Path) -> dict[str, str]:
    return {str(file.relative_to(path)): file.read_text() for file in path.rglob("*") if file.is_file()}


WRITES: dict[str, Callable[[RunFolder], Any]] = {
    ".lock": lambda folder: folder.lock(),
    "rounds.jsonl": lambda folder: folder.append({"round": 2}),
    ".summary.json.tmp": lambda folder: folder.write_json("summary.json", {"rounds": 3}),
    "artifacts": lambda folder: folder.write_json("artifacts/file", {}),
    "checkpoint": lambda folder: folder.save_checkpoint(Checkpoint(2, {"a": torch.ones(1)}, {"rows_bytes": 0})),
    "checkpoint/.round-000002.tmp": lambda folder: folder.save_checkpoint(
        Checkpoint(2, {"a": torch.ones(1)}, {"rows_bytes": 0})
    ),
}


@pytest.mark.parametrize("name", list(WRITES))
def test_nothing_is_written_or_removed_through_a_link(folder: RunFolder, outside: Path, name: str):
    place = folder.path / name
    is_folder = name.startswith(("checkpoint", "artifacts"))
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(outside if is_folder else outside / "file")
    before = contents(outside)
    if name.endswith(".tmp"):  # a temporary file of somebody else is replaced
        WRITES[name](folder)
    else:
        with pytest.raises(CoterieError, match=rf"{name} is a link"):
            WRITES[name](folder)
    assert contents(outside) == before


def test_rows_are_not_cut_in_a_file_of_two_names(folder: RunFolder, outside: Path):
    """A hard link: cutting it would cut the other file, too."""
    (folder.path / "rounds.jsonl").unlink()
    os.link(outside / "file", folder.path / "rounds.jsonl")
    for change in (lambda: folder.cut_rows(0), lambda: folder.append({"round": 1})):
        with pytest.raises(RunError, match=r"rounds\.jsonl has another name"):
            change()
    assert (outside / "file").read_text() == "precious"


@pytest.mark.parametrize(
    "name", ["config.toml", "summary.json", "rounds.jsonl", "labels.npy", "checkpoint/round-000001/state.json"]
)
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_read(folder: RunFolder, tmp_path: Path, name: str, kind: str):
    place = folder.path / name
    place.unlink(missing_ok=True)
    if kind == "link":
        place.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.mkdir()
    said = r"is a link" if kind == "link" else "is not a regular file"
    with pytest.raises(RunError, match=f"{place.name} {said}"):
        Files(folder.path).read_bytes(name)
    assert folder.load_checkpoint() is not None  # does not hang


def test_pipes_in_place_of_the_files_of_a_run_do_not_block_it(folder: RunFolder):
    for name in ("rounds.jsonl", ".lock"):
        (folder.path / name).unlink()
        os.mkfifo(folder.path / name)
    for change in (folder.lock, lambda: folder.append({"round": 1}), lambda: folder.cut_rows(0), folder.rows_bytes):
        with pytest.raises(CoterieError, match="is not a regular file"):
            change()


def test_links_on_the_way_to_a_file_are_refused(folder: RunFolder, outside: Path):
    shutil.rmtree(folder.path / "artifacts")
    (folder.path / "artifacts").symlink_to(outside)
    with pytest.raises(RunError, match="artifacts is a link"):
        Files(folder.path).read_bytes("artifacts/file")


def test_a_linked_checkpoint_is_not_used(folder: RunFolder, tmp_path: Path):
    shutil.move(folder.path / "checkpoint", tmp_path / "elsewhere")
    (folder.path / "checkpoint").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="checkpoint is a link"):
        folder.load_checkpoint()


def test_the_folder_itself_may_be_a_link(folder: RunFolder, tmp_path: Path):
    (tmp_path / "mine").symlink_to(folder.path)
    opened = RunFolder.open(tmp_path / "mine")
    with opened.held():
        opened.append({"round": 2})
    assert len(opened.rows()) == 2


# ---- sizes ----


def peak(function: Callable[[], Any]) -> int:
    """The most memory that Python took in a call, in bytes."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text", ['{"rounds": 1, "x": [%s[]]}' % ("[]," * 6_000_000), '{"rounds": %s}' % ("9" * 20_000_000)]
)
def test_a_large_summary_is_refused_before_it_is_parsed(folder: RunFolder, text: str):
    (folder.path / "summary.json").write_text(text)

    def read() -> None:
        with pytest.raises(RunError, match=r"summary\.json has 1[0-9] MB; the limit is"):
            folder.summary()

    assert peak(read) < 1 << 20


def test_json_of_many_small_things_is_refused_before_it_is_parsed(folder: RunFolder):
    """A list takes thirty times the memory of its two brackets."""
    (folder.path / "artifacts" / "manifest.json").write_text("[" + "[]," * 9_000_000 + "[]]")

    def read() -> None:
        with pytest.raises(RunError, match=r"manifest\.json is damaged: it would take .* MB of memory"):
            folder.read_json("artifacts/manifest.json")

    assert peak(read) < 64 << 20


def test_a_line_of_rounds_has_a_limit(folder: RunFolder):
    (folder.path / "rounds.jsonl").write_text('{"round": 1}\n{"round": "' + "x" * (20 << 20) + '"}\n')
    with pytest.raises(RunError, match=r"rounds\.jsonl is damaged in line 2: it has 20 MB; the limit is"):
        folder.rows()


def npy(header: str, data: bytes = b"") -> bytes:
    body = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body + data


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1099511627776,), }"), "announces 8796093022208 bytes"),
        (npy("{'descr': '<U0', 'fortran_order': False, 'shape': (1099511627776,), }"), "type <U0"),
        (npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"x" * 8), "type object"),
        (npy("{'descr': '<i8', 'fortran_order': False, 'shape': (-1,), }", b"x" * 8), "announces"),
        (npy("{'descr': '<i8', 'fortran_order': False, 'shape': (2,), }", b"x" * 8), "announces 16 bytes and has 8"),
        (npy("{'descr': [('a', '<i8')], 'fortran_order': False, 'shape': (1,), }", b"x" * 8), "type"),
        (npy("((((((((((((((((((((((((((((((((((((((((((((((((((((((("), "damaged"),
        (npy("{}"), "damaged"),
        (b"\x93NUMPY\x09\x00", "damaged"),
        (b"\x93NU", "damaged"),
        (b"PK\x03\x04", "damaged"),
    ],
)
def test_the_header_of_an_array_is_checked_before_it_is_read(folder: RunFolder, content: bytes, said: str):
    (folder.path / "labels.npy").write_bytes(content)

    def read() -> None:
        with pytest.raises(RunError, match=rf"labels\.npy .*{said}"):
            folder.array("labels.npy")

    assert peak(read) < 1 << 20
    with zipfile.ZipFile(folder.path / "clients.npz", "w") as archive:
        archive.writestr("name.npy", content)
    with pytest.raises(RunError, match=r"clients\.npz .*"):
        folder.arrays("clients.npz")


def bomb(zeros: int) -> bytes:
    with (
        zipfile.ZipFile(out := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a.npy", "w") as member,
    ):
        member.write(npy(f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({zeros},), }}"))
        for _ in range(zeros >> 20):
            member.write(bytes(1 << 20))
    return out.getvalue()


def test_an_archive_that_unpacks_to_more_than_the_limit_is_refused(folder: RunFolder):
    (folder.path / "clients.npz").write_bytes(content := bomb(600 << 20))
    assert len(content) < 1 << 20

    def read() -> None:
        with pytest.raises(RunError, match=r"clients\.npz is damaged: it unpacks to 600 MB; the limit is"):
            folder.arrays("clients.npz")

    assert peak(read) < 8 << 20


def test_an_archive_of_many_members_is_refused(folder: RunFolder):
    with zipfile.ZipFile(folder.path / "clients.npz", "w") as archive:
        for number in range(2000):
            archive.writestr(f"{number}.npy", b"")
    with pytest.raises(RunError, match="has 2000 arrays"):
        folder.arrays("clients.npz")


def test_a_checkpoint_with_a_giant_header_is_damaged(folder: RunFolder):
    place = folder.path / "checkpoint" / "round-000001"
    with (place / "tensors.safetensors").open("wb") as file:
        file.write((90 << 20).to_bytes(8, "little"))
        file.truncate(91 << 20)
    found, problems = folder.load_checkpoint()
    assert found is None
    assert "header of 90 MB" in problems[0]


def test_arrays_come_back_as_they_were(folder: RunFolder):
    kept = {"a": np.arange(6).reshape(2, 3), "b": np.array(["x", "yz"]), "c": np.zeros((0, 3)), "d": np.float32(2)}
    folder.write_arrays("clients.npz", kept)
    folder.write_array("labels.npy", np.asfortranarray(kept["a"]))
    found = folder.arrays("clients.npz")
    assert found is not None
    assert {name: (array.tolist(), array.dtype) for name, array in found.items()} == {
        name: (np.asarray(array).tolist(), np.asarray(array).dtype) for name, array in kept.items()
    }
    assert np.array_equal(folder.array("labels.npy"), kept["a"])


# ---- writing a whole file ----


def test_write_whole_replaces_a_file_and_a_link_but_not_what_it_points_to(tmp_path: Path, outside: Path):
    (tmp_path / "page").symlink_to(outside / "file")
    (tmp_path / ".page.tmp").symlink_to(outside / "file")
    write_whole(tmp_path / "page", b"new")
    assert (tmp_path / "page").read_bytes() == b"new"
    assert (outside / "file").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "page"]
