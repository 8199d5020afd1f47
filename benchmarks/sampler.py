"""MD-ICFL's pseudo data beside the training of a round: seconds of the search, of the distances, and of the clients.

    python benchmarks/sampler.py [--workloads lenet mlp mclr] [--paths compiled autograd] [--repeats 5] [--rounds 3]
    python benchmarks/sampler.py --workloads mnist --data-dir DATA

A real run comes first (`--rounds`). One more round is then made in parts, which alternate: the training of all clients,
the search from the samples of the last round, the search from noise, and the distances of all trained models, with and
without label counts. Medians are printed. `ratio` is (search + distances) / training; `ratio_noise` the same with the
search from noise, which every run has in its first round. `autograd` does without the compiled program. On a busy
machine `--cpu` compares processor time.
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
from torch import Tensor

from coterie.engines.forward import Forward
from coterie.methods.md_icfl import MDICFL
from coterie.methods.parts.pseudo import class_distances
from coterie.randomness import Rng
from coterie.runs.execution import execute
from coterie.runs.experiment import merge, resolve

SYNTHETIC = {"samples": 120, "shape": [1, 28, 28], "classes": 10}
WORK = {"lr": 0.05, "epochs": 1, "batch_size": 20}
WORKLOADS: dict[str, dict[str, Any]] = {
    "lenet": {"run": {"dataset": "synthetic", "clients": 100, "model": "lenet"}, "dataset": SYNTHETIC, "work": WORK},
    "mnist": {"run": {"dataset": "rotated-mnist", "clients": 100}, "scenario": {"samples": 150}, "work": WORK},
    "mlp": {"run": {"dataset": "rotated-digits", "model": "mlp"}},
    "mclr": {"run": {"dataset": "rotated-digits", "model": "mclr"}},
}


clock: Callable[[], float] = time.perf_counter


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    begin = clock()
    found = function()
    return found, clock() - begin


def measure(name: str, paths: list[str], rounds: int, repeats: int, data_dir: str) -> None:
    tables = {key: dict(value) for key, value in WORKLOADS[name].items()}
    tables["run"] |= {"algorithm": "md_icfl", "rounds": rounds, "evaluate_every": rounds, "device": "cpu"}
    if data_dir:
        tables["run"]["data_dir"] = data_dir
    trainer = execute(resolve(merge(tables)))._trainer
    engine, state, method = trainer.engine, trainer.state, trainer.algorithm
    assert isinstance(method, MDICFL)
    everyone, rng = engine.everyone(), Rng.seed(0)
    autograd = Forward(engine.forward.network, engine.task.input_shape, stacked=True)
    forwards = {"compiled": engine.forward, "autograd": autograd}
    first = replace(state, samples=torch.empty(0))
    hints = method.hints(everyone, state.counts, state.labels)
    seconds: dict[str, list[float]] = defaultdict(list)

    def train() -> Tensor:
        return torch.cat([chunk.answer.params for chunk in method.train(state, engine, everyone, rng)])

    def one_round(path: str, models: Tensor) -> dict[str, float]:
        engine.forward = forwards[path]
        (x, predictions), search = timed(lambda: method.pseudo(state, engine, rng))
        noise = timed(lambda: method.pseudo(first, engine, rng))[1]
        near = timed(lambda: class_distances(engine.forward, models, predictions, x, **hints))[1]
        full = timed(lambda: class_distances(engine.forward, models, predictions, x))[1]
        return {f"{path} search": search, f"{path} noise": noise, f"{path} distances": near, f"{path} all": full}

    for turn in range(repeats + 1):
        models, spent = timed(train)
        row = {"train": spent}
        for path in paths:
            row |= one_round(path, models)
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
    parser.add_argument("--workloads", nargs="+", default=["lenet", "mlp", "mclr"], choices=list(WORKLOADS))
    parser.add_argument("--paths", nargs="+", default=["compiled"], choices=["compiled", "autograd"])
    parser.add_argument("--data-dir", default="", help="folder of the stored datasets, for mnist")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="processor time of all threads, for a busy machine")
    options = parser.parse_args()
    global clock
    clock = time.process_time if options.cpu else clock
    for name in options.workloads:
        measure(name, options.paths, options.rounds, options.repeats, options.data_dir)


if __name__ == "__main__":
    main()
