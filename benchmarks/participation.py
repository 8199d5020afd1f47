"""Few clients in a round: when does `coterie` have the true kinds, and when again after a drift?

    python benchmarks/participation.py [--seeds 0-4] [--clients 48] [--participation 0.1] [--rounds 60] [--drift 30]

Rotated digits, four kinds; at round `--drift` 30 % of the clients change theirs. `found` is the first round after which
all clients that were seen are in clusters of their kind (ARI 1). `ari_after_15` is the ARI 15 rounds after the drift,
of the clients that have taken part since: a client that does not take part cannot be followed.
"""

from __future__ import annotations

import argparse
import json

from sklearn.metrics import adjusted_rand_score

from coterie.runs.execution import execute
from coterie.runs.experiment import resolve
from coterie.runs.settings import parse_seeds


def run(options: argparse.Namespace, seed: int) -> dict[str, object]:
    """One run: when the kinds are found, and how well the drift is followed."""
    tables = {
        "run": {
            "algorithm": "coterie",
            "dataset": "rotated-digits",
            "scenario": "rotated+drift",
            "clients": options.clients,
            "participation": options.participation,
            "rounds": options.rounds,
            "seed": seed,
            "device": "cpu",
            "evaluate_every": options.rounds,
        },
        "scenario": {"at": [options.drift], "share": 0.3, "tests": "like"},
    }
    trainer = execute(resolve(tables))._trainer
    history, federation = trainer.label_history(), trainer.federation
    rng = trainer._rng
    since: set[int] = set()
    found, after = None, None
    for number in range(1, options.rounds + 1):
        cohort = trainer.engine.draw(rng.at("round", number).at("cohort"), trainer.engine.cohort_size).tolist()
        labels, groups = history[number], federation.at(number).groups.numpy()
        if number < options.drift:
            seen = labels >= 0
            if found is None and len(set(groups[seen])) == 4 and adjusted_rand_score(groups[seen], labels[seen]) == 1:
                found = number
            continue
        since |= set(cohort)
        who = sorted(since)
        if number == options.drift + 15:
            after = round(float(adjusted_rand_score(groups[who], labels[who])), 2)
    summary = trainer.summary()
    return {
        "seed": seed,
        "found": found,
        "ari_after_15": after,
        "ari_of_those_seen": round(float(adjusted_rand_score(groups[who], labels[who])), 2),
        "ari_at_end": round(summary["ari"], 2),
        "clusters": summary["clusters"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-4")
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--participation", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--drift", type=int, default=30)
    options = parser.parse_args()
    for seed in parse_seeds(options.seeds):
        print(json.dumps(run(options, seed)), flush=True)


if __name__ == "__main__":
    main()
