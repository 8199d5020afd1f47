"""Client optimizers: how a step is made from a direction. One class each, for every engine and plan.

An optimizer works on a stack of c clients: parameters, direction and state are lists of tensors [c, *shape]. It names
its state, which is zero at the start of a call, and makes one step in place. To add one, write a class:

    @register_optimizer("lion")
    class Lion(Optimizer):
        keeps = ("momentum",)

        def step(self, params, direction, state, lr, count): ...

Choose it with `--set work.optimizer=lion`; without registration, with `--set work.optimizer=module:Lion`.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from coterie.client.settings import WorkSettings
from coterie.errors import ConfigError, UnknownName
from coterie.trust import OPTIMIZERS, import_object, plugins

Stack = list[Tensor]  # one tensor [c, *shape] for each parameter
State = dict[str, Stack]  # of an optimizer, by name
Number = float | Tensor  # a tensor on the device in a CUDA graph


class Optimizer(abc.ABC):
    """Makes steps for a stack of clients; `work` has the hyperparameters (momentum, weight_decay, beta1 ...)."""

    keeps: tuple[str, ...] = ()  # names of the state; each has one tensor per parameter, of its shape

    def __init__(self, work: WorkSettings) -> None:
        self.work = work

    @abc.abstractmethod
    def step(self, params: Stack, direction: Stack, state: State, lr: Number, count: Number) -> None:
        """One step along `direction`: change `params` and `state` in place, and nothing else.

        `count` is the number of this step, from 1. In a CUDA graph `lr` and `count` are tensors on the device: compute
        with them, but do not read their values. Do not write to `direction`: it may hold a tensor twice.
        """

    def __call__(self, params: Stack, direction: Stack, state: State, lr: Number, count: Number) -> None:
        """Clip the direction if `clip_norm` is set, then make the step."""
        if self.work.clip_norm is not None:
            direction = clipped(direction, self.work.clip_norm)
        self.step(params, direction, state, lr, count)


O = TypeVar("O", bound=type[Optimizer])  # noqa: E741

_OPTIMIZERS: dict[str, type[Optimizer]] = {}


def register_optimizer(name: str) -> Callable[[O], O]:
    """Decorator: register an optimizer under a name."""

    def register(cls: O) -> O:
        _OPTIMIZERS[name] = cls
        return cls

    return register


def optimizers() -> dict[str, type[Optimizer]]:
    """All registered optimizers."""
    return dict(sorted(_OPTIMIZERS.items()))


def find_optimizer(name: str, may_import: bool = False) -> type[Optimizer]:
    """The optimizer registered under a name, that of a plugin, or `module:Class`, which are then registered.

    The module is imported only where the user starts a run: a message must not choose what a site imports.
    """
    if name in _OPTIMIZERS:
        return _OPTIMIZERS[name]
    spec = name if ":" in name else plugins(OPTIMIZERS).get(name)
    if spec is None:
        raise UnknownName("optimizer", name, {*_OPTIMIZERS, *plugins(OPTIMIZERS)})
    module, _, attribute = spec.partition(":")
    found: Any = import_object(spec, "optimizer") if may_import else getattr(sys.modules.get(module), attribute, None)
    if found is None:
        raise ConfigError(f"There is no optimizer '{name}' here. Import the module that defines it first.")
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(f"optimizer {name} is not a subclass of coterie.client.optimizers.Optimizer.")
    return register_optimizer(name)(found)


# ---- arithmetic that optimizers share ----


def move(params: Stack, direction: Stack, lr: Number) -> None:
    """w <- w - lr * direction."""
    if isinstance(lr, Tensor):
        torch._foreach_sub_(params, torch._foreach_mul(direction, lr))
    else:
        torch._foreach_add_(params, direction, alpha=-lr)


def with_penalty(params: Stack, direction: Stack, weight_decay: float) -> Stack:
    """The direction plus the gradient of the L2 penalty."""
    return list(torch._foreach_add(direction, params, alpha=weight_decay)) if weight_decay else direction


def clipped(direction: Stack, norm: float) -> Stack:
    """Each client's direction clipped to this norm, as torch.nn.utils.clip_grad_norm_ does."""
    squares = torch.stack([part.flatten(1).square().sum(1) for part in direction])  # [parameters, c]
    scale = (norm / (squares.sum(0).sqrt() + 1e-6)).clamp(max=1)  # [c]
    return [part * scale.reshape(-1, *[1] * (part.dim() - 1)) for part in direction]


# ---- the optimizers ----


@register_optimizer("sgd")
class MomentumSGD(Optimizer):
    """As torch.optim.SGD; without momentum it has no state."""

    nesterov = False

    def __init__(self, work: WorkSettings) -> None:
        super().__init__(work)
        self.keeps = ("velocity",) if work.momentum else ()

    def step(self, params: Stack, direction: Stack, state: State, lr: Number, count: Number) -> None:
        """v <- momentum * v + direction; w <- w - lr * v."""
        direction = with_penalty(params, direction, self.work.weight_decay)
        if self.keeps:
            velocity = state["velocity"]
            torch._foreach_mul_(velocity, self.work.momentum)
            torch._foreach_add_(velocity, direction)
            if self.nesterov:  # one more step of momentum
                velocity = list(torch._foreach_add(direction, velocity, alpha=self.work.momentum))
            direction = velocity
        move(params, direction, lr)


@register_optimizer("nesterov")
class NesterovSGD(MomentumSGD):
    """As torch.optim.SGD with nesterov=True."""

    nesterov = True

    def __init__(self, work: WorkSettings) -> None:
        super().__init__(work)
        if not work.momentum:
            raise ConfigError("The optimizer nesterov needs momentum > 0. Got 0 instead; set work.momentum.")


@register_optimizer("adam")
class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015) as torch.optim.Adam; weight decay is an L2 penalty."""

    keeps = ("first", "second")  # moments of the gradient

    def step(self, params: Stack, direction: Stack, state: State, lr: Number, count: Number) -> None:
        """w <- w - lr * m / (sqrt(v) + eps), with both moments corrected for their start at zero."""
        self.adapt(params, with_penalty(params, direction, self.work.weight_decay), state, lr, count)

    def adapt(self, params: Stack, direction: Stack, state: State, lr: Number, count: Number) -> None:
        """The step without weight decay."""
        beta1, beta2, first, second = self.work.beta1, self.work.beta2, state["first"], state["second"]
        torch._foreach_lerp_(first, direction, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, direction, direction, 1 - beta2)
        scale = torch._foreach_sqrt(second)
        torch._foreach_div_(scale, (1 - beta2**count) ** 0.5)
        torch._foreach_add_(scale, self.work.eps)
        move(params, list(torch._foreach_div(first, scale)), lr / (1 - beta1**count))


@register_optimizer("adamw")
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019) as torch.optim.AdamW."""

    def step(self, params: Stack, direction: Stack, state: State, lr: Number, count: Number) -> None:
        """w <- (1 - lr * weight_decay) * w, then Adam's step."""
        if self.work.weight_decay:
            torch._foreach_mul_(params, 1 - lr * self.work.weight_decay)
        self.adapt(params, direction, state, lr, count)
