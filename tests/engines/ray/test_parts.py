from __future__ import annotations

import pytest
import torch

from coterie.engines.ray.parts import arrays_of, divide, in_turns, joined, tensor_of


@pytest.mark.parametrize(
    ("sizes", "workers", "counts"),
    [
        ([5, 5, 5, 5], 2, [2, 2]),
        ([5, 5, 5], 3, [1, 1, 1]),
        ([100, 1, 1, 1], 3, [1, 1, 2]),
        ([1, 1, 1, 100], 3, [2, 1, 1]),
        ([1, 1, 1, 1, 4], 2, [4, 1]),
        ([7, 7, 7], 1, [3]),
    ],
)
def test_clients_are_divided_by_samples_and_no_worker_is_idle(sizes, workers, counts):
    found = divide(torch.tensor(sizes), workers)
    assert [part.stop - part.start for part in found] == counts
    assert [place for part in found for place in range(part.start, part.stop)] == list(range(len(sizes)))


def test_many_unequal_clients_are_divided_within_one_client():
    sizes = (torch.arange(1000) * 7919) % 997 + 1
    loads = [int(sizes[part].sum()) for part in divide(sizes, 8)]
    assert max(loads) - min(loads) <= 2 * 997


def test_turns_do_not_depend_on_how_long_a_stream_takes():
    taken = []

    def stream(name, length):
        for number in range(length):
            taken.append(name)
            yield f"{name}{number}"

    assert list(in_turns([stream("a", 3), stream("b", 1), stream("c", 2)])) == ["a0", "b0", "c0", "a1", "c1", "a2"]
    assert taken == list("abcaca")  # nothing is read before its turn


def test_arrays_that_cannot_be_written_become_tensors_that_can():
    array = arrays_of({"x": torch.arange(3.0)})["x"]
    array.flags.writeable = False
    tensor = tensor_of(array, torch.device("cpu"))
    tensor += 1
    assert tensor.tolist() == [1, 2, 3]
    assert array.tolist() == [0, 1, 2]


def test_memory_of_workers_is_joined_and_missing_rows_are_zero():
    first = {"value.model": torch.ones(2, 3), "present.model": torch.tensor([True, False])}
    second = {"value.loss": torch.tensor([5.0]), "present.loss": torch.tensor([True])}
    found = joined([(slice(0, 2), first), (slice(2, 3), second)], 3)
    assert found["value.model"].tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    assert found["present.model"].tolist() == [True, False, False]
    assert found["value.loss"].tolist() == [0, 0, 5]
    assert found["present.loss"].tolist() == [False, False, True]
