"""The learning task of a run: a network, a loss, and the local work of a client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coterie.client.work import SGD
from coterie.data.federation import Federation
from coterie.errors import ModelError
from coterie.nets.flat import Layout, Loss, Network, flatten
from coterie.randomness import Rng


@dataclass(frozen=True)
class Task:
    """What is learned: a network, a loss, and how a client works on it."""

    module: nn.Module
    layout: Layout
    initial: Tensor  # [P], the common start of the run, on the CPU
    loss: Loss
    num_classes: int  # 0 for regression
    input_shape: tuple[int, ...]  # of one sample
    work: SGD
    draw: Callable[[Rng], Tensor]  # other first weights of the same network, [P]
    make: Callable[[Rng], nn.Module] | None = None  # the network anew; where clients are other processes
    seed: int = 0  # that `initial` was made from

    @classmethod
    def made(
        cls,
        make: Callable[[Rng], nn.Module],
        seed: int,
        loss: Loss,
        num_classes: int,
        input_shape: tuple[int, ...],
        work: SGD,
    ) -> Task:
        """The task of a run with this seed: every side of it makes the same first weights by itself."""
        module = make(Rng.seed(seed).at("model"))
        return cls(
            module=module,
            layout=Layout.of(module),
            initial=flatten(module),
            loss=loss,
            num_classes=num_classes,
            input_shape=input_shape,
            work=work,
            draw=lambda point: flatten(make(point)),
            make=make,
            seed=seed,
        )


def check_network(network: Network, task: Task, federation: Federation) -> None:
    """Refuse early, in one sentence, a network that cannot take the data or name all classes."""
    name = type(task.module).__name__
    x, y = federation.samples(0)
    x = x[:2].to(network.device, network.dtype)
    try:
        with torch.no_grad():
            outputs = network(task.layout.unpack(task.initial.to(network.device, network.dtype)), x)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{name} cannot take samples of shape {federation.input_shape}: {reason}") from error
    if outputs.shape[0] != len(x):
        raise ModelError(f"{name} gives {tuple(outputs.shape)} for {len(x)} samples; the first axis must stay.")
    if task.num_classes and (outputs.dim() < 2 or outputs.shape[1] < task.num_classes):
        raise ModelError(
            f"{name} has {outputs.shape[1] if outputs.dim() > 1 else 1} outputs, but {federation.name} has labels "
            f"up to {task.num_classes - 1}: it needs {task.num_classes} outputs."
        )
    try:
        losses = task.loss(outputs, y[:2].to(network.device))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"The loss cannot take outputs of shape {tuple(outputs.shape)}: {reason}") from error
    if losses.shape != (len(x),):
        raise ModelError(f"The loss must give one number for each sample. Got shape {tuple(losses.shape)} instead.")
