"""Client memory on disk: two generations, and the right one after the server has resumed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("flwr", reason="needs pip install 'coterie[flower]'")

from coterie.engines.flower.memory import DiskMemory, folder_name
from coterie.errors import StorageError

NOTHING = torch.full((1, 2), -1.0)


def value(number):
    return torch.full((1, 2), float(number))


def at(folder, round, life="a", **past):
    return DiskMemory(folder, round, life, past)


def test_values_persist_between_rounds(tmp_path):
    assert torch.equal(at(tmp_path, 1).get("m", NOTHING), NOTHING)
    at(tmp_path, 1).put("m", value(1))
    assert torch.equal(at(tmp_path, 1).get("m", NOTHING), value(1))
    at(tmp_path, 3).put("n", value(3))
    assert torch.equal(at(tmp_path, 4).get("m", NOTHING), value(1))
    assert torch.equal(at(tmp_path, 4).get("n", NOTHING), value(3))


def test_two_generations_are_kept(tmp_path):
    for round in range(1, 6):
        at(tmp_path, round).put("m", value(round))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_repeated_round_starts_from_the_memory_before_it(tmp_path):
    at(tmp_path, 1).put("m", value(1))
    at(tmp_path, 2).put("m", value(2))  # the server dies before its checkpoint of round 2
    again = at(tmp_path, 2, "b", a=1)
    assert torch.equal(again.get("m", NOTHING), value(1))
    again.put("m", value(20))
    assert torch.equal(at(tmp_path, 3, "b", a=1).get("m", NOTHING), value(20))


def test_a_discarded_generation_stays_discarded(tmp_path):
    at(tmp_path, 1).put("m", value(1))
    at(tmp_path, 2).put("m", value(2))
    # Life b does rounds 2 to 5 without this client; then life c resumes from 5.
    assert torch.equal(at(tmp_path, 6, "c", a=1, b=5).get("m", NOTHING), value(1))


def test_a_resumed_server_keeps_the_round_of_its_checkpoint(tmp_path):
    at(tmp_path, 2).put("m", value(2))
    assert torch.equal(at(tmp_path, 2, "b", a=2).get("m", NOTHING), value(2))


def test_a_damaged_file_is_reported(tmp_path):
    at(tmp_path, 1).put("m", value(1))
    [path] = tmp_path.iterdir()
    path.write_bytes(b"xx")
    with pytest.raises(StorageError, match="cannot be read"):
        at(tmp_path, 2).get("m", NOTHING)


def test_names_become_folders():
    assert folder_name("site-1") == "site-1"
    for name in ("../x", "a/b", "", "ä", "x" * 200):
        plain = folder_name(name)
        assert "/" not in plain
        assert plain not in ("", ".", "..")
    assert folder_name("a/b") != folder_name("a.b")
