"""Networks beyond plain layers: clients in stacks against one client at a time.

    python benchmarks/networks.py [--clients 40] [--repeats 5] [--device cpu] [--only lstm gru attention dropout mlp]
    python benchmarks/networks.py --only resnet18 mobilenetv2 --device cuda --precision bf16 --plans loop folded+graph

For each network, the plans of the vectorized engine that are possible on the device train the same clients in turn.
Prints the microseconds per client step of each (the least of the repeats: other programs only add to it), its speed
relative to the first plan (`loop`), and the largest difference of its models from those of the first, relative to how
far training moved them. `--cpu` measures processor time, for a busy machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.data.federation import Federation
from coterie.engines.base import resolve_device
from coterie.engines.vectorized import VectorizedEngine
from coterie.errors import ConfigError
from coterie.nets.flat import LOSSES
from coterie.nets.zoo import celeba_cnn, mobilenetv2, resnet18
from coterie.randomness import Rng

TOKENS, LENGTH, CLASSES = 80, 40, 10
BATCH, STEPS = 20, 4
IMAGE, IMAGE_BATCH = (3, 32, 32), 50
PLANS = ("loop", "loop+graph", "stacked", "stacked+graph", "folded", "folded+graph")
IMAGES = {"resnet18": resnet18, "mobilenetv2": mobilenetv2, "celeba-cnn": celeba_cnn}


class Text(nn.Module):
    """Embedding, a layer over the sequence, a linear layer on what it ends with."""

    def __init__(self, layer: nn.Module, inputs: int, outputs: int, end: Callable[..., Tensor]) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(TOKENS, inputs), layer, nn.Linear(outputs, CLASSES)
        self._end = end

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, T], as floats -> [B, classes]."""
        found: Tensor = self.head(self._end(self.layer(self.table(x.long()))))
        return found


def last(found: tuple[Tensor, object]) -> Tensor:
    """The outputs of a recurrent layer after the last token."""
    return found[0][:, -1]


def mean(found: Tensor) -> Tensor:
    """The mean over the tokens."""
    return found.mean(1)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Text(nn.LSTM(8, 64, batch_first=True), 8, 64, last),
    "lstm2": lambda: Text(nn.LSTM(8, 64, 2, batch_first=True, dropout=0.2), 8, 64, last),
    "gru": lambda: Text(nn.GRU(8, 64, batch_first=True), 8, 64, last),
    "attention": lambda: Text(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 32, 32, mean),
    "dropout": lambda: Text(nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True), 32, 32, mean),
    "mlp": lambda: nn.Sequential(
        nn.Linear(LENGTH, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES)
    ),
    **{name: partial(make, IMAGE, CLASSES) for name, make in IMAGES.items()},
}


def federation(clients: int, images: bool) -> Federation:
    """Sequences of tokens whose class depends on their counts, or images whose class depends on their mean."""
    generator = torch.Generator().manual_seed(0)
    data = {}
    for i in range(clients):
        if images:
            y = torch.randint(0, CLASSES, (IMAGE_BATCH * STEPS,), generator=generator)
            x = torch.randn(len(y), *IMAGE, generator=generator) + 0.2 * y.reshape(-1, 1, 1, 1)
        else:
            x = torch.randint(0, TOKENS, (BATCH * STEPS, LENGTH), generator=generator).float()
            y = x.sum(1).long() % CLASSES
        data[f"c{i}"] = (x, y)
    return Federation.from_clients(data, num_classes=CLASSES, test=0.0, valid=0.0)


def made(name: str, plan: str, clients: Federation, device: str, precision: str) -> VectorizedEngine:
    """An engine with one plan; ConfigError if it is not possible."""

    def make(rng: Rng) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.key & ((1 << 63) - 1))
            return NETWORKS[name]()

    batch, shape = (IMAGE_BATCH, IMAGE) if name in IMAGES else (BATCH, (LENGTH,))
    work = SGD(lr=0.05, momentum=0.9, batch_size=batch, epochs=1)
    task = Task.made(make, 0, LOSSES["cross_entropy"], CLASSES, shape, work)
    return VectorizedEngine(task, clients, device=device, settings={"plan": plan, "precision": precision})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--plans", nargs="*", default=list(PLANS))
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--cpu", action="store_true", help="processor time instead of wall time")
    options = parser.parse_args()
    device = resolve_device(options.device)
    clock = time.process_time if options.cpu else time.perf_counter
    for name in options.only or NETWORKS:
        clients = federation(options.clients, name in IMAGES)
        engines = {}
        for plan in options.plans:
            try:
                engines[plan] = made(name, plan, clients, str(device), options.precision)
            except ConfigError:  # not on this device
                continue

        def train(engine: VectorizedEngine) -> Tensor:
            block = engine.block_of(engine.everyone(), engine.plan, Rng.seed(1))
            with torch.no_grad(), engine.precision():
                return block.train(engine.initial().repeat(options.clients, 1), engine.task.work)

        found = {plan: train(engine) for plan, engine in engines.items()}  # warm up
        times: dict[str, list[float]] = {plan: [] for plan in engines}
        for _ in range(options.repeats):
            for plan, engine in engines.items():
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                began = clock()
                train(engine)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times[plan].append(clock() - began)
        least = {plan: min(spent) / (options.clients * STEPS) * 1e6 for plan, spent in times.items()}
        first = next(iter(engines))
        moved = (found[first] - engines[first].initial()).norm(dim=1)
        for plan in engines:
            apart = float(((found[plan] - found[first]).norm(dim=1) / moved).max())
            row = {"network": name, "plan": plan, "us": round(least[plan], 1)}
            row |= {"speed": round(least[first] / least[plan], 2), "difference": float(f"{apart:.1e}")}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
