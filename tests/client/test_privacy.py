"""Clip and noise at the clients: what changes, by how much, what is counted, and that every engine does the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coterie.client.block import Models
from coterie.client.privacy import NOISED, SCORES, Released, fresh, protected, seeded
from coterie.errors import ConfigError
from coterie.methods.base import algorithms
from coterie.methods.coterie import Coterie
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedem import FedEM
from coterie.methods.fesem import FeSEM
from coterie.methods.scaffold import Scaffold
from coterie.runs.loop import Schedule
from tests.helpers import WORK, assert_same, finished, outcome, setup_of, trainer_of

CLIPPED = replace(WORK, update_clip=0.3, update_noise=0.05)


def no_draw(name, client, count):
    raise AssertionError("no noise was asked for")


def by_key(name, client, count):
    return seeded(lambda purpose: torch.arange(len(purpose), len(purpose) + 50))(name, client, count)


def test_an_update_is_clipped_and_keeps_its_direction():
    table = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    answer = {"params": torch.tensor([[4.0, 5.0], [0.3, 0.4]]), "samples": torch.tensor([7, 8])}
    found = protected(answer, Models(table, torch.tensor([0, 1])), 1.0, 0.0, no_draw)
    assert torch.allclose(found["params"], torch.tensor([[1.6, 1.8], [0.3, 0.4]]))
    assert found["samples"] is answer["samples"]


def test_of_several_models_the_chosen_one_counts():
    sent = Models(torch.tensor([[0.0, 0.0], [10.0, 10.0]]), torch.tensor([[0, 1]]))
    answer = {"params": torch.tensor([[13.0, 14.0]]), "choice": torch.tensor([1])}
    assert torch.allclose(protected(answer, sent, 1.0, 0.0, no_draw)["params"], torch.tensor([[10.6, 10.8]]))
    both = {"params": torch.tensor([[[3.0, 4.0], [13.0, 14.0]]])}
    expected = torch.tensor([[[0.6, 0.8], [10.6, 10.8]]])
    assert torch.allclose(protected(both, sent, 1.0, 0.0, no_draw)["params"], expected)


def test_a_signature_is_one_vector_and_keeps_its_type():
    answer = {"signature": torch.full((1, 4, 25), 2.0, dtype=torch.float16), "counts": torch.tensor([[1, 2]])}
    found = protected(answer, None, 1.0, 0.0, no_draw)
    assert found["signature"].dtype == torch.float16
    assert found["signature"].float().norm().item() == pytest.approx(1.0, rel=1e-3)
    assert torch.equal(found["counts"], answer["counts"])
    both = protected(answer | {"contrast": 2 * answer["signature"]}, None, 1.0, 0.0, no_draw)
    lengths = [both[name].float().norm().item() for name in ("signature", "contrast")]
    assert lengths == pytest.approx([0.2**0.5, 0.8**0.5], rel=1e-3)


@pytest.mark.parametrize("draw", [by_key, fresh])
def test_noise_has_the_deviation_that_was_asked_for(draw):
    answer = {"params": torch.zeros(2, 20001, dtype=torch.float64), "gradient": torch.zeros(2, 20001)}
    found = protected(answer, None, 2.0, 0.5, draw)
    for name in ("params", "gradient"):
        assert found[name].std(1) == pytest.approx([1.0, 1.0], abs=0.03)
        assert found[name].mean(1) == pytest.approx([0.0, 0.0], abs=0.04)
    drawn = torch.stack([*found["params"], *found["gradient"].double()])
    assert torch.allclose(torch.corrcoef(drawn), torch.eye(4, dtype=torch.float64), atol=0.04)


def test_noise_of_sites_cannot_be_repeated_and_that_of_simulations_can():
    assert not torch.equal(fresh("params", 0, 9), fresh("params", 0, 9))
    assert torch.equal(by_key("params", 0, 9), by_key("params", 0, 9))


def test_what_was_sent_is_counted_by_client():
    released = Released()
    row = torch.zeros(1, 2)
    released.record({"params": row, "samples": row}, [0], [], False)
    released.record({"params": torch.zeros(1, 3, 2), "choice": row}, [2], [], False)
    released.record({"signature": torch.zeros(1, 3, 2), "contrast": torch.zeros(1, 3, 2)}, [0], [], False)
    released.record({}, [2], [1], False)  # nothing was sent, and one failed
    released.record({"accuracy": row, "params": row}, [0], [], True)
    assert released.counts == [2, 1, 3]
    assert (released.noised, released.exact) == ({"params", "signature", "contrast"}, {"samples", "choice", SCORES})
    assert Released.of(released.plain()) == released
    assert Released.of({}) == Released()


@pytest.mark.parametrize("algorithm", [FedAvg(), FeSEM(num_clusters=2), Coterie(), FedEM(), Scaffold()])
def test_engines_agree_with_noise(algorithm):
    runs = [finished(setup_of(algorithm, work=CLIPPED, engine=engine)) for engine in ("loop", "vectorized")]
    one, other = (trainer.state.tensors() for trainer in runs)
    for name, tensor in one.items():
        assert torch.allclose(tensor.double(), other[name].double(), rtol=1e-6, atol=1e-9), name
    assert runs[0].engine.released == runs[1].engine.released


def test_without_noise_a_loose_clip_changes_nothing_that_matters():
    plain, loose = (finished(setup_of(FedAvg(), work=work)) for work in (WORK, replace(WORK, update_clip=1e6)))
    assert torch.allclose(plain.state.centers, loose.state.centers, rtol=1e-9)
    tight = finished(setup_of(FedAvg(), work=replace(WORK, update_clip=1e-3)))
    moved = tight.state.centers[0] - tight.engine.initial()
    assert 0 < moved.norm() <= 3 * 1e-3 * (1 + 1e-9)  # three rounds


def test_the_summary_says_what_was_covered():
    work = replace(WORK, update_clip=0.3, update_noise=0.05)
    found = finished(setup_of(FedAvg(), work=work, schedule=Schedule(rounds=3, participation=0.5))).summary()["privacy"]
    expected = {"clip": 0.3, "noise": 0.05, "participation": 0.5, "rounds": 3, "noised": ["params"]}
    assert found == expected | {"releases": found["releases"], "exact": ["samples", SCORES]}
    assert 1 <= found["releases"] <= 3
    assert finished(setup_of(FedAvg())).summary()["privacy"] is None
    changed = finished(setup_of(Scaffold(), work=work)).summary()["privacy"]
    assert (changed["releases"], changed["noised"]) == (6, ["change", "params"])


@pytest.mark.parametrize("key", sorted(algorithms()))
def test_every_method_sends_models_with_noise_or_says_what_it_sends(key):
    """What is a model by its size has noise, whatever the method calls it."""
    algorithm = algorithms()[key]()
    trainer = trainer_of(setup_of(algorithm, work=CLIPPED, schedule=Schedule(rounds=1)))
    size, seen = trainer.engine.task.layout.num_parameters, set()
    ask = trainer.engine.ask

    def listening(request, positions):
        for reply in ask(request, positions):
            if trainer.engine.phase != "evaluate":
                seen.update(name for name, tensor in reply.answer.items() if tensor.shape[-1:] == (size,))
            yield reply

    trainer.engine.ask = listening
    trainer.run()
    assert seen <= set(NOISED)
    found = trainer.summary()["privacy"]
    assert bool(found["noised"]) == bool(found["releases"]) == (key != "local")


def test_counts_survive_a_stop(tmp_path):
    whole = trainer_of(setup_of(FeSEM(num_clusters=2), work=CLIPPED))
    whole.run()
    resumed = trainer_of(setup_of(FeSEM(num_clusters=2), work=CLIPPED, schedule=Schedule(rounds=3)))
    resumed.load(whole.snapshot(), whole.progress.rows)
    assert resumed.engine.released == whole.engine.released
    assert_same(outcome(resumed), outcome(whole))


def test_noise_needs_a_clip():
    with pytest.raises(ConfigError, match="update_clip"):
        setup_of(FedAvg(), work=replace(WORK, update_noise=0.1)).task()


def test_running_statistics_are_refused():
    from torch import nn

    def normed(input_shape, outputs):
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, outputs))

    with pytest.raises(ConfigError, match="GroupNorm"):
        finished(setup_of(FedAvg(), work=CLIPPED, model=normed, model_settings={}))
