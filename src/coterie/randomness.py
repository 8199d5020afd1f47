"""Randomness as a function: an integer hash of (seed, round, purpose, client, step) and nothing else.

No generator is shared or advanced, so a draw does not depend on the engine, the chunk size, the device,
or the order in which clients are asked. The hash is splitmix64 (Steele, Lea, Flood 2014) in wrapping
64-bit integers, the same on a CPU and on CUDA; a permutation is an argsort of hashes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_LARGEST = (1 << 63) - 1


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix_int(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _shift(value: Tensor, by: int) -> Tensor:
    # torch shifts signed integers arithmetically; the mask makes the shift logical.
    return (value >> by) & ((1 << (64 - by)) - 1)


def mix(value: Tensor) -> Tensor:
    """Scramble int64 values of any shape: the finaliser of splitmix64."""
    value = (value ^ _shift(value, 30)) * _signed(_FIRST)
    value = (value ^ _shift(value, 27)) * _signed(_SECOND)
    return value ^ _shift(value, 31)


def name_key(name: str) -> int:
    """A 64-bit key of a name, the same on every machine.

    >>> name_key("client-0") == name_key("client-0") != name_key("client-1")
    True
    """
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return _signed(int.from_bytes(digest, "little"))


def name_keys(names: Sequence[str]) -> Tensor:
    """The keys of many names, int64 [N]."""
    return torch.tensor([name_key(name) for name in names], dtype=torch.int64)


@dataclass(frozen=True)
class Rng:
    """A point in the tree of random draws: `rng.at("round", 3)` is another point, always the same one.

    >>> Rng.seed(0).at("round", 3) == Rng.seed(0).at("round").at(3)
    True
    >>> Rng.seed(0).at("cohort") == Rng.seed(1).at("cohort")
    False
    """

    key: int

    @classmethod
    def seed(cls, seed: int) -> Rng:
        """The root of a run."""
        return cls(_signed(_mix_int(seed + _GOLDEN)))

    def at(self, *path: int | str) -> Rng:
        """The point below this one along `path`."""
        key = self.key
        for part in path:
            number = name_key(part) if isinstance(part, str) else part * 2 + 1
            key = _signed(_mix_int(_mix_int(key + _GOLDEN) ^ (number & _MASK)))
        return Rng(key)

    def keys(self, client_keys: Tensor) -> Tensor:
        """One key for each client at this point, int64, of the shape of `client_keys`."""
        return mix(mix(client_keys) ^ self.key)

    def uniform(self, *shape: int) -> Tensor:
        """Numbers in [0, 1), float64, on the CPU."""
        count = math.prod(shape)
        return uniform(torch.tensor([self.key]), count).reshape(shape)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers, float64, on the CPU."""
        count = math.prod(shape)
        return normal(torch.tensor([self.key]), count).reshape(shape)

    def permutation(self, size: int, count: int | None = None) -> Tensor:
        """A permutation of range(size), int64, on the CPU; with `count`, its first entries: the rest is not sorted."""
        if count is None or 4 * count > size:
            return permutations(torch.tensor([self.key]), torch.tensor([size]))[0][:count].clone()
        hashes = _shift(bits(torch.tensor(self.key), size), 1)
        return hashes.topk(count, largest=False).indices

    @contextmanager
    def torch_seed(self) -> Iterator[None]:
        """Within it, torch's own CPU generator is seeded from here; the caller's is given back after."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.key & _LARGEST)
            yield


def bits(keys: Tensor, count: int) -> Tensor:
    """`count` hashes for each key: int64 [..., count]."""
    steps = torch.arange(1, count + 1, device=keys.device) * _signed(_GOLDEN)
    return mix(keys.unsqueeze(-1) + steps)


def uniform(keys: Tensor, count: int) -> Tensor:
    """Numbers in [0, 1) from each key: float64 [..., count]."""
    return _fraction(bits(keys, count))


def _fraction(random: Tensor) -> Tensor:
    """Random int64 values as numbers in [0, 1)."""
    return _shift(random, 11).double() * 2.0**-53


def normal(keys: Tensor, count: int) -> Tensor:
    """Standard normal numbers from each key: float64 [..., count] (Box-Muller)."""
    return normal_of(bits(keys, count + count % 2), count)


def normal_of(random: Tensor, count: int) -> Tensor:
    """Standard normal numbers from random int64 values [..., count, or one more if that is odd]: float64."""
    half = (count + 1) // 2
    numbers = _fraction(random)
    radius = torch.sqrt(-2.0 * torch.log1p(-numbers[..., :half]))
    angle = 2.0 * math.pi * numbers[..., half:]
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1)[..., :count]


def permutations(keys: Tensor, sizes: Tensor) -> Tensor:
    """A permutation of range(sizes[i]) for each key i, int64 [c, max size].

    Columns beyond a row's size hold the padding positions, in order.
    """
    width = int(sizes.max()) if len(sizes) else 0
    hashes = _shift(bits(keys, width), 1)  # [c, width], non-negative
    column = torch.arange(width, device=keys.device)
    hashes = torch.where(column < sizes.to(keys.device).unsqueeze(1), hashes, _LARGEST)
    return torch.argsort(hashes, dim=1, stable=True)


def race(rng: Rng, client_keys: Tensor, weights: Tensor) -> Tensor:
    """Draw one index with probability proportional to its weight, by an exponential race.

    Each entry's time depends on its own key only, so the winner does not depend on the order of entries.
    `weights` is [..., n]; the winner is int64 [...].
    """
    clock = -torch.log1p(-uniform(rng.keys(client_keys), 1)[..., 0])  # [n]
    return (clock / weights.double().clamp_min(1e-300)).argmin(-1)
