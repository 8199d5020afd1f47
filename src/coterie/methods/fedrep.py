"""FedRep: a shared body and a head for each client, trained in turn (Collins, Hassani, Mokhtari, Shakkottai 2021,
"Exploiting Shared Representations for Personalized Federated Learning").

A client first trains its head, the last layer with parameters, for `head_epochs` on the received body. Then it trains
the body by the local work of the run, with that head. It sends the body, which the server averages; the head never
leaves the client. Frozen parameters neither move nor decay. The two trainings use different batches.

The paper averages clients equally, which is the default here too. A client without a head trains one before it is
evaluated (see `parts/own_parts.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Models
from coterie.client.steps import Answer, ClientStep, client_step
from coterie.client.work import SGD
from coterie.methods.base import PartOf, register
from coterie.methods.parts.own_parts import (
    OwnParts,
    assembled,
    head_of,
    keep_and_send,
    train_part,
)
from coterie.settings import setting


@client_step("coterie.fedrep:train_in_turn", forms.trained)
def train_in_turn(block: Block, models: Models, work: SGD, head_epochs: Tensor) -> Answer:
    """Train the head on the received body, then the body under that head; send the body."""
    mine = head_of(block.task)
    whole = assembled(block, models.rows(), mine)
    whole = train_part(block, whole, replace(work, epochs=int(head_epochs), steps=None), mine, "head ")
    return keep_and_send(block, train_part(block, whole, work, ~mine), mine)


@register
@dataclass(frozen=True)
class FedRep(OwnParts):
    """A body that all share, a head for each client, trained one after the other."""

    key: ClassVar[str] = "fedrep"
    paper: ClassVar[str] = "Collins et al. 2021"

    keeps: ClassVar[PartOf] = head_of
    training: ClassVar[ClientStep] = train_in_turn

    weighting: Literal["samples", "equal"] = setting("equal", "weight of a client in the mean")
    head_epochs: int = setting(10, "local epochs of the head, before those of the body", ge=1)

    def payload(self) -> dict[str, Tensor]:
        """The epochs of the head."""
        return {"head_epochs": torch.tensor(self.head_epochs)}
