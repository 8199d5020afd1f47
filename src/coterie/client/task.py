"""The learning task of a run: a network, a loss, and the local work of a client."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coterie.client.work import SGD
from coterie.data.federation import Federation
from coterie.data.values import are_probabilities
from coterie.errors import CoterieError, ModelError, described
from coterie.nets.flat import Layout, Loss, Network, cross_entropy, flatten, takes_integers
from coterie.randomness import Rng

ModelMaker = Callable[[Rng], nn.Module]


@dataclass(frozen=True)
class Task:
    """What is learned, and how a client trains it."""

    module: nn.Module
    layout: Layout
    initial: Tensor  # [P], initial weights of the run, on the CPU
    loss: Loss
    num_classes: int  # 0 for regression
    input_shape: tuple[int, ...]  # of one sample
    work: SGD
    draw: Callable[[Rng], Tensor]  # other initial weights of the same network, [P]
    make: ModelMaker | None = None  # builds the network; required where clients are other processes
    seed: int = 0  # of `initial`
    integers: bool = False  # whether samples are integers, such as token ids, and the network takes them as they are

    @functools.cached_property
    def output_bias(self) -> slice | None:
        """The slice of the parameters that are added to the outputs; None if the network has no such bias."""
        last = self.layout.parameters[-1]
        if self.num_classes < 1 or len(last.shape) != 1 or last.size < self.num_classes:
            return None
        dtype = self.initial.dtype
        network = Network(self.module, dtype, torch.device("cpu"))
        x = torch.zeros(2, *self.input_shape, dtype=torch.int64 if self.integers else dtype)
        more = torch.arange(1.0, last.size + 1, dtype=dtype)
        raised = self.initial.index_add(0, torch.arange(last.start, last.stop), more)
        with torch.no_grad():
            apart = network(self.layout.unpack(raised), x) - network(self.layout.unpack(self.initial), x)
        is_bias = apart.shape == (2, last.size) and torch.allclose(apart, more.expand_as(apart), rtol=1e-3)
        return slice(last.start, last.stop) if is_bias else None

    @classmethod
    def made(
        cls,
        make: ModelMaker,
        seed: int,
        loss: Loss,
        num_classes: int,
        input_shape: tuple[int, ...],
        work: SGD,
        integers: bool = False,
    ) -> Task:
        """The task of a run with this seed; server and sites derive the same initial weights from it.

        `integers` says whether the samples are integers.
        """
        first = getattr(make, "first", None)
        module = make(Rng.seed(seed).at("model") if first is None else Rng(first))
        sizes, draw = (num_classes, input_shape), functools.partial(_drawn, make)
        whole = integers and takes_integers(module)
        return cls(module, Layout.of(module), flatten(module), loss, *sizes, work, draw, make, seed, whole)


def _drawn(make: ModelMaker, rng: Rng) -> Tensor:
    return flatten(make(rng))


def check_network(network: Network, task: Task, federation: Federation) -> None:
    """Raise ModelError if the network cannot process the samples, or has too few outputs for the classes."""
    name = type(task.module).__name__
    federation.check_labels()
    _check_loss(task, federation)
    x, y = federation.samples(0)
    x = network.inputs(x[:2])
    tensors = task.layout.unpack(task.initial.to(network.device, network.dtype))
    with _model_error(f"{name} cannot take samples of shape {federation.input_shape}"), torch.no_grad():
        outputs = network(tensors, x)
    if task.integers:
        largest = federation.x[federation.x.flatten(1).amax(1).argmax()].unsqueeze(0)
        why = f"{name} cannot take the integer {int(largest.max())} in a sample; its embedding may be too small"
        with _model_error(why), torch.no_grad():
            network(tensors, network.inputs(largest))
    if outputs.shape[0] != len(x):
        raise ModelError(f"{name} returns {tuple(outputs.shape)} for {len(x)} samples; keep the first axis.")
    if task.num_classes and (outputs.dim() < 2 or outputs.shape[1] < task.num_classes):
        raise ModelError(
            f"{name} has {outputs.shape[1] if outputs.dim() > 1 else 1} outputs, but {federation.name} has labels "
            f"up to {task.num_classes - 1}: it needs {task.num_classes} outputs."
        )
    with _model_error(f"The loss cannot take outputs of shape {tuple(outputs.shape)}"):
        losses = task.loss(outputs, y[:2].to(network.device))
    if losses.shape != (len(x),):
        raise ModelError(f"The loss must return one number for each sample. Got shape {tuple(losses.shape)} instead.")


def _check_loss(task: Task, federation: Federation) -> None:
    """Raise ModelError if cross-entropy is to learn numbers that are neither classes nor probabilities."""
    if task.loss is cross_entropy and not federation.num_classes and not are_probabilities(federation.y):
        raise ModelError(
            f"The targets of {federation.name} are numbers, and cross-entropy learns classes. Use --loss mse "
            "(in Python loss='mse'), or integer labels."
        )


@contextmanager
def _model_error(what: str) -> Iterator[None]:
    try:
        yield
    except (CoterieError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the user's code may raise anything
        raise ModelError(f"{what}: {described(error)}") from error
