"""The run folder: nothing is lost, nothing is doubled, nothing damaged is believed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie.errors import ConfigError, RunError, StorageError
from coterie.runs.folder import SCHEMA, Checkpoint, RunFolder, to_toml

CONFIG = {"run": {"algorithm": "fesem", "rounds": 3}}


@pytest.fixture
def folder(tmp_path: Path):
    made = RunFolder.create(tmp_path, "a", "unused", CONFIG)
    yield made
    made.unlock()


def checkpoint(round: int, **plain: Any) -> Checkpoint:
    return Checkpoint(round, {"centers": torch.full((2, 3), float(round))}, {"rows_bytes": 0, **plain})


def part(folder: RunFolder, round: int, name: str) -> Path:
    return folder.path / "checkpoint" / f"round-{round:06d}" / name


def saved(folder: RunFolder) -> list[str]:
    return sorted(p.name for p in (folder.path / "checkpoint").iterdir())


# ---- making and opening ----


def test_a_new_folder_holds_its_settings_and_schema(folder: RunFolder):
    assert tomllib.loads((folder.path / "config.toml").read_text()) == {"schema": SCHEMA, **CONFIG}
    assert (folder.path / "artifacts").is_dir()
    assert folder.summary() is None
    assert folder.rows() == []


def test_a_name_that_is_taken_is_refused_and_says_how_to_resume(folder: RunFolder):
    before = {p.name: p.stat().st_mtime_ns for p in folder.path.iterdir()}
    with pytest.raises(
        RunError, match=r"already exists\. Resume it with 'coterie resume .*/a', or choose another --name"
    ):
        RunFolder.create(folder.path.parent, "a", "unused", {"run": {"algorithm": "other"}})
    assert {p.name: p.stat().st_mtime_ns for p in folder.path.iterdir()} == before


def test_a_foreign_folder_is_not_offered_for_resuming(tmp_path: Path):
    (tmp_path / "a").mkdir()
    with pytest.raises(RunError, match="exists and is not a run folder. Choose another --name"):
        RunFolder.create(tmp_path, "a", "unused", CONFIG)
    assert list((tmp_path / "a").iterdir()) == []


def test_default_names_are_numbered(tmp_path: Path):
    made = [RunFolder.create(tmp_path, None, "digits-fesem", CONFIG) for _ in range(3)]
    assert [m.path.name for m in made] == ["digits-fesem", "digits-fesem-2", "digits-fesem-3"]
    for one in made:
        one.unlock()


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_an_impossible_place_is_one_sentence(tmp_path: Path, place: str):
    (tmp_path / "file").write_text("here")
    with pytest.raises(StorageError, match=r"cannot be created: (File exists|Not a directory)"):
        RunFolder.create(tmp_path / place, "a", "unused", CONFIG)
    assert (tmp_path / "file").read_text() == "here"


@pytest.mark.parametrize("name", ["a/b", "../x", "..", ".", "", "a\0b"])
def test_a_name_is_that_of_one_folder(tmp_path: Path, name: str):
    with pytest.raises(ConfigError, match="--name must be the name of a folder, without slashes"):
        RunFolder.create(tmp_path / "runs", name, "unused", CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_at_the_very_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(StorageError, match="No space left on device") as caught:
        RunFolder.create(tmp_path, "a", "unused", CONFIG)
    assert "resume" not in str(caught.value)  # there is nothing to resume
    assert list(tmp_path.iterdir()) == []


def test_discard_takes_only_new_folders_without_rounds(folder: RunFolder):
    RunFolder.open(folder.path).discard()
    assert folder.path.is_dir()
    folder.append({"round": 1})
    folder.discard()
    assert folder.path.is_dir()
    folder.cut_rows(0)
    folder.discard()
    assert not folder.path.exists()


def test_open_refuses_what_is_no_run(tmp_path: Path):
    with pytest.raises(RunError, match=r"nowhere is not a run folder: it has no config\.toml"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(RunError, match="is not a run folder"):
        RunFolder.open(tmp_path)


def test_a_newer_schema_is_refused_by_name(folder: RunFolder):
    (folder.path / "config.toml").write_text(to_toml({"schema": SCHEMA + 1, **CONFIG}))
    with pytest.raises(RunError, match=rf"has schema {SCHEMA + 1}; .* up to {SCHEMA}\. Use a newer coterie"):
        RunFolder.open(folder.path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[run\n", r"config\.toml is damaged"),
        (b"\xff\xfe", r"config\.toml is damaged"),
        (b"[run]\n", "it has no schema number"),
        (b"schema = 'x'\n", "it has no schema number"),
    ],
)
def test_damaged_settings_are_refused(folder: RunFolder, content: bytes, said: str):
    (folder.path / "config.toml").write_bytes(content)
    with pytest.raises(RunError, match=said):
        RunFolder.open(folder.path)


# ---- one writer ----


def test_two_never_hold_one_folder(folder: RunFolder):
    other = RunFolder.open(folder.path)
    with pytest.raises(RunError, match="is in use by another process"):
        other.lock()
    assert other.is_held()  # an attempt leaves who holds it readable
    folder.unlock()
    with other.held(), pytest.raises(RunError, match="in use"):
        folder.lock()
    folder.lock()  # `held` has let go


def test_another_process_cannot_hold_it_and_a_dead_one_does_not(folder: RunFolder):
    ask = (
        "import fcntl, sys; handle = open(sys.argv[1], 'w'); fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB); "
        "print('held', flush=True)"
    )
    lock = str(folder.path / ".lock")
    refused = subprocess.run([sys.executable, "-c", ask, lock], capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "BlockingIOError" in refused.stderr
    folder.unlock()
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{ask}; import time; time.sleep(60)", lock], stdout=subprocess.PIPE, text=True
    )
    with holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(RunError, match="in use"):
                folder.lock()
        finally:
            holder.kill()
    folder.lock()


def test_a_folder_that_cannot_be_locked_is_one_sentence(folder: RunFolder):
    folder.unlock()
    (folder.path / ".lock").unlink()
    (folder.path / ".lock").mkdir()
    with pytest.raises(RunError, match=r"\.lock is not a regular file"):
        folder.lock()


def test_a_lock_that_is_a_link_is_not_followed(folder: RunFolder, tmp_path: Path):
    folder.unlock()
    (tmp_path / "mine").write_text("text")
    (folder.path / ".lock").unlink()
    (folder.path / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(RunError, match=r"\.lock is a link"):
        folder.lock()
    assert (tmp_path / "mine").read_text() == "text"


# ---- rows ----


def test_rows_come_back_as_they_were(folder: RunFolder):
    rows = [{"round": 1, "accuracy": {"macro": 0.1 + 0.2}}, {"round": 2, "accuracy": None}]
    for row in rows:
        folder.append(row)
    assert folder.rows() == rows
    assert folder.rows_bytes() == (folder.path / "rounds.jsonl").stat().st_size


def test_a_line_still_being_written_is_left_out_and_cut(folder: RunFolder):
    folder.append({"round": 1})
    length = folder.rows_bytes()
    with (folder.path / "rounds.jsonl").open("a") as lines:
        lines.write('{"round": 2, "accu')
    assert folder.rows() == [{"round": 1}]
    folder.cut_rows(length)
    folder.append({"round": 2})
    assert folder.rows() == [{"round": 1}, {"round": 2}]


def test_rows_that_were_removed_or_damaged_are_noticed(folder: RunFolder):
    folder.append({"round": 1})
    with pytest.raises(RunError, match="shorter than the checkpoint says"):
        folder.cut_rows(folder.rows_bytes() + 1)
    (folder.path / "rounds.jsonl").write_text("{'round'\n")
    with pytest.raises(RunError, match=r"rounds\.jsonl is damaged"):
        folder.rows()


def test_cutting_to_nothing_needs_no_file(folder: RunFolder):
    folder.cut_rows(0)
    assert not (folder.path / "rounds.jsonl").exists()
    with pytest.raises(RunError, match="shorter"):
        folder.cut_rows(5)


# ---- whole files ----


def test_files_are_read_back(folder: RunFolder):
    folder.write_json("artifacts/x.json", {"a": [1, None]})
    folder.write_array("labels.npy", np.arange(6).reshape(2, 3))
    folder.write_arrays("clients.npz", {"name": np.array(["a", "b"]), "loss": np.array([0.1, 0.2])})
    assert folder.read_json("artifacts/x.json") == {"a": [1, None]}
    assert np.load(folder.path / "labels.npy", allow_pickle=False).tolist() == [[0, 1, 2], [3, 4, 5]]
    with np.load(folder.path / "clients.npz", allow_pickle=False) as arrays:
        assert arrays["name"].tolist() == ["a", "b"]
        assert arrays["loss"].tolist() == [0.1, 0.2]
    assert not list(folder.path.rglob("*.tmp"))


def test_python_objects_are_never_written(folder: RunFolder):
    with pytest.raises(ValueError, match="allow_pickle"):
        folder.write_array("labels.npy", np.array([{}], dtype=object))


def test_damaged_json_is_refused_by_name(folder: RunFolder):
    (folder.path / "summary.json").write_text('{"rounds": ')
    with pytest.raises(RunError, match=r"summary\.json is damaged"):
        folder.summary()
    assert folder.read_json("nothing.json") is None


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_refused_write_leaves_the_old_file(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fails: str):
    folder.write_json("summary.json", {"old": True})
    monkeypatch.setattr(os, fails, no_space)
    with pytest.raises(StorageError, match=r"summary\.json of .* could not be written: No space left on device") as got:
        folder.write_json("summary.json", {"new": True})
    assert "There is no checkpoint yet" in str(got.value)
    assert folder.read_json("summary.json") == {"old": True}
    assert not list(folder.path.rglob("*.tmp"))


def test_a_row_that_does_not_fit_names_the_checkpoint_that_is_kept(folder: RunFolder, monkeypatch: pytest.MonkeyPatch):
    folder.save_checkpoint(checkpoint(7))
    monkeypatch.setattr(json, "dumps", no_space)
    with pytest.raises(
        StorageError, match=r"rounds\.jsonl .* The checkpoint of round 7 is kept\. Free some space and resume"
    ):
        folder.append({"round": 8})


# ---- checkpoints ----


def test_a_checkpoint_comes_back_bit_for_bit(folder: RunFolder):
    base = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    tensors = {
        "whole": base,
        "same memory": base,
        "turned": base.T,
        "slice": base[1:3],
        "double": base.double() / 3,
        "labels": torch.tensor([3, -1, 0]),
        "present": torch.tensor([True, False]),
        "nothing": torch.empty(0, 5),
        "odd": torch.tensor([float("inf"), float("nan"), -0.0]),
    }
    plain = {"rows_bytes": 12, "state": {"mean": 0.1 + 0.2, "repairs": [{"round": 1}]}}
    folder.save_checkpoint(Checkpoint(12, tensors, plain))
    found, problems = folder.load_checkpoint()
    assert found is not None
    assert problems == []
    assert found.round == 12
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert found.tensors[name].numpy().tobytes() == tensor.contiguous().numpy().tobytes(), name
    assert {k: found.plain[k] for k in plain} == plain


def test_there_is_no_checkpoint_at_first(folder: RunFolder):
    assert folder.load_checkpoint() == (None, [])


def test_two_checkpoints_are_kept(folder: RunFolder):
    for round in (1, 2, 5, 9):
        folder.save_checkpoint(checkpoint(round))
    assert saved(folder) == ["round-000005", "round-000009"]
    assert sorted(p.name for p in part(folder, 9, ".").iterdir()) == [
        "digests.json",
        "state.json",
        "tensors.safetensors",
    ]


def test_only_a_finished_run_drops_its_checkpoints(folder: RunFolder):
    folder.save_checkpoint(checkpoint(1))
    folder.drop_checkpoints()
    assert saved(folder) == ["round-000001"]
    folder.write_json("summary.json", {})
    folder.drop_checkpoints()
    assert not (folder.path / "checkpoint").exists()


def test_rows_are_on_the_disk_before_the_checkpoint_that_counts_them(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
):
    order = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(handle: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real_fsync(handle)

    def replace(source: Any, target: Any) -> None:
        order.append(f"rename to {Path(target).name}")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    folder.append({"round": 1})
    folder.save_checkpoint(checkpoint(1, rows_bytes=folder.rows_bytes()))
    renamed = order.index("rename to round-000001")
    assert set(order[:renamed]) == {"rounds.jsonl", "tensors.safetensors", "state.json", "digests.json"}
    assert order[renamed + 1 :] == ["checkpoint"]


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "digests.json"])
@pytest.mark.parametrize("damage", [cut_short, alter, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(folder: RunFolder, damage: Any, name: str):
    folder.save_checkpoint(checkpoint(3))
    folder.save_checkpoint(checkpoint(4))
    damage(part(folder, 4, name))
    found, problems = folder.load_checkpoint()
    assert found is not None
    assert found.round == 3
    assert found.tensors["centers"].unique().tolist() == [3.0]
    assert len(problems) == 2
    assert "round-000004" in problems[0]
    assert "this checkpoint is not used" in problems[0]
    assert problems[1] == "The checkpoint of round 3 is used."


def test_when_both_are_damaged_it_says_that_the_run_begins_again(folder: RunFolder):
    for round in (1, 2):
        folder.save_checkpoint(checkpoint(round))
        cut_short(part(folder, round, "tensors.safetensors"))
    found, problems = folder.load_checkpoint()
    assert found is None
    assert ["round-000002" in problems[0], "round-000001" in problems[1]] == [True, True]
    assert "starts again from the first round" in problems[2]


def test_a_checkpoint_of_a_newer_version_is_refused_by_name(folder: RunFolder):
    folder.save_checkpoint(checkpoint(1))
    folder.save_checkpoint(checkpoint(2, schema=SCHEMA + 1))
    found, problems = folder.load_checkpoint()
    assert found is not None
    assert found.round == 1
    assert f"has schema {SCHEMA + 1}; this version reads up to {SCHEMA}" in problems[0]


def test_a_damaged_later_checkpoint_does_not_push_out_an_intact_one(folder: RunFolder):
    folder.save_checkpoint(checkpoint(3))
    folder.save_checkpoint(checkpoint(5))
    alter(part(folder, 5, "state.json"))
    folder.save_checkpoint(checkpoint(4))
    assert saved(folder) == ["round-000003", "round-000004"]


def test_what_a_killed_process_left_half_written_is_not_taken_for_a_checkpoint(folder: RunFolder):
    folder.save_checkpoint(checkpoint(1))
    half = folder.path / "checkpoint" / ".round-000002.tmp"
    half.mkdir()
    (half / "tensors.safetensors").write_bytes(b"half")
    found, problems = folder.load_checkpoint()
    assert found is not None
    assert (found.round, problems) == (1, [])
    folder.save_checkpoint(checkpoint(2))
    assert saved(folder) == ["round-000001", "round-000002"]
    found, _ = folder.load_checkpoint()
    assert found is not None
    assert found.round == 2


@pytest.mark.parametrize("fails", ["fsync", "replace", "mkdir"])
def test_a_full_disk_leaves_the_checkpoints_before(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, fails: str):
    folder.save_checkpoint(checkpoint(1))
    folder.save_checkpoint(checkpoint(2))
    with monkeypatch.context() as patch:
        patch.setattr(os, fails, no_space)
        with pytest.raises(StorageError) as caught:
            folder.save_checkpoint(checkpoint(3))
    said = str(caught.value)
    assert "The checkpoint of round 3" in said
    assert "No space left on device. The checkpoint of round 2 is kept" in said
    assert f"resume with 'coterie resume {folder.path}'" in said
    assert saved(folder) == ["round-000001", "round-000002"]
    found, problems = folder.load_checkpoint()
    assert found is not None
    assert (found.round, problems) == (2, [])
    folder.save_checkpoint(checkpoint(3))
    assert saved(folder) == ["round-000002", "round-000003"]


def test_saving_a_round_again_replaces_it(folder: RunFolder):
    folder.save_checkpoint(checkpoint(2))
    folder.save_checkpoint(Checkpoint(2, {"centers": torch.ones(1)}, {"rows_bytes": 5}))
    found, problems = folder.load_checkpoint()
    assert found is not None
    assert problems == []
    assert found.plain["rows_bytes"] == 5
    assert found.tensors["centers"].tolist() == [1.0]


# ---- TOML ----


@pytest.mark.parametrize(
    "value",
    [0, -3, 1e-05, 1e300, 0.1, True, False, "", 'with "quotes" and \\', "two\nlines", "grüße", [1, 2], [[1.5], ["a"]]],
)
def test_toml_is_read_back_as_it_was(value: Any):
    assert tomllib.loads(to_toml({"top": value, "table": {"key": value}})) == {"top": value, "table": {"key": value}}


# ---- creation ----


@pytest.mark.parametrize("call", [1, 2])
def test_a_full_disk_while_it_is_created_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int):
    """No inode for .lock, or none for the settings."""
    real, calls = os.open, []

    def full(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            calls.append(path)
            if len(calls) == call:
                raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(
        StorageError, match=r"a cannot be written: .*No space left.* Free some space, or choose another"
    ):
        RunFolder.create(tmp_path, "a", "unused", CONFIG)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("inside", [[".lock"], [".lock", "artifacts"], [".lock", "artifacts", ".config.toml.tmp"]])
def test_a_folder_whose_process_was_killed_at_once_is_used(tmp_path: Path, inside: list[str]):
    (tmp_path / "a").mkdir()
    for name in inside:
        (tmp_path / "a" / name).mkdir() if name == "artifacts" else (tmp_path / "a" / name).touch()
    made = RunFolder.create(tmp_path, "a", "unused", CONFIG)
    made.unlock()
    assert RunFolder.open(tmp_path / "a").config()["run"] == CONFIG["run"]


def test_a_folder_that_is_just_created_by_another_process_is_not_taken(tmp_path: Path):
    (tmp_path / "a").mkdir()
    with RunFolder(tmp_path / "a").held(), pytest.raises(RunError, match="is in use by another process"):
        RunFolder.create(tmp_path, "a", "unused", CONFIG)
    assert (tmp_path / "a" / ".lock").exists()
