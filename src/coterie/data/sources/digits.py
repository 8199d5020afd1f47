"""scikit-learn's 1,797 handwritten digits (UCI, 8x8): embedded, no download."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.data.dataset import Dataset, Preset, Source, register_preset, register_source
from coterie.randomness import Rng

_TRAIN_SHARE = 0.8


@register_source
@dataclass(frozen=True)
class Digits(Source):
    """The digits, with a fixed 80/20 split that does not depend on the seed."""

    key: ClassVar[str] = "digits"
    summary: ClassVar[str] = "1,797 handwritten digits, 8x8, included in scikit-learn"
    is_fixed: ClassVar[bool] = True
    is_public: ClassVar[bool] = True

    def load(self, clients: int | None, rng: Rng, data_dir: Path | None) -> Dataset:
        table = _table()  # [1797, 65]
        x = torch.from_numpy(table[:, :-1].astype(np.uint8)).reshape(-1, 1, 8, 8)  # values 0..16
        order = Rng.seed(0).at("digits", "split").permutation(len(x)).numpy()
        is_train = np.zeros(len(x), dtype=bool)
        is_train[order[: int(_TRAIN_SHARE * len(x))]] = True
        y = torch.from_numpy(table[:, -1].astype(np.int64))
        return Dataset("digits", x, y, num_classes=10, is_train=is_train, mean=8.0, std=8.0).validate()


def _table() -> NDArray[np.float64]:
    """Pixels and label of each digit. Read from scikit-learn's file where it lies: importing it takes a second."""
    package = find_spec("sklearn")
    for folder in () if package is None else package.submodule_search_locations or ():
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.column_stack([images, labels])


# Works for one global model and for clusters (measured over 10 seeds).
_WORK = {"lr": 0.2, "epochs": 4, "batch_size": 20}

for _name, _scenario, _summary in (
    ("rotated-digits", "rotated", "digits, four groups: rotated by 0, 90, 180, 270 degrees"),
    ("digits", "iid", "digits, IID"),
):
    register_preset(Preset(_name, _summary, "digits", _scenario, clients=40, model_settings={"hidden": 64}, work=_WORK))
