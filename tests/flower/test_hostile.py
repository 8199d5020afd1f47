"""One hostile site neither ends a run nor changes what the others get. In process; test_deployed has real sites."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs pip install 'coterie[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from coterie.client.steps import Answer, client_step, train
from coterie.engines.flower.link import Link, Unreachable
from coterie.errors import ConfigError
from coterie.methods.base import find_algorithm
from coterie.randomness import Rng
from coterie.runs.loop import Schedule, Trainer
from tests.flower.attacks import ATTACKS, HELLOS, arrays_in, put
from tests.flower.fakes import FakeGrid, engine_over
from tests.helpers import ragged_federation, setup_of

HOSTILE = 5  # the last of six clients, so that the others have the same numbers without it
METHODS = {
    "fedavg": {},
    "ifca": {"init": "paper", "num_clusters": 2},
    "md_icfl": {"init": "paper", "num_clusters": 2, "privacy": "strong", "pseudo_samples": 2, "iterations": 2},
}


def hostile(attack, memory):
    def fault(reply):
        attack(reply.content, memory)
        return reply

    return fault


def run_with(name, folder, clients=6, attack=None, rounds=5, **settings):
    """A run over clients of which the last one is hostile, or over the honest ones only."""
    folder.mkdir(parents=True, exist_ok=True)
    everyone = replace(ragged_federation(clients=6), groups=None)
    setup = setup_of(find_algorithm(name)(**METHODS[name]), everyone.select(list(range(6))[-clients:]))
    data = setup.federation() if attack is not None else setup.federation().select(range(clients - 1))
    engine, grid = engine_over(folder, setup.task(), data, **settings)
    if attack is not None:
        grid.faults[100 + clients - 1] = hostile(attack, folder / "hostile")
    trainer = Trainer(setup.algorithm, engine, data, Schedule(rounds=rounds))
    trainer.run()
    return trainer


def result(trainer, count):
    """What the first clients have: scores, centers, metrics."""
    rows = [{key: row[key] for key in ("accuracy", "loss", "f1") if key in row} for row in trainer.progress.rows]
    labels = [labels[:count].tolist() for labels in trainer.progress.labels]
    return {"rows": rows, "labels": labels, "centers": trainer.state.centers.tolist()}


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """Results of the honest clients alone, by method and number of clients."""
    found = {}

    def of(name, clients):
        if (name, clients) not in found:
            found[name, clients] = result(run_with(name, tmp_path_factory.mktemp(name), clients), clients - 1)
        return found[name, clients]

    return of


CHOICES = [attack for attack in ATTACKS if attack.startswith("choice")]
CASES = [("fedavg", attack) for attack in ATTACKS if attack not in CHOICES]
CASES += [("ifca", attack) for attack in [*CHOICES, "samples_huge", "replay"]]
CASES += [("md_icfl", attack) for attack in [*CHOICES, "accuracy"]]


@pytest.mark.parametrize(("name", "attack"), CASES)
def test_the_others_get_what_they_get_without_it(name, attack, tmp_path, honest):
    trainer = run_with(name, tmp_path, attack=ATTACKS[attack])
    assert result(trainer, 5) == honest(name, 6)
    trained = [failure for failure in trainer.engine.failures if "evaluate" not in failure.step]
    assert {failure.round for failure in trained} == {1, 2, 3, 4, 5}
    assert {failure.client for failure in trainer.engine.failures} == {trainer.engine.names[HOSTILE]}
    assert all(len(failure.reason) < 400 and failure.reason.isprintable() for failure in trainer.engine.failures)
    json.dumps(trainer.summary(), allow_nan=False)


@pytest.mark.parametrize("attack", ["another_form", "half_precision", "extra_arrays", "samples_huge", "replay"])
def test_of_two_sites_the_hostile_one_is_refused(attack, tmp_path, honest):
    trainer = run_with("fedavg", tmp_path, clients=2, attack=ATTACKS[attack])
    assert result(trainer, 1) == honest("fedavg", 2)
    assert {failure.client for failure in trainer.engine.failures} == {trainer.engine.names[1]}


# ---- numbers of samples ----


def answers_of(engine):
    models, refs = engine.initial().unsqueeze(0), torch.zeros(engine.num_clients, dtype=torch.int64)
    [chunk] = engine.call(train, engine.everyone(), models=models, refs=refs, rng=Rng.seed(0))
    return dict(zip(chunk.clients.tolist(), chunk.answer.samples.tolist(), strict=True))


def claims(samples):
    def fault(reply):
        put(reply.content, "", arrays_in(reply.content, "") | {"samples": np.array([samples])})
        return reply

    return fault


def test_a_site_cannot_claim_more_samples_than_it_declared(tmp_path):
    setup = setup_of(find_algorithm("fedavg")())
    engine, grid = engine_over(tmp_path, setup.task(), setup.federation())
    declared = engine.link.members[engine.names[4]].train
    grid.faults[104] = claims(declared)
    assert answers_of(engine)[4] == declared
    grid.faults[104] = claims(declared - 1)
    assert answers_of(engine)[4] == declared - 1
    for claim in (declared + 1, 0):
        grid.faults[104] = claims(claim)
        assert 4 not in answers_of(engine)
    assert f"it declared {declared} when it joined" in engine.failures[0].reason
    assert "of 0, outside 1 to" in engine.failures[1].reason


def test_a_site_weighs_no_more_than_the_operator_allows(tmp_path):
    setup = setup_of(find_algorithm("fedavg")())
    engine, grid = engine_over(tmp_path, setup.task(), setup.federation(), max_weight=2.0)
    sizes = {name: member.train for name, member in engine.link.members.items()}
    most = engine.names[4]
    engine.link.members[most] = replace(engine.link.members[most], train=10**8)
    grid.faults[104] = claims(10**8)
    weights = answers_of(engine)
    median = sorted([*(size for name, size in sizes.items() if name != most), 10**8])[4]
    assert weights[4] == 2 * median
    assert weights == {
        client: min(sizes[name], 2 * median) if name != most else 2 * median for client, name in enumerate(engine.names)
    }


# ---- what is kept ----


def test_records_that_were_not_asked_for_are_dropped(tmp_path):
    def fault(reply):
        reply.content["noise"] = ArrayRecord({"x": Array(np.zeros(250_000))})
        reply.content["first.noise"] = ArrayRecord({"x": Array(np.zeros(250_000))})
        return reply

    setup = setup_of(find_algorithm("fedavg")())
    engine, grid = engine_over(tmp_path, setup.task(), setup.federation())
    grid.faults[104] = fault
    trainer = Trainer(setup.algorithm, engine, setup.federation(), Schedule(rounds=3))
    trainer._start()
    trainer._round(1)
    trainer.engine.begin(2, "round")
    engine.carry(trainer._evaluation(1), 2, engine.everyone())
    answers_of(engine)
    kept = engine._carried.answers
    assert len(kept) == 9
    names = {"samples", "loss", "accuracy", "f1", "valid_samples", "valid_loss", "valid_accuracy"}
    assert all(set(tensors) == names for tensors, _ in kept.values())


def test_a_number_of_gradients_counts_up_to_a_limit(tmp_path):
    def fault(reply):
        told = dict(reply.content["told"].items()) | {"gradients": 2**62}
        reply.content["told"] = ConfigRecord(told)
        return reply

    setup = setup_of(find_algorithm("fedavg")())
    engine, grid = engine_over(tmp_path, setup.task(), setup.federation())
    grid.faults[104] = fault
    answers_of(engine)
    assert engine.ledger.totals()["gradients"]["start"] < 10**7


def test_a_step_that_does_not_declare_its_answer_is_not_sent(tmp_path):
    @client_step
    def undeclared(block, models, work):
        return Answer(samples=block.samples)

    setup = setup_of(find_algorithm("fedavg")())
    engine, grid = engine_over(tmp_path, setup.task(), setup.federation())
    before = len(grid.sent)
    with pytest.raises(ConfigError, match="undeclared does not say what it answers with"):
        list(engine.call(undeclared, engine.everyone(), rng=Rng.seed(0)))
    assert len(grid.sent) == before


# ---- who is who ----


def site(text):
    def app(message, context):
        content = RecordDict()
        content["hello"] = ConfigRecord({"json": text})
        return Message(content, reply_to=message)

    return app


GOOD = json.dumps({"name": "good", "train": 10, "valid": 0, "test": 2})


@pytest.mark.parametrize("kind", HELLOS)
def test_a_hostile_hello_is_rejected(kind):
    grid = FakeGrid()
    grid.add(1, site(HELLOS[kind].replace("NAME", "bad")))
    grid.add(2, site(GOOD))
    link = Link(grid, "claimed", 0.001)
    assert [member.name for member in link.roll_call()] == ["good"]
    [note] = link.notes
    assert "node 1" in note
    assert len(note) < 400
    assert note.isprintable()


def test_the_operator_limits_what_a_site_may_declare():
    grid = FakeGrid()
    grid.add(1, site(GOOD))
    link = Link(grid, "claimed", 0.001, most_samples=9)
    assert link.roll_call() == []
    assert "declares 10 train" in link.notes[0]
    assert [member.name for member in Link(grid, "claimed", 0.001, most_samples=10).roll_call()] == ["good"]


def test_nodes_without_a_registered_key_are_not_asked():
    grid = FakeGrid()
    grid.add(1, site(GOOD))
    grid.add(2, site(GOOD.replace("good", "self-made")), key=b"its own")
    grid.add(3, site(GOOD.replace("good", "known")), key=b"registered")
    from coterie.engines.flower.link import owner_of

    keys = {owner_of(b"registered")}
    link = Link(grid, "key", 0.001, registered=lambda: keys)
    assert [member.name for member in link.roll_call()] == ["known"]
    assert [message.metadata.dst_node_id for message in grid.sent] == [3]
    assert link.notes == ["node 1 has no key", "node 2 has a key that is not registered here"]
    keys.add(owner_of(b"its own"))  # the operator adds it during the run
    assert [member.name for member in link.roll_call()] == ["self-made"]
    assert len(link.notes) == 2


def test_identity_by_key_without_keys_does_not_start(tmp_path):
    from coterie.deploy.server import serve

    task = SimpleNamespace(CLASSES=3, INPUT=(1, 4, 4), model=lambda: torch.nn.Linear(16, 3))
    for config in ({}, {"identity": "key"}, {"keys": str(tmp_path)}):
        with pytest.raises(ConfigError, match="needs the registered keys"):
            serve(FakeGrid(), config | {"run-dir": str(tmp_path / "runs")}, task)
    assert not (tmp_path / "runs").exists()


def test_keys_are_read_from_the_files_that_were_registered(tmp_path):
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    from coterie.deploy.init import write_keys
    from coterie.deploy.server import _registered
    from coterie.engines.flower.link import owner_of

    write_keys(tmp_path, 2, ["127.0.0.1"])
    (tmp_path / "keys" / "broken.pub").write_text("ssh-nothing")
    read = _registered(str(tmp_path / "keys"))
    pems = [
        load_ssh_public_key(path.read_bytes()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        for path in (tmp_path / "keys").glob("site-*.pub")
    ]
    assert read() == {owner_of(pem) for pem in pems}
    assert len(pems) == 2


# ---- messages that Flower cannot read ----


class BrokenGrid(FakeGrid):
    """Like Flower's: a message that cannot be read raises, and the others of the same pull are lost."""

    broken = ()

    def pull_messages(self, message_ids):
        replies = super().pull_messages(message_ids)
        if any(reply.metadata.src_node_id in self.broken for reply in replies):
            raise ValueError("cannot be inflated")
        return replies


def names_and_texts(replies):
    return {name: reply if isinstance(reply, str) else "answered" for name, reply in replies}


def test_a_message_that_cannot_be_read_costs_others_one_answer_at_most():
    grid = BrokenGrid()
    for number, name in enumerate("abc"):
        grid.add(number + 1, site(GOOD.replace("good", name)))
    link = Link(grid, "claimed", 0.001)
    link.roll_call()
    grid.broken = (2,)
    questions = {name: ("query", RecordDict()) for name in "abc"}
    first = names_and_texts(link.ask(questions, 0.1))
    assert set(first.values()) == {"did not answer in 0.1 s"}  # Flower has lost all of them
    for _ in range(3):
        later = names_and_texts(link.ask(questions, 5))
        assert later == {"a": "answered", "b": "sent a message that cannot be read (ValueError)", "c": "answered"}
    assert "somebody sent a message that cannot be read" in link.notes[0]


class BusyError(Exception):
    """Like that of the HTTP client."""

    response = SimpleNamespace(status_code=500)


class BusyGrid(FakeGrid):
    """A SuperLink that answers with status 500, as when its database is locked."""

    busy = 0

    def get_nodes(self):
        self.refuse()
        return super().get_nodes()

    def pull_messages(self, message_ids):
        self.refuse()
        return super().pull_messages(message_ids)

    def refuse(self):
        self.busy -= 1
        if self.busy > 0:
            raise BusyError


def test_a_superlink_that_is_overloaded_is_asked_again(monkeypatch):
    monkeypatch.setattr("coterie.engines.flower.link._PAUSES", (0.001,) * 5)
    grid = BusyGrid()
    grid.add(1, site(GOOD))
    link = Link(grid, "claimed", 0.001)
    grid.busy = 4
    assert [member.name for member in link.roll_call()] == ["good"]
    grid.busy = 4
    assert names_and_texts(link.ask({"good": ("query", RecordDict())}, 5)) == {"good": "answered"}
    grid.busy = 1000
    with pytest.raises(Unreachable, match="answers with status 500"):
        names_and_texts(link.ask({"good": ("query", RecordDict())}, 5))


# ---- what a site does with a hostile server ----


def test_a_site_imports_nothing_that_a_message_names(tmp_path, monkeypatch):
    from coterie.client.work import to_dict
    from coterie.engines.flower import wire
    from coterie.engines.flower.site import Site
    from coterie.methods.base import load_method_of

    (tmp_path / "evil_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    setup = setup_of(find_algorithm("fedavg")())
    site = Site(setup.federation(), setup.task().make, setup.task().loss, tmp_path, register=load_method_of)
    head = {"client": setup.federation().names[0], "round": 1, "phase": "round", "key": 1, "seed": 0, "models": None}
    plain = to_dict(setup.work)
    for step, work in (
        ("evil_module:step", plain),
        ("coterie.evil_module:step", plain),
        ("coterie.methods.evil_module:step", plain),
        ("coterie.algorithms.local:train_own", plain | {"optimizer": "evil_module:Optimizer"}),
        ("coterie.block:label_counts", plain | {"work": "evil_module:Work"}),
    ):
        call = wire.Call(step=step, work=work, nonce="n", **head)
        answer = site.answer(wire.request(call, {}, None, {}))
        assert "error" in answer["told"], step
        assert answer["told"]["nonce"] == "n"
    assert "evil_module" not in sys.modules
