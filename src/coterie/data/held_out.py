"""Test samples that look like a client's training samples: how many a client gets, and which.

Labels are compared before the views. A view changes the labels of train and test rows alike, so the labels a client
sees agree as well, also after it has changed its group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.data.dataset import Dataset
from coterie.errors import DataError
from coterie.randomness import Rng

FEWEST = 10  # test samples of a client with `tests=like`, unless the pool is smaller


def label_counts(dataset: Dataset, rows: Tensor) -> Tensor:
    """Number of rows of each class, int64 [L]; samples without classes count as one class."""
    if not dataset.num_classes:
        return torch.tensor([len(rows)])
    return torch.bincount(dataset.y[rows], minlength=dataset.num_classes)


def own_size(samples: int, share: float) -> int:
    """How many of a client's samples are for testing: `share` of them, but at least one and not all.

    >>> own_size(100, 0.2), own_size(3, 0.2), own_size(2, 0.9)
    (20, 1, 1)
    """
    # 0.29 * 100 is 28.999...: do not lose a row to rounding.
    return max(1, min(int(share * samples + 1e-9), samples - 1))


def like_size(held: int, share: float, pool: int) -> int:
    """How many test samples a client with `held` training samples draws from a pool.

    They are `share` of its training and test samples together, at least `FEWEST`, at most the pool.

    >>> like_size(80, 0.2, 1000), like_size(8, 0.2, 1000), like_size(8000, 0.2, 1000)
    (20, 10, 1000)
    """
    # 718 * 0.2 / 0.8 is 179.4999...: halves are rounded up all the same.
    return min(max(int(held * share / (1 - share) + 0.5 + 1e-9), FEWEST), pool)


@dataclass(frozen=True)
class Pool:
    """Rows from which clients draw test samples by class."""

    classes: tuple[Tensor, ...]  # the rows of each class, in random order

    @classmethod
    def of(cls, dataset: Dataset, rows: Tensor, rng: Rng) -> Pool:
        """Sort rows by class; samples without classes are one class."""
        mixed = rows[rng.permutation(len(rows))]
        if not dataset.num_classes:
            return cls((mixed,))
        y = dataset.y[mixed]
        return cls(tuple(mixed[y == label] for label in range(dataset.num_classes)))

    @property
    def sizes(self) -> Tensor:
        """Rows of each class, int64 [L]."""
        return torch.tensor([len(rows) for rows in self.classes])

    def draw(self, counts: Tensor, rng: Rng) -> Tensor:
        """Draw `counts` [L] rows of each class; a row comes twice only if its class has too few.

        A client reads a stretch of the shuffled rows from a random place on: its draw does not depend on other
        clients, and costs no permutation.
        """
        found = []
        for label in counts.nonzero().flatten().tolist():
            rows, count = self.classes[label], int(counts[label])
            start = int(rng.at("class", label).uniform(1) * len(rows))
            found.append(rows[(start + torch.arange(count)) % len(rows)])
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def draw_like(dataset: Dataset, name: str, held: Tensor, pool: Pool, share: float, rng: Rng) -> Tensor:
    """Test rows from the pool in the proportions of the classes that client `name` holds."""
    counts, sizes = label_counts(dataset, held), pool.sizes
    missing = ((counts > 0) & (sizes == 0)).nonzero().flatten().tolist()
    if missing:
        what = f"samples of class {missing[0]}" if dataset.num_classes else "samples"
        raise DataError(
            f"Client '{name}' holds {what}, but the test samples of its group have none; "
            "use --set scenario.tests=own or scenario.tests=kind."
        )
    size = like_size(len(held), share, int(sizes.sum()))
    return pool.draw(round_shares(counts / counts.sum().double(), size), rng)


def fill_empty(dataset: Dataset, train: list[Tensor], test: list[Tensor], pool: Tensor, rng: Rng) -> list[Tensor]:
    """Give each client without test rows one row of the pool, of the class it holds most of.

    Such a client is too small for a row of its own; another client may be tested on the same row.
    """
    if all(len(rows) for rows in test):
        return test
    drawn = Pool.of(dataset, pool, rng.at("pool"))
    found = []
    for client, (held, rows) in enumerate(zip(train, test, strict=True)):
        counts = label_counts(dataset, held).where(drawn.sizes > 0, 0)
        if not len(rows) and not counts.sum():
            raise DataError(
                f"A client of {dataset.name} has {len(held)} samples, and none of the {len(pool)} samples held out "
                "for testing is of their classes; use fewer clients, a larger scenario.test, or scenario.tests=kind."
            )
        one = torch.zeros_like(counts)
        one[counts.argmax()] = 1
        found.append(rows if len(rows) else drawn.draw(one, rng.at("client", client)))
    return found


def round_shares(shares: Tensor, total: int) -> Tensor:
    """Round shares to integers that sum to `total`, by largest remainder.

    >>> round_shares(torch.tensor([0.5, 0.26, 0.24]), 10).tolist()
    [5, 3, 2]
    """
    exact = shares * total
    whole = exact.floor().long()
    missing = total - int(whole.sum())
    whole[torch.argsort(exact - whole, descending=True, stable=True)[:missing]] += 1
    return whole
