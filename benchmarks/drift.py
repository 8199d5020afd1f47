"""Recovery of the clustered methods after 30 % of the clients have changed their kind in round 10.

    python benchmarks/drift.py [--seeds 5] [--methods fesem ifca ...] [--jobs 2] [--out rows.jsonl]

Rotated digits, 40 clients of whom 8 are held out, 30 rounds, with the guard on and off. Prints, for each method and
label skew: on how many seeds the ARI is at least 0.95 again within 10 rounds and at the end, bytes of rounds and
repairs with the guard as a multiple of those without, and the accuracy of members and newcomers at the end.
"""

from __future__ import annotations

import argparse
from statistics import mean
from typing import Any

from pool import Row, run_all

from coterie.runs.execution import execute
from coterie.runs.experiment import merge, resolve

METHODS = ["fesem", "fesem_ma", "md_icfl", "fedds", "feddsmic", "ifca"]
DRIFT, ROUNDS, WITHIN = 10, 30, 10


def one(method: str, alpha: float, guard: bool, seed: int) -> Row:
    tables: dict[str, dict[str, Any]] = {
        "run": {
            "algorithm": method,
            "dataset": "rotated-digits",
            "scenario": "rotated+drift",
            "rounds": ROUNDS,
            "seed": seed,
            "unseen": 0.2,
            "device": "cpu",
        },
        "scenario": {"at": [DRIFT], "share": 0.3, "alpha": alpha, "reserve": 10},
        "algorithm": {"guard": guard},
    }
    result = execute(resolve(merge(tables)))
    done, ari = result.summary, [row["ari"] for row in result.rows]
    after = ari[DRIFT - 1 : DRIFT + WITHIN]  # rounds 10 ... 20
    return {
        "method": method,
        "alpha": alpha,
        "guard": guard,
        "seed": seed,
        "start_ari": done["start_ari"],
        "ari_before": ari[DRIFT - 2],
        "ari_within": max(after),
        "ari_end": ari[-1],
        "recovered_in": next((i for i, value in enumerate(after) if value >= 0.95), None),
        "bytes": done["bytes"]["down"] + done["bytes"]["up"] + sum(done["bytes"]["repair"][k] for k in ("down", "up")),
        "members": round(100 * done["accuracy"]["macro"], 2),
        "newcomers": round(100 * done["unseen"]["accuracy"]["macro"], 2),
    }


def table(rows: list[Row]) -> str:
    heads = "method | alpha | guard | ARI >= .95 within 10 rounds | at the end | bytes | members | newcomers"
    lines = [f"| {heads} |", "|---" * 8 + "|"]
    for key in dict.fromkeys((r["method"], r["alpha"], r["guard"]) for r in rows):
        mine = [r for r in rows if (r["method"], r["alpha"], r["guard"]) == key]
        plain = [r for r in rows if (r["method"], r["alpha"], r["guard"]) == (*key[:2], False)]
        back = sum(r["recovered_in"] is not None for r in mine)
        end = sum(r["ari_end"] >= 0.95 for r in mine)
        more = max(r["bytes"] / p["bytes"] for r, p in zip(mine, plain, strict=True)) if plain else float("nan")
        cells = [f"`{key[0]}`", f"{key[1]:g}", "on" if key[2] else "off", f"{back} of {len(mine)}"]
        cells += [f"{end} of {len(mine)}", f"{more:.3f}"]
        cells += [f"{mean(r[name] for r in mine):.1f}" for name in ("members", "newcomers")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    cases = [
        (m, a, g, s) for m in options.methods for a in (100.0, 3.0) for g in (True, False) for s in range(options.seeds)
    ]
    print(table(run_all(one, cases, options.jobs, options.out)))


if __name__ == "__main__":
    main()
