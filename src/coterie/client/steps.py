"""Client steps: what clients do when a method calls them, registered by name; and the ready-made steps.

A client step is a function `step(block, models, work, **payload) -> Answer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import overload

import torch
from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Models
from coterie.client.forms import VALID, Answers, Asked, Forms
from coterie.client.optimizers import optimizers
from coterie.client.privacy import fresh, protected, seeded
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.data.federation import SplitName
from coterie.errors import ConfigError, MethodError, defined_at
from coterie.nets.sketch import sketch_of
from coterie.randomness import Rng


class Answer(Mapping[str, Tensor]):
    """Named tensors [c, ...], one row per client; `answer.params` is `answer["params"]`."""

    def __init__(self, **tensors: Tensor) -> None:
        taken = [name for name in tensors if hasattr(Mapping, name)]
        if taken:
            raise ConfigError(f"An answer cannot have a tensor named '{taken[0]}'; choose another name.")
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getattr__(self, name: str) -> Tensor:
        tensors: dict[str, Tensor] = self.__dict__.get("_tensors", {})
        if name not in tensors:
            raise AttributeError(f"the answer has no '{name}'; it has {', '.join(tensors) or 'nothing'}")
        return tensors[name]


ClientStep = Callable[..., Answer]

_STEPS: dict[str, ClientStep] = {}


@overload
def client_step(name: ClientStep) -> ClientStep: ...
@overload
def client_step(name: str | None = None, answers: Answers | None = None) -> Callable[[ClientStep], ClientStep]: ...
def client_step(
    name: str | ClientStep | None = None, answers: Answers | None = None
) -> ClientStep | Callable[[ClientStep], ClientStep]:
    """Decorator: register a client step under its name in messages; code is never sent.

    `@client_step("package:step")` sets the name. Plain `@client_step` uses `module:function`. Dropout draws and Flower
    messages depend on the name, so a step that moves to another file must keep it. `answers` declares the form of the
    answer (`client/forms.py`); over messages a step needs it.
    """
    if callable(name):
        return client_step()(name)

    def register(function: ClientStep) -> ClientStep:
        called = name or f"{function.__module__}:{function.__qualname__}"
        _STEPS[called] = function
        function.wire_name, function.answers = called, answers  # type: ignore[attr-defined]
        return function

    return register


def forms_of(step: ClientStep, asked: Asked) -> Forms:
    """The form of a step's answer, as it declares it; ConfigError if it does not."""
    answers: Answers | None = getattr(step, "answers", None)
    if answers is None:
        raise ConfigError(
            f"The client step {step_name(step)} does not say what it answers with, so the answers of other processes "
            "cannot be checked. Declare it, for example @client_step(answers=lambda asked: {'params': asked.model()})."
        )
    return answers(asked)


def step_name(function: ClientStep) -> str:
    """The name of a step in messages."""
    return getattr(function, "wire_name", None) or f"{function.__module__}:{function.__qualname__}"


def require_step(function: ClientStep) -> None:
    """Raise MethodError if a function is not a client step."""
    if not hasattr(function, "wire_name"):
        name = getattr(function, "__qualname__", type(function).__name__)
        raise MethodError(
            f"{name} ({defined_at(function)}) is not a client step; decorate the function with @coterie.client_step."
        )


def answer_of(step: ClientStep, block: Block, models: Models | None, work: SGD, **more: Tensor) -> Answer:
    """What the clients of a block answer; MethodError if that is no answer with one row per client."""
    found: object = step(block, models, work, **more)
    where = f"{step.__qualname__} ({defined_at(step)})"
    if not isinstance(found, Answer):
        raise MethodError(f"{where} must return a coterie.Answer. Got {type(found).__name__} instead.")
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor):
            raise MethodError(f"{where} must answer with tensors. Got {type(tensor).__name__} for '{name}' instead.")
        if tensor.shape[:1] != (len(block),):
            raise MethodError(
                f"{where} answered '{name}' of shape {tuple(tensor.shape)} for {len(block)} clients; the first axis "
                "must be the clients."
            )
    return found if work.update_clip is None else _protected(found, block, models, work, where)


def _protected(answer: Answer, block: Block, models: Models | None, work: SGD, where: str) -> Answer:
    """What leaves the clients of a block, clipped and with noise."""
    assert work.update_clip is not None
    if block.task.layout.size > block.task.layout.num_parameters:
        raise ConfigError(
            "update_clip needs a network without running statistics, which noise would spoil: use GroupNorm or "
            "LayerNorm in place of BatchNorm."
        )
    if models is None and "params" in answer and answer.params.shape == block.initial.shape:
        models = Models(block.initial, torch.arange(len(block), device=block.initial.device))
    draw = fresh if block.secret else seeded(block.rng)
    return Answer(**protected(answer, models, work.update_clip, work.update_noise or 0.0, draw))


def find_step(name: str) -> ClientStep:
    """The registered step of that name. Nothing is imported: a message must not choose what a site runs."""
    if not is_step(name):
        raise ConfigError(f"There is no client step '{name}' here. Import the module that defines it first.")
    return _STEPS[name]


def is_step(name: str) -> bool:
    """Whether a step of that name is registered."""
    return name in _STEPS


def step_modules() -> list[str]:
    """The modules that define the registered steps and optimizers, for other processes of the same user."""
    return sorted({thing.__module__ for thing in (*_STEPS.values(), *optimizers().values())})


# ---- ready-made steps ----

OWN_MODEL = "model"
"""The name under which a client remembers a model of its own."""

_SIGNATURE = 4096  # numbers in a signature, about
_CLEARLY = 0.7  # a loss or distance is clearly lower if it is less than this share of another


@client_step("coterie.block:train", forms.trained)
def train(block: Block, models: Models, work: SGD) -> Answer:
    """Train the model that was sent."""
    return Answer(params=block.train(models, work), samples=block.samples)


@client_step("coterie.block:choose", forms.chosen)
def choose(block: Block, models: Models, work: SGD, own: Tensor | None = None) -> Answer:
    """Choose the model with the lowest training loss; with `own` [c], only if it is clearly lower than that of `own`.

    A negative `own` has no say.
    """
    return Answer(choice=clearly_lowest(block.losses(models), own))


@client_step("coterie.block:judge", lambda asked: {"losses": asked.losses(asked.count)})
def judge(block: Block, models: Models, work: SGD) -> Answer:
    """The training loss of each of the models that were sent, [c, m]."""
    return Answer(losses=block.losses(models))


def clearly_lowest(values: Tensor, own: Tensor | None) -> Tensor:
    """The lowest of several losses or distances [c, m] -> [c]; with `own` [c], only if clearly lower than that one.

    Where models are alike, or closer together than a client's update is long, the lowest is a matter of chance.
    """
    least = values.min(1)
    if own is None:
        return least.indices
    own = own.to(values.device)
    at_own = values.gather(1, own.clamp_min(0).unsqueeze(1))[:, 0]
    return torch.where((own >= 0) & (least.values >= _CLEARLY * at_own), own, least.indices)


def signed(asked: Asked) -> Forms:
    """A signature and label counts."""
    classes, width = signature_shape(asked.task)
    signature = asked.numbers(classes, width, low=-forms.LARGE, high=forms.LARGE)
    return {"signature": signature, "counts": asked.label_counts(classes)}


@client_step("coterie.block:sign", signed)
def sign(block: Block, models: Models, work: SGD) -> Answer:
    """The client's signature: a sketch of the mean gradient of each class it holds, and its label counts."""
    classes, width = signature_shape(block.task)
    sketch = sketch_of(block.task.layout.num_parameters, width, Rng.seed(0).at("signature"), models.table.device)
    rows = torch.zeros(len(block), classes, width, dtype=models.table.dtype, device=models.table.device)
    counts = torch.zeros(len(block), classes, dtype=torch.int64, device=models.table.device)
    for label, holders, gradients, samples in block.class_gradients(models):
        rows[holders, label], counts[holders, label] = sketch(gradients[:, 0]), samples[:, 0]
    return Answer(signature=rows, counts=counts)


@client_step("coterie.block:train_and_sign", lambda asked: forms.trained(asked) | signed(asked))
def train_and_sign(block: Block, models: Models, work: SGD) -> Answer:
    """Train the model that was sent, and sign at it."""
    return Answer(**train(block, models, work), **sign(block, models, work))


def signature_shape(task: Task) -> tuple[int, int]:
    """The number of rows of a signature and their width; together about as large as a small model."""
    classes = max(1, task.num_classes)
    return classes, min(task.layout.num_parameters, max(32, min(512, _SIGNATURE // classes)))


def scores(block: Block, score: Callable[[SplitName], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The scores [c] on test samples, and number, loss and accuracy on validation samples (`valid_...`).

    The validation scores only monitor a run; a client without such samples has 0 of them.
    """
    tested = score("test")
    names = [name for name in ("samples", "loss", "accuracy") if name in tested]
    if block.has("valid"):
        valid = score("valid")
    else:
        valid = {name: torch.zeros_like(tested[name]) for name in names}
    return tested | {f"{VALID}{name}": valid[name] for name in names}


@client_step("coterie.block:evaluate", forms.scored)
def evaluate(block: Block, models: Models | None, work: SGD) -> Answer:
    """Score the model that was sent, or else the client's own model, on the client's test and validation samples."""
    return Answer(**scores(block, partial(block.evaluate, _sent_or_own(block, models))))


def scored_privately(asked: Asked) -> Forms:
    """Accuracies and F1, if there are classes, and whether there are validation samples."""
    told = ("accuracy", "f1", f"{VALID}accuracy", f"{VALID}samples")
    return {name: form for name, form in forms.scored(asked).items() if name in told}


@client_step("coterie.block:evaluate_privately", scored_privately)
def evaluate_privately(block: Block, models: Models | None, work: SGD) -> Answer:
    """As `evaluate`, but only accuracies and F1 leave the client: no loss, no number of samples."""
    found = scores(block, partial(block.evaluate, _sent_or_own(block, models)))
    told = {name: found[name] for name in ("accuracy", "f1", "valid_accuracy") if name in found}
    return Answer(**told, valid_samples=found["valid_samples"].clamp(max=1))  # 1: there are some


@client_step("coterie.block:adapt_and_evaluate", forms.scored)
def adapt_and_evaluate(block: Block, models: Models | None, work: SGD) -> Answer:
    """As `evaluate`, after adapting the model on the client's training samples."""
    return Answer(**scores(block, partial(block.evaluate, adapt(block, models, work).params)))


@client_step("coterie.block:adapt", forms.model)
def adapt(block: Block, models: Models | None, work: SGD) -> Answer:
    """The personal model: the one that was sent, or the client's own, trained on the client's samples."""
    return Answer(params=block.train(own_model(block, models, work).params, work))


@client_step("coterie.block:own_model", forms.model)
def own_model(block: Block, models: Models | None, work: SGD) -> Answer:
    """The personal model without further training."""
    found = _sent_or_own(block, models)
    return Answer(params=found.rows() if isinstance(found, Models) else found)


@client_step("coterie.block:label_counts", lambda asked: {"counts": asked.label_counts(asked.task.num_classes)})
def label_counts(block: Block, models: Models | None, work: SGD) -> Answer:
    """The number of training samples of each class."""
    return Answer(counts=block.label_counts())


def _sent_or_own(block: Block, models: Models | None) -> Models | Tensor:
    return block.memory.get(OWN_MODEL, block.initial) if models is None else models
