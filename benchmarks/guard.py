"""Does a method recover? From 30 % wrong labels, and after one center is overwritten by a copy of another.

    python benchmarks/guard.py [--seeds 10] [--methods fesem md_icfl fedds ifca] [--guard true|false]

Rotated digits, 40 clients, 20 rounds. `wrong`: after the start, 30 % of the labels are moved to another cluster and
the centers are recomputed from the wrong partition. `copy`: after round 5 center 1 becomes a copy of center 0.
Prints the ARI after round 20 for each seed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import torch

from coterie.api import Setup
from coterie.block import train
from coterie.clustering import CenterSums
from coterie.config import merge, resolve
from coterie.engines import make_engine
from coterie.randomness import Rng
from coterie.train import Trainer


def trainer_of(method: str, seed: int, guard: bool) -> Trainer:
    tables: dict[str, dict[str, Any]] = {
        "run": {"algorithm": method, "dataset": "rotated-digits", "seed": seed, "rounds": 20},
        "algorithm": {"guard": guard},
    }
    setup = Setup.of(resolve(merge(tables)))
    engine = make_engine("vectorized", setup.task(), setup.federation, "cpu")
    return Trainer(setup.algorithm, engine, setup.federation, setup.schedule)


def with_wrong_labels(trainer: Trainer, seed: int, share: float = 0.3) -> None:
    """Move a share of the labels, and make the centers the means of the wrong partition's first models."""
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
    """Run to round 5, overwrite center 1 by center 0, go on."""
    trainer._start()
    for number in range(1, 6):
        trainer._round(number)
    centers = trainer.state.centers.clone()
    centers[1] = centers[0]
    trainer.state = replace(trainer.state, centers=centers)
    trainer.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--methods", nargs="+", default=["fesem", "md_icfl", "fedds", "ifca"])
    parser.add_argument("--guard", default="true", choices=["true", "false"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for method in options.methods:
        for harm in ("wrong", "copy"):
            found = []
            for seed in range(options.seeds):
                trainer = trainer_of(method, seed, options.guard == "true")
                with_wrong_labels(trainer, seed) if harm == "wrong" else with_copied_center(trainer)
                found.append(round(trainer.progress.rows[-1]["ari"], 2))
            good = sum(ari >= 0.95 for ari in found)
            print(
                json.dumps({"method": method, "harm": harm, "guard": options.guard, "ari": found, "back": good}),
                flush=True,
            )


if __name__ == "__main__":
    main()
