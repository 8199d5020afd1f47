"""Your own data: one pair of tensors per client. The clients here are hospitals that measure with opposite signs.

A client's data may also be a torch Dataset, a pandas table and more, and all of it may come from a file:
`coterie run --dataset hospitals.csv`. See docs/howto/data.md.
"""

from __future__ import annotations

import torch

import coterie
from coterie import SGD, Federation, FeSEM


def hospitals(count: int = 12, seed: int = 0) -> Federation:
    """Half of the hospitals measure with the opposite sign, so no single model fits them all."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(5, generator=generator)
    clients, groups = {}, {}
    for number in range(count):
        sign = 1 if number % 2 == 0 else -1
        x = torch.randn(80 + 10 * number, 5, generator=generator)
        y = (sign * x @ weights > 0).long()
        clients[f"hospital-{number}"] = (x, y)
        groups[f"hospital-{number}"] = number % 2
    return Federation.from_clients(clients, name="hospitals", groups=groups)


if __name__ == "__main__":
    result = coterie.run(FeSEM(num_clusters=2), hospitals(), "mclr", rounds=10, work=SGD(lr=0.5, batch_size=16))
    print(f"accuracy {result.summary['accuracy']['macro']:.4f}, ARI {result.summary['ari']:.2f}")
    print(result.clusters)
