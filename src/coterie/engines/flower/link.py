"""The connection to the sites over Flower's Grid: discovery, identity, and messages with a deadline.

With `identity="key"` a name belongs, for the whole run, to the registered key that first claimed it; nodes without a
registered key are not even asked. Without keys (simulation, insecure trials) a name belongs to the node that claims it,
while that node is connected.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Any, Literal, Protocol

import torch
from flwr.app import ConfigRecord, Message, RecordDict

from coterie.data.federation import SPLITS, Federation, Split, SplitName
from coterie.errors import CoterieError
from coterie.randomness import name_keys
from coterie.trust import safe_text

log = logging.getLogger("coterie.flower")

Identity = Literal["key", "claimed"]
_EXTRA_TTL = 60.0  # seconds that a message stays valid after the deadline
_RETRY = 60.0  # seconds until a node that did not identify itself is asked again
_HELLO = 30.0  # seconds that a node has to identify itself
_LONGEST_HELLO = 2000  # characters
_LONGEST_NAME = 200
_MOST_NOTES = 100
_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)  # seconds before an overloaded SuperLink is asked again
MOST_SAMPLES = 100_000_000  # that a node may declare, unless the operator says otherwise
_DecodeError: type[Exception] = import_module("google.protobuf.message").DecodeError  # it has no types
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError, _DecodeError)


class Unreachable(CoterieError):
    """The server has lost its connection to the SuperLink."""


@dataclass(frozen=True)
class Member:
    """A client of the run."""

    name: str
    owner: str  # owner of the name: a key fingerprint or a node id
    train: int  # samples, as it declared them when it joined
    valid: int
    test: int

    @property
    def sizes(self) -> dict[SplitName, int]:
        """The samples of each split."""
        return {"train": self.train, "valid": self.valid, "test": self.test}


class Grid(Protocol):
    """The methods of Flower's Grid in use."""

    def get_nodes(self) -> Any: ...
    def push_messages(self, messages: Any) -> Any: ...
    def pull_messages(self, message_ids: Any) -> Any: ...


class Link:
    """Messages to members, by name.

    With `registered`, only nodes with one of these keys (`owner_of`) are members; it is called at each roll call.
    """

    def __init__(
        self,
        grid: Grid,
        identity: Identity,
        poll: float = 0.05,
        most_samples: int = MOST_SAMPLES,
        registered: Callable[[], Collection[str]] | None = None,
    ) -> None:
        self._grid, self._identity, self._poll = grid, identity, poll
        self._most_samples, self._registered = most_samples, registered
        self._apart = False  # pull replies one at a time, because one of them could not be read
        self._node: dict[str, int] = {}  # connected members
        self._silent: dict[
            int, tuple[float, float]
        ] = {}  # nodes that did not answer: when to ask again, the next pause
        self._refused: dict[int, str] = {}  # rejected nodes, and why
        self.members: dict[str, Member] = {}
        self.notes: list[str] = []

    # ---- discovery ----

    def roll_call(self, patience: float = _HELLO) -> list[Member]:
        """Ask unknown nodes to identify themselves in so many seconds; returns the new members, sorted by name."""
        nodes = {int(node.node_id): node for node in self._patiently(self._grid.get_nodes)}
        self._node = {name: node for name, node in self._node.items() if node in nodes}
        self._refused = {node: why for node, why in self._refused.items() if node in nodes}
        there = set(self._node.values()) | set(self._refused)
        now = time.monotonic()
        unknown = [number for number in nodes if number not in there and self._silent.get(number, (0.0,))[0] <= now]
        unknown = self._with_keys(unknown, nodes)
        new: list[Member] = []
        hello = {number: ("query", _hello()) for number in unknown}
        for number, reply in sorted(self._exchange(hello, patience), key=lambda pair: _claimed(pair[1])):
            if isinstance(reply, str):
                pause = self._silent.get(number, (0.0, _RETRY))[1]  # longer each time: an attempt holds the round
                self._silent[number] = time.monotonic() + pause, 2 * pause
                continue
            member = self._admit(number, nodes[number], reply)
            if member is not None and member.name not in self.members:
                self.members[member.name] = member
                new.append(member)
        return new

    def _admit(self, number: int, node: Any, reply: RecordDict) -> Member | None:
        try:
            name, sizes = _claim(reply)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            return self._reject(number, f"node {number} did not identify itself ({type(error).__name__})")
        if not name or len(name) > _LONGEST_NAME or not name.isprintable():
            return self._reject(number, f"node {number} claims an invalid name")
        if sizes["train"] < 1 or not all(0 <= size <= self._most_samples for size in sizes.values()):
            declared = ", ".join(f"{safe_text(size, 20)} {split}" for split, size in sizes.items())
            return self._reject(
                number,
                f"node {number} declares {declared} samples; allowed are 1 to {self._most_samples} for training, and "
                f"at most {self._most_samples} others",
            )
        member = Member(name, self._owner(number, node), **sizes)
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
            self.members[member.name] = replace(known, owner=member.owner)  # a node that reconnects has a new id
        return member

    def _with_keys(self, numbers: list[int], nodes: Mapping[int, Any]) -> list[int]:
        """The nodes that may be asked: with `identity="key"`, those with a registered key."""
        if self._identity != "key":
            return numbers
        registered = None if self._registered is None else self._registered()
        found = []
        for number in numbers:
            key = _key_of(nodes[number])
            if not key:
                self._note(f"node {number} has no key")
            elif registered is not None and owner_of(key) not in registered:
                self._note(f"node {number} has a key that is not registered here")
            else:
                found.append(number)
        return found

    def _owner(self, number: int, node: Any) -> str:
        return owner_of(_key_of(node)) if self._identity == "key" else f"node:{number}"

    def _reject(self, number: int, why: str) -> Member | None:
        self._refused[number] = why
        self._note(why)
        return None

    def _note(self, why: str) -> None:
        if why not in self.notes and len(self.notes) < _MOST_NOTES:
            self.notes.append(why)
            log.warning("%s; it is rejected", why)

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
                for some in [[message] for message in waiting] if self._apart else [list(waiting)]:
                    for to, reply in self._pulled(some):
                        found = waiting.pop(to, None)
                        if found is not None:
                            yield found, reply
                if waiting and not is_over:
                    time.sleep(self._poll)
        except (OSError, RuntimeError) as error:
            raise Unreachable(
                f"The SuperLink does not answer ({type(error).__name__}: {error}); restart it, then resume the run."
            ) from error
        for node in waiting.values():
            yield node, f"did not answer in {deadline:g} s"

    def _pulled(self, messages: list[str]) -> list[tuple[str, Any]]:
        """The replies to these messages that are there, each with the message that it answers."""
        try:
            replies = self._patiently(lambda: self._grid.pull_messages(messages))
        except _UNREADABLE as error:
            why = f"sent a message that cannot be read ({type(error).__name__})"
            if len(messages) == 1:
                return [(messages[0], why)]
            self._note(f"somebody {why}; it may have cost others their answers, once")
            self._apart = True
            return []
        # The SuperLink's own errors have no sender, so match replies by the message they answer.
        return [(reply.metadata.reply_to_message_id, _content(reply)) for reply in replies]

    def _patiently(self, ask: Callable[[], Any]) -> list[Any]:
        """What the SuperLink answers; one that is overloaded is asked again."""
        pauses = list(_PAUSES)
        while True:
            try:
                return list(ask())
            except Exception as error:  # of Flower's HTTP client, which is not ours to import
                status = getattr(getattr(error, "response", None), "status_code", 0)
                if not (isinstance(status, int) and status >= 500):
                    raise
                if not pauses:
                    raise Unreachable(f"The SuperLink answers with status {status}; resume the run later.") from error
            log.warning("the SuperLink answers with status %d; it is asked again in %g s", status, pauses[0])
            time.sleep(pauses.pop(0))


def owner_of(key: bytes) -> str:
    """How a public key is named where it owns a client's name."""
    return "key:" + hashlib.sha256(key).hexdigest()[:32]


def _key_of(node: Any) -> bytes:
    return bytes(getattr(node, "public_key", b"") or b"")


def _hello() -> RecordDict:
    content = RecordDict()
    content["hello"] = ConfigRecord({"world": ""})  # part of the protocol; nodes ignore it
    return content


def _claimed(reply: Any) -> str:
    """The name that a node claims, for an order that does not depend on timing."""
    try:
        return _claim(reply)[0]
    except (KeyError, TypeError, ValueError, RecursionError):
        return ""


def _claim(reply: Any) -> tuple[str, dict[SplitName, int]]:
    """The name and the numbers of samples in a node's answer; raises if they are not a text and three integers."""
    text = reply["hello"]["json"]
    if not isinstance(text, str) or len(text) > _LONGEST_HELLO:
        raise ValueError("a hello is a short text")
    claim = json.loads(text)
    name, sizes = claim["name"], {split: claim[split] for split in SPLITS}
    if not isinstance(name, str) or not all(type(size) is int for size in sizes.values()):
        raise TypeError("a hello has a name and integers")
    return name, sizes


def _content(reply: Any) -> Any:
    if reply.has_error():
        reason = str(reply.error.reason or "").strip().splitlines()
        return safe_text(f"failed with code {reply.error.code}: {reason[-1] if reason else 'no reason given'}", 500)
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
