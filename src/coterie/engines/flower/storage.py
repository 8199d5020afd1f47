"""A federation stored in a folder, for the processes of a simulation."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from coterie.client.steps import step_modules
from coterie.data.federation import SPLITS, Federation, Move, Split
from coterie.data.transforms import View


def save_federation(folder: Path, federation: Federation) -> None:
    """Store everything but the views, which are code."""
    tensors: dict[str, Tensor] = {"x": federation.x, "y": federation.y, "keys": federation.keys}
    tensors["view"] = federation.view_of(torch.arange(len(federation)))
    for name in SPLITS:
        split = federation.split(name)
        tensors |= {f"{name}.index": split.index, f"{name}.offsets": split.offsets, f"{name}.shard": split.shard}
    for number, move in enumerate(federation.moves):
        tensors |= {f"move.{number}.view": move.view, f"move.{number}.groups": move.groups}
    plain = {
        "name": federation.name,
        "num_classes": federation.num_classes,
        "names": federation.names,
        "mean": federation.mean,
        "std": federation.std,
        "moves": [move.round for move in federation.moves],
        "repeats": federation.repeats,
        "class_names": federation.class_names,
        "steps": step_modules(),
    }
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, str(folder / "federation.safetensors"))
    (folder / "federation.json").write_text(json.dumps(plain))


def load_federation(folder: Path, views: Sequence[View]) -> Federation:
    """Load the federation stored in a folder, with these views."""
    plain = json.loads((folder / "federation.json").read_text())
    tensors = load_file(str(folder / "federation.safetensors"))
    for module in plain.pop("steps"):  # safe to import: this simulation wrote the folder
        importlib.import_module(module)

    def split(name: str) -> Split:
        return Split(tensors[f"{name}.index"], tensors[f"{name}.offsets"], tensors[f"{name}.shard"])

    moves = tuple(
        Move(round, tensors[f"move.{number}.view"], tensors[f"move.{number}.groups"])
        for number, round in enumerate(plain.pop("moves"))
    )
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in plain.items()}
    return Federation(
        **values,
        x=tensors["x"],
        y=tensors["y"],
        train=split("train"),
        valid=split("valid"),
        test=split("test"),
        keys=tensors["keys"],
        views=tuple(views),
        view=tensors["view"],
        moves=moves,
    )
