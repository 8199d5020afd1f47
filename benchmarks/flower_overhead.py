"""Overhead of Flower: seconds per round in process, in Flower's simulation, and on four SuperNodes with TLS.

    python benchmarks/flower_overhead.py [--rounds 3]

Repeats one run on each engine: FeSEM over four sites with the embedded digits, evaluated in every round. Prints medians
over the rounds, the mean of a whole round, and Flower's messages per site. On Flower the messages of a round carry the
evaluation of the round before: its time counts as training. The last round is evaluated by a message of its own.
Then the CPU seconds of what a site imports for every message. Requires `pip install 'coterie[flower]'`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.flower.sites import Sites

import coterie
from coterie.client.work import SGD
from coterie.data.federation import Federation
from coterie.deploy.example import rotated_shares
from coterie.deploy.init import write_app

SITES = 4


def model() -> torch.nn.Module:
    nn = torch.nn
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def run_here(engine: str, rounds: int) -> dict[str, Any]:
    shares = rotated_shares(shares=8, turns=(0, 180))
    data = Federation.from_clients({f"site-{i}": shares[f"site-{i}"] for i in range(SITES)}, num_classes=10)
    work = SGD(lr=0.2, epochs=5, batch_size=10)
    result = coterie.run(coterie.FeSEM(num_clusters=2), data, model, rounds=rounds, work=work, engine=engine)
    return measured([row["seconds"] for row in result.rows], result.summary)


def run_deployed(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        sites = Sites(Path(folder) / "app", secure=True)
        try:
            sites.superlink()
            for number in range(SITES):
                sites.node(number)
            sites.run(algorithm="fesem", rounds=rounds, clusters=2, **{"evaluate-every": 1})
            sites.wait_for_end(900)
            return measured([row["seconds"] for row in sites.rows()], sites.summary())  # type: ignore[misc]
        finally:
            sites.close()


def measured(seconds: list[dict[str, float]], summary: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a round, and messages per site in the whole run, its start included."""
    parts = ("train", "server", "evaluate")
    found: dict[str, Any] = {part: round(statistics.median(row[part] for row in seconds), 4) for part in parts}
    found["round"] = round(statistics.mean(sum(row[part] for part in parts) for row in seconds), 4)
    messages = summary["bytes"].get("wire", {}).get("messages")
    return found if messages is None else found | {"messages": messages / SITES}


def import_of_a_site(times: int = 3) -> dict[str, Any]:
    """CPU seconds, user and system, of a process that imports a site's ClientApp, and of one that imports torch."""

    def cpu(code: str, folder: Path) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "app"
        write_app(folder, "trial", SITES)
        codes = {
            "site": "import sites.client",
            "torch and flwr": "import torch, flwr.clientapp",
            "torch": "import torch",
        }
        found: dict[str, list[float]] = {what: [] for what in codes}
        for _ in range(times + 1):
            for what, code in codes.items():
                found[what].append(cpu(code, folder))
    # The first one compiles the modules. A busy machine only adds to CPU seconds, so the least is the cost.
    return {"import": {what: [round(min(values[1:]), 2), round(max(values[1:]), 2)] for what, values in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for name, run in (
        ("vectorized", lambda: run_here("vectorized", rounds)),
        ("loop", lambda: run_here("loop", rounds)),
        ("flower, simulated", lambda: run_here("flower", rounds)),
        ("flower, four nodes with TLS", lambda: run_deployed(rounds)),
    ):
        began = time.perf_counter()
        found = run()
        print(json.dumps({"engine": name, **found, "whole": round(time.perf_counter() - began, 1)}), flush=True)
    print(json.dumps(import_of_a_site()), flush=True)


if __name__ == "__main__":
    main()
