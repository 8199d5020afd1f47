"""Recovery of the clustered methods from 30 % wrong labels, and from a center overwritten by a copy of another.

    python benchmarks/guard.py [--seeds 10] [--methods fesem md_icfl fedds ifca] [--jobs 2] [--out rows.jsonl]

Rotated digits, 40 clients, 20 rounds, with the guard on and off; ARI after round 20.

- `wrong`: after the start, 30 % of the labels are changed, and the centers are computed from the wrong partition.
- `copy`: after round 5, center 1 is overwritten by a copy of center 0.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
from pool import Row, run_all

from coterie.client.steps import train
from coterie.engines import make_engine
from coterie.methods.parts.clustering import CenterSums
from coterie.randomness import Rng
from coterie.runs.experiment import merge, resolve
from coterie.runs.loop import Trainer


def trainer_of(method: str, seed: int, guard: bool) -> Trainer:
    tables: dict[str, dict[str, Any]] = {
        "run": {"algorithm": method, "dataset": "rotated-digits", "seed": seed, "rounds": 20},
        "algorithm": {"guard": guard},
    }
    setup = resolve(merge(tables)).loaded()
    engine = make_engine("vectorized", setup.task(), setup.federation(), "cpu")
    return Trainer(setup.algorithm, engine, setup.federation(), setup.schedule)


def with_wrong_labels(trainer: Trainer, seed: int, share: float = 0.3) -> None:
    """Change a share of the labels, average the first models of the wrong partition into centers, and run."""
    trainer._start()
    engine, state = trainer.engine, trainer.state
    rng = Rng.seed(seed).at("wrong")
    groups = trainer.federation.groups
    assert groups is not None
    labels = groups.clone() if bool((state.labels < 0).any()) else state.labels.clone()
    moved = rng.permutation(len(labels))[: round(share * len(labels))]
    step = 1 + (rng.at("step").uniform(len(moved)) * (state.num_clusters - 1)).long()
    labels[moved] = (labels[moved] + step) % state.num_clusters
    sums = CenterSums(state.num_clusters, like=state.centers)
    zeros = torch.zeros(engine.num_clients, dtype=torch.int64)
    common = state.common.unsqueeze(0)
    for chunk in engine.call(train, engine.everyone(), models=common, refs=zeros, rng=rng):
        sums.add(chunk.answer.params, labels[chunk.clients])
    trainer.state = replace(state, labels=labels, centers=sums.means(keep=state.centers))
    trainer.progress.labels[-1] = labels.numpy().copy()
    trainer.run()


def with_copied_center(trainer: Trainer) -> None:
    """Run to round 5, overwrite center 1 with center 0, and continue."""
    trainer._start()
    for number in range(1, 6):
        trainer._round(number)
    centers = trainer.state.centers.clone()
    centers[1] = centers[0]
    trainer.state = replace(trainer.state, centers=centers)
    trainer.run()


def one(method: str, fault: str, guard: bool, seed: int) -> Row:
    trainer = trainer_of(method, seed, guard)
    with_wrong_labels(trainer, seed) if fault == "wrong" else with_copied_center(trainer)
    ari = round(trainer.progress.rows[-1]["ari"], 2)
    return {"method": method, "fault": fault, "guard": guard, "seed": seed, "ari": ari}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--methods", nargs="+", default=["fesem", "md_icfl", "fedds", "ifca"])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    cases = [(m, f, g) for m in options.methods for f in ("wrong", "copy") for g in (True, False)]
    rows = run_all(one, [(*case, seed) for case in cases for seed in range(options.seeds)], options.jobs, options.out)
    print("| method | fault | guard | recovered (ARI >= 0.95) | worst ARI |\n|---|---|---|---|---|")
    for method, fault, guard in cases:
        found = [r["ari"] for r in rows if (r["method"], r["fault"], r["guard"]) == (method, fault, guard)]
        recovered = sum(ari >= 0.95 for ari in found)
        counts = f"{recovered} of {len(found)} | {min(found):.2f}"
        print(f"| `{method}` | {fault} | {'on' if guard else 'off'} | {counts} |")


if __name__ == "__main__":
    main()
