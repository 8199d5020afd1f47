"""What members tell of models that they try."""

from __future__ import annotations

import math

import pytest
import torch

from coterie.client.steps import Answer
from coterie.engines.base import Chunk
from coterie.methods.parts.trials import Verdicts, of_best_mix, t_value


def chunk_of(clients: torch.Tensor, **tensors: torch.Tensor) -> Chunk:
    return Chunk(clients, torch.arange(len(clients)), Answer(**tensors))


def test_verdicts_are_those_of_all_chunks_that_tried_something():
    verdicts = Verdicts()
    verdicts.add_chunk(chunk_of(torch.tensor([4]), losses=torch.ones(1, 2)))
    assert not verdicts
    for client in (3, 1):
        rows = torch.full((1, 2), float(client))
        verdicts.add_chunk(chunk_of(torch.tensor([client]), losses=rows, tried=2 * rows))
    assert verdicts
    clients, center, tried = verdicts.all()
    assert clients.tolist() == [3, 1]
    assert center.tolist() == [[3, 3], [1, 1]]
    assert tried.tolist() == [[6, 6], [2, 2]]


def test_the_mix_that_is_best_for_all():
    assert of_best_mix(torch.tensor([[1.0, 3.0], [9.0, 4.0]])).tolist() == [3, 4]


def test_the_gain_in_standard_errors():
    assert t_value(torch.tensor([1.0, 2.0, 3.0, 4.0])) == pytest.approx(2.5 / math.sqrt(5 / 3) * 2)
    assert t_value(torch.tensor([1.0, 2.0, 3.0])) == 0.0
    assert t_value(torch.ones(9)) == 0.0
