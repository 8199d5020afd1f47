"""Speed of this machine: our engine against a plain loop, and against other simulators that are installed.

The unit is one client-step: one step of SGD of one client. The plain loop is what a careful user writes: one module
that is used again for every client, slices of tensors that lie ready, no data loader, the better of one torch thread
and all. All train the same clients from the same weights on the same batches, and their results are compared. Runs
alternate, and medians are reported, since machines are shared.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from coterie.client.block import train
from coterie.client.work import SGD
from coterie.data.federation import Federation
from coterie.engines import make_engine
from coterie.engines.base import Engine, resolve_device
from coterie.methods.base import find_algorithm
from coterie.methods.parts.clustering import CenterSums
from coterie.nets.registry import build_model
from coterie.peers import Peer, Round
from coterie.randomness import Rng, mix, permutations
from coterie.runs.experiment import Experiment
from coterie.runs.settings import Schedule
from coterie.version import VERSION

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
        experiment = Experiment(
            algorithm=find_algorithm("fedavg")(),
            algorithm_name="fedavg",
            data=self.federation,
            dataset="random",
            model=workload.model,
            model_settings=dict(workload.settings),
            work=self._work,
            loss="cross_entropy",
            schedule=Schedule(),
            engine="vectorized",
            device=str(self._device),
            engine_settings=settings,
        )
        self.engine: Engine = make_engine("vectorized", experiment.task(), self.federation, str(self._device), settings)
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

    def run(self, repeats: int = 5, peers: Mapping[str, Peer] | None = None) -> dict[str, Any]:
        """All ways in turn: medians, their ratio, and whether they agree."""
        ways = {PLAIN: (self.plain, self.workload.plain_clients), OURS: (self.ours, self.workload.clients)}
        times = {name: Times([], [], count * self.workload.steps) for name, (_, count) in ways.items()}
        difference = self.difference()
        others = [Beside(name, peer, self) for name, peer in (peers or {}).items()]
        try:
            for name in (PLAIN, OURS):
                ways[name][0]()  # warm
            for other in others:
                other.start()
            for _ in range(repeats):
                for name, (way, _) in ways.items():
                    self.wait()
                    wall, cpu = time.perf_counter(), time.process_time()
                    way()
                    self.wait()
                    times[name].wall.append(time.perf_counter() - wall)
                    times[name].cpu.append(time.process_time() - cpu)
                for other in others:
                    other.measure()
        finally:
            for other in others:
                other.stop()
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
            "peers": [other.row(plain) for other in others],
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

    # ---- for peers ----

    def given(self) -> Round:
        """What a peer trains: all clients of ours, their samples in the order of our batches."""
        work, engine = self.workload, self.engine
        layout, orders = engine.task.layout, self._orders(work.clients)
        start = {name: value.detach().cpu().clone() for name, value in layout.unpack(engine.initial()).items()}
        data = [self.federation.samples(i) for i in range(work.clients)]
        return Round(
            model=work.model,
            settings=dict(work.settings),
            shape=work.shape,
            num_classes=10,
            start=start,
            data=[(x[order], y[order]) for (x, y), order in zip(data, orders, strict=True)],
            lr=self._work.lr,
            momentum=work.momentum,
            batch=work.batch,
            device=str(self._device),
        )

    def distance(self, model: Mapping[str, Tensor]) -> float:
        """Of a mean model over all clients to ours, over its parameters, relative to how far training moved ours."""
        engine, layout = self.engine, self.engine.task.layout
        start, refs = engine.initial(), torch.zeros(engine.num_clients, dtype=torch.int64)
        # In float64: a float32 sum of 100 models is off by more than the trained models are.
        total = torch.zeros_like(start, dtype=torch.float64)
        models = start.unsqueeze(0)
        for chunk in engine.call(train, engine.everyone(), models=models, refs=refs, work=self._work, rng=self._rng):
            total += chunk.answer.params.double().sum(0)

        def flat(tensors: Mapping[str, Tensor]) -> Tensor:
            return torch.cat([tensors[slot.name].detach().flatten().cpu().double() for slot in layout.parameters])

        ours = flat(layout.unpack(total / engine.num_clients))
        moved = (ours - flat(layout.unpack(start))).norm().clamp_min(1e-12)
        return float((flat(model) - ours).norm() / moved)

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Beside:
    """A peer in a benchmark: whatever it raises ends its own measurement and becomes the reason in its row."""

    def __init__(self, name: str, peer: Peer, bench: Bench) -> None:
        self._name, self._peer, self._bench = name, peer, bench
        self._times = Times([], [], bench.workload.clients * bench.workload.steps)
        self._difference: float | None = None
        self._error: str | None = None

    def start(self) -> None:
        """Build it, and a first round that is not timed: its model is compared with ours."""
        self._guarded(self._start)

    def measure(self) -> None:
        """One more round."""
        if self._error is None:
            self._guarded(self._measure)

    def stop(self) -> None:
        """End it; a failure to end is told only if there was none before."""
        self._guarded(self._peer.stop)

    def row(self, plain: Times) -> dict[str, Any]:
        """What came out. `ratio` is to the plain loop, as ours; `difference` is to our mean model."""
        found: dict[str, Any] = {"peer": self._name, "version": self._peer.version(), "us": None, "ratio": None}
        found |= {"cpu_us": None, "difference": self._difference, "remark": self._peer.remark, "error": self._error}
        if self._times.wall and self._error is None:
            found["us"] = round(self._times.microseconds, 2)
            found["ratio"] = round(plain.microseconds / self._times.microseconds, 3)
            if len(self._times.cpu) == len(self._times.wall):
                found["cpu_us"] = round(self._times.cpu_microseconds, 2)
        return found

    def _start(self) -> None:
        self._peer.start(self._bench.given())
        self._round()
        model = self._peer.model()
        if model is not None:
            self._difference = self._bench.distance(model)

    def _measure(self) -> None:
        self._bench.wait()
        wall, cpu = time.perf_counter(), self._peer.cpu()
        self._round()
        self._bench.wait()
        self._times.wall.append(time.perf_counter() - wall)
        after = self._peer.cpu()
        if cpu is not None and after is not None:
            self._times.cpu.append(after - cpu)

    def _round(self) -> None:
        """With the threads of the plain loop: peers train one client at a time as it does."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self._bench.plain_threads)
        try:
            self._peer.round()
        finally:
            torch.set_num_threads(threads)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # of any kind: it is the peer's
            if self._error is None:
                told = str(error).strip().splitlines()
                self._error = ": ".join([type(error).__name__, *told[:1]])


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
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
