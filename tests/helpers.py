"""Small federations and runs that tests share."""

from __future__ import annotations

from typing import Any

import torch

from coterie.client.work import SGD
from coterie.data.federation import Federation
from coterie.data.scenario import Scenario
from coterie.data.sources.synthetic import Synthetic
from coterie.engines import make_engine
from coterie.methods.base import Algorithm
from coterie.randomness import Rng
from coterie.runs.experiment import Experiment
from coterie.runs.folder import RunFolder
from coterie.runs.loop import Schedule, Trainer

WORK = SGD(lr=0.2, momentum=0.5, weight_decay=1e-3, epochs=2, batch_size=5)


def ragged_federation(clients: int = 9, seed: int = 0, reserve: int = 0, **settings: Any) -> Federation:
    """Clients of different sizes in two groups, small pictures, three classes; the server may reserve some samples."""
    source = Synthetic(**{"groups": 2, "samples": 16, "spread": 0.6, "shape": (1, 4, 4), "classes": 3} | settings)
    rng = Rng.seed(seed)
    return Scenario.named("by_user", {"reserve": reserve}).partition(source.load(clients, rng, None), None, rng)


def reserved_for(algorithm: Algorithm) -> int:
    """Samples of each class for methods whose server has some: fewer than their default, the data are small."""
    return 2 if getattr(algorithm, "robust", "") == "fltrust" else min(2, getattr(algorithm, "indicators", 0))


def setup_of(algorithm: Algorithm, federation: Federation | None = None, **changes: Any) -> Experiment:
    """A run of a few rounds with a small network; a method that needs the server's own samples gets some."""
    if federation is None:
        federation = ragged_federation(reserve=reserved_for(algorithm))
    values: dict[str, Any] = {
        "algorithm": algorithm,
        "algorithm_name": algorithm.key,
        "data": federation,
        "dataset": "ragged",
        "model": "mlp",
        "model_settings": {"hidden": 6},
        "work": WORK,
        "loss": "cross_entropy",
        "schedule": Schedule(rounds=3),
        "engine": "vectorized",
        "device": "cpu",
        "engine_settings": {"precision": "float64"},
    }
    return Experiment(**values | changes)


def trainer_of(experiment: Experiment, folder: RunFolder | None = None, **more: Any) -> Trainer:
    """A trainer that has not started yet."""
    data = experiment.federation()
    engine = make_engine(experiment.engine, experiment.task(), data, experiment.device, experiment.engine_settings)
    return Trainer(experiment.algorithm, engine, data, experiment.schedule, folder, **more)


def finished(experiment: Experiment) -> Trainer:
    """A trainer that has run to the end."""
    trainer = trainer_of(experiment)
    trainer.run()
    return trainer


def outcome(trainer: Trainer) -> dict[str, Any]:
    """All that two equal runs must have in common, seconds aside."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in trainer.progress.rows]
    return {
        "state": trainer.state.tensors(),
        "plain": trainer.state.plain(),
        "memory": trainer.engine.memory_tensors(),
        "labels": [labels.tolist() for labels in trainer.progress.labels],
        "rows": rows,
        "ledger": trainer.engine.ledger.totals(),
    }


def assert_same(one: Any, other: Any, exact: bool = True, tolerance: float = 0.0) -> None:
    """Equal nested values; tensors bit by bit, or relative to their largest entry."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key], exact, tolerance)
    elif isinstance(one, torch.Tensor):
        assert one.shape == other.shape
        if exact or not one.is_floating_point():
            assert torch.equal(one, other)
        else:
            scale = float(one.abs().max()) if one.numel() else 0.0
            assert float((one - other).abs().max() if one.numel() else 0.0) <= tolerance * max(scale, 1e-12)
    else:
        assert one == other
