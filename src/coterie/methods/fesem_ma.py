"""FeSEM-MA: FeSEM whose centers are matched averages (Long et al. 2022, section 5.1, after PFNM and FedMA).

Two networks may compute the same function with their hidden units in different orders. So in each cluster the hidden
units of the members are aligned to those of the center, layer by layer, before averaging. From a common start the
order is already good; from independent starts only matching makes the mean useful.

Deviations, with reasons: all clients share one architecture and widths are kept, so only the Gaussian (L2) term of the
matching objective of PFNM/FedMA is left (see `parts/matching.py`). The distance of a model to a center is L2 after
alignment to that center, where the paper uses the matching score.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from coterie.client.steps import train
from coterie.client.task import Task
from coterie.engines.base import Chunk, Engine
from coterie.methods.base import register
from coterie.methods.fesem import FeSEM
from coterie.methods.parts.averaging import Average, HeldModels
from coterie.methods.parts.centers import CenterState
from coterie.methods.parts.matching import Plan, matched_mean
from coterie.methods.parts.start import first_models_start
from coterie.randomness import Rng
from coterie.settings import setting


@register
@dataclass(frozen=True)
class FeSEMMA(FeSEM):
    """FeSEM with matched averaging in each cluster."""

    key: ClassVar[str] = "fesem_ma"
    paper: ClassVar[str] = "Long et al. 2022, section 5.1"

    first_models: Literal["common", "independent"] = setting(
        "common", "whether clients start from one common model or each from its own random one"
    )
    sweeps: int = setting(5, "maximum number of matching sweeps per round", ge=1)

    def start(self, task: Task, engine: Engine, rng: Rng) -> CenterState:
        """As FeSEM, without warm-up for independent models; refuses early what cannot be matched or does not fit."""
        _plan(task)
        size = engine.num_clients * task.layout.size * engine.dtype.itemsize
        engine.require_memory(size, f"FeSEM-MA holds the models of all {engine.num_clients} clients at once:")
        if self.first_models == "common" or self.init != "warm":
            return super().start(task, engine, rng)
        engine.notes.append(
            "FeSEM-MA with first_models=independent starts as with init=paper: clients have no common model to warm up"
        )
        return first_models_start(self, self.empty_state(engine), engine, rng)

    def average(self, state: CenterState, engine: Engine) -> Average:
        """Matched averaging."""
        plan = _plan(engine.task)

        def center(cluster: int, rows: Tensor, weights: Tensor) -> Tensor:
            mean, aligned = matched_mean(rows, plan, state.centers[cluster], weights, self.sweeps)
            return mean if self.robust == "none" else self.robust_mean(aligned)

        return HeldModels(self.num_clusters, center)

    def signature(self, params: Tensor, state: CenterState, engine: Engine) -> Tensor:
        """As FeSEM, after alignment to the common model."""
        return super().signature(self._aligned(params, state.common, engine), state, engine)

    def distances(self, params: Tensor, state: CenterState, engine: Engine) -> Tensor:
        """As FeSEM, to each center after alignment to that center."""
        found = []
        for center in state.centers:
            only = replace(state, centers=center.unsqueeze(0))
            found.append(super().distances(self._aligned(params, center, engine), only, engine))
        return torch.cat(found, dim=1)

    def train_common(self, state: CenterState, engine: Engine, cohort: Tensor, rng: Rng) -> Iterator[Chunk]:
        """With independent first models, every client trains from its own random model instead."""
        if self.first_models == "common":
            return super().train_common(state, engine, cohort, rng)
        return self._train_independently(engine, cohort, rng)

    def _train_independently(self, engine: Engine, cohort: Tensor, rng: Rng) -> Iterator[Chunk]:
        size = engine.task.layout.size * engine.dtype.itemsize
        for piece in cohort.split(max(1, engine.memory_budget() // (4 * size))):
            drawn = [engine.task.draw(Rng(int(engine.keys[c])).at("own start")) for c in piece.tolist()]
            table = torch.stack(drawn).to(engine.device, engine.dtype)
            refs = torch.arange(len(piece))
            yield from engine.call(train, piece, models=table, refs=refs, work=self.work(engine), rng=rng)

    def _aligned(self, params: Tensor, reference: Tensor, engine: Engine) -> Tensor:
        return _plan(engine.task).align(params, reference, sweeps=self.sweeps)


def _plan(task: Task) -> Plan:
    """The hidden layers of the network, found once."""
    return _plan_of(task.module, task.input_shape)


@functools.lru_cache(maxsize=8)
def _plan_of(module: nn.Module, input_shape: tuple[int, ...]) -> Plan:
    return Plan.of(module, input_shape)
