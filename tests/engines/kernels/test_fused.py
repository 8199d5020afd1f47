"""The fused operations against plain autograd.

On a GPU; without one in Triton's interpreter, where Triton is installed (its version 3.6 needs numpy < 2.4 for it):
TRITON_INTERPRET=1 python -m pytest -m gpu tests/engines/kernels/test_fused.py
"""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU here", allow_module_level=True)
pytest.importorskip("triton", reason="needs Triton, which torch's CUDA builds bring along")

from coterie.engines.kernels import fused

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # of Triton's interpreter
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLIENTS, BATCH, EPS, MOMENTUM = 3, 4, 1e-3, 0.1


def images(channels, high=5, wide=6):
    torch.manual_seed(0)
    whole = 2 + torch.randn(CLIENTS * BATCH, channels, high, wide, device=DEVICE)
    return whole.contiguous(memory_format=torch.channels_last).requires_grad_()


def own(*shape):
    return torch.randn(CLIENTS, *shape, device=DEVICE).requires_grad_()


def activated(x, act):
    return {fused.NONE: lambda x: x, fused.RELU: functional.relu, fused.RELU6: functional.relu6}[act](x)


def check(found, expected, leaves):
    assert torch.allclose(found, expected.to(found.dtype), rtol=1e-4, atol=1e-4)
    slope = torch.randn_like(found)
    got = torch.autograd.grad(found, leaves, slope)
    wanted = torch.autograd.grad(expected, leaves, slope.to(expected.dtype))
    for one, other in zip(got, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


@pytest.mark.parametrize("act", [fused.NONE, fused.RELU, fused.RELU6])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("channels", [3, 70])
def test_norm_in_training(channels, is_masked, act):
    x, weight, bias = images(channels), own(channels), own(channels)
    mean, var = torch.randn(CLIENTS, channels, device=DEVICE), torch.rand(CLIENTS, channels, device=DEVICE) + 0.5
    real = [BATCH, BATCH - 1, 1] if is_masked else [BATCH] * CLIENTS
    mask = torch.tensor([[1.0] * n + [0.0] * (BATCH - n) for n in real], device=DEVICE) if is_masked else None
    moved = mean.clone(), var.clone()
    found = fused.norm_in_training(x, weight, bias, *moved, mask, MOMENTUM, EPS, act)
    expected, wide = [], x.double().reshape(CLIENTS, BATCH, *x.shape[1:])
    for i, n in enumerate(real):
        now, spread = wide[i, :n].mean((0, 2, 3)), wide[i, :n].var((0, 2, 3), correction=0)
        unit = (wide[i] - now.reshape(-1, 1, 1)) / (spread + EPS).sqrt().reshape(-1, 1, 1)
        expected.append(activated(unit * weight[i].reshape(-1, 1, 1) + bias[i].reshape(-1, 1, 1), act))
        count = n * x.shape[2:].numel()
        after = mean[i] + MOMENTUM * (now - mean[i]), var[i] + MOMENTUM * (spread * count / (count - 1) - var[i])
        assert torch.allclose(moved[0][i], after[0].float(), rtol=1e-4, atol=1e-5)
        assert torch.allclose(moved[1][i], after[1].float(), rtol=1e-4, atol=1e-5)
    rows = torch.ones(CLIENTS * BATCH, dtype=torch.bool, device=DEVICE) if mask is None else mask.flatten() > 0
    check(found[rows], torch.cat(expected)[rows], [x, weight, bias])


def test_a_single_value_is_normalized_by_the_running_statistics_which_stay():
    x, weight, bias = images(3, 1, 1), own(3), own(3)
    mean, var = torch.randn(CLIENTS, 3, device=DEVICE), torch.rand(CLIENTS, 3, device=DEVICE) + 0.5
    mask = torch.tensor([[1.0, 0.0, 0.0, 0.0]] * CLIENTS, device=DEVICE)
    moved = mean.clone(), var.clone()
    found = fused.norm_in_training(x, weight, bias, *moved, mask, MOMENTUM, EPS, fused.NONE)
    unit = (x.reshape(CLIENTS, BATCH, 3) - mean.unsqueeze(1)) / (var + EPS).sqrt().unsqueeze(1)
    expected = (unit * weight.unsqueeze(1) + bias.unsqueeze(1)).reshape(found.shape)
    first = slice(None, None, BATCH)
    check(found[first], expected[first], [x, weight, bias])
    assert torch.equal(moved[0], mean)
    assert torch.equal(moved[1], var)


@pytest.mark.parametrize("act", [fused.NONE, fused.RELU, fused.RELU6])
def test_norm_in_use(act):
    x, weight, bias = images(5), own(5), own(5)
    mean, var = torch.randn(CLIENTS, 5, device=DEVICE), torch.rand(CLIENTS, 5, device=DEVICE) + 0.5
    found = fused.norm_in_use(x, weight, bias, mean, var, EPS, act)

    def each(values):
        return values.repeat_interleave(BATCH, 0)[:, :, None, None]

    expected = activated((x - each(mean)) / (each(var) + EPS).sqrt() * each(weight) + each(bias), act)
    check(found, expected, [x, weight, bias])


@pytest.mark.parametrize(("size", "stride", "pad"), [(3, 1, 1), (3, 2, 1), (5, 1, 2), (3, 1, 0), (2, 2, 0)])
@pytest.mark.parametrize("channels", [3, 70])
@pytest.mark.parametrize("shape", [(7, 6), (2, 40), (3, 70), (1, 1)])  # several images in a tile, one, and too wide
def test_depthwise(shape, channels, size, stride, pad):
    if min(shape) + 2 * pad < size:
        pytest.skip("the image is smaller than the weights")
    x, weight = images(channels, *shape), own(channels, 1, size, size)
    found = fused.depthwise(x, weight, stride, pad)
    pairs = zip(x.double().chunk(CLIENTS), weight.double(), strict=True)
    expected = [functional.conv2d(one, mine, None, stride, pad, groups=channels) for one, mine in pairs]
    check(found, torch.cat(expected), [x, weight])
