"""Samples in a file that several processes map, so that all of them hold one copy.

The system shares the pages until a process writes to them; the writer then has a copy of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from coterie.data.dataset import Dataset


def save_samples(path: Path, samples: Dataset) -> None:
    """Write the file under a temporary name and rename it."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(samples):
        value = getattr(samples, field.name)
        if isinstance(value, Tensor):
            tensors[field.name] = value.contiguous()
        elif isinstance(value, np.ndarray):
            tensors[f"array.{field.name}"] = torch.from_numpy(np.ascontiguousarray(value))
        else:
            plain[field.name] = value
    aside = path.with_suffix(f".{os.getpid()}")
    try:
        save_file(tensors, aside, {"plain": json.dumps(plain)})
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def map_samples(path: Path) -> Dataset:
    """The samples of a file, not read but mapped."""
    with safe_open(path, framework="pt") as file:
        plain = json.loads(file.metadata()["plain"])
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    arrays = {name: value.numpy() if name.startswith("array.") else value for name, value in values.items()}
    named = {name.removeprefix("array."): value for name, value in arrays.items()}
    names = {name: tuple(plain[name]) for name in ("user_names", "group_names", "class_names")}
    return Dataset(**{**plain, **names, **named})
