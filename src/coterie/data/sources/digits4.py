"""MNIST, USPS, SVHN and SIGN together, for multi-source experiments.

All images are converted to 28x28 grey; the source of a sample is its true group.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from coterie.data.dataset import Dataset, Source, register_source
from coterie.data.sources.mnist import Mnist
from coterie.data.sources.sign import Sign
from coterie.data.sources.stored import StoredSource, fixed_split, resize
from coterie.data.sources.svhn import Svhn
from coterie.data.sources.usps import Usps
from coterie.randomness import Rng

_SIDE = 28
PARTS: tuple[type[StoredSource], ...] = (Mnist, Usps, Svhn, Sign)  # in the order of the groups


@register_source
@dataclass(frozen=True)
class Digits4(Source):
    """Digits from four sources, each with its official split."""

    key: ClassVar[str] = "digits-4"
    summary: ClassVar[str] = "MNIST, USPS, SVHN and SIGN as 28x28 grey; the source is the true group"
    is_fixed: ClassVar[bool] = True
    is_public: ClassVar[bool] = True

    def load(self, clients: int | None, rng: Rng, data_dir: Path | None) -> Dataset:
        images, labels, flags = [], [], []
        for source in PARTS:
            part = source().load(clients, rng, data_dir)
            images.append(resize(part.x, _SIDE, grey=True))
            labels.append(part.y)
            flags.append(fixed_split(source.key, part.y) if part.is_train is None else part.is_train)
            del part  # SVHN in colour takes four times the memory of what is kept
        return Dataset(
            self.key,
            torch.cat(images),
            torch.cat(labels),
            num_classes=10,
            is_train=np.concatenate(flags),
            group=np.repeat(np.arange(len(PARTS)), [len(y) for y in labels]),
            mean=127.5,
            std=127.5,
        ).validate()
