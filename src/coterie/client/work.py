"""Local work: what a client does with its own samples when it trains. Frozen, named, serializable.

Work is defined on a stack of c clients: parameters are lists of tensors [c, *shape], and one client is a stack of one.
The work gives the direction of a step; the optimizer (`optimizers.py`) makes the step, and the schedule
(`schedules.py`) sets the learning rate of a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self, TypeVar

from torch import Tensor

from coterie.client.optimizers import Optimizer, find_optimizer
from coterie.client.optimizers import Stack as Stack
from coterie.client.schedules import factor, find_schedule
from coterie.client.settings import WorkSettings
from coterie.errors import ConfigError, UnknownName
from coterie.settings import build, fields_of, setting, values_of


class GradientAt(Protocol):
    """Each client's mean gradient over the current batch of a stream."""

    def __call__(self, at: Sequence[Tensor], stream: int, model: int = 0) -> Stack:
        """The gradient at these parameters; it updates the float buffers of that model of the work."""
        ...


@dataclass(frozen=True)
class SGD(WorkSettings):
    """Stochastic gradient descent with any optimizer, whose state is zero at the start of each call."""

    key: ClassVar[str] = "sgd"
    streams: ClassVar[int] = 1  # independent sequences of batches per step
    gradients: ClassVar[int] = 1  # gradients per step
    anchored: ClassVar[bool] = False  # whether a step uses the parameters at the start of the call
    models: ClassVar[int] = 1  # trained side by side: the flat vectors of a client follow one another

    def for_run(self, rounds: int) -> SGD:
        """The work in a run of this many rounds; ConfigError for an unknown optimizer or schedule."""
        find_optimizer(self.optimizer, may_import=True)(self)
        find_schedule(self.schedule)
        if self.update_noise and self.update_clip is None:
            raise ConfigError(
                "update_noise is a multiple of update_clip, which is not set; add for example --update-clip 1."
            )
        if 0 < rounds <= self.warmup_rounds:
            raise ConfigError(
                f"warmup_rounds of {type(self).__name__} must be fewer than the rounds of the run, {rounds}. "
                f"Got {self.warmup_rounds} instead."
            )
        return replace(self, total_rounds=rounds)

    def at(self, round: int) -> SGD:
        """The work in a round (from 1); the start, round 0, uses the learning rate of round 1."""
        lr = self.lr * factor(self, max(1, round))
        return replace(self, lr=lr, lr_decay=1.0, schedule="constant", warmup_rounds=0, total_rounds=None)

    @property
    def is_plain(self) -> bool:
        """Whether the optimizer is SGD without clipping, which hand-written kernels implement."""
        return self.optimizer == "sgd" and self.clip_norm is None

    def make_optimizer(self) -> Optimizer:
        """The optimizer of this work."""
        return find_optimizer(self.optimizer)(self)

    def direction(self, gradient: GradientAt, params: Stack, anchor: Stack, extras: Mapping[str, Tensor]) -> Stack:
        """The direction to descend along at `params`; `anchor` holds the parameters at the start of the call."""
        return gradient(params, 0)

    def buffers_of(self, buffers: Stack, model: int) -> Stack:
        """The float buffers of one of the models."""
        count = len(buffers) // self.models
        return buffers[model * count : (model + 1) * count]

    def settle(self, params: Stack, anchor: Stack) -> None:
        """Called after every step; may change the parameters in place."""


W = TypeVar("W", bound=type[SGD])

WORK: dict[str, type[SGD]] = {SGD.key: SGD}


def register_work(cls: W) -> W:
    """Class decorator: register a kind of work by its `key`, so that it can be sent."""
    WORK[cls.key] = cls
    return cls


@register_work
@dataclass(frozen=True)
class Weighted(SGD):
    """SGD on weighted samples: `extras["weights"]` [c, longest] are factors of the losses, sample by sample."""

    key: ClassVar[str] = "weighted"

    @classmethod
    def of(cls, work: SGD) -> Self:
        """The same work on weighted samples."""
        return cls(**values_with_none(work))


@register_work
@dataclass(frozen=True)
class Proximal(SGD):
    """SGD on loss + prox / 2 * ||w - start||^2; `extras["prox"]` [c] overrides prox for each client."""

    key: ClassVar[str] = "proximal"
    anchored: ClassVar[bool] = True

    prox: float = setting(0.0, "strength of the proximal term; 0 is plain SGD", ge=0)

    @classmethod
    def of(cls, work: SGD, prox: float) -> Self:
        """The same work with a proximal term."""
        return cls(**{**values_with_none(work), "prox": prox})

    def direction(self, gradient: GradientAt, params: Stack, anchor: Stack, extras: Mapping[str, Tensor]) -> Stack:
        """Gradient + prox * (w - start)."""
        found = gradient(params, 0)
        each = extras.get("prox")
        if each is None and not self.prox:
            return found
        moved = []  # not in place: two parameters may share one gradient tensor
        for grad, now, start in zip(found, params, anchor, strict=True):
            strength = self.prox if each is None else each.reshape([-1] + [1] * (now.dim() - 1))
            moved.append(grad + (now - start) * strength)
        return moved


@register_work
@dataclass(frozen=True)
class Corrected(Proximal):
    """As Proximal, with `extras["correction"]` [c, parameters] added to the gradient (FedDANE)."""

    key: ClassVar[str] = "corrected"

    def direction(self, gradient: GradientAt, params: Stack, anchor: Stack, extras: Mapping[str, Tensor]) -> Stack:
        """Gradient + prox * (w - start) + correction."""
        found = super().direction(gradient, params, anchor, extras)
        correction = extras.get("correction")
        if correction is None:
            return found
        parts = correction.split([grad[0].numel() for grad in found], dim=1)
        return [grad + part.reshape(grad.shape) for grad, part in zip(found, parts, strict=True)]


@register_work
@dataclass(frozen=True)
class Partial(SGD):
    """SGD on some of the parameters: the others neither move nor decay, whatever the optimizer."""

    key: ClassVar[str] = "partial"
    anchored: ClassVar[bool] = True

    still: str = setting("", "which parameters stay: one 1 or 0 for each, in the network's order")

    @classmethod
    def of(cls, work: SGD, still: Sequence[bool]) -> Self:
        """The same work, without the parameters that stay."""
        return cls(**{**values_with_none(work), "still": "".join(str(int(stays)) for stays in still)})

    def direction(self, gradient: GradientAt, params: Stack, anchor: Stack, extras: Mapping[str, Tensor]) -> Stack:
        """The gradient; zero for what stays, so that it does not count when gradients are clipped."""
        found = gradient(params, 0)
        return [grad * 0 if stays == "1" else grad for grad, stays in zip(found, self.still, strict=True)]

    def settle(self, params: Stack, anchor: Stack) -> None:
        """Undo what the optimizer did to what stays."""
        for now, start, stays in zip(params, anchor, self.still, strict=True):
            if stays == "1":
                now.copy_(start)


@register_work
@dataclass(frozen=True)
class FirstOrderMAML(SGD):
    """Steps that improve the model after adaptation (Per-FedAvg FO; FedDSMIC, Eq. 15-16).

    w' = w - inner_lr * gradient(w) on one batch; then w moves along the gradient at w' on a second, independent batch.
    Momentum applies to the outer step only.
    """

    key: ClassVar[str] = "maml"
    streams: ClassVar[int] = 2
    gradients: ClassVar[int] = 2

    inner_lr: float = setting(0.01, "step size of the adaptation (eta)", gt=0)

    @classmethod
    def of(cls, work: SGD, inner_lr: float) -> Self:
        """The same work with an inner step."""
        return cls(**{**values_with_none(work), "inner_lr": inner_lr})

    def direction(self, gradient: GradientAt, params: Stack, anchor: Stack, extras: Mapping[str, Tensor]) -> Stack:
        """The gradient after one step of adaptation."""
        inner = gradient(params, 0)
        adapted = [p - self.inner_lr * g for p, g in zip(params, inner, strict=True)]
        return gradient(adapted, 1)


@register_work
@dataclass(frozen=True)
class HessianFreeMAML(FirstOrderMAML):
    """As FirstOrderMAML, with second derivatives as a difference of gradients (Per-FedAvg HF).

    With v the gradient at w' (second batch) and a third batch for the curvature, the step is along
    v - inner_lr * (gradient(w + delta * v) - gradient(w - delta * v)) / (2 * delta).
    """

    key: ClassVar[str] = "maml-hf"
    streams: ClassVar[int] = 3
    gradients: ClassVar[int] = 4

    delta: float = setting(1e-3, "length of the finite difference for the second derivative", gt=0)

    def direction(self, gradient: GradientAt, params: Stack, anchor: Stack, extras: Mapping[str, Tensor]) -> Stack:
        """The gradient of the loss after one step of adaptation."""
        outer = super().direction(gradient, params, anchor, extras)
        ahead = gradient([p + self.delta * v for p, v in zip(params, outer, strict=True)], 2)
        behind = gradient([p - self.delta * v for p, v in zip(params, outer, strict=True)], 2)
        scale = self.inner_lr / (2 * self.delta)
        return [v - scale * (a - b) for v, a, b in zip(outer, ahead, behind, strict=True)]


def values_with_none(work: SGD) -> dict[str, Any]:
    """All settings of the work, including those that are None."""
    return {name: getattr(work, name) for name in fields_of(type(work))}


def to_dict(work: SGD) -> dict[str, Any]:
    """The work as plain values for files and messages."""
    return {"work": work.key, **values_of(work)}


def from_dict(values: Mapping[str, Any]) -> SGD:
    """The work that `to_dict` wrote.

    >>> from_dict(to_dict(Proximal(lr=0.5, prox=0.1))) == Proximal(lr=0.5, prox=0.1)
    True
    """
    rest = dict(values)
    key = rest.pop("work", SGD.key)
    if key not in WORK:
        raise UnknownName("local work", key, WORK)
    return build(WORK[key], rest, "work")
