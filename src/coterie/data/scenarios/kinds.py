"""Kinds of client that see the same samples differently: swapped labels, noise, blur, contrast, colour; drift."""

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
    """Group g exchanges classes 2g and 2g + 1, so that any two groups disagree about four classes."""

    key: ClassVar[str] = "label_swapped"
    summary: ClassVar[str] = "each group has two class names exchanged"

    groups: int = setting(4, "number of groups", ge=1)

    def configure(self, partition: Partition) -> None:
        """One view a group."""
        if partition.dataset.num_classes < 2 * self.groups:
            raise ConfigError(
                f"{self.groups} groups need {2 * self.groups} classes to swap; {partition.dataset.name} has "
                f"{partition.dataset.num_classes}. Use fewer with --set scenario.groups=K."
            )
        views: list[View] = [(SwapLabels(2 * g, 2 * g + 1),) for g in range(self.groups)]
        partition.set_groups([f"s{2 * g}{2 * g + 1}" for g in range(self.groups)], views)


@dataclass(frozen=True)
class _Shift(Part):
    """Group 0 sees the data as they are, the others more and more changed."""

    letter: ClassVar[str]

    groups: int = setting(2, "number of groups", ge=1)
    strength: float = setting(1.0, "how much the last group is changed; 0 is not at all", gt=0)

    def change(self, share: float, channels: int, group: int) -> Transform:
        """The change of a group; `share` goes from 0 (first group, never asked) to `strength` (last)."""
        raise NotImplementedError

    def configure(self, partition: Partition) -> None:
        """One view a group."""
        shape = partition.dataset.input_shape
        if len(shape) != 3:
            raise DataError(f"Only pictures can be changed this way; samples of {partition.dataset.name} are {shape}.")
        views: list[View] = [()]
        for g in range(1, self.groups):
            views.append((self.change(self.strength * g / (self.groups - 1), shape[0], g),))
        partition.set_groups([f"{self.letter}{g}" for g in range(self.groups)], views)


@register_part
@dataclass(frozen=True)
class Noisy(_Shift):
    """Pictures with noise of growing strength."""

    key: ClassVar[str] = "noisy"
    summary: ClassVar[str] = "groups with more and more noise in their pictures"
    letter: ClassVar[str] = "n"

    def change(self, share: float, channels: int, group: int) -> Transform:
        """Noise of that standard deviation."""
        return Noise(share)


@register_part
@dataclass(frozen=True)
class Blurred(_Shift):
    """Pictures blurred more and more."""

    key: ClassVar[str] = "blurred"
    summary: ClassVar[str] = "groups with pictures more and more out of focus"
    letter: ClassVar[str] = "b"

    def change(self, share: float, channels: int, group: int) -> Transform:
        """A blur of that many pixels."""
        return Blur(share)


@register_part
@dataclass(frozen=True)
class Faded(_Shift):
    """Pictures with less and less contrast."""

    key: ClassVar[str] = "contrast"
    summary: ClassVar[str] = "groups with less and less contrast in their pictures"
    letter: ClassVar[str] = "c"

    def change(self, share: float, channels: int, group: int) -> Transform:
        """Contrast divided by 1 + 3 * strength."""
        return Contrast(1 / (1 + 3 * share))


@register_part
@dataclass(frozen=True)
class Coloured(_Shift):
    """Colour pictures under lights of different colours."""

    key: ClassVar[str] = "colour"
    summary: ClassVar[str] = "groups whose pictures are lit in different colours"
    letter: ClassVar[str] = "l"

    def change(self, share: float, channels: int, group: int) -> Transform:
        """One channel kept, the others darker."""
        if channels < 2:
            raise DataError("Grey pictures have no colours; use contrast, noisy or blurred.")
        dark = 1 / (1 + 3 * share)
        return Colour(tuple(1.0 if c == group % channels else dark for c in range(channels)))


@register_part
@dataclass(frozen=True)
class Drift(Part):
    """Clients that become another kind while the run goes on: joined to a part that makes kinds."""

    key: ClassVar[str] = "drift"
    summary: ClassVar[str] = "some clients change to the next kind at given rounds"

    at: tuple[int, ...] = setting((10,), "rounds at which clients change", ge=1)
    share: float = setting(0.3, "share of the clients that change each time", gt=0, le=1)

    def configure(self, partition: Partition) -> None:
        """Plan the changes."""
        partition.drift = (tuple(sorted(self.at)), self.share)
