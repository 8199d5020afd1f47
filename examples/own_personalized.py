"""Your own personalized method: clients keep a model of their own and mix it with the common one.

Every client trains two models: the common one, which it sends, and its own, which never leaves it. The one that does
better on the validation samples of the client has the larger say in its predictions.

    python examples/own_personalized.py
    cd examples; coterie run -a own_personalized:Blend --set algorithm.sharpness=5
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import coterie
from coterie import Answer, Block, ClusterState, Engine, Mixture, Models, Personal, Rng, client_step, serving, setting

OWN = "model"  # the name under which a client remembers its own model


@client_step
def train_both(block: Block, models: Models, work: coterie.SGD) -> Answer:
    """Client half: train both models, keep the own one, and send the common one."""
    own = block.memory.get(OWN, models.rows())  # [c, P]; a client that has none begins with the common model
    block.memory.put(OWN, block.train(own, work, purpose="own "))  # with batches of its own
    return Answer(params=block.train(models, work), samples=block.samples)


@serving("own_personalized:blended")
def blended(block: Block, models: Models, work: coterie.SGD, sharpness: Tensor) -> Mixture:
    """What a client is served with: both models, weighted by how well they do on its validation samples."""
    common = models.rows()  # [c, P]
    own = block.memory.get(OWN, common)
    rows = torch.arange(2 * len(block), device=common.device).reshape(2, -1).T  # [c, 2]
    both = Models(torch.cat([common, own]), rows)
    losses = block.losses(both, "valid")  # [c, 2]; both are 0 without validation samples
    return Mixture(both, torch.softmax(-sharpness.unsqueeze(1) * losses, dim=1).to(common))


@dataclass(frozen=True)
class Blend(coterie.Algorithm):
    """Server half: average the common model, as FedAvg does."""

    key: ClassVar[str] = "blend"
    sharpness: float = setting(3.0, "how much a lower validation loss counts; 0: both models have the same say", ge=0)

    def start(self, task: Any, engine: Engine, rng: Rng) -> ClusterState:
        return ClusterState.common_start(engine, num_clusters=1)

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        sums, labels = coterie.CenterSums(1, like=state.centers), state.labels.clone()
        rows = torch.zeros(len(cohort), dtype=torch.int64)  # every client gets center 0
        work = engine.task.work.at(engine.round)
        for chunk in engine.call(train_both, cohort, models=state.centers, refs=rows, work=work, rng=rng):
            sums.add(chunk.answer.params, torch.zeros_like(chunk.clients), chunk.answer.samples)
            labels[chunk.clients] = 0
        return replace(state, centers=sums.means(keep=state.centers), labels=labels)

    def personal(self, state: ClusterState, clients: Tensor) -> Personal:
        each = {"sharpness": torch.full((len(clients),), self.sharpness)}
        return replace(super().personal(state, clients), serve=blended, each=each)


if __name__ == "__main__":
    for method in ("local", "fedavg", Blend()):
        result = coterie.run(method, "rotated-digits", rounds=40)
        name = method if isinstance(method, str) else method.key
        print(f"{name}: accuracy {result.summary['accuracy']['macro']:.4f}")
