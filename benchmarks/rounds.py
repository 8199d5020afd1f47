"""Rounds of one workload with one plan and nothing else, to be run under a profiler.

perf record -e cpu-clock python benchmarks/rounds.py lenet --plan native --workers 1 && perf report --sort dso,symbol
"""

from __future__ import annotations

import argparse

from coterie.engines.base import resolve_device
from coterie.runs.bench import Bench, workloads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("--plan", default="auto")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    known = workloads(resolve_device(options.device))
    made = Bench(known[options.workload], options.device, plan=options.plan, workers=options.workers)
    for _ in range(options.rounds):
        made.ours()


if __name__ == "__main__":
    main()
