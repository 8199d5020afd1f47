"""Every plan of training gives what the loop gives: layers, workers, stacks, recorded steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from coterie.client.batches import StepCounts
from coterie.client.block import Models
from coterie.client.stack import Plan
from coterie.client.work import SGD, Corrected, FirstOrderMAML, HessianFreeMAML, Partial, Proximal, Weighted
from coterie.data.federation import Federation
from coterie.engines import make_engine
from coterie.engines.kernels.folded import FoldedKernel
from coterie.engines.kernels.graphs import GraphPlan
from coterie.engines.kernels.layers import Convolutions, LayerKernel
from coterie.engines.kernels.plain import PlainKernel
from coterie.engines.kernels.stacked import StackedKernel
from coterie.errors import ConfigError
from coterie.methods.apfl import Interpolated
from coterie.methods.pfedme import Envelope
from coterie.nets.flat import Network, cross_entropy, mse
from coterie.randomness import Rng
from tests.helpers import ragged_federation, setup_of


def small_cnn(input_shape, outputs):
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 2, stride=1, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4, 5),
        nn.ReLU(),
        nn.Linear(5, outputs),
    )


def odd_cnn(input_shape, outputs):
    """A picture whose last row and column no pool sees, a pool of three, a dense layer without bias."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 2, 3, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(2, 4, bias=False),
        nn.ReLU(),
        nn.Linear(4, outputs),
    )


def deep_cnn(input_shape, outputs):
    """Three convolutions, of which only the second takes what the first made."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(3, 2, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Conv2d(2, 4, 2),
        nn.Flatten(),
        nn.Linear(4, outputs),
    )


def mean_cnn(input_shape, outputs):
    """Means of pools, behind a ReLU and behind a convolution; one that does not see the last row and column."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(3, 2, 2, padding=1),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(2, outputs),
    )


def normed(input_shape, outputs):
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(48, outputs),
    )


def blocks(input_shape, outputs):
    """What image networks are made of: norms of both kinds, depthwise and strided convolutions, shortcuts.

    A large eps keeps rounding small: batches of one or two samples have hardly any variance.
    """

    class Shortcut(nn.Module):
        def __init__(self, *layers):
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def forward(self, x):
            return x + self.layers(x)

    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6, eps=0.1),
        nn.ReLU6(),
        Shortcut(
            nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False),
            nn.BatchNorm2d(6, eps=0.1),
            nn.ReLU(),
            nn.Conv2d(6, 6, 1),
        ),
        nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=6),
        nn.BatchNorm2d(6, eps=0.1),
        nn.Conv2d(6, 4, 1, stride=2, bias=False),
        nn.GroupNorm(2, 4, eps=0.1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, outputs),
    )


WORKS = {
    "plain": SGD(lr=0.1, batch_size=5, epochs=2),
    "momentum": SGD(lr=0.1, momentum=0.9, weight_decay=0.01, batch_size=4, epochs=3),
    "decay": SGD(lr=0.1, weight_decay=0.02, batch_size=4, steps=7),
    "full": SGD(lr=0.1, batch_size="full", epochs=3),
    "proximal": Proximal(lr=0.1, momentum=0.5, prox=0.3, batch_size=5),
    "maml": FirstOrderMAML(lr=0.1, inner_lr=0.05, batch_size=5, epochs=2),
    "hf": HessianFreeMAML(lr=0.1, inner_lr=0.05, batch_size=5),
}


def trained(make, model, work, federation=None, **extras):
    """Everyone trained from the first weights, in the plan that `make` makes of an engine."""
    federation = ragged_federation() if federation is None else federation
    setup = setup_of(__import__("coterie").FedAvg(), federation, model=model, model_settings={}, work=replace(work))
    engine = make_engine("loop", setup.task(), federation, "cpu", {"precision": "float64"})
    plan = make(engine)
    start = engine.initial().repeat(len(federation), work.models)
    with torch.no_grad():
        return engine.block_of(torch.arange(len(federation)), plan, Rng.seed(3)).train(start, work, **extras)


def loop(engine):
    return engine.plan


def layers(piece, workers=1):
    return lambda e: Plan("layers", LayerKernel.of(e.network, e.task.loss), piece, workers)


def as_on_a_gpu(grouped):
    """Grouped convolutions, or clients beside each other; the first convolution by patches."""
    return lambda e: Plan(
        "layers", LayerKernel.of(e.network, e.task.loss, Convolutions(grouped=grouped, patches=True)), 99
    )


def stacked(piece):
    return lambda e: Plan("stacked", StackedKernel(e.network, e.task.loss), piece)


def folded(piece):
    return lambda e: Plan("folded", FoldedKernel.of(e.network, e.task.loss), piece)


def graph(kind, piece):
    def make(engine):
        kernels = {
            "layers": lambda: LayerKernel.of(engine.network, engine.task.loss),
            "stacked": lambda: StackedKernel(engine.network, engine.task.loss),
            "loop": lambda: PlainKernel(engine.network, engine.task.loss),
            "folded": lambda: FoldedKernel.of(engine.network, engine.task.loss),
        }
        engine.data._may_render = 1 << 30
        return GraphPlan(kind, kernels[kind](), piece)

    return make


PLANS = {
    "layers-1": layers(1),
    "layers-4": layers(4),
    "layers-all": layers(99),
    "layers-workers": layers(2, workers=3),
    "layers-grouped": as_on_a_gpu(True),
    "layers-patches": as_on_a_gpu(False),
    "stacked": stacked(99),
    "folded": folded(99),
    "folded-4": folded(4),
    "graph-folded": graph("folded", 4),
    "graph-layers": graph("layers", 99),
    "graph-layers-4": graph("layers", 4),
    "graph-stacked": graph("stacked", 99),
    "graph-loop": graph("loop", 1),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("model", [small_cnn, odd_cnn, deep_cnn, mean_cnn])
def test_every_plan_trains_as_the_loop_does(model, work, plan):
    expected = trained(loop, model, WORKS[work])
    found = trained(PLANS[plan], model, WORKS[work])
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("plan", ["stacked", "graph-stacked", "graph-loop"])
@pytest.mark.parametrize("work", ["momentum", "full", "maml"])
def test_networks_with_statistics_and_dropout(work, plan):
    expected = trained(loop, normed, WORKS[work])
    found = trained(PLANS[plan], normed, WORKS[work])
    assert torch.allclose(found, expected, rtol=1e-8, atol=1e-11)


def work_of_methods(kind):
    """Local work that methods define, with what it needs for nine clients."""
    torch.manual_seed(0)
    rest = SGD(lr=0.1, momentum=0.5, weight_decay=0.01, batch_size=4, epochs=2)
    if kind == "weighted":
        return Weighted.of(rest), {"weights": 0.2 * torch.rand(9, int(ragged_federation().train.sizes.max())).double()}
    if kind == "partial":
        return Partial.of(rest, [True, False, False, True]), {}
    if kind == "interpolated":
        return Interpolated.of(rest), {"alpha": torch.rand(9, 1).double()}
    return Envelope(lr=0.1, batch_size=4, inner_steps=2), {}


def two_dense(input_shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 7), nn.ReLU(), nn.Linear(7, outputs))


def two_dense_normed(input_shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 7), nn.BatchNorm1d(7, affine=False), nn.Linear(7, outputs))


def convolved_normed(input_shape, outputs):
    norm = nn.BatchNorm2d(2, eps=0.1, affine=False)
    return nn.Sequential(nn.Conv2d(1, 2, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(8, outputs))


@pytest.mark.parametrize("kind", ["weighted", "partial", "interpolated", "envelope"])
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_does_the_work_of_methods(kind, plan):
    for model in (convolved_normed,) if "folded" in plan else (two_dense, two_dense_normed):
        if model is two_dense_normed and "layers" in plan:
            continue
        work, extras = work_of_methods(kind)
        expected = trained(loop, model, work, **extras)
        assert torch.allclose(trained(PLANS[plan], model, work, **extras), expected, rtol=1e-9, atol=1e-12)
        plain = trained(loop, model, SGD(lr=0.1, momentum=0.5, weight_decay=0.01, batch_size=4, epochs=2))
        assert not torch.allclose(expected[:, -plain.shape[1] :], plain)


@pytest.mark.parametrize("plan", ["layers-4", "graph-layers", "graph-stacked"])
def test_extras_go_with_their_clients(plan):
    work = Corrected(lr=0.1, prox=0.1, batch_size=5)
    engine = make_engine("loop", setup_of(__import__("coterie").FedAvg(), model=small_cnn, model_settings={}).task(),
                         ragged_federation(), "cpu", {"precision": "float64"})  # fmt: skip
    size = engine.task.layout.num_parameters
    extra = torch.randn(9, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = trained(loop, small_cnn, work, correction=extra)
    assert torch.allclose(trained(PLANS[plan], small_cnn, work, correction=extra), expected, rtol=1e-9, atol=1e-12)


def test_a_recording_is_used_again_and_in_several_tables(monkeypatch):
    monkeypatch.setattr("coterie.engines.kernels.graphs._ENTRIES", 9 * 5 * 2)  # two steps a table
    made = []

    def make(engine):
        plan = graph("layers", 99)(engine)
        made.append(plan)
        return plan

    expected = trained(loop, small_cnn, WORKS["momentum"])
    assert torch.allclose(trained(make, small_cnn, WORKS["momentum"]), expected, rtol=1e-9)
    assert len(made[0]._made) >= 1


def test_another_step_size_needs_no_other_recording():
    federation = ragged_federation(spread=0.0)
    setup = setup_of(__import__("coterie").FedAvg(), federation, model=small_cnn, model_settings={})
    engine = make_engine("loop", setup.task(), federation, "cpu", {"precision": "float64"})
    plan = graph("layers", 99)(engine)
    start = engine.initial().repeat(9, 1)
    results = []
    for lr in (0.1, 0.05):
        with torch.no_grad():
            results.append(engine.block_of(torch.arange(9), plan, Rng.seed(3)).train(start, SGD(lr=lr, batch_size=4)))
    assert len(plan._made) == 1
    assert not torch.allclose(results[0], results[1])
    expected = trained(loop, small_cnn, SGD(lr=0.05, batch_size=4), federation)
    assert torch.allclose(results[1], expected, rtol=1e-9)


def test_what_layers_cannot_do_is_left_to_others():
    def kernel(module, loss=cross_entropy):
        return LayerKernel.of(Network(module, torch.float32, torch.device("cpu")), loss)

    assert kernel(nn.Sequential(nn.Flatten(), nn.Linear(4, 2))) is not None
    assert kernel(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), mse) is None
    for layer in (nn.BatchNorm1d(2), nn.Tanh(), nn.Dropout(0.1)):
        assert kernel(nn.Sequential(nn.Linear(4, 2), layer)) is None
    assert kernel(nn.Conv2d(2, 2, 3, groups=2)) is None
    assert kernel(nn.Sequential(nn.Conv2d(1, 2, 3, padding="same"), nn.Flatten(), nn.Linear(8, 2))) is None
    for pool in (nn.MaxPool2d(2), nn.AvgPool2d(2)):
        assert kernel(nn.Sequential(nn.Conv2d(1, 2, 3), pool, nn.Flatten(), nn.Linear(8, 2))) is not None
    for pool in (
        nn.MaxPool2d(3, 2),
        nn.AvgPool2d(3, 2),
        nn.AvgPool2d(2, padding=1),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.AvgPool2d(2, divisor_override=3),
    ):
        assert kernel(nn.Sequential(nn.Conv2d(1, 2, 3), pool, nn.Flatten(), nn.Linear(8, 2))) is None
    shared = nn.Linear(4, 4)
    assert kernel(nn.Sequential(shared, nn.ReLU(), shared)) is None

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            return self.layer(x) * 2

    assert kernel(Own()) is None


def test_pieces_keep_in_step_and_pad_little():
    sizes = torch.tensor([40, 39, 38, 21, 20, 19, 5])
    counts = StepCounts(sizes, SGD(batch_size=10))
    assert [(s.start, s.stop) for s in counts.pieces(4)] == [(0, 3), (3, 4), (4, 6), (6, 7)]
    full = StepCounts(torch.tensor([100, 90, 80, 40, 38]), SGD(batch_size="full"))
    runs = full.pieces(1000)
    for run in runs:
        part = full.sizes[run]
        assert float((part.max() - part).sum()) <= 0.15 * float(part.max() * len(part))
    assert len(runs) == 3
    assert [s.stop - s.start for s in StepCounts(torch.full((9,), 20), SGD()).pieces(4)] == [4, 4, 1]


@pytest.mark.parametrize("plan", ["layers", "layers+workers", "stacked", "loop"])
def test_a_plan_can_be_asked_for(plan):
    setup = setup_of(__import__("coterie").FedAvg())
    engine = make_engine("vectorized", setup.task(), setup.federation(), "cpu", {"plan": plan, "workers": 2})
    assert engine.describe()["plan"] == plan
    assert "measured" not in engine.describe()


def test_a_plan_that_is_not_possible_is_refused():
    setup = setup_of(__import__("coterie").FedAvg())
    with pytest.raises(ConfigError, match=r"possible: (native, )?layers, layers\+workers, stacked, loop"):
        make_engine("vectorized", setup.task(), setup.federation(), "cpu", {"plan": "loop+graph", "workers": 2})
    with pytest.raises(ConfigError, match="tf32 needs a GPU"):
        make_engine("vectorized", setup.task(), setup.federation(), "cpu", {"precision": "tf32"})


def test_what_was_measured_is_said_and_remembered(tmp_path, monkeypatch):
    from coterie.engines import plans
    from coterie.engines.cache import private_folder

    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path))
    monkeypatch.setattr(plans, "_known", {})
    setup = setup_of(__import__("coterie").FedAvg(), model_settings={"hidden": 7})
    first = make_engine("vectorized", setup.task(), setup.federation(), "cpu", {})
    found = first.describe()
    assert found["plan"] in found["measured"]
    assert min(found["measured"].values()) > 0
    assert (private_folder() / "plans.json").exists()
    monkeypatch.setattr(plans, "_known", {})
    monkeypatch.setattr(plans, "_time", lambda engine, candidate: pytest.fail("measured again"))
    again = make_engine("vectorized", setup.task(), setup.federation(), "cpu", {})
    assert again.describe() == found


def test_equal_plans_are_chosen_by_preference():
    from coterie.engines.plans import Candidate, choose

    candidates = [Candidate(name, lambda: None) for name in ("layers", "stacked", "loop")]
    assert choose(candidates, {"layers": 1.04, "stacked": 1.0, "loop": 3.0}).name == "layers"
    assert choose(candidates, {"layers": 2.0, "stacked": 1.0, "loop": 1.1}).name == "stacked"


def test_a_plan_that_was_slow_for_a_moment_is_measured_again(monkeypatch):
    from coterie.engines import plans

    spent = {"native": [30.0, 2.0], "layers": [40.0, 5.0], "stacked": [14.0, 15.0], "loop": [60.0]}
    monkeypatch.setattr(plans, "_time", lambda engine, candidate: spent[candidate.name].pop(0))
    setup = setup_of(__import__("coterie").FedAvg())
    engine = make_engine("loop", setup.task(), setup.federation(), "cpu", {})
    found = plans._compare(engine, [plans.Candidate(name, lambda: None) for name in spent])
    assert found == {"native": 2.0, "layers": 5.0, "stacked": 14.0, "loop": 60.0}  # loop was far behind: measured once


def test_what_a_plan_does_only_once_is_not_measured(monkeypatch):
    from coterie.engines import plans

    now, seen = [0.0], set()
    monkeypatch.setattr(plans.time, "perf_counter", lambda: now[0])

    class Recording(Plan):
        def train(self, job):
            steps = job.counts.num_steps
            now[0] += 6e-6 if steps in seen else 100.0  # a graph is recorded for each number of steps
            seen.add(steps)

    setup = setup_of(__import__("coterie").FedAvg(), model=small_cnn, model_settings={})
    engine = make_engine("loop", setup.task(), setup.federation(), "cpu", {})
    made = Recording("recording", engine.plan.kernel, 1)
    assert plans._time(engine, plans.Candidate("recording", lambda: made)) == 2.0  # one client, three steps


def test_out_of_memory_continues_with_half_the_clients_and_says_so():
    setup = setup_of(__import__("coterie").FedAvg())
    from coterie.client.steps import train

    def run(fail_above):
        engine = make_engine("vectorized", setup.task(), setup.federation(), "cpu", {"precision": "float64"})
        ask = engine.plan.each

        def scarce(function, counts):
            if len(counts.sizes) > fail_above:
                raise torch.OutOfMemoryError("no more")
            ask(function, counts)

        engine.plan.each = scarce
        refs = torch.zeros(9, dtype=torch.int64)
        answers = torch.zeros(9, engine.task.layout.size, dtype=torch.float64)
        for chunk in engine.call(
            train, engine.everyone(), models=engine.initial().unsqueeze(0), refs=refs, rng=Rng.seed(1)
        ):
            answers[chunk.clients] = chunk.answer.params
        return engine, answers

    _, whole = run(99)
    engine, halved = run(3)
    assert torch.allclose(whole, halved, rtol=1e-12)
    assert any("out of memory with 9 clients" in note for note in engine.notes)
    assert not engine.failures
    from coterie.errors import EngineError

    with pytest.raises(EngineError, match="of one client does not fit"):
        run(0)


@pytest.mark.parametrize("work", WORKS)
def test_clients_as_one_batch_train_blocks_as_the_loop_does(work):
    expected = trained(loop, blocks, WORKS[work])
    for make in (folded(99), graph("folded", 4)):
        assert torch.allclose(trained(make, blocks, WORKS[work]), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [loop, folded(99)])
def test_a_split_without_samples_is_scored_also_by_networks_that_refuse_an_empty_batch(make):
    class Strict(nn.Module):
        def forward(self, x):
            assert len(x)
            return x

    generator = torch.Generator().manual_seed(0)
    data = {f"c{i}": (torch.randn(6, 1, 4, 4, generator=generator), torch.arange(6) % 3) for i in range(3)}
    federation = Federation.from_clients(data, num_classes=3, test=0.5, valid=0.0)
    setup = setup_of(
        __import__("coterie").FedAvg(),
        federation,
        model=lambda shape, outputs: nn.Sequential(Strict(), *blocks(shape, outputs)),
        model_settings={},
    )
    engine = make_engine("loop", setup.task(), federation, "cpu", {"precision": "float64"})
    block = engine.block_of(torch.arange(3), make(engine))
    for models in (
        engine.initial().repeat(3, 1),
        Models(engine.initial().unsqueeze(0), torch.zeros(3, dtype=torch.int64)),
    ):
        assert block.evaluate(models, "valid")["samples"].tolist() == [0, 0, 0]
        assert block.evaluate(models, "test")["samples"].tolist() == [3, 3, 3]


def test_layers_that_cannot_be_one_batch_are_refused():
    def kernel(*layers):
        return FoldedKernel.of(Network(nn.Sequential(*layers), torch.float64, torch.device("cpu")), cross_entropy)

    image = nn.Conv2d(1, 2, 3)
    assert kernel(image, nn.Flatten(), nn.Linear(8, 2)) is not None
    assert kernel(nn.Flatten(), nn.Linear(16, 2)) is None  # no images
    assert kernel(image, nn.Dropout(0.1), nn.Flatten(), nn.Linear(8, 2)) is None
    assert kernel(image, nn.PReLU(), nn.Flatten(), nn.Linear(8, 2)) is None
    assert kernel(nn.Conv2d(1, 2, 3, padding_mode="reflect", padding=1), nn.Flatten(), nn.Linear(8, 2)) is None
    assert kernel(image.requires_grad_(False), nn.Flatten(), nn.Linear(8, 2)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("work", ["plain", "momentum", "full", "proximal", "maml"])
@pytest.mark.parametrize("plan", ["folded", "folded+graph"])
def test_on_a_gpu_clients_as_one_batch_equal_the_loop(plan, work):
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    from coterie.client.steps import train

    setup = setup_of(__import__("coterie").FedAvg(), model=blocks, model_settings={}, work=SGD(lr=0.1, batch_size=5))
    results = []
    for engine_name, settings in (("loop", {}), ("vectorized", {"plan": plan})):
        settings = {"precision": "float32", **settings}
        engine = make_engine(engine_name, setup.task(), setup.federation(), "cuda", settings)
        found = torch.zeros(9, engine.task.layout.size)
        start, refs = engine.initial().unsqueeze(0), torch.zeros(9, dtype=torch.int64)
        for _ in range(2):  # the second time from the recording
            for chunk in engine.call(
                train, engine.everyone(), models=start, refs=refs, work=WORKS[work], rng=Rng.seed(1)
            ):
                found[chunk.clients] = chunk.answer.params.cpu()
        results.append(found)
    assert torch.allclose(results[0], results[1], rtol=1e-3, atol=1e-4)


PLANS_OF_GPUS = ["layers", "layers+graph", "streams+graph", "stacked", "stacked+graph", "loop+graph"]


@pytest.mark.gpu
@pytest.mark.parametrize("plan", PLANS_OF_GPUS)
@pytest.mark.parametrize("work", ["plain", "momentum", "full", "proximal", "maml"])
def test_on_a_gpu_every_plan_equals_the_loop_in_float32(plan, work):
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    from coterie.client.steps import train

    setup = setup_of(__import__("coterie").FedAvg(), model=small_cnn, model_settings={}, work=SGD(lr=0.1, batch_size=5))
    results = []
    for engine_name, settings in (("loop", {}), ("vectorized", {"plan": plan})):
        engine = make_engine(
            engine_name, setup.task(), setup.federation(), "cuda", {"precision": "float32", **settings}
        )
        refs = torch.zeros(9, dtype=torch.int64)
        found = torch.zeros(9, engine.task.layout.size)
        for _ in range(2):  # the second time from the recording
            start = engine.initial().unsqueeze(0)
            call = engine.call(train, engine.everyone(), models=start, refs=refs, work=WORKS[work], rng=Rng.seed(1))
            for chunk in call:
                found[chunk.clients] = chunk.answer.params.cpu()
        results.append(found)
    assert torch.allclose(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_what_the_compiler_cannot_do_is_done_without_it_and_said(monkeypatch):
    def refuse(function, **options):
        def fail(*arguments):
            raise RuntimeError("cannot compile this")

        return fail

    monkeypatch.setattr(torch, "compile", refuse)
    setup = setup_of(__import__("coterie").FedAvg())
    settings = {"plan": "stacked", "compile": True, "precision": "float64"}
    engine = make_engine("vectorized", setup.task(), setup.federation(), "cpu", settings)
    start = engine.initial().repeat(9, 1)
    with torch.no_grad():
        found = engine.block_of(torch.arange(9), engine.plan, Rng.seed(3)).train(start, WORKS["plain"])
    plain = make_engine("vectorized", setup.task(), setup.federation(), "cpu", settings | {"compile": False})
    with torch.no_grad():
        expected = plain.block_of(torch.arange(9), plain.plan, Rng.seed(3)).train(start, WORKS["plain"])
    assert torch.equal(found, expected)
    assert "cannot compile this" in engine.describe()["not_compiled"]
