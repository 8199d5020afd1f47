"""A network without its code: the same state_dict from the same vector."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from coterie.errors import ModelError
from coterie.nets.flat import flatten, state_dict
from coterie.nets.mixture import Served
from coterie.nets.stand_in import describe, rebuild


def tied() -> nn.Module:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers[1].weight = layers[0].weight
    return layers


def shared() -> nn.Module:
    layer = nn.Linear(3, 3)
    found = nn.Sequential(layer, nn.BatchNorm1d(3, affine=False), layer, nn.BatchNorm1d(3))
    found[3].weight.requires_grad_(False).fill_(2.0)  # type: ignore[operator]
    return found


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("hidden", torch.ones(3), persistent=False)
        self.inner = nn.ModuleDict({"lstm": nn.LSTM(2, 3), "norm": nn.BatchNorm2d(2)})


@pytest.mark.parametrize("make", [tied, shared, Nested])
def test_weights_are_named_as_in_the_network(make):
    module = make()
    found = describe(module)
    assert found is not None
    made = rebuild(json.loads(json.dumps(found[0])), found[1])
    vector = torch.randn_like(flatten(module))
    expected, got = state_dict(module, vector), state_dict(made, vector)
    assert list(expected) == list(got)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_a_bias_is_added_to_the_last_layer_as_in_the_network():
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    found = describe(module, output_bias=True)
    assert found is not None
    made = rebuild(*found)
    served = Served(torch.randn(1, len(flatten(module))), torch.ones(1), torch.tensor([[1.0, 0.0, -1.0]]))
    expected, got = (served.module(like, 3, (4,)).state_dict() for like in (module, made))
    assert list(expected) == list(got)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_it_cannot_compute():
    found = describe(nn.Linear(2, 2))
    assert found is not None
    with pytest.raises(ModelError, match="has its weights, but not its code"):
        rebuild(*found)(torch.zeros(1, 2))


def test_a_network_with_rules_of_its_own_is_not_described():
    class Own(nn.Linear):
        def state_dict(self, *args, **more):  # type: ignore[override]
            return {"other": self.weight}

    assert describe(Own(2, 2)) is None
