"""Weak scaling of engine ray on one machine: the same number of clients per worker, on 1 and on 2 workers.

    python benchmarks/ray_scaling.py [--clients 100] [--workers 2] [--repeats 9] [--model mlp]

Each worker has one core. Times one call that trains all clients and adds up their models, in turns: in this process
with one thread, on one worker, on all workers. Prints the median seconds of each and the efficiency: the time of one
worker with its clients divided by that of all workers with theirs. Requires `pip install 'coterie[ray]'`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from coterie.client.steps import train
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.data.scenario import Scenario
from coterie.data.sources.synthetic import Synthetic
from coterie.engines import make_engine
from coterie.engines.base import Engine
from coterie.nets.flat import cross_entropy
from coterie.nets.registry import ModelMaker
from coterie.randomness import Rng

SHAPE = (1, 28, 28)


def engine_of(name: str, clients: int, model: str, samples: int, **settings: int) -> Engine:
    rng = Rng.seed(0)
    source = Synthetic(groups=2, samples=samples, shape=SHAPE, classes=10)
    data = Scenario.named("by_user", {}).partition(source.load(clients, rng, None), None, rng)
    work = SGD(lr=0.05, momentum=0.9, epochs=2, batch_size=20)
    task = Task.made(ModelMaker(model, {}, SHAPE, 10), 0, cross_entropy, 10, SHAPE, work)
    return make_engine(name, task, data, "cpu", settings)


def seconds_of(engine: Engine, repeat: int) -> float:
    engine.begin(repeat + 1, "round")
    models, refs = engine.initial().unsqueeze(0), torch.zeros(engine.num_clients, dtype=torch.int64)
    total = torch.zeros_like(models[0])
    began = time.perf_counter()
    for chunk in engine.call(train, engine.everyone(), models=models, refs=refs, rng=Rng.seed(repeat)):
        total += chunk.answer.params.sum(0)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100, help="per worker")
    parser.add_argument("--samples", type=int, default=200, help="per client")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--model", default="mlp")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    one, many = {"workers": 1, "cpus": 1}, {"workers": chosen.workers, "cpus": 1}
    engines = {
        "vectorized": engine_of("vectorized", chosen.clients, chosen.model, chosen.samples, workers=1),
        "ray 1": engine_of("ray", chosen.clients, chosen.model, chosen.samples, **one),
        f"ray {chosen.workers}": engine_of(
            "ray", chosen.workers * chosen.clients, chosen.model, chosen.samples, **many
        ),
    }
    start = time.perf_counter() - began
    spent: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(chosen.repeats + 1):
        for name, engine in engines.items():
            seconds = seconds_of(engine, repeat)
            if repeat:  # the first is to warm up
                spent[name].append(seconds)
    medians = {name: statistics.median(times) for name, times in spent.items()}
    models = engines[f"ray {chosen.workers}"]
    print(
        json.dumps(
            {
                "model": chosen.model,
                "clients per worker": chosen.clients,
                "plan": models.describe()["plan"],
                "MB of answers per worker": round(chosen.clients * models.task.layout.size * 4 / 1e6, 1),
                "seconds": {name: round(value, 4) for name, value in medians.items()},
                "spread": {name: [round(min(t), 4), round(max(t), 4)] for name, t in spent.items()},
                "ray 1 against vectorized": round(medians["ray 1"] / medians["vectorized"], 3),
                "efficiency": round(medians["ray 1"] / medians[f"ray {chosen.workers}"], 3),
                "start": round(start, 1),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
