"""Clients that do harm, in simulation: to see what a method and its robust means withstand.

Attackers are a fixed share of the clients, drawn by the seed. `sign_flip`: they send the opposite of what they learned;
`gaussian`: noise instead of what they learned; `label_flip`: they train on wrong labels (class k is called L - 1 - k),
and send what comes of it. Apart from that, `corrupt` is a share of all answers that arrive as NaN, whoever sent them.
Scores of a run with attackers are those of the honest clients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from coterie.client.block import Models, take
from coterie.client.steps import Answer
from coterie.data.federation import Federation
from coterie.errors import ConfigError
from coterie.randomness import Rng, normal, uniform

Kind = Literal["none", "sign_flip", "gaussian", "label_flip"]

_SENT = ("params", "gradient")  # what of an answer was learned


@dataclass(frozen=True)
class FlipLabels:
    """Call class k by the name of class L - 1 - k."""

    classes: int

    def inputs(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Inputs stay."""
        return x

    def labels(self, y: Tensor) -> Tensor:
        """The other end of the list."""
        return self.classes - 1 - y


@dataclass(frozen=True)
class Attack:
    """Who does harm, and how."""

    kind: Kind
    attackers: Tensor  # bool [N]
    rng: Rng
    corrupt: float = 0.0  # share of answers that arrive as NaN

    @classmethod
    def of(cls, keys: Tensor, kind: Kind, share: float, corrupt: float, seed: int) -> Attack:
        """The attackers among clients with these keys: each one's luck depends on its own key and the seed."""
        rng = Rng.seed(seed).at("attack")
        attackers = torch.zeros(len(keys), dtype=torch.bool)
        if kind != "none":
            count = round(share * len(keys))
            luck = uniform(rng.keys(keys), 1)[:, 0]
            attackers[torch.argsort(luck, stable=True)[:count]] = True
        return cls(kind, attackers, rng, corrupt)

    @property
    def is_none(self) -> bool:
        """Whether nothing happens."""
        return not self.corrupt and not bool(self.attackers.any())

    def on_data(self, federation: Federation) -> Federation:
        """The federation with the attackers' wrong labels, if that is the attack."""
        if self.kind != "label_flip":
            return federation
        if not federation.num_classes:
            raise ConfigError("label_flip turns classes around; these data have none.")
        flip = (FlipLabels(federation.num_classes),)
        count = len(federation.views)
        views = (*federation.views, *[view + flip for view in federation.views])

        def flipped(view: Tensor) -> Tensor:
            return torch.where(self.attackers, view + count, view)

        everyone = torch.arange(len(federation))
        moves = tuple(replace(move, view=flipped(move.view)) for move in federation.moves)
        return replace(federation, views=views, view=flipped(federation.view_of(everyone)), moves=moves)

    def on_answer(self, answer: Answer, clients: Tensor, keys: Tensor, sent: Models | None, point: Rng) -> Answer:
        """What arrives of an answer [c, ...] of these clients, whose keys are `keys` [c]."""
        here = self.attackers[clients]
        tensors = dict(answer.items())
        if self.kind in ("sign_flip", "gaussian") and bool(here.any()):
            for name in (name for name in _SENT if name in tensors):
                tensors[name] = self._false(name, tensors, here, keys, sent, point)
        if self.corrupt:
            lost = uniform(self.rng.at("corrupt", point.key).keys(keys), 1)[:, 0] < self.corrupt
            for name in (name for name in _SENT if name in tensors):
                broken = lost.to(tensors[name].device).unsqueeze(1)
                tensors[name] = torch.where(broken, torch.nan, tensors[name])
        return Answer(**tensors)

    def _false(
        self, name: str, tensors: dict[str, Tensor], here: Tensor, keys: Tensor, sent: Models | None, point: Rng
    ) -> Tensor:
        true = tensors[name]
        start = torch.zeros_like(true)
        if name == "params" and sent is not None:
            start = sent.rows() if sent.refs.dim() == 1 else _chosen(sent, tensors)
        if self.kind == "sign_flip":
            false = 2 * start - true
        else:
            who = here.nonzero().flatten()
            noise = normal(self.rng.at("noise", point.key).keys(keys[who]).to(true.device), true.shape[1])
            false = start.clone()
            false[who.to(true.device)] += noise.to(true.dtype)
        return torch.where(here.to(true.device).unsqueeze(1), false, true)


def _chosen(sent: Models, tensors: dict[str, Tensor]) -> Tensor:
    """Of several models, the one the client chose, or else the first."""
    choice = tensors.get("choice")
    return take(sent, torch.zeros(len(sent.refs), dtype=torch.int64) if choice is None else choice)
