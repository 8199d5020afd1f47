"""What the engines in this process share: chunks, client memory, out-of-memory and failures."""

from __future__ import annotations

import abc
import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.client.batches import DeviceData
from coterie.client.block import Block, Memory
from coterie.client.stack import Plan
from coterie.client.steps import Answer, answer_of
from coterie.client.task import Task, check_network
from coterie.client.work import SGD
from coterie.data.federation import Federation
from coterie.engines.base import Engine, Reply, Request, available_memory, plain_name, resolve_device
from coterie.engines.ledger import Phase
from coterie.engines.settings import EngineSettings
from coterie.errors import ConfigError, CoterieError, EngineError, described
from coterie.nets.flat import Network
from coterie.randomness import Rng
from coterie.settings import build, values_of

_DEFAULT_BUDGET_MB = 1024
_SMALL_STEP = 30_000_000  # multiplications of a batch in the forward pass; a whole step takes a core about 5 ms


@contextlib.contextmanager
def arithmetic(precision: str, device: torch.device, tuned: bool = True) -> Iterator[None]:
    """Compute float32 products in this precision; restores the previous state of torch.

    With `tuned`, cuDNN measures its algorithms for every new shape of a convolution.
    """
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            allow = precision != "float32"
            before = torch.backends.cuda.matmul.allow_tf32
            stack.callback(setattr, torch.backends.cuda.matmul, "allow_tf32", before)
            torch.backends.cuda.matmul.allow_tf32 = allow
            stack.enter_context(torch.backends.cudnn.flags(enabled=True, benchmark=tuned, allow_tf32=allow))
        if device.type == "cuda" or precision == "bf16":
            stack.enter_context(torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"))
        yield


def _joined(replies: Sequence[Reply]) -> Reply:
    """Several replies to one call as one."""
    good = [reply for reply in replies if len(reply.positions)] or list(replies[:1])
    answer = Answer(**{k: torch.cat([reply.answer[k] for reply in good]) for k in good[0].answer})
    failed = tuple(failure for reply in replies for failure in reply.failed)
    gradients = sum(reply.gradients for reply in replies)
    return Reply(torch.cat([reply.positions for reply in good]), answer, failed, gradients)


def _shared(free: int, device: torch.device) -> str | None:
    """A note if less than half of a GPU's memory is free, in MB."""
    total = torch.cuda.get_device_properties(device).total_memory >> 20
    if free >= total // 2:
        return None
    return (
        f"only {free / 1024:.1f} of {total / 1024:.0f} GB are free on {device}, so fewer clients are trained together; "
        "other programs use the rest"
    )


class _BlockMemory:
    """The memory of one block's clients: for each name a tensor [N, ...], and who has a row in it."""

    def __init__(self, tensors: dict[str, Tensor], clients: Tensor, num_clients: int) -> None:
        self._tensors, self._clients, self._num_clients = tensors, clients, num_clients

    def get(self, name: str, default: Tensor) -> Tensor:
        if f"value.{name}" not in self._tensors:
            return default
        found, present = (self._tensors[f"{kind}.{name}"][self._clients] for kind in ("value", "present"))
        if not bool(present.all()):
            found[~present] = default.expand_as(found)[~present]
        return found

    def put(self, name: str, value: Tensor) -> None:
        value = value.to(self._clients.device)
        if f"value.{name}" not in self._tensors:
            self._tensors[f"value.{name}"] = value.new_zeros(self._num_clients, *value.shape[1:])
            self._tensors[f"present.{name}"] = value.new_zeros(self._num_clients, dtype=torch.bool)
        self._tensors[f"value.{name}"][self._clients] = value
        self._tensors[f"present.{name}"][self._clients] = True


class InProcessEngine(Engine):
    """Clients are rows of one packed dataset; subclasses choose the plan and the chunk."""

    name: str

    def __init__(
        self, task: Task, federation: Federation, *, device: str = "auto", settings: Mapping[str, Any] | None = None
    ) -> None:
        place = resolve_device(device)
        cuda = place.type == "cuda"
        chosen = build(EngineSettings, settings or {}, "engine")
        shared = None
        if chosen.memory is None:  # resolved here, so that the run records it and a resumed run repeats it
            if cuda:
                gc.collect()  # an engine that was used before may still hold memory
            free = available_memory(place) >> 20
            shared = _shared(free, place) if cuda else None
            chosen = replace(chosen, memory=free // 2 if cuda else max(1, min(_DEFAULT_BUDGET_MB, free // 4)))
        if chosen.precision == "auto":
            chosen = replace(chosen, precision="tf32" if cuda else "float32")
        if chosen.precision == "tf32" and not cuda:
            raise ConfigError("engine.precision=tf32 needs a GPU; use float32 on a CPU.")
        dtype = torch.float64 if chosen.precision == "float64" else torch.float32
        super().__init__(task, federation.names, federation.keys, place, dtype)
        self.notes += [] if shared is None else [shared]
        self.settings, self.federation = chosen, federation
        self.network = Network(task.module, self.dtype, self.device)
        check_network(self.network, task, federation)
        self.data = DeviceData(federation, self.device, self.dtype, self._may_render(), task.integers)
        self._memory: dict[str, Tensor] = {}  # what the clients remember
        self._itemsize = self.dtype.itemsize
        # Some algorithms for depthwise convolutions are so slow that measuring them takes half a minute.
        self._tuned = all(getattr(layer, "groups", 1) == 1 for layer in self.network.module.modules())
        sample = self.network.inputs(federation.samples(0)[0][:1])
        self._activations = self.network.activation_size(sample)
        self._multiplications = self.network.multiplications(sample)
        # Half of the budget is left for the models. Evaluation keeps only a few layers alive at a time. A GPU needs
        # many samples at once, or it waits for the host; on a CPU small pieces stay in the caches.
        alive = 8 * self.network.largest_output(sample) if cuda else 3 * self._activations
        per_sample = min(alive, 3 * self._activations) * self._itemsize
        self._samples_at_once = int(min(max(1, self.memory_budget() // 2 // per_sample), 8192))
        kept = 4 * self._activations * self._itemsize  # of a sample, for the backward pass
        self._gradients_at_once = int(min(max(1, self.memory_budget() // 2 // kept), self._samples_at_once))
        self._most = len(federation)  # clients per chunk; fewer after running out of memory
        self.plan = self.make_plan()
        if federation.reserved is not None:
            x, y = federation.reserved_samples()
            self.reserved = (self.network.inputs(x), y.to(self.device))

    def begin(self, round: int, phase: Phase) -> None:
        """See `Engine.begin`; clients that drift take their views of this round."""
        super().begin(round, phase)
        self.data.federation = self.federation.at(round)

    @abc.abstractmethod
    def make_plan(self) -> Plan:
        """The plan by which this engine trains clients."""

    def _may_render(self) -> int:
        """Bytes available for rendered samples."""
        free = available_memory(self.device)
        return int(0.3 * free) if self.device.type == "cuda" else min(1 << 30, free // 8)

    @property
    def low_precision(self) -> bool:
        """See `Engine.low_precision`."""
        return self.settings.precision == "bf16"

    def precision(self) -> AbstractContextManager[None]:
        """A context that computes in the precision of the settings."""
        return arithmetic(self.settings.precision, self.device, self._tuned)

    def block_of(self, clients: Tensor, plan: Plan, rng: Rng | None = None, memory: Memory | None = None) -> Block:
        """These clients as a block under a plan; their memory is this engine's unless given."""
        if memory is None:
            memory = _BlockMemory(self._memory, clients.to(self.device), self.num_clients)
        limits = self._samples_at_once, self._gradients_at_once
        return Block(clients, self.data, self.task, plan, memory, rng or Rng.seed(0), *limits)

    @abc.abstractmethod
    def chunk_size(self, work: SGD) -> int:
        """How many clients are computed together."""

    def memory_budget(self) -> int:
        """Bytes that one chunk may use."""
        assert self.settings.memory is not None
        return self.settings.memory << 20

    def threads_of_one(self) -> int | None:
        """Torch's threads for clients that are trained one at a time: one for small networks, else None (all).

        Two threads make the step of a small network slower, and much slower on a busy machine, where they wait for
        each other.
        """
        each = self._multiplications
        return 1 if each is not None and each * self._batch(self.task.work) < _SMALL_STEP else None

    def _batch(self, work: SGD) -> int:
        """The largest batch of a client."""
        return int(self.federation.train.sizes.max()) if work.batch_size == "full" else int(work.batch_size)

    def bytes_per_client(self, work: SGD) -> int:
        """Memory of one client in training: model, gradient, optimizer state and batch."""
        batch = self._batch(work)
        copies = 5 + len(work.make_optimizer().keeps) + work.anchored
        return self._itemsize * (copies * work.models * self.task.layout.size + 4 * batch * self._activations)

    def describe(self) -> dict[str, Any]:
        """See `Engine.describe`."""
        return {
            "engine": self.name,
            "device": str(self.device),
            **values_of(self.settings),
            "chunk": self.chunk_size(self.task.work),
        }

    def memory_tensors(self) -> dict[str, Tensor]:
        """See `Engine.memory_tensors`."""
        return dict(self._memory)

    def load_memory(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Engine.load_memory`."""
        self._memory = {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def ask(self, request: Request, positions: Tensor) -> Iterator[Reply]:
        """One chunk at a time, clients of similar size together so that little is padded."""
        sizes = self.federation.train.sizes[request.cohort[positions]]
        order = positions[torch.argsort(sizes, descending=True, stable=True)]
        for chunk in order.split(min(self.chunk_size(request.work), self._most)):
            yield self._ask(request, chunk)

    def _ask(self, request: Request, positions: Tensor) -> Reply:
        """One chunk as one block."""
        block = self.block_of(request.cohort[positions], self.plan, request.rng)
        own = {key: value[positions.to(value.device)].to(self.device) for key, value in request.each.items()}
        try:
            with torch.no_grad(), self.precision():
                sent = request.sent(positions, self.device)
                answer = answer_of(request.step, block, sent, request.work, **request.payload, **own)
        except CoterieError:
            raise
        except (torch.OutOfMemoryError, MemoryError) as error:
            return self._after_running_out(error, request, positions)
        except Exception as error:  # a step may raise anything; it is that client's failure
            return self._after_exception(error, request, positions)
        return Reply(positions, answer, gradients=block.gradients)

    def _after_running_out(self, error: BaseException, request: Request, positions: Tensor) -> Reply:
        """Out of memory: continue with half as many clients per chunk, and add a note."""
        if len(positions) == 1:
            raise EngineError(
                f"{plain_name(request.name)} of one client does not fit into the memory of {self.device}: "
                f"{(str(error) or 'out of memory').splitlines()[0]}; use a smaller batch or model."
            ) from error
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self._most = max(1, len(positions) // 2)
        self.notes.append(
            f"round {self.round}: out of memory with {len(positions)} clients; continuing with {self._most}"
        )
        return _joined([self._ask(request, part) for part in positions.split(self._most)])

    def _after_exception(self, error: Exception, request: Request, positions: Tensor) -> Reply:
        """A client that raises has failed. If a chunk raises, repeat it one client at a time to find out which."""
        reason = described(error)
        if len(positions) == 1:
            return Reply(positions[:0], Answer(), ((int(positions[0]), reason),))
        joined = _joined([self._ask(request, positions[i : i + 1]) for i in range(len(positions))])
        if not len(joined.positions):
            raise EngineError(f"{request.name} failed at every client: {reason}") from error
        return joined
