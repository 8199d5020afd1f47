"""Any nn.Module as a function of one flat vector, right under stacking.

A model travels as one float vector [P]: parameters first, then float buffers (BatchNorm statistics), with
a layout that names the slices. Integer buffers are not part of it and are never averaged. Neither are frozen parameters
(requires_grad=False): they are constants of the module, which every side makes from the seed.

Two kinds of layer need care when c clients run as one program, and are exchanged for our own:
BatchNorm must not see the padded rows of a partial batch, and dropout must be keyed by client and step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coterie.errors import ModelError
from coterie.randomness import bits, mix

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Slot:
    """One named tensor inside the flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """End of the slice."""
        return self.start + self.size


@dataclass(frozen=True)
class Layout:
    """What lies where in the flat vector."""

    parameters: tuple[Slot, ...]
    buffers: tuple[Slot, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """Trained parameters, then float buffers, each in the module's own order."""
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        floats = {n: b for n, b in module.named_buffers() if b.is_floating_point()}
        start = 0
        parameters, buffers = [], []
        for name, parameter in trained.items():
            parameters.append(Slot(name, tuple(parameter.shape), start))
            start = parameters[-1].stop
        for name, buffer in floats.items():
            buffers.append(Slot(name, tuple(buffer.shape), start))
            start = buffers[-1].stop
        if not parameters:
            raise ModelError(f"{type(module).__name__} has no parameters to train.")
        return cls(tuple(parameters), tuple(buffers))

    @property
    def num_parameters(self) -> int:
        """Entries that are trained; distances look at these."""
        return self.parameters[-1].stop

    @property
    def size(self) -> int:
        """Entries of the whole vector; means are over these."""
        return (self.buffers or self.parameters)[-1].stop

    @property
    def head(self) -> slice:
        """The parameters of the last layer that has any."""
        last = self.parameters[-1].name.rpartition(".")[0]
        own = [slot for slot in self.parameters if slot.name.rpartition(".")[0] == last]
        return slice(own[0].start, own[-1].stop)

    def unpack(self, flat: Tensor) -> Tensors:
        """Flat [..., P] -> named views [..., *shape]."""
        lead = flat.shape[:-1]
        slots = (*self.parameters, *self.buffers)
        return {s.name: flat[..., s.start : s.stop].reshape(*lead, *s.shape) for s in slots}

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Named tensors [c, *shape] -> flat [c, P]."""
        return torch.cat([tensors[s.name].flatten(1) for s in (*self.parameters, *self.buffers)], dim=1)


@dataclass
class _Context:
    """What the exchanged layers must know of the batch in hand."""

    mask: Tensor | None = None  # [B], 1 for a real row
    key: Tensor | None = None  # scalar int64
    draws: int = 0  # dropout layers met on the way through, so that a layer used twice draws twice
    alone: bool = False  # one model by itself, not within vmap: torch's own layers can be used


class Network:
    """A module prepared for running under any engine."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._context = _Context()
        prepared = copy.deepcopy(module)
        self.layout = Layout.of(prepared)
        self.initial = flatten(prepared)  # [P] float32 or as made, on the CPU
        prepared = _exchange(prepared, self._context, type(module).__name__, {})
        self._module = prepared.to(device=device, dtype=dtype).train()  # all layers alike, however it was given
        self._module.requires_grad_(False)
        self.dtype = dtype
        self.device = device
        self.keyed = True  # all its randomness comes from the key; see find_out_keyed

    def __call__(
        self,
        tensors: Mapping[str, Tensor],
        x: Tensor,
        *,
        train: bool = False,
        mask: Tensor | None = None,
        key: Tensor | None = None,
        alone: bool = False,
    ) -> Tensor:
        """Outputs of one model for inputs [B, ...]; in train mode the float buffers in `tensors` are updated."""
        if self._module.training != train:
            self._module.train(train)
        self._context.mask, self._context.key, self._context.draws = mask, key, 0
        self._context.alone = alone
        outputs = torch.func.functional_call(self._module, dict(tensors), (x,))
        if not isinstance(outputs, Tensor):
            raise ModelError(f"The network must return one tensor. Got {type(outputs).__name__} instead.")
        return outputs

    @property
    def module(self) -> nn.Module:
        """The prepared module, on the device."""
        return self._module

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters of the prepared module by their names in the layout."""
        return list(self._module.named_parameters())

    def find_out_keyed(self, x: Tensor) -> None:
        """Notice a network that draws random numbers of its own (functional dropout): torch's generator moves on."""
        x = x[:2].to(self.device, self.dtype)
        key = torch.zeros((), dtype=torch.int64, device=self.device)
        cuda = self.device.type == "cuda"

        def states() -> list[Tensor]:
            return [torch.get_rng_state(), *([torch.cuda.get_rng_state(self.device)] if cuda else [])]

        with torch.no_grad(), torch.random.fork_rng(devices=[self.device] if cuda else []):
            before = states()
            flat = self.initial.to(self.device, self.dtype).clone()
            self(self.layout.unpack(flat), x, train=True, key=key)
            self.keyed = all(torch.equal(old, new) for old, new in zip(before, states(), strict=True))

    def activation_size(self, x: Tensor) -> int:
        """Numbers that one sample leaves behind on its way through, for estimating memory."""
        total = 0

        def count(_module: nn.Module, _inputs: Any, output: Any) -> None:
            nonlocal total
            if isinstance(output, Tensor):
                total += output.numel()

        leaves = [m for m in self._module.modules() if not list(m.children())]
        handles = [leaf.register_forward_hook(count) for leaf in leaves]
        try:
            with torch.no_grad():
                flat = self.initial.to(self.device, self.dtype)
                self(self.layout.unpack(flat), x[:1])
        finally:
            for handle in handles:
                handle.remove()
        return total + x[:1].numel()


def flatten(module: nn.Module) -> Tensor:
    """The module's values as one flat vector [P] on the CPU, frozen parameters left out."""
    layout = Layout.of(module)
    named: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    slots = (*layout.parameters, *layout.buffers)
    return torch.cat([named[s.name].detach().reshape(-1).cpu() for s in slots])


def state_dict(module: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    """A plain state_dict of `module` with the values of a flat vector; frozen ones and integer buffers as they are."""
    layout = Layout.of(module)
    values = layout.unpack(flat.detach().cpu())
    made = {}
    # Tied tensors have one name in the layout and several here.
    first = {id(t): n for n, t in (*module.named_parameters(), *module.named_buffers())}
    for name, tensor in module.state_dict(keep_vars=True).items():
        known = values.get(first.get(id(tensor), name))
        made[name] = (tensor.detach() if known is None else known.to(tensor.dtype)).clone()
    return made


def _exchange(module: nn.Module, context: _Context, path: str, done: dict[nn.Module, nn.Module]) -> nn.Module:
    """Exchange BatchNorm and dropout, keeping the names of their parameters and buffers.

    A layer may stand under several names; `done` gives it the same exchange at each.
    """
    if module in done:
        return done[module]
    done[module] = module
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        done[module] = _MaskedBatchNorm(module, context, path)
    elif isinstance(module, nn.modules.dropout._DropoutNd) and type(module) in _CHANNEL_DROPOUT:
        done[module] = _KeyedDropout(module, context)
    else:
        for name, child in module._modules.items():
            if child is not None:
                setattr(module, name, _exchange(child, context, f"{path}.{name}", done))
    return done[module]


class _MaskedBatchNorm(nn.Module):
    """BatchNorm whose statistics leave masked rows out.

    A batch with a single value per channel has no variance: it is normalised by the running statistics
    and does not change them (torch would raise, and one odd batch would lose the client).
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, original: nn.modules.batchnorm._BatchNorm, context: _Context, path: str) -> None:
        super().__init__()
        if not original.track_running_stats:
            raise ModelError(
                f"{path}: BatchNorm with track_running_stats=False scores a sample by the batch it is in; "
                "track the statistics, or use GroupNorm."
            )
        if original.momentum is None:
            raise ModelError(f"{path}: BatchNorm with momentum=None (a cumulative mean) cannot be averaged; set one.")
        self.weight, self.bias = original.weight, original.bias
        self.register_buffer("running_mean", original.running_mean)
        self.register_buffer("running_var", original.running_var)
        self.momentum, self.eps = original.momentum, original.eps
        self._context = [context]  # in a list, so that torch does not look into it

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [B, C, ...]."""
        if self._context[0].alone and self._context[0].mask is None and (not self.training or x[:, 0].numel() > 1):
            settings = (self.weight, self.bias, self.training, self.momentum, self.eps)
            return nn.functional.batch_norm(x, self.running_mean, self.running_var, *settings)
        shape = [1, -1] + [1] * (x.dim() - 2)
        mean, var = self._statistics(x) if self.training else (self.running_mean, self.running_var)
        scale = torch.rsqrt(var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        return x * scale.reshape(shape) + shift.reshape(shape)

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the batch; the running ones move towards them."""
        axes = [0, *range(2, x.dim())]
        spatial = x.shape[2:].numel()
        mask = self._context[0].mask
        if mask is None:
            count = torch.full((), float(x.shape[0] * spatial), dtype=x.dtype, device=x.device)
            weight = torch.ones((), dtype=x.dtype, device=x.device)
        else:
            count = mask.sum() * spatial
            weight = mask.reshape([-1] + [1] * (x.dim() - 1))
        mean = (x * weight).sum(axes) / count
        centered = (x - mean.reshape([1, -1] + [1] * (x.dim() - 2))) * weight
        var = (centered * centered).sum(axes) / count
        alone = count <= 1
        old_mean, old_var = self.running_mean, self.running_var
        with torch.no_grad():
            unbiased = var * (count / (count - 1).clamp_min(1))
            step = torch.where(alone, torch.zeros_like(count), torch.full_like(count, self.momentum))
            old_mean.copy_(old_mean + step * (mean.detach() - old_mean))
            old_var.copy_(old_var + step * (unbiased.detach() - old_var))
        return torch.where(alone, old_mean.clone(), mean), torch.where(alone, old_var.clone(), var)


_CHANNEL_DROPOUT = {nn.Dropout: False, nn.Dropout1d: True, nn.Dropout2d: True, nn.Dropout3d: True}


class _KeyedDropout(nn.Module):
    """Dropout whose choice is a hash of client, step, place in the network, row and entry."""

    def __init__(self, original: nn.modules.dropout._DropoutNd, context: _Context) -> None:
        super().__init__()
        self.p = float(original.p)
        self._channels = _CHANNEL_DROPOUT[type(original)]
        self._context = [context]

    def forward(self, x: Tensor) -> Tensor:
        """Drop entries (or whole channels) of [B, ...] in train mode."""
        key = self._context[0].key
        if not self.training or self.p == 0 or key is None:
            return x
        shape = x.shape[:2] if self._channels else x.shape
        self._context[0].draws += 1
        hashes = bits(mix(key + self._context[0].draws), math.prod(shape)).reshape(shape)
        # 53 random bits against p; the same on every device, in every precision.
        keep = ((hashes >> 11) & ((1 << 53) - 1)) >= int(self.p * 2**53)
        keep = keep.reshape(*shape, *[1] * (x.dim() - len(shape)))
        return x * keep / (1 - self.p) if self.p < 1 else x * 0


Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """Loss of each sample: [b, L] and classes [b] -> [b]."""
    return nn.functional.cross_entropy(outputs, y, reduction="none")


def mse(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of each sample; integer classes are compared as one-hot vectors."""
    if not y.is_floating_point():
        target = nn.functional.one_hot(y, outputs.shape[-1]).to(outputs.dtype)
    else:
        target = y.to(outputs.dtype).reshape(outputs.shape)
    return ((outputs - target) ** 2).unsqueeze(-1).flatten(1).mean(1)


LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "mse": mse}
