"""Image networks as a stack of c models: clients are folded into the batch axis.

All samples of c clients are one batch [c * B, C, H, W]. Most layers treat samples alone, so the network's own code
computes all clients as it is: activations, pooling, shortcuts, reshapes. Only layers with weights must know whose
sample they have. They are replaced by layers that hold the weights of all clients: dense layers and 1x1 convolutions
become batched matrix products, BatchNorm takes statistics client by client, and other convolutions are computed client
by client, on a GPU in parallel. With Triton, BatchNorm is fused with the activation after it, and depthwise
convolutions have kernels of their own, since those of the libraries are slow.

`FoldedKernel.of` returns None for a network with weights in other kinds of layer. Code that mixes samples would compute
something else here, so the engine compares one step with plain autograd before it uses this kernel.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.client.batches import Batch
from coterie.client.work import Stack
from coterie.nets.flat import KeyedDropout, Loss, MaskedBatchNorm, Network

_aten = torch.ops.aten
_ACTIVATIONS: dict[type[nn.Module], int] = {nn.ReLU: 1, nn.ReLU6: 2}  # those that a norm can be fused with


@functools.cache
def _fused() -> Any:
    """The fused operations, or None without Triton."""
    try:
        from coterie.engines.kernels import fused
    except ImportError:
        return None
    return fused


class _Fold:
    """What the folded layers must know about the current batch."""

    def __init__(self, low: bool, streams: int, device: torch.device) -> None:
        self.values: dict[str, Tensor] = {}  # weights and statistics of all clients, [c, ...], by name
        self.mask: Tensor | None = None  # [c, B], 1 for a real row
        self.low = low  # whether products are computed in bfloat16
        self.streams = [torch.cuda.Stream(device=device) for _ in range(streams if device.type == "cuda" else 0)]

    def lowered(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16) if self.low else x


class FoldedKernel:
    """Gradients and outputs of c models, whose samples are one batch."""

    prefers_channels_last = True

    def __init__(self, network: Network, loss: Loss, low: bool = False, streams: int = 0) -> None:
        self._loss, self._layout = loss, network.layout
        self._fold = _Fold(low, streams, network.device)
        self._module = _folded(copy.deepcopy(network.module), self._fold)

    @classmethod
    def of(cls, network: Network, loss: Loss, low: bool = False, streams: int = 0) -> FoldedKernel | None:
        """The kernel of a network; None if other layers than those below have weights, or if some are frozen."""
        leaves = {name: _parameters(m) for name, m in network.module.named_modules() if isinstance(m, _FOLDABLE)}
        known = {f"{path}.{name}" if path else name for path, names in leaves.items() for name in names}
        has_images = any(isinstance(m, nn.Conv2d) for m in network.module.modules())
        draws = any(isinstance(m, KeyedDropout) for m in network.module.modules())
        names = {name for name, _ in (*network.module.named_parameters(), *network.module.named_buffers())}
        wanted = {slot.name for slot in network.layout.slots}
        if not has_images or draws or not wanted <= known or not names <= wanted | known or names - wanted:
            return None
        if any(isinstance(m, nn.Conv2d) and not _is_usual(m) for m in network.module.modules()):
            return None
        return cls(network, loss, low, streams)

    def gradients(self, params: Stack, buffers: Stack, batch: Batch, train: bool = True) -> Stack:
        """See `Kernel.gradients`."""
        x, y, mask, _, weights = batch
        leaves = [p.detach().requires_grad_() for p in params]
        with torch.enable_grad():
            outputs = self._forward([*leaves, *buffers], x, mask, train=train)
            losses = self._loss(outputs.flatten(0, 1), y.flatten(0, 1)).reshape(y.shape[:2])  # [c, B]
            losses = losses if weights is None else losses * weights
            means = losses.mean(1) if mask is None else (losses * mask).sum(1) / mask.sum(1)
            total = means.sum()
        found = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        return [_laid_out(grad, p) for grad, p in zip(found, params, strict=True)]

    def outputs(self, flat: Tensor, x: Tensor) -> Tensor:
        """See `Kernel.outputs`; differentiable with respect to x."""
        named = self._layout.unpack(flat)
        return self._forward([named[slot.name] for slot in self._layout.slots], x, None, train=False)

    def _forward(self, tensors: Stack, x: Tensor, mask: Tensor | None, *, train: bool) -> Tensor:
        if self._module.training != train:
            self._module.train(train)
        fold = self._fold
        fold.values = dict(zip((slot.name for slot in self._layout.slots), tensors, strict=True))
        fold.mask = mask
        whole = x.flatten(0, 1)  # [c * B, ...]
        if whole.is_cuda and whole.dim() == 4:
            whole = whole.contiguous(memory_format=torch.channels_last)
        try:
            with torch.autocast(x.device.type, enabled=False):  # the layers round to bfloat16 themselves
                outputs: Tensor = self._module(whole)
        finally:
            fold.values, fold.mask = {}, None
        outputs = outputs.float() if fold.low else outputs
        return outputs.reshape(*x.shape[:2], *outputs.shape[1:])


def _by_client(x: Tensor, clients: int) -> Tensor:
    """[c * B, ...] -> [c, B, ...]; B may be 0, for clients without held-out samples."""
    return x.reshape(clients, len(x) // clients, *x.shape[1:])


def _laid_out(grad: Tensor, like: Tensor) -> Tensor:
    """A gradient with the strides of its parameter: if one differs, the update of all is made tensor by tensor."""
    if grad.stride() == like.stride():
        return grad
    sides = zip(grad.shape, grad.stride(), like.stride(), strict=True)
    if all(one == other for size, one, other in sides if size > 1):  # the same memory
        return grad.as_strided(like.shape, like.stride())
    return torch.empty_like(like, dtype=grad.dtype).copy_(grad)


def _parameters(module: nn.Module) -> list[str]:
    return [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]


def _is_usual(layer: nn.Conv2d) -> bool:
    return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _folded(module: nn.Module, fold: _Fold) -> nn.Module:
    """Replace the layers that have weights; `module` is changed."""
    paths: dict[nn.Module, str] = {layer: path for path, layer in module.named_modules()}
    times = Counter(id(layer) for _, layer in module.named_modules(remove_duplicate=False))
    made: dict[nn.Module, nn.Module] = {}

    def fuse(row: nn.Sequential) -> None:
        """Let each norm compute the activation after it, if both are used once."""
        for place in range(len(row) - 1):
            norm, after = row[place], row[place + 1]
            if isinstance(norm, _Norm) and type(after) in _ACTIVATIONS and norm.used_once and times[id(after)] == 1:
                norm.act = _ACTIVATIONS[type(after)]
                row[place + 1] = nn.Identity()

    def replaced(layer: nn.Module) -> nn.Module:
        if layer not in made:
            made[layer] = layer
            kind = next((kind for base, kind in _FOLDABLE_AS.items() if isinstance(layer, base)), None)
            if kind is not None:
                new: _Layer = kind(layer, paths[layer], fold)
                new.used_once = times[id(layer)] == 1
                made[layer] = new
            else:
                for name, child in list(layer._modules.items()):
                    if child is not None:
                        setattr(layer, name, replaced(child))
                if type(layer) is nn.Sequential:
                    fuse(layer)
        return made[layer]

    return replaced(module)


class _Layer(nn.Module):
    """A layer with the weights of c clients."""

    used_once = True

    def __init__(self, original: Any, path: str, fold: _Fold) -> None:
        super().__init__()
        prefix = f"{path}." if path else ""
        self._names = {name: prefix + name for name in _parameters(original)}
        self._fold = [fold]  # in a list, so that copies share it

    def own(self, name: str) -> Tensor | None:
        """The weights [c, ...] with this name; None if the layer has none."""
        return self._fold[0].values[self._names[name]] if name in self._names else None


class _Linear(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        """[c * B, ..., I] -> [c * B, ..., O]."""
        weight, bias = self.own("weight"), self.own("bias")
        assert weight is not None
        rows = _by_client(x, len(weight)).flatten(1, -2).to(weight.dtype)
        found = torch.bmm(rows, weight.transpose(1, 2))
        found = found if bias is None else found + bias.unsqueeze(1)
        return found.reshape(*x.shape[:-1], weight.shape[1])


class _Norm(_Layer):
    """BatchNorm by the statistics of each client's batch, with the activation after it; see `MaskedBatchNorm`."""

    def __init__(self, original: MaskedBatchNorm, path: str, fold: _Fold) -> None:
        super().__init__(original, path, fold)
        self._momentum, self._eps, self.act = original.momentum, original.eps, 0

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [c * B, C, ...]."""
        weight, bias = self.own("weight"), self.own("bias")
        mean, var = self.own("running_mean"), self.own("running_var")
        assert mean is not None
        assert var is not None
        mask, fused = self._fold[0].mask, _fused()
        if fused is not None and x.is_cuda and x.dim() == 4 and mean.dtype == torch.float32:
            weight = torch.ones_like(mean) if weight is None else weight.contiguous()
            bias = torch.zeros_like(mean) if bias is None else bias.contiguous()
            if self.training:
                found = fused.norm_in_training(x, weight, bias, mean, var, mask, self._momentum, self._eps, self.act)
            else:
                found = fused.norm_in_use(x, weight, bias, mean, var, self._eps, self.act)
            whole: Tensor = found
            return whole
        wide = _by_client(x.to(mean.dtype), len(mean))  # [c, B, C, ...]
        if self.training:
            mean, var = self._statistics(wide, mean, var, mask)
        scale = torch.rsqrt(var + self._eps)
        scale = scale if weight is None else scale * weight
        shift = -mean * scale
        shift = shift if bias is None else shift + bias
        form = [len(mean), 1, -1] + [1] * (x.dim() - 2)
        y = (wide * scale.reshape(form) + shift.reshape(form)).reshape(x.shape).to(x.dtype)
        y = y.relu() if self.act else y
        return y.clamp_max(6) if self.act == _ACTIVATIONS[nn.ReLU6] else y

    def _statistics(self, x: Tensor, mean: Tensor, var: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and variance of each client's batch [c, B, C, ...]; the running ones move towards them."""
        axes, spatial = [1, *range(3, x.dim())], x.shape[3:].numel()
        weight = x.new_ones(x.shape[:2]) if mask is None else mask.to(x.dtype)
        count = weight.sum(1, keepdim=True) * spatial  # [c, 1]
        weight = weight.reshape(*weight.shape, *[1] * (x.dim() - 2))
        form = [len(x), 1, -1] + [1] * (x.dim() - 3)
        now = (x * weight).sum(axes) / count  # [c, C]
        spread = (((x - now.reshape(form)) * weight) ** 2).sum(axes) / count
        alone = count <= 1
        old_mean, old_var = mean.clone(), var.clone()
        with torch.no_grad():
            step = torch.full_like(count, self._momentum).masked_fill(alone, 0)
            mean += step * (now - mean)
            var += step * (spread * count / (count - 1).clamp_min(1) - var)
        return torch.where(alone, old_mean, now), torch.where(alone, old_var, spread)


class _GroupNorm(_Layer):
    def __init__(self, original: nn.GroupNorm, path: str, fold: _Fold) -> None:
        super().__init__(original, path, fold)
        self._groups, self._eps = original.num_groups, original.eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [c * B, C, ...]."""
        found = functional.group_norm(x, self._groups, None, None, self._eps)
        weight, bias = self.own("weight"), self.own("bias")
        if weight is None or bias is None:
            return found
        wide = _by_client(found, len(weight))
        form = [len(weight), 1, -1] + [1] * (x.dim() - 2)
        return (wide * weight.reshape(form) + bias.reshape(form)).reshape(x.shape).to(x.dtype)


class _Convolution(_Layer):
    def __init__(self, original: nn.Conv2d, path: str, fold: _Fold) -> None:
        super().__init__(original, path, fold)
        self._rest: Any = (list(original.stride), list(original.padding), list(original.dilation))
        self._groups = original.groups
        is_dense, is_square = original.groups == 1, len(set(original.kernel_size)) == 1
        is_plain = original.padding == (0, 0) and original.stride == (1, 1)
        self._is_product = is_dense and is_plain and original.kernel_size == (1, 1)
        alike = len(set(original.stride)) == len(set(original.padding)) == 1 and original.dilation == (1, 1)
        channels = original.in_channels == original.out_channels == original.groups
        self._is_depthwise = channels and is_square and alike and original.groups > 1

    def forward(self, x: Tensor) -> Tensor:
        """[c * B, I, H, W] -> [c * B, O, H', W']."""
        fold = self._fold[0]
        weight, bias = self.own("weight"), self.own("bias")
        assert weight is not None
        x = fold.lowered(x)
        if self._is_product:
            found = self._product(x, weight)
        elif self._is_depthwise and x.is_cuda and x.dtype != torch.float64 and _fused() is not None:
            found = _fused().depthwise(x, weight, self._rest[0][0], self._rest[1][0])
        else:
            found = _Apart.apply(x, weight, self._rest, self._groups, fold)  # type: ignore[no-untyped-call]
        if bias is None:
            return found
        shifted = _by_client(found, len(weight)) + bias.to(found.dtype)[:, None, :, None, None]
        return shifted.reshape(found.shape)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """A 1x1 convolution as one matrix product for each client."""
        rows = x.permute(0, 2, 3, 1)  # [c * B, H, W, I]
        flat = _by_client(rows, len(weight)).flatten(1, -2)
        found = torch.bmm(flat, self._fold[0].lowered(weight.flatten(2)).transpose(1, 2))
        return found.reshape(*rows.shape[:-1], weight.shape[1]).permute(0, 3, 1, 2)


class _Apart(torch.autograd.Function):
    """Convolutions client by client, on a GPU on streams of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rest: Any, groups: int, fold: _Fold) -> Tensor:
        own = fold.lowered(weight)
        ctx.save_for_backward(x, own)
        ctx.rest, ctx.groups, ctx.fold, ctx.dtype = rest, groups, fold, weight.dtype
        inputs = x.chunk(len(own))
        stride, padding, dilation = rest
        if not (x.is_cuda and torch.backends.cudnn.enabled and torch.backends.cudnn.is_acceptable(x)):
            each = [
                functional.conv2d(inputs[i], own[i], None, stride, padding, dilation, groups) for i in range(len(own))
            ]
            return torch.cat(each)
        sides = zip(x.shape[2:], own.shape[3:], stride, padding, dilation, strict=True)
        out = [(side + 2 * pad - d * (size - 1) - 1) // step + 1 for side, size, step, pad, d in sides]
        shape = (len(x), own.shape[1], *out)
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        outputs, flags = y.chunk(len(own)), torch.backends.cudnn

        def one(i: int) -> None:
            how = (padding, stride, dilation, groups, flags.benchmark, flags.deterministic, flags.allow_tf32)
            _aten.cudnn_convolution.out(inputs[i], own[i], *how, out=outputs[i])

        _side_by_side(fold, len(own), one)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, own = ctx.saved_tensors
        needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], False]
        dy = dy.contiguous(memory_format=torch.channels_last) if dy.is_cuda else dy
        deltas, inputs = dy.chunk(len(own)), x.chunk(len(own))
        dw = torch.empty_like(own, dtype=ctx.dtype) if needs[1] else None
        found: list[Any] = [None] * len(own)

        def one(i: int) -> None:
            found[i], grad, _ = _aten.convolution_backward(
                deltas[i], inputs[i], own[i], None, *ctx.rest, False, [0, 0], ctx.groups, needs
            )
            if dw is not None:
                dw[i].copy_(grad)

        _side_by_side(ctx.fold, len(own), one)
        return torch.cat(found) if needs[0] else None, dw, None, None, None


def _side_by_side(fold: _Fold, count: int, one: Any) -> None:
    """Call `one(i)` for each client, in parallel on the streams, if there are any.

    Every use of the streams begins by waiting for the work so far and ends by being waited for, so memory that is freed
    in between is not used too early.
    """
    streams = fold.streams[:count]
    if not streams:
        for i in range(count):
            one(i)
        return
    main = torch.cuda.current_stream()
    for stream in streams:
        stream.wait_stream(main)
    for i in range(count):
        with torch.cuda.stream(streams[i % len(streams)]):
            one(i)
    for stream in streams:
        main.wait_stream(stream)


_FOLDABLE_AS: dict[type[nn.Module], Any] = {
    nn.Linear: _Linear,
    nn.Conv2d: _Convolution,
    MaskedBatchNorm: _Norm,
    nn.GroupNorm: _GroupNorm,
}
_FOLDABLE = tuple(_FOLDABLE_AS)
