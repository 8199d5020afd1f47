"""Speed of this machine: our engine against a plain loop, and against other simulators that are installed.

The unit is one client-step: one step of SGD of one client. The plain loop is what a careful user writes: one module
that is used again for every client, slices of tensors that lie ready, no data loader, the better of one torch thread
and all. Both train the same clients from the same weights on the same batches, and their results are compared. Runs
alternate, and medians are reported, since machines are shared.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import coterie
from coterie.algorithm import find_algorithm
from coterie.api import Setup
from coterie.block import train
from coterie.clustering import CenterSums
from coterie.engine import Engine, resolve_device
from coterie.engines import make_engine
from coterie.federation import Federation
from coterie.local import SGD
from coterie.models import build_model
from coterie.randomness import Rng, mix, permutations
from coterie.train import Schedule

PLAIN, OURS = "plain loop", "coterie"


@dataclass(frozen=True)
class Workload:
    """A network, its inputs, and what clients do in a round."""

    model: str
    shape: tuple[int, ...]
    batch: int
    steps: int  # of a client in a round
    clients: int
    plain_clients: int  # that the plain loop trains: it takes as long for each
    settings: tuple[tuple[str, Any], ...] = ()
    momentum: float = 0.9


CPU_WORKLOADS = {
    "mclr": Workload("mclr", (1, 28, 28), 20, 6, 400, 100),
    "mlp": Workload("mlp", (1, 28, 28), 20, 6, 200, 50),
    "lenet": Workload("lenet", (1, 28, 28), 20, 6, 60, 30),
    "leaf-cnn": Workload("leaf-cnn", (1, 28, 28), 20, 6, 6, 6),
    "resnet18": Workload("resnet18", (3, 32, 32), 20, 4, 2, 2),
}
GPU_WORKLOADS = {
    "mclr": Workload("mclr", (1, 28, 28), 50, 20, 1000, 20),
    "mlp": Workload("mlp", (1, 28, 28), 50, 20, 1000, 20),
    "lenet": Workload("lenet", (1, 28, 28), 50, 10, 200, 10),
    "leaf-cnn": Workload("leaf-cnn", (1, 28, 28), 32, 10, 50, 10),
    "resnet18": Workload("resnet18", (3, 32, 32), 50, 5, 16, 4),
}


def workloads(device: torch.device) -> dict[str, Workload]:
    """Those that suit a device."""
    return GPU_WORKLOADS if device.type == "cuda" else CPU_WORKLOADS


@dataclass(frozen=True)
class Times:
    """Seconds of several repeats of one way, and how many client-steps each was."""

    wall: list[float]
    cpu: list[float]
    client_steps: int

    @property
    def microseconds(self) -> float:
        """Median wall time of one client-step."""
        return statistics.median(self.wall) / self.client_steps * 1e6

    @property
    def cpu_microseconds(self) -> float:
        """Median time of all processors for one client-step."""
        return statistics.median(self.cpu) / self.client_steps * 1e6


class Bench:
    """One workload on one device."""

    def __init__(self, workload: Workload, device: str = "auto", **settings: Any) -> None:
        self.workload, self._device = workload, resolve_device(device)
        self._work = SGD(lr=0.01, momentum=workload.momentum, batch_size=workload.batch, epochs=1)
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
        setup = Setup(
            algorithm=find_algorithm("fedavg")(),
            algorithm_name="fedavg",
            federation=self.federation,
            dataset_name="random",
            model=workload.model,
            model_settings=dict(workload.settings),
            work=self._work,
            loss="cross_entropy",
            schedule=Schedule(),
            engine="vectorized",
            device=str(self._device),
            engine_settings=settings,
        )
        self.engine: Engine = make_engine("vectorized", setup.task(), self.federation, str(self._device), settings)
        self._rng = Rng.seed(1)
        self._plain = self._make_plain()
        self._threads = torch.get_num_threads()
        self.plain_threads = self._best_threads()

    # ---- the two ways ----

    def ours(self) -> Tensor:
        """A round of FedAvg's training: the mean model [P]."""
        engine = self.engine
        start = engine.initial().unsqueeze(0)
        refs = torch.zeros(engine.num_clients, dtype=torch.int64)
        sums = CenterSums(1, like=start)
        for chunk in engine.call(train, engine.everyone(), models=start, refs=refs, work=self._work, rng=self._rng):
            sums.add(chunk.answer.params, torch.zeros_like(chunk.clients))
        return sums.means(keep=start)[0]

    def _make_plain(self) -> Callable[[int], Tensor]:
        work, steps, size = self._work, self.workload.steps, self.workload.batch
        module = build_model(self.workload.model, dict(self.workload.settings), self.workload.shape, 10, Rng.seed(0))
        module = module.to(self._device).train()
        params: list[Tensor] = list(module.parameters())
        layout, initial = self.engine.task.layout, self.engine.initial()
        first = [layout.unpack(initial)[slot.name].clone() for slot in layout.parameters]
        buffers = dict(module.named_buffers())
        kept = {slot.name: layout.unpack(initial)[slot.name].clone() for slot in layout.buffers}
        data = [self.federation.samples(i) for i in range(self.workload.plain_clients)]
        ready = [(x.to(self._device), y.to(self._device)) for x, y in data]
        orders = self._orders(self.workload.plain_clients).to(self._device)

        def run(count: int) -> Tensor:
            total = torch.zeros_like(initial)
            for client in range(count):
                x, y = ready[client]
                x, y = x[orders[client]], y[orders[client]]
                with torch.no_grad():
                    torch._foreach_copy_(params, first)
                    for name, value in kept.items():
                        buffers[name].copy_(value)
                optimizer = torch.optim.SGD(params, lr=work.lr, momentum=work.momentum)
                for step in range(steps):
                    batch = slice(step * size, (step + 1) * size)
                    optimizer.zero_grad(set_to_none=True)
                    functional.cross_entropy(module(x[batch]), y[batch]).backward()
                    optimizer.step()
                after = [p.detach().flatten() for p in params] + [buffers[name].flatten() for name in kept]
                total += torch.cat(after)
            return total / count

        return run

    def _orders(self, count: int) -> Tensor:
        """The order of the samples that our clients take, [clients, samples]."""
        keys = self._rng.keys(self.federation.keys[:count])
        stream = mix(keys ^ Rng(0).at("batches 0").key)
        return permutations(mix(stream), self.federation.train.sizes[:count])

    def plain(self) -> Tensor:
        """The same by the plain loop, for some of the clients."""
        torch.set_num_threads(self.plain_threads)
        try:
            return self._plain(self.workload.plain_clients)
        finally:
            torch.set_num_threads(self._threads)

    def _best_threads(self) -> int:
        """One thread or all of them, whichever is faster."""
        if self._device.type == "cuda" or self._threads == 1:
            return self._threads
        found = {}
        for threads in (1, self._threads):
            torch.set_num_threads(threads)
            self._plain(1)
            began = time.perf_counter()
            self._plain(min(3, self.workload.plain_clients))
            found[threads] = time.perf_counter() - began
        torch.set_num_threads(self._threads)
        return min(found, key=lambda threads: found[threads])

    # ---- measuring ----

    def run(self, repeats: int = 5) -> dict[str, Any]:
        """Both ways in turn: medians, their ratio, and whether they agree."""
        ways = {PLAIN: (self.plain, self.workload.plain_clients), OURS: (self.ours, self.workload.clients)}
        times = {name: Times([], [], count * self.workload.steps) for name, (_, count) in ways.items()}
        difference = self.difference()
        for name in (PLAIN, OURS):
            ways[name][0]()  # warm
        for _ in range(repeats):
            for name, (way, _) in ways.items():
                self._wait()
                wall, cpu = time.perf_counter(), time.process_time()
                way()
                self._wait()
                times[name].wall.append(time.perf_counter() - wall)
                times[name].cpu.append(time.process_time() - cpu)
        plain, ours = times[PLAIN], times[OURS]
        return {
            "workload": self.workload.model,
            "clients": self.workload.clients,
            "batch": self.workload.batch,
            "steps": self.workload.steps,
            "plain_us": round(plain.microseconds, 2),
            "ours_us": round(ours.microseconds, 3),
            "ratio": round(plain.microseconds / ours.microseconds, 2),
            "plain_cpu_us": round(plain.cpu_microseconds, 2),
            "ours_cpu_us": round(ours.cpu_microseconds, 3),
            "plain_threads": self.plain_threads,
            "difference": difference,
            "plan": self.engine.describe(),
            "repeats": repeats,
        }

    def difference(self) -> float:
        """Relative distance of the mean models of the two ways, over the clients that both train."""
        count = self.workload.plain_clients
        start = self.engine.initial().unsqueeze(0)
        cohort = torch.arange(count)
        sums = CenterSums(1, like=start)
        refs = torch.zeros(count, dtype=torch.int64)
        for chunk in self.engine.call(train, cohort, models=start, refs=refs, work=self._work, rng=self._rng):
            sums.add(chunk.answer.params, torch.zeros_like(chunk.clients))
        ours, plain = sums.means(keep=start)[0], self._plain(count)
        moved = (plain - start[0]).norm().clamp_min(1e-12)
        return float(((ours - plain).norm() / moved).cpu())

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "coterie": coterie.__version__,
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
