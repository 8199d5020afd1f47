"""Settings for all tests."""

from __future__ import annotations

import os
import tempfile

import torch

# What was measured of ways to train is remembered for this run of the tests only, by its processes together.
os.environ["COTERIE_CACHE"] = os.environ.get("COTERIE_TEST_CACHE") or tempfile.mkdtemp(prefix="coterie-cache-")
os.environ["COTERIE_TEST_CACHE"] = os.environ["COTERIE_CACHE"]

# The tensors of tests are small: a second thread would only wait, and for long where the machine is busy.
torch.set_num_threads(1)
