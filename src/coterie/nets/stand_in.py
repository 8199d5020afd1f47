"""A network without its code: the names and shapes of its tensors, which are enough to write a state_dict.

A run folder describes its network in this way, so that its models can be exported where the user's own class is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from coterie.errors import ModelError
from coterie.nets.flat import Layout

_MOST = 1 << 31  # entries of a tensor


class StandIn(nn.Module):
    """Has the parameters and buffers of a network, and cannot compute."""

    output_bias = False  # whether the last parameters are added to the outputs

    def forward(self, x: Tensor) -> Tensor:
        """Raises: a description cannot compute."""
        raise ModelError("This network has its weights, but not its code; open the run with model=... to compute.")


def describe(module: nn.Module, output_bias: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """What `rebuild` needs: plain values, and the tensors that no flat vector holds.

    None if the network cannot be described, because it makes its state_dict by rules of its own.
    """
    first: dict[int, str] = {}
    tensors, rest = [], {}
    saved = module.state_dict()
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, tensor in every:
        same = first.setdefault(id(tensor), name)
        entry = {"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        kind = "parameter" if name in parameters else "buffer"
        tensors.append(entry | {"kind": kind, "trained": same in trained, "saved": name in saved, "same": same})
        if same == name and name not in trained and (kind == "parameter" or not tensor.is_floating_point()):
            rest[name] = tensor.detach().cpu().clone()
    facts: dict[str, Any] = {
        "modules": [name for name, _ in module.named_modules(remove_duplicate=False) if name],
        "tensors": tensors,
    }
    facts["output_bias"] = output_bias
    made = rebuild(facts, rest)
    if list(made.state_dict()) != list(saved) or Layout.of(made) != Layout.of(module):
        return None
    return facts, rest


def rebuild(facts: Mapping[str, Any], rest: Mapping[str, Tensor]) -> StandIn:
    """The stand-in of a network that was described; raises ValueError, LookupError or TypeError if that is damaged."""
    made = StandIn()
    made.output_bias = facts["output_bias"] is True
    for name in facts["modules"]:
        _module(made, name)
    found: dict[str, Tensor] = {}
    for entry in facts["tensors"]:
        name, same, dtype = str(entry["name"]), str(entry["same"]), getattr(torch, entry["dtype"])
        is_shape = all(isinstance(n, int) and n >= 0 for n in entry["shape"]) and math.prod(entry["shape"]) <= _MOST
        if not isinstance(dtype, torch.dtype) or not is_shape:
            raise ValueError(f"{name} is no tensor")
        parent, _, own = name.rpartition(".")
        is_parameter = entry["kind"] == "parameter"
        if same not in found:
            value = torch.zeros(entry["shape"], dtype=dtype)
            if same in rest:
                value.copy_(rest[same])
            trained = bool(entry["trained"])
            found[same] = nn.Parameter(value, requires_grad=trained) if is_parameter else value
        if is_parameter:
            _module(made, parent).register_parameter(own, found[same])  # type: ignore[arg-type]
        else:
            _module(made, parent).register_buffer(own, found[same], persistent=bool(entry["saved"]))
    return made


def _module(root: nn.Module, name: str) -> nn.Module:
    """The module of that name below the root, made if it is not there."""
    at = root
    for part in name.split(".") if name else ():
        if part not in at._modules:
            at.add_module(part, nn.Module())
        child = at._modules[part]
        assert child is not None
        at = child
    return at
