"""A synthetic federation of FEMNIST's size: 805,263 images of 28x28 by 3,550 writers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, resource, time
import numpy as np, torch
from coterie.data.dataset import Dataset
from coterie.randomness import Rng
from coterie.data.scenario import Scenario

rng = np.random.default_rng(0)
user = np.sort(rng.integers(0, 3550, 805263)); user[:3550] = np.arange(3550); user = rng.permutation(user)
x = torch.from_numpy(rng.integers(0, 256, (805263, 1, 28, 28), dtype=np.uint8))
y = torch.from_numpy(rng.integers(0, 62, 805263))
names = tuple(f"writer{i}" for i in range(3550))
data = Dataset("femnist", x, y, 62, user=user.astype(np.int64), user_names=names)
began = time.perf_counter()
federation = Scenario.named("by_user", {"min_samples": 2}).partition(data.validate(), None, Rng.seed(0))
federation.manifest()
seconds = time.perf_counter() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 ** 2
print(json.dumps({"seconds": seconds, "peak_gb": peak, "clients": len(federation)}))
"""


@pytest.mark.slow
def test_femnists_shape_is_built_in_a_minute_and_three_gigabytes():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["clients"] > 3500
    assert found["seconds"] < 60
    assert found["peak_gb"] < 3
