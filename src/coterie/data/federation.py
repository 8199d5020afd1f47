"""Federation: the packed samples, and the shards of each client.

Every client has a train, a valid and a test shard; a shard is a list of rows of the packed data. Clients
may share a shard (the test set of their group), which is then stored and evaluated once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from coterie.data.columns import LABEL
from coterie.data.given import clients_in, samples_of
from coterie.data.groups import name_groups
from coterie.data.transforms import Transform, View, apply_view
from coterie.data.values import (
    Scale,
    Targets,
    check_finite,
    inputs_of,
    label_kind,
    scaling_in_words,
    standard_scale,
    targets_of,
)
from coterie.errors import DataError
from coterie.randomness import Rng, name_keys
from coterie.settings import counted

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
    x: Tensor  # uint8, int64 or float32 [S, ...]
    y: Tensor  # int64 [S], or float32 [S] or [S, d]
    num_classes: int  # 0 for regression
    train: Split
    valid: Split
    test: Split
    names: tuple[str, ...]  # [N]
    keys: Tensor  # int64 [N]: random keys of the clients; renaming keeps them
    views: tuple[View, ...] = ((),)
    view: Tensor | None = None  # int64 [N] index into views; None: all clients use the first
    groups: Tensor | None = None  # int64 [N] true groups, for evaluation only
    mean: Scale = 0.0
    std: Scale = 1.0
    moves: tuple[Move, ...] = ()  # changes of views and groups, by round
    reserved: Tensor | None = None  # int64 [R] rows that only the server has
    reserved_view: Tensor | None = None  # int64 [R] the view of each reserved row
    repeats: bool = False  # whether several clients of one group may hold the same sample
    sample_ids: Tensor | None = None  # int64 [S] by which random transforms know a sample; None: its row
    class_names: tuple[str, ...] = ()  # [L] where labels were words
    named_groups: tuple[str, ...] = ()  # [G] where groups have names

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
        known = rows if self.sample_ids is None else self.sample_ids[rows]
        return apply_view(view, self.scaled(self.x[rows]), self.y[rows], known)

    def scaled(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Stored inputs [..., *shape] as networks take them, in this float type; unscaled integers stay integers."""
        if (self.mean, self.std) == (0.0, 1.0):
            return x if self.has_integers else x.to(dtype)
        mean, std = self._scale(x := x.to(dtype))
        return (x - mean) / std  # type: ignore[no-any-return]

    def unscaled(self, x: Tensor) -> Tensor:
        """Inputs as networks take them, in the units of the stored data."""
        mean, std = self._scale(x)
        return x * std + mean  # type: ignore[no-any-return]

    def _scale(self, like: Tensor) -> tuple[Any, ...]:
        """Mean and deviation: numbers, or tensors of one number for each feature."""
        return tuple(like.new_tensor(value) if isinstance(value, tuple) else value for value in (self.mean, self.std))

    @property
    def has_integers(self) -> bool:
        """Whether inputs are integers that are not pixels, such as token ids."""
        return self.x.dtype != torch.uint8 and not self.x.is_floating_point()

    def input_facts(self) -> dict[str, str]:
        """What a model of this data must know to be used elsewhere, as texts for the metadata of a file."""
        return {
            "inputs": self.scaling,
            "mean": json.dumps(self.mean),
            "std": json.dumps(self.std),
            "input_shape": json.dumps(self.input_shape),
            "classes": json.dumps(self.class_names or self.num_classes),
        }

    @property
    def scaling(self) -> str:
        """How inputs are scaled, in words."""
        return scaling_in_words(self.x.dtype, self.mean, self.std)

    def at(self, round: int) -> Federation:
        """The federation in that round: clients that drift have their current view and group."""
        since = [move for move in self.moves if move.round <= round]
        if not since:
            return self
        return replace(self, view=since[-1].view, groups=since[-1].groups)

    def reserved_samples(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the server's own samples, each seen through its view; no shard contains them."""
        rows = torch.empty(0, dtype=torch.int64) if self.reserved is None else self.reserved
        x, y = self.scaled(self.x[rows]).clone(), self.y[rows].clone()
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
                f"({counted(len(empty), 'such client')}); use fewer clients or leave it out."
            )
        self.check_labels()
        if self.has_integers and any(t.__class__.inputs is not Transform.inputs for view in self.views for t in view):
            raise DataError(f"{self.name} has integers as inputs, such as token ids; this scenario changes pictures.")
        return self

    def check_labels(self) -> None:
        """Raise DataError unless all labels are of this type and range, also those that clients see through views.

        The compiled program reads memory by them.
        """
        if not self.num_classes:
            if not self.y.is_floating_point():
                raise DataError(f"{self.name}: targets without classes must be floats. Got {self.y.dtype} instead.")
            return
        if self.y.dtype != torch.int64 or self.y.dim() != 1:
            raise DataError(
                f"{self.name}: y must have one class per sample, int64 [S]. "
                f"Got {self.y.dtype} of shape {tuple(self.y.shape)} instead."
            )
        every = [self.y, *(_seen(view, torch.arange(self.num_classes)) for view in self.views)]
        low, high = min(int(y.min()) for y in every if len(y)), max(int(y.max()) for y in every if len(y))
        if low < 0 or high >= self.num_classes:
            raise DataError(
                f"{self.name}: labels must be 0 ... {self.num_classes - 1}, for {self.num_classes} classes. "
                f"Got {low if low < 0 else high} instead."
            )

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
        total.update(repr(rest + ((self.class_names,) if self.class_names else ())).encode())
        return total.hexdigest()

    def label_counts(self, *splits: SplitName) -> Tensor:
        """Samples per client and class in these splits (by default train), with the labels it sees: int64 [N, L]."""
        wide, everyone = self.num_classes, torch.arange(len(self))
        found, seen = torch.zeros(len(self), wide, dtype=torch.int64), self.view_of(everyone)
        for which in (self.split(name) for name in splits or ("train",) if wide):
            for number in seen.unique().tolist():
                clients = everyone[seen == number]
                y = self.y[torch.cat([which.rows(client) for client in clients.tolist()])]
                y = _seen(self.views[number], y)
                place = torch.repeat_interleave(torch.arange(len(clients)), which.sizes[clients])
                counts = torch.bincount(place * wide + y.long(), minlength=len(clients) * wide)
                found[clients] += counts.reshape(len(clients), wide)
        return found

    def group_names(self) -> dict[int, str]:
        """Each true group and what to call it; none where groups are not known."""
        return {} if self.groups is None else name_groups(self.names, self.groups.tolist(), self.named_groups)

    def manifest(self) -> dict[str, object]:
        """Summary of the federation for the run folder."""
        counts = self.label_counts().tolist() if self.num_classes else None
        return {
            "digest": self.digest(),
            "clients": list(self.names),
            **{name: self.split(name).sizes.tolist() for name in SPLITS},
            "groups": None if self.groups is None else self.groups.tolist(),
            "group_names": list(self.named_groups),
            "class_names": list(self.class_names),
            "label_counts": counts,
            "views": [repr(view) for view in self.views],
            "moves": [{"round": move.round, "groups": move.groups.tolist()} for move in self.moves],
            "reserved": 0 if self.reserved is None else len(self.reserved),
            "repeats": self.repeats,
        }

    @classmethod
    def from_clients(
        cls,
        clients: Any,
        *,
        name: str = "own",
        num_classes: int | None = None,
        test: float = 0.2,
        valid: float = 0.1,
        groups: Mapping[Any, int | str] | None = None,
        label: str = LABEL,
        seed: int = 0,
        standardize: bool = False,
    ) -> Federation:
        """A federation from the data of each client: a dict of name -> data, or Flower's partitions.

        The data of a client is (x, y) of arrays or tensors, a torch Dataset or DataLoader, a pandas DataFrame or a
        Hugging Face Dataset, whose labels are the column `label`, or a dict of these with "train", "valid" and "test".
        Splits that are not given are held out of "train": shares `test` and `valid`, drawn by `seed` and with the
        label proportions of the client. Bytes are pixels, scaled to -1 ... 1. With `standardize`, features are scaled
        by mean and deviation of all training samples. `groups` has the true group of each client, a number or a name;
        it is for evaluation only.

        >>> data = {f"c{i}": (torch.randn(20, 4), torch.arange(20) % 2) for i in range(3)}
        >>> federation = Federation.from_clients(data)
        >>> len(federation), federation.train.sizes.tolist(), federation.test.sizes.tolist()
        (3, [15, 15, 15], [4, 4, 4])
        >>> federation.samples(0, "test")[1].sort().values.tolist()
        [0, 0, 1, 1]
        """
        given = [(key, str(key), samples_of(data, str(key), label)) for key, data in clients_in(clients)]
        if not given:
            raise DataError(f"{name} has no clients.")
        names = tuple(client for _, client, _ in given)
        parts = [(client, split, samples) for _, client, found in given for split, samples in found.items()]
        first = inputs_of(parts[0][2].x, f"Client '{names[0]}'")
        inputs = [inputs_of(samples.x, f"Client '{client}'") for client, _, samples in parts]
        for (client, _, samples), (own, _, _) in zip(parts, inputs, strict=True):
            check_finite(own, f"Client '{client}'")
            if own.shape[1:] != first.x.shape[1:] or own.dtype != first.x.dtype:
                raise DataError(
                    f"Samples of client '{client}' are {tuple(own.shape[1:])} {own.dtype}, those of the first client "
                    f"{tuple(first.x.shape[1:])} {first.x.dtype}; they must be the same."
                )
            kinds = [label_kind(part.y) for part in (samples, parts[0][2])]
            if kinds[0] != kinds[1]:
                raise DataError(
                    f"Labels of client '{client}' are {kinds[0]}, those of the first client {kinds[1]}; "
                    "they must be the same."
                )
        targets = targets_of(np.concatenate([samples.y for _, _, samples in parts]), f"Labels of {name}")
        sizes = iter([len(own.x) for own in inputs])
        splits: dict[SplitName, list[Tensor]] = {split: [] for split in SPLITS}
        start = 0
        for _, client, found in given:
            rows: dict[str, Tensor] = {}
            for split in found:
                count = next(sizes)
                rows[split] = torch.arange(start, start + count)
                start += count
            shares = {"test": test, "valid": valid}
            for split, part in _held_out(rows, targets, shares, Rng.seed(seed).at("split", client)).items():
                splits[split].append(part)
        member, named = (None, ()) if groups is None else _groups_of([found[:2] for found in given], groups)
        known = next((samples.class_names for _, _, samples in parts if samples.class_names), ())
        classes = targets.num_classes and max(targets.num_classes, len(known))
        made = cls(
            name=name,
            x=torch.cat([own.x for own in inputs]),
            y=targets.y,
            num_classes=classes if num_classes is None or not classes else num_classes,
            train=Split.of(splits["train"]),
            valid=Split.of(splits["valid"]),
            test=Split.of(splits["test"]),
            names=names,
            keys=name_keys(names),
            groups=member,
            named_groups=named,
            mean=first.mean,
            std=first.std,
            class_names=targets.class_names or known,
        ).validate()
        return made.standardized() if standardize else made

    def standardized(self) -> Federation:
        """The same data, scaled by mean and deviation of all training samples; of each feature, if it has features."""
        mean, std = standard_scale(self.x[self.train.index.unique()])
        return replace(self, mean=mean, std=std)


def _seen(view: View, y: Tensor) -> Tensor:
    """Labels as they are seen through a view."""
    for transform in view:
        y = transform.labels(y)
    return y


def _held_out(
    rows: dict[str, Tensor], targets: Targets, shares: Mapping[str, float], rng: Rng
) -> dict[SplitName, Tensor]:
    """The rows of a client by split; those of splits that it does not have are held out of its training rows."""
    own = rows["train"]
    missing = {split: share for split, share in shares.items() if split not in rows}
    held: dict[str, Tensor] = {}
    if any(missing.values()):
        own = own[rng.permutation(len(own))]
        if targets.num_classes:
            own = own[_spread_classes(targets.y[own])]
    for split, share in missing.items():
        own, held[split] = cut(own, share)
    found = {**rows, **held, "train": own}
    return {split: found[split].sort().values for split in SPLITS}


def _spread_classes(y: Tensor) -> Tensor:
    """An order of labels [n] in which every stretch has about the proportions of the whole: int64 [n].

    >>> y = torch.tensor([0, 0, 0, 0, 1, 1])
    >>> y[_spread_classes(y)].tolist()
    [0, 1, 0, 0, 1, 0]
    """
    place = torch.empty(len(y), dtype=torch.float64)
    for label in y.unique():
        mine = (y == label).nonzero().flatten()
        place[mine] = (torch.arange(len(mine), dtype=torch.float64) + 0.5) / len(mine)
    return torch.argsort(place, stable=True)


def _groups_of(clients: Sequence[tuple[Any, str]], groups: Mapping[Any, int | str]) -> tuple[Tensor, tuple[str, ...]]:
    """The true group of each client (its name as it was given, and as text), int64 [N], and the names of groups."""
    found = []
    for key, client in clients:
        if key not in groups and client not in groups:
            raise DataError(f"groups has no entry for client '{client}'; name the group of every client.")
        found.append(groups[key] if key in groups else groups[client])
    if all(isinstance(group, str) for group in found):
        words, numbers = np.unique(found, return_inverse=True)
        return torch.from_numpy(numbers), tuple(words.tolist())
    odd = [group for group in found if isinstance(group, bool) or not isinstance(group, int | np.integer)]
    if odd:
        raise DataError(f"groups must all be whole numbers or all be names. Got {odd[0]!r} instead.")
    return torch.tensor(found), ()


def cut(rows: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Hold out the last `share` of the rows, but keep at least one row.

    >>> cut(torch.arange(10), 0.2)[1].tolist()
    [8, 9]
    """
    # 0.29 * 100 is 28.999...: do not lose a row to rounding.
    held = min(int(share * len(rows) + 1e-9), max(0, len(rows) - 1))
    return rows[: len(rows) - held], rows[len(rows) - held :]
