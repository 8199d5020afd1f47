"""Clients keep the first layer of a network to themselves; the rest is shared."""

from dataclasses import dataclass
from typing import ClassVar

import coterie
from coterie.methods.parts.own_parts import OwnParts, PartOf, named


@coterie.register
@dataclass(frozen=True)
class OwnFirstLayer(OwnParts):
    """One model, but each client reads its samples in its own way."""

    key: ClassVar[str] = "own-first-layer"
    keeps: ClassVar[PartOf] = named("1.*")  # names of parameters: layer 0 only flattens the pictures
