"""`coterie bench`: how fast this machine is, against a plain loop."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.table import Table

from coterie.cli import run as flags_of
from coterie.cli.output import stderr, stdout
from coterie.engines.base import resolve_device
from coterie.errors import ConfigError, UnknownName


def bench(
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", "-w", help="mclr, mlp, lenet, leaf-cnn or resnet18; all by default."),
    ] = None,
    clients: flags_of.ClientsFlag = None,
    repeats: Annotated[str, typer.Option(help="Rounds of each way; medians are shown.")] = "5",
    device: flags_of.DeviceFlag = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A field of the engine: engine.plan=stacked, engine.precision=bf16."),
    ] = None,
    json_: flags_of.JsonFlag = False,
    quiet: flags_of.QuietFlag = False,
) -> None:
    """Time of a client's step: our engine beside a plain loop at its best number of threads, in turn.

    Both train the same clients on the same batches, and their mean models are compared (`difference`, relative to how
    far training moved them).
    """
    from coterie.runs.bench import Bench, machine, workloads
    from coterie.runs.experiment import apply_set

    where = resolve_device(device or "auto")
    known = workloads(where)
    settings: dict[str, Any] = apply_set({}, set_ or [])["engine"]
    count, number = flags_of.parse_int("repeats", repeats) or 0, flags_of.parse_int("clients", clients)
    if count < 1:
        raise ConfigError(f"--repeats must be an int >= 1. Got '{repeats}' instead.")
    if number is not None and number < 1:
        raise ConfigError(f"--clients must be an int >= 1. Got {number} instead.")
    for name in workload or []:
        if name not in known:
            raise UnknownName("workload", name, known)
    rows = []
    for name in workload or known:
        if not quiet and not json_:
            stderr().print(f"measuring {name}")
        work = known[name]
        if number is not None:
            work = replace(work, clients=number, plain_clients=min(number, work.plain_clients))
        rows.append(Bench(work, str(where), **settings).run(count))
    told = machine(where)
    if json_:
        print(json.dumps({"machine": told, "rows": rows}))
        return
    title = f"{told['gpu'] or told['processor']}, {told['threads']} threads, torch {told['torch']}, {told['date']}"
    table = Table(title=f"microseconds of a client-step, median of {count}; {title}", title_justify="left")
    columns = "workload, clients, batch, plain loop, coterie, ratio, CPU-time ratio, difference, way"
    for column in columns.split(", "):
        table.add_column(column, justify="left" if column in ("workload", "way") else "right")
    for row in rows:
        spent = row["plain_cpu_us"] / max(row["ours_cpu_us"], 1e-9)
        numbers = (f"{row['plain_us']:.1f}", f"{row['ours_us']:.2f}", f"{row['ratio']:.1f}x", f"{spent:.1f}x")
        plan = row["plan"]
        way = f"{plan['plan']}, {plan['precision']}"
        table.add_row(
            row["workload"], str(row["clients"]), str(row["batch"]), *numbers, f"{row['difference']:.0e}", way
        )
    stdout().print(table)
