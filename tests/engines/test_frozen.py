"""A network with a frozen body: only the head travels, and every engine computes with the same body."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from coterie.client.work import SGD
from coterie.engines import make_engine
from coterie.engines.kernels.graphs import GraphPlan
from coterie.engines.kernels.layers import LayerKernel
from coterie.engines.kernels.native import NativeKernel
from coterie.engines.kernels.stacked import StackedKernel
from coterie.methods.fedavg import FedAvg
from coterie.methods.fesem import FeSEM
from coterie.nets.flat import flatten, state_dict
from coterie.randomness import Rng
from coterie.runs.loop import Schedule, Trainer
from tests.helpers import assert_same, finished, setup_of

HEAD = 5 * 3 + 3


def frozen_body(input_shape, outputs):
    body = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU()).requires_grad_(False)
    return nn.Sequential(body, nn.Linear(5, outputs))


def frozen_norm(input_shape, outputs):
    """A frozen body whose BatchNorm still follows its data."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5)).requires_grad_(False)
    return nn.Sequential(body, nn.Linear(5, outputs))


def setup(model, **changes):
    return setup_of(FedAvg(), model=model, model_settings={}, **changes)


def body_of(module):
    return {name: p.detach().clone() for name, p in module.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize(("model", "buffers"), [(frozen_body, 0), (frozen_norm, 10)])
def test_only_what_is_trained_travels(model, buffers):
    trainer = finished(setup(model, engine="loop"))
    size = HEAD + buffers
    assert trainer.engine.task.layout.size == size
    assert trainer.state.centers.shape == (1, size)
    assert {tensor.shape[-1] for tensor in trainer.state.tensors().values() if tensor.is_floating_point()} == {size}
    bytes_of_round = 9 * size * 8
    totals = trainer.engine.ledger.totals()
    assert (totals["down"], totals["up"]) == (3 * bytes_of_round, 3 * bytes_of_round)


@pytest.mark.parametrize("model", [frozen_body, frozen_norm])
@pytest.mark.parametrize("work", [SGD(lr=0.2, momentum=0.5, batch_size=5), SGD(optimizer="adam", batch_size=5)])
def test_stacked_equals_the_loop_and_the_body_stays(model, work):
    made = []
    for engine, settings in (("loop", {}), ("vectorized", {"plan": "stacked"})):
        trainer = finished(setup(model, engine=engine, work=work, engine_settings={"precision": "float64"} | settings))
        before = body_of(setup(model).task().module)
        for name, value in body_of(trainer.engine.task.module).items():
            assert torch.equal(value, before[name])
            inside = dict(trainer.engine.network.module.named_parameters())[name]
            assert torch.equal(inside, value.double())
        made.append(trainer)
    assert_same(made[0].state.tensors(), made[1].state.tensors(), exact=False, tolerance=1e-9)
    moved = made[0].state.centers[0] - made[0].engine.initial()
    assert float(moved[:HEAD].abs().min()) > 0


def test_recorded_steps_equal_the_loop():
    engine = make_engine("loop", setup(frozen_norm).task(), setup(frozen_norm).federation(), "cpu", {})
    engine.data._may_render = 1 << 30
    start, found = engine.initial().repeat(9, 1), []
    for plan in (engine.plan, GraphPlan("stacked+graph", StackedKernel(engine.network, engine.task.loss), 99)):
        with torch.no_grad():
            found.append(engine.block_of(torch.arange(9), plan, Rng.seed(3)).train(start, SGD(batch_size=5)))
    assert torch.allclose(*found, rtol=1e-4, atol=1e-6)


def test_hand_written_and_compiled_kernels_leave_it_to_others():
    made = make_engine("vectorized", setup(frozen_body).task(), setup(frozen_body).federation(), "cpu", {})
    assert made.describe()["plan"] in ("stacked", "loop")
    assert LayerKernel.of(made.network, made.task.loss) is None
    assert NativeKernel.of(made.network, made.task.loss, made.task.input_shape, 1) is None


def test_the_exported_weights_load_with_the_frozen_values():
    trainer = finished(setup(frozen_norm))
    module, center = trainer.engine.task.module, trainer.state.centers[0]
    other = frozen_norm((1, 4, 4), 3)
    other.load_state_dict(state_dict(module, center))
    assert_same(body_of(other), body_of(module))
    assert torch.equal(flatten(other).double(), center.float().double())


def test_clusters_share_the_body():
    first = setup_of(FeSEM(num_clusters=2), model=frozen_body, model_settings={})
    trainer = finished(first)
    assert trainer.state.centers.shape == (2, HEAD)
    drawn = first.task().draw(Rng.seed(5))
    assert drawn.shape == (HEAD,)
    assert not torch.equal(drawn, first.task().initial)


def test_the_body_hangs_on_the_seed():
    one, same, other = (
        body_of(replace(setup(frozen_body), schedule=Schedule(seed=seed)).task().module) for seed in (1, 1, 2)
    )
    assert_same(one, same)
    assert not torch.equal(one["0.1.weight"], other["0.1.weight"])


def test_sites_make_the_same_body(tmp_path):
    pytest.importorskip("flwr", reason="needs pip install 'coterie[flower]'")
    from tests.flower.fakes import engine_over

    what = setup(frozen_norm, work=SGD(lr=0.1, optimizer="adamw", clip_norm=1.0, batch_size=5))
    engine, _ = engine_over(tmp_path, what.task(), what.federation())
    over_sites = Trainer(what.algorithm, engine, what.federation(), Schedule(rounds=2))
    over_sites.run()
    loop = make_engine("loop", what.task(), what.federation(), "cpu", {"precision": "float64"})
    in_process = Trainer(what.algorithm, loop, what.federation(), Schedule(rounds=2))
    in_process.run()
    assert_same(over_sites.state.tensors(), in_process.state.tensors(), exact=False, tolerance=1e-9)
    sent = {key: over_sites.summary()["bytes"][key] for key in ("down", "up")}
    assert sent == {key: in_process.summary()["bytes"][key] for key in ("down", "up")}
