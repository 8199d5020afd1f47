"""Performance regression check: fails if the speedup over the plain loop falls below 0.8 of the recorded one.

    python benchmarks/check.py [--record]

It compares ratios measured in one run on one machine, not seconds. `--record` overwrites the recorded ratios: use it
on a quiet machine, and give the reason in the commit message.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from coterie.runs.bench import Bench, machine, workloads

RECORD = Path(__file__).with_name("recorded.json")
WATCHED = ("mclr", "mlp", "lenet", "leaf-cnn")
LEAST = 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="overwrite the recorded ratios")
    parser.add_argument("--repeats", type=int, default=7, help="rounds to measure; the median counts")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {name: Bench(workloads(device)[name], str(device)).run(options.repeats)["ratio"] for name in WATCHED}
    if options.record:
        record = {"machine": machine(device), "device": device.type, "ratios": found}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        print(f"Recorded in {RECORD}: {found}")
        return
    recorded = json.loads(RECORD.read_text())
    if recorded["device"] != device.type:
        sys.exit(f"Nothing to compare: the ratios were recorded on {recorded['device']}, and this is {device.type}.")
    slower = []
    for name, ratio in found.items():
        before = recorded["ratios"][name]
        print(f"{name}: {ratio:.2f}x the plain loop; recorded {before:.2f}x")
        if ratio < LEAST * before:
            slower.append(name)
    if slower:
        sys.exit(f"Slower than {LEAST} of the recorded ratio: {', '.join(slower)}")


if __name__ == "__main__":
    main()
