"""The way to the sites: who is there, and messages to them with a deadline, over Flower's Grid.

Identity hangs on the key that a node was registered with (`identity="key"`): a name belongs to the key that first
claimed it, for the whole run. Where nodes have no keys (simulation, insecure trials) a name is what a node claims, and
belongs to it while it is connected.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import torch
from flwr.app import ConfigRecord, Message, RecordDict

from coterie.data.federation import Split
from coterie.errors import CoterieError
from coterie.randomness import name_keys

log = logging.getLogger("coterie.flower")

Identity = Literal["key", "claimed"]
_LIVES = 60.0  # seconds that a message may wait for its node beyond the deadline
_AGAIN = 60.0  # seconds until a node that did not say who it is is asked again
_HELLO = 30.0  # seconds that a node may take to say who it is


class Unreachable(CoterieError):
    """The server cannot reach the SuperLink any more."""


@dataclass(frozen=True)
class Member:
    """A client that the run knows."""

    name: str
    owner: str  # what its name is bound to: a fingerprint of its key, or its node
    train: int  # samples
    valid: int
    test: int


class Grid(Protocol):
    """What is used of Flower's Grid."""

    def get_nodes(self) -> Any: ...
    def push_messages(self, messages: Any) -> Any: ...
    def pull_messages(self, message_ids: Any) -> Any: ...


class Link:
    """Messages to members, by name."""

    def __init__(self, grid: Grid, identity: Identity, poll: float = 0.05, world: str = "") -> None:
        self._grid, self._identity, self._poll = grid, identity, poll
        self.world = world  # simulation: where the data of the clients lie
        self._node: dict[str, int] = {}  # of members that are connected
        self._silent: dict[int, float] = {}  # nodes that did not say who they are, and when they are asked again
        self._refused: dict[int, str] = {}  # nodes that are not let in, and why
        self.members: dict[str, Member] = {}
        self.notes: list[str] = []

    # ---- who is there ----

    def roll_call(self) -> list[Member]:
        """Ask nodes that are not known who they are; the members that are new, in the order of their names."""
        nodes = {int(node.node_id): node for node in self._grid.get_nodes()}
        self._node = {name: node for name, node in self._node.items() if node in nodes}
        self._refused = {node: why for node, why in self._refused.items() if node in nodes}
        there = set(self._node.values()) | set(self._refused)
        now = time.monotonic()
        unknown = [number for number in nodes if number not in there and self._silent.get(number, 0.0) <= now]
        new: list[Member] = []
        hello = {number: _hello(self.world) for number in unknown}
        for number, reply in sorted(self._exchange(hello, "query", _HELLO), key=lambda pair: _claimed(pair[1])):
            if isinstance(reply, str):
                self._silent[number] = time.monotonic() + _AGAIN  # it is asked again, but does not hold up every round
                continue
            member = self._let_in(number, nodes[number], reply)
            if member is not None and member.name not in self.members:
                self.members[member.name] = member
                new.append(member)
        return new

    def _let_in(self, number: int, node: Any, reply: RecordDict) -> Member | None:
        try:
            told = json.loads(str(reply["hello"]["json"]))
            member = Member(str(told["name"]), self._owner(number, node), *(int(told[s]) for s in _SPLITS))
        except (KeyError, TypeError, ValueError) as error:
            return self._keep_out(number, f"node {number} did not say who it is ({type(error).__name__})")
        if not member.name or len(member.name) > 200 or not member.name.isprintable() or member.train < 1:
            return self._keep_out(number, f"node {number} claims a name or a number of samples that cannot be")
        known = self.members.get(member.name)
        other = self._node.get(member.name)
        if known is not None and known.owner != member.owner and (self._identity == "key" or other is not None):
            return self._keep_out(number, f"node {number} claims to be '{member.name}', which belongs to another one")
        claimed = [m.name for m in self.members.values() if m.owner == member.owner and m.name != member.name]
        if claimed:
            return self._keep_out(number, f"node {number} is known as '{claimed[0]}' and claims to be '{member.name}'")
        self._node[member.name] = number
        log.info("%s is here (node %d)", member.name, number)
        if known is not None and known.owner != member.owner:
            self.members[member.name] = member  # without keys a node that comes back is another one
        return member

    def _owner(self, number: int, node: Any) -> str:
        key = bytes(getattr(node, "public_key", b"") or b"")
        if self._identity == "key" and key:
            return "key:" + hashlib.sha256(key).hexdigest()[:32]
        return f"node:{number}"

    def _keep_out(self, number: int, why: str) -> Member | None:
        self._refused[number] = why
        self.notes.append(why)
        log.warning("%s; it is not let in", why)
        return None

    @property
    def connected(self) -> list[str]:
        """Members that are there, as of the last roll call."""
        return list(self._node)

    def remember(self, members: list[Mapping[str, Any]]) -> None:
        """The run goes on: those it knew, in their order."""
        self.members = {str(m["name"]): Member(**m) for m in members}

    def told(self) -> list[dict[str, Any]]:
        """The members, for the run folder."""
        return [asdict(member) for member in self.members.values()]

    # ---- messages ----

    def ask(self, contents: Mapping[str, RecordDict], kind: str, deadline: float) -> Iterator[tuple[str, Any]]:
        """Send each member its message: yields names and replies, as they come, or a text why there is none."""
        away = [name for name in contents if name not in self._node]
        if away:
            self.roll_call()
        for name in contents:
            if name not in self._node:
                yield name, "is not connected"
        to = {self._node[name]: content for name, content in contents.items() if name in self._node}
        name_of = {self._node[name]: name for name in contents if name in self._node}
        for number, reply in self._exchange(to, kind, deadline):
            yield name_of[number], reply

    def _exchange(self, contents: Mapping[int, RecordDict], kind: str, deadline: float) -> Iterator[tuple[int, Any]]:
        """Push, then pull with a short poll until all have answered or the deadline has come."""
        if not contents:
            return
        ends = time.monotonic() + deadline
        nodes = list(contents)
        try:
            messages = [Message(contents[n], n, kind, ttl=deadline + _LIVES) for n in nodes]
            ids = list(self._grid.push_messages(messages))
            ids += [None] * (len(nodes) - len(ids))
            waiting = {str(message): node for message, node in zip(ids, nodes, strict=True) if message}
            for message, node in zip(ids, nodes, strict=True):
                if not message:
                    yield node, "could not be sent its message"
            while waiting and time.monotonic() < ends:
                for reply in self._grid.pull_messages(list(waiting)):
                    # Errors that the SuperLink makes itself name no sender: what they answer tells who is meant.
                    found = waiting.pop(reply.metadata.reply_to_message_id, None)
                    if found is not None:
                        yield found, _content(reply)
                if waiting:
                    time.sleep(self._poll)
        except (OSError, RuntimeError) as error:
            raise Unreachable(f"The SuperLink does not answer: {type(error).__name__}: {error}") from error
        for node in waiting.values():
            yield node, f"did not answer in {deadline:g} s"


_SPLITS = ("train", "valid", "test")


def _hello(world: str) -> RecordDict:
    content = RecordDict()
    content["hello"] = ConfigRecord({"world": world})
    return content


def _claimed(reply: Any) -> str:
    """What a node calls itself, for an order that does not hang on who was faster."""
    try:
        return str(json.loads(str(reply["hello"]["json"]))["name"])
    except (KeyError, TypeError, ValueError):
        return ""


def _content(reply: Any) -> Any:
    if reply.has_error():
        reason = str(reply.error.reason or "").strip().splitlines()
        return f"failed with code {reply.error.code}: {reason[-1] if reason else 'no reason told'}"[:500]
    return reply.content


def hello_of(name: str, sizes: Mapping[str, int]) -> RecordDict:
    """A site's answer to the question who it is."""
    content = RecordDict()
    content["hello"] = ConfigRecord({"json": json.dumps({"name": name, **sizes})})
    return content


def splits_of(members: Sequence[Member]) -> dict[str, Any]:
    """Names, keys and sizes of members, as a federation has them; no data."""

    def split(sizes: list[int]) -> Split:
        offsets = torch.tensor([0, *sizes]).cumsum(0)
        return Split(torch.zeros(0, dtype=torch.int64), offsets, torch.arange(len(sizes)))

    names = tuple(member.name for member in members)
    return {
        "names": names,
        "keys": name_keys(names),
        "train": split([m.train for m in members]),
        "valid": split([m.valid for m in members]),
        "test": split([m.test for m in members]),
    }
