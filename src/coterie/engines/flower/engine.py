"""The engine whose clients are Flower nodes: implements `coterie.engines.base` with messages.

Each client of a call gets one message; messages share model records, so that Flower stores each distinct model
once. A call ends when all clients have answered, or at its deadline; clients that have not answered have failed.
An answer of another form than the step declares is refused when it arrives, and nothing of it is kept: see `wire`.

A deployed site starts a process for every message. So the first message to a client in a round carries the evaluation
of the round before, which the client does first. Clients outside the cohort get it at the same time, as a message of
its own. If a message fails, both calls have failed.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor

from coterie.client.batches import StepCounts
from coterie.client.forms import Asked, Form, Forms
from coterie.client.steps import Answer, forms_of
from coterie.client.task import Task
from coterie.client.work import to_dict
from coterie.data.federation import Federation
from coterie.engines.base import Engine, Reply, Request
from coterie.engines.flower import wire
from coterie.engines.flower.link import MOST_SAMPLES, Link, splits_of
from coterie.engines.ledger import Phase
from coterie.randomness import name_keys
from coterie.settings import setting, values_of

log = logging.getLogger("coterie.flower")

_CHUNK = 64  # clients per chunk
_WORK = 1000  # times the gradients of one training: a client's claim of more counts as so many

Read = tuple[dict[str, Tensor], int] | str
"""A client's answer and the gradients it took, or the reason of its failure."""


@dataclass(frozen=True)
class FlowerSettings:
    """Settings of the engine: `--set engine.FIELD=VALUE`."""

    deadline: float = setting(600.0, "seconds to wait for answers; then the round continues without the others", gt=0)
    poll: float = setting(0.05, "seconds between polls for answers", gt=0)
    precision: Literal["float32", "float64"] = setting("float32", "floating-point precision of the clients")
    cpus: int = setting(1, "CPU cores per simulated client", ge=1)
    max_samples: int = setting(MOST_SAMPLES, "samples that a client may declare when it joins", ge=1)
    max_weight: float | None = setting(
        None, "limit on a client's weight, as a multiple of that of the median client", gt=0, default_is="none"
    )


@dataclass(frozen=True)
class Sent:
    """A message to a client, and the form of the answer to it."""

    content: RecordDict
    call: wire.Call
    forms: Forms
    work: int  # gradients that count at most, for each training sample


@dataclass
class Carried:
    """An evaluation on its way: the messages to clients not asked yet, and the answers of the others."""

    request: Request
    waiting: dict[str, Sent]
    outside: set[str]  # clients that the round does not ask: their messages hold nothing else
    answers: dict[str, Read] = field(default_factory=dict)

    def is_of(self, request: Request) -> bool:
        """Whether it is the evaluation that the request asks for."""
        return (self.request.name, self.request.rng.key) == (request.name, request.rng.key)

    def taken(self, names: Iterable[str]) -> dict[str, Sent]:
        """The messages to these clients, which are no longer waiting."""
        return {name: self.waiting.pop(name) for name in names if name in self.waiting}


class FlowerEngine(Engine):
    """Runs client steps on Flower nodes."""

    name = "flower"
    carries = True
    remembers = False  # clients store their memory on their own disks

    def __init__(
        self,
        task: Task,
        federation: Federation,
        link: Link,
        settings: FlowerSettings,
        *,
        run: str,
        past: Mapping[str, int] | None = None,
    ) -> None:
        dtype = torch.float64 if settings.precision == "float64" else torch.float32
        super().__init__(task, federation.names, federation.keys, torch.device("cpu"), dtype)
        self.federation = federation
        self.settings, self.link = settings, link
        self._run = run
        self._carried: Carried | None = None
        self.life, self.past = uuid.uuid4().hex, dict(past or {})
        if federation.reserved is not None:
            x, y = federation.reserved_samples()
            self.reserved = (x if task.integers else x.to(self.dtype), y)

    def describe(self) -> dict[str, Any]:
        return {"engine": self.name, "device": "cpu", **values_of(self.settings)}

    def memory_budget(self) -> int:
        """1 GB in addition to the centers."""
        return 1 << 30

    def memory_tensors(self) -> dict[str, Tensor]:
        """Empty: clients store their memory on their own disks."""
        return {}

    def load_memory(self, tensors: Mapping[str, Tensor]) -> None:
        """See `memory_tensors`."""

    # ---- new clients ----

    def welcome(self) -> int:
        """Admit clients that have connected since the last call; returns their number."""
        began = time.perf_counter()
        new = self.link.roll_call()
        self.client_seconds += time.perf_counter() - began
        self.notes += [note for note in self.link.notes if note not in self.notes]
        if not new:
            return 0
        names = tuple(member.name for member in new)
        self.names += names
        self.keys = torch.cat([self.keys, name_keys(names)])
        everyone = [self.link.members[name] for name in self.names]
        self.federation = replace(self.federation, **splits_of(everyone), groups=None, view=None, moves=())
        return len(new)

    def population(self, federation: Federation) -> Federation:
        """The clients as they are now."""
        return self.federation

    # ---- calls ----

    def carry(self, request: Request, round: int, cohort: Tensor) -> None:
        """See `Engine.carry`."""
        names = self._names(request, torch.arange(len(request.cohort)))
        outside = set(names) - {self.names[client] for client in cohort.tolist()}
        self._carried = Carried(request, self._messages(request, names, round, "evaluate"), outside)

    def ask(self, request: Request, positions: Tensor) -> Iterator[Reply]:
        """Send one message per client; yields answers in the order of the cohort."""
        names = self._names(request, positions)
        found: dict[str, dict[str, Tensor]] = {}
        refused: list[tuple[int, str]] = []
        gradients = 0
        for client, answer in self._answers(request, names):
            if isinstance(answer, str):
                refused.append((names[client], answer))
            else:
                found[client], taken = answer
                gradients += taken
        good = [client for client in names if client in found]
        shared = set.intersection(*(set(row) for row in found.values())) if found else set()  # see `Form.optional`
        for some in [good[i : i + _CHUNK] for i in range(0, len(good), _CHUNK)] or [[]]:
            rows = [found.pop(client) for client in some]
            together = Answer(
                **{key: torch.cat([row[key] for row in rows]) for key in (rows or [{}])[0] if key in shared}
            )
            yield Reply(torch.tensor([names[c] for c in some], dtype=torch.int64), together, tuple(refused), gradients)
            refused, gradients = [], 0

    def _names(self, request: Request, positions: Tensor) -> dict[str, int]:
        """The clients at these positions of the cohort: their names and positions."""
        return {self.names[int(request.cohort[position])]: position for position in positions.tolist()}

    def _answers(self, request: Request, names: Mapping[str, int]) -> Iterator[tuple[str, Read]]:
        """The answers of these clients to a request as they arrive, or the reasons of failures."""
        carried = self._carried
        if carried is not None and carried.is_of(request):
            self._carried = None
            yield from carried.answers.items()
            for name, reply in self._exchange(carried.waiting, "evaluate"):
                yield name, self._read(name, reply, carried.waiting[name])
            return
        messages = self._messages(request, names, self.round, self.phase)
        if carried is None or self.phase == "evaluate":
            for name, reply in self._exchange(messages, self.phase):
                yield name, self._read(name, reply, messages[name])
            return
        first, outside = carried.taken(names), carried.taken(carried.outside)
        both = {
            name: replace(sent, content=wire.joined(sent.content, first[name].content)) if name in first else sent
            for name, sent in messages.items()
        }
        for name, reply in self._exchange(both, self.phase, outside):
            main, evaluation = (reply, reply) if isinstance(reply, str) else wire.parted(reply)
            if name in outside:
                carried.answers[name] = self._read(name, main, outside[name])
                continue
            if name in first:
                carried.answers[name] = self._read(name, evaluation, first[name])
            yield name, self._read(name, main, messages[name])

    def _exchange(
        self, to: Mapping[str, Sent], phase: Phase, outside: Mapping[str, Sent] | None = None
    ) -> Iterator[tuple[str, RecordDict | str]]:
        """Send each client its message, and other clients an evaluation at the same time; yields the replies."""
        kind = "evaluate" if phase == "evaluate" else "train"
        messages = {name: (kind, sent.content) for name, sent in to.items()}
        messages |= {name: ("evaluate", sent.content) for name, sent in (outside or {}).items()}
        up = 0
        for name, reply in self.link.ask(messages, self.settings.deadline):
            up += 0 if isinstance(reply, str) else wire.size_of(reply)
            log.debug("round %d: %s answered", self.round, name)
            yield name, reply
        if messages:
            down = sum(wire.size_of(content) for _, content in messages.values())
            self.ledger.record_wire(phase, len(messages), down, up)

    def _messages(self, request: Request, names: Mapping[str, int], round: int, phase: Phase) -> dict[str, Sent]:
        """One message per client, by name; messages share one record per distinct model."""
        models, refs = request.models, request.refs
        forms, work = self._expected(request)
        records: dict[int, tuple[str, ArrayRecord]] = {}
        payload = wire.record_of(request.payload) if request.payload else None
        messages = {}
        for client, position in names.items():
            sent: list[tuple[str, ArrayRecord]] = []
            if models is not None and refs is not None:
                for row in refs[position].reshape(-1).tolist():
                    if row not in records:
                        records[row] = wire.model_record(models[row].to(self.dtype))
                    sent.append(records[row])
            call = wire.Call(
                step=request.name,
                client=client,
                round=round,
                phase=phase,
                key=request.rng.key,
                seed=self.task.seed,
                work=to_dict(request.work),
                models=None if models is None else [name for name, _ in sent],
                several=refs is not None and refs.dim() == 2,
                run=self._run,
                life=self.life,
                past=self.past,
                precision=self.settings.precision,
                nonce=uuid.uuid4().hex,
            )
            mine = {key: value[position : position + 1] for key, value in request.each.items()}
            messages[client] = Sent(wire.request(call, dict(sent), payload, mine), call, forms, work)
        return messages

    # ---- what is expected in return ----

    def _expected(self, request: Request) -> tuple[Forms, int]:
        """The form of the answers to a request, and how many gradients for each training sample count at most."""
        models, refs, work = request.models, request.refs, request.work
        count = 0 if refs is None else refs.shape[1] if refs.dim() == 2 else 1
        asked = Asked(
            self.task,
            self.dtype,
            size=self.task.layout.size if models is None else models.shape[1],  # methods may send a part of the model
            count=count,
            longest=0.0 if models is None else float(torch.linalg.vector_norm(models, dim=1).max()),
            work=work,
            given={**request.payload, **{name: rows[0] for name, rows in request.each.items()}},
        )
        once = StepCounts(torch.ones(1, dtype=torch.int64), work).num_samples * work.gradients + 1
        return forms_of(request.step, asked), _WORK * (1 + count) * once

    def _read(self, client: str, reply: RecordDict | str | None, sent: Sent) -> Read:
        """A client's answer, or the reason why it is refused."""
        if isinstance(reply, str):
            return reply
        sizes = self.link.members[client].sizes
        try:
            tensors, gradients = wire.read_answer(reply, sent.call, sent.forms, sizes)
        except wire.Refused as error:
            return str(error)
        for name, form in sent.forms.items():
            if form.splits and name in tensors:
                tensors[name] = self._capped(tensors[name], form, client)
        return tensors, min(gradients, sent.work * sum(sizes.values()))

    def _capped(self, counts: Tensor, form: Form, client: str) -> Tensor:
        """Numbers of samples, scaled down to the weight that a client may have."""
        if self.settings.max_weight is None:
            return counts
        split = form.bound_by(self.link.members[client].sizes)
        sizes = sorted(size for member in self.link.members.values() if (size := member.sizes[split]))
        most, total = self.settings.max_weight * sizes[(len(sizes) - 1) // 2] if sizes else 0.0, int(counts.sum())
        if total <= most:
            return counts
        scaled = (counts.double() * (most / total)).round().clamp_min(1)  # a class that is held stays held
        return scaled.to(counts.dtype).where(counts > 0, 0)
