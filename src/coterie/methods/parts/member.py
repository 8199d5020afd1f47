"""The client's half of `coterie`: train, watch the loss, compare mixes, sign."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Models
from coterie.client.forms import Asked, Forms
from coterie.client.steps import Answer, client_step
from coterie.client.work import SGD
from coterie.methods.parts.centers import has_risen, watched
from coterie.methods.parts.halves import coarsened, restored, signed_halves, signed_in_halves
from coterie.methods.parts.personal import (
    NUM_MIXES,
    as_told,
    choose_mix,
    compare_mixes,
    finish_own,
    lengthened,
    train_balanced,
)

_STRANGE, _SLACK = 4.0, 0.5  # a loss is strange if it is more than so many times the cluster's, plus this


def trained_member(asked: Asked) -> Forms:
    """A model; where they were asked for, losses of mixes, an alarm, and a signature."""
    found = forms.trained(asked) | forms.watched(asked)
    if {"shares", "curve"} <= asked.given.keys():
        found |= {"losses": asked.losses(NUM_MIXES, dtype=asked.dtype), "held": asked.samples("valid", "train")}
    return found | (signed_in_halves(asked) if "sign" in asked.given else {})


def tried_member(asked: Asked) -> Forms:
    """As `trained_member`, with losses of mixes with the second model."""
    return trained_member(asked) | {"tried": asked.losses(NUM_MIXES, dtype=asked.dtype)}


@client_step("coterie.coterie:train_member", trained_member)
def train_member(
    block: Block,
    models: Models,
    work: SGD,
    shares: Tensor | None = None,
    curve: Tensor | None = None,
    balance: Tensor | None = None,
    watch: Tensor | None = None,
    vote: Tensor | None = None,
    sign: Tensor | None = None,
    finish: Tensor | None = None,
) -> Answer:
    """Train the center and keep the result; before, watch its loss, and compare mixes on held-out samples.

    With `sign`, sign at the center; it is positive if classes are told apart. With `finish`, train the own model for so
    many rounds' worth of work more, and keep it where held-out samples prefer it.
    """
    found: dict[str, Tensor] = {}
    if shares is not None and curve is not None:
        losses, samples = compare_mixes(block, models, shares)
        choose_mix(block, losses, samples, curve)
        found |= {"losses": as_told(losses).to(models.table.dtype), "held": samples}
        if watch is not None:
            found["alarm"] = has_risen(block, losses[:, 0]) | is_strange(losses[:, 0], curve[:, 0])
        found |= watched(block, models, None, vote)  # the losses of mixes are adjusted to label proportions
    else:
        found |= watched(block, models, watch, vote)
    trained = train_balanced(block, models, work, shares, balance)
    if finish is not None and shares is not None and curve is not None:
        finish_own(block, models, lengthened(work, float(finish)), shares, curve)
    if sign is not None:  # at the same coarse model as clients that sign later
        layout = block.task.layout
        table = torch.stack([restored(*coarsened(row, layout), layout) for row in models.table])
        found |= signed_halves(block, Models(table, models.refs), bool(sign > 0))
    return Answer(params=trained, samples=block.samples, **found)


def is_strange(loss: Tensor, usual: Tensor) -> Tensor:
    """Whether a held-out loss [c] is far above that of the cluster [c]; a client that is seldom asked has no past."""
    return (usual > 0) & (loss > _STRANGE * usual + _SLACK)


@client_step("coterie.coterie:try_member", tried_member)
def try_member(
    block: Block,
    models: Models,
    work: SGD,
    shares: Tensor,
    curve: Tensor,
    balance: Tensor,
    watch: Tensor | None = None,
    vote: Tensor | None = None,
) -> Answer:
    """As `train_member`, with a second model: tell how it would do in place of the center, on held-out samples."""
    tried = Models(models.table, models.refs[:, 1])
    losses, _ = compare_mixes(block, tried, shares)
    found = train_member(block, Models(models.table, models.refs[:, 0]), work, shares, curve, balance, watch, vote)
    return Answer(**found, tried=as_told(losses).to(models.table.dtype))
