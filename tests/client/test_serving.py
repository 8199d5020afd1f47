"""Serving: a mixture scores as its formula says, and a client without a model of its own uses the one sent."""

from __future__ import annotations

import torch

from coterie.client.block import Mixture, Models, mixed_outputs
from coterie.client.serving import own_or_sent
from coterie.client.steps import OWN_MODEL, find_step
from coterie.nets.flat import state_dict
from coterie.nets.mixture import MixtureModel, Served
from tests.helpers import finished, setup_of


def block_of(trainer, clients):
    return trainer.engine.block_of(torch.tensor(clients), trainer.engine.plan)


def trained(name="local"):
    from coterie.methods.base import algorithms

    return finished(setup_of(algorithms()[name]()))


def test_probabilities_are_mixed():
    outputs = torch.tensor([[[2.0, 0.0]], [[0.0, 1.0]]])
    found = mixed_outputs(outputs, torch.tensor([[0.25], [0.75]]), num_classes=2).exp()
    expected = 0.25 * outputs[0].softmax(1) + 0.75 * outputs[1].softmax(1)
    assert torch.allclose(found, expected)


def test_numbers_are_averaged():
    outputs = torch.tensor([[[2.0]], [[6.0]]])
    assert mixed_outputs(outputs, torch.tensor([[0.25], [0.75]]), num_classes=0).tolist() == [[5.0]]


def test_a_mixture_of_one_scores_as_its_model():
    trainer = trained()
    block = block_of(trainer, [0, 3, 8])
    own = block.memory.get(OWN_MODEL, block.initial)
    plain, mixed = block.evaluate(own), block.evaluate_mixture(Mixture.of_one(own))
    assert plain.keys() == mixed.keys()
    for name in plain:
        assert torch.allclose(plain[name].double(), mixed[name].double()), name


def test_a_mixture_scores_as_the_module_that_is_exported():
    trainer = trained()
    task = trainer.engine.task
    block = block_of(trainer, [2, 5])
    own = block.memory.get(OWN_MODEL, block.initial)
    params = torch.stack([own, block.initial], dim=1)
    weights = torch.tensor([[0.7, 0.3], [0.2, 0.8]])
    bias = torch.linspace(-1, 1, 4 * task.num_classes).reshape(2, 2, -1)
    models = Models(params.reshape(4, -1), torch.arange(4).reshape(2, 2))
    scores = block.evaluate_mixture(Mixture(models, weights, bias))
    for place, client in enumerate((2, 5)):
        served = Served(params[place], weights[place], bias[place])
        module = served.module(task.module, task.num_classes, task.input_shape)
        assert isinstance(module, MixtureModel)
        again = MixtureModel.from_state_dict(task.module, module.state_dict())
        x, y = trainer.federation.samples(client, "test")
        loss = torch.nn.functional.cross_entropy(again(x.float()), y)
        assert torch.allclose(scores["loss"][place].float(), loss.detach(), rtol=1e-4)


def test_one_model_with_a_bias_is_one_state_dict():
    trainer = trained()
    task = trainer.engine.task
    bias = torch.linspace(-1, 1, task.num_classes).unsqueeze(0)
    module = Served(task.initial.unsqueeze(0), torch.ones(1), bias).module(
        task.module, task.num_classes, task.input_shape
    )
    assert type(module) is type(task.module)
    plain = state_dict(task.module, task.initial)
    x = torch.rand(4, *task.input_shape)
    task.module.load_state_dict(plain)
    assert torch.allclose(module(x), task.module.eval()(x) + bias, atol=1e-5)


def test_without_an_own_model_the_sent_one_is_served():
    trainer = trained("fedavg")
    block = block_of(trainer, [1])
    sent = Models(trainer.state.centers, torch.zeros(1, dtype=torch.int64))
    assert torch.equal(own_or_sent(block, sent, trainer.engine.task.work).params[0], trainer.state.centers)
    block.memory.put(OWN_MODEL, block.initial)
    assert torch.equal(own_or_sent(block, sent, trainer.engine.task.work).params[0], block.initial)


def test_both_steps_can_be_found_by_name():
    assert find_step("coterie.serving:own_or_sent.evaluate") is own_or_sent.evaluate
    assert find_step("coterie.serving:own_or_sent.parts") is own_or_sent.parts
