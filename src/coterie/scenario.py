"""Who holds which samples, seen how, and what the true groups are: Dataset -> Federation.

A scenario is one part or several joined by `+`. Each part writes its share into a `Deal`; the deal is then
carried out. Parts that make groups (rotated, label_swapped ...) are zipped: group g gets the g-th change
of each. The implementations are in `scenarios/`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.dataset import Dataset
from coterie.errors import ConfigError, DataError, UnknownName
from coterie.federation import Federation, Split, cut
from coterie.randomness import Rng, name_keys
from coterie.settings import build, fields_of, setting, values_of
from coterie.transforms import View


@dataclass(frozen=True)
class Hand:
    """What one client is dealt: rows of the data set."""

    name: str
    group: int
    train: Tensor  # int64 rows
    test: Tensor | int  # rows, or the number of a group whose test rows are shared


Dealer = Callable[["Deal"], list[Hand]]


@dataclass
class Deal:
    """The plan that the parts of a scenario write into."""

    dataset: Dataset
    clients: int | None  # as the user asked; None: as the data says
    rng: Rng
    views: list[View] = field(default_factory=lambda: [()])  # one per group
    group_names: list[str] = field(default_factory=lambda: ["all"])
    dealer: Dealer | None = None
    has_groups: bool = False

    def set_groups(self, names: list[str], views: list[View]) -> None:
        """Let there be groups; a second part must make as many, and its views come on top."""
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

    def set_dealer(self, dealer: Dealer) -> None:
        """Let this part decide who gets which samples."""
        if self.dealer is not None:
            raise ConfigError("This scenario has two parts that deal out samples; keep one of them.")
        self.dealer = dealer

    def client_groups(self, total: int | None = None) -> list[int]:
        """The group of each client (of `total`, or of as many as asked): as even as can be, group after group."""
        total, groups = self.clients or 0 if total is None else total, len(self.views)
        if total < groups:
            raise ConfigError(f"clients must be at least the number of groups, {groups}. Got {total} instead.")
        return [i * groups // total for i in range(total)]

    def train_and_test_rows(self) -> tuple[Tensor, Tensor]:
        """Rows of the official split, or of a seeded 80/20 one."""
        rows = torch.arange(len(self.dataset))
        if self.dataset.is_train is None:
            order = self.rng.at("split").permutation(len(rows))
            train, test = cut(order, 0.2)
            return train.sort().values, test.sort().values
        flags = torch.from_numpy(self.dataset.is_train)
        return rows[flags], rows[~flags]

    def carry_out(self, valid: float) -> Federation:
        """Deal the samples, carve the validation shares, and pack everything."""
        hands = (self.dealer or deal_evenly)(self)
        train: list[Tensor] = []
        held: list[Tensor] = []
        tests: list[Tensor] = []
        test_shard: list[int] = []
        shared: dict[int, int] = {}
        _, test_rows = self.train_and_test_rows()
        for hand in hands:
            if not len(hand.train):
                raise DataError(
                    f"Client '{hand.name}' of {self.dataset.name} has no samples to train on; use fewer clients."
                )
            own, middle = cut(hand.train, valid)
            train.append(own)
            held.append(middle)
            if isinstance(hand.test, int):
                if hand.test not in shared:
                    shared[hand.test] = len(tests)
                    tests.append(test_rows)
                test_shard.append(shared[hand.test])
            else:
                test_shard.append(len(tests))
                tests.append(hand.test)
        names = tuple(hand.name for hand in hands)
        groups = torch.tensor([hand.group for hand in hands])
        return Federation(
            name=self.dataset.name,
            x=self.dataset.x,
            y=self.dataset.y,
            num_classes=self.dataset.num_classes,
            train=Split.of(train),
            valid=Split.of(held),
            test=Split.of(tests, torch.tensor(test_shard)),
            names=names,
            keys=name_keys(names),
            views=tuple(self.views),
            view=groups if len(self.views) > 1 else torch.zeros_like(groups),
            groups=groups if self.has_groups else None,
            mean=self.dataset.mean,
            std=self.dataset.std,
        ).validate()


def deal_evenly(deal: Deal) -> list[Hand]:
    """Within each group, every training sample to exactly one client, in equal shares.

    Groups see the data through different views, so a sample may be held once in each group.
    """
    groups = deal.client_groups()
    train, _ = deal.train_and_test_rows()
    hands = []
    for group, name in enumerate(deal.group_names):
        members = groups.count(group)
        if members > len(train):
            raise DataError(
                f"{members} clients cannot share {len(train)} training samples of {deal.dataset.name}; "
                f"use at most {len(train) * len(deal.views)} clients."
            )
        order = train[deal.rng.at("deal", group).permutation(len(train))]
        for number, rows in enumerate(torch.tensor_split(order, members)):
            hands.append(Hand(f"{name}-{number:03d}", group, rows, group))
    return hands


@dataclass(frozen=True)
class Part:
    """Contract of a part of a scenario: a frozen settings class that writes into a deal."""

    key: ClassVar[str]
    summary: ClassVar[str]

    def plan(self, deal: Deal) -> None:
        """Write this part's share into the deal."""
        raise NotImplementedError


_PARTS: dict[str, type[Part]] = {}


def register_part(cls: type[Part]) -> type[Part]:
    """Class decorator: make a part known by its `key`."""
    _PARTS[cls.key] = cls
    return cls


def parts() -> dict[str, type[Part]]:
    """All parts a scenario can be made of."""
    import coterie.scenarios as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(sorted(_PARTS.items()))


@dataclass(frozen=True)
class Common:
    """What every scenario has."""

    valid: float = setting(0.1, "share of each client's training samples held out for validation", ge=0, lt=1)


@dataclass(frozen=True)
class Scenario:
    """Parts in order, and what they have in common."""

    parts: tuple[Part, ...]
    common: Common = Common()

    @classmethod
    def named(cls, name: str, values: Mapping[str, Any]) -> Scenario:
        """A scenario as typed: `rotated`, `rotated+label_swapped`; a value goes to every part that has it."""
        known = parts()
        classes = []
        for key in name.split("+"):
            if key not in known:
                raise UnknownName("scenario", key, known)
            classes.append(known[key])
        every = {field for part in (*classes, Common) for field in fields_of(part)}
        for field_name in values:
            if field_name not in every:
                raise UnknownName(f"field of scenario {name} named", field_name, every)

        def own(part: type) -> dict[str, Any]:
            return {k: v for k, v in values.items() if k in fields_of(part)}

        made = tuple(build(part, own(part), "scenario") for part in classes)
        return cls(made, build(Common, own(Common), "scenario"))

    @property
    def name(self) -> str:
        """The name as it would be typed."""
        return "+".join(part.key for part in self.parts)

    @property
    def values(self) -> dict[str, Any]:
        """All settings in force."""
        merged: dict[str, Any] = {}
        for part in (*self.parts, self.common):
            merged |= values_of(part)
        return merged

    def deal(self, dataset: Dataset, clients: int | None, rng: Rng) -> Federation:
        """Deal a data set out."""
        if clients is not None and clients < 1:
            raise ConfigError(f"clients must be an int >= 1. Got {clients} instead.")
        plan = Deal(dataset, clients, rng.at("scenario"))
        for part in self.parts:
            part.plan(plan)
        return plan.carry_out(self.common.valid)
