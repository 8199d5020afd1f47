"""What the engines in this process share: failures, memory, chunks, settings."""

from __future__ import annotations

import pytest
import torch

from coterie.client.batches import StepCounts
from coterie.client.steps import Answer, client_step, train
from coterie.client.work import SGD
from coterie.engines import make_engine
from coterie.engines.base import available_memory, resolve_device
from coterie.errors import ConfigError, EngineError, MethodError, UnknownName
from coterie.methods.fedavg import FedAvg
from coterie.randomness import Rng
from tests.helpers import finished, ragged_federation, setup_of


def engine_of(name="vectorized", **settings):
    setup = setup_of(FedAvg(), engine=name, engine_settings=settings)
    return make_engine(setup.engine, setup.task(), setup.federation(), "cpu", setup.engine_settings)


@client_step
def number_of(block, models, work):
    return Answer(number=block.clients.double() * 10)


@client_step
def spoil(block, models, work):
    """Client 3 answers NaN, client 5 infinity."""
    value = torch.ones(len(block), 4)
    value[block.clients == 3] = torch.nan
    value[block.clients == 5, 2] = torch.inf
    return Answer(value=value)


@client_step
def raise_at_four(block, models, work):
    if (block.clients == 4).any():
        raise ZeroDivisionError("four")
    return Answer(value=torch.ones(len(block)))


@client_step
def raise_everywhere(block, models, work):
    raise ZeroDivisionError("all")


@client_step
def wrong_shape(block, models, work):
    return Answer(value=torch.ones(len(block) + 1))


@client_step
def count_calls(block, models, work):
    count = block.memory.get("calls", torch.zeros(len(block), 1)) + 1
    block.memory.put("calls", count)
    return Answer(count=count[:, 0])


@pytest.mark.parametrize("name", ["loop", "vectorized"])
class TestCall:
    def test_every_client_of_the_cohort_answers_once(self, name):
        engine = engine_of(name, chunk=2)
        cohort = torch.tensor([7, 1, 4, 2, 8])
        seen = {}
        for chunk in engine.call(number_of, cohort, rng=Rng.seed(0)):
            assert torch.equal(cohort[chunk.positions], chunk.clients)
            seen |= dict(zip(chunk.clients.tolist(), chunk.answer.number.tolist(), strict=True))
        assert seen == {c: 10.0 * c for c in cohort.tolist()}

    def test_answers_that_are_not_finite_are_failures(self, name):
        engine = engine_of(name)
        engine.begin(2, "round")
        clients = torch.cat([chunk.clients for chunk in engine.call(spoil, engine.everyone(), rng=Rng.seed(0))])
        assert sorted(clients.tolist()) == [0, 1, 2, 4, 6, 7, 8]
        assert sorted(f.client for f in engine.failures) == [engine.names[3], engine.names[5]]
        assert {(f.round, f.reason) for f in engine.failures} == {(2, "the answer is not finite")}

    def test_one_client_that_raises_does_not_stop_the_others(self, name):
        engine = engine_of(name)
        chunks = list(engine.call(raise_at_four, engine.everyone(), rng=Rng.seed(0)))
        assert sorted(torch.cat([c.clients for c in chunks]).tolist()) == [0, 1, 2, 3, 5, 6, 7, 8]
        (failure,) = engine.failures
        assert failure.client == engine.names[4]
        assert failure.reason.startswith("ZeroDivisionError: four (")
        assert failure.reason.endswith("test_in_process.py, line 41)")

    def test_wrong_shape_is_the_steps_fault(self, name):
        engine = engine_of(name)
        with pytest.raises(
            MethodError, match=r"wrong_shape \(.*test_in_process.py, line 50\) answered 'value' of shape"
        ):
            list(engine.call(wrong_shape, engine.everyone(), rng=Rng.seed(0)))

    def test_memory_stays_with_the_client(self, name):
        engine = engine_of(name, chunk=3)
        list(engine.call(count_calls, torch.tensor([0, 5]), rng=Rng.seed(0)))
        found = {}
        for chunk in engine.call(count_calls, torch.tensor([5, 6]), rng=Rng.seed(0)):
            found |= dict(zip(chunk.clients.tolist(), chunk.answer["count"].tolist(), strict=True))
        assert found == {5: 2.0, 6: 1.0}
        other = engine_of(name)
        other.load_memory(engine.memory_tensors())
        again = {}
        for chunk in other.call(count_calls, torch.tensor([0, 5, 8]), rng=Rng.seed(0)):
            again |= dict(zip(chunk.clients.tolist(), chunk.answer["count"].tolist(), strict=True))
        assert again == {0: 2.0, 5: 3.0, 8: 1.0}

    def test_the_same_rng_gives_the_same_answers(self, name):
        engine = engine_of(name)
        zeros = torch.zeros(9, dtype=torch.int64)
        table = engine.initial().unsqueeze(0)

        def ask(rng):
            chunks = list(engine.call(train, engine.everyone(), models=table, refs=zeros, rng=rng))
            return torch.cat([c.answer.params for c in chunks])

        assert torch.equal(ask(Rng.seed(1)), ask(Rng.seed(1)))
        assert not torch.equal(ask(Rng.seed(1)), ask(Rng.seed(2)))


def test_a_step_that_fails_everywhere_is_an_error():
    engine = engine_of()
    with pytest.raises(EngineError, match="failed at every client: ZeroDivisionError: all"):
        list(engine.call(raise_everywhere, engine.everyone(), rng=Rng.seed(0)))


def test_models_and_refs_go_together():
    engine = engine_of()
    with pytest.raises(ConfigError, match="models and refs must be given together"):
        list(engine.call(train, engine.everyone(), models=engine.initial().unsqueeze(0), rng=Rng.seed(0)))


def test_diverging_run_goes_on_and_says_why():
    setup = setup_of(FedAvg(), engine_settings={}, work=setup_of(FedAvg()).work.__class__(lr=1e30, epochs=3))
    trainer = finished(setup)
    summary = trainer.summary()
    assert summary["failures"] == 27
    assert "is lr too large?" in summary["notes"][0]
    assert torch.isfinite(trainer.state.centers).all()


def test_draw_depends_on_keys_not_on_places():
    engine = engine_of()
    cohort = engine.draw(Rng.seed(4), 3)
    assert len(set(cohort.tolist())) == 3
    assert cohort.tolist() == sorted(cohort.tolist())
    chosen = {engine.names[i] for i in cohort}
    order = torch.tensor([8, 3, 1, 0, 2, 7, 6, 5, 4])
    setup = setup_of(FedAvg(), ragged_federation().select(order))
    moved = make_engine("vectorized", setup.task(), setup.federation(), "cpu")
    assert {moved.names[i] for i in moved.draw(Rng.seed(4), 3)} == chosen
    assert torch.equal(engine.draw(Rng.seed(4), 99), engine.everyone())


def test_memory_is_refused_with_the_number():
    engine = engine_of()
    with pytest.raises(ConfigError, match=r"A bank of models needs \d+\.\d GB, and"):
        engine.require_memory(10 * available_memory(engine.device), "A bank of models")


def test_what_torch_keeps_on_a_gpu_counts_as_free(monkeypatch):
    kept = [6]

    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 - sum(kept), 10))
    assert available_memory(torch.device("cuda")) == 10


@pytest.mark.gpu
def test_a_second_engine_has_the_memory_of_the_first():
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    setup = setup_of(FedAvg())
    budgets = []
    for _ in range(3):
        engine = make_engine("vectorized", setup.task(), setup.federation(), "cuda", {})
        budgets.append(engine.settings.memory)
        used = torch.empty(budgets[0] << 20, dtype=torch.uint8, device="cuda")  # half of what was free
        del engine, used
    assert min(budgets) > 0.9 * budgets[0]


def test_a_busy_gpu_is_said(monkeypatch):
    from types import SimpleNamespace

    from coterie.engines import in_process

    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=140 << 30), raising=False
    )
    gpu = torch.device("cuda")
    assert in_process._shared(100 << 10, gpu) is None
    assert "only 6.0 of 140 GB are free on cuda" in in_process._shared(6 << 10, gpu)


def test_bad_settings():
    setup = setup_of(FedAvg())
    task = setup.task()
    with pytest.raises(UnknownName, match="no engine 'vectorised'. Did you mean 'vectorized'"):
        make_engine("vectorised", task, setup.federation())
    with pytest.raises(ConfigError, match="chunk of EngineSettings must be an int >= 1 or None. Got 0 instead"):
        engine_of(chunk=0)
    with pytest.raises(UnknownName, match="Did you mean 'precision'"):
        engine_of(precison="float64")
    with pytest.raises(ConfigError, match="device must be 'auto', 'cpu' or 'cuda'. Got 'tpu' instead"):
        resolve_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch sees no GPU here; use --device cpu"):
            resolve_device("cuda")


@pytest.mark.parametrize(("batch", "expected"), [(20, 1), (1_000_000, 2)])
def test_one_thread_trains_a_small_network_alone(batch, expected):
    torch.set_num_threads(2)
    try:
        work, seen = SGD(batch_size=batch), []
        setup = setup_of(FedAvg(), engine="loop", work=work)
        engine = make_engine("loop", setup.task(), setup.federation(), "cpu", {})
        engine.plan.each(lambda which: seen.append(torch.get_num_threads()), StepCounts(torch.tensor([5]), work))
        assert seen == [expected]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(("groups", "tuned"), [(1, True), (4, False)])
def test_depthwise_convolutions_are_not_tuned(groups, tuned):
    def network(input_shape, num_outputs):
        layers = [torch.nn.Conv2d(1, 4, 3), torch.nn.Conv2d(4, 4, 3, padding=1, groups=groups), torch.nn.Flatten()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(16, num_outputs))

    setup = setup_of(FedAvg(), model=network, model_settings={})
    assert make_engine("loop", setup.task(), setup.federation(), "cpu", {})._tuned is tuned
