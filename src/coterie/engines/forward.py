"""Outputs of models on the server, for methods that compare predictions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from coterie.engines.kernels.folded import FoldedKernel
from coterie.engines.kernels.layers import LayerKernel
from coterie.engines.kernels.native import NativeKernel, NotNative
from coterie.engines.kernels.plain import as_fast_images
from coterie.nets.flat import Network, cross_entropy
from coterie.nets.sequences import unfused
from coterie.randomness import Rng

_FULL = 2_000_000_000  # multiplications of one model that fill a GPU
_STREAMS = 8  # for the convolutions of different models on a GPU

Outputs = Callable[[Tensor, Tensor], Tensor]
"""Outputs [c, n, L] of models [c, P] for shared inputs [n, ...]: a `Forward`, or `Block.outputs`."""


class Forward:
    """Outputs of a stack of models in eval mode, stacked where the network allows it.

    This is tested once on two models; `reason` says why not. The network gets a copy of the inputs, because it may
    change them in place.
    """

    def __init__(
        self,
        network: Network,
        input_shape: Sequence[int],
        *,
        stacked: bool | None = None,
        integers: bool = False,  # whether samples are integers, such as token ids
        low: bool = False,  # whether products may be computed in bfloat16
    ) -> None:
        self.network, self._integers, self._low = network, integers, low
        self._own = unfused()(torch.func.vmap(network, in_dims=(0, 0)))
        self._same = unfused()(torch.func.vmap(network, in_dims=(0, None)))
        self.differentiable = True  # whether outputs have a gradient with respect to the inputs
        self._folded = self._as_one_batch(tuple(input_shape)) if stacked is None else None
        unknown = stacked is None and self._folded is None
        self.reason = self._why_not_stacked(tuple(input_shape)) if unknown else None
        self.stacked = self.reason is None if stacked is None else stacked
        self._quick = self._hand_written(tuple(input_shape)) if stacked is None and self.stacked else None
        self._per_sample = self._multiplications(tuple(input_shape)) if network.device.type == "cuda" else 0

    @property
    def compiled(self) -> NativeKernel | None:
        """The compiled program, if it computes this network; it takes any number of samples at once."""
        return self._quick if isinstance(self._quick, NativeKernel) else None

    @property
    def is_light(self) -> bool:
        """Whether any number of samples may be passed at once: activations are not kept."""
        return self.compiled is not None

    def _hand_written(self, input_shape: tuple[int, ...]) -> Any:
        """A hand-written kernel for a plain network; outputs do not depend on the loss."""
        if self.network.device.type == "cpu":
            with contextlib.suppress(NotNative):
                compiled = NativeKernel.of(self.network, cross_entropy, input_shape, torch.get_num_threads())
                if compiled is not None:
                    return compiled
        return LayerKernel.of(self.network, cross_entropy)

    def __call__(self, models: Tensor, x: Tensor) -> Tensor:
        """Models [c, P], shared inputs [n, ...] -> [c, n, L]."""
        if self._quick is not None and len(models) > 1 and not (models.requires_grad or x.requires_grad):
            with torch.no_grad():
                quick: Tensor = self._quick.outputs(models, x.expand(len(models), *x.shape))
            return quick
        if self._folded is not None:
            return self._folded.outputs(models, x.expand(len(models), *x.shape))
        if self.stacked and len(models) > 1:
            found: Tensor = self._same(self.network.layout.unpack(models), x.clone())
            return found
        return self._one_by_one(models, x.expand(len(models), *x.shape))

    def each(self, models: Tensor, x: Tensor) -> Tensor:
        """Models [c, P], own inputs for each [c, n, ...] -> [c, n, L]."""
        if self.compiled is not None and not (models.requires_grad or x.requires_grad):
            return self.compiled.outputs(models, x)
        if self._folded is not None:
            return self._folded.outputs(models, x)
        if self.stacked and len(models) > 1 and not self._is_slow_stacked(x):
            found: Tensor = self._own(self.network.layout.unpack(models), x.clone())
            return found
        return self._one_by_one(models, x)

    def samples_at_once(self, models: Tensor, input_shape: Sequence[int]) -> int:
        """How many samples (over all models) to differentiate at once.

        On a CPU what fits into the caches, but at least the size of the models, which are read again for every piece.
        On a GPU a few GB.
        """
        one = torch.zeros(1, *input_shape, dtype=models.dtype, device=models.device)
        least = 4 << 30 if models.is_cuda else 32 << 20
        budget = max(least, 2 * models.numel() * models.element_size())
        return max(1, budget // (self.network.activation_size(one) * models.element_size()))

    def _is_slow_stacked(self, x: Tensor) -> bool:
        """Whether gradients for inputs [c, n, ...] are faster model by model: if one model's samples fill a GPU.

        Stacked convolutions are grouped ones, which cuDNN computes much more slowly than those of one model.
        """
        return x.requires_grad and x.shape[1] * self._per_sample > _FULL

    def _multiplications(self, shape: tuple[int, ...]) -> int:
        """Multiplications per sample; 0 if unknown."""
        one = torch.zeros(1, *shape, dtype=self.network.dtype, device=self.network.device)
        return self.network.multiplications(one.long() if self._integers else one) or 0

    def _one_by_one(self, models: Tensor, x: Tensor) -> Tensor:
        unpack = self.network.layout.unpack
        rows = [as_fast_images(x[i].clone()) for i in range(len(models))]
        return torch.stack([self.network(unpack(models[i]), rows[i]) for i in range(len(models))])

    def _as_one_batch(self, shape: tuple[int, ...]) -> FoldedKernel | None:
        """On a GPU, the kernel that computes the samples of all models as one batch, if it is right."""
        network = self.network
        plain = LayerKernel.of(network, cross_entropy) is not None  # these have a kernel that is faster
        if network.device.type != "cuda" or self._integers or plain:
            return None
        kernel = FoldedKernel.of(network, cross_entropy, streams=_STREAMS)
        if kernel is None or self._compared(shape, kernel.outputs) is not None:
            return None
        return FoldedKernel.of(network, cross_entropy, low=True, streams=_STREAMS) if self._low else kernel

    def _why_not_stacked(self, shape: tuple[int, ...]) -> str | None:
        """Why models cannot be stacked; None if they can."""
        unpack = self.network.layout.unpack
        return self._compared(
            shape,
            lambda models, x: self._own(unpack(models), x.clone()),
            lambda models, x: self._same(unpack(models), x.clone()),
        )

    def _compared(self, shape: tuple[int, ...], each: Outputs, same: Outputs | None = None) -> str | None:
        """Compare outputs and gradients of two models on three samples with plain ones; None if they agree."""
        network = self.network
        start = network.initial.to(network.device, network.dtype)
        models = torch.stack([start, 0.9 * start])
        x = Rng.seed(0).normal(2, 3, *shape).to(network.device, network.dtype)
        x = torch.zeros_like(x, dtype=torch.int64) if self._integers else x

        def run(forward: Outputs) -> list[Tensor]:
            leaf = x.clone().requires_grad_(not self._integers)
            with torch.enable_grad():
                outputs = forward(models, leaf)
            if not outputs.requires_grad:
                return [outputs]
            return [outputs.detach(), *torch.autograd.grad(outputs.square().sum(), [leaf])]

        # Without TF32: a deep network amplifies its rounding beyond many real errors.
        with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
            expected = run(self._one_by_one)
            self.differentiable = len(expected) > 1
            try:
                found = run(each)
                if same is not None:
                    with torch.no_grad():
                        expected.append(self._one_by_one(models, x[:1].expand_as(x)))
                    found.append(same(models, x[0]))
            except Exception as error:  # vmap raises many kinds
                return (str(error).splitlines() or [type(error).__name__])[0][:160]
        tolerance = 1e-2 if network.dtype == torch.float32 else 1e-8
        if all((one - other).norm() <= tolerance * one.norm() for one, other in zip(expected, found, strict=True)):
            return None
        return "stacked outputs differ from plain ones"
