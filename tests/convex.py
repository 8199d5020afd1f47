"""Small convex problems with known answers: least squares, one linear layer, everything in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from coterie.client.work import SGD
from coterie.data.federation import Federation
from coterie.methods.base import Algorithm
from coterie.runs.loop import Schedule, Trainer
from tests.helpers import setup_of, trainer_of


def linear(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """y = w x, without bias."""
    return nn.Linear(input_shape[0], outputs, bias=False)


def two_layers(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """y = h B x: a body B of two rows and a head h; not convex, but its gradients are short."""
    body, head = nn.Linear(input_shape[0], 2, bias=False), nn.Linear(2, outputs, bias=False)
    return nn.Sequential(body, head)


def gradients(x: Tensor, y: Tensor, body: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Of the mean squared error of `two_layers`, for body [2, dim] and head [2]."""
    error = 2 * (x @ body.T @ head - y) / len(x)
    return torch.outer(head, error @ x), error @ (x @ body.T)


def problem(
    sizes: tuple[int, ...] = (8, 12, 20), dim: int = 3, seed: int = 0
) -> tuple[Federation, list[Tensor], list[Tensor]]:
    """Clients with samples of their own; also the inputs and targets they train on, as float64."""
    torch.manual_seed(seed)
    xs = [torch.randn(n, dim, dtype=torch.float64) for n in sizes]
    ys = [x @ torch.randn(dim, dtype=torch.float64) + 0.1 * torch.randn(len(x), dtype=torch.float64) for x in xs]
    clients = {f"c{i}": (x.float(), y.float()) for i, (x, y) in enumerate(zip(xs, ys, strict=True))}
    federation = Federation.from_clients(clients)
    seen = [federation.samples(i) for i in range(len(federation))]
    return federation, [x.double() for x, _ in seen], [y.double() for _, y in seen]


def trainer(
    algorithm: Algorithm, federation: Federation, work: SGD, rounds: int = 1, model: Any = linear, **schedule: Any
) -> Trainer:
    """A run on the problem that has not started."""
    return trainer_of(
        setup_of(
            algorithm,
            federation,
            model=model,
            model_settings={},
            loss="mse",
            work=work,
            schedule=Schedule(rounds=rounds, **schedule),
        )
    )


def gradient(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Of the mean squared error."""
    return 2 * x.T @ (x @ w - y) / len(x)


def hessian(x: Tensor) -> Tensor:
    """Of the mean squared error."""
    return 2 * x.T @ x / len(x)
