"""Scaling with the number of clients, the size of the model and the number of clusters.

    python benchmarks/growth.py [--device cpu]

Clients and model size: microseconds per client step of our engine (median of 5 rounds). Clusters: seconds per round
with 100 clients of LeNet, for clients and server.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace

import torch

from coterie.runs.bench import CPU_WORKLOADS, Bench, Workload
from coterie.runs.execution import execute
from coterie.runs.experiment import merge, resolve


def microseconds(workload: Workload, device: str) -> float:
    made = Bench(replace(workload, plain_clients=1), device)
    made.ours()
    spent = []
    for _ in range(5):
        began = time.perf_counter()
        made.ours()
        if device == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - began)
    return round(statistics.median(spent) / (workload.clients * workload.steps) * 1e6, 3)


def round_of(method: str, clusters: int, device: str, rounds: int = 3) -> dict[str, float]:
    tables = {
        "run": {"algorithm": method, "dataset": "synthetic", "clients": 100, "rounds": rounds,
                "model": "lenet", "device": device, "evaluate_every": rounds},
        "algorithm": {"num_clusters": clusters},
        "dataset": {"samples": 120, "shape": [1, 28, 28], "classes": 10},
        "work": {"lr": 0.05, "epochs": 1, "batch_size": 20},
    }  # fmt: skip
    seconds = execute(resolve(merge(tables))).loaded().summary["seconds"]
    return {"clients_s": round(seconds["train"] / rounds, 3), "server_s": round(seconds["server"] / rounds, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    for name, counts in (("mclr", (100, 1000, 10000)), ("lenet", (100, 1000, 5000))):
        for count in counts:
            workload = replace(CPU_WORKLOADS[name], clients=count)
            print(json.dumps({"model": name, "clients": count, "us": microseconds(workload, device)}), flush=True)
    for hidden in (50, 100, 200, 400, 800):
        workload = replace(CPU_WORKLOADS["mlp"], settings=(("hidden", hidden),))
        row = {"model": f"mlp {hidden}", "parameters": 795 * hidden + 10, "us": microseconds(workload, device)}
        print(json.dumps(row), flush=True)
    for method in ("fesem", "ifca"):
        for clusters in (2, 4, 8, 16):
            print(json.dumps({"method": method, "K": clusters, **round_of(method, clusters, device)}), flush=True)


if __name__ == "__main__":
    main()
