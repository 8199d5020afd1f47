"""A guard against getting slower: fails if our ratio to the plain loop is under 0.8 of the recorded one.

    python benchmarks/check.py [--record]

The ratio of two ways on the same machine in the same run is compared, not seconds. `--record` writes the file anew; do
so on a quiet machine, with the reason in the commit message.
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
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {name: Bench(workloads(device)[name], str(device)).run(options.repeats)["ratio"] for name in WATCHED}
    told = machine(device)
    if options.record:
        RECORD.write_text(json.dumps({"machine": told, "device": device.type, "ratios": found}, indent=1) + "\n")
        print(f"recorded in {RECORD}: {found}")
        return
    recorded = json.loads(RECORD.read_text())
    if recorded["device"] != device.type:
        sys.exit(f"recorded on a {recorded['device']}, and this is a {device.type}: nothing to compare")
    slower = []
    for name, ratio in found.items():
        before = recorded["ratios"][name]
        print(f"{name}: {ratio:.2f}x the plain loop; recorded {before:.2f}x")
        if ratio < LEAST * before:
            slower.append(name)
    if slower:
        sys.exit(f"slower than {LEAST} of what was recorded: {', '.join(slower)}")


if __name__ == "__main__":
    main()
