"""Processor time of a command from its start to its end (user + system seconds, medians).

    python benchmarks/startup.py --repeats 5            # a line of JSON per command, then a table

Processor time, because other programs on the machine hardly change it. The run has one round on the embedded digits;
a first run, not counted, compiles and measures what later runs find in the cache.
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

RUN = ("run", "--rounds", "1", "--quiet")
COMMANDS = {
    "--version": ("--version",),
    "--help": ("--help",),
    "run --help": ("run", "--help"),
    "a wrong flag": ("run", "--roundz", "3"),
    "list algorithms": ("list", "algorithms"),
    "show": ("show", "runs/first"),
    "list runs": ("list", "runs"),
    "run, one round": RUN,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        spent(Path(folder), *RUN, "--name", "first")
        for name in options.only:
            times = [spent(Path(folder), *COMMANDS[name]) for _ in range(options.repeats)]
            cpu, wall = (statistics.median(column) for column in zip(*times, strict=True))
            rows.append({"command": name, "cpu_seconds": round(cpu, 3), "wall_seconds": round(wall, 3)})
            print(json.dumps(rows[-1]), flush=True)
    print("\n| command | CPU, s | wall, s |\n|---|---|---|")
    for row in rows:
        print(f"| `{row['command']}` | {row['cpu_seconds']:.2f} | {row['wall_seconds']:.2f} |")


def spent(folder: Path, *arguments: str) -> tuple[float, float]:
    """Processor and wall seconds of one command."""
    began, before = time.monotonic(), os.times()
    command = [sys.executable, "-m", "coterie", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    after = os.times()
    if done.returncode not in (0, 2) or "Traceback" in done.stderr:
        raise SystemExit(f"{' '.join(arguments)} ended with code {done.returncode}: {done.stderr}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return cpu, time.monotonic() - began


if __name__ == "__main__":
    main()
