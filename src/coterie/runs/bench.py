"""Speed of this machine: the vectorized engine against a plain loop.

The unit is a client step: one SGD step of one client. The plain loop is what a careful user writes: one module for all
clients, slices of tensors in memory, no data loader, and the faster of one torch thread and all. Both train the same
clients from the same weights on the same batches, and their results are compared. Their rounds alternate, and medians
are reported, because machines are shared.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from coterie.client.steps import train
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.data.federation import Federation
from coterie.engines import make_engine
from coterie.engines.base import Engine, resolve_device
from coterie.methods.parts.clustering import CenterSums
from coterie.nets.flat import LOSSES
from coterie.nets.registry import ModelMaker
from coterie.randomness import Rng, mix, permutations
from coterie.version import VERSION


@dataclass(frozen=True)
class Workload:
    """A network, its inputs, and the local work of a round."""

    model: str
    shape: tuple[int, ...]
    batch: int
    steps: int  # of a client in a round
    clients: int
    plain_clients: int  # of the plain loop: fewer, since its time per client is constant
    settings: tuple[tuple[str, Any], ...] = ()
    momentum: float = 0.9


CPU_WORKLOADS = {
    "mclr": Workload("mclr", (1, 28, 28), 20, 6, 400, 100),
    "mlp": Workload("mlp", (1, 28, 28), 20, 6, 200, 50),
    "lenet": Workload("lenet", (1, 28, 28), 20, 6, 60, 30),
    "leaf-cnn": Workload("leaf-cnn", (1, 28, 28), 20, 6, 6, 6),
    "resnet18": Workload("resnet18", (3, 32, 32), 20, 4, 2, 2),
    "mobilenetv2": Workload("mobilenetv2", (3, 32, 32), 20, 4, 2, 2),
}
GPU_WORKLOADS = {
    "mclr": Workload("mclr", (1, 28, 28), 50, 20, 1000, 20),
    "mlp": Workload("mlp", (1, 28, 28), 50, 20, 1000, 20),
    "lenet": Workload("lenet", (1, 28, 28), 50, 10, 200, 10),
    "leaf-cnn": Workload("leaf-cnn", (1, 28, 28), 32, 10, 50, 10),
    "resnet18": Workload("resnet18", (3, 32, 32), 50, 5, 16, 4),
    "mobilenetv2": Workload("mobilenetv2", (3, 32, 32), 50, 5, 16, 4),
}


def workloads(device: torch.device) -> dict[str, Workload]:
    """The workloads for a device."""
    return GPU_WORKLOADS if device.type == "cuda" else CPU_WORKLOADS


def per_step(times: Sequence[tuple[float, float]], client_steps: int) -> tuple[float, float]:
    """Median wall and processor time of a client step, in microseconds.

    >>> per_step([(1.0, 2.0), (9.0, 9.0), (1.0, 2.0)], 10)
    (100000.0, 200000.0)
    """
    wall, cpu = (statistics.median(column) / client_steps * 1e6 for column in zip(*times, strict=True))
    return wall, cpu


class Bench:
    """One workload on one device."""

    def __init__(self, workload: Workload, device: str = "auto", **settings: Any) -> None:
        self.workload, self.device = workload, resolve_device(device)
        self.work = SGD(lr=0.01, momentum=workload.momentum, batch_size=workload.batch, epochs=1)
        samples = workload.batch * workload.steps
        generator = torch.Generator().manual_seed(0)
        data = {
            f"c{i}": (
                torch.randn(samples, *workload.shape, generator=generator),
                torch.randint(0, 10, (samples,), generator=generator),
            )
            for i in range(workload.clients)
        }
        self.federation = Federation.from_clients(data, num_classes=10, test=0.0, valid=0.0)
        make = ModelMaker(workload.model, dict(workload.settings), workload.shape, 10)
        task = Task.made(make, 0, LOSSES["cross_entropy"], 10, workload.shape, self.work)
        self.engine: Engine = make_engine("vectorized", task, self.federation, str(self.device), settings)
        self._rng = Rng.seed(1)
        self._plain = self._make_plain()
        self._threads = torch.get_num_threads()
        self.plain_threads = self._best_threads()

    # ---- the engine and the plain loop ----

    def ours(self, clients: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A FedAvg round of the first clients, by default all, in the engine: the mean model [P], summed in `dtype`."""
        engine = self.engine
        cohort = engine.everyone()[:clients]
        start, refs = engine.initial().unsqueeze(0), torch.zeros_like(cohort)
        keep = start.to(dtype)
        sums = CenterSums(1, like=keep)
        for chunk in engine.call(train, cohort, models=start, refs=refs, work=self.work, rng=self._rng):
            sums.add(chunk.answer.params.to(dtype), torch.zeros_like(chunk.clients))
        return sums.means(keep=keep)[0]

    def _make_plain(self) -> Callable[[int], Tensor]:
        task, work, steps, size = self.engine.task, self.work, self.workload.steps, self.workload.batch
        assert task.make is not None
        module = task.make(Rng.seed(0)).to(self.device).train()
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        initial = self.engine.initial()
        start = {name: value.clone() for name, value in task.layout.unpack(initial).items()}
        params = [tensors[slot.name] for slot in task.layout.parameters]
        data = [self.federation.samples(i) for i in range(self.workload.plain_clients)]
        ready = [(x.to(self.device), y.to(self.device)) for x, y in data]
        orders = self.orders(self.workload.plain_clients).to(self.device)

        def run(count: int) -> Tensor:
            total = torch.zeros_like(initial)
            for client in range(count):
                x, y = ready[client]
                x, y = x[orders[client]], y[orders[client]]
                with torch.no_grad():
                    torch._foreach_copy_([tensors[name] for name in start], list(start.values()))
                optimizer = torch.optim.SGD(params, lr=work.lr, momentum=work.momentum)
                for step in range(steps):
                    batch = slice(step * size, (step + 1) * size)
                    optimizer.zero_grad(set_to_none=True)
                    functional.cross_entropy(module(x[batch]), y[batch]).backward()
                    optimizer.step()
                total += torch.cat([tensors[name].detach().flatten() for name in start])
            return total / count

        return run

    def orders(self, count: int) -> Tensor:
        """The order in which the engine's clients use their samples, [clients, samples]."""
        keys = self._rng.keys(self.federation.keys[:count])
        stream = mix(keys ^ Rng(0).at("batches 0").key)
        return permutations(mix(stream), self.federation.train.sizes[:count])

    def plain(self) -> Tensor:
        """The same round of some clients in the plain loop."""
        with self.with_threads(self.plain_threads):
            return self._plain(self.workload.plain_clients)

    @contextmanager
    def with_threads(self, threads: int) -> Iterator[None]:
        """This number of torch threads within a `with` block."""
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(self._threads)

    def _best_threads(self) -> int:
        """One thread or all, whichever makes the plain loop faster."""
        if self.device.type == "cuda" or self._threads == 1:
            return self._threads

        def seconds(threads: int) -> float:
            with self.with_threads(threads):
                self._plain(1)
                return self.timed(lambda: self._plain(min(3, self.workload.plain_clients)))[0]

        return min((1, self._threads), key=seconds)

    # ---- measuring ----

    def run(self, repeats: int = 5, between: Callable[[], None] | None = None) -> dict[str, Any]:
        """Time both in turn: medians, their ratio and the difference of the results. `between` runs after each turn."""
        load = self.workload
        times: dict[Callable[[], Tensor], list[tuple[float, float]]] = {self.plain: [], self.ours: []}
        difference = self.difference()
        for train_once in times:
            train_once()  # warm up
        for _ in range(repeats):
            for train_once, found in times.items():
                found.append(self.timed(train_once))
            if between is not None:
                between()
        plain, plain_cpu = per_step(times[self.plain], load.plain_clients * load.steps)
        ours, ours_cpu = per_step(times[self.ours], load.clients * load.steps)
        return {
            "workload": load.model,
            "clients": load.clients,
            "batch": load.batch,
            "steps": load.steps,
            "plain_us": round(plain, 2),
            "ours_us": round(ours, 3),
            "ratio": round(plain / ours, 2),
            "plain_cpu_us": round(plain_cpu, 2),
            "ours_cpu_us": round(ours_cpu, 3),
            "plain_threads": self.plain_threads,
            "difference": difference,
            "plan": self.engine.describe(),
            "repeats": repeats,
        }

    def timed(
        self, function: Callable[[], object], processors: Callable[[], float] = time.process_time
    ) -> tuple[float, float]:
        """Wall and processor time of a function, in seconds."""
        self._synchronize()
        wall, cpu = time.perf_counter(), processors()
        function()
        self._synchronize()
        return time.perf_counter() - wall, processors() - cpu

    def difference(self) -> float:
        """Distance of the two mean models over the clients that both train, relative to how far training moved them."""
        count = self.workload.plain_clients
        ours, plain = self.ours(count), self._plain(count)
        moved = (plain - self.engine.initial()).norm().clamp_min(1e-12)
        return float(((ours - plain).norm() / moved).cpu())

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def machine(device: torch.device) -> dict[str, Any]:
    """The machine that the numbers were measured on."""
    return {
        "coterie": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="ascii") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        return platform.processor()
