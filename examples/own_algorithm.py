"""Your own method: a client half and a server half, for every engine.

FedMedian trains one model. It moves the model by the elementwise median of the clients' updates instead of their mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import coterie
from coterie import Algorithm, Answer, Block, ClusterState, Engine, Models, Rng, client_step, register, setting


@client_step(answers=lambda asked: {"update": asked.model()})  # so that a server of sites can check it
def train_clipped(block: Block, models: Models, work: coterie.SGD, limit: Tensor) -> Answer:
    """Client half: train, and answer with an update of norm at most `limit`."""
    start = models.rows()  # [c, P]
    update = block.train(start, work) - start
    return Answer(update=update * (limit / update.norm(dim=1, keepdim=True)).clamp(max=1))


@register
@dataclass(frozen=True)
class FedMedian(Algorithm):
    """Server half: move one center by the median of the clients' updates."""

    key: ClassVar[str] = "fedmedian"
    limit: float = setting(5.0, "largest norm of a client's update", gt=0)

    def start(self, task: Any, engine: Engine, rng: Rng) -> ClusterState:
        return ClusterState.common_start(engine, num_clusters=1)

    def round(self, state: ClusterState, engine: Engine, cohort: Tensor, rng: Rng) -> ClusterState:
        rows = torch.zeros(len(cohort), dtype=torch.int64)  # every client gets center 0
        payload = {"limit": torch.tensor(self.limit, device=engine.device)}
        work = engine.task.work.at(engine.round)  # with this round's learning rate
        call = engine.call(train_clipped, cohort, models=state.centers, refs=rows, payload=payload, work=work, rng=rng)
        updates = torch.cat([chunk.answer.update for chunk in call])  # [C, P]
        labels = state.labels.index_fill(0, cohort, 0)
        return replace(state, centers=state.centers + updates.median(0).values, labels=labels)


if __name__ == "__main__":
    for engine in ("loop", "vectorized"):
        result = coterie.run(FedMedian(), "rotated-digits", rounds=5, engine=engine)
        print(f"{engine}: accuracy {result.summary['accuracy']['macro']:.4f}")
