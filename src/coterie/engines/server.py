"""The server as a client: it trains models on its own samples (`scenario.reserve`), as clients do on theirs."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from coterie.client.block import Block, Models
from coterie.client.forms import model
from coterie.client.steps import Answer, client_step
from coterie.client.work import SGD, Weighted
from coterie.data.federation import Federation
from coterie.engines.base import Engine
from coterie.engines.loop import LoopEngine
from coterie.randomness import Rng

_servers: WeakKeyDictionary[Engine, LoopEngine] = WeakKeyDictionary()


@client_step("coterie.server:train_on_some", model)
def train_on_some(block: Block, models: Models, work: SGD, weights: Tensor) -> Answer:
    """Train on samples with these weights [c, n]."""
    return Answer(params=block.train(models, Weighted.of(work), weights=weights))


def trained_on_reserved(engine: Engine, models: Tensor, work: SGD, rng: Rng) -> Tensor:
    """Models [K, P] after training on the server's samples, each on those of its kind (`fitting`).

    Nothing is sent, so no ledger counts it.
    """
    assert engine.reserved is not None
    if engine not in _servers:
        samples = tuple(part.cpu() for part in engine.reserved)
        classes = engine.task.num_classes or None
        alone = Federation.from_clients({"server": {"train": samples, "test": samples}}, num_classes=classes, valid=0.0)
        precision = {"precision": "float64" if engine.dtype == torch.float64 else "float32"}
        _servers[engine] = LoopEngine(engine.task, alone, device=str(engine.device), settings=precision)
    server, found, first = _servers[engine], [], torch.zeros(1, dtype=torch.int64)
    for one, weights in zip(models.split(1), fitting(engine, models).split(1), strict=True):
        [chunk] = server.call(
            train_on_some, first, models=one, refs=first, each={"weights": weights.to(one)}, work=work, rng=rng
        )
        found.append(chunk.answer.params)
    return torch.cat(found)


def fitting(engine: Engine, models: Tensor) -> Tensor:
    """Weights [K, R] of the server's samples for each of K models: of each class the K-th part that fits it best.

    The server does not know which kind its samples are of; on those of other kinds a model has a higher loss. All
    samples count where there are no classes.
    """
    assert engine.reserved is not None
    x, y = engine.reserved
    weights = torch.ones(len(models), len(x), device=models.device)
    if len(models) == 1 or not engine.task.num_classes:
        return weights
    outputs = engine.forward(models, x)  # [K, R, L]
    losses = cross_entropy(outputs.flatten(0, 1), y.repeat(len(models)), reduction="none").reshape(weights.shape)
    for label in y.unique().tolist():
        mine = (y == label).nonzero().flatten()
        best = losses[:, mine].argsort(1)[:, : -(-len(mine) // len(models))]
        weights[:, mine] = torch.zeros_like(losses[:, mine]).scatter(1, best, len(mine) / best.shape[1]).to(weights)
    return weights
