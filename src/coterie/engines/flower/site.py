"""A site: one client's data, task and memory; it runs any registered client step with a `LoopEngine`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from coterie.client.block import Models
from coterie.client.steps import ClientStep, answer_of, find_step
from coterie.client.task import Task
from coterie.client.work import SGD, from_dict
from coterie.data.federation import Federation
from coterie.engines.flower import wire
from coterie.engines.flower.memory import DiskMemory, folder_name
from coterie.engines.loop import LoopEngine
from coterie.errors import ConfigError, CoterieError, DataError
from coterie.nets.flat import Loss
from coterie.randomness import Rng


class Site:
    """Answers requests for the clients of a federation, one at a time."""

    def __init__(
        self,
        federation: Federation,
        make: Callable[[Rng], nn.Module],
        loss: Loss,
        folder: Path,
        device: str = "cpu",
        register: Callable[[str], None] = lambda step: None,
        secret: bool = False,
    ) -> None:
        self.federation, self._make, self._loss = federation, make, loss
        self._folder, self._device = folder, device
        self._register = register  # imports what defines a step that is not known yet
        self._secret = secret  # noise for privacy that nobody can repeat
        self._engines: dict[Any, LoopEngine] = {}

    def answer(self, content: RecordDict) -> RecordDict:
        """Run the requested steps; if one raises, its answer is a failure with the reason."""
        content, first = wire.parted(content)
        round = wire.read_call(content).round
        before = None if first is None else self._answer(first, round)
        return wire.joined(self._answer(content, round), before)

    def _answer(self, content: RecordDict, round: int) -> RecordDict:
        """The answer to one call of a message of this round."""
        call, models, payload, each = wire.read_request(content)
        if call.client not in self.federation.names:
            return wire.failure(call, f"this site is not '{call.client}'")
        # A call of an earlier round remembers in the round of its message: a server that repeats that round repeats it.
        folder = self._folder / folder_name(call.run) / folder_name(call.client)
        memory = DiskMemory(folder, round, call.life, call.past)
        try:
            tensors, gradients = self._do(call, memory, models, payload, each)
        except CoterieError as error:
            return wire.failure(call, str(error))
        except Exception as error:  # the user's code may raise anything
            return wire.failure(call, f"{type(error).__name__}: {error}")
        return wire.answer(call, tensors, gradients)

    def _do(
        self,
        call: wire.Call,
        memory: DiskMemory,
        sent: list[Tensor],
        payload: dict[str, Tensor],
        each: dict[str, Tensor],
    ) -> tuple[dict[str, Tensor], int]:
        step, work = self._known(call)
        engine = self._engine(call, work)
        engine.begin(call.round, call.phase)  # type: ignore[arg-type]
        client = torch.tensor([self.federation.names.index(call.client)])
        block = engine.block_of(client, engine.plan, Rng(call.key), memory)
        block.secret = self._secret
        models = None
        if call.models is not None:
            table = torch.stack(sent).to(engine.device, engine.dtype)
            refs = torch.arange(len(sent), device=engine.device)
            models = Models(table, refs.unsqueeze(0) if call.several else refs)
        with torch.no_grad(), engine.precision():
            answer = answer_of(step, block, models, work, **payload, **each)
        return dict(answer), block.gradients

    def _known(self, call: wire.Call) -> tuple[ClientStep, SGD]:
        """The step and the work of a call."""
        try:
            return find_step(call.step), from_dict(call.work)
        except ConfigError:
            self._register(call.step)
            return find_step(call.step), from_dict(call.work)

    def _engine(self, call: wire.Call, work: SGD) -> LoopEngine:
        key = (call.seed, call.precision)
        if key not in self._engines:
            data = self.federation
            sizes = (data.num_classes, data.input_shape)
            task = Task.made(self._make, call.seed, self._loss, *sizes, work, data.has_integers)
            settings = {"precision": call.precision}
            self._engines[key] = LoopEngine(task, self.federation, device=self._device, settings=settings)
        return self._engines[key]


def one_client(name: str, data: Any, num_classes: int, held_out: bool = True) -> Federation:
    """The federation of one site from the result of its `load_data`.

    That is a federation of one client, or whatever `Federation.from_clients` takes for a client. Without `held_out`,
    all samples are training samples. Sites must agree on their classes, so labels are numbers here.
    """
    if isinstance(data, Federation):
        if len(data) != 1:
            raise DataError(f"load_data must return the data of one client. Got a federation of {len(data)} instead.")
        return data
    test, valid = (0.2, 0.1) if held_out else (0.0, 0.0)
    made = Federation.from_clients({name: data}, num_classes=num_classes, test=test, valid=valid)
    if made.class_names:
        raise DataError(
            "load_data must return classes as integers, which mean the same at every site. Got words instead."
        )
    return made
