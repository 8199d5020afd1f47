"""Real processes on loopback: TLS, keys and failures. `make test-flower`."""

from __future__ import annotations

import subprocess
import time

import pytest
import torch

pytest.importorskip("flwr", reason="needs pip install 'coterie[flower]'")

from tests.flower.sites import BIN, FAULTY, Sites

pytestmark = pytest.mark.flower


@pytest.fixture
def sites(tmp_path, request):
    made = Sites(tmp_path / "app", **getattr(request, "param", {}))
    yield made
    made.close()


def in_process(algorithm, rounds, count, seed=0, **work):
    """The same run in this process."""
    import coterie
    from coterie.client.work import SGD
    from coterie.data.federation import Federation
    from coterie.deploy.example import rotated_shares

    shares = rotated_shares(shares=8, turns=(0, 180))
    data = Federation.from_clients({f"site-{i}": shares[f"site-{i}"] for i in range(count)}, num_classes=10)

    def model():
        nn = torch.nn
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    work = SGD(**{"lr": 0.2, "epochs": 5, "batch_size": 10} | work)
    return coterie.run(algorithm, data, model, rounds=rounds, work=work, seed=seed, engine="loop")


def scores_in(row):
    return {**row["accuracy"], "loss": row["loss"]["macro"]}


@pytest.mark.parametrize("sites", [{"secure": True}], indirect=True)
def test_four_nodes_with_tls_and_keys_give_what_one_process_gives(sites):
    from coterie.methods.fesem import FeSEM

    sites.superlink()
    for number in range(4):
        sites.node(number)
    sites.run(algorithm="fesem", rounds=2, clusters=2, **{"evaluate-every": 1})
    # Nodes without a registered key or without TLS are rejected.
    keys = sites.folder / "keys"
    for name in ("site-9", "site-9.pub"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", keys / "site-9"],
                       check=False, stdin=subprocess.DEVNULL, capture_output=True)  # fmt: skip
        assert (keys / name).exists()
    sites.node(9)
    port = sites.env["COTERIE_PORT"]
    plain = sites.start("plain", "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}",
                        "--host", "127.0.0.1", "--port", "0", "--max-retries", "1")  # fmt: skip
    sites.wait_for_end(400)
    summary = sites.summary()
    expected = in_process(FeSEM(num_clusters=2), 2, 4)
    assert summary["clients"] == 4
    assert [scores_in(row) for row in sites.rows()] == [pytest.approx(scores_in(row)) for row in expected.rows]
    assert summary["accuracy"]["macro"] == pytest.approx(expected.summary["accuracy"]["macro"], abs=1e-9)
    assert summary["loss"] == pytest.approx(expected.summary["loss"], rel=1e-5)
    labels = expected.labels.tolist()
    assert labels[0] == labels[2] != labels[1] == labels[3]  # the two rotations
    import numpy as np

    found = np.load(sites.folder / "runs" / "deployed" / "labels.npy")[-1]
    assert found.tolist() == labels
    ours, theirs = summary["bytes"], expected.summary["bytes"]
    assert (ours["down"], ours["up"], ours["start"]) == (theirs["down"], theirs["up"], theirs["start"])
    assert ours["wire"]["up"] > ours["up"]
    trained = [entry["messages"] for name, entry in theirs["by_step"].items() if not name.startswith("evaluate/")]
    assert ours["wire"]["messages"] == sum(trained) + 4  # only the last round is evaluated by messages of its own
    assert summary["failures"] == 0
    log = sites.log("node-9").lower()
    assert "2004" in log or "not registered" in log or "unauthorized" in log or "denied" in log, log[-800:]
    assert plain.poll() is not None or "error" in sites.log("plain").lower() or "fail" in sites.log("plain").lower()


def test_invalid_answers_are_rejected_and_reported(sites):
    (sites.folder / "sites" / "client.py").write_text(FAULTY)
    sites.superlink()
    faults = ["", "", "nan", "shape", "garbage", "huge", "raise", "pickle"]
    for number, fault in enumerate(faults):
        sites.node(number, fault=fault)
    sites.run(algorithm="fedavg", rounds=1, clusters="", deadline=120.0, **{"min-clients": 8})
    sites.wait_for_end(400)
    import json

    failures = json.loads((sites.folder / "runs" / "deployed" / "artifacts" / "failures.json").read_text())
    reasons = {f["client"]: f["reason"] for f in failures if f["step"].endswith(":train")}
    assert set(reasons) == {f"site-{i}" for i in range(2, 8)}
    assert "not finite" in reasons["site-2"]
    assert "instead of (1, 4810)" in reasons["site-3"]
    assert "unreadable" in reasons["site-4"]
    assert "more than" in reasons["site-5"]
    assert "this site is out of order" in reasons["site-6"]
    assert "kind 'pickle'" in reasons["site-7"]
    assert len(sites.rows()) == 1
    assert sites.summary()["accuracy"]["macro"] > 0.05


ANSWERS = {
    "big_endian": "an unsupported type",
    "another_form": "instead of (1, 4810)",
    "choice_above": "sent 'choice' of 1099511627776, outside 0 to 1",
    "choice_below": "sent 'choice' of -1, outside 0 to 1",
    "samples_negative": "sent 'samples' of -1000000, outside 1 to",
    "samples_huge": "it declared 100 when it joined",
    "accuracy": "hostile",  # its training is refused by itself
    "extra_arrays": "sent 'more', which was not asked for",
    "long_error": "xxxxxxxx ...",
    "replay": "answered another call than this one",
}


def test_hostile_sites_change_nothing_for_the_others(sites):
    """Each attack is the work of one site for five rounds; the three honest ones have what they have alone."""
    from coterie.methods.ifca import IFCA

    sites.turn_hostile()
    sites.superlink()
    for number in range(3):
        sites.node(number)
    members = dict(enumerate(ANSWERS, start=3))
    strangers = dict(enumerate(["infinite", "endless", "brackets"], start=3 + len(members)))
    for number, attack in (members | strangers).items():
        sites.node(number, attack=attack)
    sites.run(
        algorithm="ifca", clusters=2, rounds=5, set="algorithm.init=paper", wait=900, deadline=400.0, poll=1.0,
        **{"min-clients": 3 + len(members), "evaluate-every": 1},
    )  # fmt: skip
    sites.wait_for_end(2400)
    expected = in_process(IFCA(num_clusters=2, init="paper"), 5, 3)
    assert [scores_in(row) for row in sites.rows()] == [pytest.approx(scores_in(row)) for row in expected.rows]
    summary = sites.summary()
    assert summary["accuracy"] == pytest.approx(expected.summary["accuracy"])
    assert summary["loss"] == pytest.approx(expected.summary["loss"], rel=1e-5)
    assert summary["clients"] == 3 + len(members)  # those whose hello was refused are none
    failures = _failures(sites)
    refused = {name: {f["round"] for f in failures if f["client"] == name and ":choose" in f["step"]}
               for name in sorted({f["client"] for f in failures})}  # fmt: skip
    assert refused == {name: {1, 2, 3, 4, 5} for name in sorted(f"site-{number}" for number in members)}
    assert max(len(f["reason"]) for f in failures) < 400
    for number, attack in members.items():
        reasons = {f["reason"] for f in failures if f["client"] == f"site-{number}"}
        assert any(ANSWERS[attack] in reason for reason in reasons), (attack, reasons)
    scores = [f["reason"] for f in failures if f["client"] == "site-9" and "evaluate" in f["step"]]
    assert "sent 'accuracy' of 1e+09, outside 0 to 1" in scores
    assert sum(path.stat().st_size for path in (sites.folder / "runs").rglob("*") if path.is_file()) < 5_000_000
    assert len(sites.log("run")) < 1_000_000


def test_by_key_over_an_open_superlink_nobody_is_admitted(sites):
    """A SuperLink without authentication lets nodes make keys of their own; they are not those of the operator."""
    from coterie.deploy.init import write_keys

    sites.superlink()
    sites.node(0)
    sites.run(identity="key", rounds=1, clusters="", wait=45, **{"min-clients": 1})
    sites.wait_for(lambda: "needs the registered keys" in sites.log("run"), 120, "the run has not refused to start")
    sites.kill("run")
    write_keys(sites.folder, 1, ["127.0.0.1"])
    sites.run(identity="key", rounds=1, clusters="", wait=45, **{"min-clients": 1})
    sites.wait_for(lambda: "Only 0 of at least 1 sites" in sites.log("run"), 200, "the run has not given up")
    assert "a key that is not registered here" in sites.log("run")
    assert sites.rows() == []


def test_slow_killed_returning_and_joining_nodes(sites):
    (sites.folder / "sites" / "client.py").write_text(FAULTY)
    sites.superlink()
    for number in range(3):
        sites.node(number)
    sites.run(algorithm="fesem", clusters=2, rounds=10, deadline=40.0, **{"min-clients": 3})
    sites.wait_for_round(1)
    running = str(sites.folder / "runs" / "deployed")
    for command in (["show", running], ["report", running, "-o", str(sites.folder / "page.html")]):
        subprocess.run([str(BIN / "coterie"), *command], check=True, capture_output=True, timeout=120)
    refused = subprocess.run([str(BIN / "coterie"), "resume", running], capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2
    assert "run.sh" in refused.stderr
    sites.kill("node-2")
    sites.wait_for(lambda: any(row["failures"] for row in sites.rows()), 200, "the killed node has not failed")
    sites.node(2)  # it comes back, and is known
    sites.node(3)  # it is new
    sites.node(4, fault="slow")
    sites.wait_for_end(700)
    rows = sites.rows()
    assert [row["round"] for row in rows] == list(range(1, 11))
    summary = sites.summary()
    assert summary["clients"] == 5
    import numpy as np

    labels = np.load(sites.folder / "runs" / "deployed" / "labels.npy")
    away = [f["round"] for f in _failures(sites) if f["client"] == "site-2"]
    assert away
    assert all(labels[round, 2] == labels[round - 1, 2] for round in away)  # its label is kept while it is away
    assert labels[1, 3] == -1
    assert labels[-1, 3] == labels[-1, 1]  # assigned to the cluster of its rotation
    assert any("site-4" in str(f) for f in _failures(sites)), "the slow node is reported"
    assert all("site-4" in f["client"] or "site-2" in f["client"] for f in _failures(sites))


def _failures(sites):
    import json

    return json.loads((sites.folder / "runs" / "deployed" / "artifacts" / "failures.json").read_text())


def test_killed_servers_resume_and_no_round_is_lost_or_repeated(sites):
    """`local` keeps its models on the sites' disks only: they must have exactly the right number of rounds."""
    sites.superlink()
    for number in range(2):
        sites.node(number)
    config = {"algorithm": "local", "clusters": "", "rounds": 5, "min-clients": 2, "evaluate-every": 1}
    sites.run(**config)
    sites.wait_for_round(1)
    time.sleep(3)  # somewhere in round 3, whose messages carry the evaluation of round 2
    sites.kill_serverapp()
    seen = len(sites.rows())
    sites.kill("run")
    sites.run(**config)
    sites.wait_for_round(max(3, seen + 1))
    seen = len(sites.rows())
    sites.kill("superlink")
    sites.kill("run")
    sites.superlink()
    sites.run(**config)
    sites.wait_for_end(500)
    rows = sites.rows()
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5]
    assert seen >= 3
    expected = in_process("local", 5, 2)
    assert [scores_in(row) for row in rows] == [pytest.approx(scores_in(row), rel=1e-6) for row in expected.rows]
    summary = sites.summary()
    assert summary["failures"] == 0
    assert summary["accuracy"]["macro"] == pytest.approx(expected.summary["accuracy"]["macro"], abs=1e-9)
    assert summary["loss"] == pytest.approx(expected.summary["loss"], rel=1e-6)
