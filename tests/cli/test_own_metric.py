"""A metric that is registered in one place appears everywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from coterie.runs.metrics import METRICS, PERCENT, Floats, register_metric
from coterie.runs.reading import find_runs, read_run
from coterie.views.plots import picture_names
from coterie.views.report.payload import page_payload

from .conftest import TINY, Command


@pytest.fixture(autouse=True)
def below_half() -> Iterator[None]:
    with patch.dict(METRICS):

        @register_metric("below_half", "below 50 %", "share of clients with accuracy below 50 %", PERCENT, "low")
        def share(accuracy: Floats) -> float:
            return float((accuracy < 0.5).mean())

        yield


def test_it_is_in_the_records_and_the_printed_summary_of_a_run(command: Command):
    done = command("run", "-a", "fedavg", *TINY, "--name", "a")
    rows = [json.loads(line) for line in Path("runs/a/rounds.jsonl").read_text().splitlines()]
    with np.load("runs/a/clients.npz") as clients:
        assert [row["below_half"] for row in rows] == (clients["accuracy"] < 0.5).mean(1).tolist()
    value = rows[-1]["below_half"]
    assert value > 0
    assert json.loads(Path("runs/a/summary.json").read_text())["below_half"] == value
    line = next(line for line in done.out.splitlines() if "below 50 %" in line)
    assert line.split("│")[2].strip() == f"{100 * value:.2f}"


def test_it_is_in_the_table_the_list_and_the_report_of_several_runs(command: Command):
    done = command("compare", "-a", "fedavg", "-a", "fesem", "--seeds", 2, *TINY, "--name", "both")
    assert "below 50 %" in done.out
    rows = json.loads(Path("runs/both/table.json").read_text())
    assert f"{100 * rows[0]['below_half']['mean']:.2f} ±" in done.out
    assert "below_half.mean" in Path("runs/both/table.csv").read_text()
    assert "below 50 %" in command("list", "runs").out
    assert {"accuracy", "below_half"} <= command("list", "runs", "--json").json[0].keys()

    payload = page_payload([read_run(path) for _, path in find_runs(Path("runs"))], tsne=False)
    first = payload["runs"][0]
    assert len(first["curves"]["below_half"]) == 2
    assert first["metrics"][-1]["about"] == "share of clients with accuracy below 50 %"
    assert [name for name, _, _ in first["headline"]][:4] == ["accuracy", "5 worst clients", "F1", "ARI"]
    assert "below 50 %" in [name for name, _, _ in first["headline"]]
    place = [key for key, *_ in payload["compare"]["columns"]].index("below_half")
    assert [row["cells"][place][2] for row in payload["compare"]["rows"]] == [False, True]  # less is better
    assert "compare-below_half" in picture_names()


def test_it_is_explained(command: Command):
    assert "below 50 %: share of clients with accuracy below 50 %" in command("list", "metrics").out
    found = command("list", "metrics", "--json").json
    assert found[-1]["name"] == "below_half"
    assert len(found) == len(METRICS)
