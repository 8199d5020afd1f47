"""The benchmark itself: engine and plain loop do the same work, and the table says so."""

from __future__ import annotations

import json

import pytest

from coterie.runs import bench
from coterie.runs.bench import Bench, Workload

SMALL = {
    "mclr": Workload("mclr", (1, 4, 4), 5, 2, 6, 3),
    "lenet": Workload("lenet", (1, 12, 12), 4, 2, 3, 2, momentum=0.0),
}


@pytest.mark.parametrize("name", SMALL)
def test_engine_and_plain_loop_train_the_same_models(name):
    made = Bench(SMALL[name], "cpu", precision="float64")
    assert made.difference() < 1e-4  # the plain loop is in float32
    row = made.run(repeats=1)
    assert row["ratio"] == pytest.approx(row["plain_us"] / row["ours_us"], rel=0.1)
    assert row["plan"]["plan"] in ("native", "layers", "layers+workers", "stacked", "loop")


def test_a_wrong_plain_loop_would_show():
    made = Bench(SMALL["mclr"], "cpu")
    made.orders = lambda count: made.federation.train.sizes.new_tensor([range(10)] * count)  # other batches
    made._plain = made._make_plain()
    assert made.difference() > 1e-3


def test_the_command_prints_a_table_or_json(monkeypatch, capsys):
    from coterie.cli.bench import bench as command

    monkeypatch.setattr(bench, "CPU_WORKLOADS", SMALL)
    command(workload=["mclr"], repeats=1, device="cpu", json_=True)
    found = json.loads(capsys.readouterr().out)
    assert [row["workload"] for row in found["rows"]] == ["mclr"]
    assert found["machine"]["threads"] >= 1
    command(clients=4, repeats=1, device="cpu", set_=["engine.plan=stacked"], quiet=True)
    shown = capsys.readouterr().out
    assert "mclr" in shown
    assert "lenet" in shown
    assert "stacked, float32" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--repeats", "0"], "--repeats must be an int >= 1. Got '0' instead."),
        (["--clients", "0"], "--clients must be an int >= 1. Got '0' instead."),
        (["--workload", "mcrl"], "Did you mean 'mclr'"),
        (["--set", "work.lr=1"], "--set takes fields of engine here. Got 'work.lr=1' instead."),
    ],
)
def test_wrong_input_is_an_error_of_one_sentence(arguments, said, capsys):
    from coterie.cli.main import main

    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--device", "cpu", *arguments])
    assert said in capsys.readouterr().err.replace("\n", " ")
