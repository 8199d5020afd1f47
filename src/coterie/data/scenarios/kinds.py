"""Groups that see the same samples differently: swapped labels, noise, blur, contrast, colour; and drift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from coterie.data.scenario import Part, Partition, register_part
from coterie.data.transforms import Blur, Colour, Contrast, Noise, SwapLabels, Transform, View
from coterie.errors import ConfigError, DataError
from coterie.settings import setting


@register_part
@dataclass(frozen=True)
class LabelSwapped(Part):
    """Group g swaps classes 2g and 2g + 1, so that any two groups disagree on four classes."""

    key: ClassVar[str] = "label_swapped"
    summary: ClassVar[str] = "each group has two classes swapped"

    groups: int = setting(4, "number of groups", ge=1)

    def configure(self, partition: Partition) -> None:
        if partition.dataset.num_classes < 2 * self.groups:
            raise ConfigError(
                f"{self.groups} groups need {2 * self.groups} classes to swap, but {partition.dataset.name} has "
                f"{partition.dataset.num_classes}; use fewer with --set scenario.groups=K."
            )
        views: list[View] = [(SwapLabels(2 * g, 2 * g + 1),) for g in range(self.groups)]
        partition.set_groups([f"s{2 * g}{2 * g + 1}" for g in range(self.groups)], views)


@dataclass(frozen=True)
class _Shift(Part):
    """Group 0 sees the original images; the change grows with the group."""

    letter: ClassVar[str]

    groups: int = setting(2, "number of groups", ge=1)
    strength: float = setting(1.0, "strength of the change in the last group", gt=0)

    def change(self, strength: float, channels: int, group: int) -> Transform:
        """The transform of a group >= 1."""
        raise NotImplementedError

    def configure(self, partition: Partition) -> None:
        shape = partition.dataset.input_shape
        if len(shape) != 3:
            raise DataError(f"{self.key} needs images, but samples of {partition.dataset.name} have shape {shape}.")
        views: list[View] = [()]
        for g in range(1, self.groups):
            views.append((self.change(self.strength * g / (self.groups - 1), shape[0], g),))
        partition.set_groups([f"{self.letter}{g}" for g in range(self.groups)], views)


@register_part
@dataclass(frozen=True)
class Noisy(_Shift):
    """Images with growing noise."""

    key: ClassVar[str] = "noisy"
    summary: ClassVar[str] = "groups with increasing noise in their images"
    letter: ClassVar[str] = "n"

    def change(self, strength: float, channels: int, group: int) -> Transform:
        return Noise(strength)


@register_part
@dataclass(frozen=True)
class Blurred(_Shift):
    """Images with growing blur."""

    key: ClassVar[str] = "blurred"
    summary: ClassVar[str] = "groups with increasing blur in their images"
    letter: ClassVar[str] = "b"

    def change(self, strength: float, channels: int, group: int) -> Transform:
        return Blur(strength)


@register_part
@dataclass(frozen=True)
class Faded(_Shift):
    """Images with decreasing contrast, divided by 1 + 3 * strength."""

    key: ClassVar[str] = "contrast"
    summary: ClassVar[str] = "groups with decreasing contrast in their images"
    letter: ClassVar[str] = "c"

    def change(self, strength: float, channels: int, group: int) -> Transform:
        return Contrast(1 / (1 + 3 * strength))


@register_part
@dataclass(frozen=True)
class Coloured(_Shift):
    """Colour images under coloured lights: one channel is kept, the others are darkened."""

    key: ClassVar[str] = "colour"
    summary: ClassVar[str] = "groups whose images are lit in different colours"
    letter: ClassVar[str] = "l"

    def change(self, strength: float, channels: int, group: int) -> Transform:
        if channels < 2:
            raise DataError("colour needs colour images; for grey images use contrast, noisy or blurred.")
        dark = 1 / (1 + 3 * strength)
        return Colour(tuple(1.0 if c == group % channels else dark for c in range(channels)))


@register_part
@dataclass(frozen=True)
class Drift(Part):
    """Clients that change their group during the run; joined to a part that defines groups by views."""

    key: ClassVar[str] = "drift"
    summary: ClassVar[str] = "some clients change to the next group at given rounds"

    at: tuple[int, ...] = setting((10,), "rounds at which clients change", ge=1)
    share: float = setting(0.3, "share of the clients that change each time", gt=0, le=1)

    def configure(self, partition: Partition) -> None:
        partition.drift = (tuple(sorted(self.at)), self.share)
