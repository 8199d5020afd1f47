"""Scenarios: how a dataset is partitioned into a federation, with which views and true groups.

A scenario is one part, or several joined by `+`. Each part configures a `Partition`, which then builds the
federation. Parts that define groups (rotated, label_swapped ...) are zipped: group g gets the g-th view of each.
The parts are in `scenarios/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from coterie.data.dataset import Dataset, import_all
from coterie.data.federation import Federation, Move, Split, cut
from coterie.data.held_out import Pool, draw_like, fill_empty, label_counts, own_size, round_shares
from coterie.data.transforms import View
from coterie.errors import ConfigError, DataError, UnknownName
from coterie.randomness import Rng, name_keys, uniform
from coterie.settings import build, fields_of, setting, values_of


@dataclass(frozen=True)
class Common:
    """Settings of every scenario: samples per client, skew and held-out samples."""

    samples: int | None = setting(
        None, "samples per client, or their mean with quantity; by default all samples are distributed", ge=2
    )
    alpha: float | None = setting(
        None, "label skew, a Dirichlet parameter: smaller is stronger; by default none", ge=1e-6, le=1e9
    )
    sense: Literal["total", "per_class", "shares"] = setting(
        "total",
        "what alpha means: 'total': a client's label vector ~ Dir(alpha * p) with p uniform, so alpha / L per class "
        "(MD-ICFL); 'per_class': Dir(alpha, ..., alpha); 'shares': each class is divided among clients by Dir(alpha), "
        "each sample used once (FeSEM)",
    )
    quantity: float | None = setting(
        None,
        "size skew: clients' shares ~ Dir(quantity), but not with sense=shares; by default equal sizes",
        ge=1e-6,
        le=1e9,
    )
    kinds: tuple[float, ...] | None = setting(
        None, "shares of the clients in each group, such as [0.95, 0.05]; by default equal", gt=0
    )
    min_samples: int | None = setting(
        None, "minimum samples per client; users of the dataset with fewer are left out", ge=1
    )
    tests: Literal["kind", "own", "like"] | None = setting(
        None,
        "test samples: 'kind': the whole test set of the client's group; 'own': a share of its own samples; "
        "'like': drawn from the test set of its group with the client's label proportions; "
        "by default set by the scenario",
    )
    test: float = setting(
        0.2, "share of a client's samples that are for testing, with tests of its own or drawn like its own", gt=0, lt=1
    )
    valid: float = setting(0.1, "share of a client's training samples held out for validation", ge=0, lt=1)
    reserve: int = setting(
        0, "samples per class (in all, without classes) that only the server holds (indicator samples)", ge=0
    )


@dataclass(frozen=True)
class ClientShare:
    """The rows of the dataset that one client holds."""

    name: str
    group: int
    train: Tensor  # int64 rows
    test: Tensor | int  # rows held out for this client, or the group whose test rows are shared
    kind: int | None = None  # clients of one kind may be tested on each other's held-out rows; by default the group
    valid: Tensor | None = None  # rows for validation; by default the last ones of `train`, by the setting `valid`

    @property
    def test_set(self) -> tuple[str, int]:
        """The name of the test rows of this client's kind."""
        if isinstance(self.test, int):
            return "of dataset", self.test
        return "held out", self.group if self.kind is None else self.kind


Partitioner = Callable[["Partition"], list[ClientShare]]


@dataclass
class Partition:
    """How a dataset is to be partitioned; the parts of a scenario configure it."""

    dataset: Dataset
    clients: int | None  # None: determined by the dataset
    rng: Rng
    common: Common = field(default_factory=Common)
    views: list[View] = field(default_factory=lambda: [()])  # one per group
    group_names: list[str] = field(default_factory=lambda: ["all"])
    partitioner: Partitioner | None = None
    has_groups: bool = False
    named_groups: tuple[str, ...] = ()  # what the dataset calls its groups, if the clients have those
    by_domain: bool = False  # group g holds the samples whose `group` column is g
    drift: tuple[tuple[int, ...], float] | None = None  # rounds, and the share of clients that change
    repeats: bool = False
    reserved: Tensor | None = None
    seed: int = 0  # of the run, for parts that repeat a published generator; the others use `rng`

    def set_groups(self, names: list[str], views: list[View]) -> None:
        """Define the groups; a second part must define as many, and its views are appended."""
        if self.has_groups and len(names) != len(self.views):
            raise ConfigError(
                f"This scenario has parts with {len(self.views)} and {len(names)} groups; "
                "give them the same number with --set scenario.groups=K."
            )
        if self.has_groups:
            self.views = [old + new for old, new in zip(self.views, views, strict=True)]
            self.group_names = [f"{a}-{b}" for a, b in zip(self.group_names, names, strict=True)]
        else:
            self.views, self.group_names, self.has_groups = views, names, True

    def set_partitioner(self, partitioner: Partitioner) -> None:
        """Let a part choose the rows of each client."""
        if self.partitioner is not None:
            raise ConfigError("This scenario has two parts that partition the samples; keep one of them.")
        self.partitioner = partitioner

    def client_groups(self, total: int | None = None) -> list[int]:
        """The group of each client, in order: by `kinds`, or as even as possible; `total` is by default `clients`."""
        groups = len(self.views)
        if total is None:
            if self.clients is None:
                raise ConfigError("This scenario needs a number of clients; set it with --clients N.")
            total = self.clients
        if total < groups:
            raise ConfigError(f"clients must be at least the number of groups, {groups}. Got {total} instead.")
        if self.common.kinds is None:
            return [i * groups // total for i in range(total)]
        if len(self.common.kinds) != groups:
            raise ConfigError(
                f"scenario.kinds needs a share for each of the {groups} groups. Got {len(self.common.kinds)} instead."
            )
        shares = torch.tensor(self.common.kinds, dtype=torch.float64)
        sizes = round_shares(shares / shares.sum(), total).tolist()
        if 0 in sizes:
            raise ConfigError(
                f"With scenario.kinds={list(self.common.kinds)}, {total} clients leave a group without any; "
                "use more clients or other shares."
            )
        return [group for group, size in enumerate(sizes) for _ in range(size)]

    def pool(self, group: int) -> tuple[Tensor, Tensor]:
        """Training and test rows available to a group; training rows exclude reserved ones."""
        train, test = self._official_rows()
        if self.by_domain:
            assert self.dataset.group is not None
            domain = torch.from_numpy(self.dataset.group)
            train, test = train[domain[train] == group], test[domain[test] == group]
        return self.free(train), test

    def own_pool(self, group: int) -> tuple[Tensor, Tensor]:
        """Rows of a group for training and for testing if clients are tested on their own samples.

        The seed alone decides which rows are for testing, before groups and clients: a sample that one group is
        tested on is trained on by no group, whatever their views.
        """
        rows = self.rng.at("own tests").permutation(len(self.dataset))
        if self.by_domain:
            assert self.dataset.group is not None
            rows = rows[torch.from_numpy(self.dataset.group)[rows] == group]
        train, test = cut(self.free(rows), self.common.test)
        if not len(test):
            raise DataError(
                f"{len(train)} samples of {self.dataset.name} leave none for testing; "
                "use a larger scenario.test or scenario.tests=kind."
            )
        return train.sort().values, test.sort().values

    def free(self, rows: Tensor) -> Tensor:
        """The rows that are not reserved for the server."""
        return rows if self.reserved is None else rows[~torch.isin(rows, self.reserved)]

    def _official_rows(self) -> tuple[Tensor, Tensor]:
        """Rows of the official split, or of a seeded 80/20 split."""
        rows = torch.arange(len(self.dataset))
        if self.dataset.is_train is None:
            order = self.rng.at("split").permutation(len(rows))
            train, test = cut(order, 0.2)
            return train.sort().values, test.sort().values
        flags = torch.from_numpy(self.dataset.is_train)
        return rows[flags], rows[~flags]

    def set_aside(self) -> None:
        """Reserve the server's samples, before any client gets samples."""
        if not self.common.reserve:
            return
        train, _ = self._official_rows()
        order = train[self.rng.at("reserve").permutation(len(train))]
        y, classes = self.dataset.y[order], self.dataset.num_classes
        found = [order[y == label][: self.common.reserve] for label in range(classes)]
        self.reserved = torch.cat(found) if classes else order[: self.common.reserve]
        if len(self.reserved) * 2 > len(train):
            raise DataError(
                f"{len(self.reserved)} of {len(train)} training samples would be reserved for the server; "
                "reduce scenario.reserve."
            )

    def build(self) -> Federation:
        """Partition the samples, hold out validation samples and pack everything."""
        self.set_aside()
        shares = (self.partitioner or partition_by_settings)(self)
        train: list[Tensor] = []
        held: list[Tensor] = []
        for share in shares:
            if not len(share.train):
                raise DataError(
                    f"Client '{share.name}' of {self.dataset.name} has no training samples; use fewer clients."
                )
            own, middle = self._own_and_valid(share)
            train.append(own)
            held.append(middle)
        if self.common.kinds is not None and sorted(s.group for s in shares) != self.client_groups(len(shares)):
            raise ConfigError("This scenario has its own numbers of clients in each group; leave out scenario.kinds.")
        names = tuple(share.name for share in shares)
        groups = torch.tensor([share.group for share in shares])
        view = groups if len(self.views) > 1 else torch.zeros_like(groups)
        keys = name_keys(names)
        made = Federation(
            name=self.dataset.name,
            x=self.dataset.x,
            y=self.dataset.y,
            num_classes=self.dataset.num_classes,
            train=Split.of(train),
            valid=Split.of(held),
            test=self._tests(shares),
            names=names,
            keys=keys,
            views=tuple(self.views),
            view=view,
            groups=groups if self.has_groups else None,
            mean=self.dataset.mean,
            std=self.dataset.std,
            moves=self._moves(groups, keys),
            reserved=self.reserved,
            reserved_view=self._reserved_views(),
            repeats=self.repeats,
            class_names=self.dataset.class_names,
            named_groups=self.named_groups,
        ).validate()
        return made.standardized() if self.dataset.standardize else made

    def _own_and_valid(self, share: ClientShare) -> tuple[Tensor, Tensor]:
        """The rows that a client trains on, and those for validation: by the dataset's own split, if it has one."""
        if share.valid is not None:
            return share.train, share.valid
        if self.dataset.is_valid is None:
            return cut(share.train, self.common.valid)
        flags = torch.from_numpy(self.dataset.is_valid)[share.train]
        return share.train[~flags], share.train[flags]

    def _tests(self, shares: list[ClientShare]) -> Split:
        """The test shards, by the setting `tests`; clients with the same test set share a shard."""
        rule, sets = self.common.tests, self._test_sets(shares)
        if rule == "like":
            pools = {key: Pool.of(self.dataset, rows, self.rng.at("pool", *key)) for key, rows in sets.items()}
            return Split.of([self._like(share, pools[share.test_set]) for share in shares])
        tests: list[Tensor] = []
        shard: list[int] = []
        places: dict[tuple[str, int], int] = {}
        for share in shares:
            if rule == "kind" or isinstance(share.test, int):
                if rule == "own":
                    raise ConfigError("This scenario holds out no samples of clients; use scenario.tests=kind or like.")
                if share.test_set not in places:
                    places[share.test_set] = len(tests)
                    tests.append(sets[share.test_set])
                shard.append(places[share.test_set])
                continue
            if rule == "own" and not len(share.test):
                raise DataError(
                    f"Client '{share.name}' of {self.dataset.name} has no test samples of its own; "
                    "use scenario.tests=kind."
                )
            shard.append(len(tests))
            tests.append(share.test)
        return Split.of(tests, torch.tensor(shard))

    def _test_sets(self, shares: list[ClientShare]) -> dict[tuple[str, int], Tensor]:
        """The test rows of each kind: the dataset's, or those held out for all its clients."""
        found: dict[tuple[str, int], list[Tensor]] = {}
        for share in shares:
            rows = found.setdefault(share.test_set, [])
            if not isinstance(share.test, int):
                rows.append(share.test)
            elif not rows:
                rows.append(self.pool(share.test)[1])
        return {key: rows[0] if len(rows) == 1 else torch.cat(rows).sort().values for key, rows in found.items()}

    def _like(self, share: ClientShare, pool: Pool) -> Tensor:
        """Test rows of the pool with the label proportions of a client."""
        point = self.rng.at("like", share.name)
        return draw_like(self.dataset, share.name, share.train, pool, self.common.test, point)

    def _reserved_views(self) -> Tensor | None:
        """Reserved samples represent all groups: each is seen through the view of a random group."""
        if self.reserved is None:
            return None
        return (self.rng.at("reserved views").uniform(len(self.reserved)) * len(self.views)).long()

    def _moves(self, groups: Tensor, keys: Tensor) -> tuple[Move, ...]:
        """Which clients change to the next group, by round."""
        if self.drift is None:
            return ()
        if not self.has_groups or self.by_domain or not any(self.views):
            raise ConfigError(
                "drift needs groups that see the same samples through different views; join it to rotated, for example."
            )
        moves = []
        for number, round in enumerate(self.drift[0]):
            luck = uniform(self.rng.at("drift", number).keys(keys), 1)[:, 0]
            groups = torch.where(luck < self.drift[1], (groups + 1) % len(self.views), groups)
            moves.append(Move(round, groups, groups))
        return tuple(moves)


def partition_by_settings(partition: Partition) -> list[ClientShare]:
    """Partition each group by `samples`, `alpha` and `quantity`; by default each sample goes to exactly one client.

    Groups have different views, so each group may use a sample once. With `kinds`, a smaller group uses only some
    of its samples: its clients have as many as those of the largest.
    """
    common, groups = partition.common, partition.client_groups()
    largest = max(groups.count(group) for group in groups)
    found = []
    for group, name in enumerate(partition.group_names):
        members, point = groups.count(group), partition.rng.at("deal", group)
        parts = members if common.kinds is None or common.samples is not None else largest
        if common.tests == "own":
            train, test = split_with_tests(partition, group, parts, point)
            every: list[tuple[Tensor, Tensor | int]] = list(zip(train, test, strict=True))
        else:
            every = [(rows, group) for rows in split_rows(partition, partition.pool(group)[0], parts, point)]
        found += [
            ClientShare(f"{name}-{number:03d}", group, mine, kept)
            for number, (mine, kept) in enumerate(every[:members])
        ]
    return found


def split_with_tests(partition: Partition, group: int, members: int, rng: Rng) -> tuple[list[Tensor], list[Tensor]]:
    """Divide the training and the test rows of a group by the same rule.

    Both use the same point of randomness, so that a client has the same label vector, or the same share of each
    class, in both. `samples` and `min_samples` count training and test samples together.
    """
    common = partition.common
    train, test = partition.own_pool(group)
    if common.alpha is not None and common.sense != "shares":
        known, tested = (label_counts(partition.dataset, rows) > 0 for rows in (train, test))
        apart = (known != tested).nonzero().flatten().tolist()
        if apart:
            raise ConfigError(
                f"Samples of class {apart[0]} of {partition.dataset.name} are too few to be in training and test "
                "samples, so clients' label vectors cannot be kept; use scenario.tests=kind or scenario.sense=shares."
            )
    tests = None if common.samples is None else own_size(common.samples, common.test)
    trained = None if common.samples is None or tests is None else common.samples - tests
    least = max(1, (common.min_samples or 2) - 1)
    to_train = replace(partition, common=replace(common, samples=trained, min_samples=least))
    to_test = replace(partition, common=replace(common, samples=tests, min_samples=0))
    mine = split_rows(to_train, train, members, rng)
    partition.repeats = partition.repeats or to_train.repeats
    kept = split_rows(to_test, test, members, rng)
    return mine, fill_empty(partition.dataset, mine, kept, test, rng.at("fill"))


def cut_own_tests(rows: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Split a client's rows into train and test rows, at least one of each."""
    return cut(rows, max(share, 1.0 / max(1, len(rows))))


def split_rows(partition: Partition, rows: Tensor, members: int, rng: Rng) -> list[Tensor]:
    """Divide rows among the `members` clients of a group; each share is in random order."""
    common = partition.common
    least = 1 if common.min_samples is None else common.min_samples
    if members * least > len(rows) and not (common.samples or common.alpha):
        raise DataError(
            f"{members} clients cannot share {len(rows)} training samples of {partition.dataset.name}, "
            f"at least {least} each; use at most {len(rows) // least * len(partition.views)} clients."
        )
    if not len(rows):
        raise DataError(f"{partition.dataset.name} has no samples left for clients; reduce scenario.reserve.")
    if common.alpha is not None and not partition.dataset.num_classes:
        raise ConfigError(f"scenario.alpha skews classes, but {partition.dataset.name} has none; leave it out.")
    if common.alpha is not None and common.sense == "shares":
        y = partition.dataset.y[rows]
        kinds = [rows[y == label] for label in range(partition.dataset.num_classes)]
        shares = share_by_dirichlet(kinds, members, common.alpha, rng)
        return [shuffled(own, rng.at("order", i)) for i, own in enumerate(top_up(shares, least, rng))]
    if common.alpha is not None:
        partition.repeats = True
        return _by_label_vectors(partition, rows, members, least, rng)
    order = shuffled(rows, rng)
    if common.samples is not None and common.quantity is not None:
        sizes = skewed_sizes(common.quantity, common.samples * members, members, least, rng)
        if sum(sizes) <= len(rows):
            return list(order[: sum(sizes)].split(sizes))
        partition.repeats = True
        return packed(sizes, lambda i: _drawn(rows, sizes[i], rng.at("client", i)))
    if common.samples is not None:
        if common.samples * members <= len(rows):
            return list(order[: common.samples * members].split(common.samples))
        partition.repeats = True
        count = common.samples
        return packed([count] * members, lambda i: _drawn(rows, count, rng.at("client", i)))
    if common.quantity is not None:
        return top_up(share_by_dirichlet([order], members, common.quantity, rng), least, rng)
    return list(torch.tensor_split(order, members))


def share_by_dirichlet(kinds: list[Tensor], members: int, alpha: float, rng: Rng) -> list[Tensor]:
    """Divide each kind of rows among the clients by its own draw of Dir(alpha), each row once."""
    mine: list[list[Tensor]] = [[] for _ in range(members)]
    for number, rows in enumerate(kinds):
        share = dirichlet(rng.at("share", number), torch.full((members,), alpha))
        ends = (share.cumsum(0) * len(rows)).round().long()
        ends[-1] = len(rows)
        order = shuffled(rows, rng.at("kind", number))
        for client, part in enumerate(torch.tensor_split(order, ends[:-1])):
            mine[client].append(part)
    return [torch.cat(parts) for parts in mine]


def top_up(shares: list[Tensor], least: int, rng: Rng) -> list[Tensor]:
    """Give clients with fewer than `least` rows some from the largest client."""
    shares = [shuffled(rows, rng.at("top up", i)) for i, rows in enumerate(shares)]
    for poor in range(len(shares)):
        while len(shares[poor]) < least:
            rich = max(range(len(shares)), key=lambda i: len(shares[i]))
            give = min(least - len(shares[poor]), len(shares[rich]) - least)
            if give < 1:
                raise DataError(f"{len(shares)} clients cannot have {least} samples each; use fewer clients.")
            shares[poor] = torch.cat([shares[poor], shares[rich][-give:]])
            shares[rich] = shares[rich][:-give]
    return shares


def skewed_sizes(quantity: float, total: int, members: int, least: int, rng: Rng) -> list[int]:
    """Sizes of clients whose shares are a draw of Dir(quantity), at least `least` each; they sum to `total`."""
    if members * least > total:
        raise DataError(f"{members} clients cannot have {least} samples each of {total}; use fewer clients.")
    shares = dirichlet(rng.at("share", 0), torch.full((members,), quantity))  # as share_by_dirichlet draws them
    more: list[int] = round_shares(shares, total - members * least).tolist()
    return [least + size for size in more]


def _by_label_vectors(partition: Partition, rows: Tensor, members: int, least: int, rng: Rng) -> list[Tensor]:
    """Each client independently draws a label vector, then its samples."""
    common, classes = partition.common, partition.dataset.num_classes
    assert common.alpha is not None
    count = common.samples or max(1, len(rows) // members)
    counts = [count] * members
    if common.quantity is not None:
        counts = skewed_sizes(common.quantity, count * members, members, least, rng)
    y = partition.dataset.y[rows]
    kinds = [rows[y == label] for label in range(classes)]
    there = torch.tensor([len(kind) > 0 for kind in kinds])
    alpha = common.alpha / int(there.sum()) if common.sense == "total" else common.alpha

    def share(client: int) -> Tensor:
        point = rng.at("client", client)
        vector = dirichlet(point.at("labels"), torch.full((classes,), alpha).where(there, torch.zeros(1)))
        sizes = round_shares(vector, counts[client])
        own = [_drawn(k, int(n), point.at("class", i)) for i, (k, n) in enumerate(zip(kinds, sizes, strict=True))]
        return shuffled(torch.cat(own), point.at("order"))

    return packed(counts, share)


def packed(sizes: list[int], share: Callable[[int], Tensor]) -> list[Tensor]:
    """The rows of each client, `share(i)` with sizes[i] entries, in one piece of memory.

    One small tensor per client, made between large ones, would leave memory full of holes that are never filled.
    """
    found = torch.empty(sum(sizes), dtype=torch.int64)
    begin = 0
    for client, size in enumerate(sizes):
        found[begin : begin + size] = share(client)
        begin += size
    return list(found.split(sizes))


def dirichlet(rng: Rng, alpha: Tensor) -> Tensor:
    """One float64 draw from a Dirichlet distribution; entries with alpha = 0 are 0."""
    positive = alpha > 0
    generator = np.random.default_rng(rng.key & ((1 << 63) - 1))
    found = torch.zeros(len(alpha), dtype=torch.float64)
    found[positive] = torch.from_numpy(generator.dirichlet(alpha[positive].double().numpy()))
    return found


def shuffled(rows: Tensor, rng: Rng) -> Tensor:
    """The rows in random order."""
    return rows[rng.permutation(len(rows))]


def unit_pixels(dataset: Dataset, part: str) -> Dataset:
    """The dataset with its pixels scaled to 0 ... 1; DataError unless it holds square images of ten classes."""
    shape = dataset.input_shape
    if dataset.x.dtype != torch.uint8 or len(shape) != 3 or shape[-1] != shape[-2] or dataset.num_classes != 10:
        raise DataError(
            f"{part} needs square images of ten classes, bytes of shape (channels, n, n); samples of {dataset.name} "
            f"have shape {shape}, {dataset.num_classes} classes and the type {dataset.x.dtype}."
        )
    return replace(dataset, mean=0.0, std=255.0)


def _drawn(rows: Tensor, count: int, rng: Rng) -> Tensor:
    """The first `count` rows in random order, repeating from the start if there are too few."""
    order = rng.permutation(len(rows), min(count, len(rows)))
    return rows[order if count <= len(rows) else order[torch.arange(count) % len(rows)]]


@dataclass(frozen=True)
class Part:
    """Contract of a part of a scenario: a frozen settings class that configures a partition."""

    key: ClassVar[str]
    summary: ClassVar[str]

    def configure(self, partition: Partition) -> None:
        """Set the groups, the partitioner or the settings of the partition."""
        raise NotImplementedError


_PARTS: dict[str, type[Part]] = {}


def register_part(cls: type[Part]) -> type[Part]:
    """Class decorator: register a part under its `key`."""
    _PARTS[cls.key] = cls
    return cls


def parts() -> dict[str, type[Part]]:
    """All registered parts."""
    import_all("coterie.data.scenarios")
    return dict(sorted(_PARTS.items()))


def parts_of(name: str) -> list[type[Part]]:
    """The parts of a scenario by its name, such as `rotated+label_swapped`."""
    known = parts()
    for key in name.split("+"):
        if key not in known:
            raise UnknownName("scenario", key, known)
    return [known[key] for key in name.split("+")]


def scenario_fields(name: str) -> set[str]:
    """The fields that a scenario has: those of its parts and the common ones."""
    return {field for part in (*parts_of(name), Common) for field in fields_of(part)}


@dataclass(frozen=True)
class Scenario:
    """Parts in order, and the common settings."""

    parts: tuple[Part, ...]
    common: Common = Common()

    @classmethod
    def named(cls, name: str, values: Mapping[str, Any]) -> Scenario:
        """A scenario by name: `rotated`, `rotated+label_swapped`; a value applies to every part that has the field."""
        classes = parts_of(name)
        every = scenario_fields(name)
        for field_name in values:
            if field_name not in every:
                raise UnknownName(f"field of scenario {name} named", field_name, every)

        def own(part: type) -> dict[str, Any]:
            return {k: v for k, v in values.items() if k in fields_of(part)}

        made = tuple(build(part, own(part), "scenario") for part in classes)
        return cls(made, build(Common, own(Common), "scenario"))

    @property
    def name(self) -> str:
        """The name that `named` takes."""
        return "+".join(part.key for part in self.parts)

    @property
    def values(self) -> dict[str, Any]:
        """All settings, merged."""
        merged: dict[str, Any] = {}
        for part in (*self.parts, self.common):
            merged |= values_of(part)
        return merged

    def partition(self, dataset: Dataset, clients: int | None, rng: Rng, seed: int = 0) -> Federation:
        """Partition a dataset into `clients` clients, or into one per user of the dataset."""
        if clients is not None and clients < 1:
            raise ConfigError(f"clients must be an int >= 1. Got {clients} instead.")
        partition = Partition(dataset, clients, rng.at("scenario"), self.common, seed=seed)
        for part in self.parts:
            part.configure(partition)
        return partition.build()
