"""The engine whose clients are Flower nodes: implements `coterie.engines.base` with messages.

Each client of a call gets one message; messages share model records, so that Flower stores each distinct model
once. A call ends when all clients have answered, or at its deadline; clients that have not answered have failed.
Every answer is checked before it is used: its size before it is unpacked, then its types and shapes.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
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


class FlowerEngine(Engine):
    """Runs client steps on Flower nodes."""

    name = "flower"

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
        self.life, self.past = uuid.uuid4().hex, dict(past or {})
        if federation.reserved is not None:
            x, y = federation.reserved_samples()
            self.reserved = (x.to(self.dtype), y)

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

    def ask(self, request: Request, positions: Tensor) -> Iterator[Reply]:
        """Send one message per client; yields answers in the order of the cohort."""
        names = {self.names[int(request.cohort[position])]: position for position in positions.tolist()}
        found, gradients, refused = self._collect(self._messages(request, names), request)
        failed = tuple((names[client], reason) for client, reason in refused.items())
        good = [client for client in names if client in found]
        for some in [good[i : i + _CHUNK] for i in range(0, len(good), _CHUNK)] or [[]]:
            rows = [found.pop(client) for client in some]
            answer = Answer(**{key: torch.cat([row[key] for row in rows]) for key in (rows or [{}])[0]})
            yield Reply(torch.tensor([names[c] for c in some], dtype=torch.int64), answer, failed, gradients)
            failed, gradients = (), 0

    def _messages(self, request: Request, names: Mapping[str, int]) -> dict[str, RecordDict]:
        """One message per client, by name; messages share one record per distinct model."""
        models, refs = request.models, request.refs
        records: dict[int, ArrayRecord] = {}
        payload = wire.record_of(request.payload) if request.payload else None
        contents = {}
        for client, position in names.items():
            sent: list[ArrayRecord] = []
            if models is not None and refs is not None:
                for row in refs[position].reshape(-1).tolist():
                    if row not in records:
                        records[row] = wire.record_of({"params": models[row].to(self.dtype)})
                    sent.append(records[row])
            call = wire.Call(
                step=request.name,
                client=client,
                round=self.round,
                phase=self.phase,
                key=request.rng.key,
                seed=self.task.seed,
                work=to_dict(request.work),
                models=None if models is None else len(sent),
                several=refs is not None and refs.dim() == 2,
                run=self._run,
                life=self.life,
                past=self.past,
                precision=self.settings.precision,
            )
            mine = {key: value[position : position + 1] for key, value in request.each.items()}
            contents[client] = wire.request(call, sent, payload, mine)
        return contents

    def _collect(
        self, contents: Mapping[str, RecordDict], request: Request
    ) -> tuple[dict[str, dict[str, Tensor]], int, dict[str, str]]:
        """Answers by client, the gradients they took, and the reasons of rejected clients."""
        models, refs = request.models, request.refs
        size = self.task.layout.size if models is None else models.shape[1]  # methods may send a part of the model
        count = refs.shape[1] if refs is not None and refs.dim() == 2 else 1
        most = 4 * max(count * max(size, self.task.layout.size) * self.dtype.itemsize, 1 << 20)
        kind = "evaluate" if self.phase == "evaluate" else "train"
        found: dict[str, dict[str, Tensor]] = {}
        refused: dict[str, str] = {}
        gradients = up = 0
        for client, reply in self.link.ask(contents, kind, self.settings.deadline):
            if isinstance(reply, str):
                refused[client] = reply
                continue
            try:
                up += wire.size_of(reply)
                found[client], taken = wire.read_answer(reply, most)
                gradients += taken
                log.debug("round %d: %s answered", self.round, client)
            except wire.Refused as error:
                refused[client] = str(error)
        down = sum(wire.size_of(content) for content in contents.values())
        self.ledger.record_wire(self.phase, down, up)
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
