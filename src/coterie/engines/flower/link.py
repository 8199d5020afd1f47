"""The connection to the sites over Flower's Grid: discovery, identity, and messages with a deadline.

With `identity="key"` a name belongs, for the whole run, to the registered key that first claimed it. Without keys
(simulation, insecure trials) a name belongs to the node that claims it, while that node is connected.
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

from coterie.data.federation import SPLITS, Federation, Split
from coterie.errors import CoterieError
from coterie.randomness import name_keys

log = logging.getLogger("coterie.flower")

Identity = Literal["key", "claimed"]
_EXTRA_TTL = 60.0  # seconds that a message stays valid after the deadline
_RETRY = 60.0  # seconds until a node that did not identify itself is asked again
_HELLO = 30.0  # seconds that a node has to identify itself


class Unreachable(CoterieError):
    """The server has lost its connection to the SuperLink."""


@dataclass(frozen=True)
class Member:
    """A client of the run."""

    name: str
    owner: str  # owner of the name: a key fingerprint or a node id
    train: int  # samples
    valid: int
    test: int


class Grid(Protocol):
    """The methods of Flower's Grid in use."""

    def get_nodes(self) -> Any: ...
    def push_messages(self, messages: Any) -> Any: ...
    def pull_messages(self, message_ids: Any) -> Any: ...


class Link:
    """Messages to members, by name."""

    def __init__(self, grid: Grid, identity: Identity, poll: float = 0.05) -> None:
        self._grid, self._identity, self._poll = grid, identity, poll
        self._node: dict[str, int] = {}  # connected members
        self._silent: dict[int, float] = {}  # nodes that did not identify themselves, and when to ask again
        self._refused: dict[int, str] = {}  # rejected nodes, and why
        self.members: dict[str, Member] = {}
        self.notes: list[str] = []

    # ---- discovery ----

    def roll_call(self) -> list[Member]:
        """Ask unknown nodes to identify themselves; returns the new members, sorted by name."""
        nodes = {int(node.node_id): node for node in self._grid.get_nodes()}
        self._node = {name: node for name, node in self._node.items() if node in nodes}
        self._refused = {node: why for node, why in self._refused.items() if node in nodes}
        there = set(self._node.values()) | set(self._refused)
        now = time.monotonic()
        unknown = [number for number in nodes if number not in there and self._silent.get(number, 0.0) <= now]
        new: list[Member] = []
        hello = {number: ("query", _hello()) for number in unknown}
        for number, reply in sorted(self._exchange(hello, _HELLO), key=lambda pair: _claimed(pair[1])):
            if isinstance(reply, str):
                self._silent[number] = time.monotonic() + _RETRY  # not every round: each attempt takes up to _HELLO
                continue
            member = self._admit(number, nodes[number], reply)
            if member is not None and member.name not in self.members:
                self.members[member.name] = member
                new.append(member)
        return new

    def _admit(self, number: int, node: Any, reply: RecordDict) -> Member | None:
        try:
            claim = json.loads(str(reply["hello"]["json"]))
            member = Member(str(claim["name"]), self._owner(number, node), *(int(claim[s]) for s in SPLITS))
        except (KeyError, TypeError, ValueError) as error:
            return self._reject(number, f"node {number} did not identify itself ({type(error).__name__})")
        if not member.name or len(member.name) > 200 or not member.name.isprintable() or member.train < 1:
            return self._reject(number, f"node {number} claims an invalid name or number of samples")
        known = self.members.get(member.name)
        other = self._node.get(member.name)
        if known is not None and known.owner != member.owner and (self._identity == "key" or other is not None):
            return self._reject(number, f"node {number} claims to be '{member.name}', which belongs to another node")
        claimed = [m.name for m in self.members.values() if m.owner == member.owner and m.name != member.name]
        if claimed:
            return self._reject(number, f"node {number} is known as '{claimed[0]}' but claims to be '{member.name}'")
        self._node[member.name] = number
        log.info("%s has connected (node %d)", member.name, number)
        if known is not None and known.owner != member.owner:
            self.members[member.name] = member  # without keys, a node that reconnects has a new id
        return member

    def _owner(self, number: int, node: Any) -> str:
        key = bytes(getattr(node, "public_key", b"") or b"")
        if self._identity == "key" and key:
            return "key:" + hashlib.sha256(key).hexdigest()[:32]
        return f"node:{number}"

    def _reject(self, number: int, why: str) -> Member | None:
        self._refused[number] = why
        self.notes.append(why)
        log.warning("%s; it is rejected", why)
        return None

    @property
    def connected(self) -> list[str]:
        """Members connected at the last roll call."""
        return list(self._node)

    def restore(self, members: list[Mapping[str, Any]]) -> None:
        """Restore the members of a resumed run, in order."""
        self.members = {str(m["name"]): Member(**m) for m in members}

    def records(self) -> list[dict[str, Any]]:
        """The members, for the run folder."""
        return [asdict(member) for member in self.members.values()]

    # ---- messages ----

    def ask(self, contents: Mapping[str, tuple[str, RecordDict]], deadline: float) -> Iterator[tuple[str, Any]]:
        """Send each member its message, a kind and a content.

        Yields names with replies as they arrive, or with the reason of a failure.
        """
        if any(name not in self._node for name in contents):
            self.roll_call()
        for name in contents:
            if name not in self._node:
                yield name, "is not connected"
        to = {self._node[name]: content for name, content in contents.items() if name in self._node}
        name_of = {self._node[name]: name for name in contents if name in self._node}
        for number, reply in self._exchange(to, deadline):
            yield name_of[number], reply

    def _exchange(self, contents: Mapping[int, tuple[str, RecordDict]], deadline: float) -> Iterator[tuple[int, Any]]:
        """Push the messages, then poll until all nodes have answered or the deadline has passed."""
        if not contents:
            return
        ends = time.monotonic() + deadline
        nodes = list(contents)
        try:
            messages = [Message(content, n, kind, ttl=deadline + _EXTRA_TTL) for n, (kind, content) in contents.items()]
            ids = list(self._grid.push_messages(messages))
            ids += [None] * (len(nodes) - len(ids))
            waiting = {str(message): node for message, node in zip(ids, nodes, strict=True) if message}
            for message, node in zip(ids, nodes, strict=True):
                if not message:
                    yield node, "could not be reached"
            is_over = False
            while waiting and not is_over:  # look once more after the deadline: answers may have come meanwhile
                is_over = time.monotonic() >= ends
                for reply in self._grid.pull_messages(list(waiting)):
                    # The SuperLink's own errors have no sender, so match replies by the message they answer.
                    found = waiting.pop(reply.metadata.reply_to_message_id, None)
                    if found is not None:
                        yield found, _content(reply)
                if waiting and not is_over:
                    time.sleep(self._poll)
        except (OSError, RuntimeError) as error:
            raise Unreachable(
                f"The SuperLink does not answer ({type(error).__name__}: {error}); restart it, then resume the run."
            ) from error
        for node in waiting.values():
            yield node, f"did not answer in {deadline:g} s"


def _hello() -> RecordDict:
    content = RecordDict()
    content["hello"] = ConfigRecord({"world": ""})  # part of the protocol; nodes ignore it
    return content


def _claimed(reply: Any) -> str:
    """The name that a node claims, for an order that does not depend on timing."""
    try:
        return str(json.loads(str(reply["hello"]["json"]))["name"])
    except (KeyError, TypeError, ValueError):
        return ""


def _content(reply: Any) -> Any:
    if reply.has_error():
        reason = str(reply.error.reason or "").strip().splitlines()
        return f"failed with code {reply.error.code}: {reason[-1] if reason else 'no reason given'}"[:500]
    return reply.content


def hello_of(federation: Federation, client: int) -> RecordDict:
    """A node's answer when it is asked to identify itself: the name and sizes of its client."""
    content = RecordDict()
    sizes = {split: int(federation.split(split).sizes[client]) for split in SPLITS}
    content["hello"] = ConfigRecord({"json": json.dumps({"name": federation.names[client], **sizes})})
    return content


def splits_of(members: Sequence[Member]) -> dict[str, Any]:
    """Names, keys and sizes of members, as fields of a federation without data."""

    def split(sizes: list[int]) -> Split:
        offsets = torch.tensor([0, *sizes]).cumsum(0)
        return Split(torch.zeros(0, dtype=torch.int64), offsets, torch.arange(len(sizes)))

    names = tuple(member.name for member in members)
    return {
        "names": names,
        "keys": name_keys(names),
        **{name: split([getattr(member, name) for member in members]) for name in SPLITS},
    }
