"""Signing in two halves: what a client sends so that `parts/kinds.py` can tell kinds from noise.

A client signs at the center that it was sent, or later at a coarse copy of the center at which the others signed. All
sign at the same coarse values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.client.block import Block, Models
from coterie.client.forms import Asked, Form, Forms
from coterie.client.steps import Answer, client_step
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.nets.flat import Layout
from coterie.nets.sketch import sketch_of
from coterie.randomness import Rng

_WIDEST, _NARROWEST = 1024, 32  # numbers per class and half in a signature
_HALF, _TINY = 6e4, 1e-30  # about the largest number of half precision
_ROUNDED = torch.tensor(_HALF).half().item()  # as it is sent


def signed_in_halves(asked: Asked) -> Forms:
    """A signature, the difference of its halves, and sample counts."""
    classes, width = halves_shape(asked.task, bool(asked.given["sign"] > 0))
    half = Form((classes, width), torch.float16, -_ROUNDED, _ROUNDED)
    return {"signature": half, "contrast": half, "counts": asked.label_counts(classes)}


@client_step("coterie.coterie:sign_at", signed_in_halves)
def sign_at(block: Block, models: None, work: SGD, coarse: Tensor, scales: Tensor, sign: Tensor) -> Answer:
    """Sign at a coarse model."""
    row = restored(coarse, scales, block.task.layout).unsqueeze(0)
    refs = torch.zeros(len(block), dtype=torch.int64, device=row.device)
    return Answer(**signed_halves(block, Models(row.to(block.initial), refs), bool(sign > 0)))


def coarsened(model: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """A model [P] with eight bits per number, and the scale of each of its tensors."""
    scales = torch.stack([model[slot.start : slot.stop].abs().max() for slot in layout.slots]) / 127
    steps = torch.repeat_interleave(scales, torch.tensor([slot.size for slot in layout.slots], device=model.device))
    return (model / steps.clamp_min(_TINY)).round().to(torch.int8), scales


def restored(coarse: Tensor, scales: Tensor, layout: Layout) -> Tensor:
    """The model [P] that `coarsened` wrote, up to its steps."""
    sizes = torch.tensor([slot.size for slot in layout.slots], device=scales.device)
    return coarse * torch.repeat_interleave(scales, sizes)


def signed_halves(block: Block, models: Models, by_class: bool) -> dict[str, Tensor]:
    """A signature [c, L, D], the difference of its halves, and sample counts [c, L]."""
    table = models.table
    classes, width = halves_shape(block.task, by_class)
    sketch = sketch_of(block.task.layout.num_parameters, width, Rng.seed(0).at("signature"), table.device)
    rows = torch.zeros(len(block), classes, width, dtype=table.dtype, device=table.device)
    contrasts = torch.zeros_like(rows)
    counts = torch.zeros(len(block), classes, dtype=torch.int64, device=table.device)
    for label, holders, gradients, samples in block.class_gradients(models, parts=2, by_class=by_class):
        halves = [sketch(gradients[:, part]) for part in range(2)]
        total = samples.sum(1)
        share = (samples / total.unsqueeze(1)).to(rows)
        rows[holders, label] = share[:, :1] * halves[0] + share[:, 1:] * halves[1]
        contrasts[holders, label] = (halves[0] - halves[1]) * (samples[:, 1:] > 0)
        counts[holders, label] = total
    return {"signature": _short(rows), "contrast": _short(contrasts), "counts": counts}


def _short(rows: Tensor) -> Tensor:
    """Half precision is enough for what is mostly noise; gradients that are too large for it are cut off."""
    return rows.clamp(-_HALF, _HALF).half()


def halves_shape(task: Task, by_class: bool) -> tuple[int, int]:
    """The number of rows of a signature and their width. Both halves together are about an eighth of a model."""
    classes = max(1, task.num_classes) if by_class else 1
    size = task.layout.num_parameters
    return classes, min(size, max(_NARROWEST, min(_WIDEST, size // (8 * classes))))
