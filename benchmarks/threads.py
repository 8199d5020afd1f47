"""One thread of torch or all of them, for clients that are trained one at a time (plan `loop`).

    OMP_WAIT_POLICY=passive python benchmarks/threads.py        # a line of JSON per network and batch

Microseconds per client step, wall and processor time, the least of several measurements in turn. It shows from which
size of a step on further threads pay (`_SMALL_STEP` in `engines/in_process.py`).
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from coterie.runs.bench import Bench, Workload

WORKLOADS = (
    Workload("mlp", (1, 8, 8), 20, 6, 8, 4, (("hidden", 64),)),
    Workload("mclr", (1, 28, 28), 20, 6, 8, 4),
    Workload("mlp", (1, 28, 28), 20, 6, 8, 4),
    Workload("mlp", (1, 28, 28), 100, 6, 8, 4),
    Workload("lenet", (1, 28, 28), 20, 6, 4, 4),
    Workload("lenet", (1, 28, 28), 100, 3, 4, 4),
    Workload("leaf-cnn", (1, 28, 28), 20, 3, 2, 2),
    Workload("resnet18", (3, 32, 32), 20, 2, 1, 1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    threads = torch.get_num_threads()
    for work in WORKLOADS:
        made = Bench(work, "cpu", plan="loop")
        made.engine.plan.threads = None  # type: ignore[attr-defined]  # the number that is set here
        each = made.engine.network.multiplications(made.federation.samples(0)[0][:1])  # type: ignore[attr-defined]
        row = {"model": work.model, "batch": work.batch, "million_multiplications": each * work.batch / 1e6}
        for count in dict.fromkeys((1, threads)):
            torch.set_num_threads(count)
            spent = [timed(made, work) for _ in range(options.repeats)]
            wall, cpu = (round(min(column)) for column in zip(*spent, strict=True))
            row |= {f"wall_us_{count}": wall, f"cpu_us_{count}": cpu}
        print(json.dumps(row), flush=True)


def timed(made: Bench, work: Workload) -> tuple[float, float]:
    """Microseconds of one client step: wall and processor time."""
    began, before = time.perf_counter(), time.process_time()
    made.ours()
    steps = work.clients * work.steps
    return (time.perf_counter() - began) / steps * 1e6, (time.process_time() - before) / steps * 1e6


if __name__ == "__main__":
    main()
