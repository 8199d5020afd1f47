"""`coterie run --engine flower`: the clients are nodes of Flower's simulation (Ray) on this machine.

The simulation runs in a thread. Its ServerApp only provides the Grid, which the usual round loop uses through the
engine. The simulation ends with the engine.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.client.task import Task
from coterie.data.federation import Federation
from coterie.engines.base import Engine
from coterie.engines.flower.client import simulated_client_app
from coterie.engines.flower.engine import FlowerEngine, FlowerSettings
from coterie.engines.flower.link import Link
from coterie.engines.flower.memory import DiskMemory, folder_name
from coterie.engines.flower.storage import save_federation
from coterie.errors import ConfigError, EngineError
from coterie.settings import build

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # the default, 15, starves workers on a busy machine
}
_START = 120.0  # seconds to wait for all nodes
_RUN = "simulation"


class SimulatedEngine(FlowerEngine):
    """The engine over a simulation; client memory is saved in checkpoints, because the clients' disk is temporary."""

    def __init__(self, task: Task, federation: Federation, settings: FlowerSettings, grid: Any, folder: Path) -> None:
        link = Link(grid, "claimed", settings.poll, settings.max_samples)
        self._folder = folder
        super().__init__(task, federation, link, settings, run=_RUN)

    def memory_tensors(self) -> dict[str, Tensor]:
        """The memory of all clients, in the format of the in-process engines."""
        found: dict[str, dict[int, Tensor]] = {}
        for number in range(self.num_clients):
            for name, value in self._memory(number).everything().items():
                found.setdefault(name, {})[number] = value[0]
        tensors: dict[str, Tensor] = {}
        for name, rows in found.items():
            first = next(iter(rows.values()))
            values = torch.zeros(self.num_clients, *first.shape, dtype=first.dtype)
            for number, row in rows.items():
                values[number] = row
            present = torch.zeros(self.num_clients, dtype=torch.bool)
            present[list(rows)] = True
            tensors |= {f"value.{name}": values, f"present.{name}": present}
        return tensors

    def load_memory(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the memory to the clients' disks."""
        names = [name.removeprefix("value.") for name in tensors if name.startswith("value.")]
        for number in range(self.num_clients):
            own = {n: tensors[f"value.{n}"][number : number + 1] for n in names if tensors[f"present.{n}"][number]}
            if own:
                self._memory(number).replace({n: t.contiguous().clone() for n, t in own.items()})

    def _memory(self, client: int) -> DiskMemory:
        folder = self._folder / "memory" / folder_name(_RUN) / folder_name(self.names[client])
        return DiskMemory(folder, self.round, self.life, self.past)


def simulated_engine(task: Task, federation: Federation, device: str, settings: Mapping[str, Any]) -> Engine:
    """Start Flower's simulation with one node per client."""
    if device not in ("auto", "cpu"):
        raise ConfigError("engine flower simulates clients on the CPU; use engine vectorized for a GPU.")
    chosen = build(FlowerSettings, settings, "engine")
    if task.make is None:
        raise EngineError("engine flower needs a task with a model maker; build it with Task.made.")
    folder = Path(tempfile.mkdtemp(prefix="coterie-flower-"))
    try:
        save_federation(folder, federation)
        app = simulated_client_app(task.make, task.loss, federation.views, str(folder))
        simulation = Simulation(app, len(federation), chosen.cpus, folder)
        engine = SimulatedEngine(task, federation, chosen, simulation.grid(), folder)
        weakref.finalize(engine, simulation.stop)
        # At exit Python first waits for Flower's worker threads, so stop them before that.
        threading._register_atexit(simulation.stop)  # type: ignore[attr-defined]
        simulation.wait_for_all(engine.link, federation.names)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return engine


class Simulation:
    """Flower's simulation in a thread, until `stop`."""

    def __init__(self, app: Any, nodes: int, cpus: int, folder: Path) -> None:
        self._done = threading.Event()
        self._grids: queue.Queue[Any] = queue.Queue()
        self._error: BaseException | None = None
        self._folder = folder
        for key, value in QUIET.items():
            os.environ.setdefault(key, value)
        os.environ.setdefault("FLWR_HOME", str(folder / "flwr"))
        for noisy in ("flwr", "ray"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
        self._thread = threading.Thread(target=self._run, args=(app, nodes, cpus), name="flower", daemon=True)
        self._thread.start()

    def _run(self, app: Any, nodes: int, cpus: int) -> None:
        from flwr.serverapp import ServerApp

        server = ServerApp()

        @server.main()
        def main(grid: Any, context: Any) -> None:
            self._grids.put(grid)
            self._done.wait()

        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
        config = {"client_resources": {"num_cpus": cpus, "num_gpus": 0.0}, "init_args": quiet}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                from flwr.simulation import run_simulation

                run_simulation(server, app, nodes, backend_config=config)
        except BaseException as error:  # including SystemExit, which must not end this process
            self._error = error
        self._grids.put(None)

    def grid(self) -> Any:
        """Flower's Grid, once the simulation has started."""
        try:
            found = self._grids.get(timeout=_START)
        except queue.Empty:
            raise EngineError(f"Flower's simulation did not start in {_START:g} s.") from None
        if found is None:
            raise EngineError(f"Flower's simulation did not start: {self._error}")
        return found

    def wait_for_all(self, link: Link, names: tuple[str, ...]) -> None:
        """Wait until every client has connected."""
        ends = time.monotonic() + _START
        while len(link.members) < len(names):
            if self._error is not None or time.monotonic() > ends:
                raise EngineError(f"Only {len(link.members)} of {len(names)} simulated nodes started: {self._error}")
            link.roll_call()

    def stop(self) -> None:
        """Stop the simulation and wait for its end; may be called more than once."""
        self._done.set()
        self._thread.join(30)
        shutil.rmtree(self._folder, ignore_errors=True)
