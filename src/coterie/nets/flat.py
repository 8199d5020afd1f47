"""Any nn.Module as a function of one flat vector, correct in a stack.

A model is one float vector [P]: trained parameters first, then float buffers (BatchNorm statistics), with a layout that
names the slices. Integer buffers are not part of it and are never averaged. Frozen parameters (requires_grad=False) are
not part of it either: they are constants of the module, which every side creates from the seed.

Some kinds of layer need care when c clients are computed together, and are replaced by our own: BatchNorm must not see
the padded rows of a partial batch, dropout must be keyed by client and step, and recurrent layers and attention must be
possible in stacks (`coterie.nets.sequences`).
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coterie.errors import ModelError
from coterie.nets.sequences import KEPT_BY_STEP, Surroundings, prepare
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
    """Which slice of the flat vector holds which tensor."""

    parameters: tuple[Slot, ...]
    buffers: tuple[Slot, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """Trained parameters, then float buffers, each in the module's own order."""
        start, slots = 0, []
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        buffers = {name: b for name, b in module.named_buffers() if b.is_floating_point()}
        for name, tensor in (*trained.items(), *buffers.items()):
            slots.append(Slot(name, tuple(tensor.shape), start))
            start = slots[-1].stop
        if not trained:
            raise ModelError(f"{type(module).__name__} has no parameters to train.")
        return cls(tuple(slots[: len(trained)]), tuple(slots[len(trained) :]))

    @functools.cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Parameters, then buffers."""
        return (*self.parameters, *self.buffers)

    @property
    def num_parameters(self) -> int:
        """Number of trained entries; distances use these."""
        return self.parameters[-1].stop

    @property
    def size(self) -> int:
        """Length of the vector; means use all of it."""
        return (self.buffers or self.parameters)[-1].stop

    def beside(self, models: int) -> Layout:
        """The layout of several such vectors, one after the other."""
        if models == 1:
            return self

        def copies(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
            return tuple(Slot(f"{i}.{s.name}", s.shape, s.start + i * self.size) for i in range(models) for s in slots)

        return Layout(copies(self.parameters), copies(self.buffers))

    @property
    def head(self) -> slice:
        """The slice of the last layer that has parameters."""
        return self.top(1)

    def top(self, layers: int) -> slice:
        """The slice of the last layers that have parameters; of all parameters, if there are fewer layers."""
        names = list(dict.fromkeys(slot.name.rpartition(".")[0] for slot in self.parameters))[-layers:]
        own = [slot for slot in self.parameters if slot.name.rpartition(".")[0] in names]
        return slice(own[0].start, own[-1].stop)

    def unpack(self, flat: Tensor) -> Tensors:
        """Flat [..., P] -> named views [..., *shape]."""
        lead = flat.shape[:-1]
        return {s.name: flat[..., s.start : s.stop].reshape(*lead, *s.shape) for s in self.slots}

    def copy_from(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy flat [c, P] into tensors [c, *shape], one per slot."""
        for slot, tensor in zip(self.slots, tensors, strict=True):
            tensor.copy_(flat[:, slot.start : slot.stop].reshape(tensor.shape))

    def copy_to(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy tensors [c, *shape], one per slot, into flat [c, P]."""
        for slot, tensor in zip(self.slots, tensors, strict=True):
            flat[:, slot.start : slot.stop].copy_(tensor.flatten(1))


@dataclass
class _Context:
    """What the replaced layers must know about the current batch."""

    mask: Tensor | None = None  # [B], 1 for a real row
    key: Tensor | None = None  # scalar int64
    draws: int = 0  # dropout layers passed so far: a layer that is used twice draws twice
    alone: bool = False  # one model outside vmap: torch's own kernels can be used

    def drop(self, x: Tensor, p: float, axes: int | None = None) -> Tensor:
        """Drop entries of [B, ...], alike along the axes from `axes` on: a hash of client, step, place and entry."""
        if p == 0 or self.key is None:
            return x
        shape = x.shape[:axes]
        self.draws += 1
        hashes = bits(mix(self.key + self.draws), math.prod(shape)).reshape(shape)
        # 53 random bits against p: the same on every device and in every precision.
        keep = ((hashes >> 11) & ((1 << 53) - 1)) >= int(p * 2**53)
        keep = keep.reshape(*shape, *[1] * (x.dim() - len(shape)))
        return x * keep / (1 - p) if p < 1 else x * 0


class Network:
    """A module prepared for any engine."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._context = _Context()
        prepared = copy.deepcopy(module)
        self.layout = Layout.of(prepared)
        self.initial = flatten(prepared)  # [P] in the module's own type, on the CPU
        prepared = _replace_layers(prepared, self._context, type(module).__name__, {})
        self.module = prepared.to(device=device, dtype=dtype).train().requires_grad_(False)  # one mode for all layers
        self.dtype, self.device = dtype, device
        self.keyed = True  # all its randomness comes from the key; see detect_keyed

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
        if self.module.training != train:
            self.module.train(train)
        context = self._context
        context.mask, context.key, context.draws, context.alone = mask, key, 0, alone
        outputs = torch.func.functional_call(self.module, dict(tensors), (x,))
        if not isinstance(outputs, Tensor):
            raise ModelError(f"The network must return one tensor. Got {type(outputs).__name__} instead.")
        return outputs

    def inputs(self, x: Tensor) -> Tensor:
        """Samples as the network takes them: integers stay integers if it has an embedding."""
        keep = takes_integers(self.module) and not x.is_floating_point()
        return x.to(self.device, x.dtype if keep else self.dtype)

    def detect_keyed(self, x: Tensor) -> None:
        """Detect a network that draws its own random numbers (functional dropout): torch's generator advances."""
        x = self.inputs(x[:2])
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
        """Number of activations of one sample, to estimate memory."""
        found = self._layer_outputs(x)
        kept = sum(out.numel() * (KEPT_BY_STEP if isinstance(layer, nn.RNNBase) else 1) for layer, out in found)
        return kept + x[:1].numel()

    def largest_output(self, x: Tensor) -> int:
        """Number of activations of one sample in the layer that has most of them."""
        return max([x[:1].numel(), *(out.numel() for _, out in self._layer_outputs(x))])

    def multiplications(self, x: Tensor) -> int | None:
        """Multiplications by weights in the forward pass of one sample, to estimate time; None: unknown layers."""
        total, known = 0, set[int]()
        for layer, output in self._layer_outputs(x):
            weight = getattr(layer, "weight", None)
            if isinstance(weight, Tensor) and weight.dim() > 1:
                total += weight.numel() * output.numel() // len(weight)  # each row of the weight gives one channel
                known.add(id(weight))
        return total if all(p.dim() < 2 or id(p) in known for p in self.module.parameters()) else None

    def _layer_outputs(self, x: Tensor) -> list[tuple[nn.Module, Tensor]]:
        """The layers and what each returns for the first sample."""
        found: list[tuple[nn.Module, Tensor]] = []

        def keep(layer: nn.Module, _inputs: Any, output: Any) -> None:
            output = output[0] if isinstance(layer, nn.RNNBase) else output
            if isinstance(output, Tensor):
                found.append((layer, output))

        leaves = [m for m in self.module.modules() if not list(m.children())]
        handles = [leaf.register_forward_hook(keep) for leaf in leaves]
        try:
            with torch.no_grad():
                self(self.layout.unpack(self.initial.to(self.device, self.dtype)), x[:1])
        finally:
            for handle in handles:
                handle.remove()
        return found


def takes_integers(module: nn.Module) -> bool:
    """Whether a network takes integers, such as token ids, as they are: it has an embedding. Others get floats."""
    return any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in module.modules())


def flatten(module: nn.Module) -> Tensor:
    """The module's values as one flat vector [P] on the CPU, without frozen parameters."""
    named: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    return torch.cat([named[slot.name].detach().reshape(-1).cpu() for slot in Layout.of(module).slots])


def state_dict(module: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    """A state_dict of `module` with the values of a flat vector; frozen parameters and integer buffers unchanged."""
    values = Layout.of(module).unpack(flat.detach().cpu())
    made = {}
    # Tied tensors have one name in the layout and several here.
    first = {id(t): n for n, t in (*module.named_parameters(), *module.named_buffers())}
    for name, tensor in module.state_dict(keep_vars=True).items():
        known = values.get(first.get(id(tensor), name))
        made[name] = (tensor.detach() if known is None else known.to(tensor.dtype)).clone()
    return made


def _replace_layers(module: nn.Module, context: _Context, path: str, done: dict[nn.Module, nn.Module]) -> nn.Module:
    """Replace BatchNorm, dropout and layers over sequences, keeping the names of their parameters and buffers.

    A layer may have several names; `done` maps it to one replacement.
    """
    if module in done:
        return done[module]
    done[module] = module
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        done[module] = MaskedBatchNorm(module, context, path)
    elif isinstance(module, nn.modules.dropout._DropoutNd) and type(module) in _CHANNEL_DROPOUT:
        done[module] = KeyedDropout(module, context)
    else:
        prepare(module, Surroundings(lambda: context.alone, context.drop))
        for name, child in module._modules.items():
            if child is not None:
                setattr(module, name, _replace_layers(child, context, f"{path}.{name}", done))
    return done[module]


class MaskedBatchNorm(nn.Module):
    """BatchNorm whose statistics ignore masked rows.

    A batch with a single value per channel has no variance: it is normalized by the running statistics
    and does not change them (torch would raise, and one such batch would lose the client).
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, original: nn.modules.batchnorm._BatchNorm, context: _Context, path: str) -> None:
        super().__init__()
        if not original.track_running_stats:
            raise ModelError(
                f"{path}: BatchNorm with track_running_stats=False makes a sample's output depend on its batch; "
                "track the statistics, or use GroupNorm."
            )
        if original.momentum is None:
            raise ModelError(
                f"{path}: BatchNorm with momentum=None (a cumulative mean) cannot be averaged; set a momentum."
            )
        self.weight, self.bias = original.weight, original.bias
        self.register_buffer("running_mean", original.running_mean)
        self.register_buffer("running_var", original.running_var)
        self.momentum, self.eps = original.momentum, original.eps
        self._context = [context]  # in a list, so that torch does not register it

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [B, C, ...]."""
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
        """Mean and variance of the batch; the running statistics move towards them."""
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


class KeyedDropout(nn.Module):
    """Dropout whose mask is a hash of client, step, place in the network, row and entry."""

    def __init__(self, original: nn.modules.dropout._DropoutNd, context: _Context) -> None:
        super().__init__()
        self.p = float(original.p)
        self._channels = _CHANNEL_DROPOUT[type(original)]
        self._context = [context]

    def forward(self, x: Tensor) -> Tensor:
        """Drop entries (or whole channels) of [B, ...] in train mode."""
        return self._context[0].drop(x, self.p, 2 if self._channels else None) if self.training else x


Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """Loss per sample: [b, L] and classes [b] -> [b]."""
    return nn.functional.cross_entropy(outputs, y, reduction="none")


def mse(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean squared error per sample; classes are compared as one-hot vectors."""
    if not y.is_floating_point():
        target = nn.functional.one_hot(y, outputs.shape[-1]).to(outputs.dtype)
    else:
        target = y.to(outputs.dtype).reshape(outputs.shape)
    return ((outputs - target) ** 2).unsqueeze(-1).flatten(1).mean(1)


LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "mse": mse}
