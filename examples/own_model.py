"""Your own network: any nn.Module works unchanged, including BatchNorm and dropout.

The same network from the command line: `coterie run --model examples.own_model:network`.
"""

from __future__ import annotations

from torch import nn

import coterie


def network(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """A small convolutional network. A callable without arguments works as well."""
    channels, height, width = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(8 * height * width, num_outputs),
    )


if __name__ == "__main__":
    result = coterie.run("fesem", "rotated-digits", network, rounds=5)
    print(f"accuracy {result.summary['accuracy']['macro']:.4f}, clusters {result.summary['cluster_sizes']}")
    print(result.personal_model("r090-000"))
