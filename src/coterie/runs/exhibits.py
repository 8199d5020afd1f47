"""What reports need besides numbers: sketches of the clients' models, pictures of the clusters' members.

Reports read the run folder only, so the run writes these files to `artifacts/`:

    sketches.npz   sketch [N, D] of the last model of each client, and its round [N] (0: no model yet)
    members.npz    pictures of some members of each cluster: picture [n, H, W, C], client, cluster, label [n]
    method.npz     arrays of the method itself (`Algorithm.exhibits`), such as MD-ICFL's pseudo samples
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
from coterie.nets.sketch import fold
from coterie.randomness import Rng, bits

Arrays = dict[str, NDArray[Any]]

WIDTH = 128  # of a sketch: distances have an error of about a tenth, good enough for a map
MOST_CLUSTERS, MOST_MEMBERS, MOST_PICTURES = 12, 4, 10  # whose pictures are kept


class Sketches:
    """Sketches of the last model of each client."""

    def __init__(self, engine: Engine) -> None:
        self._size = engine.task.layout.num_parameters
        self._signs: torch.Tensor | None = None  # [P], drawn with the first model
        self.rows = np.zeros((engine.num_clients, min(WIDTH, self._size)), dtype=np.float32)
        self.rounds = np.zeros(engine.num_clients, dtype=np.int64)  # 0: no model yet

    def add(self, chunk: Chunk, round: int) -> None:
        """Add a chunk of answers, if they are models, one for each client."""
        params = chunk.answer.get("params")
        if params is not None and params.dim() == 2 and len(chunk.clients):
            self._put(chunk.clients.numpy(), params, round)

    def add_memory(self, engine: Engine, round: int) -> None:
        """Add the models that clients keep for themselves (Local, FedFomo), which a simulation can see."""
        memory = engine.memory_tensors()
        models, present = memory.get(f"value.{OWN_MODEL}"), memory.get(f"present.{OWN_MODEL}")
        if models is not None and present is not None:
            for some in present.nonzero().flatten().split(256):
                self._put(some.cpu().numpy(), models[some], round)

    def _put(self, clients: NDArray[np.int64], params: torch.Tensor, round: int) -> None:
        if not len(clients):
            return
        more = int(clients.max()) + 1 - len(self.rows)
        if more > 0:  # clients have joined
            self.rows = np.pad(self.rows, ((0, more), (0, 0)))
            self.rounds = np.pad(self.rounds, (0, more))
        if self._signs is None:
            hashes = bits(torch.tensor(Rng.seed(0).at("map").key, device=params.device), self._size)
            self._signs = (1 - 2 * (hashes & 1)).to(params.dtype)
        found = fold(params[:, : self._size], self._signs, WIDTH).float().cpu().numpy()
        self.rows[clients, : found.shape[1]] = found  # clients may send a part of the model only
        self.rounds[clients] = round

    def arrays(self) -> Arrays:
        """The content of `sketches.npz`."""
        return {"sketch": self.rows, "round": self.rounds}

    def load(self, arrays: Arrays) -> None:
        """Load what a resumed run had written; arrays of another type or shape are ignored."""
        rows, rounds = arrays.get("sketch"), arrays.get("round")
        if rows is None or rows.shape != self.rows.shape or rows.dtype != self.rows.dtype:
            return
        if rounds is not None and rounds.shape == self.rounds.shape and rounds.dtype == self.rounds.dtype:
            self.rows, self.rounds = rows.copy(), rounds.copy()


class _Listening:
    """An engine whose answers are sketched as they pass; otherwise the engine itself."""

    def __init__(self, engine: Engine, sketches: Sketches) -> None:
        self._engine, self._sketches = engine, sketches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def call(self, *arguments: Any, **named: Any) -> Iterator[Chunk]:
        for chunk in self._engine.call(*arguments, **named):
            if self._engine.phase == "round":  # a repair asks for the same models again
                self._sketches.add(chunk, self._engine.round)
            yield chunk


def listening(engine: Engine, sketches: Sketches) -> Engine:
    """The same engine for a method; the answers of a round are sketched."""
    return cast(Engine, _Listening(engine, sketches))


def member_pictures(federation: Federation, labels: NDArray[np.int64]) -> Arrays | None:
    """Pictures of some members of each cluster, as the members see them (FeSEM's Fig. 5); None for other data.

    Members and classes are taken evenly, so the same clustering gives the same pictures.
    """
    if not is_picture(federation.input_shape):
        return None
    shown: list[NDArray[np.float64]] = []
    owners: list[tuple[int, int, int]] = []  # client, cluster, label
    clusters = np.unique(labels[labels >= 0])
    for cluster in clusters[spread_evenly(len(clusters), MOST_CLUSTERS)].tolist():
        members = np.flatnonzero(labels == cluster)
        for client in members[spread_evenly(len(members), MOST_MEMBERS)].tolist():
            rows = federation.train.rows(client)
            y = federation.samples(client)[1]
            for position in _of_many_classes(y.numpy(), MOST_PICTURES):
                shown.append(picture(federation, client, rows[position : position + 1]))
                owners.append((client, cluster, int(y[position]) if federation.num_classes else -1))
    if not shown:
        return None
    low, high = black_and_white(federation, shown)
    pictures = np.stack(shown)  # [n, H, W, 3]
    if federation.input_shape[0] == 1:
        pictures = pictures[..., :1]
    return {
        "picture": (255 * np.clip((pictures - low) / (high - low), 0, 1)).round().astype(np.uint8),
        **dict(zip(("client", "cluster", "label"), np.array(owners, dtype=np.int64).T.copy(), strict=True)),
    }


def _of_many_classes(labels: NDArray[Any], most: int) -> list[int]:
    """Positions of the first samples of each class, then of the second ones, and so on; in order of class.

    >>> _of_many_classes(np.array([0, 0, 1, 0, 2, 1]), 4)
    [0, 1, 2, 4]
    """
    if labels.ndim > 1 or not np.issubdtype(labels.dtype, np.integer):
        return list(range(min(most, len(labels))))
    order = np.argsort(labels, kind="stable")
    turn = np.empty(len(labels), dtype=np.int64)  # its place within its class
    turn[order] = np.arange(len(labels)) - np.searchsorted(labels[order], labels[order])
    picked = np.lexsort((labels, turn))[:most]
    return sorted(picked.tolist(), key=lambda position: (int(labels[position]), position))
