"""A small suite on embedded data: two columns, two parts, a mean, and a row that is only published."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.reproduce.suite import Suite, read_suite

TEXT = """
paper = "A paper (2020)"
title = "Table 1: digits"
seeds = [0, 1]
metrics = ["accuracy", "ari"]
scale = ["run.rounds", "run.clients"]
notes = ["Digits in place of faces."]
means.both = ["all", "half"]

[base]
run.dataset = "rotated-digits"
run.clients = 8
run.rounds = 4
work.epochs = 1
algorithm.num_clusters = 2

[[columns]]
name = "all"
groups = [4, 3]
notes = ["full participation"]

[[columns]]
name = "half"
run.participation = 0.5

[[rows]]
label = "Global"
method = "fedavg"
published.accuracy = [80.0, 70.0]

[[rows]]
label = "IFCA"
method = "ifca"
columns = ["all"]
told = "num_clusters"
published.accuracy = [90.0]
published.ari = [nan]

[[rows]]
label = "Magic"
published.accuracy = [99.0, 98.0]

[[rows]]
label = "coterie"
method = "coterie"
mode = "ours"
columns = ["half"]
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TEXT)
    return path


@pytest.fixture
def tiny(toml: Path) -> Suite:
    return read_suite(toml, "tiny")
