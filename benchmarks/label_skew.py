"""Rotated MNIST as in MD-ICFL's table 4 and with label skew: accuracy and ARI of the clustered methods.

    python benchmarks/label_skew.py --data-dir DATA [--jobs 6] [--seeds 3] [--out table.json]

Every run is a process of its own (`coterie run --json`), several at a time on one GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

CASES = [
    ("fesem", 100, []),
    ("md_icfl", 100, []),
    ("fedds", 100, []),
    ("ifca", 100, []),
    ("md_icfl", 10, []),
    ("md_icfl", 3, []),
    ("fedds", 10, []),
    ("ifca", 3, []),
]


def one(case: tuple[str, int, list[str]], seed: int, data: str) -> dict[str, Any]:
    method, alpha, more = case
    command = [sys.executable, "-m", "coterie", "run", "--algorithm", method, "--dataset", "rotated-mnist"]
    command += ["--rounds", "30", "--seed", str(seed), "--set", f"scenario.alpha={alpha}", "--data-dir", data]
    command += ["--evaluate-every", "5", "--json", "--out", "runs/label-skew", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"method": method, "alpha": alpha, "seed": seed, "error": done.stderr[-400:]}
    summary = json.loads(done.stdout)
    return {
        "method": method,
        "alpha": alpha,
        "seed": seed,
        "accuracy": round(100 * summary["accuracy"]["macro"], 2),
        "ari": round(summary["ari"], 3),
        "repairs": summary["repairs"],
        "seconds": round(summary["seconds"]["total"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="only cases of this method")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    wanted = [(c, s) for c in CASES if options.only in ("", c[0]) for s in range(options.seeds)]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda pair: one(pair[0], pair[1], options.data_dir), wanted))
    for row in rows:
        print(json.dumps(row))
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
