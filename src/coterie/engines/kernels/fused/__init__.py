"""Fused operations of c models on a GPU, in Triton: BatchNorm with its activation, and depthwise convolutions.

Images are channels-last, and clients are folded into the batch: [c * B, C, H, W], so a client is a block of rows
[B * H * W, C]. Each kernel computes all clients. Sums are in float32 and in a fixed order, so results are repeatable.

This package needs Triton, which torch's CUDA builds bring along; `coterie.engines.kernels.folded` imports it only then.
"""

from coterie.engines.kernels.fused.convolutions import depthwise
from coterie.engines.kernels.fused.norms import NONE, RELU, RELU6, norm_in_training, norm_in_use

__all__ = ["NONE", "RELU", "RELU6", "depthwise", "norm_in_training", "norm_in_use"]
