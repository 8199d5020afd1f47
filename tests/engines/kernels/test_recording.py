"""Recordings: streams by hand, and on a GPU that the end of one recording does not change another."""

from __future__ import annotations

import gc
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch

from coterie.engines.kernels.recording import Recording, Streams


def streams(count: int) -> Streams:
    """As torch makes them: so many handles in turn."""
    handles = cycle(range(count))
    return Streams(lambda: SimpleNamespace(cuda_stream=next(handles)))


def test_streams_in_use_differ():
    pool = streams(4)
    assert {pool.take().cuda_stream for _ in range(4)} == {0, 1, 2, 3}
    assert pool.take() is None


def test_a_stream_is_lent_again_once_it_is_given_back():
    pool = streams(2)
    first, second = pool.take(), pool.take()
    pool.give_back(first)
    assert pool.take() is first
    assert pool.take() is None
    pool.give_back(second)
    assert pool.take() is second


class Graph:
    """Stands in for a CUDA graph."""

    def __init__(self, fails: bool = False) -> None:
        self.resets, self._fails = 0, fails

    def replay(self) -> None: ...

    def reset(self) -> None:
        self.resets += 1
        if self._fails:
            raise RuntimeError("never recorded")


@pytest.mark.parametrize("fails", [False, True])
def test_a_recording_that_ends_resets_its_graph_and_gives_its_stream_back(fails):
    pool, graph = streams(1), Graph(fails)
    recording = Recording(graph, pool, pool.take())
    assert pool.take() is None
    assert graph.resets == 0
    del recording
    assert graph.resets == 1
    assert pool.take() is not None


def test_recordings_that_nobody_can_reach_are_collected_when_streams_run_out():
    pool = streams(1)
    gc.disable()
    try:
        lost = SimpleNamespace(recording=Recording(Graph(), pool, pool.take()))
        lost.itself = lost
        del lost
        assert pool.take() is not None
    finally:
        gc.enable()


@pytest.mark.gpu
def test_the_end_of_one_recording_does_not_change_another():
    """Long products have a workspace, whose address a graph keeps."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    device = torch.device("cuda")
    torch.manual_seed(0)
    left = torch.randn(64, 1 << 16, device=device, dtype=torch.bfloat16)
    right = torch.randn(1 << 16, 64, device=device, dtype=torch.bfloat16)
    found = torch.empty(64, 64, device=device, dtype=torch.bfloat16)
    other = torch.empty_like(found)

    def warmed_up(step):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        return Recording.of(step, device)

    kept = warmed_up(lambda: torch.mm(left, right, out=found))
    kept.replay()
    expected = found.clone()
    for _ in range(3):
        ended = warmed_up(lambda: torch.mm(right.T, left.T, out=other))
        ended.replay()
        del ended
        torch.cuda.empty_cache()
        held = [torch.full((1 << 22,), float(i), device=device) for i in range(64)]  # takes what was freed
        kept.replay()
        assert torch.equal(found, expected)
        assert all(bool((tensor == i).all()) for i, tensor in enumerate(held))
