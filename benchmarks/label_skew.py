"""Accuracy and ARI of the clustered methods on rotated MNIST, as in MD-ICFL's table 4 and with label skew.

    python benchmarks/label_skew.py --data-dir DATA [--jobs 3] [--seeds 3] [--out rows.jsonl]

Every run is a separate process (`coterie run --json`); several of them share one GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from pool import Row, run_all

CASES = [(method, alpha) for alpha in (100, 3, 10) for method in ("md_icfl", "fesem", "fedds", "ifca")]


def one(method: str, alpha: int, seed: int, data: str, out: str) -> Row:
    command = [sys.executable, "-m", "coterie", "run", "--algorithm", method, "--dataset", "rotated-mnist"]
    command += ["--rounds", "30", "--seed", str(seed), "--set", f"scenario.alpha={alpha}", "--data-dir", data]
    command += ["--evaluate-every", "10", "--json", "--out", out]
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
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="only this method")
    parser.add_argument("--alpha", type=int, default=0, help="only this alpha")
    parser.add_argument("--runs", default="runs/label-skew", help="folder for the run folders")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    cases = [c for c in CASES if options.only in ("", c[0]) and options.alpha in (0, c[1])]
    jobs = [(*case, seed, options.data_dir, options.runs) for case in cases for seed in range(options.seeds)]
    rows = run_all(one, jobs, options.jobs, options.out)
    print("| method | alpha | accuracy by seed | ARI |\n|---|---|---|---|")
    for case in cases:
        mine = [r for r in rows if (r["method"], r["alpha"]) == case]
        accuracy = ", ".join(str(r.get("accuracy", "failed")) for r in mine)
        print(f"| `{case[0]}` | {case[1]} | {accuracy} | {', '.join(str(r.get('ari', '-')) for r in mine)} |")


if __name__ == "__main__":
    main()
