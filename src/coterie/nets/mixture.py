"""The model that a client is served with: a network with its weights, or a small module that mixes several."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coterie.errors import ModelError
from coterie.nets.flat import Layout, state_dict, takes_integers
from coterie.nets.stand_in import StandIn


class MixtureModel(nn.Module):
    """Mixes the predictions of several copies of a network, with fixed weights.

    With classes, the output is the logarithm of the mixed probabilities: use it as logits. Otherwise it is the weighted
    mean of the outputs.
    """

    weights: Tensor
    bias: Tensor

    def __init__(self, module: nn.Module, count: int, num_classes: int) -> None:
        super().__init__()
        self.models = nn.ModuleList(copy.deepcopy(module) for _ in range(count))
        self.register_buffer("weights", torch.full((count,), 1 / count))
        self.register_buffer("bias", torch.zeros(count, num_classes))

    @classmethod
    def from_state_dict(cls, module: nn.Module, weights: Mapping[str, Tensor]) -> MixtureModel:
        """The mixture that `coterie export` wrote; `module` is the network it mixes."""
        if "weights" not in weights or "bias" not in weights:
            raise ModelError("This state_dict is of one network, not of a mixture: load it into the network itself.")
        made = cls(module, *weights["bias"].shape)
        made.load_state_dict(dict(weights))
        return made.eval()

    def forward(self, x: Tensor) -> Tensor:
        """The mixed outputs."""
        outputs = torch.stack([model(x) for model in self.models])
        if not self.bias.shape[1]:
            return (outputs * self.weights.reshape(-1, *[1] * (outputs.dim() - 1))).sum(0)
        wide = nn.functional.pad(self.bias, (0, outputs.shape[2] - self.bias.shape[1]))
        outputs = (outputs + wide.unsqueeze(1)).log_softmax(2)
        return torch.logsumexp(outputs + self.weights.clamp_min(1e-30).log().reshape(-1, 1, 1), dim=0)


@dataclass(frozen=True)
class Served:
    """What one client is served with."""

    params: Tensor  # [m, P]
    weights: Tensor  # [m]
    bias: Tensor | None = None  # [m, L]

    @classmethod
    def of_one(cls, params: Tensor) -> Served:
        """One model [P]."""
        return cls(params.unsqueeze(0), params.new_ones(1))

    def module(self, like: nn.Module, num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
        """A copy of the network if one model is served, else a `MixtureModel`; in eval mode."""
        used = (self.weights > 0).nonzero().flatten()
        bias = torch.zeros(len(self.params), num_classes) if self.bias is None else self.bias.detach().cpu().float()
        if len(used) == 1:
            one = copy.deepcopy(like)
            one.load_state_dict(state_dict(like, self.params[used[0]]))
            if _add_bias(one, bias[used[0]], input_shape):
                return one.eval()
        made = MixtureModel(like, len(used), num_classes)
        for model, row in zip(made.models, self.params[used], strict=True):
            model.load_state_dict(state_dict(like, row))
        made.weights.copy_(self.weights[used])
        made.bias.copy_(bias[used.cpu()])
        return made.eval()


def _add_bias(module: nn.Module, bias: Tensor, input_shape: tuple[int, ...]) -> bool:
    """Add a bias [L] to the outputs of a network by changing its last layer; False if that does not do it."""
    if not bool(bias.any()):
        return True
    head = Layout.of(module).parameters[-1]
    last = module.get_parameter(head.name)
    if isinstance(module, StandIn):
        if module.output_bias:
            with torch.no_grad():
                last.add_(nn.functional.pad(bias, (0, len(last) - len(bias))))
        return module.output_bias
    if not head.name.endswith("bias") or last.shape != bias.shape:
        return False
    module.eval()
    with torch.no_grad():
        x = torch.linspace(-1, 1, 2 * torch.Size(input_shape).numel(), dtype=last.dtype).reshape(2, *input_shape)
        x = torch.zeros_like(x, dtype=torch.int64) if takes_integers(module) else x
        wanted = module(x) + bias
        last.add_(bias)
        if torch.allclose(module(x), wanted, atol=1e-4):
            return True
        last.sub_(bias)
    return False
