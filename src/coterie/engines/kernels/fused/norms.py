"""BatchNorm of c models, with the activation after it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie.engines.kernels.fused.tiles import SIZES, channels_last, fitting, like, parts_of, tiles

# Activations after a norm.
NONE, RELU, RELU6 = 0, 1, 2

# Entries that one program computes at a time, as measured on an H200 (`python benchmarks/networks.py`).
_TILE, _BACK_TILE = 4096, 8192
_SUM_TILE, _BACK_SUM_TILE = 1024, 4096
_WIDEST = 128  # channels of a tile, forwards


@triton.jit
def _activated(z, ACT: tl.constexpr):
    if ACT > 0:
        z = tl.maximum(z, 0.0)
    if ACT == 2:
        z = tl.minimum(z, 6.0)
    return z


@triton.jit
def _slope(z, dy, ACT: tl.constexpr):
    if ACT == 1:
        dy = tl.where(z > 0.0, dy, 0.0)
    if ACT == 2:
        dy = tl.where((z > 0.0) & (z < 6.0), dy, 0.0)
    return dy


@triton.jit(do_not_specialize=SIZES)
def _norm_sums(x, mask, sums, rows, channels, spatial, per, HAS_MASK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Sums of x - x[0] and of its square, over some rows of one client: [c, parts, 2, C]."""
    client, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    is_channel = channel < channels
    base = x + client * rows * channels
    shift = tl.load(base + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    one = tl.zeros((BR, BC), dtype=tl.float32)
    two = tl.zeros((BR, BC), dtype=tl.float32)
    last = tl.minimum((part + 1) * per, rows)
    step = tl.arange(0, BR)
    at = step[:, None] * channels + channel[None, :]  # within a tile
    for begin in range(part * per, last, BR):
        row = begin + step
        inside = (row < last)[:, None] & is_channel[None, :]
        here = base + tl.cast(begin, tl.int64) * channels
        value = tl.where(inside, tl.load(here + at, mask=inside, other=0.0).to(tl.float32) - shift, 0.0)
        if HAS_MASK:
            real = tl.load(mask + client * (rows // spatial) + row // spatial, mask=row < last, other=0.0)
            value = tl.where(real[:, None] > 0.0, value, 0.0)
        one += value
        two += value * value
    to = sums + ((client * tl.num_programs(2) + part) * 2) * channels + channel
    tl.store(to, tl.sum(one, 0), mask=is_channel)
    tl.store(to + channels, tl.sum(two, 0), mask=is_channel)


@triton.jit(do_not_specialize=SIZES)
def _norm_finish(
    x,
    sums,
    count,
    mean,
    rstd,
    share,
    old_mean,
    old_var,
    rows,
    channels,
    parts,
    momentum,
    eps,
    BC: tl.constexpr,
):
    """Mean and 1 / std of each channel of a client, 1 / number of values, and the running statistics."""
    client = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    is_channel = channel < channels
    one = tl.zeros((BC,), dtype=tl.float32)
    two = tl.zeros((BC,), dtype=tl.float32)
    for part in range(parts):
        at = sums + ((client * parts + part) * 2) * channels + channel
        one += tl.load(at, mask=is_channel, other=0.0)
        two += tl.load(at + channels, mask=is_channel, other=0.0)
    n = tl.load(count + client)
    one = one / n
    var = tl.maximum(two / n - one * one, 0.0)
    middle = one + tl.load(x + client * rows * channels + channel, mask=is_channel, other=0.0).to(tl.float32)
    at = client * channels + channel
    before_mean = tl.load(old_mean + at, mask=is_channel, other=0.0)
    before_var = tl.load(old_var + at, mask=is_channel, other=1.0)
    is_alone = n <= 1.0  # a single value has no variance: the running statistics are used, and stay
    step = tl.where(is_alone, 0.0, momentum)
    unbiased = var * n / tl.maximum(n - 1.0, 1.0)
    tl.store(old_mean + at, before_mean + step * (middle - before_mean), mask=is_channel)
    tl.store(old_var + at, before_var + step * (unbiased - before_var), mask=is_channel)
    tl.store(mean + at, tl.where(is_alone, before_mean, middle), mask=is_channel)
    tl.store(rstd + at, 1.0 / tl.sqrt(tl.where(is_alone, before_var, var) + eps), mask=is_channel)
    tl.store(share + client, tl.where(is_alone, 0.0, 1.0 / n))


@triton.jit(do_not_specialize=SIZES)
def _norm_apply(
    x,
    y,
    mean,
    rstd,
    weight,
    bias,
    rows,
    channels,
    blocks,
    ACT: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """y = act((x - mean) * rstd * weight + bias)."""
    client = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks) * BR
    step = tl.arange(0, BR)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    is_channel = channel < channels
    inside = (first + step < rows)[:, None] & is_channel[None, :]
    of = client * channels + channel
    scale = tl.load(rstd + of, mask=is_channel, other=0.0) * tl.load(weight + of, mask=is_channel, other=0.0)
    shift = tl.load(bias + of, mask=is_channel, other=0.0) - tl.load(mean + of, mask=is_channel, other=0.0) * scale
    begin = (client * rows + first) * channels
    at = step[:, None] * channels + channel[None, :]  # within the tile
    value = tl.load(x + begin + at, mask=inside, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    tl.store(y + begin + at, _activated(value, ACT).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _norm_back_sums(
    dy,
    x,
    mean,
    rstd,
    weight,
    bias,
    sums,
    rows,
    channels,
    per,
    ACT: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Sums of the gradient dz before the activation, and of dz * normalized x: [c, parts, 2, C]."""
    client, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    is_channel = channel < channels
    of = client * channels + channel
    middle = tl.load(mean + of, mask=is_channel, other=0.0)[None, :]
    inverse = tl.load(rstd + of, mask=is_channel, other=0.0)[None, :]
    scale = tl.load(weight + of, mask=is_channel, other=0.0)[None, :]
    shift = tl.load(bias + of, mask=is_channel, other=0.0)[None, :]
    one = tl.zeros((BR, BC), dtype=tl.float32)
    two = tl.zeros((BR, BC), dtype=tl.float32)
    last = tl.minimum((part + 1) * per, rows)
    step = tl.arange(0, BR)
    at = step[:, None] * channels + channel[None, :]  # within a tile
    for begin in range(part * per, last, BR):
        inside = (begin + step < last)[:, None] & is_channel[None, :]
        here = (client * rows + begin) * channels
        unit = (tl.load(x + here + at, mask=inside, other=0.0).to(tl.float32) - middle) * inverse
        dz = _slope(unit * scale + shift, tl.load(dy + here + at, mask=inside, other=0.0).to(tl.float32), ACT)
        one += dz
        two += dz * unit
    to = sums + ((client * tl.num_programs(2) + part) * 2) * channels + channel
    tl.store(to, tl.sum(one, 0), mask=is_channel)
    tl.store(to + channels, tl.sum(two, 0), mask=is_channel)


@triton.jit(do_not_specialize=SIZES)
def _norm_back_apply(
    dy,
    x,
    dx,
    mean,
    rstd,
    weight,
    bias,
    sums,
    share,
    mask,
    rows,
    channels,
    spatial,
    blocks,
    HAS_MASK: tl.constexpr,
    ACT: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """The gradient of x; `sums` [c, 2, C] are those of `_norm_back_sums`."""
    client = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks) * BR
    row = first + tl.arange(0, BR)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    is_channel = channel < channels
    inside = (row < rows)[:, None] & is_channel[None, :]
    of = client * channels + channel
    middle = tl.load(mean + of, mask=is_channel, other=0.0)[None, :]
    inverse = tl.load(rstd + of, mask=is_channel, other=0.0)[None, :]
    scale = tl.load(weight + of, mask=is_channel, other=0.0)[None, :]
    shift = tl.load(bias + of, mask=is_channel, other=0.0)[None, :]
    part = tl.load(share + client)
    of = client * 2 * channels + channel
    one = tl.load(sums + of, mask=is_channel, other=0.0)[None, :] * part
    two = tl.load(sums + of + channels, mask=is_channel, other=0.0)[None, :] * part
    begin = (client * rows + first) * channels
    at = tl.arange(0, BR)[:, None] * channels + channel[None, :]  # within the tile
    unit = (tl.load(x + begin + at, mask=inside, other=0.0).to(tl.float32) - middle) * inverse
    dz = _slope(unit * scale + shift, tl.load(dy + begin + at, mask=inside, other=0.0).to(tl.float32), ACT)
    common = one + unit * two
    if HAS_MASK:
        real = tl.load(mask + client * (rows // spatial) + row // spatial, mask=row < rows, other=0.0)
        common = tl.where(real[:, None] > 0.0, common, 0.0)
    tl.store(dx + begin + at, ((dz - common) * inverse * scale).to(dx.dtype.element_ty), mask=inside)


def _apply(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, act: int) -> Tensor:
    clients, channels = weight.shape
    rows = x.numel() // channels // clients
    tall, wide = tiles(channels, _TILE, _WIDEST)
    blocks = triton.cdiv(rows, tall)
    y = torch.empty_like(x)
    _norm_apply[clients * blocks, triton.cdiv(channels, wide)](
        x, y, mean, rstd, weight, bias, rows, channels, blocks, ACT=act, BR=tall, BC=wide
    )
    return y


def _back_sums(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, act: int) -> Tensor:
    """The gradients of the biases and of the weights: [c, 2, C]."""
    clients, channels = weight.shape
    rows = x.numel() // channels // clients
    low, narrow = tiles(channels, _BACK_SUM_TILE, fitting(channels))
    columns = triton.cdiv(channels, narrow)
    parts, per = parts_of(rows, low, clients * columns)
    sums = x.new_empty(clients, parts, 2, channels, dtype=torch.float32)
    _norm_back_sums[clients, columns, parts](
        dy, x, mean, rstd, weight, bias, sums, rows, channels, per, ACT=act, BR=low, BC=narrow
    )
    return sums.sum(1) if parts > 1 else sums[:, 0]


def _back_apply(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    sums: Tensor,
    share: Tensor,
    mask: Tensor | None,
    act: int,
) -> Tensor:
    clients, channels = weight.shape
    rows, spatial = x.numel() // channels // clients, x.shape[2:].numel()
    tall, wide = tiles(channels, _BACK_TILE)
    blocks = triton.cdiv(rows, tall)
    dx, has = torch.empty_like(x), mask is not None
    _norm_back_apply[clients * blocks, triton.cdiv(channels, wide)](
        dy, x, dx, mean, rstd, weight, bias, sums, share, mask if has else x, rows, channels, spatial, blocks,
        HAS_MASK=has, ACT=act, BR=tall, BC=wide,
    )  # fmt: skip
    return dx


class _NormInTraining(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        old_mean: Tensor,
        old_var: Tensor,
        mask: Tensor | None,
        momentum: float,
        eps: float,
        act: int,
    ) -> Tensor:
        clients, channels = weight.shape
        rows, spatial = x.numel() // channels // clients, x.shape[2:].numel()
        low, narrow = tiles(channels, _SUM_TILE, fitting(channels))
        columns = triton.cdiv(channels, narrow)
        parts, per = parts_of(rows, low, clients * columns)
        sums = x.new_empty(clients, parts, 2, channels, dtype=torch.float32)
        mean, rstd = torch.empty_like(weight), torch.empty_like(weight)
        share = weight.new_empty(clients)
        if mask is None:
            count = torch.full((clients,), float(rows), device=x.device)
        else:
            count = mask.sum(1) * spatial
        has = mask is not None
        _norm_sums[clients, columns, parts](
            x, mask if has else x, sums, rows, channels, spatial, per, HAS_MASK=has, BR=low, BC=narrow
        )
        _norm_finish[clients, columns](
            x, sums, count, mean, rstd, share, old_mean, old_var, rows, channels, parts, momentum, eps, BC=narrow
        )
        y = _apply(x, mean, rstd, weight, bias, act)
        ctx.save_for_backward(x, weight, bias, mean, rstd, share, mask)
        ctx.act = act
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias, mean, rstd, share, mask = ctx.saved_tensors
        dy = like(dy, x)
        total = _back_sums(dy, x, mean, rstd, weight, bias, ctx.act)
        dx = _back_apply(dy, x, mean, rstd, weight, bias, total, share, mask, ctx.act)
        return dx, total[:, 1], total[:, 0], None, None, None, None, None, None


class _NormInUse(torch.autograd.Function):
    """BatchNorm by running statistics, which have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, act: int) -> Tensor:
        y = _apply(x, mean, rstd, weight, bias, act)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.act = act
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        dy, dx, dweight, dbias = like(dy, x), None, None, None
        if ctx.needs_input_grad[0]:
            nothing = x.new_zeros(len(weight), 2, weight.shape[1], dtype=torch.float32)
            dx = _back_apply(dy, x, mean, rstd, weight, bias, nothing, nothing, None, ctx.act)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dbias, dweight = _back_sums(dy, x, mean, rstd, weight, bias, ctx.act).unbind(1)
        return dx, dweight, dbias, None, None, None


def norm_in_training(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    old_mean: Tensor,
    old_var: Tensor,
    mask: Tensor | None,
    momentum: float,
    eps: float,
    act: int,
) -> Tensor:
    """Normalize images [c * B, C, H, W] by the statistics of each client's batch, and activate them.

    Weights, biases and running statistics are [c, C]; the last are updated in place. `mask` [c, B] is 1 for real rows.
    """
    found: Tensor = _NormInTraining.apply(channels_last(x), weight, bias, old_mean, old_var, mask, momentum, eps, act)
    return found


def norm_in_use(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, act: int) -> Tensor:
    """Normalize images [c * B, C, H, W] by running statistics [c, C], and activate them."""
    found: Tensor = _NormInUse.apply(channels_last(x), weight, bias, mean.contiguous(), torch.rsqrt(var + eps), act)
    return found
