"""`coterie bench`: how fast this machine is, against a plain loop and other simulators."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from coterie.cli.flags import JsonFlag, QuietFlag, takes, whole
from coterie.cli.output import say, stdout
from coterie.errors import UnknownName
from coterie.runs.settings import RunSettings, Tables


@takes((RunSettings, "device"), settable=("engine",), config=False)
def bench(
    *,
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", "-w", help="mclr, mlp, lenet, leaf-cnn or resnet18; repeatable, by default all."),
    ] = None,
    clients: Annotated[int | None, whole("--clients", "number of clients", "the workload's", ge=1)] = None,
    repeats: Annotated[int, whole("--repeats", "rounds of each; medians are shown", ge=1)] = 5,
    tables: Tables,
    json_: JsonFlag = False,
    quiet: QuietFlag = False,
    peers: Annotated[
        str,
        typer.Option(help="Simulators to measure as well: pfl-research,fedlab,flower; auto: those installed; none."),
    ] = "auto",
) -> None:
    """Measure the time per client step, against a plain loop.

    The loop has its best number of threads. Both train the same clients on the same batches, and their mean models are
    compared (`difference`, relative to how far training moved them). Other simulators that are installed train the same
    round (`make bench-peers`).
    """
    from coterie.engines.base import resolve_device
    from coterie.peers import PEERS, choose
    from coterie.runs.bench import Bench, machine, workloads

    where = resolve_device(tables["run"].get("device", RunSettings.device))
    known = workloads(where)
    for name in workload or []:
        if name not in known:
            raise UnknownName("workload", name, known)
    beside = choose(peers)
    rows = []
    for name in workload or known:
        say(f"measuring {name}", quiet or json_)
        work = known[name]
        if clients is not None:
            work = replace(work, clients=clients, plain_clients=min(clients, work.plain_clients))
        rows.append(Bench(work, str(where), **tables["engine"]).run(repeats, {peer: PEERS[peer]() for peer in beside}))
    told = machine(where)
    if json_:
        print(json.dumps({"machine": told, "rows": rows}))
        return
    title = f"{told['gpu'] or told['processor']}, {told['threads']} threads, torch {told['torch']}, {told['date']}"
    table = Table(title=f"microseconds per client step, median of {repeats}; {title}", title_justify="left")
    for column in (
        "workload",
        "clients",
        "batch",
        "plain loop",
        "coterie",
        "ratio",
        "CPU-time ratio",
        "difference",
        "way",
    ):
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
    if beside:
        stdout().print(_others(rows))


def _others(rows: list[dict[str, Any]]) -> Table:
    """All simulators, a line each: ratios are to the plain loop, differences of the others to our mean model."""
    table = Table(title="the same rounds by other simulators, microseconds of a client-step", title_justify="left")
    for column in ("workload", "simulator", "wall", "CPU", "ratio", "CPU-time ratio", "difference", "remark"):
        table.add_column(column, justify="left" if column in ("workload", "simulator", "remark") else "right")
    for row in rows:
        name, plain, plain_cpu = row["workload"], row["plain_us"], row["plain_cpu_us"]
        threads = f"{row['plain_threads']} thread" + "s" * (row["plain_threads"] > 1)
        table.add_row(name, "plain loop", f"{plain:.0f}", f"{plain_cpu:.0f}", "1.00x", "1.00x", "-", threads)
        ours = (row["ours_us"], row["ours_cpu_us"], row["ratio"], plain_cpu / max(row["ours_cpu_us"], 1e-9))
        table.add_row(name, "coterie", *_numbers(*ours), f"{row['difference']:.0e}", row["plan"]["plan"])
        for peer in row["peers"]:
            spent = plain_cpu / max(peer["cpu_us"], 1e-9) if peer["cpu_us"] is not None else None
            numbers = _numbers(peer["us"], peer["cpu_us"], peer["ratio"], spent)
            difference = "-" if peer["difference"] is None else f"{peer['difference']:.0e}"
            told = peer["error"] or peer["remark"]
            table.add_row(name, f"{peer['peer']} {peer['version']}".strip(), *numbers, difference, escape(told))
    return table


def _numbers(wall: float | None, cpu: float | None, ratio: float | None, spent: float | None) -> list[str]:
    times = ["-" if value is None else f"{value:.0f}" for value in (wall, cpu)]
    return times + ["-" if value is None else f"{value:.2f}x" for value in (ratio, spent)]
