"""Effect of rounding on a whole experiment: rotated MNIST (alpha = 10), by precision and seed.

python benchmarks/precision.py --data-dir DATA [--seeds 3] [--methods fesem md_icfl] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from pool import Row, run_all


def one(method: str, precision: str, seed: int, data: str, out: str, device: str) -> Row:
    command = [sys.executable, "-m", "coterie", "run", "--algorithm", method, "--dataset", "rotated-mnist"]
    command += ["--rounds", "30", "--seed", str(seed), "--set", "scenario.alpha=10", "--data-dir", data]
    command += ["--evaluate-every", "30", "--json", "--out", out, "--device", device]
    for setting in precision.split("+"):
        command += ["--set", "engine.compile=true" if setting == "compile" else f"engine.precision={setting}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"method": method, "precision": precision, "seed": seed, "error": done.stderr[-400:]}
    summary = json.loads(done.stdout)
    accuracy, seconds = round(100 * summary["accuracy"]["macro"], 2), round(summary["seconds"]["total"], 1)
    scores = {"accuracy": accuracy, "ari": round(summary["ari"], 3), "seconds": seconds}
    return {"method": method, "precision": precision, "seed": seed, **scores}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=["fesem", "md_icfl"])
    parser.add_argument("--precisions", nargs="+", default=["float32", "tf32", "bf16", "tf32+compile"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--runs", default="runs/precision", help="folder for the run folders")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    cases = [(method, precision) for method in options.methods for precision in options.precisions]
    jobs = [
        (*case, seed, options.data_dir, options.runs, options.device)
        for case in cases
        for seed in range(options.seeds)
    ]  # fmt: skip
    rows = run_all(one, jobs, options.jobs, options.out)
    print("| method | precision | accuracy by seed | ARI |\n|---|---|---|---|")
    for case in cases:
        mine = [r for r in rows if (r["method"], r["precision"]) == case]
        accuracy = ", ".join(str(r.get("accuracy", r.get("error", "")[-80:])) for r in mine)
        print(f"| `{case[0]}` | {case[1]} | {accuracy} | {', '.join(str(r.get('ari', '-')) for r in mine)} |")


if __name__ == "__main__":
    main()
