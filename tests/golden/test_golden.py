"""Every registered method gives its golden results, on both engines (`make golden` writes them anew).

The first seed is part of the default run, the others of `make test-slow`.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.golden.record import ENGINES, FILE, SEEDS, arrays, methods, run


@pytest.mark.parametrize("seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:])])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", methods())
def test_golden_results(method, engine, seed, tmp_path):
    found = arrays(run(method, engine, seed, tmp_path))
    with np.load(FILE, allow_pickle=False) as stored:
        expected = {name: stored[f"{method}/{engine}/{seed}/{name}"] for name in found}
    assert str(found["exact"]) == str(expected["exact"])
    for name in ("centers", "metrics"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-9, err_msg=name)
