"""Server time of each method, relative to client time, with 100 clients of LeNet.

    python benchmarks/server_share.py [--rounds 3] [--device cpu] [--only fedds] [--cpu]

Prints seconds per round for the clients' training and for the server (assigning, averaging, MD-ICFL's sampler,
FeSEM-MA's matching), and their ratio (`share`). On a busy machine `--cpu` compares processor time.
"""

from __future__ import annotations

import argparse
import json
import time

from coterie.methods.base import algorithms
from coterie.runs.execution import execute
from coterie.runs.experiment import merge, resolve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--cpu", action="store_true", help="processor time instead of wall time")
    options = parser.parse_args()
    if options.cpu:
        time.perf_counter = time.process_time  # a run measures its parts by it
    for name in options.only or algorithms():
        tables = {
            "run": {
                "algorithm": name,
                "dataset": "synthetic",
                "clients": 100,
                "rounds": options.rounds,
                "model": "lenet",
                "device": options.device,
                "evaluate_every": options.rounds,
            },
            "dataset": {"samples": 120, "shape": [1, 28, 28], "classes": 10},
            "work": {"lr": 0.05, "epochs": 1, "batch_size": 20},
        }
        seconds = execute(resolve(merge(tables))).summary["seconds"]
        train, server = seconds["train"] / options.rounds, seconds["server"] / options.rounds
        row = {"method": name, "train": round(train, 3), "server": round(server, 3), "share": round(server / train, 3)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
