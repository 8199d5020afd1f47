"""Every registered method gives its golden results, on both engines (`make golden` writes them anew).

The default run has the first seed on the vectorized engine, which equals the loop by `tests/test_contracts.py`; the
rest is part of `make test-slow`.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.golden.record import ENGINES, FILE, SEEDS, arrays, methods, run

CASES = [
    pytest.param(engine, seed, marks=[] if (engine, seed) == ("vectorized", SEEDS[0]) else pytest.mark.slow)
    for engine in ENGINES
    for seed in SEEDS
]


@pytest.mark.parametrize(("engine", "seed"), CASES)
@pytest.mark.parametrize("method", methods())
def test_golden_results(method, engine, seed, tmp_path):
    found = arrays(run(method, engine, seed, tmp_path))
    with np.load(FILE, allow_pickle=False) as stored:
        expected = {name: stored[f"{method}/{engine}/{seed}/{name}"] for name in found}
    assert str(found["exact"]) == str(expected["exact"])
    for name in ("centers", "metrics"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-9, err_msg=name)
