"""5,000 seeded cases of hostile input: each succeeds, or ends in one sentence (`make test-fuzz`)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.fuzz.cases import KINDS

COUNTS = {"config": 800, "flags": 700, "npz": 800, "readers": 900, "checkpoints": 600, "folders": 800, "wire": 400}
AT_ONCE = 100  # cases in one process, so that a case that hangs or dies is found


def test_there_are_as_many_as_promised():
    assert sum(COUNTS.values()) == 5000
    assert set(COUNTS) == set(KINDS)


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("kind", "first"), [(kind, first) for kind, count in COUNTS.items() for first in range(0, count, AT_ONCE)]
)
def test_it_ends_in_success_or_in_one_sentence(kind: str, first: int):
    if kind == "wire" and importlib.util.find_spec("flwr") is None:
        pytest.skip("Flower is not installed")
    asked = [sys.executable, "-m", "tests.fuzz.cases", kind, str(first), str(AT_ONCE)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(asked, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    failures = [json.loads(line) for line in done.stdout.splitlines()]
    told = "\n\n".join(f"{found['kind']} {found['seed']}: {found['found']}" for found in failures[:3])
    assert not failures, f"{len(failures)} of {AT_ONCE} cases:\n{told}"
