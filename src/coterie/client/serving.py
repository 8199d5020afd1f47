"""Serving: how a client turns what it remembers and what it was sent into the model it uses.

Most methods serve a row of the server's table, and need nothing from here. A method whose clients keep a model of their
own writes one function and decorates it with `@serving`: evaluation, export and newcomers then know what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Mixture, Models
from coterie.client.forms import Answers
from coterie.client.steps import OWN_MODEL, Answer, ClientStep, client_step, scores
from coterie.client.work import SGD

ServeFunction = Callable[..., Mixture]


class Serving:
    """Two client steps made of one function: `evaluate` scores what the client is served with, `parts` sends it."""

    def __init__(self, name: str, function: ServeFunction, answers: Answers = forms.mixture) -> None:
        def evaluate(block: Block, models: Models | None, work: SGD, **more: Tensor) -> Answer:
            served = function(block, models, work, **more)
            return Answer(**scores(block, partial(block.evaluate_mixture, served)))

        def parts(block: Block, models: Models | None, work: SGD, **more: Tensor) -> Answer:
            found = function(block, models, work, **more)
            bias = {} if found.bias is None else {"bias": found.bias}
            return Answer(models=found.params, weights=found.weights, **bias)

        for step in (evaluate, parts):
            step.__module__ = function.__module__
        self.function = function
        self.evaluate: ClientStep = client_step(f"{name}.evaluate", forms.scored)(evaluate)
        self.parts: ClientStep = client_step(f"{name}.parts", answers)(parts)

    def __call__(self, *args: Any, **more: Any) -> Mixture:
        """What the clients of a block are served with."""
        return self.function(*args, **more)


def serving(name: str, answers: Answers = forms.mixture) -> Callable[[ServeFunction], Serving]:
    """Decorator: `function(block, models, work) -> Mixture` as a `Serving`, under this name in messages.

    `answers` declares the form of `parts`; by default it is one model.
    """
    return lambda function: Serving(name, function, answers)


@serving("coterie.serving:own_or_sent")
def own_or_sent(block: Block, models: Models, work: SGD) -> Mixture:
    """The model that the client remembers; one that has none uses the model that was sent."""
    return Mixture.of_one(block.memory.get(OWN_MODEL, models.rows()))
