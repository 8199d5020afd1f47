"""A run on a busy machine: the same command alone, and beside processes that never rest.

    python benchmarks/busy.py                           # FeSEM on digits, two rounds, engine loop, beside 8 processes
    python benchmarks/busy.py --engine vectorized --rounds 20

The processor is divided fairly: beside B busy processes on C cores, a run gets C / (B + C) of it at least, if its own
threads do not get in each other's way. The limit is (B + C) / C times the time alone, times 1.5. The command fails if
the median is above the limit. Alone and busy take turns, so that other load falls on both. Time is wall time: without
the start of the process (`--whole` counts it) it is that of the rounds, which the summary of the run gives.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MARGIN = 1.5
SPIN = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=8, help="number of busy processes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--algorithm", default="fesem")
    parser.add_argument("--dataset", default="rotated-digits")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--engine", default="loop")
    parser.add_argument("--whole", action="store_true", help="count the start of the process, too")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = (options.busy + cores) / cores * MARGIN
    times: dict[str, list[float]] = {"alone": [], "busy": []}
    seconds(options)  # compiles and measures what later runs find in the cache
    for _ in range(options.repeats):
        times["alone"].append(seconds(options))
        others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(options.busy)]
        try:
            times["busy"].append(seconds(options))
        finally:
            for other in others:
                other.kill()
                other.wait()
        print(json.dumps({name: round(values[-1], 2) for name, values in times.items()}), flush=True)
    alone, busy = statistics.median(times["alone"]), statistics.median(times["busy"])
    row = {"alone_seconds": round(alone, 2), "busy_seconds": round(busy, 2), "ratio": round(busy / alone, 2)}
    print(json.dumps({**row, "limit": round(limit, 2), "cores": cores, "busy": options.busy}))
    if busy > limit * alone:
        raise SystemExit(f"{busy / alone:.1f} times the time alone; the limit is {limit:.1f}.")


def seconds(options: argparse.Namespace) -> float:
    """Wall seconds of one run."""
    command = [sys.executable, "-m", "coterie", "run", "-a", options.algorithm, "-d", options.dataset, "--json"]
    command += ["--rounds", str(options.rounds), "--engine", options.engine]
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        done = subprocess.run(command, cwd=Path(folder), capture_output=True, text=True, check=False)
        spent = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"The run ended with code {done.returncode}: {done.stderr}")
    return spent if options.whole else float(json.loads(done.stdout)["seconds"]["total"])


if __name__ == "__main__":
    main()
