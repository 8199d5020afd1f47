"""Depthwise convolutions of c models."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie.engines.kernels.fused.tiles import SIZES, channels_last, parts_of, tiles

_TILE = 2048  # entries that one program computes at a time; each reads its neighbours
_ROW_TILE, _ROW_SUM_TILE = 2048, 512  # the same row by row, for outputs and for the nine sums of the weights
_WIDEST = 64  # images that are computed row by row; a tile holds a whole row


# ---- 3x3 with padding 1: the usual case ----


@triton.jit(do_not_specialize=SIZES)
def _rows(
    x,
    weight,
    y,
    images,
    channels,
    high,
    wide,
    groups,
    FLIP: tl.constexpr,
    NI: tl.constexpr,
    BW: tl.constexpr,
    BC: tl.constexpr,
):
    """A 3x3 convolution with stride 1 of NI images, row by row: a row is read once and counts in three outputs.

    With FLIP the gradient of the inputs, if x is that of the outputs: the same with the weights turned around.
    """
    client = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    is_channel = channel < channels
    place = tl.arange(0, NI * BW)
    j = place % BW
    is_place = (group * NI + place // BW < images) & (j < wide)
    both = is_place[:, None] & is_channel[None, :]
    has_left = (is_place & (j > 0))[:, None] & is_channel[None, :]
    has_right = (is_place & (j + 1 < wide))[:, None] & is_channel[None, :]
    at = (place // BW * high * wide + j)[:, None] * channels + channel[None, :]  # in row 0
    base = (client * images + group * NI) * high * wide * channels
    own = weight + client * 9 * channels + channel
    step = channels
    if FLIP:
        own += 8 * channels
        step = -channels
    w00 = tl.load(own, mask=is_channel, other=0.0)[None, :]
    w01 = tl.load(own + step, mask=is_channel, other=0.0)[None, :]
    w02 = tl.load(own + 2 * step, mask=is_channel, other=0.0)[None, :]
    w10 = tl.load(own + 3 * step, mask=is_channel, other=0.0)[None, :]
    w11 = tl.load(own + 4 * step, mask=is_channel, other=0.0)[None, :]
    w12 = tl.load(own + 5 * step, mask=is_channel, other=0.0)[None, :]
    w20 = tl.load(own + 6 * step, mask=is_channel, other=0.0)[None, :]
    w21 = tl.load(own + 7 * step, mask=is_channel, other=0.0)[None, :]
    w22 = tl.load(own + 8 * step, mask=is_channel, other=0.0)[None, :]
    above = tl.zeros((NI * BW, BC), dtype=tl.float32)  # outputs of the row above the one that is read, so far
    level = tl.zeros((NI * BW, BC), dtype=tl.float32)  # those of the same row
    for row in range(high + 1):
        here = x + base + row * wide * channels
        is_row = row < high
        left = tl.load(here - channels + at, mask=has_left & is_row, other=0.0).to(tl.float32)
        middle = tl.load(here + at, mask=both & is_row, other=0.0).to(tl.float32)
        right = tl.load(here + channels + at, mask=has_right & is_row, other=0.0).to(tl.float32)
        done = above + left * w20 + middle * w21 + right * w22
        above = level + left * w10 + middle * w11 + right * w12
        level = left * w00 + middle * w01 + right * w02
        to = y + base + (row - 1) * wide * channels
        tl.store(to + at, done.to(y.dtype.element_ty), mask=both & (row > 0))


@triton.jit(do_not_specialize=SIZES)
def _rows_weights(
    dy,
    x,
    sums,
    images,
    channels,
    high,
    wide,
    groups,
    per,
    NI: tl.constexpr,
    BW: tl.constexpr,
    BC: tl.constexpr,
):
    """The gradient of the weights of `_rows` over some groups of NI images of one client: [c, parts, 9, C]."""
    client, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    is_channel = channel < channels
    place = tl.arange(0, NI * BW)
    j = place % BW
    at = (place // BW * high * wide + j)[:, None] * channels + channel[None, :]  # in row 0
    s00 = tl.zeros((NI * BW, BC), dtype=tl.float32)
    s01 = tl.zeros((NI * BW, BC), dtype=tl.float32)
    s02 = tl.zeros((NI * BW, BC), dtype=tl.float32)
    s10 = tl.zeros((NI * BW, BC), dtype=tl.float32)
    s11 = tl.zeros((NI * BW, BC), dtype=tl.float32)
    s12 = tl.zeros((NI * BW, BC), dtype=tl.float32)
    s20 = tl.zeros((NI * BW, BC), dtype=tl.float32)
    s21 = tl.zeros((NI * BW, BC), dtype=tl.float32)
    s22 = tl.zeros((NI * BW, BC), dtype=tl.float32)
    for group in range(part * per, tl.minimum((part + 1) * per, groups)):
        is_place = (group * NI + place // BW < images) & (j < wide)
        both = is_place[:, None] & is_channel[None, :]
        has_left = (is_place & (j > 0))[:, None] & is_channel[None, :]
        has_right = (is_place & (j + 1 < wide))[:, None] & is_channel[None, :]
        base = (client * images + group * NI) * high * wide * channels
        above = tl.zeros((NI * BW, BC), dtype=tl.float32)  # the gradient of the row above the one that is read
        level = tl.load(dy + base + at, mask=both, other=0.0).to(tl.float32)
        for row in range(high):
            here = base + row * wide * channels
            below = tl.load(dy + here + wide * channels + at, mask=both & (row + 1 < high), other=0.0).to(tl.float32)
            left = tl.load(x + here - channels + at, mask=has_left, other=0.0).to(tl.float32)
            middle = tl.load(x + here + at, mask=both, other=0.0).to(tl.float32)
            right = tl.load(x + here + channels + at, mask=has_right, other=0.0).to(tl.float32)
            s00 += below * left
            s01 += below * middle
            s02 += below * right
            s10 += level * left
            s11 += level * middle
            s12 += level * right
            s20 += above * left
            s21 += above * middle
            s22 += above * right
            above = level
            level = below
    to = sums + (client * tl.num_programs(2) + part) * 9 * channels + channel
    tl.store(to, tl.sum(s00, 0), mask=is_channel)
    tl.store(to + channels, tl.sum(s01, 0), mask=is_channel)
    tl.store(to + 2 * channels, tl.sum(s02, 0), mask=is_channel)
    tl.store(to + 3 * channels, tl.sum(s10, 0), mask=is_channel)
    tl.store(to + 4 * channels, tl.sum(s11, 0), mask=is_channel)
    tl.store(to + 5 * channels, tl.sum(s12, 0), mask=is_channel)
    tl.store(to + 6 * channels, tl.sum(s20, 0), mask=is_channel)
    tl.store(to + 7 * channels, tl.sum(s21, 0), mask=is_channel)
    tl.store(to + 8 * channels, tl.sum(s22, 0), mask=is_channel)


@triton.jit(do_not_specialize=SIZES)
def _halved_back(
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
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """The gradient of the inputs of a 3x3 convolution with stride 2; a place of the outputs gives four of them."""
    client = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks) * BP
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    is_channel = channel < channels
    area = out_wide * out_high
    image = first // area  # offsets are from this image on
    place = first + tl.arange(0, BP)
    is_place = place < places
    i = (place // out_wide) % out_high
    j = place % out_wide
    both = is_place[:, None] & is_channel[None, :]
    has_right = (is_place & (j + 1 < out_wide))[:, None] & is_channel[None, :]
    has_below = (is_place & (i + 1 < out_high))[:, None] & is_channel[None, :]
    here = dy + (client * places + first) * channels
    at = tl.arange(0, BP)[:, None] * channels + channel[None, :]
    below = here + out_wide * channels
    d00 = tl.load(here + at, mask=both, other=0.0).to(tl.float32)
    d01 = tl.load(here + channels + at, mask=has_right, other=0.0).to(tl.float32)
    d10 = tl.load(below + at, mask=has_below, other=0.0).to(tl.float32)
    d11 = tl.load(below + channels + at, mask=has_right & has_below, other=0.0).to(tl.float32)
    own = weight + client * 9 * channels + channel
    w00 = tl.load(own, mask=is_channel, other=0.0)[None, :]
    w01 = tl.load(own + channels, mask=is_channel, other=0.0)[None, :]
    w02 = tl.load(own + 2 * channels, mask=is_channel, other=0.0)[None, :]
    w10 = tl.load(own + 3 * channels, mask=is_channel, other=0.0)[None, :]
    w11 = tl.load(own + 4 * channels, mask=is_channel, other=0.0)[None, :]
    w12 = tl.load(own + 5 * channels, mask=is_channel, other=0.0)[None, :]
    w20 = tl.load(own + 6 * channels, mask=is_channel, other=0.0)[None, :]
    w21 = tl.load(own + 7 * channels, mask=is_channel, other=0.0)[None, :]
    w22 = tl.load(own + 8 * channels, mask=is_channel, other=0.0)[None, :]
    to = dx + (client * (places // area) + image) * high * wide * channels
    at = (((place // area - image) * high + 2 * i) * wide + 2 * j)[:, None] * channels + channel[None, :]
    in_next = (is_place & (2 * j + 1 < wide))[:, None] & is_channel[None, :]
    in_lower = (is_place & (2 * i + 1 < high))[:, None] & is_channel[None, :]
    tl.store(to + at, (d00 * w11).to(dx.dtype.element_ty), mask=both)
    value = d00 * w12 + d01 * w10
    tl.store(to + channels + at, value.to(dx.dtype.element_ty), mask=in_next)
    to += wide * channels
    value = d00 * w21 + d10 * w01
    tl.store(to + at, value.to(dx.dtype.element_ty), mask=in_lower)
    value = d00 * w22 + d01 * w20 + d10 * w02 + d11 * w00
    tl.store(to + channels + at, value.to(dx.dtype.element_ty), mask=in_next & in_lower)


# ---- any other size, stride and padding ----


@triton.jit(do_not_specialize=SIZES)
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


@triton.jit(do_not_specialize=SIZES)
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


@triton.jit(do_not_specialize=SIZES)
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
        ctx.save_for_backward(x, own)
        ctx.settings = size, stride, pad
        ctx.by_rows = (size, stride, pad) == (3, 1, 1) and wide <= _WIDEST
        if ctx.by_rows:
            return _by_rows(x, own, flip=False)
        y = torch.empty((len(x), channels, *out), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        places = len(x) // clients * out[0] * out[1]
        tall, broad = tiles(channels, _TILE)
        blocks = triton.cdiv(places, tall)
        _depthwise[clients * blocks, triton.cdiv(channels, broad)](
            x, own, y, places, channels, high, wide, *out, blocks, SIZE=size, STRIDE=stride, PAD=pad, BP=tall, BC=broad
        )
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, own = ctx.saved_tensors
        dy = channels_last(dy)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            if ctx.by_rows:
                dx = _by_rows(dy, own, flip=True)
            else:
                dx = _inputs(dy, x, own, *ctx.settings)
        if ctx.needs_input_grad[1]:
            sums = _weights_by_rows(dy, x, own) if ctx.by_rows else _weights(dy, x, own, *ctx.settings)
            size = ctx.settings[0]
            dw = sums.sum(1).transpose(1, 2).reshape(len(own), -1, 1, size, size)
        return dx, dw, None, None


def _by_rows(x: Tensor, own: Tensor, flip: bool) -> Tensor:
    clients, _, channels = own.shape
    high, wide = x.shape[2:]
    images, across, each, broad = len(x) // clients, *_row_tiles(wide, 64, _ROW_TILE)
    groups = triton.cdiv(images, each)
    y = torch.empty_like(x)
    _rows[clients * groups, triton.cdiv(channels, broad)](
        x, own, y, images, channels, high, wide, groups, FLIP=flip, NI=each, BW=across, BC=broad
    )
    return y


def _weights_by_rows(dy: Tensor, x: Tensor, own: Tensor) -> Tensor:
    """[c, parts, 9, C]."""
    clients, _, channels = own.shape
    high, wide = x.shape[2:]
    images, across, each, broad = len(x) // clients, *_row_tiles(wide, 32, _ROW_SUM_TILE)
    groups, columns = triton.cdiv(images, each), triton.cdiv(channels, broad)
    parts, per = parts_of(groups, 1, clients * columns)
    sums = x.new_empty(clients, parts, 9, channels, dtype=torch.float32)
    warps = min(8, across * each * broad // 128)  # nine sums of four entries in each thread
    _rows_weights[clients, columns, parts](
        dy, x, sums, images, channels, high, wide, groups, per, NI=each, BW=across, BC=broad, num_warps=warps
    )
    return sums


def _row_tiles(wide: int, broad: int, entries: int) -> tuple[int, int, int]:
    """Places of a row in a tile, images and channels."""
    across = triton.next_power_of_2(wide)
    return across, max(1, entries // across // broad), broad


def _inputs(dy: Tensor, x: Tensor, own: Tensor, size: int, stride: int, pad: int) -> Tensor:
    clients, _, channels = own.shape
    high, wide = x.shape[2:]
    out, images = dy.shape[2:], len(x) // clients
    dx = torch.empty_like(x)
    tall, broad = tiles(channels, _TILE)
    columns = triton.cdiv(channels, broad)
    if (size, stride, pad) == (3, 2, 1):
        places = images * out[0] * out[1]
        blocks = triton.cdiv(places, tall)
        _halved_back[clients * blocks, columns](
            dy, own, dx, places, channels, high, wide, *out, blocks, BP=tall, BC=broad
        )
        return dx
    places = images * high * wide
    blocks = triton.cdiv(places, tall)
    _depthwise_back[clients * blocks, columns](
        dy, own, dx, places, channels, high, wide, *out, blocks, SIZE=size, STRIDE=stride, PAD=pad, BP=tall, BC=broad
    )
    return dx


def _weights(dy: Tensor, x: Tensor, own: Tensor, size: int, stride: int, pad: int) -> Tensor:
    """[c, parts, k * k, C]."""
    clients, _, channels = own.shape
    high, wide = x.shape[2:]
    out = dy.shape[2:]
    places = len(x) // clients * out[0] * out[1]
    tall, broad = tiles(channels, _TILE)
    columns = triton.cdiv(channels, broad)
    parts, per = parts_of(places, tall, clients * columns * size)
    sums = x.new_empty(clients, parts, size * size, channels, dtype=torch.float32)
    _depthwise_weights[clients, columns, parts * size](
        dy, x, sums, places, channels, high, wide, *out, per, SIZE=size, STRIDE=stride, PAD=pad, BP=tall, BC=broad
    )
    return sums


def depthwise(x: Tensor, weight: Tensor, stride: int, pad: int) -> Tensor:
    """Convolve images [c * B, C, H, W] with weights [c, C, 1, k, k], each channel of each client with its own."""
    found: Tensor = _Depthwise.apply(channels_last(x), weight, stride, pad)
    return found
