"""Run folders made by hand, of any size, without training: what a run would have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from coterie.runs.folder import SCHEMA, RunFolder, to_toml


def row_of(number: int, score: float, sizes: list[int], **more: Any) -> dict[str, Any]:
    """A row of rounds.jsonl."""
    around = [score - 0.1, score - 0.05, score, score + 0.05, score + 0.1]
    return {
        "round": number,
        "cohort": sum(sizes),
        "accuracy": {"micro": score, "macro": score, "bottom5": score - 0.1, "worst_decile": score - 0.1},
        "f1": {"micro": score, "macro": score},
        "loss": {"micro": 1 - score, "macro": 1 - score},
        "spread": {"accuracy": around, "f1": around, "loss": [1 - value for value in around[::-1]]},
        "ari": 0.9,
        "nmi": 0.8,
        "purity": 0.95,
        "churn": 0.05,
        "cluster_sizes": sizes,
        "clients_met": sum(sizes),
        "failures": 0,
        "repairs": [],
        "bytes": {"down": 1000 * number, "up": 2000 * number, "start": 500, "repair": 0},
        "seconds": {"train": 0.2, "server": 0.1, "evaluate": 0.05},
    } | more


def make_run(
    root: Path,
    name: str = "a",
    *,
    algorithm: str = "fesem",
    dataset: str = "made",
    seed: int = 0,
    rounds: int = 5,
    clients: int = 12,
    clusters: int = 3,
    classes: int = 4,
    best: float = 0.8,
    planned: int | None = None,
    finished: bool = True,
    names: list[str] | None = None,
    settings: dict[str, Any] | None = None,
    width: int = 128,
) -> Path:
    """A folder of a run with `clusters` clusters and as many true groups; scores rise to about `best`."""
    rng = np.random.default_rng([seed, sum(name.encode())])
    path = root / name
    (path / "artifacts").mkdir(parents=True)
    run = {"algorithm": algorithm, "dataset": dataset, "model": "mlp", "rounds": planned or rounds, "seed": seed}
    tables = {"schema": SCHEMA, "run": run, "algorithm": {"num_clusters": clusters, **(settings or {})}}
    (path / "config.toml").write_text(to_toml(tables))
    names = names or [f"g{i % clusters}-{i:04d}" for i in range(clients)]
    groups = np.arange(clients) % clusters
    labels = np.tile(groups, (rounds + 1, 1))
    for number in range(rounds):  # fewer and fewer are in a wrong cluster
        wrong = rng.random(clients) < 0.4 / (1 + number)
        labels[number, wrong] = rng.integers(0, clusters, int(wrong.sum()))
    with (path / "rounds.jsonl").open("w") as lines:
        for number in range(1, rounds + 1):
            sizes = np.bincount(labels[number], minlength=clusters).tolist()
            score = best * (1 - np.exp(-3 * number / rounds)) + 0.01 * float(rng.random())
            moved = float((labels[number] != labels[number - 1]).mean())
            lines.write(json.dumps(row_of(number, score, sizes, churn=moved)) + "\n")
    np.save(path / "labels.npy", labels)
    accuracy = np.clip(best + 0.1 * rng.standard_normal((1, clients)), 0, 1)
    np.savez_compressed(
        path / "clients.npz",
        name=np.array(names),
        group=groups,
        train_samples=rng.integers(20, 200, clients),
        round=np.array([rounds]),
        samples=np.full((1, clients), 30),
        accuracy=accuracy,
        f1=accuracy,
        loss=1 - accuracy,
    )
    counts = rng.multinomial(50, rng.dirichlet(np.full(classes, 0.5), clients))
    manifest = {"clients": names, "groups": groups.tolist(), "label_counts": counts.tolist(), "unseen": []}
    (path / "artifacts" / "manifest.json").write_text(json.dumps(manifest))
    centers = 4 * rng.standard_normal((clusters, width))
    np.savez_compressed(
        path / "artifacts" / "sketches.npz",
        sketch=(centers[groups] + rng.standard_normal((clients, width))).astype(np.float32),
        round=np.full(clients, rounds),
    )
    shown = np.arange(min(clients, 8)).repeat(3)
    np.savez_compressed(
        path / "artifacts" / "members.npz",
        picture=rng.integers(0, 256, (len(shown), 6, 6, 1), dtype=np.uint8),
        client=shown,
        cluster=labels[-1][shown],
        label=np.tile([0, 1, 2], len(shown) // 3),
    )
    (path / "artifacts" / "failures.json").write_text("[]")
    (path / "environment.json").write_text(json.dumps({"coterie": "0.1.0", "notes": [], "digest": "0"}))
    if finished:
        last = json.loads((path / "rounds.jsonl").read_text().splitlines()[-1])
        summary = {
            "algorithm": algorithm,
            "dataset": dataset,
            "rounds": rounds,
            "clusters": clusters,
            "accuracy": last["accuracy"] | {"best5": last["accuracy"]["macro"]},
            "seconds": {"total": 0.35 * rounds},
            "failures": 0,
            "notes": [],
        }
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def append_round(path: Path, number: int, score: float = 0.5) -> None:
    """As a run that goes on would."""
    RunFolder(path).append(row_of(number, score, [4, 4, 4]))
