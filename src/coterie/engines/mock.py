"""An engine without clients: a function answers. For tests of a method's server half."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from coterie.client.steps import Answer
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.engines.base import Engine, Reply, Request, plain_name
from coterie.nets.flat import Layout, cross_entropy, flatten
from coterie.randomness import name_keys

Respond = Callable[..., Mapping[str, Any]]
"""respond(step, client, sent, **payload): the client's answer. `step` is the plain name of the step, `sent`
the model [P] or models [m, P] that were sent, or None. If it raises, the client fails."""


class MockEngine(Engine):
    """Models are vectors of `size` numbers; the answers of a client come from `respond`.

    >>> from coterie.client.steps import train
    >>> engine = MockEngine(lambda step, client, sent: {"params": sent + client, "samples": 1}, num_clients=3)
    >>> [chunk] = engine.call(train, engine.everyone(), models=torch.zeros(1, 2),
    ...                       refs=torch.zeros(3, dtype=torch.int64), rng=engine.dropout_rng)
    >>> chunk.answer.params.tolist()
    [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    """

    def __init__(self, respond: Respond, num_clients: int, size: int = 2, chunk: int | None = None) -> None:
        module = nn.Linear(size, 1, bias=False)
        nn.init.zeros_(module.weight)
        parts = (module, Layout.of(module), flatten(module), cross_entropy)
        task = Task(*parts, 2, (size,), SGD(), draw=lambda rng: rng.normal(size).float())
        names = tuple(f"client-{i}" for i in range(num_clients))
        super().__init__(task, names, name_keys(names), torch.device("cpu"), torch.float32)
        self._respond = respond
        self._chunk = chunk or num_clients
        self.calls: list[tuple[str, list[int]]] = []  # step and clients of every call

    def ask(self, request: Request, positions: Tensor) -> Iterator[Reply]:
        """Call the function for every client."""
        name = plain_name(request.name)
        self.calls.append((name, request.cohort.tolist()))
        for some in positions.split(self._chunk):
            answers: list[Mapping[str, Any]] = []
            good: list[int] = []
            failed: list[tuple[int, str]] = []
            for position in some.tolist():
                client = int(request.cohort[position])
                given = request.sent(torch.tensor([position]), self.device)
                sent = None if given is None else given.table[given.refs[0]]
                own = {key: value[position] for key, value in request.each.items()}
                try:
                    answers.append(self._respond(name, client, sent, **request.payload, **own))
                    good.append(position)
                except Exception as error:  # any exception is a failure of that client
                    failed.append((position, str(error)))
            stacked = {k: torch.stack([torch.as_tensor(a[k]) for a in answers]) for k in (answers or [{}])[0]}
            yield Reply(torch.tensor(good, dtype=torch.int64), Answer(**stacked), tuple(failed))

    def describe(self) -> dict[str, Any]:
        """See `Engine.describe`."""
        return {"engine": "mock"}
