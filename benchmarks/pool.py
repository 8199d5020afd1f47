"""Runs many cases in parallel: one process with one thread each; prints rows as they finish."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


def run_all(work: Callable[..., Row], cases: Sequence[tuple[Any, ...]], jobs: int, out: str = "") -> list[Row]:
    """Call `work(*case)` for every case; return the rows in this order, and append them to `out` as JSON lines."""
    context = multiprocessing.get_context("spawn")
    rows: dict[int, Row] = {}
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        places = {pool.submit(work, *case): place for place, case in enumerate(cases)}
        for done in as_completed(places):
            row = done.result()
            rows[places[done]] = row
            print(json.dumps(row), flush=True)
            if out:
                with Path(out).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    return [rows[place] for place in sorted(rows)]
