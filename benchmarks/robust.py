"""What 30 % hostile clients cost the honest ones, in points of accuracy, by attack, method and robust mean.

    python benchmarks/robust.py [--seeds 3] [--first-seed 0] [--methods coterie fesem] [--robust none median auto]
        [--attacks sign_flip ...] [--set scenario.quantity=2 ...] [--jobs 2] [--out rows.jsonl]

Rotated digits, 40 clients, 15 rounds. The loss is against the same method and seed with a plain mean and no attack; the
column `none` is what a robust mean costs without one. Of `backdoor`, the share of samples with the trigger that honest
clients' models take for the target class is given too. `--set` gives all runs more settings. Rows of `--out` that are
there already are not run again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any, get_args

from pool import Row, run_all

import coterie
from coterie.engines.settings import AttackKind

ATTACKS = get_args(AttackKind)


def one(method: str, robust: str, attack: str, seed: int, settings: tuple[str, ...] = ()) -> Row:
    more = {"algorithm.robust": robust} | dict(_setting(text) for text in settings)
    given = {"attack": attack, "attackers": 0.3, "set": more}
    summary = coterie.run(method, "rotated-digits", rounds=15, seed=seed, **given).summary
    found = {"method": method, "robust": robust, "attack": attack, "seed": seed, "set": list(settings)}
    success = (summary["attack"] or {}).get("success")
    return found | {"accuracy": summary["accuracy"]["macro"], "ari": summary["ari"], "success": success}


def _setting(text: str) -> tuple[str, Any]:
    """A setting KEY=VALUE, with a JSON value or a plain text."""
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def show(rows: list[Row], attacks: list[str]) -> None:
    """Print losses in points as means over seeds, with the worst seed in brackets, and the backdoor's success."""
    clean = {
        (row["method"], row["seed"]): row["accuracy"] for row in rows if (row["robust"], row["attack"]) == ("none",) * 2
    }
    print("| method | robust |", " | ".join(f"`{attack}`" for attack in attacks), "| backdoor works |")
    print("|---|---|" + "---|" * (len(attacks) + 1))
    for method, robust in dict.fromkeys((row["method"], row["robust"]) for row in rows):
        mine = [row for row in rows if (row["method"], row["robust"]) == (method, robust)]
        cells = []
        for attack in attacks:
            lost = [
                100 * (clean[method, row["seed"]] - row["accuracy"])
                for row in mine
                if row["attack"] == attack and (method, row["seed"]) in clean
            ]
            cells.append(f"{mean(lost):.1f} ({max(lost):.1f})" if lost else "-")
        fooled = [100 * row["success"] for row in mine if row["success"] is not None]
        cells.append(f"{mean(fooled):.0f} % ({max(fooled):.0f})" if fooled else "-")
        print(f"| `{method}` | {robust} |", " | ".join(cells), "|")


def _case(row: Row) -> tuple[str, str, str, int, tuple[str, ...]]:
    return row["method"], row["robust"], row["attack"], row["seed"], tuple(row.get("set", ()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", default=["coterie", "fesem"])
    parser.add_argument("--robust", nargs="+", default=["none", "median", "auto"])
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=ATTACKS)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    done: list[Row] = []
    if given.out and Path(given.out).exists():
        done = [json.loads(line) for line in Path(given.out).read_text(encoding="utf-8").splitlines()]
    known = {_case(row) for row in done}
    cases = [
        (method, robust, attack, seed, tuple(given.set))
        for seed in range(given.first_seed, given.first_seed + given.seeds)
        for method in given.methods
        for robust in given.robust
        for attack in dict.fromkeys(["none", *given.attacks])
    ]
    rows = done + run_all(one, [case for case in cases if case not in known], given.jobs, given.out)
    order = {case: place for place, case in enumerate(cases)}
    wanted = [row for row in rows if _case(row) in order]
    show(sorted(wanted, key=lambda row: order[_case(row)]), given.attacks)


if __name__ == "__main__":
    main()
