"""The table "I want to change X" of docs/architecture.md: each change below is made in one file, and works.

A copy of the package gets one new or changed file for each row; then one command uses all of them together.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "coterie"

METHOD = '''
"""A method: FedAvg with half a step."""

from dataclasses import dataclass
from typing import ClassVar

from coterie.methods.base import register
from coterie.methods.feddist import FedDist
from coterie.settings import setting


@register
@dataclass(frozen=True)
class Half(FedDist):
    """Half a step of the one model towards the clients' mean."""

    key: ClassVar[str] = "half"
    step: float = setting(0.5, "how far to go towards the mean", gt=0)
'''

DATASET = '''
"""A dataset: scikit-learn's wines, as a source and a name."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from coterie.data.dataset import Dataset, Preset, Source, register_preset, register_source


@register_source
@dataclass(frozen=True)
class Wine(Source):
    """178 wines of three kinds."""

    key: ClassVar[str] = "wine"
    summary: ClassVar[str] = "178 wines"

    def load(self, clients, rng, data_dir):
        from sklearn.datasets import load_wine

        x, y = load_wine(return_X_y=True)
        x = torch.from_numpy((x - x.mean(0)) / x.std(0)).float()
        return Dataset("wine", x, torch.from_numpy(y), num_classes=3, is_train=np.arange(len(y)) % 5 > 0).validate()


register_preset(Preset("wine", "wines, IID", "wine", "iid", clients=6, model="wide", work={"lr": 0.01}))
'''

# file -> what is added to it
CHANGES = {
    "methods/half.py": METHOD,
    "data/sources/wine.py": DATASET,
    "nets/zoo.py": '''

@register_model("wide")
def wide(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """A network."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_outputs))
''',
    "client/optimizers.py": '''

@register_optimizer("sign")
class SignDescent(Optimizer):
    """An optimizer: steps along the sign of the direction."""

    def step(self, params, direction, state, lr, count):
        """w <- w - lr * sign(direction)."""
        move(params, [part.sign() for part in direction], lr)
''',
    "client/schedules.py": '''

@register_schedule("half")
def half(work, round, rounds):
    """A schedule: half of lr in every round."""
    return 0.5
''',
    "methods/parts/averaging.py": '''

@robust_mean_named("first")
def first(rows: Tensor, share: float) -> Tensor:
    """A robust mean: the first member."""
    return rows[0]
''',
    "runs/metrics.py": '''

@register_metric("below_half", "below 50 %", "share of clients with accuracy below 50 %", PERCENT)
def below_half(accuracy: Floats) -> float:
    """A metric."""
    return float((accuracy < 0.5).mean())
''',
    "runs/settings.py": "",  # a flag, see below
}
FLAG = '    mood: str = setting("good", "a flag", flag=True)\n'
COMMAND = (
    "run -a half --dataset wine --optimizer sign --schedule half --set algorithm.robust=first --mood bad "
    "--rounds 2 --name a --quiet --json"
)


def test_each_change_is_one_file(tmp_path: Path):
    copy = tmp_path / "src" / "coterie"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in CHANGES.items():
        path = copy / name
        path.write_text((path.read_text() if path.exists() else "") + text)
    settings = copy / "runs" / "settings.py"
    line = next(line for line in settings.read_text().splitlines(keepends=True) if line.startswith("    rounds: int"))
    settings.write_text(settings.read_text().replace(line, line + FLAG))

    def coterie(*arguments: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
        command = [sys.executable, "-m", "coterie", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    summary = json.loads(coterie(*COMMAND.split()))
    assert 0 <= summary["below_half"] <= 1
    config = (tmp_path / "runs" / "a" / "config.toml").read_text()
    assert 'mood = "bad"' in config
    assert 'robust = "first"' in config
    assert "--mood" in coterie("compare", "--help")
    assert "below 50 %" in coterie("show", "runs/a")
