"""Ditto: a global model, and a personal one at every client that is pulled towards it (Li, Hu, Beirami, Smith 2021,
"Ditto: Fair and Robust Federated Learning Through Personalization").

The global model w is that of FedAvg. In a round, a client that has received w also continues to train its personal
model v, which minimises

    f(v) + lam / 2 * ||v - w||^2,   so each step is   v <- v - lr (grad f(v) + lam (v - w))

It sends only its copy of w, and is served with v. The pull is towards the w that was received, not towards the start of
the training. The two trainings use different batches. A client that was not seen yet has v = w.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Models
from coterie.client.steps import OWN_MODEL, Answer, client_step, train
from coterie.client.work import SGD, Corrected
from coterie.engines.base import Engine
from coterie.methods.base import ClusterState, register
from coterie.methods.parts.own_models import OwnModels
from coterie.randomness import Rng
from coterie.settings import setting


@client_step("coterie.ditto:train_global_and_own", forms.trained)
def train_global_and_own(
    block: Block, models: Models, work: SGD, lam: Tensor, personal_epochs: Tensor | None = None
) -> Answer:
    """Train the client's own model with a pull towards the received one; train and send the received one."""
    sent, cut = models.rows(), block.task.layout.num_parameters
    own = block.memory.get(OWN_MODEL, sent)
    pulled = Corrected.of(work, float(lam))
    if personal_epochs is not None:
        pulled = replace(pulled, epochs=int(personal_epochs), steps=None)
    # The proximal term pulls towards the start, own; the correction moves its center to the received model.
    correction = float(lam) * (own - sent)[:, :cut]
    block.memory.put(OWN_MODEL, block.train(own, pulled, purpose="own ", correction=correction))
    return train(block, models, work)


@register
@dataclass(frozen=True)
class Ditto(OwnModels):
    """FedAvg's model, and a personal one near it at every client."""

    key: ClassVar[str] = "ditto"
    paper: ClassVar[str] = "Li et al. 2021"

    lam: float = setting(
        0.1, "strength of the pull towards the global model; 0: the personal model is trained alone", ge=0
    )
    personal_epochs: int | None = setting(
        None, "local epochs of the personal model", ge=1, default_is="those of the local work"
    )

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        """Clients train both models, the server averages the global one."""
        payload = {"lam": torch.tensor(self.lam, dtype=torch.float64)}
        if self.personal_epochs is not None:
            payload["personal_epochs"] = torch.tensor(self.personal_epochs)
        work = self.work(engine)
        mean, answered = self.mean_answer(train_global_and_own, state, engine, cohort, rng, payload=payload, work=work)
        return self.next_state(state, mean, answered)
