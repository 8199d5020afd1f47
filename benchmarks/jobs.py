"""Memory of `coterie compare --jobs N`: what each process holds alone, and what all of them hold together.

    python benchmarks/jobs.py --jobs 1 2 4 --data-dir DATA

A page that several processes map counts in parts (PSS), so the sum over the processes is the memory that is in use.
The largest sum that was seen is shown, in MB; the shared samples are the mapped files of the data. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--dataset", default="rotated-mnist")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--methods", nargs="+", default=["local", "fedavg", "fesem", "ifca"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for jobs in options.jobs:
        print(json.dumps(measured(jobs, options)), flush=True)


def measured(jobs: int, options: argparse.Namespace) -> dict[str, float]:
    """One comparison, watched while it runs."""
    command = [sys.executable, "-m", "coterie", "compare", "-d", options.dataset, "--rounds", str(options.rounds)]
    command += ["--clients", "20", "--model", "mclr", "--steps", "5", "--seeds", "2", "--jobs", str(jobs), "--json"]
    command += [part for method in options.methods for part in ("-a", method)]
    command += [] if options.data_dir is None else ["--data-dir", str(Path(options.data_dir).resolve())]
    best = {"total_mb": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
            while running.poll() is None:
                seen = [memory(pid) for pid in family(running.pid)]
                total = sum(found["pss"] for found in seen)
                if total > best["total_mb"]:
                    best = {
                        "total_mb": round(total),
                        "processes": len(seen),
                        "largest_alone_mb": round(max(found["alone"] for found in seen)),
                        "shared_samples_mb": round(sum(found["samples"] for found in seen)),
                    }
                time.sleep(0.2)
        if running.returncode:
            raise SystemExit(f"compare ended with code {running.returncode}.")
    return {"jobs": jobs, "seconds": round(time.monotonic() - began, 1), **best}


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(one for child in children for one in family(int(child)))]


def memory(pid: int) -> dict[str, float]:
    """MB of a process: its parts of all pages, pages that it holds alone, and its parts of the mapped samples."""
    found = {"pss": 0.0, "alone": 0.0, "samples": 0.0}
    is_samples = False
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_samples = os.path.basename(line).startswith("samples-")
        name, _, rest = line.partition(":")
        if name in ("Pss", "Private_Clean", "Private_Dirty"):
            size = int(rest.split()[0]) / 1000
            found["pss" if name == "Pss" else "alone"] += size
            found["samples"] += size if name == "Pss" and is_samples else 0
    return found


if __name__ == "__main__":
    main()
