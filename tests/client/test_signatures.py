"""Gradients of classes against plain autograd, and the signatures made of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from coterie.client.block import Models
from coterie.client.stack import Plan
from coterie.client.steps import sign, signature_shape, train, train_and_sign
from coterie.data.federation import Federation
from coterie.data.transforms import Rotate, SwapLabels
from coterie.engines import make_engine
from coterie.engines.kernels.folded import FoldedKernel
from coterie.engines.kernels.graphs import BesideKernel
from coterie.engines.kernels.plain import PlainKernel
from coterie.engines.kernels.stacked import StackedKernel
from coterie.methods.fedavg import FedAvg
from coterie.nets.sketch import Sketch
from coterie.randomness import Rng
from tests.helpers import ragged_federation, setup_of

CPU = torch.device("cpu")


def uneven() -> Federation:
    """Four clients, three classes: one holds all, one lacks a class, one has one class, one has one sample."""
    held = [[0, 1, 2, 0, 1, 2, 0], [0, 2, 2, 2], [1] * 11, [2]]
    x = Rng.seed(4).normal(sum(map(len, held)), 1, 4, 4).float()
    parts = x.split([len(y) for y in held])
    clients = {f"c{i}": (part, torch.tensor(y)) for i, (part, y) in enumerate(zip(parts, held, strict=True))}
    return replace(Federation.from_clients(clients, test=0.0, valid=0.0), num_classes=3)


def engine_of(federation, name="vectorized", **changes):
    setup = setup_of(FedAvg(), federation, engine=name, **changes)
    return make_engine(setup.engine, setup.task(), setup.federation(), "cpu", setup.engine_settings)


def module() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3)).double()


def by_hand(federation, client, params):
    """class -> gradient of the mean loss over the client's training samples of this class, by autograd."""
    x, y = federation.samples(client, "train")
    found = {}
    for label in y.unique().tolist():
        network = module()
        nn.utils.vector_to_parameters(params.clone(), network.parameters())
        nn.functional.cross_entropy(network(x[y == label].double()), y[y == label]).backward()
        found[label] = nn.utils.parameters_to_vector([p.grad for p in network.parameters()])
    return found


def models_of(engine, count):
    return torch.stack([Rng.seed(3).at(i).normal(engine.task.layout.size) for i in range(count)])


def gradients_of(block, models):
    """(position, class) -> gradient, and the same for sample counts."""
    gradients, counts = {}, {}
    for label, holders, found, samples in block.class_gradients(models):
        found, samples = found[:, 0].clone(), samples[:, 0]
        for position, row, number in zip(holders.tolist(), found, samples.tolist(), strict=True):
            gradients[position, label], counts[position, label] = row, number
    return gradients, counts


@pytest.mark.parametrize("at_once", [1, 2, 5, 7, 8192])
@pytest.mark.parametrize("federation", [uneven(), ragged_federation(7)], ids=["uneven", "ragged"])
@pytest.mark.parametrize("name", ["vectorized", "loop"])
def test_class_gradients_are_those_of_autograd(name, federation, at_once):
    engine = engine_of(federation, name)
    clients = torch.tensor([2, 0, 3, 1]) if name == "vectorized" else torch.tensor([1])
    block = engine.block_of(clients, engine.plan)
    block._gradients_at_once = at_once
    models = models_of(engine, len(clients))
    gradients, counts = gradients_of(block, models)
    expected = {}
    for position, client in enumerate(clients.tolist()):
        y = federation.samples(client, "train")[1]
        for label, gradient in by_hand(federation, client, models[position]).items():
            expected[position, label] = int((y == label).sum())
            torch.testing.assert_close(gradients[position, label], gradient, rtol=1e-9, atol=1e-12)
    assert counts == expected
    assert block.gradients == sum(expected.values())


def with_norms(input_shape, outputs):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(64, outputs),
    )


def with_norms_only(input_shape, outputs):
    return nn.Sequential(*(layer for layer in with_norms(input_shape, outputs) if not isinstance(layer, nn.Dropout)))


KERNELS = {"plain": PlainKernel, "beside": BesideKernel, "stacked": StackedKernel, "folded": FoldedKernel.of}


@pytest.mark.parametrize("at_once", [3, 8192])
@pytest.mark.parametrize("name", KERNELS)
def test_class_gradients_use_the_running_statistics_and_drop_nothing(name, at_once):
    """Batches of one class have statistics of their own, by which classes would look alike."""
    federation = uneven()
    make = with_norms_only if name == "folded" else with_norms
    engine = engine_of(federation, "loop", model=make, model_settings={})
    block = engine.block_of(engine.everyone(), Plan(name, KERNELS[name](engine.network, engine.task.loss), 9))
    block._gradients_at_once = at_once
    models = models_of(engine, 4)
    models[:, engine.task.layout.num_parameters :] = 0.5 + models[:, engine.task.layout.num_parameters :].abs()
    before = models.clone()
    gradients, _ = gradients_of(block, models)
    assert torch.equal(models, before)
    for (client, label), found in gradients.items():
        network = make((1, 4, 4), 3).double().eval()
        network.load_state_dict(engine.task.layout.unpack(models[client]), strict=False)
        x, y = federation.samples(client, "train")
        nn.functional.cross_entropy(network(x[y == label].double()), y[y == label]).backward()
        expected = nn.utils.parameters_to_vector([p.grad for p in network.parameters()])
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_class_gradients_of_one_shared_model():
    federation = ragged_federation(5)
    engine = engine_of(federation)
    block = engine.block_of(engine.everyone(), engine.plan)
    table = models_of(engine, 3)
    gradients, _ = gradients_of(block, Models(table, torch.tensor([2, 2, 0, 2, 0])))
    for position, row in ((0, 2), (2, 0), (4, 0)):
        for label, gradient in by_hand(federation, position, table[row]).items():
            torch.testing.assert_close(gradients[position, label], gradient, rtol=1e-9, atol=1e-12)


def test_class_gradients_see_the_clients_views():
    """Turned inputs, and labels that are exchanged: as the client trains."""
    federation = ragged_federation(4)
    views = ((), (Rotate(90),), (SwapLabels(0, 2),))
    turned = replace(federation, views=views, view=torch.tensor([0, 1, 2, 1]))
    engine = engine_of(turned)
    block = engine.block_of(engine.everyone(), engine.plan)
    models = models_of(engine, 4)
    gradients, counts = gradients_of(block, models)
    for client in range(4):
        for label, gradient in by_hand(turned, client, models[client]).items():
            torch.testing.assert_close(gradients[client, label], gradient, rtol=1e-9, atol=1e-12)
    plain = federation.label_counts()[2].tolist()
    assert [counts.get((2, label), 0) for label in range(3)] == plain[::-1]


def test_class_gradients_add_up_to_the_gradient():
    engine = engine_of(ragged_federation(6))
    block = engine.block_of(engine.everyone(), engine.plan)
    models = models_of(engine, 6)
    whole, _ = block.gradient(models)
    total = torch.zeros_like(whole)
    for _, holders, found, samples in block.class_gradients(models):
        found, samples = found[:, 0], samples[:, 0]
        total[holders] += found * (samples.double() / block.samples[holders]).unsqueeze(1)
    torch.testing.assert_close(total, whole, rtol=1e-9, atol=1e-12)


# ---- signatures ----


def signed(engine, step=sign, model=None):
    model = models_of(engine, 1) if model is None else model
    refs = torch.zeros(engine.num_clients, dtype=torch.int64)
    chunks = list(engine.call(step, engine.everyone(), models=model, refs=refs, rng=Rng.seed(0)))
    order = torch.cat([chunk.positions for chunk in chunks]).argsort()
    return {name: torch.cat([chunk.answer[name] for chunk in chunks])[order] for name in chunks[0].answer}


@pytest.mark.parametrize("name", ["vectorized", "loop"])
def test_a_signature_is_a_sketch_of_each_class_and_its_count(name):
    federation = uneven()
    engine = engine_of(federation, name, model_settings={"hidden": 60})
    model = models_of(engine, 1)
    answer = signed(engine, model=model)
    size = engine.task.layout.num_parameters
    width = signature_shape(engine.task)[1]
    assert (size, width) == (16 * 60 + 60 + 60 * 3 + 3, 512)
    assert answer["signature"].shape == (4, 3, 512)
    assert torch.equal(answer["counts"], federation.label_counts())
    assert answer["counts"].tolist() == [[3, 2, 2], [1, 0, 3], [0, 11, 0], [0, 0, 1]]
    sketch = Sketch(size, width, Rng.seed(0).at("signature"), CPU)
    other = engine_of(federation, model_settings={"hidden": 60})
    block = other.block_of(other.everyone(), other.plan)
    gradients, _ = gradients_of(block, model.expand(4, -1))
    for client in range(4):
        for label in range(3):
            row = answer["signature"][client, label]
            if (client, label) in gradients:
                torch.testing.assert_close(row, sketch(gradients[client, label].unsqueeze(0))[0])
            else:
                assert not row.any()


def test_signing_with_training_is_both():
    engine = engine_of(ragged_federation(5))
    both, alone, trained = (signed(engine, step) for step in (train_and_sign, sign, train))
    assert both.keys() == {"params", "samples", "signature", "counts"}
    for name in ("signature", "counts"):
        assert torch.equal(both[name], alone[name])
    assert torch.equal(both["params"], trained["params"])


def test_the_width_of_a_signature():
    task = engine_of(ragged_federation(3)).task
    assert signature_shape(task) == (3, 123)  # all parameters of a small model
    wide = engine_of(ragged_federation(3), model_settings={"hidden": 600}).task
    assert signature_shape(wide) == (3, 512)
    assert signature_shape(replace(wide, num_classes=62)) == (62, 4096 // 62)
    assert signature_shape(replace(wide, num_classes=1000)) == (1000, 32)
    assert signature_shape(replace(wide, num_classes=0)) == (1, 512)


def test_networks_with_batch_norm_sign():
    """One sample of a class is a batch of one: no statistics, and still a finite signature."""
    network = lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))  # noqa: E731
    for name in ("vectorized", "loop"):
        engine = engine_of(uneven(), name, model=network, model_settings={})
        answer = signed(engine, model=engine.initial().unsqueeze(0))
        assert bool(answer["signature"].isfinite().all())
        assert not engine.failures
