"""Other simulators in the benchmark, without one installed: who is there, their rows, and what a failing one does."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time

import pytest
import torch

from coterie import peers
from coterie.peers import PEERS, Peer, choose
from coterie.peers.fedlab import _quiet
from coterie.peers.flower import tree_seconds
from coterie.runs import bench
from coterie.runs.bench import Bench, Workload

SMALL = {"mclr": Workload("mclr", (1, 4, 4), 5, 2, 6, 3)}


class Fake(Peer):
    """Trains by the loop that peers are offered; `wrong` is where it fails."""

    name = "fake"
    packages = ("json",)
    distribution = "no-such-distribution"
    remark = "in [this] process"

    def __init__(self, wrong: str = "") -> None:
        self.wrong, self.rounds, self.stopped = wrong, 0, 0

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
        if self.wrong == "silent":
            return None
        return {name: value + (self.wrong == "model") for name, value in self.mean.items()}

    def stop(self):
        self.stopped += 1
        self._fail("stop")

    def _fail(self, where):
        if self.wrong == where:
            raise ZeroDivisionError(f"in {where}\nand a long story")


def row_of(fake, repeats=2):
    found = Bench(SMALL["mclr"], "cpu").run(repeats, {"fake": fake})
    assert fake.stopped == 1
    return found["peers"][0], found


def test_the_registry_knows_three_peers_by_the_names_of_their_classes():
    assert list(PEERS) == ["pfl-research", "fedlab", "flower"]
    assert all(peer.name == name and peer.distribution for name, peer in PEERS.items())


def test_installed_looks_without_importing():
    code = (
        "import sys\nfrom coterie.peers import PEERS\n"
        "[peer.installed() for peer in PEERS.values()]\n"
        "assert not {'pfl', 'fedlab', 'flwr', 'ray', 'torchvision'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert Fake.installed()
    assert Fake.version() == ""
    assert not type("Missing", (Fake,), {"packages": ("json", "no_such_package")}).installed()


def test_choose(monkeypatch):
    absent = type("Absent", (Fake,), {"packages": ("no_such_package",)})
    monkeypatch.setattr(peers, "PEERS", {"here": Fake, "absent": absent})
    assert choose("auto") == ["here"]
    assert choose("none") == []
    assert choose("here, here") == ["here"]
    with pytest.raises(peers.ConfigError, match="'absent' is not installed here. `make bench-peers`"):
        choose("here,absent")
    with pytest.raises(peers.UnknownName, match="no peer 'her'. Did you mean 'here'"):
        choose("her")


def test_a_peer_that_does_the_same_has_our_model():
    row, found = row_of(Fake())
    assert row["error"] is None
    assert row["difference"] < 1e-4
    assert row["us"] > 0
    assert row["cpu_us"] > 0
    assert row["ratio"] == pytest.approx(found["plain_us"] / row["us"], rel=0.05)


def test_a_peer_that_does_something_else_shows():
    row, _ = row_of(Fake("model"))
    assert row["difference"] > 1
    row, _ = row_of(Fake("silent"))
    assert row["difference"] is None
    assert row["us"] > 0


@pytest.mark.parametrize(("where", "rounds"), [("start", 0), ("round 1", 1), ("round 2", 2)])
def test_a_peer_that_fails_is_a_row_with_the_reason(where, rounds):
    fake = Fake(where)
    row, found = row_of(fake)
    assert row["error"] == f"ZeroDivisionError: in {where}"
    assert row["us"] is None
    assert fake.rounds == rounds  # it is not asked again
    assert found["ratio"] > 0


def test_a_peer_is_stopped_when_the_benchmark_is_interrupted(monkeypatch):
    made, fake = Bench(SMALL["mclr"], "cpu"), Fake()

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(made, "ours", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.run(1, {"fake": fake})
    assert fake.stopped == 1


def test_the_command_shows_peers_and_their_errors(monkeypatch, capsys):
    from coterie.cli.bench import bench as command

    monkeypatch.setenv("COLUMNS", "200")
    broken = type("Broken", (Fake,), {"__init__": lambda self: Fake.__init__(self, "start")})
    monkeypatch.setattr(bench, "CPU_WORKLOADS", SMALL)
    monkeypatch.setattr(peers, "PEERS", {"fake": Fake, "broken": broken})
    command(repeats=1, device="cpu", json_=True)
    rows = json.loads(capsys.readouterr().out)["rows"][0]["peers"]
    assert [(row["peer"], row["error"]) for row in rows] == [
        ("fake", None),
        ("broken", "ZeroDivisionError: in start"),
    ]
    command(repeats=1, device="cpu", quiet=True, peers="fake,broken")
    shown = capsys.readouterr().out
    assert "in [this] process" in shown
    assert "ZeroDivisionError: in start" in shown
    command(repeats=1, device="cpu", quiet=True, peers="none")
    assert "fake" not in capsys.readouterr().out


def test_time_of_a_process_and_those_below_it(tmp_path):
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
    assert tree_seconds(10, tmp_path) == pytest.approx(135 / os.sysconf("SC_CLK_TCK"))
    assert tree_seconds(10, tmp_path / "nowhere") is None


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_time_of_this_process():
    found = tree_seconds(os.getpid())
    assert found >= time.process_time() - 0.1


def test_logging_and_warnings_are_as_before():
    before = list(logging.getLogger().handlers), logging.getLogger().level
    with _quiet():
        logging.getLogger().addHandler(logging.StreamHandler(sys.stdout))
        logging.getLogger().setLevel(logging.INFO)
    assert (logging.getLogger().handlers, logging.getLogger().level) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_an_installed_peer_trains_our_round(name):
    if not PEERS[name].installed():
        pytest.skip(f"{name} is not installed")
    row = Bench(SMALL["mclr"], "cpu").run(1, {name: PEERS[name]()})["peers"][0]
    assert row["error"] is None
    assert row["difference"] < 1e-4
