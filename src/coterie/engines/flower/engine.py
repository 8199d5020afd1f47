"""The engine whose clients are Flower nodes: implements `coterie.engines.base` with messages.

Each client of a call gets one message; messages share model records, so that Flower stores each distinct model
once. A call ends when all clients have answered, or at its deadline; clients that have not answered have failed.
Every answer is checked before it is used: its size before it is unpacked, then its types and shapes.

A deployed site starts a process for every message. So the first message to a client in a round carries the evaluation
of the round before, which the client does first. Clients outside the cohort get it at the same time, as a message of
its own. If a message fails, both calls have failed.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor

from coterie.client.steps import Answer
from coterie.client.task import Task
from coterie.client.work import to_dict
from coterie.data.federation import Federation
from coterie.engines.base import Engine, Reply, Request
from coterie.engines.flower import wire
from coterie.engines.flower.link import Link, splits_of
from coterie.engines.ledger import Phase
from coterie.randomness import name_keys
from coterie.settings import setting, values_of

log = logging.getLogger("coterie.flower")

_CHUNK = 64  # clients per chunk


@dataclass(frozen=True)
class FlowerSettings:
    """Settings of the engine: `--set engine.FIELD=VALUE`."""

    deadline: float = setting(600.0, "seconds to wait for answers; then the round continues without the others", gt=0)
    poll: float = setting(0.05, "seconds between polls for answers", gt=0)
    precision: Literal["float32", "float64"] = setting("float32", "floating-point precision of the clients")
    cpus: int = setting(1, "CPU cores per simulated client", ge=1)


@dataclass
class Carried:
    """An evaluation on its way: the messages to clients not asked yet, and the replies of the others."""

    request: Request
    waiting: dict[str, RecordDict]
    outside: set[str]  # clients that the round does not ask: their messages hold nothing else
    replies: dict[str, RecordDict | str] = field(default_factory=dict)  # or the reason of a failure

    def is_of(self, request: Request) -> bool:
        """Whether it is the evaluation that the request asks for."""
        return (self.request.name, self.request.rng.key) == (request.name, request.rng.key)

    def taken(self, names: Iterable[str]) -> dict[str, RecordDict]:
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
        found, gradients, refused = self._collect(self._replies(request, names), request)
        failed = tuple((names[client], reason) for client, reason in refused.items())
        good = [client for client in names if client in found]
        for some in [good[i : i + _CHUNK] for i in range(0, len(good), _CHUNK)] or [[]]:
            rows = [found.pop(client) for client in some]
            answer = Answer(**{key: torch.cat([row[key] for row in rows]) for key in (rows or [{}])[0]})
            yield Reply(torch.tensor([names[c] for c in some], dtype=torch.int64), answer, failed, gradients)
            failed, gradients = (), 0

    def _names(self, request: Request, positions: Tensor) -> dict[str, int]:
        """The clients at these positions of the cohort: their names and positions."""
        return {self.names[int(request.cohort[position])]: position for position in positions.tolist()}

    def _replies(self, request: Request, names: Mapping[str, int]) -> Iterator[tuple[str, RecordDict | str]]:
        """The replies of these clients to a request as they arrive, or the reasons of failures."""
        carried = self._carried
        if carried is not None and carried.is_of(request):
            self._carried = None
            yield from carried.replies.items()
            yield from self._exchange(carried.waiting, "evaluate")
            return
        contents = self._messages(request, names, self.round, self.phase)
        if carried is None or self.phase == "evaluate":
            yield from self._exchange(contents, self.phase)
            return
        first = carried.taken(names)
        for name, reply in self._exchange(
            {name: wire.joined(content, first.get(name)) for name, content in contents.items()},
            self.phase,
            carried.taken(carried.outside),
        ):
            main, evaluation = (reply, reply) if isinstance(reply, str) else wire.parted(reply)
            if name in first:
                carried.replies[name] = wire.failure("sent no scores") if evaluation is None else evaluation
            elif name not in contents:
                carried.replies[name] = main
            if name in contents:
                yield name, main

    def _exchange(
        self, contents: Mapping[str, RecordDict], phase: Phase, outside: Mapping[str, RecordDict] | None = None
    ) -> Iterator[tuple[str, RecordDict | str]]:
        """Send each client its message, and other clients an evaluation at the same time; yields the replies."""
        kind = "evaluate" if phase == "evaluate" else "train"
        messages = {name: (kind, content) for name, content in contents.items()}
        messages |= {name: ("evaluate", content) for name, content in (outside or {}).items()}
        up = 0
        for name, reply in self.link.ask(messages, self.settings.deadline):
            up += 0 if isinstance(reply, str) else wire.size_of(reply)
            log.debug("round %d: %s answered", self.round, name)
            yield name, reply
        if messages:
            down = sum(wire.size_of(content) for _, content in messages.values())
            self.ledger.record_wire(phase, len(messages), down, up)

    def _messages(self, request: Request, names: Mapping[str, int], round: int, phase: Phase) -> dict[str, RecordDict]:
        """One message per client, by name; messages share one record per distinct model."""
        models, refs = request.models, request.refs
        records: dict[int, tuple[str, ArrayRecord]] = {}
        payload = wire.record_of(request.payload) if request.payload else None
        contents = {}
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
            )
            mine = {key: value[position : position + 1] for key, value in request.each.items()}
            contents[client] = wire.request(call, dict(sent), payload, mine)
        return contents

    def _collect(
        self, replies: Iterator[tuple[str, RecordDict | str]], request: Request
    ) -> tuple[dict[str, dict[str, Tensor]], int, dict[str, str]]:
        """Answers by client, the gradients they took, and the reasons of rejected clients."""
        models, refs = request.models, request.refs
        size = self.task.layout.size if models is None else models.shape[1]  # methods may send a part of the model
        count = refs.shape[1] if refs is not None and refs.dim() == 2 else 1
        most = 4 * max(count * max(size, self.task.layout.size) * self.dtype.itemsize, 1 << 20)
        found: dict[str, dict[str, Tensor]] = {}
        refused: dict[str, str] = {}
        gradients = 0
        for client, reply in replies:
            if isinstance(reply, str):
                refused[client] = reply
                continue
            try:
                found[client], taken = wire.read_answer(reply, most)
                gradients += taken
            except wire.Refused as error:
                refused[client] = str(error)
        for client in self._inconsistent(found, size, count):
            refused[client] = "answered in another shape than the others"
            del found[client]
        return found, gradients, refused

    def _inconsistent(self, found: Mapping[str, Mapping[str, Tensor]], size: int, count: int) -> list[str]:
        """Clients with models of the wrong length, or with other keys, types or shapes than most answers.

        A client answers with one model of this size, or with as many as it was sent.
        """
        forms = {
            client: tuple(sorted((key, str(t.dtype), tuple(t.shape)) for key, t in answer.items()))
            for client, answer in found.items()
        }
        right = ((size,), (count, size))
        wrong = [c for c, answer in found.items() if "params" in answer and answer["params"].shape[1:] not in right]
        counts = Counter(form for client, form in forms.items() if client not in wrong)
        if not counts:
            return wrong
        usual = min(counts, key=lambda form: (-counts[form], form))
        return wrong + [client for client, form in forms.items() if client not in wrong and form != usual]
