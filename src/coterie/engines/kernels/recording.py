"""Steps recorded as CUDA graphs, each on a stream of its own.

torch keeps the workspaces of matrix products by stream, and a graph holds the address of those that it was recorded
with. By default all graphs are recorded on one stream, so they share them, and the end of one graph frees memory that
the others still use: their results are then wrong, without an error (pytorch issue 193402). So no two recordings that
are in use have the same stream.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch

_TRIES = 64  # torch hands out 32 streams of a priority in turn


class Streams:
    """Streams of one device that are lent to one recording at a time."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._free: list[Any] = []
        self._taken: set[int] = set()  # handles

    def take(self) -> Any:
        """A stream that no recording uses; None if there is none."""
        found = self._free.pop() if self._free else self._new()
        if found is None and gc.collect():  # recordings that nobody can reach any more
            found = self._free.pop() if self._free else self._new()
        if found is not None:
            self._taken.add(found.cuda_stream)
        return found

    def _new(self) -> Any:
        for _ in range(_TRIES):
            made = self._make()
            if made.cuda_stream not in self._taken:
                return made
        return None

    def give_back(self, stream: Any) -> None:
        """Its recording has ended."""
        self._taken.discard(stream.cuda_stream)
        self._free.append(stream)


_streams: dict[int, Streams] = {}  # by device


class Recording:
    """A recorded step; `replay` computes it."""

    def __init__(self, graph: Any, streams: Streams, stream: Any) -> None:
        self._graph = graph
        self.replay: Callable[[], None] = graph.replay
        weakref.finalize(self, _end, graph, streams, stream).atexit = False

    @classmethod
    def of(cls, step: Callable[[], None], device: torch.device) -> Recording | None:
        """Record a step without computing it; None if no stream is left. Run it a few times before, on a side stream.

        A step that synchronizes with the GPU is a RuntimeError.
        """
        number = torch.cuda.current_device() if device.index is None else device.index
        if number not in _streams:
            # Streams of another priority than all others here: side streams have workspaces too.
            _streams[number] = Streams(lambda: torch.cuda.Stream(device=device, priority=-1))
        streams = _streams[number]
        stream = streams.take()
        if stream is None:
            return None
        made = cls(torch.cuda.CUDAGraph(), streams, stream)
        with torch.cuda.graph(made._graph, stream=stream):
            step()
        return made


def _end(graph: Any, streams: Streams, stream: Any) -> None:
    with contextlib.suppress(RuntimeError):  # it was not recorded to the end
        graph.reset()  # before its stream is lent again
    streams.give_back(stream)
