"""Client optimizers: found by name, the same under every plan, and never importing what a message names."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

from coterie.client.batches import StepCounts
from coterie.client.optimizers import MomentumSGD, Optimizer, find_optimizer, move, optimizers, register_optimizer
from coterie.client.stack import Plan
from coterie.client.steps import step_modules
from coterie.client.work import SGD, Corrected, FirstOrderMAML, Proximal
from coterie.engines import make_engine
from coterie.engines.kernels.graphs import BesideKernel, GraphPlan
from coterie.engines.kernels.layers import LayerKernel
from coterie.engines.kernels.plain import PlainKernel
from coterie.engines.kernels.stacked import StackedKernel
from coterie.errors import ConfigError, UnknownName
from coterie.methods.fedavg import FedAvg
from coterie.randomness import Rng
from tests.helpers import setup_of

PLANS = {
    "loop": lambda e: Plan("loop", PlainKernel(e.network, e.task.loss)),
    "beside": lambda e: Plan("loop", BesideKernel(e.network, e.task.loss)),
    "stacked": lambda e: Plan("stacked", StackedKernel(e.network, e.task.loss), 99),
    "layers": lambda e: Plan("layers", LayerKernel.of(e.network, e.task.loss), 4),
    "stacked+graph": lambda e: GraphPlan("stacked+graph", StackedKernel(e.network, e.task.loss), 99),
    "loop+graph": lambda e: GraphPlan("loop+graph", PlainKernel(e.network, e.task.loss), 4),
}
TORCHS = {
    "sgd": (SGD(lr=0.1, momentum=0.9, weight_decay=0.01), torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "clipped": (SGD(lr=0.1, momentum=0.9, clip_norm=0.4), torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": (SGD(lr=0.1, momentum=0.9, optimizer="nesterov"), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (SGD(lr=0.02, optimizer="adam", weight_decay=0.1), torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw": (SGD(lr=0.02, optimizer="adamw", weight_decay=0.1), torch.optim.AdamW, {"weight_decay": 0.1}),
    "adam clipped": (SGD(lr=0.02, optimizer="adam", clip_norm=0.3), torch.optim.Adam, {}),
}


def engine_of(work, model="mlp", settings=None):
    setup = setup_of(FedAvg(), model=model, model_settings={"hidden": 6} if model == "mlp" else {}, work=work)
    engine = make_engine("loop", setup.task(), setup.federation(), "cpu", {"precision": "float64", **(settings or {})})
    engine.data._may_render = 1 << 30
    return engine


def trained(engine, plan, work):
    """Everyone trained from the first weights: [N, P]."""
    start = engine.initial().repeat(engine.num_clients, 1)
    with torch.no_grad():
        return engine.block_of(torch.arange(engine.num_clients), plan, Rng.seed(3)).train(start, work)


def by_torch(engine, work, kind, options):
    """Clients one by one with torch.optim, on batches of all their samples."""
    rows = []
    for client in range(engine.num_clients):
        module = engine.task.module.double()
        module.load_state_dict(engine.task.layout.unpack(engine.initial()))
        x, y = engine.federation.samples(client)
        optimizer = kind(module.parameters(), lr=work.lr, **options)
        for _ in range(steps_of(engine, work)[client]):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x.double()), y).backward()
            if work.clip_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), work.clip_norm)
            optimizer.step()
        rows.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    return torch.stack(rows)


def steps_of(engine, work):
    counts = StepCounts(engine.federation.train.sizes, work)
    return counts.steps[torch.argsort(counts.order)].tolist()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", TORCHS)
def test_every_plan_makes_torchs_steps(name, plan):
    work, kind, options = TORCHS[name]
    work = SGD(**{**vars(work), "batch_size": "full", "epochs": 4})
    engine = engine_of(work)
    expected = by_torch(engine, work, kind, options)
    assert (trained(engine, PLANS[plan](engine), work) - expected).abs().max() < 1e-12


def small_cnn(input_shape, outputs):
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, outputs))


class Sums(nn.Module):
    """Two parameters whose gradients are one and the same tensor."""

    def __init__(self, input_shape, outputs):
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(16, outputs)), nn.Parameter(torch.randn(16, outputs))

    def forward(self, x):
        return x.flatten(1) @ (self.one + self.other)


RAGGED = {
    "adam": SGD(lr=0.02, optimizer="adam", batch_size=4, epochs=2),
    "adamw": SGD(lr=0.02, optimizer="adamw", weight_decay=0.1, batch_size=4, epochs=2),
    "nesterov": SGD(lr=0.1, optimizer="nesterov", momentum=0.9, weight_decay=0.1, batch_size=5, epochs=2),
    "clipped": SGD(lr=0.1, momentum=0.9, weight_decay=0.1, clip_norm=0.3, batch_size=4, epochs=2),
    "proximal": Proximal(lr=0.02, optimizer="adam", prox=0.3, clip_norm=0.5, batch_size=5),
    "corrected": Corrected(lr=0.02, optimizer="adamw", prox=0.3, batch_size=5),
    "maml": FirstOrderMAML(lr=0.02, optimizer="adam", inner_lr=0.05, batch_size=5, epochs=2),
}


@pytest.mark.parametrize("plan", ["beside", "stacked", "stacked+graph", "loop+graph"])
@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("model", [small_cnn, Sums])
def test_ragged_clients_stand_still_with_their_state(model, name, plan):
    work = RAGGED[name]
    engine = engine_of(work, model)
    assert len(set(steps_of(engine, work))) > 1
    expected = trained(engine, PLANS["loop"](engine), work)
    made = PLANS[plan](engine)
    for _ in range(2):  # state is fresh in each call
        assert torch.allclose(trained(engine, made, work), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", RAGGED)
def test_a_learning_rate_on_the_device(name):
    work = RAGGED[name]
    engine = engine_of(work, small_cnn)
    plan = PLANS["stacked+graph"](engine)
    for lr in (0.01, 0.003, 0.02):  # from the second on it lies on the device
        now = type(work)(**{**vars(work), "lr": lr})
        expected = trained(engine, PLANS["loop"](engine), now)
        assert torch.allclose(trained(engine, plan, now), expected, rtol=1e-9, atol=1e-12)
    assert all(isinstance(static._lr, torch.Tensor) for static in plan._made.values())


@pytest.mark.gpu
@pytest.mark.parametrize("plan", ["stacked", "stacked+graph", "loop+graph"])
@pytest.mark.parametrize("name", RAGGED)
def test_on_a_gpu_every_plan_equals_the_loop(name, plan):
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    found = []
    for kind, settings in (("loop", {}), ("vectorized", {"plan": plan})):
        setup = setup_of(FedAvg(), model=small_cnn, model_settings={}, work=RAGGED[name])
        engine = make_engine(kind, setup.task(), setup.federation(), "cuda", {"precision": "float64", **settings})
        for lr in (0.01, 0.01, 0.003, 0.002):  # recorded, replayed, recorded with lr on the device, replayed
            work = type(RAGGED[name])(**{**vars(RAGGED[name]), "lr": lr})
            result = trained(engine, engine.plan, work)
        found.append(result.cpu())
    assert torch.allclose(*found, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("plan", ["native", "layers", "stacked", "loop"])
@pytest.mark.parametrize("name", ["adam", "clipped", "proximal", "maml"])
def test_every_plan_is_possible_with_every_optimizer(name, plan):
    work = RAGGED[name]
    if plan == "native" and shutil.which("c++") is None:
        pytest.skip("no C++ compiler here")
    setup = setup_of(FedAvg(), model=small_cnn, model_settings={}, work=work)
    settings = {"precision": "float64", "plan": plan, "workers": 2}
    made = make_engine("vectorized", setup.task(), setup.federation(), "cpu", settings)
    assert (made.plan.name, made.notes) == (plan, [])
    expected = trained(engine_of(work, small_cnn), PLANS["loop"](engine_of(work, small_cnn)), work)
    assert torch.allclose(trained(made, made.plan, work), expected, rtol=1e-9, atol=1e-12)


def test_memory_follows_the_state():
    one, two, four = (
        engine_of(work).bytes_per_client(work)
        for work in (SGD(batch_size=5), SGD(momentum=0.5, batch_size=5), SGD(optimizer="adam", batch_size=5))
    )
    assert four - two == two - one == 8 * engine_of(SGD()).task.layout.size


def test_plans_are_measured_for_each_optimizer():
    from coterie.engines.plans import signature

    works = [SGD(), SGD(momentum=0.5), SGD(optimizer="adam"), SGD(optimizer="adamw"), SGD(clip_norm=1.0)]
    assert len({signature(engine_of(work), ["stacked"]) for work in works}) == len(works)


class HalfStep(Optimizer):
    """A user's own."""

    def step(self, params, direction, state, lr, count):
        move(params, direction, lr / 2)


def test_a_users_own_optimizer_is_module_and_class():
    name = f"{__name__}:HalfStep"
    engine = engine_of(SGD(lr=0.2))
    expected = trained(engine, PLANS["loop"](engine), SGD(lr=0.1))
    work = SGD(lr=0.2, optimizer=name).for_run(5)
    for plan in ("loop", "stacked", "loop+graph"):
        assert torch.allclose(trained(engine, PLANS[plan](engine), work), expected, rtol=1e-12)


class OwnNames(MomentumSGD):
    """Momentum under a name that the engine uses for the parameters."""

    def __init__(self, work):
        super().__init__(work)
        self.keeps = ("w",)

    def step(self, params, direction, state, lr, count):
        super().step(params, direction, {"velocity": state["w"]}, lr, count)


def test_state_may_have_any_name():
    engine = engine_of(SGD())
    work = SGD(lr=0.1, momentum=0.9)
    expected = trained(engine, PLANS["loop"](engine), work)
    own = SGD(lr=0.1, momentum=0.9, optimizer=f"{__name__}:OwnNames").for_run(5)
    for plan in ("loop", "stacked", "loop+graph"):
        assert torch.allclose(trained(engine, PLANS[plan](engine), own), expected, rtol=1e-12)


def test_other_processes_are_told_the_modules_of_optimizers():
    SGD(optimizer=f"{__name__}:HalfStep").for_run(5)
    assert {__name__, "coterie.client.optimizers"} <= set(step_modules())


def test_an_optimizer_is_registered_by_name(monkeypatch):
    monkeypatch.setattr("coterie.client.optimizers._OPTIMIZERS", {})
    assert register_optimizer("half")(HalfStep) is HalfStep
    assert find_optimizer("half") is HalfStep
    assert list(optimizers()) == ["half"]


def test_what_is_no_optimizer():
    with pytest.raises(UnknownName, match=r"There is no optimizer 'adma'\. Did you mean 'adam'\?"):
        SGD(optimizer="adma").for_run(5)
    with pytest.raises(ConfigError, match=r"optimizer nowhere:Lion cannot be imported"):
        SGD(optimizer="nowhere:Lion").for_run(5)
    with pytest.raises(ConfigError, match=r"optimizer torch:nn is not a subclass"):
        SGD(optimizer="torch:nn").for_run(5)
    with pytest.raises(ConfigError, match=r"^The optimizer nesterov needs momentum"):
        SGD(optimizer="nesterov").for_run(5)


def test_a_message_imports_nothing():
    with pytest.raises(ConfigError, match=r"There is no optimizer 'antigravity:x' here\. Import the module"):
        SGD(optimizer="antigravity:x").make_optimizer()
