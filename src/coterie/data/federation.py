"""Federation: the packed samples, and the shards of each client.

Every client has a train, a valid and a test shard; a shard is a list of rows of the packed data. Clients
may share a shard (the test set of their group), which is then stored and evaluated once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from coterie.data.transforms import View, apply_view
from coterie.errors import DataError
from coterie.randomness import name_keys

SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")


@dataclass(frozen=True)
class Split:
    """Shards packed into one list of rows: shard s is index[offsets[s]:offsets[s + 1]]."""

    index: Tensor  # int64 [total]
    offsets: Tensor  # int64 [S + 1]
    shard: Tensor  # int64 [N]: the shard of each client

    @classmethod
    def of(cls, shards: Sequence[Tensor], shard: Tensor | None = None) -> Split:
        """Pack lists of rows; by default client i has shard i."""
        lengths = torch.tensor([0, *(len(rows) for rows in shards)], dtype=torch.int64)
        index = torch.cat(list(shards)) if shards else torch.empty(0, dtype=torch.int64)
        own = torch.arange(len(shards)) if shard is None else shard
        return cls(index.long(), lengths.cumsum(0), own)

    @property
    def sizes(self) -> Tensor:
        """Number of samples of each client, int64 [N]."""
        return self.offsets.diff()[self.shard]

    def rows(self, client: int) -> Tensor:
        shard = int(self.shard[client])
        return self.index[int(self.offsets[shard]) : int(self.offsets[shard + 1])]

    def select(self, clients: Tensor) -> Split:
        """The shards of some of the clients."""
        kept, shard = torch.unique(self.shard[clients], return_inverse=True)
        rows = [self.index[int(self.offsets[s]) : int(self.offsets[s + 1])] for s in kept.tolist()]
        return Split.of(rows, shard)


@dataclass(frozen=True)
class Move:
    """The views and groups of all clients from a round on."""

    round: int
    view: Tensor  # int64 [N]
    groups: Tensor  # int64 [N]


@dataclass(frozen=True)
class Federation:
    """N clients over one packed dataset."""

    name: str
    x: Tensor  # uint8 or float32 [S, ...]
    y: Tensor  # int64 or float32 [S]
    num_classes: int  # 0 for regression
    train: Split
    valid: Split
    test: Split
    names: tuple[str, ...]  # [N]
    keys: Tensor  # int64 [N]: random keys of the clients; renaming keeps them
    views: tuple[View, ...] = ((),)
    view: Tensor | None = None  # int64 [N] index into views; None: all clients use the first
    groups: Tensor | None = None  # int64 [N] true groups, for evaluation only
    mean: float = 0.0
    std: float = 1.0
    moves: tuple[Move, ...] = ()  # changes of views and groups, by round
    reserved: Tensor | None = None  # int64 [R] rows that only the server has
    reserved_view: Tensor | None = None  # int64 [R] the view of each reserved row
    repeats: bool = False  # whether several clients of one group may hold the same sample
    sample_ids: Tensor | None = None  # int64 [S] by which random transforms know a sample; None: its row

    def __len__(self) -> int:
        return len(self.names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.x.shape[1:])

    def split(self, name: SplitName) -> Split:
        return {"train": self.train, "valid": self.valid, "test": self.test}[name]

    def view_of(self, clients: Tensor) -> Tensor:
        """View index of each of these clients."""
        return torch.zeros_like(clients) if self.view is None else self.view[clients]

    def samples(self, client: int, split: SplitName = "train") -> tuple[Tensor, Tensor]:
        """Inputs and labels of one client, scaled and seen through its view."""
        rows = self.split(split).rows(client)
        view = self.views[int(self.view_of(torch.tensor([client]))[0])]
        x = (self.x[rows].float() - self.mean) / self.std
        return apply_view(view, x, self.y[rows], rows if self.sample_ids is None else self.sample_ids[rows])

    def at(self, round: int) -> Federation:
        """The federation in that round: clients that drift have their current view and group."""
        since = [move for move in self.moves if move.round <= round]
        if not since:
            return self
        return replace(self, view=since[-1].view, groups=since[-1].groups)

    def reserved_samples(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the server's own samples, each seen through its view; no shard contains them."""
        rows = torch.empty(0, dtype=torch.int64) if self.reserved is None else self.reserved
        x, y = (self.x[rows].float() - self.mean) / self.std, self.y[rows].clone()
        seen = torch.zeros_like(rows) if self.reserved_view is None else self.reserved_view
        for number in seen.unique().tolist():
            mine = seen == number
            x[mine], y[mine] = apply_view(self.views[number], x[mine], y[mine], rows[mine])
        return x, y

    def validate(self) -> Federation:
        """Raise DataError if the federation cannot be trained on; return self."""
        if not self.names:
            raise DataError(f"{self.name} has no clients.")
        if len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise DataError(f"{self.name} has two clients named '{twice}'; names must be unique.")
        empty = (self.train.sizes == 0).nonzero().flatten().tolist()
        if empty:
            raise DataError(
                f"Client '{self.names[empty[0]]}' of {self.name} has no training samples "
                f"({len(empty)} such client(s)); use fewer clients or leave it out."
            )
        return self

    def rename(self, names: Mapping[str, str]) -> Federation:
        """The same clients under other names; their random keys do not change."""
        return replace(self, names=tuple(names.get(name, name) for name in self.names)).validate()

    def select(self, clients: Sequence[int] | Tensor) -> Federation:
        """The federation of these clients, in this order."""
        ids = torch.as_tensor(clients, dtype=torch.int64)
        return replace(
            self,
            train=self.train.select(ids),
            valid=self.valid.select(ids),
            test=self.test.select(ids),
            names=tuple(self.names[i] for i in ids.tolist()),
            keys=self.keys[ids],
            view=self.view_of(ids),
            groups=None if self.groups is None else self.groups[ids],
            moves=tuple(Move(m.round, m.view[ids], m.groups[ids]) for m in self.moves),
        )

    def share(self, clients: Sequence[int] | Tensor) -> Federation:
        """As `select`, with the samples of these clients only; without the server's samples. For another process."""
        chosen = self.select(clients)
        rows = torch.cat([chosen.split(name).index for name in SPLITS]).unique()  # sorted

        def moved(split: Split) -> Split:
            return replace(split, index=torch.searchsorted(rows, split.index))

        return replace(
            chosen,
            x=self.x[rows],
            y=self.y[rows],
            train=moved(chosen.train),
            valid=moved(chosen.valid),
            test=moved(chosen.test),
            reserved=None,
            reserved_view=None,
            sample_ids=rows if self.sample_ids is None else self.sample_ids[rows],
        )

    def digest(self) -> str:
        """Hash of the data: changes with any sample, label, shard, view or client."""
        total = hashlib.blake2b(digest_size=16)
        tensors = [self.x, self.y, self.keys, self.view_of(torch.arange(len(self)))]
        if self.groups is not None:
            tensors.append(self.groups)
        for split in (self.train, self.valid, self.test):
            tensors += [split.index, split.offsets, split.shard]
        for move in self.moves:
            tensors += [move.view, move.groups]
        tensors += [t for t in (self.reserved, self.reserved_view, self.sample_ids) if t is not None]
        for tensor in tensors:
            array = np.ascontiguousarray(tensor.numpy())
            total.update(f"{array.dtype}{array.shape}".encode())
            total.update(array.data)
        rounds = tuple(move.round for move in self.moves)
        rest = (self.names, self.views, self.num_classes, self.mean, self.std, self.groups is None, rounds)
        total.update(repr(rest).encode())
        return total.hexdigest()

    def label_counts(self, *splits: SplitName) -> Tensor:
        """Samples per client and class in these splits (by default train), with the labels it sees: int64 [N, L]."""
        wide, everyone = self.num_classes, torch.arange(len(self))
        found, seen = torch.zeros(len(self), wide, dtype=torch.int64), self.view_of(everyone)
        for which in (self.split(name) for name in splits or ("train",) if wide):
            for number in seen.unique().tolist():
                clients = everyone[seen == number]
                y = self.y[torch.cat([which.rows(client) for client in clients.tolist()])]
                for transform in self.views[number]:
                    y = transform.labels(y)
                place = torch.repeat_interleave(torch.arange(len(clients)), which.sizes[clients])
                counts = torch.bincount(place * wide + y.long(), minlength=len(clients) * wide)
                found[clients] += counts.reshape(len(clients), wide)
        return found

    def group_names(self) -> dict[int, str]:
        """Each true group and what to call it; none where groups are not known."""
        return {} if self.groups is None else name_groups(self.names, self.groups.tolist())

    def manifest(self) -> dict[str, object]:
        """Summary of the federation for the run folder."""
        counts = self.label_counts().tolist() if self.num_classes else None
        return {
            "digest": self.digest(),
            "clients": list(self.names),
            **{name: self.split(name).sizes.tolist() for name in SPLITS},
            "groups": None if self.groups is None else self.groups.tolist(),
            "label_counts": counts,
            "views": [repr(view) for view in self.views],
            "moves": [{"round": move.round, "groups": move.groups.tolist()} for move in self.moves],
            "reserved": 0 if self.reserved is None else len(self.reserved),
            "repeats": self.repeats,
        }

    @classmethod
    def from_clients(
        cls,
        clients: Mapping[str, tuple[Tensor, Tensor]],
        *,
        name: str = "own",
        num_classes: int | None = None,
        test: float = 0.2,
        valid: float = 0.1,
        groups: Mapping[str, int] | None = None,
    ) -> Federation:
        """A federation from tensors: client name -> (x, y); the last samples of each client are its test set.

        >>> data = {f"c{i}": (torch.randn(20, 4), torch.arange(20) % 2) for i in range(3)}
        >>> federation = Federation.from_clients(data)
        >>> len(federation), federation.train.sizes.tolist(), federation.test.sizes.tolist()
        (3, [15, 15, 15], [4, 4, 4])
        """
        if not clients:
            raise DataError(f"{name} has no clients.")
        first = next(iter(clients.values()))[0]
        train, held, tests, start = [], [], [], 0
        for client, (x, y) in clients.items():
            if len(x) != len(y):
                raise DataError(f"Client '{client}' has {len(x)} samples but {len(y)} labels.")
            if x.shape[1:] != first.shape[1:] or x.dtype != first.dtype:
                raise DataError(
                    f"Samples of client '{client}' are {tuple(x.shape[1:])} {x.dtype}, those of the first client "
                    f"{tuple(first.shape[1:])} {first.dtype}; they must be the same."
                )
            if groups is not None and client not in groups:
                raise DataError(f"groups has no entry for client '{client}'; name the group of every client.")
            rows = torch.arange(start, start + len(x))
            start += len(x)
            own, last = cut(rows, test)
            own, middle = cut(own, valid)
            train.append(own)
            held.append(middle)
            tests.append(last)
        names = tuple(clients)
        x = torch.cat([x for x, _ in clients.values()])
        y = torch.cat([y for _, y in clients.values()])
        is_class = not y.is_floating_point()
        classes = num_classes if num_classes is not None else (int(y.max()) + 1 if is_class else 0)
        return cls(
            name=name,
            x=x if x.dtype == torch.uint8 else x.float(),
            y=y.long() if is_class else y.float(),
            num_classes=classes,
            train=Split.of(train),
            valid=Split.of(held),
            test=Split.of(tests),
            names=names,
            keys=name_keys(names),
            groups=None if groups is None else torch.tensor([groups[n] for n in names]),
        ).validate()


def name_groups(names: Sequence[str], groups: Sequence[int]) -> dict[int, str]:
    """Each group of clients and what to call it: the stem its clients' names share, or its number.

    >>> name_groups(["r000-000", "r000-001", "r090-000"], [0, 0, 3]), name_groups(["a", "b"], [0, 1])
    ({0: 'r000', 3: 'r090'}, {0: 'group 0', 1: 'group 1'})
    """
    stems: dict[int, set[str]] = {group: set() for group in sorted(set(groups))}
    for name, group in zip(names, groups, strict=True):
        stems[group].add(name.rpartition("-")[0])
    shared = {group: next(iter(found)) for group, found in stems.items() if len(found) == 1}
    if len(shared) == len(stems) == len(set(shared.values())) and all(shared.values()):
        return shared
    return {group: f"group {group}" for group in stems}


def cut(rows: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Hold out the last `share` of the rows, but keep at least one row.

    >>> cut(torch.arange(10), 0.2)[1].tolist()
    [8, 9]
    """
    # 0.29 * 100 is 28.999...: do not lose a row to rounding.
    held = min(int(share * len(rows) + 1e-9), max(0, len(rows) - 1))
    return rows[: len(rows) - held], rows[len(rows) - held :]
