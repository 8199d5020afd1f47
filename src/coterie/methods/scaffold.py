"""SCAFFOLD: control variates against client drift (Karimireddy, Kale, Mohri, Reddi, Stich, Suresh 2020, "SCAFFOLD:
Stochastic Controlled Averaging for Federated Learning").

The server keeps a model x and a control c, every client i a control c_i; both start at 0. A client of the cohort S
trains y from x for K steps and then updates its control (option II of the paper):

    y    <- y - lr (grad f_i(y) - c_i + c)
    c_i+  = c_i - c + (x - y) / (K lr)

It sends y and c_i+ - c_i. The server moves by the means over the cohort,

    x <- x + lr_g mean(y - x)        c <- c + |S| / N mean(c_i+ - c_i)

so that c stays the mean of all c_i. Messages are twice as large as those of FedAvg. K is the client's own number of
steps. With momentum m, step t of K moves y as far as (1 - m^(K - t + 1)) / (1 - m) plain steps, and the sum of these
replaces K. Other optimizers and clipping are refused, because c_i would no longer be a mean of gradients.

Float buffers have no control: the server averages them. `weighting="samples"` weights both means; in the paper all
clients have equal weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Models
from coterie.client.forms import Asked, Forms
from coterie.client.steps import Answer, client_step
from coterie.client.task import Task
from coterie.client.work import SGD, Corrected
from coterie.engines.base import LARGEST, Engine
from coterie.errors import ConfigError
from coterie.methods.base import ClusterState, register
from coterie.methods.fedavg import OneModel
from coterie.methods.parts.averaging import samples_of
from coterie.randomness import Rng
from coterie.settings import setting

_CONTROL = "control"  # the name under which a client remembers c_i


def controlled(asked: Asked) -> Forms:
    """A model and the change of a control, which is at most as long as the largest model that is accepted implies."""
    control = asked.given["control"]
    longest = 2 * LARGEST * (1 + asked.longest) / asked.work.lr + torch.linalg.vector_norm(control.double()).item()
    change = replace(asked.numbers(len(control)), longest=longest)
    return forms.trained(asked) | {"change": change}


@client_step("coterie.scaffold:train_controlled", controlled)
def train_controlled(block: Block, models: Models, work: SGD, control: Tensor) -> Answer:
    """Train with the client's drift corrected; answer with the model and the change of the client's control."""
    start, cut = models.rows(), block.task.layout.num_parameters
    own = block.memory.get(_CONTROL, start.new_zeros(len(block), cut))
    correction = control.to(start) - own
    found = block.train(start, Corrected.of(work, prox=0.0), correction=correction)
    reach = plain_steps(block.num_steps(work), work.momentum).to(start).unsqueeze(1)  # [c, 1]
    change = (start - found)[:, :cut] / (reach * work.lr) - control.to(start)
    block.memory.put(_CONTROL, own + change)
    return Answer(params=found, change=change, samples=block.samples)


def plain_steps(steps: Tensor, momentum: float) -> Tensor:
    """How many plain steps move as far as this many steps with momentum, along an unchanging gradient.

    >>> plain_steps(torch.tensor([1, 2]), 0.5)
    tensor([1.0000, 2.5000], dtype=torch.float64)
    """
    steps = steps.double()
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


@dataclass(frozen=True)
class ControlState(ClusterState):
    """The model and the server's control."""

    control: Tensor = field(default_factory=lambda: torch.empty(0))  # [num_parameters]


@register
@dataclass(frozen=True)
class Scaffold(OneModel):
    """One model; clients correct their steps by the difference between everyone's drift and their own."""

    key: ClassVar[str] = "scaffold"
    paper: ClassVar[str] = "Karimireddy et al. 2020"
    sends_models: ClassVar[bool] = False  # controls, too
    state_type: ClassVar[type[ClusterState]] = ControlState

    weighting: Literal["samples", "equal"] = setting("equal", "weight of a client in both means")
    lr_g: float = setting(1.0, "step size of the server towards the mean", gt=0)

    def start(self, task: Task, engine: Engine, rng: Rng) -> ControlState:
        """The common model, and no control."""
        if not task.work.is_plain:
            raise ConfigError(
                "SCAFFOLD needs the optimizer sgd without clip_norm; its controls are means of gradients."
            )
        count, size = engine.num_clients, task.layout.num_parameters
        engine.require_memory(
            count * size * engine.dtype.itemsize, f"SCAFFOLD keeps a control for each of {count} clients:"
        )
        return ControlState.common_start(engine, num_clusters=1, control=engine.initial().new_zeros(size))

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        """Corrected training, then both means."""
        assert isinstance(state, ControlState)
        center, control, cut = state.centers[0], state.control, engine.task.layout.num_parameters
        models = self.mean_of(1, engine, like=center)
        changes = self.mean_of(1, engine, like=control)
        answered = [state.labels.new_empty(0)]
        payload, refs = {"control": control}, torch.zeros(len(cohort), dtype=torch.int64)
        call = engine.call(
            train_controlled,
            cohort,
            models=state.centers,
            refs=refs,
            payload=payload,
            work=self.work(engine),
            rng=rng,
        )
        for chunk in call:
            weights = samples_of(chunk) if self.weighting == "samples" else None
            cluster = torch.zeros_like(chunk.clients)
            models.add(chunk.answer.params, cluster, weights)
            changes.add(chunk.answer.change, cluster, weights)
            answered.append(chunk.clients)
        who = torch.cat(answered)
        mean = models.means(keep=state.centers)[0]
        moved = torch.cat([center[:cut] + self.lr_g * (mean[:cut] - center[:cut]), mean[cut:]])
        change = changes.means(keep=torch.zeros_like(control).unsqueeze(0))[0]
        new = replace(state, control=control + len(who) / engine.num_clients * change)
        return self.next_state(new, moved, who)
