"""The form of an answer: which tensors a client step answers with, their shapes, types and ranges.

A step declares it as a function of what was asked, `@client_step(name, answers)`. In one process nobody checks it: the
clients are the user's own. A server of sites refuses every answer of another form, whatever the other sites send.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.data.federation import SplitName
from coterie.nets.flat import LOSSES, cross_entropy, mse

_HIGHEST_LOSS = 1e9  # of classes; a loss of numbers is in their unit, squared
VALID = "valid_"  # begins the names of scores on validation samples
LARGE = 1e12  # numbers without a range of their own stay below: their squares and sums are finite in float32


@dataclass(frozen=True)
class Form:
    """What one tensor of an answer must be, for one client."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    low: float = -math.inf
    high: float = math.inf
    longest: float = math.inf  # largest norm
    splits: tuple[SplitName, ...] = ()  # numbers of samples, together at most those of the first split that has any
    optional: bool = False  # used only if all clients of the call have sent it

    @property
    def num_bytes(self) -> int:
        """Bytes of the numbers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def problem(self, row: Tensor, sizes: Mapping[SplitName, int]) -> str | None:
        """What is wrong with a client's tensor, in words that follow its name; None if nothing is.

        `sizes` are the numbers of samples that the client has declared. Numbers that are not finite are refused where
        there is a range; elsewhere that is for the engine.

        >>> Form((), torch.int64, 0, 3).problem(torch.tensor(4), {})
        'of 4, outside 0 to 3'
        """
        if row.dtype != self.dtype:
            return f"of type {_plain(row.dtype)} instead of {_plain(self.dtype)}"
        if tuple(row.shape) != self.shape:
            return f"of shape {tuple(row.shape)} instead of {self.shape}"
        if not row.numel():
            return None
        if self.low > -math.inf or self.high < math.inf:
            least, most = row.min().item(), row.max().item()
            if not (self.low <= least and most <= self.high):
                wrong = least if not least >= self.low else most
                return f"of {_shown(wrong)}, outside {_shown(self.low)} to {_shown(self.high)}"
        if self.splits:
            total, declared = sum(row.flatten().tolist()), sizes[self.bound_by(sizes)]
            if total > declared:
                return f"of {total} samples; it declared {declared} when it joined"
        if self.longest < math.inf and not torch.linalg.vector_norm(row.double()).item() <= self.longest:
            return f"longer than {self.longest:.6g}"
        return None

    def bound_by(self, sizes: Mapping[SplitName, int]) -> SplitName:
        """The split whose samples bound a count: the first that has any."""
        return next((split for split in self.splits if sizes[split]), self.splits[-1])


Forms = dict[str, Form]


@dataclass(frozen=True)
class Asked:
    """What was asked in a call, as far as the form of an answer depends on it; and the usual forms."""

    task: Task
    dtype: torch.dtype  # of models
    size: int  # numbers in a model that was sent; in a whole model if none was
    count: int = 0  # models that a client was sent
    longest: float = 0.0  # norm of the longest of them
    work: SGD = field(default_factory=SGD)
    given: Mapping[str, Tensor] = field(default_factory=dict)  # the payload, and one client's rows

    def model(self) -> Form:
        """A model like those that were sent."""
        return self.numbers(self.size)

    def numbers(self, *shape: int, low: float = -math.inf, high: float = math.inf) -> Form:
        """Numbers of the models' type."""
        return Form(shape, self.dtype, low, high)

    def samples(self, *splits: SplitName) -> Form:
        """A number of samples: of this split, or of the first of several that has any."""
        return Form((), torch.int64, 1 if "train" in splits else 0, splits=splits)

    def label_counts(self, classes: int) -> Form:
        """Training samples of each class."""
        return Form((classes,), torch.int64, 0, splits=("train",))

    def choice(self, count: int | None = None) -> Form:
        """One of several; by default one of the models that were sent."""
        return Form((), torch.int64, 0, (self.count if count is None else count) - 1)

    def flag(self) -> Form:
        """Yes or no."""
        return Form((), torch.bool)

    def share(self) -> Form:
        """A score from 0 to 1."""
        return Form((), torch.float64, 0, 1)

    def losses(self, *shape: int, dtype: torch.dtype = torch.float64) -> Form:
        """Mean losses. Coterie's own losses are not negative."""
        low = 0.0 if self.task.loss in LOSSES.values() else -_highest(self.task)
        return Form(shape, dtype, low, _highest(self.task))


Answers = Callable[[Asked], Forms]
"""The form of a step's answer, from what was asked."""


def _highest(task: Task) -> float:
    return _HIGHEST_LOSS if task.num_classes else 1e30


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.6g}"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- what several steps answer with ----


def nothing(asked: Asked) -> Forms:
    """No tensors."""
    return {}


def model(asked: Asked) -> Forms:
    """A model."""
    return {"params": asked.model()}


def trained(asked: Asked) -> Forms:
    """A model, and the number of samples it was trained on."""
    return {"params": asked.model(), "samples": asked.samples("train")}


def chosen(asked: Asked) -> Forms:
    """Which of the models that were sent."""
    return {"choice": asked.choice()}


def scored(asked: Asked) -> Forms:
    """Scores on the test samples; number, loss and accuracy on validation samples (`valid_...`)."""
    tested, valid = scored_on("test", asked), scored_on("valid", asked)
    return tested | {f"{VALID}{name}": valid[name] for name in ("samples", "loss", "accuracy") if name in valid}


def scored_on(split: SplitName, asked: Asked) -> Forms:
    """Scores on the samples of a split: see `Block.evaluate`."""
    found = {"samples": asked.samples(split), "loss": asked.losses()}
    if asked.task.num_classes:
        return found | {"accuracy": asked.share(), "f1": asked.share()}
    if asked.task.loss is cross_entropy:
        return found
    # Another loss may have outputs that are not predictions; only the client knows.
    return found | {"r2": Form((), torch.float64, -_highest(asked.task), 1, optional=asked.task.loss is not mse)}


def watched(asked: Asked) -> Forms:
    """Whether the loss has risen, and whether the model is worse than the one before, if that was asked."""
    return {name: asked.flag() for name, asks in (("alarm", "watch"), ("worse", "vote")) if asks in asked.given}


def mixture(asked: Asked, count: int = 1) -> Forms:
    """Whole models with weights."""
    return {"models": asked.numbers(count, asked.task.layout.size), "weights": asked.numbers(count, low=0, high=1)}
