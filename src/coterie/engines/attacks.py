"""Simulated malicious clients, to test methods and their robust means.

Attackers are a fixed share of the clients, drawn by the seed. What they do:

- `sign_flip`: they send the opposite of their update.
- `gaussian`: they send noise instead of an update.
- `label_flip`: they train on wrong labels (class k becomes L - 1 - k).
- `alie`: they agree on the honest mean minus 1.5 standard deviations of each number, which is hard to tell from an
  honest update (Baruch et al. 2019, "A little is enough").
- `ipm`: they agree on the opposite of the honest mean, so that the inner product with the true direction is negative
  (Xie et al. 2020, inner-product manipulation).
- `min_max`: as `alie`, but as far as possible: no further from any honest update than two honest ones are from each
  other (Shejwalkar and Houmansadr 2021).
- `hijack`: they see their data as the clients of one kind do, and so join its cluster. From the first call in which
  clusters have models of their own, they send the opposite of three times their update.
- `backdoor`: half of their training samples show a trigger, a corner set to the largest value, and the label 0. What
  they send is what this training gives.

`alie`, `ipm` and `min_max` know the true updates of all clients that were sent the same model, so a call holds all its
answers at once. All but `label_flip` and `backdoor` change models, gradients and signatures alike, and vote the
opposite of what they find; `hijack` signs as its data says. Independently, `corrupt` is the share of all answers that
arrive as NaN. The scores of a run with attackers are those of the honest clients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.client.block import Models
from coterie.client.steps import Answer
from coterie.data.federation import Federation, Split
from coterie.engines.settings import AttackKind
from coterie.errors import ConfigError
from coterie.randomness import Rng, normal, uniform

_SENT = ("params", "gradient", "signature")  # the tensors that attacks change
_ALONE = ("sign_flip", "gaussian", "hijack")  # attacks on answers that need no other client's
_TOGETHER = ("alie", "ipm", "min_max")  # attacks that need the answers of a whole call
_DEVIATIONS = 1.5  # of `alie`
_SCALE = 3.0  # of `hijack`
_POISONED = 0.5  # share of the samples of an attacker that show the trigger
TARGET = 0  # the label of samples with the trigger


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
    target: int = 0  # an honest client, whose kind `hijack` imitates

    @classmethod
    def of(cls, keys: Tensor, kind: AttackKind, share: float, corrupt: float, seed: int) -> Attack:
        """Draw the attackers among clients with these keys; a client's draw depends on its key and the seed only."""
        rng = Rng.seed(seed).at("attack")
        attackers = torch.zeros(len(keys), dtype=torch.bool)
        target = 0
        if kind != "none":
            count = round(share * len(keys))
            draw = uniform(rng.keys(keys), 1)[:, 0]
            order = torch.argsort(draw, stable=True)
            attackers[order[:count]] = True
            target = int(order[-1])
        return cls(kind, attackers, rng, corrupt, target)

    @property
    def is_none(self) -> bool:
        """Whether no answer is changed."""
        return not self.corrupt and not bool(self.attackers.any())

    @property
    def needs_all_answers(self) -> bool:
        """Whether `on_answer` must get the answers of a whole call at once."""
        return self.kind in _TOGETHER and bool(self.attackers.any())

    def on_data(self, federation: Federation) -> Federation:
        """The federation, with other data for the attackers if the attack is one on data."""
        if self.kind == "hijack":
            return self._seen_as(federation, lambda view: view[self.target].expand_as(view))
        if self.kind not in ("label_flip", "backdoor"):
            return federation
        if not federation.num_classes:
            raise ConfigError(
                f"attack {self.kind} needs classes, but the dataset is a regression; use sign_flip or gaussian."
            )
        if self.kind == "backdoor":
            return self._poisoned(federation)
        flip = (FlipLabels(federation.num_classes),)
        count = len(federation.views)
        views = (*federation.views, *[view + flip for view in federation.views])
        return self._seen_as(replace(federation, views=views), lambda view: view + count)

    def _seen_as(self, federation: Federation, false: Callable[[Tensor], Tensor]) -> Federation:
        """The federation in which attackers have other views; `false` gives those of all clients [N]."""

        def seen(view: Tensor) -> Tensor:
            return torch.where(self.attackers, false(view), view)

        everyone = torch.arange(len(federation))
        moves = tuple(replace(move, view=seen(move.view)) for move in federation.moves)
        return replace(federation, view=seen(federation.view_of(everyone)), moves=moves)

    def _poisoned(self, federation: Federation) -> Federation:
        """The federation in which a share of the attackers' training samples are copies with trigger and target."""
        shards, copied = [], [torch.empty(0, dtype=torch.int64)]
        end = len(federation.x)
        for client in range(len(federation)):
            rows = federation.train.rows(client)
            if self.attackers[client]:
                luck = uniform(self.rng.at("poison", int(federation.keys[client])).keys(rows), 1)[:, 0]
                which = luck.argsort(stable=True)[: round(_POISONED * len(rows))]
                copied.append(rows[which])
                rows = rows.index_copy(0, which, torch.arange(end, end := end + len(which)))
            shards.append(rows)
        rows = torch.cat(copied)
        ids = torch.arange(len(federation.x)) if federation.sample_ids is None else federation.sample_ids
        return replace(
            federation,
            x=torch.cat([federation.x, triggered(federation.x[rows], federation.x.amax())]),
            y=torch.cat([federation.y, torch.full_like(federation.y[rows], TARGET)]),
            train=Split.of(shards),
            sample_ids=torch.cat([ids, ids[rows]]),
        )

    def on_answer(self, answer: Answer, clients: Tensor, keys: Tensor, sent: Models | None, point: Rng) -> Answer:
        """An answer [c, ...] as it arrives at the server; `keys` [c] are the clients' keys."""
        here = self.attackers[clients]
        tensors = dict(answer.items())
        for name in (name for name in _SENT if name in tensors):
            if self.kind in (*_ALONE, *_TOGETHER) and bool(here.any()):
                tensors[name] = self._false(name, tensors, here, keys, sent, point)
            if self.corrupt:
                lost = uniform(self.rng.at("corrupt", point.key).keys(keys), 1)[:, 0] < self.corrupt
                broken = lost.to(tensors[name].device).reshape(-1, *[1] * (tensors[name].dim() - 1))
                tensors[name] = torch.where(broken, torch.nan, tensors[name])
        if "worse" in tensors and self.kind in (*_ALONE, *_TOGETHER):
            tensors["worse"] = tensors["worse"] ^ here.to(tensors["worse"].device)
        return Answer(**tensors)

    def _false(
        self, name: str, tensors: dict[str, Tensor], here: Tensor, keys: Tensor, sent: Models | None, point: Rng
    ) -> Tensor:
        true = tensors[name]
        start, model = torch.zeros_like(true), torch.zeros(len(true), dtype=torch.int64)  # which model was sent
        if sent is not None:
            model = sent.refs.cpu() if sent.refs.dim() == 1 else sent.refs[:, 0].cpu()
            if sent.refs.dim() == 2 and "choice" in tensors:
                model = sent.refs.gather(1, tensors["choice"].unsqueeze(1).to(sent.refs))[:, 0].cpu()
        if name == "params" and sent is not None:
            # Of several models the first, if the client chose none; a client may answer with all of them.
            start = sent.table[model.to(sent.table.device)] if true.dim() == 2 else sent.table[sent.refs]
        if self.kind == "sign_flip":
            false = 2 * start - true
        elif self.kind == "gaussian":
            who = here.nonzero().flatten()
            noise = normal(self.rng.at("noise", point.key).keys(keys[who]).to(true.device), true[0].numel())
            false = start.clone()
            false[who.to(true.device)] += noise.to(true.dtype).reshape(len(who), *true.shape[1:])
        elif self.kind == "hijack":
            has_joined = name != "signature" and sent is not None and len(sent.table) > 1
            false = start - _SCALE * (true - start) if has_joined else true
        else:
            false = start + self._agreed(true - start, model, here)
        return torch.where(here.to(true.device).reshape(-1, *[1] * (true.dim() - 1)), false, true)

    def _agreed(self, updates: Tensor, model: Tensor, here: Tensor) -> Tensor:
        """What all attackers that were sent the same of the models [c] send instead of their updates [c, ...]."""
        found = torch.zeros_like(updates)
        for number in model[here].unique().tolist():
            mine = model == number
            honest = mine & ~here
            seen = updates[(honest if int(honest.sum()) > 1 else mine).to(updates.device)]
            false = CRAFTED[self.kind](seen.flatten(1).float() if seen.dtype == torch.half else seen.flatten(1))
            found[mine.to(updates.device)] = false.to(updates.dtype).reshape(updates.shape[1:])
        return found


def triggered(x: Tensor, largest: Tensor) -> Tensor:
    """Stored samples [b, ...] with the trigger: the upper left corner is `largest`, a quarter of the picture high.

    Of samples that are no pictures [b, C, H, W], the first sixteenth of the features.
    """
    x = x.clone()
    if x.dim() == 4:
        x[..., : -(-x.shape[-2] // 4), : -(-x.shape[-1] // 4)] = largest
    else:
        flat = x.view(len(x), -1)
        flat[:, : -(-flat.shape[1] // 16)] = largest
    return x


def little_is_enough(honest: Tensor) -> Tensor:
    """The mean of honest updates [n, P] minus some standard deviations of each number."""
    return honest.mean(0) - _DEVIATIONS * honest.std(0, correction=0)


def inner_product(honest: Tensor) -> Tensor:
    """The opposite of the mean of honest updates [n, P]."""
    return -honest.mean(0)


def min_max(honest: Tensor) -> Tensor:
    """The mean of honest updates [n, P] minus as many deviations as keep the distances to all of them usual."""
    mean, direction = honest.mean(0), -honest.std(0, correction=0)
    apart = honest - mean
    most = torch.cdist(honest, honest, compute_mode="donot_use_mm_for_euclid_dist").amax().square()
    # |g d - a|^2 <= most for every a: the smallest positive root g.
    square = direction.square().sum().clamp_min(1e-30)
    half = apart @ direction
    root = (half.square() + square * (most - apart.square().sum(1)).clamp_min(0)).sqrt()
    return mean + ((half + root) / square).amin() * direction


CRAFTED = {"alie": little_is_enough, "ipm": inner_product, "min_max": min_max}
