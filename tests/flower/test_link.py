"""Identity of nodes: names are bound to keys."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("flwr", reason="needs pip install 'coterie[flower]'")

from flwr.app import ConfigRecord, Message, RecordDict

from coterie.engines.flower.link import Link
from tests.flower.fakes import FakeGrid


def site(name, train=10):
    def app(message, context):
        content = RecordDict()
        hello = {"name": name, "train": train, "valid": 0, "test": 2}
        content["hello"] = ConfigRecord({"json": json.dumps(hello)})
        return Message(content, reply_to=message)

    return app


def test_a_name_belongs_to_the_key_that_claimed_it_first():
    grid = FakeGrid()
    grid.add(1, site("a"), key=b"key of a")
    link = Link(grid, "key", 0.001)
    assert [m.name for m in link.roll_call()] == ["a"]
    grid.add(2, site("a"), key=b"another key")
    assert link.roll_call() == []
    assert "belongs to another node" in link.notes[0]
    del grid.nodes[1]
    assert link.roll_call() == []
    assert link.connected == []  # not even while the owner is away
    grid.add(3, site("a"), key=b"key of a")  # the owner, as another node
    assert link.roll_call() == []
    assert link.connected == ["a"]


def test_a_key_has_one_name():
    grid = FakeGrid()
    grid.add(1, site("a"), key=b"key")
    link = Link(grid, "key", 0.001)
    link.roll_call()
    del grid.nodes[1]
    grid.add(2, site("b"), key=b"key")
    assert link.roll_call() == []
    assert "is known as 'a' but claims to be 'b'" in link.notes[0]


def test_without_keys_a_name_is_free_once_its_node_is_gone():
    grid = FakeGrid()
    grid.add(1, site("a"))
    link = Link(grid, "claimed", 0.001)
    link.roll_call()
    grid.add(2, site("a"))
    link.roll_call()
    assert link.connected == ["a"]
    assert len(link.notes) == 1
    del grid.nodes[1]
    del grid.nodes[2]
    grid.add(3, site("a", train=1000))
    assert link.roll_call() == []
    assert link.connected == ["a"]
    assert link.members["a"].train == 10  # as it declared when it joined


@pytest.mark.parametrize(("name", "train"), [("", 3), ("x" * 300, 3), ("a\nb", 3), ("a", 0)])
def test_invalid_names_and_sizes_are_rejected(name, train):
    grid = FakeGrid()
    grid.add(1, site(name, train))
    link = Link(grid, "claimed", 0.001)
    assert link.roll_call() == []
    assert len(link.notes) == 1


@pytest.mark.parametrize("text", ["", "[]", "{", json.dumps({"name": "a"})])
def test_a_node_that_does_not_identify_itself(text):
    def app(message, context):
        content = RecordDict()
        content["hello"] = ConfigRecord({"json": text})
        return Message(content, reply_to=message)

    grid = FakeGrid()
    grid.add(1, app)
    link = Link(grid, "claimed", 0.001)
    assert link.roll_call() == []
    assert "did not identify itself" in link.notes[0]


def test_members_are_restored_in_order():
    grid = FakeGrid()
    for number, name in enumerate("cab"):
        grid.add(number + 1, site(name), key=name.encode())
    link = Link(grid, "key", 0.001)
    link.roll_call()
    assert list(link.members) == ["a", "b", "c"]
    again = Link(grid, "key", 0.001)
    again.restore(link.records())
    assert again.members == link.members
    grid.add(9, site("d"), key=b"d")
    assert [m.name for m in again.roll_call()] == ["d"]
    assert list(again.members) == ["a", "b", "c", "d"]
