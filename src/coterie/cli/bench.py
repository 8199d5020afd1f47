"""`coterie bench`: how fast this machine is, against a plain loop."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer

from coterie.cli.flags import JsonFlag, QuietFlag, takes, whole
from coterie.cli.output import say, stdout, table_of
from coterie.errors import UnknownName
from coterie.runs.settings import RunSettings, Tables


@takes((RunSettings, "device"), settable=("engine",), config=False)
def bench(
    *,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload", "-w", help="mclr, mlp, lenet, leaf-cnn, resnet18 or mobilenetv2; repeatable, by default all."
        ),
    ] = None,
    clients: Annotated[int | None, whole("--clients", "number of clients", "the workload's", ge=1)] = None,
    repeats: Annotated[int, whole("--repeats", "rounds of each; medians are shown", ge=1)] = 5,
    tables: Tables,
    json_: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Measure the time per client step, against a plain loop.

    The loop has its best number of threads. Both train the same clients on the same batches, and their mean models are
    compared (`difference`, relative to how far training moved them). `make bench-peers` measures other simulators.
    """
    from coterie.engines.base import resolve_device
    from coterie.runs.bench import Bench, machine, workloads

    where = resolve_device(tables["run"].get("device", RunSettings.device))
    known = workloads(where)
    for name in workload or []:
        if name not in known:
            raise UnknownName("workload", name, known)
    rows = []
    for name in workload or known:
        say(f"measuring {name}", quiet or json_)
        work = known[name]
        if clients is not None:
            work = replace(work, clients=clients, plain_clients=min(clients, work.plain_clients))
        rows.append(Bench(work, str(where), **tables["engine"]).run(repeats))
    host = machine(where)
    if json_:
        print(json.dumps({"machine": host, "rows": rows}))
        return
    title = f"{host['gpu'] or host['processor']}, {host['threads']} threads, torch {host['torch']}, {host['date']}"
    heads = ("workload", "clients", "batch", "plain loop", "coterie", "ratio", "CPU-time ratio", "difference", "plan")
    cells = []
    for row in rows:
        cpu = row["plain_cpu_us"] / max(row["ours_cpu_us"], 1e-9)
        times = f"{row['plain_us']:.1f}", f"{row['ours_us']:.2f}", f"{row['ratio']:.1f}x", f"{cpu:.1f}x"
        plan = f"{row['plan']['plan']}, {row['plan']['precision']}"
        sizes = str(row["clients"]), str(row["batch"])
        cells.append([row["workload"], *sizes, *times, f"{row['difference']:.0e}", plan])
    title = f"microseconds per client step, median of {repeats}; {title}"
    stdout().print(table_of(title, heads, cells, text=("workload", "plan")))
