"""Other simulators on the workloads of `coterie bench`: pfl-research, FedLab, Flower. `make bench-peers` installs them.

    python benchmarks/peers.py [-w mclr -w lenet] [--clients 100] [--repeats 5] [--device cpu] [--peers flower ...]

A peer gets the clients, start weights and batches of our engine and trains the same round of FedAvg, in the way its
documentation recommends. Its rounds alternate with those of the plain loop and ours, and medians are shown.
`difference` is the distance of its mean model to ours, relative to how far training moved ours.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata, util
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from coterie.engines.base import resolve_device
from coterie.nets.registry import build_model
from coterie.randomness import Rng
from coterie.runs.bench import Bench, machine, per_step, workloads


@dataclass(frozen=True)
class Round:
    """One round of FedAvg: all clients train one epoch from the same weights, and the models are averaged."""

    model: str
    settings: dict[str, Any]
    shape: tuple[int, ...]
    start: dict[str, Tensor]  # weights and statistics by name
    data: list[tuple[Tensor, Tensor]]  # of each client, in the order of our batches
    lr: float
    momentum: float
    batch: int
    device: str

    @classmethod
    def of(cls, bench: Bench) -> Round:
        """The round that our engine trains in a benchmark."""
        load, work, engine = bench.workload, bench.work, bench.engine
        start = {k: v.detach().cpu().clone() for k, v in engine.task.layout.unpack(engine.initial()).items()}
        samples = map(bench.federation.samples, range(load.clients))
        data = [(x[order], y[order]) for (x, y), order in zip(samples, bench.orders(load.clients), strict=True)]
        device = str(bench.device)
        return cls(load.model, dict(load.settings), load.shape, start, data, work.lr, load.momentum, load.batch, device)

    def module(self) -> nn.Module:
        """The network with the start weights."""
        module = build_model(self.model, dict(self.settings), self.shape, 10, Rng.seed(0))
        module.load_state_dict(self.start, strict=False)  # BatchNorm counters are not part of our models
        return module.to(self.device).train()

    def train(self, module: nn.Module, x: Tensor, y: Tensor) -> None:
        """The epoch of one client, for peers that leave it to the user: tensor slices, as in the plain loop."""
        optimizer = torch.optim.SGD(module.parameters(), lr=self.lr, momentum=self.momentum)
        for first in range(0, len(x), self.batch):
            optimizer.zero_grad(set_to_none=True)
            batch = slice(first, first + self.batch)
            functional.cross_entropy(module(x[batch]), y[batch]).backward()
            optimizer.step()


class Peer:
    """A simulator: `start` builds its objects, `round` is timed, `model` is the resulting mean model."""

    packages: ClassVar[tuple[str, ...]]  # required; the distribution of the first one has the version
    remark: ClassVar[str] = "one process, threads as in the plain loop"
    start: Callable[[Round], None]
    round: Callable[[], None]  # every client trains from the start weights
    model: Callable[[], Mapping[str, Tensor]]

    @classmethod
    def is_installed(cls) -> bool:
        """Whether its packages are installed; nothing is imported."""
        return all(util.find_spec(package) is not None for package in cls.packages)

    def cpu(self) -> float:
        """CPU seconds so far."""
        return time.process_time()

    def stop(self) -> None:
        """Clean up, also after a failed start."""


class PflResearch(Peer):
    """pfl-research as in its benchmarks: tensors in memory, one optimizer per user, central SGD with learning rate 1.

    It evaluates every user before and after training in round 0 only, which is not timed.
    """

    packages = ("pfl",)

    def start(self, work: Round) -> None:
        os.environ["PFL_PYTORCH_DEVICE"] = work.device
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.algorithm.base import NNAlgorithmParams
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.data.sampling import get_user_sampler
        from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
        from pfl.metrics import Weighted
        from pfl.model.pytorch import PyTorchModel

        def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return functional.cross_entropy(module(x), y)

        @torch.no_grad()
        def metrics(module: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
            return {"loss": Weighted(functional.cross_entropy(module(x), y, reduction="sum").item(), len(y))}

        module: Any = work.module()
        module.loss, module.metrics = types.MethodType(loss, module), types.MethodType(metrics, module)
        users = {str(i): (x.to(work.device), y.to(work.device)) for i, (x, y) in enumerate(work.data)}
        # A cohort of all users contains everyone once.
        dataset = FederatedDataset.from_slices(users, get_user_sampler("minimize_reuse", list(users)))
        optimizer = functools.partial(torch.optim.SGD, momentum=work.momentum)
        central = torch.optim.SGD(module.parameters(), lr=1.0)
        self._model = PyTorchModel(model=module, local_optimizer_create=optimizer, central_optimizer=central)
        self._first, self._rounds = self._model.get_parameters(), 0
        self._params = functools.partial(
            NNAlgorithmParams, evaluation_frequency=1 << 30, train_cohort_size=len(users), val_cohort_size=None
        )
        training = {"local_num_epochs": 1, "local_learning_rate": work.lr}
        self._run = functools.partial(
            FederatedAveraging().run,
            backend=SimulatedBackend(training_data=dataset, val_data=dataset),
            model=self._model,
            model_train_params=NNTrainHyperParams(local_batch_size=work.batch, **training),
            model_eval_params=NNEvalHyperParams(local_batch_size=work.batch),
            send_metrics_to_platform=False,
        )

    def round(self) -> None:
        self._rounds += 1  # `run` continues from its last round
        self._model.set_parameters(self._first)
        self._run(self._params(central_num_iterations=self._rounds))

    def model(self) -> Mapping[str, Tensor]:
        return dict(self._model.get_parameters().items())


class FedLab(Peer):
    """FedLab as in its tutorials: `StandalonePipeline`, one data loader per client.

    FedLab has one optimizer for all clients. Here each client gets a new one: momentum must not pass between clients.
    """

    packages = ("fedlab", "torchvision", "pynvml")

    def start(self, work: Round) -> None:
        root = logging.getLogger()
        handlers, level = list(root.handlers), root.level
        with warnings.catch_warnings():  # torchvision misses libraries that are not needed here
            warnings.simplefilter("ignore")
            from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
            from fedlab.contrib.dataset.basic_dataset import BaseDataset, FedDataset
            from fedlab.core.standalone import StandalonePipeline

        sets = [BaseDataset(x, y) for x, y in work.data]

        class Data(FedDataset):
            def __init__(self) -> None:
                super().__init__()
                self.num = len(sets)

            def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> Any:
                return DataLoader(sets[id], batch_size=batch_size)

        class Trainer(FedAvgSerialClientTrainer):
            def train(self, model_parameters: Tensor, train_loader: Any) -> Any:
                self.optimizer = torch.optim.SGD(self._model.parameters(), self.lr, momentum=work.momentum)
                return super().train(model_parameters, train_loader)

        class Pipeline(StandalonePipeline):
            def evaluate(self) -> None:
                """Nothing: only training is timed."""

        module, cuda = work.module(), work.device.startswith("cuda")
        where = {"cuda": cuda, "device": work.device if cuda else None}
        self._handler = FedAvgServerHandler(module, global_round=1, sample_ratio=1.0, **where)
        trainer = Trainer(module, num_clients=len(sets), **where)
        trainer.setup_dataset(Data())
        trainer.setup_optim(epochs=1, batch_size=work.batch, lr=work.lr)
        self._pipeline, self._first = Pipeline(self._handler, trainer), self._handler.model_parameters.clone()
        root.handlers[:] = handlers  # FedLab redirects all logging to stdout
        root.setLevel(level)

    def round(self) -> None:
        self._handler.round = 0
        self._handler.set_model(self._first)
        self._pipeline.main()

    def model(self) -> Mapping[str, Tensor]:
        return dict(self._handler.model.named_parameters())


class Flower(Peer):
    """Flower's simulation: the strategy FedAvg, a ClientApp by the message API, one Ray worker of one thread per core.

    A worker loads the data once and keeps it; the epoch of a client is written as in the plain loop.
    """

    packages = ("flwr", "ray")
    remark = "Ray, one worker per core; CPU time of its processes from /proc"

    def start(self, work: Round) -> None:
        from flwr.app import ArrayRecord
        from flwr.clientapp import ClientApp

        from coterie.engines.flower.simulation import Simulation

        if work.device != "cpu":
            raise RuntimeError("Flower is measured on CPUs only")
        # Ray's workers import this file.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        folder = tempfile.mkdtemp(prefix="coterie-flower-")
        torch.save(vars(work), Path(folder) / "round.pt")
        app = ClientApp()
        app.train()(functools.partial(_flower_client, folder))
        self._clients, self._first = len(work.data), ArrayRecord(work.module().state_dict())
        self._simulation = Simulation(app, self._clients, 1, Path(folder))
        self._grid = self._simulation.grid()

    def round(self) -> None:
        from flwr.serverapp.strategy import FedAvg

        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=self._clients, min_available_nodes=self._clients)
        self._arrays = strategy.start(grid=self._grid, initial_arrays=self._first, num_rounds=1).arrays
        if not self._arrays:
            raise RuntimeError("no client answered")

    def model(self) -> Mapping[str, Tensor]:
        return dict(self._arrays.to_torch_state_dict())

    def cpu(self) -> float:
        return tree_seconds(os.getpid())

    def stop(self) -> None:
        self._simulation.stop()


@functools.cache
def _flower_work(folder: str) -> tuple[Round, nn.Module]:
    work = Round(**torch.load(Path(folder) / "round.pt", weights_only=True))
    return work, work.module()


def _flower_client(folder: str, message: Any, context: Any) -> Any:
    """The round of a client, in a Ray worker."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    work, module = _flower_work(folder)
    x, y = work.data[int(context.node_config["partition-id"])]
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    work.train(module, x, y)
    answer = {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(answer), reply_to=message)


def tree_seconds(pid: int, proc: Path = Path("/proc")) -> float:
    """CPU seconds of a process and its descendants, including ended ones that were waited for."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in proc.glob("[0-9]*"):
        with suppress(OSError):  # has ended
            fields = (entry / "stat").read_text().rpartition(")")[2].split()  # from the third field on: state, parent
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))  # own and children's, user and system
    wanted = {pid}
    while found := {child for child, parent in parents.items() if parent in wanted} - wanted:
        wanted |= found
    return sum(ticks.get(process, 0) for process in wanted) / os.sysconf("SC_CLK_TCK")


PEERS: dict[str, type[Peer]] = {"pfl-research": PflResearch, "fedlab": FedLab, "flower": Flower}


def distance(bench: Bench, model: Mapping[str, Tensor]) -> float:
    """The distance of a mean model to ours, over the parameters, relative to how far training moved ours."""
    layout = bench.engine.task.layout

    def flat(tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([tensors[slot.name].detach().flatten().cpu().double() for slot in layout.parameters])

    # In float64: the rounding error of a float32 sum of 100 models exceeds the difference of trained models.
    ours, start = flat(layout.unpack(bench.ours(dtype=torch.float64))), flat(layout.unpack(bench.engine.initial()))
    return float((flat(model) - ours).norm() / (ours - start).norm().clamp_min(1e-12))


def rows_of(bench: Bench, peers: Mapping[str, Peer], repeats: int) -> list[dict[str, Any]]:
    """A row each for the plain loop, ours and each peer; ratios are relative to the plain loop."""
    work, errors = Round.of(bench), dict.fromkeys(peers, "")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
    differences: dict[str, float] = {}

    def start(name: str) -> None:
        peers[name].start(work)
        peers[name].round()
        differences[name] = distance(bench, peers[name].model())

    def measure(name: str) -> None:
        times[name].append(bench.timed(peers[name].round, peers[name].cpu))

    def each(action: Callable[[str], None]) -> None:
        """Whatever a peer raises ends its measurement and becomes the remark in its row."""
        for name in peers:
            try:
                if not errors[name]:
                    # Peers train one client at a time, as the plain loop does.
                    with bench.with_threads(bench.plain_threads):
                        action(name)
            except Exception as error:
                errors[name] = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])

    try:
        each(start)
        found = bench.run(repeats, between=lambda: each(measure))
    finally:
        for peer in peers.values():
            with suppress(Exception):
                peer.stop()
    plain, plain_cpu = found["plain_us"], found["plain_cpu_us"]
    rows = [
        {"simulator": "plain loop", "us": plain, "cpu_us": plain_cpu, "remark": f"threads: {bench.plain_threads}"},
        {"simulator": "coterie", "us": found["ours_us"], "cpu_us": found["ours_cpu_us"]}
        | {"difference": found["difference"], "remark": found["plan"]["plan"]},
    ]
    for name, peer in peers.items():
        row = {"simulator": name, "difference": differences.get(name), "remark": errors[name] or peer.remark}
        if not errors[name]:
            row["us"], row["cpu_us"] = per_step(times[name], bench.workload.clients * bench.workload.steps)
        rows.append(row)
    for row in rows:
        if "us" in row:
            row |= {"ratio": plain / row["us"], "cpu_ratio": plain_cpu / max(row["cpu_us"], 1e-9)}
    return [{"workload": found["workload"], **row} for row in rows]


COLUMNS = {"workload": "", "simulator": "", "us": ".1f", "cpu_us": ".1f", "ratio": ".2f", "cpu_ratio": ".2f"}
COLUMNS |= {"difference": ".0e", "remark": ""}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-w", "--workload", action="append", help="repeatable; by default all")
    parser.add_argument("--clients", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="by default all that are installed")
    options = parser.parse_args(arguments)
    device = resolve_device(options.device)
    names = [name for name, peer in PEERS.items() if peer.is_installed()] if options.peers is None else options.peers
    versions = {name: metadata.version(PEERS[name].packages[0]) for name in names if PEERS[name].is_installed()}
    print(f"microseconds per client step, median of {options.repeats}; {machine(device)}; {versions}\n")
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for name in options.workload or workloads(device):
        load = workloads(device)[name]
        if options.clients:
            load = replace(load, clients=options.clients, plain_clients=min(options.clients, load.plain_clients))
        for row in rows_of(Bench(load, str(device)), {peer: PEERS[peer]() for peer in names}, options.repeats):
            cells = ("-" if row.get(key) is None else format(row[key], how) for key, how in COLUMNS.items())
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    from peers import main  # by name, so that Ray's workers can import it

    main()
