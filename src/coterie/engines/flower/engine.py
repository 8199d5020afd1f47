"""The engine whose clients are nodes of Flower: the contract of `coterie.engines.base` over messages.

Every client of a call gets one message; records of models are shared between messages, so that Flower holds each
distinct model once. A call ends when all have answered or at its deadline; who has not answered has failed. Every
answer is checked before it is used: its size before it is unpacked, then its types and shapes, then its numbers.
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

from coterie.client.block import Answer, ClientStep, Models, Task, step_name
from coterie.client.work import SGD, to_dict
from coterie.data.federation import Federation
from coterie.engines.base import Chunk, Engine, Failure, unusable
from coterie.engines.flower import wire
from coterie.engines.flower.link import Link, splits_of
from coterie.errors import ConfigError, EngineError
from coterie.randomness import Rng, name_keys
from coterie.settings import setting, values_of

log = logging.getLogger("coterie.flower")

_AT_ONCE = 64  # clients of a chunk


@dataclass(frozen=True)
class FlowerSettings:
    """Settings of the engine `flower`: `--set engine.FIELD=VALUE`."""

    deadline: float = setting(
        600.0, "seconds that clients have for one call; then the round goes on without them", gt=0
    )
    poll: float = setting(0.05, "seconds between two looks for answers", gt=0)
    precision: Literal["float32", "float64"] = setting("float32", "arithmetic of the clients")
    cpus: int = setting(1, "cores that a simulated client takes while it works", ge=1)


class FlowerEngine(Engine):
    """Runs client steps at nodes of Flower."""

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
        super().__init__(task, federation.names, federation.keys)
        self.federation = federation
        self.settings, self.link = settings, link
        self._run = run
        self.life, self.past = uuid.uuid4().hex, dict(past or {})
        self._dtype = torch.float64 if settings.precision == "float64" else torch.float32
        if federation.reserved is not None:
            x, y = federation.reserved_samples()
            self.reserved = (x.to(self._dtype), y)

    @property
    def device(self) -> torch.device:
        """The server's CPU."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The float type of models."""
        return self._dtype

    def describe(self) -> dict[str, Any]:
        """What was chosen."""
        return {"engine": self.name, "device": "cpu", **values_of(self.settings)}

    def memory_budget(self) -> int:
        """1 GB beside the centers."""
        return 1 << 30

    def memory_tensors(self) -> dict[str, Tensor]:
        """What clients remember is on their own disks."""
        return {}

    def load_memory(self, tensors: Mapping[str, Tensor]) -> None:
        """See `memory_tensors`."""

    # ---- clients that come ----

    def welcome(self) -> int:
        """Take in clients that have come since; how many there are."""
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
        """See `Engine.call`."""
        if (models is None) != (refs is None):
            raise ConfigError("models and refs go together: a table [M, P] and the rows each client gets.")
        shared, own, name = dict(payload or {}), dict(each or {}), step_name(step)
        self.ledger.record_down(self.phase, name, cohort, self.num_clients, models, refs, shared, own)
        began = time.perf_counter()
        late = self.is_late(name, cohort)
        failed = [self._fail(int(client), name, "did not answer (simulated)") for client in cohort[late].tolist()]
        positions = (~late).nonzero().flatten().tolist()
        contents = self._requests(name, cohort, positions, rng, models, refs, shared, own, work or self.task.work)
        found, gradients, refused = self._collect(contents, models)
        for client_name, reason in refused.items():
            failed.append(self._fail(self.names.index(client_name), name, reason))
        self.ledger.record_work(self.phase, name, gradients)
        self.client_seconds += time.perf_counter() - began
        good = [position for position in positions if self.names[int(cohort[position])] in found]
        for some in [good[i : i + _AT_ONCE] for i in range(0, len(good), _AT_ONCE)]:
            where = torch.tensor(some)
            rows = [found.pop(self.names[int(cohort[position])]) for position in some]
            answer = Answer(**{key: torch.cat([row[key] for row in rows]) for key in rows[0]})
            chunk = self._checked(name, cohort, where, answer, models, refs, rng)
            chunk = replace(chunk, failed=(*failed, *chunk.failed))
            failed = []
            if len(chunk.clients):
                self.ledger.record_up(self.phase, name, chunk.answer.values())
                yield chunk
        if len(cohort) and not good:
            self.notes.append(f"round {self.round}: no client could do {name.rpartition(':')[2]}")

    def _requests(
        self,
        name: str,
        cohort: Tensor,
        positions: list[int],
        rng: Rng,
        models: Tensor | None,
        refs: Tensor | None,
        shared: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        work: SGD,
    ) -> dict[str, RecordDict]:
        """One message a client; each distinct model is one record that messages share."""
        records: dict[int, ArrayRecord] = {}
        payload = wire.record_of(shared) if shared else None
        contents = {}
        for position in positions:
            sent: list[ArrayRecord] = []
            if models is not None and refs is not None:
                for row in refs[position].reshape(-1).tolist():
                    if row not in records:
                        records[row] = wire.record_of({"params": models[row].to(self._dtype)})
                    sent.append(records[row])
            call = wire.Call(
                step=name,
                client=self.names[int(cohort[position])],
                round=self.round,
                phase=self.phase,
                key=rng.key,
                seed=self.task.seed,
                work=to_dict(work),
                models=None if models is None else len(sent),
                several=refs is not None and refs.dim() == 2,
                run=self._run,
                life=self.life,
                past=self.past,
                precision=self.settings.precision,
                extra={"world": self.link.world} if self.link.world else {},
            )
            mine = {key: value[position : position + 1] for key, value in own.items()}
            contents[call.client] = wire.request(call, sent, payload, mine)
        return contents

    def _collect(
        self, contents: Mapping[str, RecordDict], models: Tensor | None
    ) -> tuple[dict[str, dict[str, Tensor]], int, dict[str, str]]:
        """Answers by name, the gradients they took, and who is refused for what."""
        most = 4 * max(self.task.layout.size * self._dtype.itemsize, 1 << 20)
        if models is not None:
            most = max(most, 4 * models.shape[1] * self._dtype.itemsize)
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
        for client in self._odd(found):
            refused[client] = "answered in another shape than the others"
            del found[client]
        return found, gradients, refused

    def _odd(self, found: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
        """Clients whose answers are not of the form that most have; models must have the right length."""
        forms = {
            client: tuple(sorted((key, str(t.dtype), tuple(t.shape)) for key, t in answer.items()))
            for client, answer in found.items()
        }
        size = self.task.layout.size
        wrong = [c for c, answer in found.items() if "params" in answer and answer["params"].shape[1:] != (size,)]
        counts = Counter(form for client, form in forms.items() if client not in wrong)
        if not counts:
            return wrong
        usual = min(counts, key=lambda form: (-counts[form], form))
        return wrong + [client for client, form in forms.items() if client not in wrong and form != usual]

    def _checked(
        self,
        name: str,
        cohort: Tensor,
        positions: Tensor,
        answer: Answer,
        models: Tensor | None,
        refs: Tensor | None,
        rng: Rng,
    ) -> Chunk:
        """Leave out answers that are not finite or far too large; simulated attacks happen on the way."""
        clients = cohort[positions]
        sent = None if models is None or refs is None else Models(models, refs[positions])
        if self.attack is not None and self.phase != "evaluate":
            answer = self.attack.on_answer(answer, clients, self.keys[clients], sent, rng)
        longest = None
        if sent is not None:
            lengths = torch.linalg.vector_norm(sent.table, dim=1)
            longest = lengths[sent.refs].reshape(len(clients), -1).amax(1)
        reasons = unusable(answer, len(clients), longest)
        good = ~torch.stack(list(reasons.values())).any(0)
        failed = [self._fail(c, name, why) for why, which in reasons.items() for c in clients[which].tolist()]
        kept = Answer(**{key: tensor[good] for key, tensor in answer.items()})
        return Chunk(clients[good], positions[good], kept, tuple(failed))

    def _fail(self, client: int, step: str, reason: str) -> Failure:
        failure = Failure(self.round, self.names[client], step, reason)
        self.failures.append(failure)
        log.info("round %d: %s failed at %s: %s", self.round, failure.client, step.rpartition(":")[2], reason)
        return failure


def require_maker(task: Task) -> Any:
    """How the task's network is made, for clients in other processes."""
    if task.make is None:
        raise EngineError("engine flower needs a task that says how its network is made (Task.made).")
    return task.make
