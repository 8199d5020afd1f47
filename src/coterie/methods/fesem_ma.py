"""FeSEM-MA: FeSEM whose centers are matched averages (Long et al. 2022, section 5.1, after PFNM and FedMA).

Inside each cluster the hidden units of the members are aligned to those of the center, layer by layer, before
they are averaged: two networks may do the same with their units in another order. From a common start the
order is already good; from independent starts matching is what makes the mean useful.

Deviations, with reasons: all clients share one architecture and widths are kept, so of the matching objective of
PFNM/FedMA only the Gaussian (L2) term is left (see `matching.py`). A model's distance to a center is L2 after
alignment to that center, where the paper takes the matching score.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from coterie.client.steps import train
from coterie.client.task import Task
from coterie.engines.base import Chunk, Engine
from coterie.methods.base import register
from coterie.methods.fesem import FeSEM
from coterie.methods.parts.averaging import Average, HeldModels, Robust, robust_mean
from coterie.methods.parts.centers import CenterState
from coterie.methods.parts.matching import Plan, matched_mean
from coterie.methods.parts.start import clustered_start, random_start
from coterie.randomness import Rng
from coterie.settings import setting


class _Matched(HeldModels):
    """Averages each cluster after aligning its members to its center."""

    def __init__(self, centers: Tensor, plan: Plan, sweeps: int, robust: Robust, share: float) -> None:
        super().__init__(len(centers))
        self._centers, self._plan, self._sweeps = centers, plan, sweeps
        self._robust, self._share = robust, share

    def center(self, cluster: int, rows: Tensor, weights: Tensor) -> Tensor:
        """The matched mean; a robust one of the matched models."""
        mean, aligned = matched_mean(rows, self._plan, weights, self._centers[cluster], sweeps=self._sweeps)
        return mean if self._robust == "none" else robust_mean(aligned, self._robust, self._share)


@register
@dataclass(frozen=True)
class FeSEMMA(FeSEM):
    """FeSEM with matched averaging inside each cluster."""

    key: ClassVar[str] = "fesem_ma"
    paper: ClassVar[str] = "Long et al. 2022, section 5.1"

    first_models: Literal["common", "independent"] = setting(
        "common", "whether clients start from one common model or each from a random one of its own"
    )
    sweeps: int = setting(5, "most sweeps of matching a round", ge=1)

    def start(self, task: Task, engine: Engine, rng: Rng) -> CenterState:
        """As FeSEM, without a warm-up from independent models; refuses what cannot be matched or does not fit."""
        _plan(task)
        size = engine.num_clients * task.layout.size * engine.dtype.itemsize
        engine.require_memory(size, f"FeSEM-MA holds the models of all {engine.num_clients} clients at once:")
        if self.init == "random":
            return random_start(self, self.empty_state(engine), engine, rng)
        return clustered_start(self, self.empty_state(engine), engine, rng, warm_up=self.compares_first_models)

    @property
    def compares_first_models(self) -> bool:
        """First models that began at different points cannot be compared."""
        return self.first_models == "common"

    def average(self, state: CenterState, engine: Engine) -> Average:
        """Matched averaging."""
        return _Matched(state.centers, _plan(engine.task), self.sweeps, self.robust, self.robust_share)

    def signature(self, params: Tensor, state: CenterState, engine: Engine) -> Tensor:
        """As FeSEM, after aligning to the common model."""
        return super().signature(self._aligned(params, state.common, engine), state, engine)

    def distances(self, params: Tensor, state: CenterState, engine: Engine) -> Tensor:
        """As FeSEM, to each center after aligning to that center."""
        found = []
        for center in state.centers:
            only = replace(state, centers=center.unsqueeze(0))
            found.append(super().distances(self._aligned(params, center, engine), only, engine))
        return torch.cat(found, dim=1)

    def nearest_for_new(self, chunk: Chunk, state: CenterState, engine: Engine) -> Tensor:
        """From independent starts only the aligned distance to the centers says anything."""
        if self.compares_first_models:
            return super().nearest_for_new(chunk, state, engine)
        return self.distances(chunk.answer.params, state, engine).argmin(1).cpu()

    def train_from(self, state: CenterState, engine: Engine, cohort: Tensor, rows: Tensor, rng: Rng) -> Iterator[Chunk]:
        """At the start of independent models, every client trains from a random model of its own."""
        if self.compares_first_models or engine.phase != "start":
            return super().train_from(state, engine, cohort, rows, rng)
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


@functools.lru_cache(maxsize=8)
def _plan_of(module: Any, input_shape: tuple[int, ...]) -> Plan:
    return Plan.of(module, input_shape)


def _plan(task: Task) -> Plan:
    """How the units of the network are connected; found out once."""
    return _plan_of(task.module, task.input_shape)
