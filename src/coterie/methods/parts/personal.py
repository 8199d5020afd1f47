"""The personal model of a client: its cluster's model and its own, mixed as its held-out samples prefer.

A client keeps the model that it trained last. The served model predicts

    p(y | x) = (1 - a) softmax(center(x) + t b)_y + a softmax(own(x))_y,   b_y = log own share_y - log cluster's share_y

where b replaces the cluster's label proportions by the client's own. The center is trained for this: each client trains
it with its b added to the outputs, so that its label proportions do not become the center's; less so, the better the
center already tells classes apart (`balance_of`). The client compares a few
pairs (a, t) by their losses on its held-out samples. A client with few of them would choose by chance, so the losses of
its cluster's members count as well, as much as those of `PRIOR_SAMPLES` samples of its own.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Mixture, Models, mixed_outputs
from coterie.client.forms import Asked, Forms
from coterie.client.serving import serving
from coterie.client.steps import OWN_MODEL
from coterie.client.work import SGD
from coterie.data.federation import SplitName

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # a
SHIFTS = (0.0, 0.5, 1.0)  # t
NUM_MIXES = len(SHARES) * len(SHIFTS)
PRIOR_SAMPLES = 20.0
_LIGHTEST, _HEAVIEST = 0.5, 10.0  # a cluster's label proportions weigh from 0.5 to 9.5 samples beside a client's own
_LONGEST = 20  # epochs of finishing an own model
_ROUNDING, _TINY = 1e-5, 1e-8
_CLEAR = 2.0  # log likelihood of all held-out samples that a finished model must gain
_MIX = "mix"


def mixes(device: torch.device) -> Tensor:
    """The pairs (a, t) that clients compare, [G, 2]; those without the own model first."""
    return torch.cartesian_prod(torch.tensor(SHARES), torch.tensor(SHIFTS)).to(device)


def label_shift(block: Block, shares: Tensor) -> Tensor:
    """b of the module, [c, L]; 0 where `shares` [c, L] are.

    `shares` are the label proportions of the clients' clusters times their weight in samples (`label_prior`).
    """
    if not shares.shape[1]:
        return shares
    counts, weight = block.label_counts().to(shares), shares.sum(1, keepdim=True)
    own = (counts + shares) / (counts.sum(1, keepdim=True) + weight)
    usual = shares / weight.clamp_min(_TINY)
    return torch.where(weight > 0, own.clamp_min(_TINY).log() - usual.clamp_min(_TINY).log(), 0.0)


def label_prior(counts: Tensor) -> Tensor:
    """The label proportions [L] of clients with these counts [n, L], times their weight in samples.

    Clients' proportions are taken as Dirichlet distributed. The weight is its concentration, from how much more the
    counts vary than those of IID clients would: if no more, the weight is large, and nobody's few samples count.
    """
    counts = counts[counts.sum(1) > 0].double()
    total = counts.sum()
    if not len(counts):
        return counts.new_zeros(counts.shape[1])
    usual = counts.sum(0) / total
    held = usual > 0
    sizes = counts.sum(1, keepdim=True)
    expected = sizes * usual[held]
    excess = ((counts[:, held] - expected).square() / expected).sum(1) / max(1, int(held.sum()) - 1) - 1  # [n]
    correlation = float(excess.sum() / (sizes - 1).sum().clamp_min(1))
    return usual * (1 / min(1.0, max(correlation, 1 / _HEAVIEST)) - 1 + _LIGHTEST)


def balance_of(losses: Tensor, classes: int) -> Tensor:
    """How far clients take their label proportions out of training, from 0 to 1; of centers with these losses [n].

    A center that tells classes apart by their inputs is better trained as it is. One that does not would learn each
    client's proportions instead. The measure is its held-out loss beside that of a blind guess; unknown losses are 0.
    """
    blind = math.log(max(2, classes))
    return torch.where(losses > 0, losses / blind, 1.0).clamp(max=1).square()


def train_balanced(
    block: Block, models: Models, work: SGD, shares: Tensor | None, balance: Tensor | None = None
) -> Tensor:
    """Train centers as if each client had its cluster's label proportions: [c, P]. The client keeps what it trained.

    The shift b of the module, times `balance` [c], is part of the output bias while a client trains, and then taken out
    again: a class that the client does not hold is not unlearnt. A network without an output bias trains as always.
    """
    where = block.task.output_bias
    shift = None if shares is None or where is None else label_shift(block, shares)
    if where is None or shift is None or not bool(shift.any()):
        trained = block.train(models, work)
        block.memory.put(OWN_MODEL, trained)
        return trained
    begun = models.rows()
    shift = shift if balance is None else balance.to(shift).unsqueeze(1) * shift
    shift = _wide(shift, begun[:, where])
    begun[:, where] += shift
    trained = block.train(begun, work)
    block.memory.put(OWN_MODEL, trained)
    trained[:, where] -= shift
    return trained


def with_own(block: Block, center: Models) -> Models:
    """The centers that were sent and the clients' own models, refs [c, 2]; a client without one has its center."""
    own = block.memory.get(OWN_MODEL, center.rows())
    rows = len(center.table) + torch.arange(len(block), device=center.refs.device)
    return Models(torch.cat([center.table, own]), torch.stack([center.refs, rows], dim=1))


def compare_mixes(block: Block, center: Models, shares: Tensor) -> tuple[Tensor, Tensor]:
    """The mean held-out loss of each mix of the center that was sent with the client's own model, [c, G]; samples [c].

    A client without held-out samples judges by its training samples, and only mixes without its own model: that one
    knows them by heart.
    """
    shift, models = label_shift(block, shares), with_own(block, center)
    losses, samples = _losses(block, models, shift, "valid")
    empty = samples == 0
    if bool(empty.any()):
        other, counts = _losses(block, models, shift, "train")
        other[:, len(SHIFTS) :] = torch.inf
        losses, samples = torch.where(empty.unsqueeze(1), other, losses), torch.where(empty, counts, samples)
    return losses, samples


def as_told(losses: Tensor) -> Tensor:
    """Losses [c, G] for the server: a mix that a client cannot judge has that of the center, which favours neither."""
    plain = losses[:, : len(SHIFTS)].repeat(1, len(SHARES))
    return losses.where(losses.isfinite(), plain).nan_to_num(posinf=0.0)


def _losses(block: Block, models: Models, shift: Tensor, split: SplitName) -> tuple[Tensor, Tensor]:
    """The mean loss of each mix on samples of a split, [c, G], and the numbers of samples [c]."""
    task, found, samples = block.task, [], []
    for clients, outputs, y, lengths in block.outputs_on(models, split):
        columns = []
        for share, shifted in mixes(outputs.device).tolist():
            center = outputs[0] + shifted * _wide(shift[clients], outputs[0]) if shift.shape[1] else outputs[0]
            weights = outputs.new_tensor([1 - share, share]).unsqueeze(1).expand(2, len(y))
            mixed = mixed_outputs(torch.stack([center, outputs[1]]), weights, task.num_classes)
            sums = torch.segment_reduce(task.loss(mixed, y).double(), "sum", lengths=lengths, initial=0.0)
            columns.append(sums / lengths.clamp_min(1))
        found.append(torch.stack(columns, dim=1))
        samples.append(lengths)
    return torch.cat(found), torch.cat(samples)


def _wide(bias: Tensor, outputs: Tensor) -> Tensor:
    """A bias [n, L] for outputs of at least L columns."""
    return torch.nn.functional.pad(bias, (0, outputs.shape[1] - bias.shape[1]))


def choose_mix(block: Block, losses: Tensor, samples: Tensor, curve: Tensor) -> Tensor:
    """Remember the best mix by a client's own losses [c, G] and its cluster's `curve` [c, G]; returns its loss [c]."""
    total = (samples.unsqueeze(1) * losses + PRIOR_SAMPLES * curve) / (samples.unsqueeze(1) + PRIOR_SAMPLES)
    total = total.nan_to_num(nan=torch.inf, posinf=torch.inf)  # a model that has diverged
    least = total.min(1, keepdim=True).values
    # Of mixes that differ by rounding only, the first: the one that changes the center least.
    block.memory.put(_MIX, (total <= least + _ROUNDING * (1 + least)).to(torch.int8).argmax(1))
    return least[:, 0]


def lengthened(work: SGD, rounds: float) -> SGD:
    """The work of several rounds in one: at least one epoch or step, at most `_LONGEST` epochs."""
    if work.steps is not None:
        return replace(work, steps=max(1, round(rounds * work.steps)))
    return replace(work, epochs=max(1, min(_LONGEST, round(rounds * work.epochs))))


def finish_own(block: Block, center: Models, work: SGD, shares: Tensor, curve: Tensor) -> None:
    """Train the own model further by `work`; keep it, and the mix that goes with it, where it does better."""
    found = []
    trained = block.memory.get(OWN_MODEL, center.rows())
    for own in (trained, block.train(trained, work, purpose="finish ")):
        block.memory.put(OWN_MODEL, own)
        losses, samples = compare_mixes(block, center, shares)
        found.append((own, choose_mix(block, losses, samples, curve), block.memory.get(_MIX, samples)))
    (first, before, mix), (second, after, other) = found
    better = (before - after) * (samples + PRIOR_SAMPLES) > _CLEAR
    block.memory.put(OWN_MODEL, torch.where(better.unsqueeze(1), second, first))
    block.memory.put(_MIX, torch.where(better, other, mix))


def served_parts(asked: Asked) -> Forms:
    """The center and the own model; with classes, what is added to their outputs."""
    classes = len(asked.given["shares"])
    bias = {"bias": asked.numbers(2, classes, low=-forms.LARGE, high=forms.LARGE)} if classes else {}
    return forms.mixture(asked, 2) | bias


@serving("coterie.coterie:served", served_parts)
def served(block: Block, models: Models, work: SGD, shares: Tensor, curve: Tensor) -> Mixture:
    """The client's mix; a newcomer has no model of its own, and takes the best of its cluster's mixes without it."""
    chosen = block.memory.get(_MIX, curve[:, : len(SHIFTS)].argmin(1))
    grid = mixes(models.table.device)[chosen.to(models.table.device)].to(models.table)  # [c, 2]
    weights = torch.stack([1 - grid[:, 0], grid[:, 0]], dim=1)
    shift = label_shift(block, shares) * grid[:, 1:]
    bias = torch.stack([shift, torch.zeros_like(shift)], dim=1) if shift.shape[1] else None
    return Mixture(with_own(block, models), weights, bias)
