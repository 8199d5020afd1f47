"""The named models: logistic regression, MLP, LeNet, LEAF's CNNs, ResNet-18 and MobileNetV2.

They follow the papers and have the published number of parameters. No layer works in place, so that clients can be
trained in vectorized batches.

He et al., 2016 (arXiv 1512.03385); Sandler et al., 2018 (arXiv 1801.04381); Caldas et al., 2018 (LEAF).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from coterie.errors import ConfigError, ModelError
from coterie.nets.registry import register_model

MakeNorm = Callable[[int], nn.Module]

_GROUPS = 8  # divides all widths here and leaves at least two channels per group
_NORMS: dict[str, MakeNorm] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(math.gcd(_GROUPS, channels), channels),
}
_POOLS: dict[str, Callable[[int], nn.Module]] = {"max": nn.MaxPool2d, "avg": nn.AvgPool2d}
_STEMS = ("small", "imagenet")


@register_model("mclr")
def mclr(input_shape: tuple[int, ...], num_outputs: int, *, std: float = 0.0) -> nn.Module:
    """Multinomial logistic regression: one linear layer; `std` of its first weights, 0: as PyTorch draws them."""
    if not isinstance(std, (int, float)) or isinstance(std, bool) or not 0 <= std < math.inf:
        raise ConfigError(f"std of the model must be a float >= 0. Got {std!r} instead.")
    layer = nn.Linear(math.prod(input_shape), num_outputs)
    if std > 0:
        nn.init.normal_(layer.weight, std=std)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)


@register_model("mlp")
def mlp(input_shape: tuple[int, ...], num_outputs: int, *, hidden: int = 200) -> nn.Module:
    """One hidden layer with ReLU (784-200-10 in the IFCA paper)."""
    _at_least_one("hidden", hidden)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(input_shape), hidden), nn.ReLU(), nn.Linear(hidden, num_outputs)
    )


@register_model("linear")
def linear(input_shape: tuple[int, ...], num_outputs: int, *, hidden: int = 200) -> nn.Module:
    """Two linear layers without an activation between them (784-200-10 in the CORNFLQS paper)."""
    _at_least_one("hidden", hidden)
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), hidden), nn.Linear(hidden, num_outputs))


@register_model("lenet")
def lenet(input_shape: tuple[int, ...], num_outputs: int, *, pool: str = "max") -> nn.Module:
    """LeNet-5 with ReLU: two convolutions with pooling "max" or "avg", three dense layers."""
    channels, height, width = _image(input_shape, "lenet", smallest=12)
    _one_of("pool", pool, tuple(_POOLS))
    left = ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=2),
        nn.ReLU(),
        _POOLS[pool](2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        _POOLS[pool](2),
        nn.Flatten(),
        nn.Linear(16 * left, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_outputs),
    )


@register_model("leaf-cnn")
def leaf_cnn(input_shape: tuple[int, ...], num_outputs: int, *, hidden: int = 2048) -> nn.Module:
    """LEAF's network for FEMNIST: conv 32, conv 64, dense 2048."""
    channels, height, width = _image(input_shape, "leaf-cnn", smallest=4)
    _at_least_one("hidden", hidden)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), hidden),
        nn.ReLU(),
        nn.Linear(hidden, num_outputs),
    )


@register_model("celeba-cnn")
def celeba_cnn(input_shape: tuple[int, ...], num_outputs: int, *, norm: str = "batch") -> nn.Module:
    """LEAF's network for CelebA: four blocks of conv 32, norm, pool and ReLU, then one dense layer."""
    channels, height, width = _image(input_shape, "celeba-cnn", smallest=8)
    make_norm = _norm(norm)
    layers: list[nn.Module] = []
    for _ in range(4):
        # LEAF pools with padding, so a last odd row counts: 84 -> 42 -> 21 -> 11 -> 6.
        pool = nn.MaxPool2d(2, ceil_mode=True)
        layers += [nn.Conv2d(channels, 32, 3, padding=1), make_norm(32), pool, nn.ReLU()]
        channels, height, width = 32, math.ceil(height / 2), math.ceil(width / 2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * height * width, num_outputs))


@register_model("resnet18")
def resnet18(
    input_shape: tuple[int, ...], num_outputs: int, *, stem: str = "small", norm: str = "batch", width: int = 64
) -> nn.Module:
    """ResNet-18; stem "small" (3x3, for 32x32 images) or "imagenet" (7x7 and pooling)."""
    channels, _, _ = _image(input_shape, "resnet18", smallest=8)
    _one_of("stem", stem, _STEMS)
    _at_least_one("width", width)
    make_norm = _norm(norm)
    if stem == "small":
        layers: list[nn.Module] = [_conv(channels, width, 3), make_norm(width), nn.ReLU()]
    else:
        layers = [_conv(channels, width, 7, 2), make_norm(width), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    inputs = width
    for stage in range(4):
        outputs = width << stage
        layers.append(_BasicBlock(inputs, outputs, 1 if stage == 0 else 2, make_norm))
        layers.append(_BasicBlock(outputs, outputs, 1, make_norm))
        inputs = outputs
    module = nn.Sequential(*layers, _SpatialMean(), nn.Linear(inputs, num_outputs))
    return _init_convolutions(module)


class _BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, make_norm: MakeNorm) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _conv(inputs, outputs, 3, stride),
            make_norm(outputs),
            nn.ReLU(),
            _conv(outputs, outputs, 3),
            make_norm(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_conv(inputs, outputs, 1, stride), make_norm(outputs))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, H / stride, W / stride]."""
        out: Tensor = self.relu(self.residual(x) + self.shortcut(x))
        return out


# Table 2 of the MobileNetV2 paper: expansion t, channels c, repeats n, stride s.
_MOBILE_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


@register_model("mobilenetv2")
def mobilenetv2(
    input_shape: tuple[int, ...], num_outputs: int, *, stem: str = "small", norm: str = "batch", width: float = 1.0
) -> nn.Module:
    """MobileNetV2; stem "small" halves the image three times, "imagenet" five times; `width` multiplies widths."""
    channels, _, _ = _image(input_shape, "mobilenetv2", smallest=8)
    _one_of("stem", stem, _STEMS)
    if isinstance(width, bool) or not isinstance(width, int | float) or not 0 < width < math.inf:
        raise ConfigError(f"width of the model must be a number > 0. Got {width!r} instead.")
    make_norm = _norm(norm)
    inputs = _round_channels(32 * width)
    layers: list[nn.Module] = _conv_norm_relu(channels, inputs, 3, 1 if stem == "small" else 2, make_norm)
    for number, (expansion, base, repeats, first_stride) in enumerate(_MOBILE_STAGES):
        outputs = _round_channels(base * width)
        for repeat in range(repeats):
            # Small images skip the first two halvings: 32x32 would end as 1x1.
            stride = 1 if repeat or (stem == "small" and number == 1) else first_stride
            layers.append(_InvertedResidual(inputs, outputs, stride, expansion, make_norm))
            inputs = outputs
    last = _round_channels(1280 * max(1.0, width))
    layers += [*_conv_norm_relu(inputs, last, 1, 1, make_norm), _SpatialMean()]
    head = nn.Linear(last, num_outputs)
    nn.init.normal_(head.weight, 0.0, 0.01)
    nn.init.zeros_(head.bias)
    return _init_convolutions(nn.Sequential(*layers, head))


class _InvertedResidual(nn.Module):
    """Expansion, depthwise convolution and linear projection, with a shortcut if the shape does not change."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int, make_norm: MakeNorm) -> None:
        super().__init__()
        hidden = inputs * expansion
        widen = [] if expansion == 1 else _conv_norm_relu(inputs, hidden, 1, 1, make_norm)
        self.residual = nn.Sequential(
            *widen,
            *_conv_norm_relu(hidden, hidden, 3, stride, make_norm, groups=hidden),
            _conv(hidden, outputs, 1),
            make_norm(outputs),
        )
        self._has_shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, H / stride, W / stride]."""
        out: Tensor = self.residual(x)
        return x + out if self._has_shortcut else out


class _SpatialMean(nn.Module):
    """[B, C, H, W] -> [B, C], for images of any size."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """A convolution without bias: the norm that follows has one."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)


def _conv_norm_relu(
    inputs: int, outputs: int, kernel: int, stride: int, make_norm: MakeNorm, groups: int = 1
) -> list[nn.Module]:
    return [_conv(inputs, outputs, kernel, stride, groups), make_norm(outputs), nn.ReLU6()]


def _init_convolutions(module: nn.Module) -> nn.Module:
    """Kaiming initialization (He et al., 2015) with fan-out, as usual for both networks."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return module


def _round_channels(wanted: float) -> int:
    """The nearest multiple of 8 that is at least 90 % of the wanted width (the MobileNets' rule)."""
    rounded = max(8, int(wanted + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * wanted else rounded


def _norm(name: str) -> MakeNorm:
    _one_of("norm", name, tuple(_NORMS))
    return _NORMS[name]


def _one_of(field: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{field} of the model must be one of {', '.join(known)}. Got {value!r} instead.")


def _image(shape: tuple[int, ...], name: str, smallest: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise ModelError(f"model {name} takes images of at least {smallest}x{smallest}; samples have shape {shape}.")
    return shape[0], shape[1], shape[2]


def _at_least_one(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} of the model must be an int >= 1. Got {value!r} instead.")
