"""Blocks: hand-checked batches, losses and scores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from coterie.client.batches import DeviceData, StepCounts
from coterie.client.block import Block, Models, take
from coterie.client.steps import Answer, client_step, evaluate, find_step, step_name
from coterie.client.work import SGD
from coterie.data.federation import Federation
from coterie.data.transforms import Rotate
from coterie.engines import make_engine
from coterie.errors import ConfigError, ModelError
from coterie.methods.base import algorithms
from coterie.randomness import Rng
from tests.helpers import WORK, ragged_federation, setup_of

FEDAVG = "fedavg"


def engine_of(federation=None, name="vectorized", **changes):
    from coterie.methods.fedavg import FedAvg

    setup = setup_of(FedAvg(), federation, engine=name, **changes)
    return make_engine(setup.engine, setup.task(), setup.federation(), "cpu", setup.engine_settings)


def one_stack(federation=None, **changes):
    """An engine whose clients make their steps side by side in one stack, so that batches can be watched."""
    engine = engine_of(federation, engine_settings={"precision": "float64", "plan": "stacked"}, **changes)
    engine.plan.each = lambda function, counts: function(slice(0, len(counts.sizes)))
    return engine


def block_of(engine, clients=None) -> Block:
    """A block of these clients, caught from inside a call."""
    caught = []

    @client_step
    def catch(block, models, work):
        caught.append(block)
        return Answer()

    wanted = engine.everyone() if clients is None else torch.tensor(clients)
    list(engine.call(catch, wanted, rng=Rng.seed(7)))
    assert len(caught) == 1
    return caught[0]


def by_hand(engine, client, params, split="train"):
    """Loss and predictions of one client under one model, by plain torch."""
    x, y = engine.federation.samples(client, split)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    module = module.double()
    torch.nn.utils.vector_to_parameters(params, module.parameters())
    with torch.no_grad():
        outputs = module(x.double())
    return torch.nn.functional.cross_entropy(outputs, y).item(), outputs.argmax(1).numpy(), y.numpy()


def random_models(engine, count):
    return torch.stack([Rng.seed(3).at(i).normal(engine.task.layout.size) for i in range(count)])


def test_losses_of_one_model_each():
    engine = engine_of()
    block = block_of(engine)
    models = random_models(engine, len(block))
    found = block.losses(models)
    for position, client in enumerate(block.clients.tolist()):
        assert found[position].item() == pytest.approx(by_hand(engine, client, models[position])[0], rel=1e-9)


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_losses_of_several_shared_models(split):
    engine = engine_of(ragged_federation(6, samples=30))
    block = block_of(engine)
    table = random_models(engine, 3)
    refs = torch.tensor([[0, 2], [2, 1], [1, 1], [0, 1], [2, 0], [1, 0]])
    found = block.losses(Models(table, refs), split)
    assert found.shape == (6, 2)
    for position, client in enumerate(block.clients.tolist()):
        for j in range(2):
            expected = by_hand(engine, client, table[refs[position, j]], split)[0]
            assert found[position, j].item() == pytest.approx(expected, rel=1e-9)


def test_scores_against_scikit_learn():
    engine = engine_of(ragged_federation(6, samples=40))
    block = block_of(engine)
    table = random_models(engine, 2)
    refs = torch.arange(6) % 2
    found = block.evaluate(Models(table, refs))
    for position, client in enumerate(block.clients.tolist()):
        loss, guess, y = by_hand(engine, client, table[refs[position]], "test")
        assert found["samples"][position] == len(y)
        assert found["loss"][position].item() == pytest.approx(loss, rel=1e-9)
        assert found["accuracy"][position].item() == pytest.approx((guess == y).mean())
        macro = f1_score(y, guess, labels=np.unique(y), average="macro", zero_division=0)
        assert found["f1"][position].item() == pytest.approx(macro)


def test_f1_of_two_classes_is_that_of_the_positive_class():
    engine = engine_of(ragged_federation(4, samples=40, classes=2))
    block = block_of(engine)
    table = random_models(engine, 1)
    found = block.evaluate(Models(table, torch.zeros(4, dtype=torch.int64)))
    outputs = block.outputs(table, engine.federation.samples(0, "test")[0].double())[0]
    y = engine.federation.samples(0, "test")[1]
    position = block.clients.tolist().index(0)
    assert found["f1"][position].item() == pytest.approx(f1_score(y, outputs.argmax(1), zero_division=0))


def test_a_client_without_test_samples_scores_zero_of_zero():
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    federation = Federation.from_clients({"a": (x, y), "b": (x, y)}, test=0.0, valid=0.0)
    engine = engine_of(federation, model="mclr", model_settings={})
    chunk = next(
        iter(
            engine.call(
                evaluate,
                engine.everyone(),
                models=random_models(engine, 1),
                refs=torch.zeros(2, dtype=torch.int64),
                rng=Rng.seed(0),
            )
        )
    )
    assert chunk.answer.samples.tolist() == [0, 0]
    assert chunk.answer.accuracy.tolist() == [0.0, 0.0]


def test_training_equals_a_plain_loop_of_torch():
    """One client by hand: the same batches, torch.optim.SGD."""
    engine = one_stack()
    block = block_of(engine)
    start = random_models(engine, 1).expand(len(block), -1)
    seen = []
    original = engine.plan.kernel.gradients

    def watch(params, buffers, batch):
        seen.append(batch[:3])
        return original(params, buffers, batch)

    engine.plan.kernel.gradients = watch
    trained = block.train(start, WORK)
    order = StepCounts(engine.federation.train.sizes[block.clients], WORK).order
    for place in (0, 3, len(block) - 1):
        position = int(order[place])
        module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
        module = module.double()
        torch.nn.utils.vector_to_parameters(start[0].clone(), module.parameters())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.5, weight_decay=1e-3)
        drawn = 0
        for x, y, mask in seen:
            if place >= len(x):
                continue
            real = slice(None) if mask is None else mask[place].bool()
            drawn += len(x[place][real])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(x[place][real]), y[place][real]).backward()
            optimizer.step()
        size = int(engine.federation.train.sizes[block.clients[position]])
        assert drawn == 2 * size  # two epochs, no sample lost or doubled
        expected = torch.nn.utils.parameters_to_vector(module.parameters())
        assert torch.allclose(trained[position], expected, rtol=1e-9, atol=1e-12)


def test_each_epoch_takes_every_sample_once():
    federation = ragged_federation(5)
    numbered = replace(federation, x=torch.arange(len(federation.x)).float().reshape(-1, 1), mean=0.0, std=1.0)
    engine = one_stack(numbered, model="mclr", model_settings={})
    block = block_of(engine)
    taken = []
    original = engine.plan.kernel.gradients

    def watch(params, buffers, batch):
        x, _, mask, *_ = batch
        real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
        taken.append([x[i, real[i], 0].long().tolist() for i in range(len(x))])
        return original(params, buffers, batch)

    engine.plan.kernel.gradients = watch
    block.train(block.initial, SGD(epochs=3, batch_size=4))
    sizes = federation.train.sizes[block.clients]
    order = StepCounts(sizes, SGD(epochs=3, batch_size=4)).order
    for place, position in enumerate(order.tolist()):
        client = int(block.clients[position])
        steps = [step[place] for step in taken if place < len(step)]
        per_epoch = -(-int(sizes[position]) // 4)
        epochs = [sum(steps[e * per_epoch : (e + 1) * per_epoch], []) for e in range(3)]
        rows = sorted(federation.train.rows(client).tolist())
        assert [sorted(epoch) for epoch in epochs] == [rows] * 3
        assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    "work", [SGD(steps=7, batch_size=4), SGD(steps=3, batch_size="full"), SGD(epochs=2, batch_size=99)]
)
def test_number_of_steps(work):
    engine = one_stack()
    block = block_of(engine)
    steps = []
    original = engine.plan.kernel.gradients
    engine.plan.kernel.gradients = lambda *args: steps.append(args[2].x.shape) or original(*args)
    block.train(block.initial, work)
    assert len(steps) == (work.steps or work.epochs)
    assert all(shape[0] == len(block) for shape in steps)


def test_gradient_is_that_of_the_mean_loss():
    engine = engine_of()
    block = block_of(engine)
    models = random_models(engine, len(block))
    gradient, buffers = block.gradient(models)
    assert buffers.shape == (len(block), 0)
    step = 1e-6
    direction = Rng.seed(9).normal(engine.task.layout.size)
    difference = (block.losses(models + step * direction) - block.losses(models - step * direction)) / (2 * step)
    assert torch.allclose(gradient @ direction, difference, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sizes", [(4, 20), (4, 20, 8), (30, 4, 20, 8), (4, 8, 20, 30), (30, 20, 8, 4), (8, 8, 8)])
def test_every_client_gets_its_own_model_back(sizes):
    """Clients train in the order of their sizes. An order that is its own inverse, such as a swap, is an order too."""
    clients = {f"c{i}": (torch.randn(n, 3), torch.arange(n) % 2) for i, n in enumerate(sizes)}
    engine = engine_of(Federation.from_clients(clients), model="mclr", model_settings={})
    models = random_models(engine, len(sizes))
    together = engine.block_of(engine.everyone(), engine.plan).train(models, SGD(lr=0.1, batch_size=4))
    for client in range(len(sizes)):
        block = engine.block_of(torch.tensor([client]), engine.plan)
        alone = block.train(models[client : client + 1], SGD(lr=0.1, batch_size=4))
        assert torch.allclose(together[client], alone[0], rtol=1e-9, atol=1e-12)


def test_label_counts():
    engine = engine_of()
    block = block_of(engine)
    counts = block.label_counts()
    for position, client in enumerate(block.clients.tolist()):
        assert counts[position].tolist() == torch.bincount(engine.federation.samples(client)[1], minlength=3).tolist()


def test_views_turn_batches():
    federation = ragged_federation(4)
    turned = replace(federation, views=((), (Rotate(90),)), view=torch.tensor([0, 1, 1, 0]))
    data = DeviceData(turned, torch.device("cpu"), torch.float64)
    rows = torch.arange(8).reshape(4, 2)
    plain = DeviceData(federation, torch.device("cpu"), torch.float64).gather(rows, torch.zeros(4, dtype=torch.int64))[
        0
    ]
    seen, _ = data.gather(rows, turned.view_of(torch.arange(4)))
    assert torch.equal(seen[[0, 3]], plain[[0, 3]])
    assert torch.equal(seen[[1, 2]], torch.rot90(plain[[1, 2]], 1, (-2, -1)))
    alone, _ = data.gather(rows[1:2], torch.tensor([1]))
    assert torch.equal(alone, seen[1:2])


def test_take_chooses_rows():
    models = Models(torch.arange(8.0).reshape(4, 2), torch.tensor([[0, 3], [1, 2]]))
    assert take(models, torch.tensor([1, 0])).tolist() == [[6.0, 7.0], [2.0, 3.0]]
    with pytest.raises(ConfigError, match="several models each"):
        models.rows()


def test_answer_names():
    answer = Answer(update=torch.zeros(2))
    assert answer.update.tolist() == [0.0, 0.0]
    with pytest.raises(AttributeError, match="has no 'params'; it has update"):
        _ = answer.params
    with pytest.raises(ConfigError, match="cannot have a tensor named 'items'"):
        Answer(items=torch.zeros(2))


def test_steps_are_found_by_name_only_if_registered():
    assert find_step(step_name(evaluate)) is evaluate
    algorithms()
    assert find_step("coterie.block:choose").__name__ == "choose"
    assert find_step("coterie.algorithms.ifca:choose_and_train").__name__ == "choose_and_train"
    with pytest.raises(ConfigError, match="no client step 'os:getcwd'"):
        find_step("os:getcwd")


def test_networks_that_do_not_fit():
    with pytest.raises(ModelError, match="has 2 outputs, but synthetic has labels up to 2: it needs 3 outputs"):
        engine_of(model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2)), model_settings={})
    with pytest.raises(ModelError, match=r"Linear cannot take samples of shape \(1, 4, 4\)"):
        engine_of(model=lambda: torch.nn.Linear(5, 3), model_settings={})
    with pytest.raises(ModelError, match="one number for each sample"):
        engine_of(loss=lambda outputs, y: torch.nn.functional.cross_entropy(outputs, y))
