"""What a report needs and only the run itself has: sketches of the clients' models, pictures of clusters' members.

A report reads the run folder and nothing else, so the run writes these beside its numbers, into `artifacts/`:

    sketches.npz   sketch [N, D] of the last model each client sent, and the round it came in (0: none came)
    members.npz    for each cluster some pictures of some members: picture [n, H, W, C], client, cluster, label [n]
    method.npz     what the method itself shows (`Algorithm.exhibits`): MD-ICFL's pseudo samples
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.client.steps import OWN_MODEL
from coterie.data.federation import Federation
from coterie.data.pictures import black_and_white, is_picture, picture, spread_evenly
from coterie.engines.base import Chunk, Engine
from coterie.methods.parts.clustering import fold
from coterie.randomness import Rng, bits

Arrays = dict[str, NDArray[Any]]

WIDTH = 128  # of a sketch: distances are right within about a tenth, which is enough for a map
MOST_CLUSTERS, MOST_MEMBERS, MOST_PICTURES = 12, 4, 10  # whose pictures are kept


class Sketches:
    """Sketches of the last model that each client sent."""

    def __init__(self, engine: Engine) -> None:
        self._size = engine.task.layout.num_parameters
        self._signs: torch.Tensor | None = None  # [P], drawn when the first model comes
        self.rows = np.zeros((engine.num_clients, min(WIDTH, self._size)), dtype=np.float32)
        self.rounds = np.zeros(engine.num_clients, dtype=np.int64)  # when it came; 0: none came

    def add(self, chunk: Chunk, round: int) -> None:
        """Take in a chunk of answers, if they are models."""
        params = chunk.answer.get("params")
        if params is None or not len(chunk.clients):
            return
        self._put(chunk.clients.numpy(), params, round)

    def add_memory(self, engine: Engine, round: int) -> None:
        """Models that clients keep to themselves, where the simulation can see them (Local, FedFomo)."""
        memory = engine.memory_tensors()
        models, present = memory.get(f"value.{OWN_MODEL}"), memory.get(f"present.{OWN_MODEL}")
        if models is None or present is None:
            return
        for some in present.nonzero().flatten().split(256):
            self._put(some.cpu().numpy(), models[some], round)

    def _put(self, clients: NDArray[np.int64], params: torch.Tensor, round: int) -> None:
        more = int(clients.max()) + 1 - len(self.rows)
        if more > 0:  # clients have joined
            self.rows = np.pad(self.rows, ((0, more), (0, 0)))
            self.rounds = np.pad(self.rounds, (0, more))
        if self._signs is None:
            hashes = bits(torch.tensor(Rng.seed(0).at("map").key, device=params.device), self._size)
            self._signs = (1 - 2 * (hashes & 1)).to(params.dtype)
        self.rows[clients] = fold(params[:, : self._size], self._signs, WIDTH).float().cpu().numpy()
        self.rounds[clients] = round

    def arrays(self) -> Arrays:
        """What is written."""
        return {"sketch": self.rows, "round": self.rounds}

    def load(self, arrays: Arrays) -> None:
        """Put back what a run that goes on had written; of another shape it is left alone."""
        rows, rounds = arrays.get("sketch"), arrays.get("round")
        if rows is not None and rounds is not None and rows.shape == self.rows.shape and rounds.shape == (len(rows),):
            self.rows, self.rounds = rows.astype(np.float32), rounds.astype(np.int64)


class _Listening:
    """An engine whose answers somebody else looks at too; in everything else it is the engine itself."""

    def __init__(self, engine: Engine, sketches: Sketches) -> None:
        self._engine, self._sketches = engine, sketches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def call(self, *arguments: Any, **named: Any) -> Iterator[Chunk]:
        for chunk in self._engine.call(*arguments, **named):
            if self._engine.phase == "round":  # repairs ask again for what has been seen
                self._sketches.add(chunk, self._engine.round)
            yield chunk


def listening(engine: Engine, sketches: Sketches) -> Engine:
    """The same engine to a method; what clients answer in a round is sketched as it passes."""
    return cast(Engine, _Listening(engine, sketches))


def member_pictures(federation: Federation, labels: NDArray[np.int64]) -> Arrays | None:
    """Pictures of some members of each cluster, as they see them (FeSEM's Fig. 5); None where samples are none.

    Members and classes are taken evenly, so that the same clustering gives the same pictures.
    """
    if not is_picture(federation.input_shape):
        return None
    found: list[tuple[NDArray[np.float64], int, int, int]] = []
    clusters = np.unique(labels[labels >= 0])
    for cluster in clusters[spread_evenly(len(clusters), MOST_CLUSTERS)].tolist():
        members = np.flatnonzero(labels == cluster)
        for client in members[spread_evenly(len(members), MOST_MEMBERS)].tolist():
            rows = federation.train.rows(client)
            seen = federation.samples(client)[1]
            for position in _of_many_classes(seen.numpy(), MOST_PICTURES):
                shown = picture(federation, client, rows[position : position + 1])
                label = int(seen[position]) if federation.num_classes else -1
                found.append((shown, client, cluster, label))
    if not found:
        return None
    low, high = black_and_white(federation, [item[0] for item in found])
    pictures = np.stack([item[0] for item in found])  # [n, H, W, 3]
    if federation.input_shape[0] == 1:
        pictures = pictures[..., :1]
    return {
        "picture": (255 * np.clip((pictures - low) / (high - low), 0, 1)).round().astype(np.uint8),
        "client": np.array([item[1] for item in found], dtype=np.int64),
        "cluster": np.array([item[2] for item in found], dtype=np.int64),
        "label": np.array([item[3] for item in found], dtype=np.int64),
    }


def _of_many_classes(labels: NDArray[Any], most: int) -> list[int]:
    """Positions of the first sample of each class, then of the second, and so on; in order of class.

    >>> _of_many_classes(np.array([0, 0, 1, 0, 2, 1]), 4)
    [0, 1, 2, 4]
    """
    if labels.ndim > 1 or not np.issubdtype(labels.dtype, np.integer):
        return list(range(min(most, len(labels))))
    order = np.argsort(labels, kind="stable")
    turn = np.empty(len(labels), dtype=np.int64)  # the how-manieth of its class
    turn[order] = np.arange(len(labels)) - np.searchsorted(labels[order], labels[order])
    picked = np.lexsort((labels, turn))[:most]
    return sorted(picked.tolist(), key=lambda position: (int(labels[position]), position))
