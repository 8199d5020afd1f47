"""Flower's simulation (Ray): a ServerApp with the strategy FedAvg, a ClientApp by the message API.

It runs in a process of its own, which waits between rounds, so that its rounds can alternate with those of others.
One worker a core with one thread each. A worker reads the data once and keeps them; the client's epoch, which Flower
leaves to its user, is written as in the plain loop.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import shutil
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie.peers.base import Peer, Round

ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 by default: on a busy machine everyone else would go first
}
LONGEST = 600.0  # seconds that a round may take


class Flower(Peer):
    """Flower's Ray simulation, at the other end of a pipe."""

    name = "flower"
    packages = ("flwr", "ray")
    distribution = "flwr"
    remark = "Ray, one worker a core; CPU time of its processes from /proc"

    def start(self, work: Round) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="coterie-flower-"))
        torch.save(vars(work), self._folder / "round.pt")
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, str(self._folder)), name="flower")
        self._process.start()
        theirs.close()
        self._receive()

    def round(self) -> None:
        self._pipe.send("round")
        self._receive()

    def model(self) -> dict[str, Tensor]:
        self._pipe.send("model")
        return {name: torch.from_numpy(array) for name, array in self._receive().items()}

    def cpu(self) -> float | None:
        return tree_seconds(self._process.pid or 0)

    def stop(self) -> None:
        if not hasattr(self, "_process"):
            return
        with suppress(OSError):  # it may have ended already
            self._pipe.send("stop")
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()  # Ray's processes end when the one that began them does
            self._process.join()
        self._pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _receive(self) -> Any:
        if not self._pipe.poll(LONGEST):
            raise TimeoutError(f"Flower did not answer in {LONGEST:.0f} s.{self._last_words()}")
        try:
            error, answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"Flower's process has ended.{self._last_words()}") from None
        if error:
            raise RuntimeError(error)
        return answer

    def _last_words(self) -> str:
        log = self._folder / "log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return f" Its last line: {lines[-1]}" if lines else ""


def tree_seconds(pid: int, proc: Path = Path("/proc")) -> float | None:
    """Seconds of processors of a process and all below it, ended ones that were waited for included.

    None where there is no /proc.
    """
    if not proc.is_dir():
        return None
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()  # from the third field on: state, parent
        except OSError:
            continue  # ended meanwhile
        parents[int(entry.name)] = int(fields[1])
        ticks[int(entry.name)] = sum(int(field) for field in fields[11:15])  # own and children's, user and system
    wanted = {pid}
    while found := {child for child, parent in parents.items() if parent in wanted} - wanted:
        wanted |= found
    return sum(ticks.get(process, 0) for process in wanted) / os.sysconf("SC_CLK_TCK")


# ---- Flower's own process ----


def _serve(pipe: Connection, folder: str) -> None:
    """Answer "round" and "model" until "stop" or the other end is gone."""
    os.environ.update(ENVIRONMENT, FLWR_HOME=str(Path(folder) / "home"))
    log = os.open(Path(folder) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        _simulate(pipe, folder)
    except BaseException as error:
        pipe.send((f"{type(error).__name__}: {error}", None))
        raise


def _simulate(pipe: Connection, folder: str) -> None:
    from flwr.app import ArrayRecord, Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    work, module = _load(folder)
    clients = len(work.data)
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        return _train(folder, message, context)

    @server_app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        start, arrays = ArrayRecord(module.state_dict()), None
        pipe.send((None, None))
        while (asked := pipe.recv()) != "stop":
            if asked == "round":
                strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
                arrays = strategy.start(grid=grid, initial_arrays=start, num_rounds=1).arrays
                pipe.send((None if arrays else "RuntimeError: no client answered", None))
            else:
                state = arrays.to_torch_state_dict() if arrays else {}
                pipe.send((None, {name: value.numpy() for name, value in state.items()}))

    gpu = 1 / max(1, min(4, os.cpu_count() or 1)) if work.device.startswith("cuda") else 0.0
    run_simulation(
        server_app,
        client_app,
        num_supernodes=clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": gpu}},
    )


@functools.cache
def _load(folder: str) -> tuple[Round, nn.Module]:
    work = Round(**torch.load(Path(folder) / "round.pt", weights_only=True))
    work.data[:] = [(x.to(work.device), y.to(work.device)) for x, y in work.data]
    return work, work.module()


def _train(folder: str, message: Any, context: Any) -> Any:
    """A client's round, in one of Ray's workers."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    work, module = _load(folder)
    x, y = work.data[int(context.node_config["partition-id"])]
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    work.train(module, x, y)
    answer = {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(answer), reply_to=message)
