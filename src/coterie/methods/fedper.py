"""FedPer: a shared body and a head for each client (Arivazhagan, Aggarwal, Singh, Choudhary 2019, "Federated Learning
with Personalization Layers").

A client trains the received body and its own head, the last layer with parameters, together. It sends the body, which
the server averages by sample counts; the head never leaves the client. Messages are a model without its head.

The paper also tries heads of several layers; here the head is one layer. A client without a head trains one before
it is evaluated (see `parts/own_parts.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from coterie.client import forms
from coterie.client.block import Block, Models
from coterie.client.steps import Answer, ClientStep, client_step
from coterie.client.work import SGD
from coterie.methods.base import PartOf, register
from coterie.methods.parts.own_parts import OwnParts, assembled, head_of, keep_and_send


@client_step("coterie.fedper:train_together", forms.trained)
def train_together(block: Block, models: Models, work: SGD) -> Answer:
    """Train body and head together; send the body."""
    mine = head_of(block.task)
    return keep_and_send(block, block.train(assembled(block, models.rows(), mine), work), mine)


@register
@dataclass(frozen=True)
class FedPer(OwnParts):
    """A body that all share, a head for each client, trained together."""

    key: ClassVar[str] = "fedper"
    paper: ClassVar[str] = "Arivazhagan et al. 2019"

    keeps: ClassVar[PartOf] = head_of
    training: ClassVar[ClientStep] = train_together
