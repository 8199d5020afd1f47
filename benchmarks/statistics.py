"""Do the averaged statistics of BatchNorm fit the averaged weights? Accuracy of a finished run, with both.

    coterie run -a fedavg --dataset swapped-rotated-cifar10 --set scenario.alpha=10 --model mobilenetv2 --rounds 6
    python benchmarks/statistics.py runs/swapped-rotated-cifar10-fedavg-s0 [--clients 4] [--samples 500]

The server averages weights and running statistics. An average of different networks has smaller activations than each
of them, so averaged statistics may not fit it. For some clients, evenly spread over the list, the personal model
classifies their test samples twice: by its running statistics, and by the statistics of the batch that it classifies.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn

from coterie.runs.opening import open_run

BATCH = 250


def accuracy(model: nn.Module, x: Tensor, y: Tensor, by_batch: bool) -> float:
    """Share of right answers, in percent; `by_batch`: by the statistics of each batch."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    for layer in model.modules():
        if hasattr(layer, "running_mean"):
            layer.train(by_batch)
    with torch.no_grad():
        hits = sum(int((model(x[i : i + BATCH]).argmax(1) == y[i : i + BATCH]).sum()) for i in range(0, len(x), BATCH))
    model.load_state_dict(before)  # a batch also moves the running statistics
    return 100 * hits / len(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--samples", type=int, default=500, help="of each client, at most")
    options = parser.parse_args()
    result = open_run(options.run)
    federation = result.federation
    chosen = torch.linspace(0, len(federation) - 1, options.clients).long().unique().tolist()
    found: dict[bool, list[float]] = {False: [], True: []}
    for client in chosen:
        x, y = federation.samples(client, "test")
        take = torch.randperm(len(x), generator=torch.Generator().manual_seed(client))[: options.samples]
        for by_batch, rows in found.items():
            rows.append(accuracy(result.personal_model(client), x[take].float(), y[take], by_batch))
    means = {by_batch: round(sum(rows) / len(rows), 1) for by_batch, rows in found.items()}
    print(json.dumps({"clients": chosen, "running statistics": means[False], "of the batch": means[True]}))


if __name__ == "__main__":
    main()
