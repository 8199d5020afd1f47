"""The Flower engine without processes: equal to the loop, checks answers, clients come and go."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs pip install 'coterie[flower]'")

from flwr.app import Array, ArrayRecord

from coterie.client.steps import train
from coterie.data.federation import Federation
from coterie.engines import make_engine
from coterie.methods.base import algorithms, find_algorithm
from coterie.randomness import Rng
from coterie.runs.folder import RunFolder
from coterie.runs.loop import Schedule, Trainer
from coterie.runs.newcomers import personal_models
from tests.flower.fakes import engine_over, simulated_app
from tests.helpers import ragged_federation, reserved_for, setup_of


def setup_for(name, **changes):
    algorithm = find_algorithm(name)()
    federation = ragged_federation(reserve=reserved_for(algorithm))
    return setup_of(algorithm, federation, **changes)


def run_over(setup, engine, rounds=3, **schedule):
    trainer = Trainer(setup.algorithm, engine, setup.federation(), Schedule(rounds=rounds, **schedule))
    trainer.run()
    return trainer


def assert_same_rows(ours, theirs):
    """All rounds have the same numbers, seconds aside."""
    found, expected = ({}, {})
    for flat, trainer in ((found, ours), (expected, theirs)):
        rows = [{key: value for key, value in row.items() if key != "seconds"} for row in trainer.progress.rows]
        stack = [((), rows)]
        while stack:
            place, value = stack.pop()
            if isinstance(value, dict | list):
                stack += [
                    ((*place, k), part) for k, part in (value.items() if isinstance(value, dict) else enumerate(value))
                ]
            else:
                flat[place] = value
    numbers = {place: value for place, value in expected.items() if isinstance(value, float)}
    assert found.keys() == expected.keys()
    assert {place: found[place] for place in numbers} == pytest.approx(numbers, rel=1e-6)
    assert {place: found[place] for place in found if place not in numbers} == {
        place: expected[place] for place in expected if place not in numbers
    }


def memories(folder):
    return {path.name: path.read_bytes() for path in (folder / "memory").rglob("*.safetensors")}


@pytest.mark.parametrize("name", algorithms())
def test_every_method_gives_what_the_loop_gives(name, tmp_path):
    setup = setup_for(name)
    engine, _ = engine_over(tmp_path, setup.task(), setup.federation())
    ours = run_over(setup, engine)
    loop = make_engine("loop", setup.task(), setup.federation(), "cpu", {"precision": "float64"})
    theirs = run_over(setup, loop)
    assert np.array_equal(ours.progress.labels[-1], theirs.progress.labels[-1])
    found, expected = ours.summary(), theirs.summary()
    for key in ("accuracy", "loss", "f1"):
        assert found[key] == pytest.approx(expected[key], rel=1e-6)
    wire = found["bytes"].pop("wire")
    by_step = {k: v for k, v in found["bytes"].pop("by_step").items() if not k.endswith("/wire")}
    assert by_step == expected["bytes"].pop("by_step")
    assert found["bytes"] == expected["bytes"]
    assert wire["down"] >= found["bytes"]["down"]
    assert found["failures"] == expected["failures"] == 0
    assert_same_rows(ours, theirs)
    before = memories(tmp_path)
    ours._evaluate(3, ours._evaluation(3))
    assert memories(tmp_path) == before  # an evaluation only reads what clients remember


def test_clusters_are_compared_over_messages_as_in_the_loop(tmp_path):
    """Members that try a merger also watch their loss and vote."""
    method = find_algorithm("coterie")(num_clusters="1-2", warmup=0, clear=0.1, worth=0.0, vote=True)
    setup = setup_of(method, ragged_federation(), schedule=Schedule(rounds=8))
    engine, _ = engine_over(tmp_path, setup.task(), setup.federation())
    ours = run_over(setup, engine, rounds=8)
    theirs = run_over(
        setup, make_engine("loop", setup.task(), setup.federation(), "cpu", {"precision": "float64"}), rounds=8
    )
    assert {"merged", "apart"} & {decision["what"] for decision in ours.state.decisions}
    assert engine.failures == []
    assert_same_rows(ours, theirs)


VARIANTS = {
    "ifca with gradients": ("ifca", {"average_of": "gradients", "init": "paper"}),
    "fesem with a proximal term": ("fesem", {"prox": 0.1, "prox_scale": "paper", "init": "random"}),
    "fesem with a vote": ("fesem", {"vote": True}),
    "md_icfl with privacy": ("md_icfl", {"privacy": "strong", "pseudo_samples": 2, "iterations": 2}),
    "flux by first latents": ("flux", {"latent": "first", "cluster_in": 2}),
    "flux by last latents": ("flux", {"cluster_in": 2}),
    "pacfl": ("pacfl", {}),
    "fedem": ("fedem", {}),
    "apfl": ("apfl", {}),
    "fedrep": ("fedrep", {}),
    "coterie": ("coterie", {"warmup": 0}),
    "coterie with a vote": ("coterie", {"warmup": 0, "vote": True}),
    "coterie of kinds": ("coterie", {"num_clusters": 2, "warmup": 0, "clear": 0.1}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_have_the_form_that_their_step_declares(variant, tmp_path):
    """Also those of settings other than the default, and of what clients are served with."""
    name, settings = VARIANTS[variant]
    setup = setup_of(find_algorithm(name)(**settings), ragged_federation())
    engine, _ = engine_over(tmp_path, setup.task(), setup.federation())
    trainer = run_over(setup, engine, rounds=4)
    personal = setup.algorithm.personal(trainer.state, engine.everyone())
    served = list(personal_models(engine, personal, engine.everyone(), Rng.seed(0)))
    assert engine.failures == []
    assert [client for client, _ in served] == list(range(9))


@pytest.mark.parametrize("name", ["fedavg", "coterie", "fesem", "scaffold", "fedfomo"])
@pytest.mark.parametrize("loss", ["mse", "own"])
def test_answers_of_regression_have_the_form_that_their_step_declares(name, loss, tmp_path):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(30 + client, 3, generator=generator) for client in range(4)]
    clients = {f"c{client}": (x, x @ torch.tensor([1.0, -2.0, 0.5])) for client, x in enumerate(inputs)}
    settings = {"num_clusters": 2} if name == "fesem" else {}
    setup = setup_of(
        find_algorithm(name)(**settings), Federation.from_clients(clients), model="mclr", model_settings={}, loss="mse"
    )
    task = setup.task() if loss == "mse" else replace(setup.task(), loss=absolute)
    engine, _ = engine_over(tmp_path, task, setup.federation())
    trainer = run_over(setup, engine)
    assert engine.failures == []
    assert trainer.summary()["r2"] is not None


def absolute(outputs, y):
    """A user's own loss."""
    return (outputs.reshape(y.shape) - y).abs() - 1


@pytest.mark.parametrize(
    ("name", "settings", "messages"), [("ifca", {"num_clusters": 2}, 1), ("md_icfl", {"privacy": "strong"}, 2)]
)
def test_messages_per_client_and_round(name, settings, messages, tmp_path):
    algorithm = find_algorithm(name)(**settings)
    setup = setup_of(algorithm, ragged_federation())
    engine, grid = engine_over(tmp_path, setup.task(), setup.federation())
    trainer = Trainer(algorithm, engine, setup.federation(), Schedule(rounds=2, evaluate_every=2))
    trainer._start()
    before = len(grid.sent)
    trainer._round(1)
    sent = Counter(message.metadata.dst_node_id for message in grid.sent[before:])
    assert set(sent.values()) == {messages}
    assert len(sent) == 9


def sent_by_round(setup, engine, grid, rounds, **schedule):
    """The trainer of a finished run, and how many messages each node got in each round."""
    trainer = Trainer(setup.algorithm, engine, setup.federation(), Schedule(rounds=rounds, **schedule))
    trainer._start()
    counts = []
    for number in range(1, rounds + 1):
        before = len(grid.sent)
        trainer._round(number)
        counts.append(Counter(message.metadata.dst_node_id for message in grid.sent[before:]))
    return trainer, counts


def test_one_message_a_round_trains_and_evaluates(tmp_path):
    setup = setup_for("fedavg")
    engine, grid = engine_over(tmp_path, setup.task(), setup.federation())
    trainer, counts = sent_by_round(setup, engine, grid, 4)
    assert [set(count.values()) for count in counts] == [{1}, {1}, {1}, {2}]  # the last one is evaluated by itself
    assert all(len(count) == 9 for count in counts)
    totals = engine.ledger.totals()
    assert totals["wire"]["messages"] == 9 * 5
    assert totals["by_step"]["evaluate/evaluate"]["messages"] == 9 * 4  # as on every engine
    # The model that a client trains is the one it is evaluated with: a message holds it once.
    calls = [message for message in grid.sent if message.metadata.message_type != "query"]
    assert {len(models_in(message.content)) for message in calls} == {1}
    assert sum("first.call" in message.content for message in calls) == 9 * 3
    assert [row["round"] for row in trainer.progress.rows if row["accuracy"]] == [1, 2, 3, 4]


@pytest.mark.parametrize("schedule", [{"participation": 0.5}, {"participation": 0.5, "evaluate_every": 2}])
def test_clients_outside_the_cohort_get_the_evaluation_alone(schedule, tmp_path):
    setup = setup_for("fedavg")
    engine, grid = engine_over(tmp_path, setup.task(), setup.federation())
    trainer, counts = sent_by_round(setup, engine, grid, 4, **schedule)
    every = schedule.get("evaluate_every", 1)
    carried = [number for number in (2, 3, 4) if (number - 1) % every == 0]
    for number, count in enumerate(counts[:3], start=1):
        assert set(count.values()) == {1}
        assert len(count) == (9 if number in carried else 4)
    assert sum(counts[3].values()) == 9 + (9 if 4 in carried else 4)
    loop = make_engine("loop", setup.task(), setup.federation(), "cpu", {"precision": "float64"})
    assert_same_rows(trainer, run_over(setup, loop, 4, **schedule))


@pytest.mark.parametrize("name", ["fedavg", "local", "coterie", "feddane"])
def test_late_clients_are_evaluated_all_the_same(name, tmp_path):
    setup = setup_for(name)
    schedule = {"dropout": 0.3, "participation": 0.7, "seed": 1}
    engine, _ = engine_over(tmp_path, setup.task(), setup.federation())
    ours = run_over(setup, engine, 4, **schedule)
    loop = make_engine("loop", setup.task(), setup.federation(), "cpu", {"precision": "float64"})
    theirs = run_over(setup, loop, 4, **schedule)
    assert_same_rows(ours, theirs)
    assert any(row["failures"] for row in ours.progress.rows)
    assert Counter(engine.failures) == Counter(loop.failures)
    assert all((scores["samples"] > 0).all() for scores in ours.progress.scores)


def test_a_message_that_fails_fails_for_both_of_its_calls(tmp_path):
    setup = setup_for("fedavg")
    engine, grid = engine_over(tmp_path, setup.task(), setup.federation(), deadline=0.2)
    trainer = Trainer(setup.algorithm, engine, setup.federation(), Schedule(rounds=3))
    trainer._start()
    trainer._round(1)
    grid.faults[104] = lambda reply: None
    trainer._round(2)
    del grid.faults[104]
    trainer._round(3)
    name = setup.federation().names[4]
    assert [(f.round, f.client, f.step.rpartition(":")[2]) for f in engine.failures] == [
        (2, name, "train"),
        (1, name, "evaluate"),
    ]
    assert [row["failures"] for row in trainer.progress.rows] == [1, 1, 0]
    assert [int((scores["samples"] > 0).sum()) for scores in trainer.progress.scores] == [8, 9, 9]


def test_scores_that_are_missing_or_invalid_do_not_cost_the_training(tmp_path):
    def without(name):
        def fault(reply):
            if name in reply.content:
                del reply.content[name]
            return reply

        return fault

    setup = setup_for("fedavg")
    engine, grid = engine_over(tmp_path, setup.task(), setup.federation())
    trainer = Trainer(setup.algorithm, engine, setup.federation(), Schedule(rounds=3))
    trainer._start()
    trainer._round(1)
    grid.faults[104], grid.faults[105] = without("first.answer"), without("first.told")
    trainer._round(2)
    assert {(f.round, f.client, f.step) for f in engine.failures} == {
        (1, setup.federation().names[client], "coterie.block:evaluate") for client in (4, 5)
    }


def test_a_server_killed_between_the_two_calls_of_a_message_resumes(tmp_path):
    """`local` and `coterie` are evaluated with what the clients remember, which the message has changed since."""
    for name in ("local", "coterie"):
        setup = setup_for(name)
        task, federation = setup.task(), setup.federation()
        home = tmp_path / name
        home.mkdir()
        loop = make_engine("loop", task, federation, "cpu", {"precision": "float64"})
        expected = run_over(setup, loop, 4, evaluate_every=1)
        folder = RunFolder.create(home, "run", "run", setup.tables())
        schedule = Schedule(rounds=4, checkpoint_every=0)
        first, _ = engine_over(home, task, federation)
        with folder.held():
            trainer = Trainer(setup.algorithm, first, federation, schedule, folder)
            trainer._start()
            trainer._round(1)
            trainer._round(2)
            assert [row["round"] for row in folder.rows()] == [1]
            trainer._save = lambda: pytest.fail("killed before the checkpoint")
            with pytest.raises(pytest.fail.Exception):
                trainer._round(3)
            again, _ = engine_over(home, task, federation, past={first.life: 2})
            trainer = Trainer(setup.algorithm, again, federation, schedule, folder)
            trainer.restore(folder.load_checkpoint()[0])
            trainer.run()
        assert_same_rows(trainer, expected)
        assert [row["round"] for row in folder.rows()] == [1, 2, 3, 4]


def test_a_client_joins_while_the_server_is_down(tmp_path):
    everyone = replace(ragged_federation(), groups=None)
    setup = setup_of(find_algorithm("fesem")(), everyone)
    schedule = Schedule(rounds=3, checkpoint_every=0)
    with RunFolder.create(tmp_path, "run", "run", setup.tables()).held() as folder:
        few = everyone.select(range(7))
        (tmp_path / "few").mkdir()
        engine, _ = engine_over(tmp_path / "few", setup.task(), few)
        trainer = Trainer(setup.algorithm, engine, few, schedule, folder)
        trainer._start()
        trainer._round(1)
        engine, _ = engine_over(tmp_path, setup.task(), everyone, past={engine.life: 1})
        trainer = Trainer(setup.algorithm, engine, everyone, schedule, folder)
        trainer.restore(folder.load_checkpoint()[0])
        trainer.run()
    assert [len(scores["samples"]) for scores in trainer.progress.scores] == [7, 9, 9]  # the first one was pending
    assert (trainer.progress.labels[-1] >= 0).all()
    assert not engine.failures


def models_in(content):
    return [record for name, record in content.items() if name.startswith("model.")]


def test_one_record_for_each_distinct_model(tmp_path):
    setup = setup_for("fedavg")
    engine, grid = engine_over(tmp_path, setup.task(), setup.federation())
    models = torch.stack([engine.initial(), engine.initial() + 1])
    refs = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 0])
    before = len(grid.sent)
    list(engine.call(train, engine.everyone(), models=models, refs=refs, rng=Rng.seed(0)))
    records = {id(record) for message in grid.sent[before:] for record in models_in(message.content)}
    assert len(records) == 2


def changed(**arrays):
    def fault(reply):
        answer = dict(reply.content["answer"].items())
        for name, array in arrays.items():
            answer[name] = array
        reply.content["answer"] = ArrayRecord(OrderedDict(answer))
        return reply

    return fault


BAD = {
    "of shape (1, 3) instead of": changed(params=Array(np.zeros((1, 3)))),
    "'more', which was not asked for": changed(more=Array(np.zeros((1, 3)))),
    "an unreadable array": changed(params=Array("float64", (1, 3), "numpy.ndarray", b"nothing")),
    "of kind 'pickle'": changed(params=Array("float64", (1, 3), "pickle", b"nothing")),
    "of an unsupported type": changed(params=Array(np.array([["a"]]))),
    "bytes, more than": changed(params=Array(np.zeros((1, 3_000_000)))),
    "instead of one row": changed(params=Array(np.zeros((2, 5)))),
    "of type float32 instead of float64": changed(params=Array(np.zeros((1, 123), np.float32))),
    "did not answer in": lambda reply: None,
}


@pytest.mark.parametrize("reason", BAD)
def test_invalid_answers_are_rejected_with_the_client_and_reason(reason, tmp_path):
    setup = setup_for("fedavg")
    engine, grid = engine_over(tmp_path, setup.task(), setup.federation(), deadline=0.2)
    grid.faults[104] = BAD[reason]
    models, refs = engine.initial().unsqueeze(0), torch.zeros(9, dtype=torch.int64)
    chunks = list(engine.call(train, engine.everyone(), models=models, refs=refs, rng=Rng.seed(0)))
    answered = torch.cat([chunk.clients for chunk in chunks]).tolist()
    assert answered == [0, 1, 2, 3, 5, 6, 7, 8]
    [failure] = engine.failures
    assert failure.client == setup.federation().names[4]
    assert reason in failure.reason


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_invalid_numbers_are_rejected(value, tmp_path):
    setup = setup_for("fedavg")
    engine, grid = engine_over(tmp_path, setup.task(), setup.federation())
    size = setup.task().layout.size
    grid.faults[104] = changed(params=Array(np.full((1, size), value)))
    models, refs = engine.initial().unsqueeze(0), torch.zeros(9, dtype=torch.int64)
    list(engine.call(train, engine.everyone(), models=models, refs=refs, rng=Rng.seed(0)))
    assert [failure.client for failure in engine.failures] == [setup.federation().names[4]]


def test_a_failing_step_is_reported_with_its_error(tmp_path):
    setup = setup_for("fedavg")
    engine, _ = engine_over(tmp_path, setup.task(), setup.federation())
    models, refs = torch.zeros(1, 3, dtype=torch.float64), torch.zeros(9, dtype=torch.int64)
    assert list(engine.call(train, engine.everyone(), models=models, refs=refs, rng=Rng.seed(0))) == []
    assert len(engine.failures) == 9
    assert "Error" in engine.failures[0].reason
    assert any("no client could do train" in note for note in engine.notes)


@pytest.mark.parametrize("name", algorithms())
def test_clients_that_join_during_the_run(name, tmp_path):
    """Every method treats them as unseen clients and assigns them by its own rule."""
    algorithm = find_algorithm(name)()
    everyone = ragged_federation(reserve=reserved_for(algorithm))
    setup = setup_of(algorithm, everyone)
    task = setup.task()
    few = everyone.select(range(7))
    few = replace(few, reserved=everyone.reserved, reserved_view=everyone.reserved_view)
    engine, grid = engine_over(tmp_path, task, few)
    trainer = Trainer(algorithm, engine, few, Schedule(rounds=4))
    trainer._start()
    trainer._round(1)
    (tmp_path / "all").mkdir()
    app = simulated_app(tmp_path / "all", task, everyone)
    for number in (7, 8):
        grid.add(200 + number, app, **{"partition-id": number})
    for number in (2, 3, 4):
        trainer._round(number)
    assert engine.names == everyone.names
    assert engine.num_clients == 9
    assert torch.equal(engine.keys, everyone.keys)
    assert len(trainer.state.labels) == 9
    assert not engine.failures
    assert len(trainer.progress.scores[-1]["samples"]) == 9
    assert (trainer.progress.scores[-1]["samples"] > 0).all()
    if name in ("fesem", "ifca", "fedavg", "md_icfl"):
        assert (trainer.state.labels >= 0).all()
    history = trainer._score_history()
    assert history["accuracy"].shape == (4, 9)


def test_a_disconnected_client_is_reported_and_recognized_when_it_returns(tmp_path):
    setup = setup_for("fedavg")
    engine, grid = engine_over(tmp_path, setup.task(), setup.federation())
    models, refs = engine.initial().unsqueeze(0), torch.zeros(9, dtype=torch.int64)
    gone = grid.nodes.pop(103)
    engine.link.roll_call()
    list(engine.call(train, engine.everyone(), models=models, refs=refs, rng=Rng.seed(0)))
    assert [(f.client, f.reason) for f in engine.failures] == [(engine.names[3], "is not connected")]
    grid.nodes[555], grid.keys[555] = gone, b""  # under another number, as without keys
    assert engine.welcome() == 0
    list(engine.call(train, engine.everyone(), models=models, refs=refs, rng=Rng.seed(0)))
    assert len(engine.failures) == 1


def test_a_run_with_new_clients_is_saved_and_resumed(tmp_path):
    everyone = ragged_federation()
    setup = setup_of(find_algorithm("fesem")(), everyone)
    task, few = setup.task(), replace(everyone.select(range(7)), groups=None)
    engine, grid = engine_over(tmp_path, task, few)
    folder = RunFolder.create(tmp_path / "runs", "run", "run", setup.tables())
    with folder.held():
        trainer = Trainer(setup.algorithm, engine, few, Schedule(rounds=4, checkpoint_every=0), folder)
        trainer._start()
        trainer._round(1)
        (tmp_path / "all").mkdir()
        app = simulated_app(tmp_path / "all", task, everyone)
        for number in (7, 8):
            grid.add(200 + number, app, **{"partition-id": number})
        trainer._round(2)
        labels = np.load(folder.path / "labels.npy")
        assert labels.shape == (3, 9)
        assert (labels[:2, 7:] == -1).all()
        checkpoint, problems = folder.load_checkpoint()
        assert problems == []
        again = Trainer(setup.algorithm, engine, few, Schedule(rounds=4), folder)
        again.restore(checkpoint)
        again._round(3)
        assert len(again.progress.labels[-1]) == 9
