"""An engine without clients: a function answers. For testing the server half of a method in a few lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from coterie.client.block import Answer, ClientStep, Task, step_name
from coterie.client.work import SGD
from coterie.engines.base import Chunk, Engine, Failure
from coterie.nets.flat import Layout, cross_entropy, flatten
from coterie.randomness import Rng, name_keys

Respond = Callable[..., Mapping[str, Any]]
"""respond(step, client, sent, **payload): what that client answers. `step` is the plain name of the step, `sent`
the model [P] or models [m, P] it got, or None. Raising makes the client fail."""


class MockEngine(Engine):
    """Models are vectors of `size` numbers; client i's answers are what `respond` says.

    >>> engine = MockEngine(lambda step, client, sent: {"params": sent + client, "samples": 1}, num_clients=3)
    >>> [chunk] = engine.call(lambda: None, engine.everyone(), models=torch.zeros(1, 2),
    ...                       refs=torch.zeros(3, dtype=torch.int64), rng=Rng.seed(0))
    >>> chunk.answer.params.tolist()
    [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    """

    def __init__(self, respond: Respond, num_clients: int, size: int = 2, chunk: int | None = None) -> None:
        module = nn.Linear(size, 1, bias=False)
        nn.init.zeros_(module.weight)
        task = Task(
            module=module,
            layout=Layout.of(module),
            initial=flatten(module),
            loss=cross_entropy,
            num_classes=2,
            input_shape=(size,),
            work=SGD(),
            draw=lambda rng: rng.normal(size).float(),
        )
        names = tuple(f"client-{i}" for i in range(num_clients))
        super().__init__(task, names, name_keys(names))
        self._respond = respond
        self._chunk = chunk or num_clients
        self.calls: list[tuple[str, list[int]]] = []  # step and clients of every call

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """float32."""
        return torch.float32

    def call(
        self,
        step: ClientStep,
        cohort: Tensor,
        *,
        rng: Rng,
        models: Tensor | None = None,
        refs: Tensor | None = None,
        payload: Mapping[str, Tensor] | None = None,
        each: Mapping[str, Tensor] | None = None,
        work: SGD | None = None,
    ) -> Iterator[Chunk]:
        """Let the function answer for every client."""
        name = step_name(step).rpartition(":")[2]
        self.calls.append((name, cohort.tolist()))
        self.ledger.record_down(self.phase, name, cohort, self.num_clients, models, refs, payload or {}, each or {})
        for positions in torch.arange(len(cohort)).split(self._chunk):
            answers: list[Mapping[str, Any]] = []
            good, failed = [], []
            for position in positions.tolist():
                client = int(cohort[position])
                sent = None if models is None or refs is None else models[refs[position]]
                own = {key: value[position] for key, value in (each or {}).items()}
                try:
                    answers.append(self._respond(name, client, sent, **(payload or {}), **own))
                    good.append(position)
                except Exception as error:  # whatever the test's function raises is that client's failure
                    failed.append(Failure(self.round, self.names[client], name, str(error)))
            self.failures += failed
            if good:
                stacked = {k: torch.stack([torch.as_tensor(a[k]) for a in answers]) for k in answers[0]}
                self.ledger.record_up(self.phase, name, stacked.values())
                where = torch.tensor(good)
                yield Chunk(cohort[where], where, Answer(**stacked), tuple(failed))

    def describe(self) -> dict[str, Any]:
        """Nothing to choose."""
        return {"engine": "mock"}

    def memory_tensors(self) -> dict[str, Tensor]:
        """These clients remember nothing."""
        return {}

    def load_memory(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing to put back."""

    def memory_budget(self) -> int:
        """Enough for any test."""
        return 1 << 30
