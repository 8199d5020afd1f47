"""What every registered thing is tested for, from the registries; no list is kept by hand."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

import pytest
import torch

from coterie.client.work import WORK as LOCAL_WORK
from coterie.data.dataset import presets, source_class
from coterie.data.federation import Federation, Split
from coterie.data.scenario import Common, parts
from coterie.engines.settings import EngineSettings, RaySettings
from coterie.errors import ConfigError, Interrupted
from coterie.methods.base import Algorithm, algorithms
from coterie.nets.registry import models
from coterie.runs.folder import RunFolder
from coterie.runs.loop import Schedule
from coterie.settings import build, fields_of
from tests.helpers import assert_same, finished, outcome, ragged_federation, reserved_for, setup_of, trainer_of

METHODS = sorted(algorithms())
WITH_ALL_MEANS = ("coterie", "fedavg", "fesem", "md_icfl")
SMALLER = {"num_clusters": 2, "iterations": 5, "pseudo_samples": 3, "cluster_in": 2}


def make(name: str, **values: Any) -> Algorithm:
    """The method with two clusters, if it has clusters, and with little work for the server."""
    cls = algorithms()[name]
    return cls(**{field: value for field, value in SMALLER.items() if field in fields_of(cls)} | values)


def data_for(name: str) -> Federation:
    """What a run of the method has by default: with samples of the server's own, if it needs them."""
    return ragged_federation(reserve=reserved_for(make(name)))


# Choices that a method refuses, each with a test of its own. Those without fltrust average other things than whole
# models, or align them first.
REFUSED = {("ifca", "vote", True)} | {
    (name, "robust", "fltrust") for name in ("feddane", "fedper", "fedrep", "fedsgd", "fesem_ma", "scaffold")
}


def choices() -> list[Any]:
    """Every value of every setting of a method that is chosen from a list, but the defaults.

    All methods with a robust mean share its code: most of its values are tried with a few methods, with all others
    only among the slow tests.
    """
    found = []
    for name in METHODS:
        for field in fields_of(algorithms()[name]).values():
            values = get_args(field.kind) if get_origin(field.kind) is Literal else field.choices
            values = (True, False) if field.kind is bool else values
            for value in values:
                if value == field.default or (name, field.name, value) in REFUSED:
                    continue
                shared = field.name == "robust" and value not in ("median", "auto") and name not in WITH_ALL_MEANS
                marks = [pytest.mark.slow] if shared else []
                found.append(pytest.param(name, field.name, value, id=f"{name}-{field.name}-{value}", marks=marks))
    return found


@pytest.mark.parametrize("name", METHODS)
class TestAlgorithm:
    def test_deterministic_for_a_seed(self, name):
        one, other = finished(setup_of(make(name))), finished(setup_of(make(name)))
        assert_same(outcome(one), outcome(other))

    def test_another_seed_is_another_run(self, name):
        one = finished(setup_of(make(name)))
        other = finished(setup_of(make(name), schedule=Schedule(rounds=3, seed=1)))
        assert one.progress.rows[-1]["loss"] != other.progress.rows[-1]["loss"]

    @pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-9), ("float32", 1e-4)])
    def test_loop_equals_vectorized(self, name, precision, tolerance):
        one = outcome(finished(setup_of(make(name), engine="loop", engine_settings={"precision": precision})))
        for chunk in ({}, {"chunk": 1}, {"chunk": 4}) if precision == "float64" else ({},):
            other = outcome(finished(setup_of(make(name), engine_settings={"precision": precision, **chunk})))
            assert one["labels"] == other["labels"]
            assert one["ledger"] == other["ledger"]
            assert_same(one["state"], other["state"], exact=False, tolerance=tolerance)
            assert_same(one["memory"], other["memory"], exact=False, tolerance=tolerance)
            for row, fast_row in zip(one["rows"], other["rows"], strict=True):
                assert row["accuracy"]["macro"] == pytest.approx(fast_row["accuracy"]["macro"], abs=0.005)
                assert row["loss"]["micro"] == pytest.approx(fast_row["loss"]["micro"], rel=10 * tolerance)

    @pytest.mark.parametrize("stop_after", [1, 2])
    def test_resumed_equals_uninterrupted(self, name, stop_after, tmp_path):
        what = setup_of(make(name), schedule=Schedule(rounds=3, participation=0.6))
        whole = finished(what)
        folder = RunFolder.create(tmp_path, "run", "", {"run": {}})
        half = trainer_of(what, folder, should_stop=lambda: half.progress.round == stop_after)
        with pytest.raises(Interrupted):
            half.run()
        folder.append({"round": "a round that the checkpoint does not know"})
        rest = trainer_of(what, folder)
        checkpoint, problems = folder.load_checkpoint()
        assert checkpoint is not None
        assert not problems
        rest.restore(checkpoint)
        rest.run()
        folder.unlock()
        assert_same(outcome(whole), outcome(rest))
        assert [row["round"] for row in folder.rows()] == [1, 2, 3]

    def test_absent_clients_are_unchanged(self, name):
        trainer = trainer_of(setup_of(make(name)))
        trainer._start()
        engine, state = trainer.engine, trainer.state
        cohort = torch.tensor([1, 4, 5])
        absent = torch.tensor([0, 2, 3, 6, 7, 8])
        memory = {k: v.clone() for k, v in engine.memory_tensors().items()}
        engine.begin(1, "round")
        after = trainer.algorithm.round(state, engine, cohort, trainer._rng.at("test"))
        assert torch.equal(after.labels[absent], state.labels[absent])
        for key, tensor in engine.memory_tensors().items():
            before = memory.get(key, torch.zeros_like(tensor))
            assert torch.equal(tensor[absent], before[absent])

    def test_renaming_clients_renames_members_and_nothing_else(self, name):
        federation = data_for(name)
        renamed = federation.rename({old: f"hospital of {old}" for old in federation.names})
        one, other = finished(setup_of(make(name), federation)), finished(setup_of(make(name), renamed))
        assert other.federation.names[0].startswith("hospital of")
        assert_same(outcome(one), outcome(other))

    def test_the_order_of_clients_does_not_matter(self, name):
        federation = data_for(name)
        order = torch.tensor([4, 0, 8, 2, 6, 1, 7, 3, 5])
        one = finished(setup_of(make(name), federation))
        other = finished(setup_of(make(name), federation.select(order)))
        assert one.progress.rows[-1]["loss"]["micro"] == pytest.approx(
            other.progress.rows[-1]["loss"]["micro"], rel=1e-9
        )
        found, again = one.state.labels[order], other.state.labels
        assert torch.equal(found.unsqueeze(0) == found.unsqueeze(1), again.unsqueeze(0) == again.unsqueeze(1))

    def test_empty_cluster_keeps_its_center(self, name):
        if "num_clusters" not in fields_of(algorithms()[name]):
            pytest.skip("no clusters")
        # A repair, or a new clustering by the server, would fill it.
        off = {"guard": False, "clusterings": 1}
        off = {field: value for field, value in off.items() if field in fields_of(algorithms()[name])}
        off |= {"patience": 0} if name == "clove" else {}
        trainer = trainer_of(setup_of(make(name, num_clusters=3, **off)))
        trainer._start()
        if trainer.state.num_clusters < 3:
            pytest.skip("its clusters come later")
        centers = trainer.state.centers.clone()
        # Nobody is near it, nobody's loss is low with it.
        centers[2] = 100 * trainer._rng.at("far").normal(centers.shape[1])
        labels = trainer.state.labels.clone()
        labels[labels == 2] = 0
        state = replace(trainer.state, centers=centers, labels=labels)
        trainer.engine.begin(1, "round")
        after = trainer.algorithm.round(state, trainer.engine, trainer.engine.everyone(), trainer._rng.at("test"))
        assert torch.equal(after.centers[2], centers[2])
        assert bool(torch.isfinite(after.centers).all())
        assert not (after.labels == 2).any()

    def test_labels_are_clusters(self, name):
        trainer = finished(setup_of(make(name)))
        clusters = trainer.state.num_clusters or trainer.engine.num_clients
        for labels in trainer.progress.labels[1:]:
            assert ((labels >= 0) & (labels < clusters)).all()

    def test_test_labels_change_nothing(self, name):
        federation = data_for(name)
        used = torch.cat([federation.test.rows(i) for i in range(len(federation))])
        y = federation.y.clone()
        y[used] = (y[used] + 1) % 3
        one = finished(setup_of(make(name), federation))
        other = finished(setup_of(make(name), replace(federation, y=y)))
        for key in ("state", "plain", "memory", "labels"):
            assert_same(outcome(one)[key], outcome(other)[key])
        assert one.progress.rows[-1]["loss"] != other.progress.rows[-1]["loss"]

    def test_true_groups_change_nothing(self, name):
        federation = data_for(name)
        one = finished(setup_of(make(name), federation))
        other = finished(setup_of(make(name), replace(federation, groups=None)))
        for key in ("state", "plain", "memory", "labels"):
            assert_same(outcome(one)[key], outcome(other)[key])
        assert other.progress.rows[-1]["ari"] is None

    def test_every_client_is_met(self, name):
        trainer = finished(setup_of(make(name)))
        assert trainer.summary()["clients_met"] == 9

    def test_class_is_documented(self, name):
        cls = algorithms()[name]
        assert cls.paper
        assert cls.__doc__
        assert cls.key == name


@pytest.mark.parametrize(("name", "field", "value"), choices())
def test_every_choice_runs_alike_on_both_engines(name, field, value):
    method = make(name, **{field: value})
    # A pull towards the center, where there is one, so that its scale matters.
    method = replace(method, prox=0.5) if "prox" in fields_of(type(method)) else method
    loop, fast = (finished(setup_of(method, engine=engine)) for engine in ("loop", "vectorized"))
    one, other = outcome(loop), outcome(fast)
    assert one["labels"] == other["labels"]
    assert one["ledger"] == other["ledger"]
    assert_same(one["state"], other["state"], exact=False, tolerance=1e-9)
    private = method.personal(loop.state, loop.engine.everyone()).private
    for row in (*one["rows"], *other["rows"]):
        assert (row["loss"] is None) == private
        assert 0 <= row["accuracy"]["macro"] <= 1


SETTINGS = [
    *algorithms().values(),
    *parts().values(),
    *LOCAL_WORK.values(),
    *dict.fromkeys(source_class(preset.source) for preset in presets().values()),
    Common,
    EngineSettings,
    RaySettings,
    Schedule,
]


@pytest.mark.parametrize("cls", SETTINGS, ids=lambda cls: cls.__name__)
class TestSettings:
    def test_every_field_has_default_help_and_bound(self, cls):
        fields = fields_of(cls)
        assert set(fields) == {item.name for item in dataclasses.fields(cls)}
        for field in fields.values():
            assert field.default is not dataclasses.MISSING
            assert len(field.help) > 5
            if field.kind in (int, float):
                assert field.bounds, f"{field.name} has no bound"

    def test_one_bad_value_gives_one_sentence(self, cls):
        for field in fields_of(cls).values():
            if field.kind is str and not field.choices:
                continue
            with pytest.raises(ConfigError) as caught:
                build(cls, {field.name: object()}, "algorithm")
            message = str(caught.value)
            assert message.startswith(f"{field.name} of {cls.__name__} must be ")
            assert message.count("\n") == 0


IMAGES = ragged_federation(5, shape=(1, 28, 28))
SMALL = {"mclr", "mlp", "lenet", "leaf-cnn"}
LARGE = {"resnet18", "mobilenetv2"}  # a minute each


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in sorted(models())]
)
class TestModel:
    def test_loop_equals_vectorized(self, name):
        federation = ragged_federation(3, shape=(3, 32, 32), samples=6) if name not in SMALL else IMAGES
        method = make("fedavg")
        made = []
        for engine, plan in (("loop", "auto"), ("vectorized", "stacked"), ("vectorized", "auto")):
            setup = setup_of(
                method,
                federation,
                model=name,
                model_settings={},
                engine=engine,
                engine_settings={"precision": "float64", "plan": plan},
                schedule=Schedule(rounds=1),
                work=replace(setup_of(method).work, epochs=1, steps=1, lr=0.01),
            )
            made.append(finished(setup))
        assert made[1].engine.describe()["plan"] == "stacked"
        for other in made[1:]:
            assert_same(made[0].state.tensors(), other.state.tensors(), exact=False, tolerance=1e-9)


@pytest.mark.parametrize("name", ["rotated-digits", "digits", "synthetic"])
def test_embedded_datasets_deal(name):
    from coterie.runs.experiment import merge, resolve

    made = [resolve(merge({"run": {"dataset": name, "seed": seed}})).federation() for seed in (0, 0, 1)]
    assert isinstance(made[0], Federation)
    assert isinstance(made[0].train, Split)
    assert made[0].digest() == made[1].digest() != made[2].digest()
