"""How often `coterie choose-k` recommends the true number of kinds, with and without label skew and size skew.

    python benchmarks/choose_k.py [--seeds 0-9] [--jobs 1] [--out rows.jsonl]

Rotated digits with 1, 2 and 4 rotations, label skew alpha = 100 and 3, equal sizes and quantity = 0.5.
"""

from __future__ import annotations

import argparse
import time

from pool import Row, run_all

CELLS = [(kinds, alpha, quantity) for kinds in (1, 2, 4) for alpha in (100.0, 3.0) for quantity in (None, 0.5)]


def one(kinds: int, alpha: float, quantity: float | None, seed: int) -> Row:
    from coterie.runs.choose_k import choose_k
    from coterie.runs.experiment import resolve

    scenario = {"groups": kinds, "alpha": alpha} | ({} if quantity is None else {"quantity": quantity})
    began = time.perf_counter()
    choice = choose_k(resolve({"run": {"dataset": "rotated-digits", "seed": seed}, "scenario": scenario}))
    return {
        "cell": [kinds, alpha, quantity],
        "seed": seed,
        "recommended": choice.recommended,
        "reason": choice.reason,
        "accuracy": [round(row.accuracy or 0.0, 4) for row in choice.rows],
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0-9", help="first-last")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    rows = run_all(one, [(*cell, seed) for cell in CELLS for seed in seeds], options.jobs, options.out)
    print("| kinds | alpha | quantity | right | recommended, by seed | seconds, mean |\n|---|---|---|---|---|---|")
    for cell in CELLS:
        mine = [row for row in rows if row["cell"] == list(cell)]
        found = [row["recommended"] for row in mine]
        seconds = sum(row["seconds"] for row in mine) / len(mine)
        right = f"{found.count(cell[0])} of {len(found)}"
        skew = "-" if cell[2] is None else cell[2]
        print(f"| {cell[0]} | {cell[1]:g} | {skew} | {right} | {' '.join(map(str, found))} | {seconds:.1f} |")


if __name__ == "__main__":
    main()
