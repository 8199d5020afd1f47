"""Overhead of Flower: seconds per round in process, in Flower's simulation, and on four SuperNodes with TLS.

    python benchmarks/flower_overhead.py [--rounds 3]

Repeats one run on each engine: FeSEM over four sites with the embedded digits. Training and evaluation are measured
separately; each is one message per site. Requires `pip install 'coterie[flower]'`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.flower.sites import Sites

import coterie
from coterie.client.work import SGD
from coterie.data.federation import Federation
from coterie.deploy.example import rotated_shares


def model() -> torch.nn.Module:
    nn = torch.nn
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def run_here(engine: str, rounds: int) -> list[dict[str, float]]:
    shares = rotated_shares(shares=8, turns=(0, 180))
    data = Federation.from_clients({f"site-{i}": shares[f"site-{i}"] for i in range(4)}, num_classes=10)
    work = SGD(lr=0.2, epochs=5, batch_size=10)
    result = coterie.run(coterie.FeSEM(num_clusters=2), data, model, rounds=rounds, work=work, engine=engine)
    return [row["seconds"] for row in result.rows]


def run_deployed(rounds: int) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        sites = Sites(Path(folder) / "app", secure=True)
        try:
            sites.superlink()
            for number in range(4):
                sites.node(number)
            sites.run(rounds=rounds, clusters=2, **{"evaluate-every": 1})
            sites.wait_for_end(900)
            return [row["seconds"] for row in sites.rows()]  # type: ignore[misc]
        finally:
            sites.close()


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
        rows = run()
        parts = ("train", "server", "evaluate")
        seconds = {part: round(statistics.median(row[part] for row in rows), 4) for part in parts}
        print(json.dumps({"engine": name, **seconds, "whole": round(time.perf_counter() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
