"""What a client remembers: two generations by round, and the right one after the server has gone back."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("flwr", reason="needs pip install 'coterie[flower]'")

from coterie.engines.flower.memory import DiskMemory, plain_name
from coterie.errors import StorageError

NOTHING = torch.full((1, 2), -1.0)


def value(number):
    return torch.full((1, 2), float(number))


def at(folder, round, life="a", **past):
    return DiskMemory(folder, round, life, past)


def test_it_stays_from_round_to_round(tmp_path):
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


def test_a_round_that_the_server_does_again_starts_from_the_one_before(tmp_path):
    at(tmp_path, 1).put("m", value(1))
    at(tmp_path, 2).put("m", value(2))  # the server dies before its checkpoint of round 2
    again = at(tmp_path, 2, "b", a=1)
    assert torch.equal(again.get("m", NOTHING), value(1))
    again.put("m", value(20))
    assert torch.equal(at(tmp_path, 3, "b", a=1).get("m", NOTHING), value(20))


def test_a_generation_that_was_taken_back_never_counts_again(tmp_path):
    at(tmp_path, 1).put("m", value(1))
    at(tmp_path, 2).put("m", value(2))
    # Life b does rounds 2 to 5 without this client; then life c goes on from 5.
    assert torch.equal(at(tmp_path, 6, "c", a=1, b=5).get("m", NOTHING), value(1))


def test_a_life_that_goes_on_from_a_checkpoint_knows_that_round(tmp_path):
    at(tmp_path, 2).put("m", value(2))
    assert torch.equal(at(tmp_path, 2, "b", a=2).get("m", NOTHING), value(2))


def test_a_damaged_file_is_told(tmp_path):
    at(tmp_path, 1).put("m", value(1))
    [path] = tmp_path.iterdir()
    path.write_bytes(b"xx")
    with pytest.raises(StorageError, match="cannot be read"):
        at(tmp_path, 2).get("m", NOTHING)


def test_names_become_folders():
    assert plain_name("site-1") == "site-1"
    for name in ("../x", "a/b", "", "ä", "x" * 200):
        plain = plain_name(name)
        assert "/" not in plain
        assert plain not in ("", ".", "..")
    assert plain_name("a/b") != plain_name("a.b")
