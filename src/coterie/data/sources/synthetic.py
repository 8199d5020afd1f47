"""Synthetic images: K groups that see the same images but label them differently.

Each class has a prototype; a sample is a prototype plus noise. Every group permutes the labels in its own way,
so that no single model fits two groups. For tests and for benchmarks at scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from coterie.data.dataset import Dataset, Preset, Source, positive_clients, register_preset, register_source
from coterie.errors import ConfigError
from coterie.randomness import Rng
from coterie.settings import setting

_SLAB = 1 << 24  # elements generated at a time, to keep the noise below about 100 MB


@register_source
@dataclass(frozen=True)
class Synthetic(Source):
    """Groups of clients with different labels for the same images."""

    key: ClassVar[str] = "synthetic"
    summary: ClassVar[str] = "synthetic images; each group of clients permutes the labels"
    is_public: ClassVar[bool] = True

    groups: int = setting(4, "number of true groups", ge=1)
    samples: int = setting(60, "samples per client, including test samples", ge=2)
    spread: float = setting(
        0.0, "spread of client sizes: 0 is equal, 0.5 is from 0.5 to 1.5 times `samples`", ge=0, lt=1
    )
    shape: tuple[int, ...] = setting((1, 28, 28), "shape of one sample: [channels, height, width]", ge=1)
    classes: int = setting(10, "number of classes", ge=2)
    noise: float = setting(0.5, "noise, relative to the contrast of the prototypes", ge=0)

    def load(self, clients: int | None, rng: Rng, data_dir: Path | None) -> Dataset:
        """Generate the samples from the seed."""
        number = positive_clients(clients, 40)
        point = rng.at("synthetic")
        factor = 1 + self.spread * (2 * point.at("sizes").uniform(number) - 1)
        sizes = (self.samples * factor).round().long().clamp_min(2)  # [N]
        user = torch.repeat_interleave(torch.arange(number), sizes)  # [S]
        group = user * self.groups // number if number >= self.groups else user % self.groups
        concept = (point.at("classes").uniform(len(user)) * self.classes).long()  # [S]
        names = self._class_names(point.at("names"))
        width = math.prod(self.shape)
        prototypes = 64 + 128 * (point.at("prototypes").uniform(self.classes, width) > 0.5).to(torch.int16)
        x = torch.empty(len(user), width, dtype=torch.uint8)
        generator = torch.Generator().manual_seed(point.at("noise").key & ((1 << 63) - 1))
        reach = round(128 * self.noise)
        for rows in torch.arange(len(user)).split(max(1, _SLAB // width)):
            jitter = torch.randint(-reach, reach + 1, (len(rows), width), dtype=torch.int16, generator=generator)
            x[rows] = (prototypes[concept[rows]] + jitter).clamp_(0, 255).to(torch.uint8)
        return Dataset(
            "synthetic",
            x.reshape(-1, *self.shape),
            names[group, concept],
            num_classes=self.classes,
            user=user.numpy().astype(np.int64),
            user_names=tuple(f"client-{i:05d}" for i in range(number)),
            group=group.numpy().astype(np.int64),
            mean=128.0,
            std=64.0,
        ).validate()

    def _class_names(self, rng: Rng) -> Tensor:
        """The label of each concept in each group: int64 [groups, classes], all rows different."""
        if self.groups > math.factorial(min(self.classes, 12)):
            raise ConfigError(
                f"{self.classes} classes cannot be permuted in {self.groups} different ways; use more classes."
            )
        found: list[list[int]] = []
        draw = 0
        while len(found) < self.groups:
            candidate = rng.at(draw).permutation(self.classes).tolist()
            draw += 1
            if candidate not in found:
                found.append(candidate)
        return torch.tensor(found)


register_preset(
    Preset(
        name="synthetic",
        summary=Synthetic.summary,
        source="synthetic",
        scenario="by_user",
        model="mlp",
        work={"lr": 0.1, "epochs": 1, "batch_size": 20},
    )
)
