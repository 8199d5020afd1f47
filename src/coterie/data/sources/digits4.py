"""Four kinds of digits together, as multi-source experiments take them: MNIST, USPS, SVHN and SIGN.

Each is brought to 28x28 grey; which one a sample comes from is its true group.
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
from coterie.data.sources.stored import StoredSource, own_split, resized
from coterie.data.sources.svhn import Svhn
from coterie.data.sources.usps import Usps
from coterie.randomness import Rng

_SIDE = 28
PARTS: tuple[type[StoredSource], ...] = (Mnist, Usps, Svhn, Sign)  # the order is the number of the group


@register_source
@dataclass(frozen=True)
class Digits4(Source):
    """Written, posted, painted and signed digits; the sources' own train and test samples."""

    key: ClassVar[str] = "digits-4"
    summary: ClassVar[str] = "MNIST, USPS, SVHN and SIGN together, each 28x28 grey; the source is the true group"

    def load(self, clients: int | None, rng: Rng, data_dir: Path | None) -> Dataset:
        """Read the four, one after the other."""
        images, labels, flags = [], [], []
        for source in PARTS:
            part = source().load(clients, rng, data_dir)
            images.append(resized(part.x, _SIDE, grey=True))
            labels.append(part.y)
            flags.append(own_split(source.key, part.y) if part.is_train is None else part.is_train)
            del part  # SVHN in colour is four times what is kept of it
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
