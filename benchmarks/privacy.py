"""Accuracy and ARI against epsilon: the default method and FeSEM with clip and noise at the clients.

    python benchmarks/privacy.py [--dataset rotated-digits] [--model NAME] [--clients N] [--rounds 10] [--seeds 2]
        [--clip 1] [--noises off 0 0.1] [--jobs 1] [--out rows.jsonl]

Settings `least` send as little as possible that noise does not cover: `signal=updates`, no guard, and for `coterie`
`serve=kind`. The first row of a method is without clip and noise, the second with the clip alone. Epsilon is that of
`coterie show`, for the noised vectors of the client that sent most of them; it needs the extra `privacy`.
"""

from __future__ import annotations

import argparse
from statistics import mean
from typing import Any

from pool import Row, run_all

from coterie.runs.accounting import epsilon
from coterie.runs.execution import execute
from coterie.runs.experiment import merge, resolve

LEAST: dict[str, dict[str, Any]] = {
    "coterie": {"signal": "updates", "guard": False, "serve": "kind"},
    "fesem": {"signal": "updates", "guard": False},
}
NOISES = (None, 0.0, 0.03, 0.1, 0.3, 1.0, 3.0)


def one(run: dict[str, Any], clip: float, method: str, is_least: bool, noise: float | None, seed: int) -> Row:
    work = {} if noise is None else {"update_clip": clip} | ({"update_noise": noise} if noise else {})
    tables: dict[str, dict[str, Any]] = {
        "run": {**run, "algorithm": method, "seed": seed, "device": "cpu"},
        "algorithm": LEAST[method] if is_least else {},
        "work": work,
    }
    done = execute(resolve(merge(tables))).summary
    told = done["privacy"] or {"noised": [], "exact": [], "releases": 0}
    return {
        "method": method,
        "least": is_least,
        "noise": noise,
        "seed": seed,
        "accuracy": round(100 * done["accuracy"]["macro"], 2),
        "ari": done["ari"],
        "clusters": done["clusters"],
        "releases": told["releases"],
        "epsilon": None if not noise else epsilon(noise, told["releases"]),
        "exact": told["exact"],
    }


def table(rows: list[Row]) -> str:
    heads = ["method", "settings", "noise", "vectors", "epsilon", "accuracy", "ARI", "clusters", "sent without noise"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for key in dict.fromkeys((r["method"], r["least"], r["noise"]) for r in rows):
        mine = [r for r in rows if (r["method"], r["least"], r["noise"]) == key]
        noise = "off" if key[2] is None else f"{key[2]:g}"
        spent = f"{max(r['epsilon'] for r in mine):,.0f}" if key[2] else "none"
        cells = [f"`{key[0]}`", "least" if key[1] else "default", noise, f"{max(r['releases'] for r in mine)}", spent]
        cells += [f"{mean(r['accuracy'] for r in mine):.1f}", f"{mean(r['ari'] for r in mine):.2f}"]
        cells += [f"{mean(r['clusters'] for r in mine):.1f}"]
        cells += [", ".join(sorted({name for r in mine for name in r["exact"]})) or "all"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="rotated-digits")
    parser.add_argument("--model")
    parser.add_argument("--clients", type=int)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--methods", nargs="+", default=["coterie", "fesem"])
    parser.add_argument("--noises", nargs="+", type=lambda text: None if text == "off" else float(text), default=NOISES)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    names = ("dataset", "rounds", "model", "clients")
    run = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    cases = [
        (run, options.clip, method, is_least, noise, seed)
        for method in options.methods
        for is_least in (False, True)
        for noise in options.noises
        for seed in range(options.seeds)
    ]
    print(table(run_all(one, cases, options.jobs, options.out)))


if __name__ == "__main__":
    main()
