"""The contract between a method and the engine that runs its clients.

A method makes one kind of request, `engine.call(step, cohort, ...)`, and reads the answers chunk by chunk. It does not
know whether clients are rows of a tensor or remote machines. `call` is written once, here: ledger, simulated dropout
and attacks, checks of the answers, failures. An engine implements `ask`: how clients run a step.
"""

from __future__ import annotations

import abc
import functools
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from coterie.client.block import Models
from coterie.client.forms import VALID
from coterie.client.privacy import Released
from coterie.client.steps import Answer, ClientStep, require_step, step_name
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.data.federation import Federation
from coterie.engines.attacks import Attack
from coterie.engines.forward import Forward
from coterie.engines.ledger import Ledger, Phase
from coterie.errors import ConfigError, EngineError, MethodError
from coterie.nets.flat import Network
from coterie.randomness import Rng, uniform

log = logging.getLogger("coterie.engines")

LATE = "did not answer (simulated)"
LARGEST = 100.0  # times the norm of the model that was sent: larger answers are refused


@dataclass(frozen=True)
class Failure:
    """A client that did not answer a call, or whose answer is unusable."""

    round: int
    client: str
    step: str
    reason: str


@dataclass(frozen=True)
class Chunk:
    """Answers of some clients of a cohort, without those that failed."""

    clients: Tensor  # int64 [c] ids, on the CPU
    positions: Tensor  # int64 [c] places in the cohort, on the CPU
    answer: Answer  # tensors [c, ...] on the engine's device
    failed: tuple[Failure, ...] = ()  # since the last chunk


@dataclass(frozen=True)
class Request:
    """One call, as an engine's `ask` gets it."""

    step: ClientStep
    cohort: Tensor  # int64 [C] client ids
    rng: Rng
    work: SGD
    models: Tensor | None = None  # [M, P]
    refs: Tensor | None = None  # rows of `models`: [C] or [C, m]
    payload: Mapping[str, Tensor] = field(default_factory=dict)  # the same for all clients
    each: Mapping[str, Tensor] = field(default_factory=dict)  # one row [C, ...] per client

    @property
    def name(self) -> str:
        """The name of the step in messages."""
        return step_name(self.step)

    def sent(self, positions: Tensor, device: torch.device) -> Models | None:
        """The models for the clients at these positions of the cohort."""
        if self.models is None or self.refs is None:
            return None
        return Models(self.models, self.refs[positions].to(device))


@dataclass(frozen=True)
class Reply:
    """What `ask` yields: answers of some clients, and failures of others."""

    positions: Tensor  # int64 [c] places in the cohort, on the CPU
    answer: Answer  # tensors [c, ...] on the engine's device
    failed: tuple[tuple[int, str], ...] = ()  # position, reason
    gradients: int = 0  # per-sample gradients computed


class Engine(abc.ABC):
    """Runs client steps on cohorts of clients."""

    remembers = True  # whether `memory_tensors` has what the clients remember
    carries = False  # whether the messages of a round can carry the evaluation of the round before: see `carry`

    def __init__(
        self, task: Task, names: tuple[str, ...], keys: Tensor, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.task = task
        self.names = names
        self.keys = keys  # int64 [N]: the clients' random keys
        self.device, self.dtype = device, dtype  # of models and answers
        self.ledger = Ledger()
        self.released = Released()  # what clients have sent with and without noise, if updates are clipped
        self.failures: list[Failure] = []
        self.notes: list[str] = []  # decisions of the engine that the user should know
        self.round = 0
        self.phase: Phase = "start"
        self.reserved: tuple[Tensor, Tensor] | None = None  # the server's own samples: inputs, labels
        self.participation = 1.0  # the share of the clients that a call may ask
        self.dropout = 0.0  # simulated: the probability that a client does not answer a call
        self.dropout_rng = Rng.seed(0)
        self.attack: Attack | None = None  # simulated
        self.client_seconds = 0.0  # time that clients have worked so far; the rest of a round is the server's

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.names)

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
        """Run `step` at every client of `cohort` (ids [C]), and yield the answers as they arrive.

        `models` is a table [M, P]; `refs` are the rows for each client: [C] one each, [C, m] several.
        `payload` is the same small tensors for all, `each` has one row [C, ...] per client.
        The same call with the same `rng` gives the same answers.
        """
        return self.answers(self.request(step, cohort, rng, models, refs, payload, each, work))

    def answers(self, request: Request) -> Iterator[Chunk]:
        """The answers to a request; see `call`."""
        cohort, models, refs = request.cohort, request.models, request.refs
        if models is not None and refs is not None:
            self.ledger.record_models(self.phase, request.name, cohort, self.num_clients, models, refs)
        self.ledger.record_payload(self.phase, request.name, len(cohort), request.payload, request.each)
        # Late clients have received what was sent. They fail before they work, so their memory is unchanged.
        late = self.is_late(request)
        failed = [self._fail(request, position, LATE) for position in late.nonzero().flatten().tolist()]
        lengths = None if models is None else torch.linalg.vector_norm(models, dim=1)  # [M]
        answered = False
        replies = self._timed(request, (~late).nonzero().flatten())
        if self.attack is not None and self.attack.needs_all_answers and self.phase != "evaluate":
            replies = iter([_as_one(list(replies))])
        for reply in replies:
            self.ledger.record_work(self.phase, request.name, reply.gradients)
            failed += [self._fail(request, position, reason) for position, reason in reply.failed]
            if self.task.work.update_clip is not None:
                lost = [int(cohort[position]) for position, _ in reply.failed]
                self.released.record(reply.answer, cohort[reply.positions].tolist(), lost, self.phase == "evaluate")
            if not len(reply.positions):
                continue
            chunk = self._accepted(request, reply, lengths, failed)
            if len(chunk.clients):
                answered, failed = True, []
                told = [values for name, values in chunk.answer.items() if not name.startswith(VALID)]
                self.ledger.record_up(self.phase, request.name, told)
                yield chunk
        if len(cohort) and not answered and not any("no client could do" in old for old in self.notes):
            reason = failed[0].reason if failed else "no answer"
            hint = "; is lr too large?" if reason in (NOT_FINITE, TOO_LARGE) else ""
            self.notes.append(f"round {self.round}: no client could do {plain_name(request.name)} ({reason}){hint}")

    def request(
        self,
        step: ClientStep,
        cohort: Tensor,
        rng: Rng,
        models: Tensor | None = None,
        refs: Tensor | None = None,
        payload: Mapping[str, Tensor] | None = None,
        each: Mapping[str, Tensor] | None = None,
        work: SGD | None = None,
    ) -> Request:
        """The request of a call with these arguments."""
        require_step(step)
        if (models is None) != (refs is None):
            raise ConfigError("models and refs must be given together: a table [M, P] and the rows for each client.")
        if models is not None and refs is not None and refs.numel():
            least, most = int(refs.min()), int(refs.max())
            if least < 0 or most >= len(models):  # compiled kernels read memory by them
                raise MethodError(
                    f"refs of {plain_name(step_name(step))} must be rows of models, 0 to {len(models) - 1}. "
                    f"Got {least if least < 0 else most} instead."
                )
        work, told = work or self.task.work, self.task.work
        if told.update_clip is not None:  # for every work of a method; a personal model is not noised for its owner
            is_owner = self.phase == "evaluate"
            clip, noise = (None, None) if is_owner else (told.update_clip, told.update_noise)
            work = replace(work, update_clip=clip, update_noise=noise)
        return Request(step, cohort, rng, work, models, refs, dict(payload or {}), dict(each or {}))

    def carry(self, request: Request, round: int, cohort: Tensor) -> None:
        """Announce the evaluation of an earlier round: the calls of this round to `cohort` (ids [C]) may carry it.

        `answers` of this request, at the end of the round, are then the answers that have come; others are asked.
        """
        return

    @abc.abstractmethod
    def ask(self, request: Request, positions: Tensor) -> Iterator[Reply]:
        """Run the step at the clients at these positions of the cohort; yield replies in a fixed order."""

    def _timed(self, request: Request, positions: Tensor) -> Iterator[Reply]:
        """The replies; the time spent waiting for them counts as the clients'."""
        replies = self.ask(request, positions) if len(positions) else iter(())
        while True:
            began = time.perf_counter()
            reply = next(replies, None)
            self.client_seconds += time.perf_counter() - began
            if reply is None:
                return
            yield reply

    def _accepted(self, request: Request, reply: Reply, lengths: Tensor | None, failed: list[Failure]) -> Chunk:
        """The usable answers of a reply, after simulated attacks; the other clients are added to `failed`."""
        positions, answer = reply.positions, reply.answer
        clients = request.cohort[positions]
        sent = request.sent(positions, self.device)
        if self.attack is not None and self.phase != "evaluate":
            answer = self.attack.on_answer(answer, clients, self.keys[clients], sent, request.rng)
        for key, tensor in answer.items():
            if tensor.shape[:1] != clients.shape:
                raise EngineError(
                    f"{request.name} answered '{key}' of shape {tuple(tensor.shape)} for {len(clients)} clients; "
                    "the first axis must be the clients."
                )
        longest = None
        if lengths is not None and sent is not None:
            longest = lengths[sent.refs].reshape(len(clients), -1).amax(1)
        reasons = unusable(answer, len(clients), longest)
        good = ~torch.stack(list(reasons.values())).any(0)
        if not bool(good.all()):
            for why, which in reasons.items():
                failed += [self._fail(request, position, why) for position in positions[which.cpu()].tolist()]
            positions, answer = positions[good.cpu()], Answer(**{k: v[good] for k, v in answer.items()})
        return Chunk(request.cohort[positions], positions, answer, tuple(failed))

    def _fail(self, request: Request, position: int, reason: str) -> Failure:
        failure = Failure(self.round, self.names[int(request.cohort[position])], request.name, reason)
        self.failures.append(failure)
        log.info("round %d: %s failed at %s: %s", self.round, failure.client, plain_name(request.name), reason)
        return failure

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """What the engine chose: written to the run folder, and reused on resume."""

    def remember(self, plan: Mapping[str, Any]) -> None:
        """Restore what `describe` returned when a resumed run began."""
        return

    def memory_tensors(self) -> dict[str, Tensor]:
        """Everything the clients remember, as named tensors for the checkpoint."""
        return {}

    def load_memory(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `memory_tensors` returned; clients forget everything else."""
        return

    def memory_budget(self) -> int:
        """Bytes that a method may hold at once, in addition to its centers."""
        return 1 << 30

    def welcome(self) -> int:
        """Add clients that have joined since, at the end of the list; return how many."""
        return 0

    def population(self, federation: Federation) -> Federation:
        """The federation of a run, with the clients that have joined since."""
        return federation

    def begin(self, round: int, phase: Phase) -> None:
        """Called by the round loop at the start of each phase of a round."""
        if round != self.round:
            self.ledger.begin_round()
        self.round, self.phase = round, phase

    @property
    def low_precision(self) -> bool:
        """Whether products may be computed in bfloat16."""
        return False

    @functools.cached_property
    def forward(self) -> Forward:
        """Outputs of models on the server, for methods that compare predictions."""
        network = Network(self.task.module, self.dtype, self.device)
        return Forward(network, self.task.input_shape, integers=self.task.integers, low=self.low_precision)

    def everyone(self) -> Tensor:
        """All client ids, [N]."""
        return torch.arange(self.num_clients)

    def draw(self, rng: Rng, size: int) -> Tensor:
        """A random cohort of `size` clients, ids ascending; a client's draw depends on its own key only."""
        if size >= self.num_clients:
            return self.everyone()
        draw = uniform(rng.keys(self.keys), 1)[:, 0]
        return torch.argsort(draw, stable=True)[:size].sort().values

    @property
    def cohort_size(self) -> int:
        """The number of clients in a cohort, C."""
        return max(1, round(self.participation * self.num_clients))

    def cohorts(self, clients: Tensor) -> tuple[Tensor, ...]:
        """These clients as cohorts, none of which is larger than the participation allows."""
        return tuple(clients.split(self.cohort_size))

    def is_late(self, request: Request) -> Tensor:
        """Which clients do not answer a call, bool [C]; the same if the call is repeated with the same rng.

        Only in `start` and `round`: repairs call clients that have answered, and evaluation is not part of the method.
        """
        if not self.dropout or self.phase not in ("start", "round"):
            return torch.zeros(len(request.cohort), dtype=torch.bool)
        rng = self.dropout_rng.at(self.round, request.name, request.rng.key)
        return uniform(rng.keys(self.keys[request.cohort]), 1)[:, 0] < self.dropout

    def initial(self) -> Tensor:
        """The initial weights of the run on the engine's device, [P]."""
        return self._initial

    @functools.cached_property
    def _initial(self) -> Tensor:
        return self.task.initial.to(self.device, self.dtype)

    def require_memory(self, num_bytes: int, what: str) -> None:
        """Raise ConfigError if this many bytes would not fit."""
        free = available_memory(self.device)
        if num_bytes > 0.8 * free:
            raise ConfigError(
                f"{what} needs {num_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free on {self.device}; "
                "use fewer clients or a smaller model."
            )


def _as_one(replies: list[Reply]) -> Reply:
    """The replies of a call as one."""
    some = [reply for reply in replies if len(reply.positions)]
    names = some[0].answer if some else ()
    return Reply(
        torch.cat([torch.empty(0, dtype=torch.int64), *(reply.positions for reply in some)]),
        Answer(**{name: torch.cat([reply.answer[name] for reply in some]) for name in names}),
        tuple(failure for reply in replies for failure in reply.failed),
        sum(reply.gradients for reply in replies),
    )


def plain_name(step: str) -> str:
    """The function's name in a step's name."""
    return step.rpartition(":")[2]


def too_large(length: Tensor, sent: Tensor | None) -> Tensor:
    """Which models or gradients with these norms [c] are too large to be right, bool [c].

    `sent` [c] is the norm of the model that was sent. Each client is judged by itself, so that the verdict does not
    depend on the other clients of the chunk.
    """
    limit = LARGEST * (1 + (torch.zeros_like(length) if sent is None else sent.to(length)))
    return torch.gt(length, limit)


NOT_FINITE = "the answer is not finite"
TOO_LARGE = "the answer is far too large"


def unusable(answer: Mapping[str, Tensor], count: int, sent: Tensor | None) -> dict[str, Tensor]:
    """Which of `count` clients' answers are unusable, bool [c] by reason; `sent` as in `too_large`."""
    device = next((tensor.device for tensor in answer.values()), torch.device("cpu"))
    finite = torch.ones(count, dtype=torch.bool, device=device)
    large = torch.zeros_like(finite)
    for key, tensor in answer.items():
        if key in ("params", "gradient"):
            length = torch.linalg.vector_norm(tensor.flatten(1), dim=1)  # not finite if an entry is not
            finite &= torch.isfinite(length)
            large |= too_large(length, sent)
        elif tensor.is_floating_point():
            wide = torch.promote_types(tensor.dtype, torch.float32)  # a sum of half precision overflows
            finite &= torch.isfinite(tensor.flatten(1).sum(1, dtype=wide) if tensor.dim() > 1 else tensor)
    return {NOT_FINITE: ~finite, TOO_LARGE: finite & large}


def available_memory(device: torch.device) -> int:
    """Free bytes on a device. Memory that torch keeps for later on a GPU is given back first, so that it counts."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 << 30  # unknown: assume a laptop


def resolve_device(name: str) -> torch.device:
    """The device of a `--device` value; `auto` is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be 'auto', 'cpu' or 'cuda'. Got '{name}' instead.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device '{name}' was requested, but torch sees no GPU here; use --device cpu.")
    return device
