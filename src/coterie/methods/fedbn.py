"""FedBN: each client keeps its normalisation layers (Li, Jiang, Zhang, Kamp, Dou 2021, "FedBN: Federated Learning
on Non-IID Features via Local Batch Normalization").

FedAvg, but parameters and statistics of normalisation layers stay with the client; everything else is averaged by
sample counts. Normalisation layers are found by their type: BatchNorm, InstanceNorm, LayerNorm, GroupNorm, RMSNorm; in
the paper it is only BatchNorm. On a network without such layers this is FedAvg, and the run says so.

A client without layers of its own, such as a newcomer, trains them before it is evaluated, with the rest frozen (see
`parts/own_parts.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from coterie.client import forms
from coterie.client.block import Block, Models
from coterie.client.steps import Answer, ClientStep, client_step
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.engines.base import Engine
from coterie.methods.base import ClusterState, PartOf, register
from coterie.methods.parts.own_parts import OwnParts, assembled, keep_and_send
from coterie.randomness import Rng

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def norms_of(task: Task) -> Tensor:
    """The entries of the normalisation layers, bool [P]."""
    layers = {name for name, module in task.module.named_modules() if isinstance(module, _NORMS)}
    mine = torch.zeros(task.layout.size, dtype=torch.bool)
    for slot in task.layout.slots:
        if slot.name.rpartition(".")[0] in layers:
            mine[slot.start : slot.stop] = True
    return mine


@client_step("coterie.fedbn:train_with_own_norms", forms.trained)
def train_with_own_norms(block: Block, models: Models, work: SGD) -> Answer:
    """Train the received model with the client's own normalisation layers; send all but those."""
    mine = norms_of(block.task)
    return keep_and_send(block, block.train(assembled(block, models.rows(), mine), work), mine)


@register
@dataclass(frozen=True)
class FedBN(OwnParts):
    """FedAvg in which every client has its own normalisation layers."""

    key: ClassVar[str] = "fedbn"
    paper: ClassVar[str] = "Li et al. 2021"

    keeps: ClassVar[PartOf] = norms_of
    training: ClassVar[ClientStep] = train_with_own_norms

    def start(self, task: Task, engine: Engine, rng: Rng) -> ClusterState:
        """The common model; a note if there is nothing to keep."""
        if not bool(norms_of(task).any()):
            engine.notes.append("the network has no normalisation layers: fedbn is the same as fedavg here")
        return super().start(task, engine, rng)
