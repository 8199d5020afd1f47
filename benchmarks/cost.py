"""What the default method costs: time and bytes per round of `coterie` and FedAvg, in turn, in one run.

    python benchmarks/cost.py [--clients 100] [--rounds 20] [--repeats 3] [--model lenet]

Clients hold synthetic images of two kinds, so that there is something to find. Time is that of clients and server,
without evaluation. The ratio of medians is what counts: machines are shared and noisy.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

from coterie.runs.execution import execute
from coterie.runs.experiment import resolve


def run(method: str, options: argparse.Namespace, seed: int) -> tuple[float, int, int]:
    """Seconds per round, bytes, and clusters of one run."""
    tables: dict[str, dict[str, Any]] = {
        "run": {
            "algorithm": method,
            "dataset": "synthetic",
            "model": options.model,
            "clients": options.clients,
            "rounds": options.rounds,
            "seed": seed,
            "device": options.device,
            "evaluate_every": options.rounds,
        },
        "dataset": {"samples": options.samples, "shape": [1, 28, 28], "classes": 10},
        "work": {"epochs": options.epochs, "batch_size": 10, "lr": 0.05},
    }
    summary = execute(resolve(tables)).summary
    seconds, sent = summary["seconds"], summary["bytes"]
    return (seconds["train"] + seconds["server"]) / options.rounds, sent["down"] + sent["up"], summary["clusters"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--samples", type=int, default=100, help="samples of each client")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    found: dict[str, list[tuple[float, int, int]]] = {"fedavg": [], "coterie": []}
    for repeat in range(options.repeats):
        for method, values in found.items():
            values.append(run(method, options, repeat))
            print(json.dumps({"method": method, "repeat": repeat, "seconds_per_round": round(values[-1][0], 4)}))
    time = {method: median(value[0] for value in values) for method, values in found.items()}
    sent = {method: median(value[1] for value in values) for method, values in found.items()}
    ratios = {"time": time["coterie"] / time["fedavg"], "bytes": sent["coterie"] / sent["fedavg"]}
    print(json.dumps({**vars(options), **{name: round(ratio, 3) for name, ratio in ratios.items()}}))


if __name__ == "__main__":
    main()
