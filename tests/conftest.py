"""Settings for all tests."""

from __future__ import annotations

import torch

# The tensors of tests are small: a second thread would only wait, and for long where the machine is busy.
torch.set_num_threads(1)
