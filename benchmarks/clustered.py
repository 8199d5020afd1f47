"""Clustered methods on rotated digits: start x guard x method, mean and worst seed (the table in docs/methods.md).

    python benchmarks/clustered.py [--seeds 10] [--jobs 2] [--only md_icfl] [--out rows.jsonl]

40 clients, 20 rounds, all other settings at their defaults.
"""

from __future__ import annotations

import argparse
from statistics import mean
from typing import Any

from pool import Row, run_all

import coterie
from coterie.methods.base import find_algorithm

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "fesem": ("fesem", {}),
    "fesem_ma": ("fesem_ma", {}),
    "md_icfl": ("md_icfl", {}),
    "md_icfl strong": ("md_icfl", {"privacy": "strong"}),
    "md_icfl generator": ("md_icfl", {"sampler": "generator"}),
    "md_icfl generator strong": ("md_icfl", {"sampler": "generator", "privacy": "strong"}),
    "fedds": ("fedds", {}),
    "feddsmic": ("feddsmic", {}),
    "ifca": ("ifca", {}),
}


def one(name: str, init: str, guard: bool, seed: int) -> Row:
    key, fields = METHODS[name]
    method = find_algorithm(key)(**{"init": init, "guard": guard, **fields})
    done = coterie.run(method, "rotated-digits", rounds=20, seed=seed).summary
    return {
        "method": name,
        "init": init,
        "guard": guard,
        "seed": seed,
        "accuracy": round(100 * done["accuracy"]["macro"], 2),
        "ari": round(done["ari"], 3),
        "repairs": len(done["repairs"]),
        "seconds": round(done["seconds"]["total"], 1),
    }


def table(rows: list[Row]) -> str:
    lines = ["| method | init | guard | accuracy, mean | worst | ARI, mean | worst | repairs |", "|---" * 8 + "|"]
    keys = dict.fromkeys((r["method"], r["init"], r["guard"]) for r in rows)
    for key in keys:
        mine = [r for r in rows if (r["method"], r["init"], r["guard"]) == key]
        accuracy, ari = [r["accuracy"] for r in mine], [r["ari"] for r in mine]
        numbers = f"{mean(accuracy):.1f} | {min(accuracy):.1f} | {mean(ari):.2f} | {min(ari):.2f}"
        guard = "on" if key[2] else "off"
        lines.append(f"| `{key[0]}` | {key[1]} | {guard} | {numbers} | {sum(r['repairs'] for r in mine)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="only methods whose name starts with this")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    cases = []
    for name in METHODS:
        if not name.startswith(options.only):
            continue
        # The generator is slow, and its start and guard are those of the search: only the default is run.
        settings = [(init, guard) for init in ("warm", "paper") for guard in (True, False)]
        settings = settings[:1] if "generator" in name else settings
        cases += [(name, init, guard, seed) for init, guard in settings for seed in range(options.seeds)]
    cases.sort(key=lambda case: "generator" not in case[0])
    rows = run_all(one, cases, options.jobs, options.out)
    print(table(rows))


if __name__ == "__main__":
    main()
