"""Hand-written stacked layers: gradients of c plain networks at once, fused with the update.

For a `Sequential` of Flatten, Linear, ReLU, Conv2d, MaxPool2d and AvgPool2d under cross-entropy. Dense layers of all
clients are one batched matrix product; a step of SGD adds `dY^T X` directly to the momentum (or the weights), so no
gradient is ever stored. Convolutions are one grouped convolution, or one call per client: on a CPU the libraries are
fastest at that, and on a GPU the calls of several clients run in parallel on streams. No autograd: nothing is traced,
and threads can run it in parallel.

`LayerKernel.of` returns None for any other network or loss; those use vmap or run one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.client.batches import Batch
from coterie.client.optimizers import Number, Optimizer, State
from coterie.client.settings import WorkSettings
from coterie.client.work import SGD, Stack
from coterie.engines.kernels.plain import PlainKernel
from coterie.nets.flat import Loss, Network, cross_entropy

_aten = torch.ops.aten
_SMALL = 64  # weights per filter up to which a first convolution is computed by patches on a GPU


@dataclass(frozen=True)
class Convolutions:
    """How convolutions are computed."""

    grouped: bool = False  # one grouped convolution for all clients; else one call per client
    low: bool = False  # in bfloat16
    streams: int = 0  # CUDA streams for the calls of different clients
    patches: bool = False  # a small first convolution as a matrix product over patches


class _Collect:
    """Collects the gradients of parameters."""

    def __init__(self, count: int) -> None:
        self.found: list[Tensor | None] = [None] * count

    def matrix(self, place: int, left: Tensor, right: Tensor) -> None:
        """The gradient of parameter `place` is left^T right: [c, B, O], [c, B, I] -> [c, O, I]."""
        self.found[place] = torch.bmm(left.transpose(1, 2), right)

    def tensor(self, place: int, gradient: Tensor) -> None:
        """The gradient of parameter `place`, [c, ...]."""
        self.found[place] = gradient


class _Step:
    """Makes the SGD step of each parameter in place as soon as its gradient is known."""

    def __init__(self, params: Stack, velocity: Stack | None, work: WorkSettings, lr: Number) -> None:
        self._params, self._velocity, self._work, self._lr = params, velocity, work, lr

    def matrix(self, place: int, left: Tensor, right: Tensor) -> None:
        work, weight = self._work, self._params[place]
        if self._velocity is None and not isinstance(self._lr, Tensor):
            keep = 1 - self._lr * work.weight_decay
            weight.baddbmm_(left.transpose(1, 2), right, beta=keep, alpha=-self._lr)
        elif self._velocity is None:
            if work.weight_decay:
                weight.mul_(1 - self._lr * work.weight_decay)
            weight.baddbmm_((left * -self._lr).transpose(1, 2), right)
        else:
            speed = self._velocity[place]
            speed.baddbmm_(left.transpose(1, 2), right, beta=work.momentum)
            if work.weight_decay:
                speed.add_(weight, alpha=work.weight_decay)
            self._move(weight, speed)

    def tensor(self, place: int, gradient: Tensor) -> None:
        weight = self._params[place]
        if self._work.weight_decay:
            gradient = gradient.add(weight, alpha=self._work.weight_decay)
        if self._velocity is not None:
            gradient = self._velocity[place].mul_(self._work.momentum).add_(gradient)
        self._move(weight, gradient)

    def _move(self, weight: Tensor, direction: Tensor) -> None:
        if isinstance(self._lr, Tensor):
            weight.addcmul_(direction, self._lr, value=-1)
        else:
            weight.add_(direction, alpha=-self._lr)


_Sink = _Collect | _Step  # takes the gradients of the backward pass


class LayerKernel:
    """Gradients, outputs and whole steps of a plain stack of layers."""

    def __init__(
        self, network: Network, loss: Loss, layers: list[nn.Module], places: list[list[int]], how: Convolutions
    ) -> None:
        self._layout = network.layout
        self._layers, self._places = layers, places
        self._grouped, self._low = how.grouped, how.low
        self._lanes = _Lanes(network.device, how.streams)
        self._one = PlainKernel(network, loss)
        self._first = next(i for i, own in enumerate(places) if own)  # no gradient is needed below it
        first = layers[self._first]
        small = isinstance(first, nn.Conv2d) and first.weight[0].numel() <= _SMALL
        self._by_patches = small and how.patches
        self.has_images = any(isinstance(layer, nn.Conv2d) for layer in layers)

    @classmethod
    def of(cls, network: Network, loss: Loss, how: Convolutions | None = None) -> LayerKernel | None:
        """The kernel of a network; None if a layer, the loss or a shape is not supported."""
        found = plain_network(network, loss)
        if found is None:
            return None
        return cls(network, loss, *found, how or Convolutions(grouped=network.device.type == "cuda"))

    def gradients(self, params: Stack, buffers: Stack, batch: Batch, train: bool = True) -> Stack:
        """See `Kernel.gradients`; these layers are the same in both modes."""
        sink = _Collect(len(params))
        self._run(params, batch, sink)
        return [found for found in sink.found if found is not None]

    def can_step(self, work: SGD) -> bool:
        """See `SteppingKernel.can_step`: SGD with momentum."""
        return type(work) is SGD and work.is_plain

    def step(
        self, params: Stack, buffers: Stack, batch: Batch, optimizer: Optimizer, state: State, lr: Number, count: Number
    ) -> None:
        """See `SteppingKernel.step`."""
        self._run(params, batch, _Step(params, state.get("velocity"), optimizer.work, lr))

    def outputs(self, flat: Tensor, x: Tensor) -> Tensor:
        """See `Kernel.outputs`."""
        if len(flat) == 1:
            return self._one.outputs(flat, x)
        named = self._layout.unpack(flat)
        return self._forward([named[slot.name] for slot in self._layout.parameters], x, None)

    # ---- forward and backward ----

    def _run(self, params: Stack, batch: Batch, sink: _Sink) -> None:
        x, y, mask, _, weights = batch
        with torch.autocast(x.device.type, enabled=False):  # this kernel rounds to bfloat16 itself
            tape: list[Any] = []  # what the backward pass of each layer needs
            delta = self._forward(params, x, tape).softmax(2)  # [c, B, L]
            minus = delta.new_full((1, 1, 1), -1.0).expand(*y.shape, 1)
            delta.scatter_add_(2, y.unsqueeze(2), minus)
            if mask is None:
                delta.div_(x.shape[1])
            else:
                delta.mul_((mask / mask.sum(1, keepdim=True).clamp_min(1)).unsqueeze(2))
            if weights is not None:
                delta.mul_(weights.unsqueeze(2))
            self._backward(params, delta, tape, sink)
            self._lanes.finish()

    def _forward(self, params: Stack, x: Tensor, tape: list[Any] | None) -> Tensor:
        h: Any = x
        for number, (layer, places) in enumerate(zip(self._layers, self._places, strict=True)):
            own = [params[place] for place in places]
            if number == self._first and self._by_patches:
                assert isinstance(layer, nn.Conv2d)
                h, kept = self._patched(layer, own, h)
            else:
                h, kept = self._layer_forward(layer, own, h, tape is not None)
            if tape is not None:
                tape.append(kept)
        found: Tensor = h
        return found

    def _backward(self, params: Stack, delta: Any, tape: list[Any], sink: _Sink) -> None:
        for number in range(len(self._layers) - 1, self._first - 1, -1):
            layer, places, kept = self._layers[number], self._places[number], tape.pop()
            own = [params[place] for place in places]
            if number == self._first and self._by_patches:
                self._patched_back(places, kept, delta, sink, own)
                break
            delta = self._layer_backward(layer, own, places, kept, delta, sink, number > self._first)

    def _layer_forward(self, layer: nn.Module, own: list[Tensor], h: Any, keep: bool) -> tuple[Any, Any]:
        """The output of a layer, and what its backward pass needs; images are a list, grouped, or planes."""
        if isinstance(layer, nn.Linear):
            h = h if isinstance(h, Tensor) and h.dim() == 3 else self._flat(h, len(own[0]))
            if len(own) == 2:
                return torch.baddbmm(own[1].unsqueeze(1), h, own[0].transpose(1, 2)), h
            return torch.bmm(h, own[0].transpose(1, 2)), h
        if isinstance(layer, nn.Conv2d):
            were_planes, h = isinstance(h, _Planes), self._images(h)
            return self._convolved(layer, own, h), (h, were_planes)
        if isinstance(layer, nn.ReLU):
            out = self._elementwise(torch.relu, h)
            return out, out.tensor if isinstance(out, _Planes) else out
        if isinstance(layer, nn.MaxPool2d | nn.AvgPool2d):
            h = h if isinstance(h, _Planes) else self._images(h)
            assert isinstance(layer.kernel_size, int)
            pool = _Pool(layer.kernel_size, isinstance(layer, nn.AvgPool2d), self._lanes)
            return pool.forward(h, keep), pool
        if isinstance(h, _Planes):  # from here on: nn.Flatten
            form = ("planes", (h.tensor.shape, h.tensor.dtype, h.clients))
            return (h.flat().float() if self._low else h.flat()), form
        kept = ("images", h[0].shape) if isinstance(h, list) else ("grouped" if self._is_grouped(h) else "", h.shape)
        return self._flat(h, None), kept

    def _layer_backward(
        self, layer: nn.Module, own: list[Tensor], places: list[int], kept: Any, delta: Any, sink: _Sink, below: bool
    ) -> Any:
        """Pass gradients of parameters to `sink`; return the gradient of the input if `below`."""
        if isinstance(layer, nn.Linear):
            found = torch.bmm(delta, own[0]) if below else None
            if len(own) == 2:
                sink.tensor(places[1], delta.sum(1))
            sink.matrix(places[0], delta, kept)
            return found
        if isinstance(layer, nn.Conv2d):
            h, were_planes = kept
            images = self._convolved_back(layer, own, places, h, self._images(delta), sink, below)
            return self._as_planes(images, len(own[0])) if were_planes else images
        if isinstance(layer, nn.ReLU):
            return self._elementwise(lambda d, out: _aten.threshold_backward(d, out, 0), delta, kept)
        if isinstance(layer, nn.MaxPool2d | nn.AvgPool2d):
            return kept.backward(delta)
        form, shape = kept
        if form == "planes":
            size, dtype, clients = shape
            return _Planes.of_flat(delta.to(dtype), size, clients)
        if form == "images":
            self._lanes.fork()
            parts = delta.to(torch.bfloat16) if self._low else delta
            self._lanes.hold(parts)
            return [part.reshape(shape) for part in parts]
        if form == "grouped":
            whole = delta.transpose(0, 1).reshape(shape)
            return whole.to(torch.bfloat16) if self._low else whole
        return delta.reshape(shape)

    # ---- images ----

    def _elementwise(self, function: Callable[..., Tensor], h: Any, *others: Any) -> Any:
        if isinstance(h, _Planes):
            return _Planes(function(h.tensor, *others), h.clients)
        return self._lanes.each(function, h, *others) if isinstance(h, list) else function(h, *others)

    def _is_grouped(self, h: Tensor) -> bool:
        return self._grouped and h.dim() == 4

    def _images(self, h: Any) -> Any:
        """Inputs [c, B, C, H, W] in the form that the convolutions take."""
        if isinstance(h, _Planes):
            self._clients = h.clients
            if self._grouped:
                return h.tensor.transpose(0, 1)
            self._lanes.hold(h.tensor)
            self._lanes.fork()
            return [part.transpose(0, 1) for part in h.tensor.chunk(h.clients)]
        if isinstance(h, list) or h.dim() == 4:
            return h
        h = h.to(torch.bfloat16) if self._low else h
        if self._grouped:
            return h.transpose(0, 1).flatten(1, 2)  # [B, c * C, H, W]
        self._lanes.hold(h)
        self._lanes.fork()
        return list(h)

    def _flat(self, h: Any, count: int | None) -> Tensor:
        """[c, B, features]."""
        if isinstance(h, list):
            self._lanes.join()
            stacked = torch.stack([part.flatten(1) for part in h])
            return stacked.float() if self._low else stacked
        flat: Tensor = h.float() if self._low else h
        if self._is_grouped(flat):
            count = self._clients if count is None else count
            return flat.reshape(len(flat), count, -1).transpose(0, 1)
        return flat.flatten(2)

    _clients: int = 0  # of the current grouped images

    def _convolved(self, layer: nn.Conv2d, own: list[Tensor], h: Any) -> Any:
        rest: tuple[Any, Any] = (layer.stride, layer.padding)
        own = [tensor.to(torch.bfloat16) for tensor in own] if self._low else own
        if not self._grouped:
            self._lanes.hold(*own)
            self._lanes.fork()
            biases: Any = list(own[1]) if len(own) == 2 else [None] * len(own[0])
            return self._lanes.each(lambda x, w, b: functional.conv2d(x, w, b, *rest), h, list(own[0]), biases)
        self._clients = len(own[0])
        bias = own[1].flatten() if len(own) == 2 else None
        return functional.conv2d(h, own[0].flatten(0, 1), bias, *rest, groups=self._clients)

    def _convolved_back(
        self, layer: nn.Conv2d, own: list[Tensor], places: list[int], h: Any, delta: Any, sink: _Sink, below: bool
    ) -> Any:
        has_bias = len(own) == 2
        rest = (list(layer.stride), list(layer.padding), [1, 1], False, [0, 0])
        whole = own[0].to(torch.bfloat16) if self._low else own[0]
        found: Any
        if self._grouped:
            weight = whole.flatten(0, 1)
            found, grad, bias = _aten.convolution_backward(
                delta, h, weight, [len(weight)] if has_bias else None, *rest, len(own[0]), [below, True, has_bias]
            )
            grads = [grad.reshape(own[0].shape), bias.reshape(own[1].shape) if has_bias else None]
        else:

            def back(d: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
                # The libraries' own sum over the bias is slow: two sums, each over contiguous values.
                bias = d.sum((2, 3)).sum(0) if has_bias else None
                return *_aten.convolution_backward(d, x, w, None, *rest, 1, [below, True, False])[:2], bias

            self._lanes.hold(whole)
            self._lanes.fork()
            inputs, weights, biases = zip(*self._lanes.each(back, delta, h, list(whole)), strict=True)
            found = list(inputs) if below else None
            self._lanes.join()
            grads = [torch.stack(weights), torch.stack(biases) if has_bias else None]
        for place, gradient in zip(places, grads[: len(own)], strict=True):
            sink.tensor(place, gradient.to(own[0].dtype))
        return found

    # ---- the first convolution, by patches ----

    def _patched(self, layer: nn.Conv2d, own: list[Tensor], x: Tensor) -> tuple[_Planes, Any]:
        """Patches of the inputs [c, I k k, B H W], and one matrix product per client.

        With one input channel per client, libraries have only slow kernels for a grouped convolution.
        """
        clients, batch = x.shape[:2]
        (high, wide), (down, right) = layer.kernel_size, layer.stride
        pad: Any = layer.padding
        x = x.to(torch.bfloat16) if self._low else x
        x = functional.pad(x, (pad[1], pad[1], pad[0], pad[0])) if any(pad) else x
        patches = x.unfold(3, high, down).unfold(4, wide, right)  # [c, B, I, H, W, h, w]
        rows, columns = patches.shape[3:5]
        parts = patches.permute(0, 2, 5, 6, 1, 3, 4)  # [c, I, h, w, B, H, W]
        depth = own[0][0, 0].numel()
        weight = own[0].flatten(2).to(x.dtype)
        rest = -depth % 8 if self._low else 0  # rows of padding, for tensor cores
        if rest:
            flat = x.new_zeros(clients, depth + rest, batch * rows * columns)
            flat[:, :depth].reshape(parts.shape).copy_(parts)
            flat[:, depth] = 1
            weight = functional.pad(weight, (0, rest))
            if len(own) == 2:
                weight[:, :, depth] = own[1]
        else:
            flat = parts.reshape(clients, depth, -1)
        out = torch.bmm(weight, flat)
        if len(own) == 2 and not rest:
            out += own[1].unsqueeze(2).to(flat.dtype)
        return _Planes(out.reshape(-1, batch, rows, columns), clients), flat

    def _patched_back(self, places: list[int], flat: Tensor, delta: Any, sink: _Sink, own: list[Tensor]) -> None:
        rows = delta.tensor.reshape(delta.clients, own[0].shape[1], -1)  # [c, O, B H W]
        found, depth = torch.bmm(rows, flat.transpose(1, 2)).to(own[0].dtype), own[0][0, 0].numel()
        sink.tensor(places[0], found[:, :, :depth].reshape(own[0].shape))
        if len(own) == 2 and flat.shape[1] > depth:
            sink.tensor(places[1], found[:, :, depth])
        elif len(own) == 2:
            sink.tensor(places[1], rows.sum(2, dtype=own[1].dtype))

    def _as_planes(self, below: Any, clients: int) -> _Planes:
        """Gradients of images as planes."""
        if isinstance(below, list):
            self._lanes.join()
            return _Planes(torch.cat([part.transpose(0, 1) for part in below]), clients)
        return _Planes(below.transpose(0, 1).contiguous(), clients)


class _Planes:
    """Images channel by channel: [c * C, B, H, W]."""

    def __init__(self, tensor: Tensor, clients: int) -> None:
        self.tensor, self.clients = tensor, clients

    def flat(self) -> Tensor:
        """[c, B, C H W]."""
        parts: Tensor = self.tensor.reshape(self.clients, -1, *self.tensor.shape[1:])  # [c, C, B, H, W]
        return parts.transpose(1, 2).flatten(2)

    @classmethod
    def of_flat(cls, flat: Tensor, shape: torch.Size, clients: int) -> _Planes:
        """The inverse of `flat`, for planes of this shape."""
        parts = flat.reshape(clients, shape[1], shape[0] // clients, *shape[2:])
        return cls(parts.transpose(1, 2).reshape(shape), clients)


class _Lanes:
    """Streams on which the calls of different clients run in parallel; without streams, one after the other.

    A client stays on its stream. Tensors that cross streams are held until the end of the step, since the stream that
    allocated them may reuse their memory once they are freed.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._streams = [torch.cuda.Stream(device=device) for _ in range(count)]
        self._held: list[Any] = []

    def each(self, function: Callable[..., Any], *parts: Sequence[Any]) -> list[Any]:
        if not self._streams:
            return [function(*own) for own in zip(*parts, strict=True)]
        found = []
        for place, own in enumerate(zip(*parts, strict=True)):
            with torch.cuda.stream(self._streams[place % len(self._streams)]):
                found.append(function(*own))
        self._held.append(found)
        return found

    def hold(self, *tensors: Any) -> None:
        if self._streams:
            self._held.extend(tensors)

    def fork(self) -> None:
        """Let the streams wait for the work so far."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        """Wait for the streams."""
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)

    def finish(self) -> None:
        """End the step: wait, and release what was held."""
        self.join()
        self._held.clear()


class _Pool:
    """Pooling without overlap, by the mean or the maximum. Of equal values the first gets the gradient, as in torch."""

    def __init__(self, size: int, is_mean: bool, lanes: _Lanes) -> None:
        self._size, self._is_mean, self._lanes = size, is_mean, lanes
        self._kept: Any = None

    def forward(self, h: Any, keep: bool) -> Any:
        if isinstance(h, _Planes):
            return _Planes(self.forward(h.tensor, keep), h.clients)
        if not isinstance(h, list):
            out, self._kept = self._pooled(h, keep)
            return out
        found = self._lanes.each(lambda part: self._pooled(part, keep), h)
        self._kept = [kept for _, kept in found]
        return [out for out, _ in found]

    def backward(self, delta: Any) -> Any:
        if isinstance(delta, _Planes):
            return _Planes(self.backward(delta.tensor), delta.clients)
        if not isinstance(delta, list):
            return self._unpooled(delta, self._kept)
        return self._lanes.each(self._unpooled, delta, self._kept)

    def _pooled(self, x: Tensor, keep: bool) -> tuple[Tensor, Any]:
        if self._is_mean:
            return functional.avg_pool2d(x, self._size), x
        if self._size == 2 and not x.is_cuda:
            return _halved(x, keep)  # on a CPU torch's own kernel is several times slower
        out, index = functional.max_pool2d(x, self._size, return_indices=True)
        return out, (x, index)

    def _unpooled(self, delta: Tensor, kept: Any) -> Tensor:
        if self._is_mean:
            squares = [self._size, self._size]
            spread: Tensor = _aten.avg_pool2d_backward(delta, kept, squares, squares, [0, 0], False, True, None)
            return spread
        if self._size == 2 and not delta.is_cuda:
            return _doubled(delta, *kept)
        x, index = kept
        size = [self._size, self._size]
        if delta.is_cuda:  # pools do not overlap: unpooling is enough
            return functional.max_unpool2d(delta, index, size, output_size=list(x.shape[-2:]))
        found: Tensor = _aten.max_pool2d_with_indices_backward(delta, x, size, size, [0, 0], [1, 1], False, index)
        return found


def _halved(x: Tensor, keep: bool) -> tuple[Tensor, Any]:
    """The maxima of 2x2 squares, and their places."""
    height, width = x.shape[-2] // 2 * 2, x.shape[-1] // 2 * 2
    left, right = x[..., :height, 0:width:2], x[..., :height, 1:width:2]
    rows = torch.maximum(left, right)  # [..., H, W / 2]
    top, bottom = rows[..., 0::2, :], rows[..., 1::2, :]
    if not keep:
        return torch.maximum(top, bottom), None
    return torch.maximum(top, bottom), (left >= right, top >= bottom, x.shape)


def _doubled(delta: Tensor, is_left: Tensor, is_top: Tensor, shape: torch.Size) -> Tensor:
    """The gradient of `_halved`."""
    height, width = shape[-2] // 2 * 2, shape[-1] // 2 * 2
    rows = delta.new_empty(is_left.shape)
    torch.mul(delta, is_top, out=rows[..., 0::2, :])
    torch.sub(delta, rows[..., 0::2, :], out=rows[..., 1::2, :])
    back = delta.new_empty(shape) if (height, width) == tuple(shape[-2:]) else delta.new_zeros(shape)
    left = back[..., :height, 0:width:2]
    torch.mul(rows, is_left, out=left)
    torch.sub(rows, left, out=back[..., :height, 1:width:2])
    return back


def plain_network(network: Network, loss: Loss) -> tuple[list[nn.Module], list[list[int]]] | None:
    """The layers of a plain network in order, and the places of each one's parameters in the layout.

    None if hand-written code does not support a layer or the loss, or if there are buffers or shared parameters.
    """
    layers = _leaves(network.module)
    if not all(_is_plain(layer) for layer in layers) or loss is not cross_entropy or network.layout.buffers:
        return None
    for place in range(len(layers) - 1):
        if isinstance(layers[place], nn.ReLU) and isinstance(layers[place + 1], nn.MaxPool2d):
            layers[place : place + 2] = layers[place + 1], layers[place]  # the same result, with fewer values
    own = [list(layer.parameters()) for layer in layers]  # weight, then bias
    used = [id(p) for parameters in own for p in parameters]
    names = {id(p): name for name, p in network.module.named_parameters()}
    places = {slot.name: place for place, slot in enumerate(network.layout.parameters)}
    if not used or len(set(used)) != len(used) or len(used) != len(places):
        return None
    return layers, [[places[names[id(p)]] for p in parameters] for parameters in own]


def _leaves(module: nn.Module) -> list[nn.Module]:
    """The layers of nested Sequentials in order."""
    return [leaf for child in module for leaf in _leaves(child)] if type(module) is nn.Sequential else [module]


def _is_plain(layer: nn.Module) -> bool:
    if type(layer) is nn.Flatten:
        return bool(layer.start_dim == 1 and layer.end_dim == -1)
    if type(layer) is nn.Conv2d:
        plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
        return plain and not isinstance(layer.padding, str)
    if type(layer) is nn.AvgPool2d:
        return _is_tiled(layer) and layer.divisor_override is None
    if type(layer) is nn.MaxPool2d:
        return _is_tiled(layer) and layer.dilation == 1 and not layer.return_indices
    return type(layer) in (nn.Linear, nn.ReLU)


def _is_tiled(pool: nn.MaxPool2d | nn.AvgPool2d) -> bool:
    """Square pools side by side, without overlap, border or a cut-off last row."""
    tiled = isinstance(pool.kernel_size, int) and pool.stride == pool.kernel_size
    return tiled and not pool.padding and not pool.ceil_mode
