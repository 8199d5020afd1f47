"""Simulated malicious clients, to test methods and their robust means.

Attackers are a fixed share of the clients, drawn by the seed. `sign_flip`: they send the opposite of their update;
`gaussian`: they send noise instead of an update; `label_flip`: they train on wrong labels (class k becomes L - 1 - k).
Independently, `corrupt` is the share of all answers that arrive as NaN.
The scores of a run with attackers are those of the honest clients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.client.block import Models, take
from coterie.client.steps import Answer
from coterie.data.federation import Federation
from coterie.engines.settings import AttackKind
from coterie.errors import ConfigError
from coterie.randomness import Rng, normal, uniform

_SENT = ("params", "gradient", "signature")  # the tensors that attacks change


@dataclass(frozen=True)
class FlipLabels:
    """A transform that turns class k into L - 1 - k."""

    classes: int

    def inputs(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Inputs are unchanged."""
        return x

    def labels(self, y: Tensor) -> Tensor:
        """L - 1 - k for each label k."""
        return self.classes - 1 - y


@dataclass(frozen=True)
class Attack:
    """Who attacks, and how."""

    kind: AttackKind
    attackers: Tensor  # bool [N]
    rng: Rng
    corrupt: float = 0.0  # share of answers that arrive as NaN

    @classmethod
    def of(cls, keys: Tensor, kind: AttackKind, share: float, corrupt: float, seed: int) -> Attack:
        """Draw the attackers among clients with these keys; a client's draw depends on its key and the seed only."""
        rng = Rng.seed(seed).at("attack")
        attackers = torch.zeros(len(keys), dtype=torch.bool)
        if kind != "none":
            count = round(share * len(keys))
            draw = uniform(rng.keys(keys), 1)[:, 0]
            attackers[torch.argsort(draw, stable=True)[:count]] = True
        return cls(kind, attackers, rng, corrupt)

    @property
    def is_none(self) -> bool:
        """Whether no answer is changed."""
        return not self.corrupt and not bool(self.attackers.any())

    def on_data(self, federation: Federation) -> Federation:
        """The federation, with wrong labels for the attackers if the attack is `label_flip`."""
        if self.kind != "label_flip":
            return federation
        if not federation.num_classes:
            raise ConfigError(
                "attack label_flip needs classes, but the dataset is a regression; use sign_flip or gaussian."
            )
        flip = (FlipLabels(federation.num_classes),)
        count = len(federation.views)
        views = (*federation.views, *[view + flip for view in federation.views])

        def flipped(view: Tensor) -> Tensor:
            return torch.where(self.attackers, view + count, view)

        everyone = torch.arange(len(federation))
        moves = tuple(replace(move, view=flipped(move.view)) for move in federation.moves)
        return replace(federation, views=views, view=flipped(federation.view_of(everyone)), moves=moves)

    def on_answer(self, answer: Answer, clients: Tensor, keys: Tensor, sent: Models | None, point: Rng) -> Answer:
        """An answer [c, ...] as it arrives at the server; `keys` [c] are the clients' keys."""
        here = self.attackers[clients]
        tensors = dict(answer.items())
        for name in (name for name in _SENT if name in tensors):
            if self.kind in ("sign_flip", "gaussian") and bool(here.any()):
                tensors[name] = self._false(name, tensors, here, keys, sent, point)
            if self.corrupt:
                lost = uniform(self.rng.at("corrupt", point.key).keys(keys), 1)[:, 0] < self.corrupt
                broken = lost.to(tensors[name].device).reshape(-1, *[1] * (tensors[name].dim() - 1))
                tensors[name] = torch.where(broken, torch.nan, tensors[name])
        return Answer(**tensors)

    def _false(
        self, name: str, tensors: dict[str, Tensor], here: Tensor, keys: Tensor, sent: Models | None, point: Rng
    ) -> Tensor:
        true = tensors[name]
        start = torch.zeros_like(true)
        if name == "params" and sent is not None:
            first = torch.zeros(len(sent.refs), dtype=torch.int64)  # of several models, if the client chose none
            start = sent.rows() if sent.refs.dim() == 1 else take(sent, tensors.get("choice", first))
            start = start if true.dim() == 2 else sent.table[sent.refs]  # a client may answer with all of them
        if self.kind == "sign_flip":
            false = 2 * start - true
        else:
            who = here.nonzero().flatten()
            noise = normal(self.rng.at("noise", point.key).keys(keys[who]).to(true.device), true[0].numel())
            false = start.clone()
            false[who.to(true.device)] += noise.to(true.dtype).reshape(len(who), *true.shape[1:])
        return torch.where(here.to(true.device).reshape(-1, *[1] * (true.dim() - 1)), false, true)
