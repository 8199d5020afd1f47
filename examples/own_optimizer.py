"""An optimizer of your own: one class, for every engine and plan.

Lion (Chen et al., 2023) steps along the sign of a mean of gradients. From the command line the same optimizer is
`coterie run --set work.optimizer=examples.own_optimizer:Lion`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

import coterie
from coterie import Optimizer, register_optimizer


@register_optimizer("lion")
class Lion(Optimizer):
    """All tensors have a leading axis of clients; the work has the hyperparameters."""

    keeps = ("momentum",)  # one tensor like each parameter, zero when a client begins

    def step(
        self,
        params: list[Tensor],
        direction: list[Tensor],
        state: Mapping[str, list[Tensor]],
        lr: float | Tensor,
        count: float | Tensor,
    ) -> None:
        """w <- w - lr * (sign(mean) + weight_decay * w)."""
        work, momentum = self.work, state["momentum"]
        signs = torch._foreach_sign(torch._foreach_lerp(momentum, direction, 1 - work.beta1))
        torch._foreach_mul_(params, 1 - lr * work.weight_decay)
        torch._foreach_sub_(params, torch._foreach_mul(signs, lr))
        torch._foreach_lerp_(momentum, direction, 1 - work.beta2)


if __name__ == "__main__":
    for engine in ("loop", "vectorized"):
        work = coterie.SGD(optimizer="lion", lr=0.003, beta2=0.99, epochs=2)
        result = coterie.run("fesem", "rotated-digits", work=work, rounds=5, engine=engine)
        print(f"{engine}: accuracy {result.summary['accuracy']['macro']:.4f}")
