"""MD-ICFL's pseudo data beside the training of a round: seconds of the search, of the distances, and of the clients.

    python benchmarks/sampler.py [--workloads lenet mlp mclr] [--paths compiled autograd] [--repeats 5] [--rounds 3]

A real run comes first (`--rounds`). Its state is then used for one more round, in parts, which alternate: training,
the search from the samples of the last round, the search from noise, and the distances of all trained models. Medians
are printed. `ratio` is (search + distances) / training; `ratio_noise` the same with the search from noise, which every
run has in its first round. `autograd` does without the compiled program.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from coterie.engines.forward import Forward
from coterie.methods.md_icfl import MDICFL
from coterie.methods.parts.pseudo import class_distances, probabilities
from coterie.randomness import Rng
from coterie.runs.execution import execute
from coterie.runs.experiment import merge, resolve

SYNTHETIC = {"samples": 120, "shape": [1, 28, 28], "classes": 10}
WORK = {"lr": 0.05, "epochs": 1, "batch_size": 20}
WORKLOADS: dict[str, dict[str, Any]] = {
    "lenet": {"run": {"dataset": "synthetic", "clients": 100, "model": "lenet"}, "dataset": SYNTHETIC, "work": WORK},
    "mlp": {"run": {"dataset": "rotated-digits", "model": "mlp"}},
    "mclr": {"run": {"dataset": "rotated-digits", "model": "mclr"}},
}


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    found = function()
    return found, time.perf_counter() - begin


def measure(name: str, paths: list[str], rounds: int, repeats: int) -> None:
    tables = {key: dict(value) for key, value in WORKLOADS[name].items()}
    tables["run"] |= {"algorithm": "md_icfl", "rounds": rounds, "evaluate_every": rounds, "device": "cpu"}
    trainer = execute(resolve(merge(tables)))._trainer
    engine, state, method = trainer.engine, trainer.state, trainer.algorithm
    assert isinstance(method, MDICFL)
    task, everyone, rng = engine.task, engine.everyone(), Rng.seed(0)
    forwards = {"compiled": engine.forward, "autograd": Forward(engine.forward.network, task.input_shape, stacked=True)}
    seconds: dict[str, list[float]] = defaultdict(list)

    def train() -> torch.Tensor:
        return torch.cat([chunk.answer.params for chunk in method.train(state, engine, everyone, rng)])

    for turn in range(repeats + 1):
        models, spent = timed(train)
        row = {"train": spent}
        for path in paths:
            engine.forward = forwards[path]
            (x, predictions), row[f"{path} search"] = timed(lambda: method.pseudo(state, engine, rng))
            fresh = replace(state, samples=torch.empty(0))
            row[f"{path} noise"] = timed(lambda fresh=fresh: method.pseudo(fresh, engine, rng))[1]
            hints = method.hints(everyone, state.counts, state.labels) if path == "compiled" else {}
            job = (models, probabilities(engine.forward, state.centers, x), x)
            row[f"{path} distances"] = timed(lambda: class_distances(engine.forward, *job, **hints))[1]  # noqa: B023
            row[f"{path} all"] = timed(lambda: class_distances(engine.forward, *job))[1]  # noqa: B023
        for key, value in row.items():
            if turn:  # the first turn warms up
                seconds[key].append(value)
    middle = {key: statistics.median(values) for key, values in seconds.items()}
    for path in paths:
        search, noise, near, full = (middle[f"{path} {part}"] for part in ("search", "noise", "distances", "all"))
        found = {"train": middle["train"], "search": search, "noise": noise, "distances": near, "all_distances": full}
        found |= {"ratio": (search + near) / middle["train"], "ratio_noise": (noise + near) / middle["train"]}
        print(json.dumps({"workload": name, "path": path} | {k: round(v, 4) for k, v in found.items()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--paths", nargs="+", default=["compiled"], choices=["compiled", "autograd"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for name in options.workloads:
        measure(name, options.paths, options.rounds, options.repeats)


if __name__ == "__main__":
    main()
