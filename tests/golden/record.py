"""Golden results: every registered method on rotated digits, so that a refactoring can show that it changed nothing.

    python -m tests.golden.record               # write tests/golden/results.npz anew (make golden)
    python -m tests.golden.record --digests     # print one exact digest per run, to compare two commits on one machine

A run is made through the command line and read from its run folder, so the stored names are covered too.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from coterie.cli.main import main

FILE = Path(__file__).with_name("results.npz")
SEEDS = (0, 1)
ENGINES = {"loop": [], "vectorized": ["--set", "engine.plan=stacked"]}
SETTINGS = [
    *("--dataset", "rotated-digits", "--clients", "8", "--rounds", "3", "--participation", "0.7", "--dropout", "0.2"),
    *("--model", "mlp", "--set", "model.hidden=8", "--set", "engine.precision=float64", "--device", "cpu", "--quiet"),
]
# At the default learning rate FedDANE diverges here, and rounding grows until processors of two kinds disagree.
OF_METHOD = {"feddane": ["--lr", "0.01"]}
_TIMED = ("seconds", "spread")  # left out of a round's metrics: times, and what the scores already say

Record = dict[str, Any]


def methods() -> list[str]:
    """Every registered method."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(["list", "algorithms", "--json"])
    return [item["name"] for item in json.loads(out.getvalue())]


def run(method: str, engine: str, seed: int, folder: Path) -> Record:
    """One run: its tensors at the end, the labels of every round, the metrics of every round, the ledger."""
    out = io.StringIO()
    command = ["run", "-a", method, *SETTINGS, "--engine", engine, *ENGINES[engine], "--seed", str(seed), "--json"]
    command += OF_METHOD.get(method, [])
    command += ["--out", str(folder), "--name", f"{method}-{engine}-{seed}"]
    with contextlib.redirect_stdout(out):
        try:
            main(command)
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{' '.join(command)} ended with {end.code}: {out.getvalue()}") from end
    summary = json.loads(out.getvalue())
    path = Path(summary["path"])
    tensors = load_file(path / "checkpoint" / "round-000003" / "tensors.safetensors")
    rows = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    return {
        "tensors": {name: value for name, value in tensors.items() if name.startswith(("state.", "memory."))},
        "labels": np.load(path / "labels.npy"),
        "rows": [{key: value for key, value in row.items() if key not in _TIMED} for row in rows],
        "ledger": summary["bytes"],
    }


def digest(record: Record) -> str:
    """A digest of all bits of a run."""
    found = hashlib.sha256()
    for name, value in sorted(record["tensors"].items()):
        if value.size:  # a field that holds nothing may come and go
            found.update(name.encode() + value.tobytes())
    found.update(record["labels"].tobytes())
    found.update(json.dumps([record["rows"], record["ledger"]], sort_keys=True).encode())
    return found.hexdigest()[:16]


def numbers(rows: list[dict[str, Any]]) -> NDArray[np.float64]:
    """The float metrics of every round, in a fixed order: [rounds, metrics]."""
    found = []
    for row in rows:
        flat: list[float] = []
        for key in ("accuracy", "f1", "loss"):
            flat += [row[key][part] for part in sorted(row[key] or {})]
        flat += [np.nan if row[key] is None else row[key] for key in ("ari", "nmi", "purity", "churn")]
        found.append(flat)
    return np.array(found)


def exact(record: Record) -> str:
    """What must be equal to the letter: labels, whole numbers of each round, the ledger."""
    whole = ("round", "cohort", "cluster_sizes", "clients_met", "failures", "repairs", "bytes")
    rows = [{key: row[key] for key in whole} for row in record["rows"]]
    return json.dumps({"labels": record["labels"].tolist(), "rows": rows, "ledger": record["ledger"]}, sort_keys=True)


def arrays(record: Record) -> dict[str, NDArray[Any]]:
    """A run as it is stored: centers, metrics, and a JSON text of what must be equal to the letter."""
    return {
        "centers": record["tensors"]["state.centers"],
        "metrics": numbers(record["rows"]),
        "exact": np.array(exact(record)),
    }


def record_all() -> None:
    """Write the golden results of every method, seed and engine."""
    stored: dict[str, NDArray[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for method in methods():
            for seed in SEEDS:
                for engine in ENGINES:
                    found = arrays(run(method, engine, seed, Path(folder)))
                    stored |= {f"{method}/{engine}/{seed}/{name}": value for name, value in found.items()}
    np.savez_compressed(FILE, **stored)
    print(f"{FILE}: {len(stored)} arrays, {FILE.stat().st_size >> 10} kB")


def print_digests() -> None:
    """One line for each run."""
    with tempfile.TemporaryDirectory() as folder:
        for method in methods():
            for seed in SEEDS:
                for engine in ENGINES:
                    print(f"{method} {engine} {seed} {digest(run(method, engine, seed, Path(folder)))}", flush=True)


if __name__ == "__main__":
    print_digests() if "--digests" in sys.argv[1:] else record_all()
