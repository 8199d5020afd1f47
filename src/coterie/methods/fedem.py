"""FedEM: every client's data is a mixture of a few sources, each with a model (Marfoq, Neglia, Bellet, Kameni,
Vidal 2021, "Federated Multi-Task Learning under a Mixture of Distributions").

The server keeps K models, a client its shares pi. In a round a client receives all models; with loss l,

    E-step:  q_k(s) ~ pi_k exp(-l(h_k; s)) for each of its training samples s,   pi_k <- mean over s of q_k(s)
    M-step:  train each h_k on the sum over s of q_k(s) l(h_k; s)

It sends the K models and keeps pi; the server averages each model by sample counts. The client is served with the
mixture of the models' predictions, with its shares. A gradient of the M-step is the mean over a batch of
q_k(s) grad l(h_k; s).

The models start at different random weights, as in the paper. A client belongs to the cluster of its largest share,
which it sends for the report. A newcomer finds its shares by E-steps alone. Messages and work are K times those of
FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Mixture, Models
from coterie.client.forms import Asked, Forms
from coterie.client.serving import serving
from coterie.client.steps import Answer, ClientStep, client_step
from coterie.client.task import Task
from coterie.client.work import SGD, Weighted
from coterie.engines.base import Chunk, Engine
from coterie.methods.base import ClusterState, Personal, register
from coterie.methods.parts.averaging import Averaging
from coterie.randomness import Rng
from coterie.settings import setting

_SHARES = "shares"  # the name under which a client remembers pi
_E_STEPS = 20  # of a client that has no shares yet


def trained_mixture(asked: Asked) -> Forms:
    """All models that were sent, and which of them is responsible for most samples."""
    return forms.trained(asked) | forms.chosen(asked) | {"params": asked.numbers(asked.count, asked.size)}


@client_step("coterie.fedem:train_mixture", trained_mixture)
def train_mixture(block: Block, models: Models, work: SGD) -> Answer:
    """One E-step, then train every model on the samples it is responsible for."""
    count = models.refs.shape[1]
    even = models.table.new_full((len(block), count), 1 / count)
    shares, weights = e_step(block.memory.get(_SHARES, even), *losses_of(block, models))
    block.memory.put(_SHARES, shares)
    weighted = Weighted.of(work)
    found = [
        block.train(Models(models.table, models.refs[:, k]), weighted, purpose=f"model {k} ", weights=weights[:, k])
        for k in range(count)
    ]
    return Answer(params=torch.stack(found, dim=1), samples=block.samples, choice=shares.argmax(1))


@client_step("coterie.fedem:largest_share", forms.chosen)
def largest_share(block: Block, models: Models, work: SGD) -> Answer:
    """The model that is responsible for most of the client's samples."""
    return Answer(choice=shares_of(block, models).argmax(1))


@serving("coterie.fedem:mixture", lambda asked: forms.mixture(asked, asked.count))
def mixture(block: Block, models: Models, work: SGD) -> Mixture:
    """All models, with the client's shares."""
    return Mixture(models, shares_of(block, models))


def shares_of(block: Block, models: Models) -> Tensor:
    """The shares [c, K] that clients remember; those who have none find them by E-steps."""
    empty = models.table.new_full(models.refs.shape, torch.nan)
    known = block.memory.get(_SHARES, empty)
    missing = known.isnan().any(1, keepdim=True)  # [c, 1]
    if not bool(missing.any()):
        return known
    found = torch.full_like(known, 1 / known.shape[1])
    losses, real = losses_of(block, models)
    for _ in range(_E_STEPS):
        found, _ = e_step(found, losses, real)
    return torch.where(missing, found, known)


def losses_of(block: Block, models: Models) -> tuple[Tensor, Tensor]:
    """The loss of each model on each training sample [c, K, longest], and which samples there are [c, longest]."""
    sizes = block.samples
    longest = int(sizes.max())
    real = torch.arange(longest, device=sizes.device) < sizes.unsqueeze(1)
    losses = models.table.new_zeros(len(block), models.refs.shape[1], longest)
    begin = 0
    for _, outputs, y, lengths in block.outputs_on(models, "train"):
        rows = slice(begin, begin + len(lengths))
        for k, out in enumerate(outputs):
            losses[rows, k][real[rows]] = block.task.loss(out, y).to(losses)
        begin += len(lengths)
    return losses, real


def e_step(shares: Tensor, losses: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """New shares [c, K] and responsibilities [c, K, longest] from shares and losses; 0 where there is no sample.

    >>> e_step(torch.tensor([[0.5, 0.5]]), torch.tensor([[[0.0], [0.0]]]), torch.tensor([[True]]))[0]
    tensor([[0.5000, 0.5000]])
    """
    known = (shares.clamp_min(1e-30).log().unsqueeze(2) - losses).softmax(1) * real.unsqueeze(1)
    return known.sum(2) / real.sum(1, keepdim=True), known


@register
@dataclass(frozen=True)
class FedEM(Averaging[ClusterState]):
    """K models, mixed by each client with shares of its own."""

    key: ClassVar[str] = "fedem"
    paper: ClassVar[str] = "Marfoq et al. 2021"

    components: int = setting(3, "number of models (K)", ge=1)

    def start(self, task: Task, engine: Engine, rng: Rng) -> ClusterState:
        """K random models."""
        drawn = [task.draw(rng.at("center", k)) for k in range(self.components)]
        state = ClusterState.common_start(engine, num_clusters=self.components)
        return replace(state, centers=torch.stack(drawn).to(engine.device, engine.dtype))

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        """Clients make an E- and an M-step, the server averages each model."""
        average, labels = self.mean_of(self.components, engine, like=state.centers), state.labels.clone()
        for chunk in self._call(train_mixture, state, engine, cohort, rng):
            for k in range(self.components):
                place = torch.full_like(chunk.clients, k)
                average.add(chunk.answer.params[:, k], place, chunk.answer.samples)
            labels[chunk.clients] = chunk.answer.choice.cpu()
        return replace(state, centers=average.means(keep=state.centers), labels=labels)

    def _call(
        self, step: ClientStep, state: ClusterState, engine: Engine, clients: Tensor, rng: Rng
    ) -> Iterator[Chunk]:
        """Send all models to every client."""
        refs, work = self._all(clients), engine.task.work.at(engine.round)
        return engine.call(step, clients, models=state.centers, refs=refs, work=work, rng=rng)

    def _all(self, clients: Tensor) -> Tensor:
        return torch.arange(self.components).expand(len(clients), -1)

    def personal(self, state: ClusterState, clients: Tensor) -> Personal:
        """The mixture of all models with the client's shares."""
        return Personal(state.centers, self._all(clients), serve=mixture)

    def assign(self, state: ClusterState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """The model that is responsible for most of a newcomer's samples."""
        labels = torch.full((len(newcomers),), -1, dtype=torch.int64)
        for chunk in self._call(largest_share, state, engine, newcomers, rng):
            labels[chunk.positions] = chunk.answer.choice.cpu()
        return labels
