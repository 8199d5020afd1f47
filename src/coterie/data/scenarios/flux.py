"""The benchmark of FLUX (Fenoglio et al. 2025): one of four shifts between clients, in eight levels.

The data is divided by the published generator, ANDA, whose draws are those of numpy's legacy generator and of
torch.randperm: seed 42 + f gives the clients of fold f. Each sample belongs to one client and is stored as it sees it.

- `px`: each client has its images rotated and coloured.
- `py`: each client has some of the classes, and its samples are repeated up to the old number.
- `pyx`: each client permutes the names of some classes.
- `pxy`: each client rotates some classes, each by its own angle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.random import RandomState
from torch import Tensor

from coterie.data.scenario import ClientShare, Part, Partition, register_part, unit_pixels
from coterie.data.transforms import Turn
from coterie.errors import ConfigError
from coterie.settings import setting

_CLASSES = 10
_TURNS = (2, 3, 4, 5, 2, 3, 4, 5)  # rotations of `px`, by level
_COLOURED = 5  # the level from which `px` has colours
_CHANNELS = (0, 2, 1)  # set to full in images of colour 0, 1, 2
_BANK = 5  # sets of classes of `py`
_SPLIT_SEED = 42  # of the validation samples, in every fold

Kinds = Sequence[tuple[int, ...]]  # what distinguishes the distribution of each client


@register_part
@dataclass(frozen=True)
class Flux(Part):
    """One shift between clients; clients with the same draw are a true group."""

    key: ClassVar[str] = "flux"
    summary: ClassVar[str] = "a shift of P(X), P(Y), P(Y|X) or P(X|Y) between clients, in eight levels (FLUX)"

    shift: Literal["px", "py", "pyx", "pxy"] = setting(
        "px",
        "what differs between clients: images rotated and coloured (px), classes held (py), names of classes (pyx), "
        "rotation of each class (pxy)",
    )
    level: int = setting(1, "strength of the shift", ge=1, le=8)

    def configure(self, partition: Partition) -> None:
        if partition.has_groups:
            raise ConfigError("flux defines its own groups; do not join it to another part that does.")
        partition.dataset = unit_pixels(partition.dataset, self.key)
        partition.set_partitioner(self.shares)

    def shares(self, partition: Partition) -> list[ClientShare]:
        if partition.clients is None:
            raise ConfigError("flux needs a number of clients; set it with --clients N.")
        draw, order = RandomState(partition.seed), torch.Generator().manual_seed(partition.seed)
        train, test = (_parts(rows, partition.clients, order) for rows in partition.pool(0))
        rows = [torch.cat(parts) for parts in zip(train, test, strict=True)]
        data = partition.dataset
        kinds: Kinds
        if self.shift == "py":
            kinds, train, test = class_sets(self.level, data.y, train, test, draw)
        elif self.shift == "pyx":
            kinds = permutations(self.level, partition.clients, draw)
            partition.dataset = replace(data, y=_renamed(data.y, rows, kinds))
        else:
            kinds = (patterns if self.shift == "px" else angles)(self.level, partition.clients, draw)
            x = data.x.repeat(1, 3 // data.input_shape[0], 1, 1)  # a copy
            for mine, kind in zip(rows, kinds, strict=True):
                if self.shift == "px":
                    _paint(x, mine, *kind)
                    continue
                for label, degrees in enumerate(kind):
                    _paint(x, mine[data.y[mine] == label], degrees)
            partition.dataset = replace(data, x=x)
        partition.has_groups = True
        distinct = list(dict.fromkeys(kinds))
        found = []
        for client, (mine, kept) in enumerate(zip(train, test, strict=True)):
            own, held = _divided(mine, partition.common.valid)
            found.append(ClientShare(f"client-{client:03d}", distinct.index(kinds[client]), own, kept, valid=held))
        return found


# ---- the draws of the generator ----


def patterns(level: int, clients: int, draw: RandomState) -> Kinds:
    """The rotation in degrees and the colour of each client; colour -1 is none."""
    turns, colours = _TURNS[level - 1], len(_CHANNELS) if level >= _COLOURED else 1
    ids = draw.randint(0, turns * colours, size=clients).tolist()
    return [(i // colours * 360 // turns, i % colours if colours > 1 else -1) for i in ids]


def class_sets(
    level: int, y: Tensor, train: Sequence[Tensor], test: Sequence[Tensor], draw: RandomState
) -> tuple[Kinds, list[Tensor], list[Tensor]]:
    """The classes of each client, and its rows of these classes with the repeated ones."""
    held = _CLASSES + 1 - level
    bank = [tuple(sorted(draw.choice(_CLASSES, held, replace=False).tolist())) for _ in range(_BANK)]
    kinds: list[tuple[int, ...]] = []
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for parts in zip(train, test, strict=True):
        kinds.append(bank[int(draw.choice(np.arange(1, _BANK + 1))) - 1])
        for rows, kept in zip(parts, found, strict=True):
            some = rows[torch.isin(y[rows], torch.tensor(kinds[-1]))]
            again = draw.choice(len(some), int(len(some) * (_CLASSES / held - 1)), replace=True)
            kept.append(torch.cat([some, some[torch.from_numpy(again)]]))
    return kinds, *found


def permutations(level: int, clients: int, draw: RandomState) -> Kinds:
    """The new name of each class, for each client."""
    pool = draw.choice(_CLASSES, level, replace=False)
    found = []
    for _ in range(clients):
        draw.rand()  # the generator draws whether to permute, and always does
        names, mixed = np.arange(_CLASSES), pool.copy()
        draw.shuffle(mixed)
        names[pool] = mixed
        found.append(tuple(names.tolist()))
    return found


def angles(level: int, clients: int, draw: RandomState) -> Kinds:
    """The rotation of each class in degrees, for each client."""
    rotated = draw.choice(_CLASSES, level, replace=False)
    draw.choice(_CLASSES, level, replace=False)  # classes to colour: there is one colour only
    return [
        tuple(int(draw.choice([0, 90, 180, 270])) if label in rotated else 0 for label in range(_CLASSES))
        for _ in range(clients)
    ]


# ---- what clients see ----


def _parts(rows: Tensor, clients: int, order: torch.Generator) -> list[Tensor]:
    """Equal parts of the rows in random order."""
    size = len(rows) // clients
    return list(rows[torch.randperm(len(rows), generator=order)][: size * clients].split(size))


def _paint(x: Tensor, rows: Tensor, degrees: int, colour: int = -1) -> None:
    """Rotate the images of these rows, and set one channel to full."""
    x[rows] = Turn(degrees).inputs(x[rows])
    if colour >= 0:
        x[rows, _CHANNELS[colour]] = 255


def _renamed(y: Tensor, rows: Sequence[Tensor], names: Kinds) -> Tensor:
    """The labels with the names that the owner of each row uses."""
    y = y.clone()
    for mine, new in zip(rows, names, strict=True):
        y[mine] = torch.tensor(new)[y[mine]]
    return y


def _divided(rows: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Training and validation rows of a client."""
    if not share:
        return rows, rows[:0]
    from sklearn.model_selection import train_test_split

    halves = train_test_split(np.arange(len(rows)), test_size=share, random_state=_SPLIT_SEED)
    return rows[torch.from_numpy(halves[0])], rows[torch.from_numpy(halves[1])]
