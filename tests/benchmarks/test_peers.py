"""The script that measures other simulators, without one installed: their rows, and what a failing one does."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from coterie.runs import bench
from coterie.runs.bench import Bench, Workload

SMALL = Workload("mclr", (1, 4, 4), 5, 2, 6, 3)
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "peers.py"


@pytest.fixture(scope="module")
def peers():
    spec = importlib.util.spec_from_file_location("peers", SCRIPT)
    sys.modules["peers"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["peers"]


class Fake:
    """Trains by the loop that peers are offered; `wrong` is where it fails."""

    packages, remark, cpu = ("pytest",), "in this process", staticmethod(time.process_time)

    def __init__(self, wrong: str = "") -> None:
        self.wrong, self.rounds, self.stopped = wrong, 0, 0

    @classmethod
    def is_installed(cls):
        return True

    def start(self, work):
        self._fail("start")
        self.work = work

    def round(self):
        self.rounds += 1
        self._fail(f"round {self.rounds}")
        module = self.work.module()
        models = []
        for x, y in self.work.data:
            module.load_state_dict(self.work.start)
            self.work.train(module, x, y)
            models.append({name: value.detach().clone() for name, value in module.named_parameters()})
        self.mean = {name: torch.stack([model[name] for model in models]).mean(0) for name in models[0]}

    def model(self):
        return {name: value + (self.wrong == "model") for name, value in self.mean.items()}

    def stop(self):
        self.stopped += 1
        self._fail("stop")

    def _fail(self, where):
        if self.wrong == where:
            raise ZeroDivisionError(f"in {where}\nand a long story")


def test_installed_looks_without_importing(peers):
    for peer in peers.PEERS.values():
        assert peer.is_installed() in (True, False)
    assert not {"pfl", "fedlab", "torchvision"} & set(sys.modules)


@pytest.mark.parametrize("wrong", ["", "stop"])
def test_a_peer_that_does_the_same_has_our_model(peers, wrong):
    fake = Fake(wrong)
    plain, ours, row = peers.rows_of(Bench(SMALL, "cpu"), {"fake": fake}, 2)
    assert fake.rounds == 3
    assert fake.stopped == 1
    assert row["remark"] == "in this process"
    assert row["difference"] < 1e-4
    assert row["cpu_us"] > 0
    assert row["ratio"] == pytest.approx(plain["us"] / row["us"])
    assert (plain["ratio"], ours["simulator"]) == (1.0, "coterie")


def test_a_peer_that_does_something_else_shows(peers):
    assert peers.rows_of(Bench(SMALL, "cpu"), {"fake": Fake("model")}, 1)[2]["difference"] > 1


@pytest.mark.parametrize(("where", "rounds"), [("start", 0), ("round 1", 1), ("round 2", 2)])
def test_a_peer_that_fails_is_a_row_with_the_reason(peers, where, rounds):
    fake = Fake(where)
    plain, _, row = peers.rows_of(Bench(SMALL, "cpu"), {"fake": fake}, 2)
    assert row["remark"] == f"ZeroDivisionError: in {where}"
    assert "us" not in row
    assert (fake.rounds, fake.stopped) == (rounds, 1)  # it is not asked again
    assert plain["us"] > 0


def test_a_peer_is_stopped_when_the_benchmark_is_interrupted(peers, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    made, fake = Bench(SMALL, "cpu"), Fake()
    monkeypatch.setattr(made, "timed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        peers.rows_of(made, {"fake": fake}, 1)
    assert fake.stopped == 1


def test_the_script_prints_a_table(peers, monkeypatch, capsys):
    broken = type("Broken", (Fake,), {"__init__": lambda self: Fake.__init__(self, "start")})
    monkeypatch.setattr(bench, "CPU_WORKLOADS", {"mclr": SMALL})
    monkeypatch.setattr(peers, "PEERS", {"fake": Fake, "broken": broken})
    peers.main(["--repeats", "1", "--device", "cpu", "--clients", "4"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[1] for line in lines[4:]] == ["plain loop", "coterie", "fake", "broken"]
    assert lines[-1] == "| mclr | broken | - | - | - | - | - | ZeroDivisionError: in start |"


def test_time_of_a_process_and_those_below_it(peers, tmp_path):
    def process(pid, parent, *ticks):
        (tmp_path / str(pid)).mkdir()
        fields = ["S", parent, *[0] * 9, *ticks, 0, 0]
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a ) name) {' '.join(map(str, fields))}")

    process(10, 1, 100, 20, 3, 0)
    process(11, 10, 5, 0, 0, 0)
    process(12, 11, 0, 7, 0, 0)
    process(13, 1, 1000, 0, 0, 0)  # somebody else's
    (tmp_path / "14").mkdir()  # ended meanwhile
    (tmp_path / "self").mkdir()
    assert peers.tree_seconds(10, tmp_path) == pytest.approx(135 / os.sysconf("SC_CLK_TCK"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pfl-research", "fedlab", "flower"])
def test_an_installed_peer_trains_our_round(peers, name):
    if not peers.PEERS[name].is_installed():
        pytest.skip(f"{name} is not installed")
    row = peers.rows_of(Bench(SMALL, "cpu"), {name: peers.PEERS[name]()}, 1)[2]
    assert row["remark"] == peers.PEERS[name].remark
    assert row["difference"] < 1e-4
