"""The engine whose workers are Ray actors: each holds a part of the clients and runs a vectorized engine over it.

A call sends each worker the models that its clients get, once, and asks it for chunks of answers. The chunks are
taken from the workers in turns, so that results do not depend on who was faster. If a worker dies, its clients that
have not answered fail in that call. It is started again with their data and with what they remembered when the memory
was last collected, which is at least as recent as the last checkpoint.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from torch import Tensor

from coterie.client.optimizers import optimizers
from coterie.client.steps import Answer
from coterie.client.task import Task, check_network
from coterie.data.federation import Federation
from coterie.engines.base import Engine, Reply, Request, resolve_device
from coterie.engines.ray.cluster import connect
from coterie.engines.ray.parts import arrays_of, divide, in_turns, joined, tensors_of
from coterie.engines.ray.worker import Message, Part, Setup, Worker
from coterie.engines.settings import EngineSettings, RaySettings
from coterie.errors import ConfigError, CoterieError, EngineError
from coterie.nets.flat import Network
from coterie.settings import build, fields_of, values_of

_AHEAD = 2  # chunks that a worker is asked for before the server has taken them
_START = 300.0  # seconds to wait for a worker to start


class _Gone(Exception):
    """A worker cannot answer: its process or its machine is gone, or it has not started yet."""


@dataclass
class _Seat:
    """The place of one worker, which may be taken by a new process."""

    number: int
    clients: slice
    actor: Any = None
    loading: Any = None  # the future of `Worker.load`; None: it has its data
    patience: float = _START  # seconds to wait for it
    process: str = "not started yet"  # for messages


class RayEngine(Engine):
    """Runs client steps on Ray workers."""

    name = "ray"

    def __init__(
        self, task: Task, federation: Federation, *, device: str = "auto", settings: Mapping[str, Any] | None = None
    ) -> None:
        chosen = build(RaySettings, settings or {}, "engine")
        if device.startswith("cuda"):  # the GPUs may be on other machines only
            server = torch.device(device if torch.cuda.is_available() else "cpu")
        else:
            server = resolve_device(device)
        dtype = torch.float64 if chosen.precision == "float64" else torch.float32
        super().__init__(task, federation.names, federation.keys, server, dtype)
        check_network(Network(task.module, dtype, server), task, federation)
        if (chosen.workers or 1) > len(federation):
            raise ConfigError(
                f"engine.workers={chosen.workers} is more than the {len(federation)} clients; use at most one each."
            )
        self.federation = federation
        self._place = connect(chosen, device, federation.x.nbytes + federation.y.nbytes)
        self._place = replace(self._place, workers=min(self._place.workers, len(federation)))
        here = ray.util.get_node_ip_address()
        if chosen.address is None and not ipaddress.ip_address(here).is_loopback:
            self.notes.append(f"Ray listens on {here}, not on loopback only")
        # The workers' own setting of that name is the number of threads.
        inner = {name: value for name, value in values_of(chosen).items() if name in fields_of(EngineSettings)}
        self._inner = inner | {"workers": self._place.cpus}
        self._kept: dict[str, Tensor] = {}  # what the clients remembered, [N, ...]
        self._kept_round = 0
        self._calls = itertools.count()
        parts = divide(federation.train.sizes, self._place.workers)
        self._seats = [_Seat(number, clients) for number, clients in enumerate(parts)]
        self._owner = torch.zeros(len(federation), dtype=torch.int64)  # [N]
        for seat in self._seats:
            self._owner[seat.clients] = seat.number
        self._plan = self._start_all()
        if federation.reserved is not None:
            x, y = federation.reserved_samples()
            x = x if task.integers else x.to(self.dtype)
            self.reserved = (x.to(self.device), y.to(self.device))

    # ---- workers ----

    def _start_all(self) -> dict[str, Any]:
        """Start all workers. The one with most clients chooses the plan, the others take it; returns what it chose."""
        seats = sorted(self._seats, key=lambda seat: seat.clients.start - seat.clients.stop)
        for seat in seats:
            self._start(seat)
        plan: dict[str, Any] = {}
        for some in (seats[:1], seats[1:]):
            for seat in some:
                self._load(seat)
            for seat in some:
                try:
                    told = self._loaded(seat)
                except (_Gone, GetTimeoutError) as error:
                    late = f"no machine has had room for it in {_START:g} s; use fewer with --set engine.workers=N."
                    reason = late if isinstance(error, GetTimeoutError) else error
                    raise EngineError(f"Ray worker {seat.number} did not start: {reason}") from error
                plan = plan or told["plan"]
            self._inner |= {key: plan[key] for key in ("plan", "piece", "memory", "precision")}
        return plan

    def _start(self, seat: _Seat) -> None:
        """Start the process of a worker."""
        seat.actor = ray.remote(Worker).options(**self._place.options()).remote(self._place.cpus)

    def _load(self, seat: _Seat) -> None:
        """Send a worker its clients and what they remember; `_loaded` waits until it has them."""
        share = self.federation.share(torch.arange(seat.clients.start, seat.clients.stop))
        empty = replace(share, x=share.x[:0], y=share.y[:0])
        setup = Setup(self.task, empty, self._place.device, self._inner, optimizers(), self.round)
        memory = arrays_of(self._kept_by(seat))
        seat.loading = seat.actor.load.remote(setup, share.x.numpy(), share.y.numpy(), memory)
        seat.patience = _START

    def _loaded(self, seat: _Seat) -> dict[str, Any]:
        """Wait until a worker has its data."""
        told: dict[str, Any] = self._get(seat.loading, seat.patience)
        seat.loading, seat.process = None, f"process {told['pid']} on {told['host']}"
        self._add_notes(told["notes"])
        return told

    def _wait_for(self, seat: _Seat) -> None:
        """Wait for a worker that was started again, but only once; raises _Gone if it has no data yet."""
        if seat.loading is None:
            return
        try:
            self._loaded(seat)
        except GetTimeoutError:
            seat.patience = 0.0
            raise _Gone("no machine has room for a new one") from None
        except (CoterieError, _Gone) as error:
            self._restart(seat, seat.actor)
            raise _Gone(str(error)) from error

    def _restart(self, seat: _Seat, actor: Any) -> None:
        """Replace a dead worker, unless that has been done."""
        if seat.actor is not actor:
            return
        self._add_notes(
            [
                f"round {self.round}: Ray worker {seat.number} ({seat.process}) died and was started again; "
                f"what its clients remember is that of round {self._kept_round}"
            ]
        )
        ray.kill(actor)
        self._start(seat)
        self._load(seat)

    def _get(self, future: Any, timeout: float | None = None) -> Any:
        """The result of a worker; raises _Gone if the worker is gone, or what the worker raised."""
        try:
            return ray.get(future, timeout=timeout)
        except RayTaskError as error:
            if isinstance(error.cause, CoterieError):
                raise error.cause from None
            raise EngineError(f"A Ray worker failed: {type(error.cause).__name__}: {error.cause}") from error
        except GetTimeoutError:
            raise
        except RayError as error:
            raise _Gone(str(error).splitlines()[0]) from error

    def _add_notes(self, notes: Any) -> None:
        self.notes += [note for note in notes if note not in self.notes]

    # ---- calls ----

    def ask(self, request: Request, positions: Tensor) -> Iterator[Reply]:
        """One message per worker, then its chunks; the chunks of different workers in turns."""
        number = next(self._calls)
        owner = self._owner[request.cohort[positions]]
        tables: dict[bytes, Any] = {}
        payload = ray.put(arrays_of(request.payload))
        streams: dict[int, Iterator[Reply]] = {}
        for seat in sorted(self._seats, key=lambda seat: seat.loading is not None):  # wait for new workers last
            mine = positions[owner == seat.number]
            if len(mine):
                streams[seat.number] = self._ask_worker(seat, number, request, mine, tables, payload)
        actors = [self._seats[place].actor for place in streams]
        try:
            yield from in_turns(streams[place] for place in sorted(streams))
        finally:
            for actor in actors:
                actor.end.remote(number)

    def _ask_worker(
        self, seat: _Seat, number: int, request: Request, mine: Tensor, tables: dict[bytes, Any], payload: Any
    ) -> Iterator[Reply]:
        """Ask a worker's clients at these positions; the request is sent before the first reply is read."""
        try:
            self._wait_for(seat)
        except _Gone as error:
            return iter([self._failed(seat, error, mine.tolist())])
        models = refs = None
        if request.models is not None and request.refs is not None:
            rows, refs = request.refs[mine.to(request.refs.device)].cpu().unique(return_inverse=True)
            key = rows.numpy().tobytes()
            if key not in tables:  # workers that need the same rows share them
                tables[key] = ray.put(arrays_of({"models": request.models[rows.to(request.models.device)]})["models"])
            models = tables[key]
        message = Message(
            request.step,
            (request.cohort[mine] - seat.clients.start).numpy(),
            request.rng.key,
            request.work,
            None if refs is None else refs.numpy(),
            arrays_of({name: rows[mine.to(rows.device)] for name, rows in request.each.items()}),
            self.round,
            self.phase,
        )
        futures = deque([seat.actor.begin.remote(number, message, models, payload)])
        futures.extend(seat.actor.next.remote(number) for _ in range(_AHEAD - 1))
        return self._replies(seat, seat.actor, number, futures, mine)

    def _replies(self, seat: _Seat, actor: Any, number: int, futures: deque[Any], mine: Tensor) -> Iterator[Reply]:
        """The chunks of one worker; if it dies, the clients that have not answered fail."""
        waiting = dict.fromkeys(mine.tolist())
        try:
            while (part := self._get(futures.popleft())) is not None:
                futures.append(actor.next.remote(number))
                reply = self._reply(part, mine)
                for position in (*reply.positions.tolist(), *(position for position, _ in reply.failed)):
                    waiting.pop(position, None)
                yield reply
        except _Gone as error:
            reply = self._failed(seat, error, list(waiting))
            self._restart(seat, actor)
            yield reply

    def _failed(self, seat: _Seat, error: _Gone, positions: list[int]) -> Reply:
        """Clients that have not answered because their worker is gone."""
        reason = f"Ray worker {seat.number} ({seat.process}) died: {str(error).rstrip('.')}"
        return Reply(torch.zeros(0, dtype=torch.int64), Answer(), tuple((place, reason) for place in positions))

    def _reply(self, part: Part, mine: Tensor) -> Reply:
        """A chunk with the positions of the whole cohort."""
        self._add_notes(part.notes)
        failed = tuple((int(mine[place]), reason) for place, reason in part.failed)
        answer = Answer(**tensors_of(part.answer, self.device))
        return Reply(mine[torch.tensor(part.positions)], answer, failed, part.gradients)

    # ---- what the run writes ----

    def describe(self) -> dict[str, Any]:
        """See `Engine.describe`: what the workers' engines chose, and the workers."""
        place = self._place
        return self._plan | {"engine": self.name, "workers": place.workers, "cpus": place.cpus, "gpus": place.gpus}

    def remember(self, plan: Mapping[str, Any]) -> None:
        """Restore the measurements by which the plan was chosen."""
        self._plan |= {"measured": plan["measured"]} if "measured" in plan else {}

    def memory_budget(self) -> int:
        """Bytes that one chunk of a worker may use."""
        return int(self._plan["memory"]) << 20

    def memory_tensors(self) -> dict[str, Tensor]:
        """What the clients of all workers remember, in the format of the engines in this process."""
        found: dict[int, Mapping[str, Tensor]] = {}
        asked = []
        for seat in self._seats:
            found[seat.number] = self._kept_by(seat)
            with contextlib.suppress(_Gone):
                self._wait_for(seat)
                asked.append((seat, seat.actor, seat.actor.memory.remote()))
        for seat, actor, future in asked:
            try:
                found[seat.number] = tensors_of(self._get(future), torch.device("cpu"))
            except _Gone:
                self._restart(seat, actor)
        self._kept = joined([(seat.clients, found[seat.number]) for seat in self._seats], self.num_clients)
        self._kept_round = self.round
        return dict(self._kept)

    def _kept_by(self, seat: _Seat) -> dict[str, Tensor]:
        return {name: rows[seat.clients] for name, rows in self._kept.items()}

    def load_memory(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Engine.load_memory`."""
        self._kept = {name: tensor.cpu() for name, tensor in tensors.items()}
        self._kept_round = self.round
        for seat in self._seats:
            actor = seat.actor
            try:
                self._wait_for(seat)
                self._get(actor.remember.remote(arrays_of(self._kept_by(seat))))
            except _Gone:
                self._restart(seat, actor)  # the new one gets it with its data
