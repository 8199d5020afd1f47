"""Hand-written stacked layers: gradients of c plain networks at once, with the update folded in.

For a `Sequential` of Flatten, Linear, ReLU, Conv2d and MaxPool2d under cross-entropy. Dense layers of all clients are
one batched matrix product; a step of SGD adds `dY^T X` straight into the momentum (or the weights), so that no gradient
is ever written. Convolutions are one grouped convolution, or one call a client: on a CPU that is what the libraries are
fast at, and on a GPU calls of several clients run beside each other on streams. No autograd: nothing is traced, and
threads can run it side by side.

`LayerKernel.of` says None for any other network or loss; those are stacked by vmap or run one at a time.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.client.optimizers import Optimizer, State
from coterie.client.work import SGD, Stack
from coterie.engines.kernels.plain import PlainKernel
from coterie.nets.flat import Loss, Network, cross_entropy

_aten = torch.ops.aten
_SMALL = 64  # weights of one filter of a first convolution that is done by patches on a GPU


@dataclass
class _Tape:
    """What the way forward leaves for the way back."""

    kept: list[Any] = field(default_factory=list)


class _Sink(abc.ABC):
    """Takes gradients of parameters as they come: collects them, or steps at once."""

    @abc.abstractmethod
    def matrix(self, place: int, left: Tensor, right: Tensor) -> None:
        """The gradient of parameter `place` is left^T right: [c, B, O], [c, B, I] -> [c, O, I]."""

    @abc.abstractmethod
    def tensor(self, place: int, gradient: Tensor) -> None:
        """The gradient of parameter `place`, [c, ...]."""


class _Collect(_Sink):
    def __init__(self, count: int) -> None:
        self.found: list[Tensor | None] = [None] * count

    def matrix(self, place: int, left: Tensor, right: Tensor) -> None:
        self.found[place] = torch.bmm(left.transpose(1, 2), right)

    def tensor(self, place: int, gradient: Tensor) -> None:
        self.found[place] = gradient


class _Step(_Sink):
    """One step of SGD, in place, as each gradient comes."""

    def __init__(self, params: Stack, velocity: Stack | None, work: SGD, lr: float | Tensor) -> None:
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


class LayerKernel:
    """Gradients, outputs and whole steps of a plain stack of layers."""

    def __init__(
        self,
        network: Network,
        loss: Loss,
        layers: Sequence[nn.Module],
        places: Sequence[list[int]],
        grouped: bool,
        low: bool,
        streams: int,
        patches: bool,
    ) -> None:
        self._layout = network.layout
        self._layers = list(layers)
        self._grouped = grouped
        self._low = low  # convolutions in bfloat16
        self._lanes = _Lanes(network.device, streams)
        self._one = PlainKernel(network, loss)
        self._places = list(places)
        self._first = next(i for i, own in enumerate(self._places) if own)  # below it no gradient is needed
        first = self._layers[self._first]
        small = isinstance(first, nn.Conv2d) and first.weight[0].numel() <= _SMALL
        self._by_patches = small and patches

    @property
    def has_pictures(self) -> bool:
        """Whether there is a convolution."""
        return any(isinstance(layer, nn.Conv2d) for layer in self._layers)

    @classmethod
    def of(
        cls,
        network: Network,
        loss: Loss,
        grouped: bool | None = None,
        low: bool = False,
        streams: int = 0,
        patches: bool = False,
    ) -> LayerKernel | None:
        """The kernel of a network; None if it has a layer, a loss or a shape that is not written here."""
        found = plain_network(network, loss)
        if found is None:
            return None
        grouped = network.device.type == "cuda" if grouped is None else grouped
        return cls(network, loss, *found, grouped, low, streams, patches)

    # ---- what an engine asks for ----

    def gradients(
        self, params: Stack, buffers: Stack, x: Tensor, y: Tensor, mask: Tensor | None, keys: Tensor
    ) -> Stack:
        """See `Kernel.gradients`."""
        sink = _Collect(len(params))
        self._run(params, x, y, mask, sink)
        return [found for found in sink.found if found is not None]

    def can_step(self, work: SGD) -> bool:
        """See `SteppingKernel.can_step`: SGD with momentum."""
        return type(work) is SGD and work.is_plain

    def step(
        self,
        params: Stack,
        buffers: Stack,
        state: State,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        keys: Tensor,
        optimizer: Optimizer,
        lr: float | Tensor,
        count: float | Tensor,
    ) -> None:
        """See `SteppingKernel.step`."""
        self._run(params, x, y, mask, _Step(params, state.get("velocity"), optimizer.work, lr))

    def outputs(self, flat: Tensor, x: Tensor) -> Tensor:
        """See `Kernel.outputs`."""
        if len(flat) == 1:
            return self._one.outputs(flat, x)
        named = self._layout.unpack(flat)
        return self._forward([named[slot.name] for slot in self._layout.parameters], x, None)

    # ---- forward and back ----

    def _run(self, params: Stack, x: Tensor, y: Tensor, mask: Tensor | None, sink: _Sink) -> None:
        with torch.autocast(x.device.type, enabled=False):  # what is to be rounded is rounded here
            self._step_of(params, x, y, mask, sink)

    def _step_of(self, params: Stack, x: Tensor, y: Tensor, mask: Tensor | None, sink: _Sink) -> None:
        tape = _Tape()
        outputs = self._forward(params, x, tape)  # [c, B, L]
        delta = outputs.softmax(2)
        minus = delta.new_full((1, 1, 1), -1.0).expand(*y.shape, 1)
        delta.scatter_add_(2, y.unsqueeze(2), minus)
        if mask is None:
            delta.div_(x.shape[1])
        else:
            delta.mul_((mask / mask.sum(1, keepdim=True).clamp_min(1)).unsqueeze(2))
        self._backward(params, delta, tape, sink)
        self._lanes.finish()

    def _forward(self, params: Stack, x: Tensor, tape: _Tape | None) -> Tensor:
        h: Any = x
        for number, (layer, own) in enumerate(zip(self._layers, self._places, strict=True)):
            if number == self._first and self._by_patches:
                assert isinstance(layer, nn.Conv2d)
                h, kept = self._patched(layer, [params[place] for place in own], h)
            else:
                h, kept = self._ahead(layer, [params[place] for place in own], h, tape is not None)
            if tape is not None:
                tape.kept.append(kept)
        found: Tensor = h
        return found

    def _backward(self, params: Stack, delta: Any, tape: _Tape, sink: _Sink) -> None:
        for place in range(len(self._layers) - 1, self._first - 1, -1):
            layer, own, kept = self._layers[place], self._places[place], tape.kept[place]
            if place == self._first and self._by_patches:
                self._patched_back(own, kept, delta, sink, [params[p] for p in own])
                break
            delta = self._back(layer, [params[p] for p in own], own, kept, delta, sink, place > self._first)
            tape.kept[place] = None  # lets go of what is not needed any more

    def _ahead(self, layer: nn.Module, own: list[Tensor], h: Any, keep: bool) -> tuple[Any, Any]:
        """The output of a layer, and what its way back needs. Pictures are a list of [B, C, H, W], or grouped."""
        if isinstance(layer, nn.Linear):
            h = h if isinstance(h, Tensor) and h.dim() == 3 else self._flat(h, len(own[0]))
            if len(own) == 2:
                return torch.baddbmm(own[1].unsqueeze(1), h, own[0].transpose(1, 2)), h
            return torch.bmm(h, own[0].transpose(1, 2)), h
        if isinstance(layer, nn.Conv2d):
            were_planes, h = isinstance(h, _Planes), self._pictures(h)
            return self._convolved(layer, own, h), (h, were_planes)
        if isinstance(layer, nn.ReLU) and isinstance(h, _Planes):
            h = _Planes(h.tensor.relu(), h.clients)
            return h, h.tensor
        if isinstance(layer, nn.ReLU):
            out = self._lanes.each(lambda part: part.relu(), h) if isinstance(h, list) else h.relu()
            return out, out
        if isinstance(layer, nn.MaxPool2d):
            h = h if isinstance(h, _Planes) else self._pictures(h)
            assert isinstance(layer.kernel_size, int)
            pool = _Pool(layer.kernel_size, self._lanes)
            return pool.ahead(h, keep), pool
        if isinstance(h, _Planes):
            return (h.flat().float() if self._low else h.flat()), (
                "planes",
                (h.tensor.shape, h.tensor.dtype, h.clients),
            )
        kept = ("pictures", h[0].shape) if isinstance(h, list) else ("grouped" if self._is_grouped(h) else "", h.shape)
        return self._flat(h, None), kept

    def _back(
        self,
        layer: nn.Module,
        own: list[Tensor],
        places: list[int],
        kept: Any,
        delta: Any,
        sink: _Sink,
        go_on: bool,
    ) -> Any:
        if isinstance(layer, nn.Linear):
            below = torch.bmm(delta, own[0]) if go_on else None
            if len(own) == 2:
                sink.tensor(places[1], delta.sum(1))
            sink.matrix(places[0], delta, kept)
            return below
        if isinstance(layer, nn.Conv2d):
            h, were_planes = kept
            below = self._convolved_back(layer, own, places, h, self._pictures(delta), sink, go_on)
            return self._as_planes(below, len(own[0])) if were_planes else below
        if isinstance(layer, nn.ReLU):
            if isinstance(delta, _Planes):
                return _Planes(_aten.threshold_backward(delta.tensor, kept, 0), delta.clients)
            if isinstance(delta, list):
                return self._lanes.each(lambda d, out: _aten.threshold_backward(d, out, 0), delta, kept)
            return _aten.threshold_backward(delta, kept, 0)
        if isinstance(layer, nn.MaxPool2d):
            return kept.back(delta)
        way, shape = kept
        if way == "planes":
            size, dtype, clients = shape
            return _Planes.of_flat(delta.to(dtype), size, clients)
        if way == "pictures":
            self._lanes.fork()
            parts = delta.to(torch.bfloat16) if self._low else delta
            self._lanes.hold(parts)
            return [part.reshape(shape) for part in parts]
        if way == "grouped":
            whole = delta.transpose(0, 1).reshape(shape)
            return whole.to(torch.bfloat16) if self._low else whole
        return delta.reshape(shape)

    # ---- pictures ----

    def _is_grouped(self, h: Tensor) -> bool:
        return self._grouped and h.dim() == 4

    def _pictures(self, h: Any) -> Any:
        """Inputs [c, B, C, H, W] as the convolutions take them."""
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

    _clients: int = 0  # of the grouped pictures in hand

    def _convolved(self, layer: nn.Conv2d, own: list[Tensor], h: Any) -> Any:
        way: tuple[Any, Any] = (layer.stride, layer.padding)
        own = [tensor.to(torch.bfloat16) for tensor in own] if self._low else own
        if not self._grouped:
            self._lanes.hold(*own)
            self._lanes.fork()
            biases: Any = list(own[1]) if len(own) == 2 else [None] * len(own[0])
            return self._lanes.each(lambda x, w, b: functional.conv2d(x, w, b, *way), h, list(own[0]), biases)
        self._clients = len(own[0])
        bias = own[1].flatten() if len(own) == 2 else None
        return functional.conv2d(h, own[0].flatten(0, 1), bias, *way, groups=self._clients)

    def _convolved_back(
        self, layer: nn.Conv2d, own: list[Tensor], places: list[int], h: Any, delta: Any, sink: _Sink, go_on: bool
    ) -> Any:
        has_bias = len(own) == 2
        rest = (list(layer.stride), list(layer.padding), [1, 1], False, [0, 0])
        asked = [go_on, True, has_bias]
        whole = own[0].to(torch.bfloat16) if self._low else own[0]
        if self._grouped:
            weight = whole.flatten(0, 1)
            below, grad, bias = _aten.convolution_backward(
                delta, h, weight, [len(weight)] if has_bias else None, *rest, len(own[0]), asked
            )
            grads = [grad.reshape(own[0].shape), bias.reshape(own[1].shape) if has_bias else None]
        else:

            def back(d: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
                # The libraries' own sum over the bias is slow: two sums, each along what lies together.
                bias = d.sum((2, 3)).sum(0) if has_bias else None
                return *_aten.convolution_backward(d, x, w, None, *rest, 1, [go_on, True, False])[:2], bias

            self._lanes.hold(whole)
            self._lanes.fork()
            found = self._lanes.each(back, delta, h, list(whole))
            below = [part[0] for part in found] if go_on else None
            self._lanes.join()
            grads = [torch.stack([part[1] for part in found])]
            grads.append(torch.stack([part[2] for part in found]) if has_bias else None)
        for place, gradient in zip(places, grads[: len(own)], strict=True):
            sink.tensor(place, gradient.to(own[0].dtype))
        return below

    # ---- the first convolution, by patches ----

    def _patched(self, layer: nn.Conv2d, own: list[Tensor], x: Tensor) -> tuple[_Planes, Any]:
        """Patches of the inputs [c, I k k, B H W], and one matrix product a client.

        With one input channel a client, libraries have only slow kernels for a grouped convolution.
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
        rest = -depth % 8 if self._low else 0  # rows of zeros, for tensor cores
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
        """Gradients of pictures as those of planes."""
        if isinstance(below, list):
            self._lanes.join()
            return _Planes(torch.cat([part.transpose(0, 1) for part in below]), clients)
        return _Planes(below.transpose(0, 1).contiguous(), clients)


class _Planes:
    """Pictures channel by channel: [c * C, B, H, W]."""

    def __init__(self, tensor: Tensor, clients: int) -> None:
        self.tensor, self.clients = tensor, clients

    def flat(self) -> Tensor:
        """[c, B, C H W]."""
        parts: Tensor = self.tensor.reshape(self.clients, -1, *self.tensor.shape[1:])  # [c, C, B, H, W]
        return parts.transpose(1, 2).flatten(2)

    @classmethod
    def of_flat(cls, flat: Tensor, shape: torch.Size, clients: int) -> _Planes:
        """The planes of that shape that have this `flat`."""
        parts = flat.reshape(clients, shape[1], shape[0] // clients, *shape[2:])
        return cls(parts.transpose(1, 2).reshape(shape), clients)


class _Lanes:
    """Streams on which calls of different clients run beside each other; without any, one after the other.

    A client stays on its stream. What crosses between streams is held until the step is over, since memory that is let
    go may be written again by the stream it came from.
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
        """What follows on the streams sees what was done so far."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        """What follows sees what the streams have done."""
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)

    def finish(self) -> None:
        """The step is over."""
        self.join()
        self._held.clear()


class _Pool:
    """Max pooling without overlap. Of equal values the first one gets the gradient, as torch has it."""

    def __init__(self, size: int, lanes: _Lanes) -> None:
        self._size, self._lanes = size, lanes
        self._kept: Any = None

    def ahead(self, h: Any, keep: bool) -> Any:
        if isinstance(h, _Planes):
            return _Planes(self.ahead(h.tensor, keep), h.clients)
        if isinstance(h, list) and self._size == 2 and not h[0].is_cuda:
            # torch's own kernel is several times slower on a CPU than two maxima of halves.
            parts = [_halved(part, keep) for part in h]
            self._kept = [kept for _, kept in parts]
            return [out for out, _ in parts]
        if isinstance(h, list):
            found = self._lanes.each(lambda part: functional.max_pool2d(part, self._size, return_indices=True), h)
            self._kept = [(part, index) for part, (_, index) in zip(h, found, strict=True)]
            return [out for out, _ in found]
        out, index = functional.max_pool2d(h, self._size, return_indices=True)
        self._kept = (h, index)
        return out

    def back(self, delta: Any) -> Any:
        if isinstance(delta, _Planes):
            return _Planes(self.back(delta.tensor), delta.clients)
        if isinstance(delta, list) and self._size == 2 and not delta[0].is_cuda:
            return [_doubled(d, *kept) for d, kept in zip(delta, self._kept, strict=True)]
        if isinstance(delta, list):
            return self._lanes.each(lambda d, kept: self._torch_back(d, *kept), delta, self._kept)
        return self._torch_back(delta, *self._kept)

    def _torch_back(self, delta: Tensor, x: Tensor, index: Tensor) -> Tensor:
        if delta.is_cuda:  # each value went into one maximum at most: it is enough to put the gradients back
            return functional.max_unpool2d(delta, index, [self._size, self._size], output_size=list(x.shape[-2:]))
        size = [self._size, self._size]
        found: Tensor = _aten.max_pool2d_with_indices_backward(delta, x, size, size, [0, 0], [1, 1], False, index)
        return found


def _halved(x: Tensor, keep: bool) -> tuple[Tensor, Any]:
    """The maxima of 2x2 squares, and which of the four they are."""
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

    None if there is a layer or a loss that hand-written code does not know, buffers, or parameters that are shared.
    """
    layers = _plain_layers(network.module)
    for place in range(len(layers or ()) - 1):
        assert layers is not None
        if isinstance(layers[place], nn.ReLU) and isinstance(layers[place + 1], nn.MaxPool2d):
            layers[place : place + 2] = layers[place + 1], layers[place]  # the same, of fewer numbers
    if layers is None or loss is not cross_entropy or network.layout.buffers:
        return None
    own = [p for layer in layers if isinstance(layer, nn.Linear | nn.Conv2d) for p in layer.parameters()]
    named = list(network.named_parameters())
    distinct = len({id(p) for p in own}) == len(own) and len({id(p) for _, p in named}) == len(named)
    if not own or not distinct or len(own) != len(network.layout.parameters):
        return None
    places = {slot.name: place for place, slot in enumerate(network.layout.parameters)}
    names = {id(p): name for name, p in named}
    found = [
        [places[names[id(p)]] for p in (layer.weight, layer.bias) if p is not None]
        if isinstance(layer, nn.Linear | nn.Conv2d)
        else []
        for layer in layers
    ]
    return layers, found


def _plain_layers(module: nn.Module) -> list[nn.Module] | None:
    """The layers of a plain stack in order; None if there is one that is not written here."""
    if type(module) is nn.Sequential:
        found: list[nn.Module] = []
        for child in module:
            below = _plain_layers(child)
            if below is None:
                return None
            found += below
        return found
    return [module] if _is_plain(module) else None


def _is_plain(layer: nn.Module) -> bool:
    if type(layer) is nn.Flatten:
        return bool(layer.start_dim == 1 and layer.end_dim == -1)
    if type(layer) is nn.Conv2d:
        plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
        return plain and not isinstance(layer.padding, str)
    if type(layer) is nn.MaxPool2d:
        size = layer.kernel_size
        same = isinstance(size, int) and layer.stride == size and not layer.padding
        return same and not layer.ceil_mode and layer.dilation == 1 and not layer.return_indices
    return type(layer) in (nn.Linear, nn.ReLU)
