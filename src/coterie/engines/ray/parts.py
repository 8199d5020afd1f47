"""Which worker has which clients, in which order their answers count, and tensors as arrays. Needs no Ray."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T")
Arrays = dict[str, NDArray[Any]]


def divide(sizes: Tensor, workers: int) -> list[slice]:
    """The clients of each worker: as they follow one another, with about equal numbers of samples, at least one client.

    Neighbours stay together, because clients of a kind follow one another and often share their test samples.

    >>> divide(torch.tensor([10, 10, 10, 10, 40]), 2)
    [slice(0, 4, None), slice(4, 5, None)]
    """
    count = len(sizes)
    before = [0, *sizes.cumsum(0).tolist()]  # samples of the clients before each client
    cuts = [0]
    for worker in range(1, workers):
        wanted = before[-1] * worker / workers
        nearest = min(range(count + 1), key=lambda place: abs(before[place] - wanted))
        cuts.append(min(max(nearest, cuts[-1] + 1), count - (workers - worker)))
    return [slice(first, last) for first, last in zip(cuts, [*cuts[1:], count], strict=True)]


def in_turns(streams: Iterable[Iterator[T]]) -> Iterator[T]:
    """One item of each stream, then the next of each, until all have ended: an order without clocks.

    >>> list(in_turns([iter("abc"), iter("x"), iter("12")]))
    ['a', 'x', '1', 'b', '2', 'c']
    """
    waiting = deque(streams)
    while waiting:
        stream = waiting.popleft()
        for item in stream:
            yield item
            waiting.append(stream)
            break


def arrays_of(tensors: Mapping[str, Tensor]) -> Arrays:
    """Named tensors as arrays, which Ray keeps in shared memory and does not copy."""
    return {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in tensors.items()}


def tensor_of(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array as a tensor that owns its memory; arrays that Ray delivers cannot be written to."""
    return torch.from_numpy(np.array(array)).to(device)


def tensors_of(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Named arrays as tensors."""
    return {name: tensor_of(array, device) for name, array in arrays.items()}


def joined(parts: list[tuple[slice, Mapping[str, Tensor]]], clients: int) -> dict[str, Tensor]:
    """The memory of all clients [N, ...] from that of each worker's; zeros where a worker's clients have none."""
    found: dict[str, Tensor] = {}
    for where, tensors in parts:
        for name, rows in tensors.items():
            if name not in found:
                found[name] = rows.new_zeros(clients, *rows.shape[1:])
            found[name][where] = rows
    return found
