"""`coterie sweep`: a grid of fields and seeds in one table."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from .conftest import TINY, Command


def test_a_row_for_each_combination_over_the_seeds(command: Command):
    grid = ("-g", "algorithm.prox=0,0.5", "-g", "work.lr=0.1,0.2")
    done = command("sweep", "-a", "fesem", *grid, "--seeds", 2, *TINY, "--json")
    assert done.code == 0
    rows = done.json["rows"]
    assert [row["labels"] for row in rows] == [
        {"method": "fesem", "prox": p, "lr": lr} for p in ("0", "0.5") for lr in ("0.1", "0.2")
    ]
    assert all(row["seeds"] == 2 for row in rows)
    root = Path(done.json["path"])
    assert len(list(root.glob("*/summary.json"))) == 8
    assert json.loads((root / "table.json").read_text()) == rows
    with (root / "table.csv").open() as file:
        flat = list(csv.DictReader(file))
    assert len(flat) == 4
    assert float(flat[0]["accuracy.macro.mean"]) == pytest.approx(rows[0]["accuracy"]["macro"]["mean"])
    assert (flat[3]["prox"], flat[3]["lr"]) == ("0.5", "0.2")


def test_a_method_without_the_field_has_one_row(command: Command):
    done = command("sweep", "-g", "algorithm.prox=0,0.5", "-a", "fesem", "-a", "fedavg", *TINY, "--json")
    assert [row["labels"] for row in done.json["rows"]] == [
        {"method": "fesem", "prox": "0"},
        {"method": "fedavg"},
        {"method": "fesem", "prox": "0.5"},
    ]


def test_fields_of_the_data_make_new_federations(command: Command):
    done = command("sweep", "-g", "scenario.groups=2,4", "-a", "fedavg", *TINY, "--json")
    root = Path(done.json["path"])
    digests = {json.loads(path.read_text())["digest"] for path in root.glob("*/summary.json")}
    assert len(digests) == 2


def test_the_table_shows_the_swept_field(command: Command):
    done = command("sweep", "-g", "run.participation=0.5,1", *TINY)
    assert "participation" in done.out
    assert "gradients" in done.out
    assert done.code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "sweep needs a --grid"),
        (("-g", "prox"), "--grid takes TABLE.FIELD=A,B,C"),
        (("-g", "algorithm.prox="), "--grid takes TABLE.FIELD=A,B,C"),
        (("-g", "algorithm.poxr=1,2"), "Did you mean"),
        (("-g", "algorithm.prox=1,-2"), "prox"),
    ],
)
def test_what_cannot_be_swept_is_said_in_a_sentence(command: Command, arguments, said):
    done = command("sweep", "-a", "fesem", *arguments, *TINY)
    assert done.code == 2
    assert said in done.err
    assert not list(Path().glob("runs/*"))


def test_seeds_and_processes_as_in_compare(command: Command):
    base = ("sweep", "-g", "work.lr=0.1,0.2", *TINY, "--set", "engine.plan=layers", "--seeds", "3-4", "--json")
    alone, together = (command(*base, "--jobs", jobs).json["rows"] for jobs in (1, 2))
    assert [row["seeds"] for row in alone] == [2, 2]
    assert {path.name for path in Path("runs/sweep-rotated-digits").glob("*/")} == {
        *(f"coterie-lr={lr}-s{seed}" for lr in ("0.1", "0.2") for seed in (3, 4))
    }
    assert [{**row, "seconds": 0} for row in together] == [{**row, "seconds": 0} for row in alone]
    assert "Got '4-3' instead" in command("sweep", "-g", "work.lr=0.1,0.2", *TINY, "--seeds", "4-3").error
