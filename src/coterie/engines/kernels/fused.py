"""Fused operations of c models on a GPU, in Triton: BatchNorm with its activation, and depthwise convolutions.

Images are channels-last, and clients are folded into the batch: [c * B, C, H, W], so a client is a block of rows
[B * H * W, C]. Each kernel computes all clients. Sums are in float32 and in a fixed order, so results are repeatable.

This module needs Triton, which torch's CUDA builds bring along; `coterie.engines.kernels.folded` imports it only then.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Activations after a norm.
NONE, RELU, RELU6 = 0, 1, 2

# Numbers that are no reason to compile a kernel anew: each variant takes a good part of a second.
_SIZES = ["rows", "spatial", "per", "parts", "blocks", "places", "high", "wide", "out_high", "out_wide"]

_TILE = 4096  # entries that one program computes at a time
_SUM_TILE = 2048  # the same for sums, which keep totals of them
_PROGRAMS = 4096  # that fill a GPU
_MOST_PARTS = 64  # into which the rows of a client are divided for a sum


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


@triton.jit(do_not_specialize=_SIZES)
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


@triton.jit(do_not_specialize=_SIZES)
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


@triton.jit(do_not_specialize=_SIZES)
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


@triton.jit(do_not_specialize=_SIZES)
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


@triton.jit(do_not_specialize=_SIZES)
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


def _tiles(channels: int, entries: int = _TILE) -> tuple[int, int]:
    """Rows and channels of a tile."""
    wide = 32 if channels <= 32 else 64
    return entries // wide, wide


def _parts(rows: int, tile: int, others: int) -> tuple[int, int]:
    """Into how many parts the rows are divided for a sum, and the rows of each; `others` programs run for each part."""
    wanted = min(_MOST_PARTS, triton.cdiv(_PROGRAMS, others), max(1, rows // (2 * tile)))
    per = triton.cdiv(triton.cdiv(rows, wanted), tile) * tile
    return triton.cdiv(rows, per), per


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
        tall, wide = _tiles(channels)
        columns, blocks = triton.cdiv(channels, wide), triton.cdiv(rows, tall)
        low, _ = _tiles(channels, _SUM_TILE)
        parts, per = _parts(rows, low, clients * columns)
        sums = x.new_empty(clients, parts, 2, channels, dtype=torch.float32)
        mean, rstd = torch.empty_like(weight), torch.empty_like(weight)
        share = weight.new_empty(clients)
        if mask is None:
            count = torch.full((clients,), float(rows), device=x.device)
        else:
            count = mask.sum(1) * spatial
        y = torch.empty_like(x)
        has = mask is not None
        _norm_sums[clients, columns, parts](
            x, mask if has else x, sums, rows, channels, spatial, per, HAS_MASK=has, BR=low, BC=wide
        )
        _norm_finish[clients, columns](
            x, sums, count, mean, rstd, share, old_mean, old_var, rows, channels, parts, momentum, eps, BC=wide
        )
        _norm_apply[clients * blocks, columns](
            x, y, mean, rstd, weight, bias, rows, channels, blocks, ACT=act, BR=tall, BC=wide
        )
        ctx.save_for_backward(x, weight, bias, mean, rstd, share, mask)
        ctx.act = act
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias, mean, rstd, share, mask = ctx.saved_tensors
        clients, channels = weight.shape
        rows, spatial = x.numel() // channels // clients, x.shape[2:].numel()
        dy = _like(dy, x)
        tall, wide = _tiles(channels)
        columns, blocks = triton.cdiv(channels, wide), triton.cdiv(rows, tall)
        low, _ = _tiles(channels, _SUM_TILE)
        parts, per = _parts(rows, low, clients * columns)
        sums = x.new_empty(clients, parts, 2, channels, dtype=torch.float32)
        _norm_back_sums[clients, columns, parts](
            dy, x, mean, rstd, weight, bias, sums, rows, channels, per, ACT=ctx.act, BR=low, BC=wide
        )
        total = sums.sum(1) if parts > 1 else sums[:, 0]  # [c, 2, C]
        dx = torch.empty_like(x)
        has = mask is not None
        _norm_back_apply[clients * blocks, columns](
            dy, x, dx, mean, rstd, weight, bias, total, share, mask if has else x, rows, channels, spatial, blocks,
            HAS_MASK=has, ACT=ctx.act, BR=tall, BC=wide,
        )  # fmt: skip
        return dx, total[:, 1], total[:, 0], None, None, None, None, None, None


class _NormInUse(torch.autograd.Function):
    """BatchNorm by running statistics; gradients for the inputs only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, act: int) -> Tensor:
        clients, channels = weight.shape
        rows = x.numel() // channels // clients
        tall, wide = _tiles(channels)
        blocks = triton.cdiv(rows, tall)
        y = torch.empty_like(x)
        _norm_apply[clients * blocks, triton.cdiv(channels, wide)](
            x, y, mean, rstd, weight, bias, rows, channels, blocks, ACT=act, BR=tall, BC=wide
        )
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.act = act
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        clients, channels = weight.shape
        rows = x.numel() // channels // clients
        tall, wide = _tiles(channels)
        blocks = triton.cdiv(rows, tall)
        nothing = x.new_zeros(clients, 2, channels, dtype=torch.float32)
        dx = torch.empty_like(x)
        _norm_back_apply[clients * blocks, triton.cdiv(channels, wide)](
            _like(dy, x), x, dx, mean, rstd, weight, bias, nothing, nothing, x, rows, channels, 1, blocks,
            HAS_MASK=False, ACT=ctx.act, BR=tall, BC=wide,
        )  # fmt: skip
        return dx, None, None, None, None, None


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
    found: Tensor = _NormInTraining.apply(_last(x), weight, bias, old_mean, old_var, mask, momentum, eps, act)
    return found


def norm_in_use(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, act: int) -> Tensor:
    """Normalize images [c * B, C, H, W] by running statistics [c, C], and activate them."""
    found: Tensor = _NormInUse.apply(_last(x), weight, bias, mean.contiguous(), torch.rsqrt(var + eps), act)
    return found


# ---- depthwise convolutions ----


@triton.jit(do_not_specialize=_SIZES)
def _depthwise(
    x,
    weight,
    y,
    places,
    channels,
    high,
    wide,
    out_high,
    out_wide,
    blocks,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """y[b, i, j] = sum of x[b, i * stride - pad + u, j * stride - pad + v] * weight[u, v]; weights [c, k * k, C]."""
    client = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks) * BP
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    is_channel = channel < channels
    area = out_wide * out_high
    image = first // area  # offsets are from this image on
    place = first + tl.arange(0, BP)
    is_place = place < places
    i = (place // out_wide) % out_high * STRIDE - PAD
    j = place % out_wide * STRIDE - PAD
    base = x + (client * (places // area) + image) * high * wide * channels
    at = (((place // area - image) * high + i) * wide + j)[:, None] * channels + channel[None, :]
    total = tl.zeros((BP, BC), dtype=tl.float32)
    for u in tl.static_range(SIZE):
        for v in tl.static_range(SIZE):
            inside = is_place & (i + u >= 0) & (i + u < high) & (j + v >= 0) & (j + v < wide)
            here = base + (u * wide + v) * channels
            value = tl.load(here + at, mask=inside[:, None] & is_channel[None, :], other=0.0).to(tl.float32)
            own = weight + (client * SIZE * SIZE + u * SIZE + v) * channels + channel
            total += value * tl.load(own, mask=is_channel, other=0.0)[None, :]
    to = y + (client * places + first) * channels
    at = tl.arange(0, BP)[:, None] * channels + channel[None, :]
    tl.store(to + at, total.to(y.dtype.element_ty), mask=is_place[:, None] & is_channel[None, :])


@triton.jit(do_not_specialize=_SIZES)
def _depthwise_back(
    dy,
    weight,
    dx,
    places,
    channels,
    high,
    wide,
    out_high,
    out_wide,
    blocks,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """The gradient of the inputs; `places` of them in each client."""
    client = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks) * BP
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    is_channel = channel < channels
    area = wide * high
    image = first // area  # offsets are from this image on
    place = first + tl.arange(0, BP)
    is_place = place < places
    row = (place // wide) % high + PAD
    column = place % wide + PAD
    begin = (place // area - image) * out_high
    base = dy + (client * (places // area) + image) * out_high * out_wide * channels
    total = tl.zeros((BP, BC), dtype=tl.float32)
    for u in tl.static_range(SIZE):
        for v in tl.static_range(SIZE):
            up = row - u
            left = column - v
            i = up // STRIDE
            j = left // STRIDE
            inside = is_place & (up >= 0) & (left >= 0) & (i < out_high) & (j < out_wide)
            if STRIDE > 1:
                inside = inside & (up % STRIDE == 0) & (left % STRIDE == 0)
            at = ((begin + i) * out_wide + j)[:, None] * channels + channel[None, :]
            value = tl.load(base + at, mask=inside[:, None] & is_channel[None, :], other=0.0).to(tl.float32)
            own = weight + (client * SIZE * SIZE + u * SIZE + v) * channels + channel
            total += value * tl.load(own, mask=is_channel, other=0.0)[None, :]
    to = dx + (client * places + first) * channels
    at = tl.arange(0, BP)[:, None] * channels + channel[None, :]
    tl.store(to + at, total.to(dx.dtype.element_ty), mask=is_place[:, None] & is_channel[None, :])


@triton.jit(do_not_specialize=_SIZES)
def _depthwise_weights(
    dy,
    x,
    sums,
    places,
    channels,
    high,
    wide,
    out_high,
    out_wide,
    per,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """The gradient of one row of the weights over some outputs of one client: [c, parts, k * k, C]."""
    client = tl.program_id(0).to(tl.int64)
    u = tl.program_id(2) % SIZE
    part = tl.program_id(2) // SIZE
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    is_channel = channel < channels
    area = out_wide * out_high
    step = tl.arange(0, BP)
    from_dy = step[:, None] * channels + channel[None, :]  # within a tile
    last = tl.minimum((part + 1) * per, places)
    to = sums + ((client * (tl.num_programs(2) // SIZE) + part) * SIZE * SIZE + u * SIZE) * channels + channel
    if SIZE == 3:  # the usual case: its three sums in one pass
        left = tl.zeros((BP, BC), dtype=tl.float32)
        middle = tl.zeros((BP, BC), dtype=tl.float32)
        right = tl.zeros((BP, BC), dtype=tl.float32)
        for begin in range(part * per, last, BP):
            place = begin + step
            image = begin // area  # offsets are from this image on
            i = (place // out_wide) % out_high * STRIDE - PAD + u
            j = place % out_wide * STRIDE - PAD
            is_row = (place < last) & (i >= 0) & (i < high)
            of = dy + (client * places + begin) * channels
            slope = tl.load(of + from_dy, mask=is_row[:, None] & is_channel[None, :], other=0.0).to(tl.float32)
            base = x + (client * (places // area) + image) * high * wide * channels
            at = (((place // area - image) * high + i) * wide + j)[:, None] * channels + channel[None, :]
            both = (is_row & (j >= 0) & (j < wide))[:, None] & is_channel[None, :]
            left += slope * tl.load(base + at, mask=both, other=0.0).to(tl.float32)
            both = (is_row & (j + 1 >= 0) & (j + 1 < wide))[:, None] & is_channel[None, :]
            middle += slope * tl.load(base + channels + at, mask=both, other=0.0).to(tl.float32)
            both = (is_row & (j + 2 >= 0) & (j + 2 < wide))[:, None] & is_channel[None, :]
            right += slope * tl.load(base + 2 * channels + at, mask=both, other=0.0).to(tl.float32)
        tl.store(to, tl.sum(left, 0), mask=is_channel)
        tl.store(to + channels, tl.sum(middle, 0), mask=is_channel)
        tl.store(to + 2 * channels, tl.sum(right, 0), mask=is_channel)
    else:
        for v in tl.static_range(SIZE):
            total = tl.zeros((BP, BC), dtype=tl.float32)
            for begin in range(part * per, last, BP):
                place = begin + step
                image = begin // area
                i = (place // out_wide) % out_high * STRIDE - PAD + u
                j = place % out_wide * STRIDE - PAD + v
                inside = (place < last) & (i >= 0) & (i < high) & (j >= 0) & (j < wide)
                both = inside[:, None] & is_channel[None, :]
                base = x + (client * (places // area) + image) * high * wide * channels
                at = (((place // area - image) * high + i) * wide + j)[:, None] * channels + channel[None, :]
                value = tl.load(base + at, mask=both, other=0.0).to(tl.float32)
                of = dy + (client * places + begin) * channels
                total += value * tl.load(of + from_dy, mask=both, other=0.0).to(tl.float32)
            tl.store(to + v * channels, tl.sum(total, 0), mask=is_channel)


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, pad: int) -> Tensor:
        clients, channels, _, size, _ = weight.shape
        own = weight.flatten(2).transpose(1, 2).contiguous()  # [c, k * k, C]
        high, wide = x.shape[2:]
        out = [(side + 2 * pad - size) // stride + 1 for side in (high, wide)]
        y = torch.empty((len(x), channels, *out), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        places = len(x) // clients * out[0] * out[1]
        tall, broad = _tiles(channels, _SUM_TILE)  # fewer places: each reads nine neighbours
        blocks = triton.cdiv(places, tall)
        _depthwise[clients * blocks, triton.cdiv(channels, broad)](
            x, own, y, places, channels, high, wide, *out, blocks, SIZE=size, STRIDE=stride, PAD=pad, BP=tall, BC=broad
        )
        ctx.save_for_backward(x, own)
        ctx.settings = size, stride, pad
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, own = ctx.saved_tensors
        size, stride, pad = ctx.settings
        clients, _, channels = own.shape
        high, wide = x.shape[2:]
        out = dy.shape[2:]
        dy = _last(dy)
        dx = dw = None
        tall, broad = _tiles(channels, _SUM_TILE)
        columns = triton.cdiv(channels, broad)
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            places = len(x) // clients * high * wide
            blocks = triton.cdiv(places, tall)
            _depthwise_back[clients * blocks, columns](
                dy, own, dx, places, channels, high, wide, *out, blocks,
                SIZE=size, STRIDE=stride, PAD=pad, BP=tall, BC=broad,
            )  # fmt: skip
        if ctx.needs_input_grad[1]:
            places = len(x) // clients * out[0] * out[1]
            parts, per = _parts(places, tall, clients * columns * size)
            sums = x.new_empty(clients, parts, size * size, channels, dtype=torch.float32)
            _depthwise_weights[clients, columns, parts * size](
                dy, x, sums, places, channels, high, wide, *out, per,
                SIZE=size, STRIDE=stride, PAD=pad, BP=tall, BC=broad,
            )  # fmt: skip
            dw = sums.sum(1).transpose(1, 2).reshape(clients, channels, 1, size, size)
        return dx, dw, None, None


def depthwise(x: Tensor, weight: Tensor, stride: int, pad: int) -> Tensor:
    """Convolve images [c * B, C, H, W] with weights [c, C, 1, k, k], each channel of each client with its own."""
    found: Tensor = _Depthwise.apply(_last(x), weight, stride, pad)
    return found


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _like(dy: Tensor, x: Tensor) -> Tensor:
    """A gradient with the layout of what it belongs to."""
    return dy if dy.stride() == x.stride() else torch.empty_like(x, dtype=dy.dtype).copy_(dy)
