"""A worker without Ray: its clients answer as those of a vectorized engine over the whole federation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from coterie.client.optimizers import optimizers
from coterie.client.steps import OWN_MODEL, Answer, client_step, train
from coterie.client.work import SGD
from coterie.data.transforms import Noise
from coterie.engines.ray.worker import Message, Setup, Worker
from coterie.engines.vectorized import VectorizedEngine
from coterie.methods.base import find_algorithm
from coterie.randomness import Rng
from tests.helpers import ragged_federation, setup_of

SETTINGS = {"precision": "float64", "plan": "stacked", "workers": 1, "chunk": 2}
CLIENTS = torch.arange(3, 8)


@pytest.fixture(scope="module")
def federation():
    made = ragged_federation()
    view = torch.arange(len(made)) % 2
    return replace(made, views=((), (Noise(0.5),)), view=view)


@pytest.fixture(scope="module")
def task(federation):
    return setup_of(find_algorithm("fedavg")(), federation).task()


@pytest.fixture
def worker(federation, task):
    share = federation.share(CLIENTS)
    setup = Setup(task, replace(share, x=share.x[:0], y=share.y[:0]), "cpu", SETTINGS, optimizers(), 0)
    made = Worker(torch.get_num_threads())
    told = made.load(setup, share.x.numpy(), share.y.numpy(), {})
    assert told["plan"]["plan"] == "stacked"
    return made


def message(step, cohort, **more):
    refs = np.zeros(len(cohort), dtype=np.int64)
    values = {"key": Rng.seed(1).key, "work": SGD(), "refs": refs, "each": {}, "round": 1, "phase": "round"}
    return Message(step, np.array(cohort), **values | more)


def all_parts(worker, call, first):
    parts = [first]
    while (part := worker.next(call)) is not None:
        parts.append(part)
    return parts


def test_a_share_has_its_own_samples_only_and_the_same_noise(federation):
    share = federation.share(CLIENTS)
    assert len(share.x) < len(federation.x)
    for place, client in enumerate(CLIENTS.tolist()):
        for split in ("train", "valid", "test"):
            for ours, theirs in zip(share.samples(place, split), federation.samples(client, split), strict=True):
                assert torch.equal(ours, theirs)
    again = share.share([1, 4])
    assert torch.equal(again.samples(1)[0], federation.samples(7)[0])


def test_its_clients_train_as_in_one_process(worker, federation, task):
    whole = VectorizedEngine(task, federation, device="cpu", settings=SETTINGS)
    models = task.initial.double().unsqueeze(0)
    refs = torch.zeros(len(CLIENTS), dtype=torch.int64)
    expected = {}
    for chunk in whole.call(train, CLIENTS, models=models, refs=refs, rng=Rng.seed(1)):
        expected |= dict(zip(chunk.positions.tolist(), chunk.answer.params, strict=True))
    first = worker.begin(7, message(train, range(5), work=task.work), models.numpy(), {})
    parts = all_parts(worker, 7, first)
    assert [len(part.positions) for part in parts] == [2, 2, 1]
    found = {int(p): row for part in parts for p, row in zip(part.positions, part.answer["params"], strict=True)}
    assert sorted(found) == sorted(expected)
    for position, params in expected.items():
        assert np.array_equal(found[position], params.numpy())
    assert sum(part.gradients for part in parts) == whole.ledger.entries["start/train"]["gradients"]


@client_step
def count_calls(block, models, work):
    before = block.memory.get(OWN_MODEL, torch.zeros(len(block), 1, dtype=torch.float64))
    block.memory.put(OWN_MODEL, before + 1)
    return Answer(count=before[:, 0])


def test_calls_may_be_made_inside_a_call_and_left_before_their_end(worker):
    outer = worker.begin(1, message(count_calls, range(5), refs=None), None, {})
    inner = worker.begin(2, message(count_calls, [0], refs=None), None, {})
    assert outer.positions.tolist() != []
    assert len(inner.positions) == 1
    assert worker.next(2) is None
    assert worker.next(1) is not None
    worker.end(1)
    assert worker.next(1) is None
    assert worker.memory()[f"present.{OWN_MODEL}"].sum() in (4, 5)  # two chunks of two, and client 0


def test_memory_goes_out_and_comes_back(worker):
    all_parts(worker, 1, worker.begin(1, message(count_calls, [0, 2], refs=None), None, {}))
    kept = {name: array.copy() for name, array in worker.memory().items()}  # as Ray does
    all_parts(worker, 2, worker.begin(2, message(count_calls, range(5), refs=None), None, {}))
    worker.remember(kept)
    assert worker.memory()[f"value.{OWN_MODEL}"][:, 0].tolist() == [1, 0, 1, 0, 0]
    assert worker.memory()[f"present.{OWN_MODEL}"].tolist() == [True, False, True, False, False]


@client_step
def fails_at_two(block, models, work):
    if 2 in block.clients.tolist():
        raise ValueError("two")
    return Answer(count=torch.ones(len(block)))


def test_a_client_that_raises_fails_alone(worker):
    parts = all_parts(worker, 1, worker.begin(1, message(fails_at_two, range(5), refs=None), None, {}))
    [(client, reason)] = [failure for part in parts for failure in part.failed]
    assert client == 2
    assert reason.startswith("ValueError: two (")
    assert sorted(p for part in parts for p in part.positions.tolist()) == [0, 1, 3, 4]
